"""``POST /webhooks/<account>``: a provider or a gateway says that there is news of a batch.

A delivery is believed only so far that it is worth a look: of its content nothing but the batch's name goes to the
``WebhookSink``. (A status in it is looked at only to leave progress reports alone.) What the batch's state is, a poll
finds out. So a delivery that is lost, late or repeated changes no result, and a captured one cannot be used to make us
fetch again and again.

===========================================  ======================================================================
no such account, or none with a secret       404
too many at one time, or in one second       503: the provider delivers it again
headers missing or odd                       400
older or newer than 5 minutes                400: a captured delivery must not be worth keeping
more than 64 KiB                             413
not signed by a secret of ours               401
signed, but names no batch                   400
the same delivery before                     200, without effect
its status says that the batch still runs    200, without effect
the name was handed on                       200, whether or not anybody knew the batch
the sink could not take it now               503, so that the provider delivers it again
===========================================  ======================================================================

Who has not proved himself learns nothing of the body's form. How the proof goes is in ``webhookauth``.

Gemini's deliveries are ``{"type": "batch.succeeded", "version", "timestamp", "data": {"id", ...}}``, signed by the
project's secret as Standard Webhooks say (ai.google.dev, Webhooks). Whether ``data.id`` begins with ``batches/`` as the
API's own names do is not said: it is put before the name unless it is there. The webhooks that a single Gemini job can
name are signed by Google's key instead (a JWT); those are refused here.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from batchferry.domain.errors import BatchferryError
from batchferry.ports import Clock
from batchferry.server.answers import json_response
from batchferry.server.webhookauth import Auth, Outcome, Refused

PATH = "/webhooks/{account}"
PATH_WITH_SECRET = "/webhooks/{account}/{secret}"  # noqa: S105 - a place for one
PATHS = (PATH, PATH_WITH_SECRET)
"""Both are there for every account, so that an address does not tell how an account's sender proves himself."""
MAX_BODY_BYTES = 64 * 1024
"""A delivery of a batch event is some 150 bytes."""
MAX_CONCURRENT = 64
"""Deliveries being answered at one time: with their bodies, 4 MiB at most."""
MAX_PER_S = 1000.0
"""Deliveries that are looked at in a second of real time, a second's worth at once: a flood must leave time to the
others."""
BUSY_RETRY_S = 30
"""Said to whoever is turned away."""
MAX_REMEMBERED_IDS = 300_000
"""Deliveries by which repetitions are known, some 40 MB when full: 500 a second for the ten minutes that a signature
is good for. Only signed ones are remembered. The ones not met for longest are forgotten first."""
BODY_LIMIT_S = 10.0
"""A client that sends its body more slowly is let go; real seconds, whatever the service's clock."""
SINK_LIMIT_S = 5.0
"""The provider waits a few seconds for its answer."""

_BATCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,255}")


class WebhookSink(Protocol):
    """Who looks after batches."""

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        """Look at this batch of this account soon.

        True: it will be. False: it was just looked at. None: nobody here waits for such a batch.

        May be called with any name of a batch that somebody with the secret made up, hundreds of times a second, so its
        work must not grow with the number of batches; and may be cancelled after ``SINK_LIMIT_S``.

        Raises:
            BatchferryError: it cannot be noted now; the provider is asked to deliver again.
        """
        ...


class Tally(Protocol):
    """Who is told what became of deliveries; ``account`` None: a name that somebody made up."""

    def taken(self, account: str, outcome: Outcome) -> None:
        """A delivery was believed."""
        ...

    def refused(self, account: str | None, outcome: Outcome) -> None:
        """A delivery was not."""
        ...


@dataclass(frozen=True, slots=True)
class Hook:
    """One account's webhook: who is believed, and where the batch is named."""

    auth: Auth
    batch_id_field: tuple[str, ...] = ("data", "id")
    status_field: tuple[str, ...] = ("type",)
    batch_id_prefix: str = ""
    running_statuses: frozenset[str] = frozenset()
    alarm_rejected: int = 5
    alarm_quiet_s: float = 900.0


class Deliveries:
    """The deliveries that were acted upon, as far as they are remembered."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def is_new(self, key: bytes, now_s: float, lasts_s: float) -> bool:
        """Note it for so long; whether it was not known."""
        until = self._until.get(key)
        if until is not None and until > now_s:
            self._until.move_to_end(key)
            return False
        self._until[key] = now_s + lasts_s
        self._until.move_to_end(key)
        if len(self._until) > self._max_ids:
            self._until.popitem(last=False)
        while self._until and next(iter(self._until.values())) <= now_s:
            self._until.popitem(last=False)
        return True

    def forget(self, key: bytes) -> None:
        """It had no effect after all: its repetition is welcome."""
        self._until.pop(key, None)


class Gate:
    """How many deliveries are looked at: at one time, and in a second."""

    def __init__(self, max_concurrent: int, max_per_s: float) -> None:
        self._max_concurrent = max_concurrent
        self._max_per_s = max_per_s
        self._running = 0
        self._tokens = max_per_s
        self._at_s = 0.0

    def enter(self) -> None:
        """Take a place.

        Raises:
            Refused: there is none.
        """
        now_s = asyncio.get_running_loop().time()
        self._tokens = min(self._max_per_s, self._tokens + (now_s - self._at_s) * self._max_per_s)
        self._at_s = now_s
        if self._running >= self._max_concurrent or self._tokens < 1.0:
            raise Refused(
                503, Outcome.TOO_MANY, "too many deliveries: deliver it again", {"Retry-After": str(BUSY_RETRY_S)}
            )
        self._tokens -= 1.0
        self._running += 1

    def leave(self) -> None:
        """Give the place back."""
        self._running -= 1


class Receiver:
    """Answers deliveries for the accounts that have a hook, by account name."""

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        sink: WebhookSink,
        tally: Tally,
        clock: Clock,
        deliveries: Deliveries,
        gate: Gate,
    ) -> None:
        self._hooks = dict(hooks)
        self._sink = sink
        self._tally = tally
        self._clock = clock
        self._deliveries = deliveries
        self._gate = gate

    async def receive(self, request: Request) -> Response:
        """Answer one delivery.

        Raises:
            Refused: it is not taken.
        """
        name = request.path_params["account"]
        hook = self._hooks.get(name)
        account = None if hook is None else name  # what somebody made up is neither logged nor counted by itself
        try:
            self._gate.enter()
            try:
                if hook is None:
                    raise Refused(404, Outcome.UNKNOWN_ACCOUNT, "no account of this name takes webhooks here")
                outcome = await self._take(request, name, hook)
            finally:
                self._gate.leave()
        except Refused as refused:
            self._tally.refused(account, refused.outcome)
            raise
        self._tally.taken(name, outcome)
        return json_response({"status": "ok"})

    async def _take(self, request: Request, account: str, hook: Hook) -> Outcome:
        now = self._clock.now()
        proof = hook.auth.begin(request, request.path_params.get("secret"), now)
        body = await _body(request)
        proof.check(body)
        named, status = _news_in(body, hook)
        key = _key(account, proof.delivery_id, body)
        if not self._deliveries.is_new(key, now.timestamp(), proof.lasts_s):
            return Outcome.DUPLICATE
        if status in hook.running_statuses:
            return Outcome.STILL_RUNNING
        try:
            async with asyncio.timeout(SINK_LIMIT_S):
                is_poked = await self._sink.poke(account, named)
        except (BatchferryError, TimeoutError):
            self._deliveries.forget(key)
            raise Refused(503, Outcome.NOT_TAKEN, "this cannot be noted now: deliver it again") from None
        except BaseException:
            self._deliveries.forget(key)
            raise
        if is_poked is None:
            return Outcome.UNKNOWN_BATCH
        return Outcome.POKED if is_poked else Outcome.NO_EFFECT


def _key(account: str, delivery_id: str | None, body: bytes) -> bytes:
    """What a repetition has in common with the first: its id or its body, for one account."""
    kind, name = (b"body", body) if delivery_id is None else (b"id", delivery_id.encode())
    return hashlib.blake2b(kind + b"\0" + account.encode() + b"\0" + name, digest_size=12).digest()


async def _body(request: Request) -> bytes:
    """The raw body."""
    too_large = Refused(413, Outcome.TOO_LARGE, f"a delivery has at most {MAX_BODY_BYTES} bytes")
    stated = request.headers.get("content-length", "0")
    if not (stated.isascii() and stated.isdigit()) or int(stated[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except (TimeoutError, ClientDisconnect):
        raise Refused(408, Outcome.TOO_SLOW, f"the body did not come within {BODY_LIMIT_S:g} s") from None
    return bytes(body)


def _news_in(body: bytes, hook: Hook) -> tuple[str, str]:
    """The batch's name, and the last word of the status in small letters; all else is only its sender's word."""
    try:
        event = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Refused(400, Outcome.BAD_BODY, "the body is not JSON") from None
    named = _at(event, hook.batch_id_field)
    bare = named.removeprefix(hook.batch_id_prefix) if isinstance(named, str) else ""
    if not _BATCH.fullmatch(bare):
        raise Refused(400, Outcome.BAD_BODY, f"the body names no batch in {'.'.join(hook.batch_id_field)}")
    status = _at(event, hook.status_field)
    return hook.batch_id_prefix + bare, status.rpartition(".")[2].lower() if isinstance(status, str) else ""


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
