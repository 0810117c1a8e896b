"""``POST /webhooks/<account>``: a provider says that there is news of a batch.

A delivery is believed only so far that it is worth a look: of its content nothing but ``data.id`` is read, and that
name goes to the ``WebhookSink``. What the batch's state is, a poll finds out. So a delivery that is lost, late or
repeated changes no result, and a captured one cannot be used to make us fetch again and again.

=======================================  ==========================================================================
no such account, or none with a secret   404
headers missing or odd                   400
older or newer than 5 minutes            400: a captured delivery must not be worth keeping
more than 64 KiB                         413
no signature of ours over the raw body   401
signed, but names no batch               400
``webhook-id`` seen before               200, without effect
the name was handed on                   200, whether or not anybody knew the batch
the sink could not take it now           503, so that the provider delivers it again
=======================================  ==========================================================================

The scheme is Standard Webhooks, as OpenAI uses it: HMAC-SHA256 over ``{id}.{timestamp}.{raw body}``, base64, one or
several signatures in one header (while a secret is being replaced). Providers deliver at least once, for up to
three days, and take any 2xx within a few seconds for an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

import orjson
from standardwebhooks import Webhook
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from batchferry.domain.errors import BatchferryError
from batchferry.ports import Clock, Telemetry
from batchferry.server.api import guarded_route, json_response
from batchferry.telemetry.catalogue import OTHER

PATH = "/webhooks/{account}"
TOLERANCE_S = 300.0
"""How far a delivery's timestamp may be from our clock, both ways (the official client's value)."""
MAX_BODY_BYTES = 64 * 1024
"""A delivery of a batch event is some 150 bytes."""
MAX_SIGNATURES = 16
MAX_REMEMBERED_IDS = 10_000
"""Delivery ids by which repetitions are known; the ones not met for longest are forgotten first."""
BODY_LIMIT_S = 10.0
"""A client that sends its body more slowly is let go; real seconds, whatever the service's clock."""
SINK_LIMIT_S = 5.0
"""The provider waits a few seconds for its answer."""
TELL_PAUSE_S = 60.0
"""Of one account and reason a refusal is logged once in so long; the metric counts them all."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")  # no full stop: it separates the parts of what is signed
_TIMESTAMP = re.compile(r"[1-9][0-9]{0,11}")  # as it was signed; no second spelling of the same number
_BATCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,255}")


class WebhookSink(Protocol):
    """Who looks after batches."""

    async def poke(self, account: str, provider_batch_id: str) -> bool:
        """Look at this batch of this account soon; whether there was reason to.

        False for a batch nobody here waits for, or one that was just looked at. May be called with any name of a
        batch that somebody with the secret made up, and may be cancelled after ``SINK_LIMIT_S``.

        Raises:
            BatchferryError: it cannot be noted now; the provider is asked to deliver again.
        """
        ...


class Outcome(StrEnum):
    """What became of a delivery."""

    POKED = "poked"
    NO_EFFECT = "no_effect"
    DUPLICATE = "duplicate"
    UNKNOWN_ACCOUNT = "unknown_account"
    BAD_HEADERS = "bad_headers"
    OUT_OF_TIME = "out_of_time"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    BAD_SIGNATURE = "bad_signature"
    BAD_BODY = "bad_body"
    NOT_TAKEN = "not_taken"


class _Refused(HTTPException):
    def __init__(self, status_code: int, outcome: Outcome, message: str) -> None:
        super().__init__(status_code, message)
        self.outcome = outcome


class _Deliveries:
    """The deliveries that were acted upon, as far as they are remembered."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._ids: OrderedDict[tuple[str, str], None] = OrderedDict()

    def is_new(self, account: str, delivery_id: str) -> bool:
        """Note it; whether it was not known."""
        key = (account, delivery_id)
        is_new = key not in self._ids
        self._ids[key] = None
        self._ids.move_to_end(key)
        if len(self._ids) > self._max_ids:
            self._ids.popitem(last=False)
        return is_new

    def forget(self, account: str, delivery_id: str) -> None:
        """It had no effect after all: its repetition is welcome."""
        self._ids.pop((account, delivery_id), None)


def webhook_route(
    keys: Mapping[str, bytes],
    sink: WebhookSink,
    *,
    clock: Clock,
    telemetry: Telemetry,
    max_remembered_ids: int = MAX_REMEMBERED_IDS,
) -> Route:
    """The route for the accounts that have a key (see ``AccountSettings.webhook_key``)."""
    receiver = _Receiver(keys, sink, clock, telemetry, _Deliveries(max_remembered_ids))
    return guarded_route(PATH, receiver.receive, "POST", telemetry)


class _Receiver:
    def __init__(
        self,
        keys: Mapping[str, bytes],
        sink: WebhookSink,
        clock: Clock,
        telemetry: Telemetry,
        deliveries: _Deliveries,
    ) -> None:
        self._signers = {account: Webhook(key) for account, key in keys.items()}
        self._sink = sink
        self._clock = clock
        self._telemetry = telemetry
        self._deliveries = deliveries
        self._told_at: dict[tuple[str, Outcome], float] = {}

    async def receive(self, request: Request) -> Response:
        """Answer one delivery."""
        account = request.path_params["account"]
        signer = self._signers.get(account)
        if signer is None:
            account = OTHER  # a name that somebody made up is neither logged nor counted by itself
        try:
            outcome = await self._take(request, account, signer)
        except _Refused as refused:
            self._count(account, refused.outcome)
            self._tell_refusal(account, refused.outcome)
            raise
        self._count(account, outcome)
        return json_response({"status": "ok"})

    async def _take(self, request: Request, account: str, signer: Webhook | None) -> Outcome:
        if signer is None:
            raise _Refused(404, Outcome.UNKNOWN_ACCOUNT, "no account of this name takes webhooks here")
        delivery_id, timestamp, signatures = _headers(request)
        # The library's own check looks at the wall clock; ours at the service's, which a rehearsal sets.
        if abs(self._clock.now().timestamp() - timestamp) > TOLERANCE_S:
            raise _Refused(400, Outcome.OUT_OF_TIME, f"webhook-timestamp is more than {TOLERANCE_S:g} s from our clock")
        body = await _body(request)
        at = datetime.fromtimestamp(timestamp, UTC)
        expected = signer.sign(delivery_id, at, body).encode()
        # All are compared, so that the time it takes does not say which one was nearly right.
        if sum(hmac.compare_digest(expected, given.encode()) for given in signatures) == 0:
            raise _Refused(401, Outcome.BAD_SIGNATURE, "webhook-signature has no signature of this body by our secret")
        named = _batch_named_in(body)
        if not self._deliveries.is_new(account, delivery_id):
            return Outcome.DUPLICATE
        try:
            async with asyncio.timeout(SINK_LIMIT_S):
                is_poked = await self._sink.poke(account, named)
        except (BatchferryError, TimeoutError):
            self._deliveries.forget(account, delivery_id)
            raise _Refused(503, Outcome.NOT_TAKEN, "this cannot be noted now: deliver it again") from None
        except BaseException:
            self._deliveries.forget(account, delivery_id)
            raise
        outcome = Outcome.POKED if is_poked else Outcome.NO_EFFECT
        self._telemetry.event("webhook_received", account=account, provider_batch_id=named, outcome=outcome.value)
        return outcome

    def _count(self, account: str, outcome: Outcome) -> None:
        self._telemetry.count("webhooks_received", account=account, outcome=outcome.value)

    def _tell_refusal(self, account: str, outcome: Outcome) -> None:
        now, told_at = self._clock.monotonic(), self._told_at.get((account, outcome))
        if told_at is None or now - told_at >= TELL_PAUSE_S:
            self._told_at[account, outcome] = now
            self._telemetry.event("webhook_refused", account=account, outcome=outcome.value)


def _headers(request: Request) -> tuple[str, int, list[str]]:
    """Delivery id, timestamp in seconds since the epoch, and the signatures."""
    delivery_id = request.headers.get("webhook-id", "")
    timestamp = request.headers.get("webhook-timestamp", "")
    signatures = request.headers.get("webhook-signature", "").split()
    if not _ID.fullmatch(delivery_id):
        raise _Refused(400, Outcome.BAD_HEADERS, "webhook-id is missing or is no id")
    if not _TIMESTAMP.fullmatch(timestamp):
        raise _Refused(400, Outcome.BAD_HEADERS, "webhook-timestamp is missing or is no number of seconds")
    if not 1 <= len(signatures) <= MAX_SIGNATURES:
        raise _Refused(400, Outcome.BAD_HEADERS, f"webhook-signature holds 1 to {MAX_SIGNATURES} signatures")
    return delivery_id, int(timestamp), signatures


async def _body(request: Request) -> str:
    """The raw body. It is JSON, so UTF-8; read back to bytes it is what was sent, byte for byte."""
    too_large = _Refused(413, Outcome.TOO_LARGE, f"a delivery has at most {MAX_BODY_BYTES} bytes")
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
        raise _Refused(408, Outcome.TOO_SLOW, f"the body did not come within {BODY_LIMIT_S:g} s") from None
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise _Refused(400, Outcome.BAD_BODY, "the body is not UTF-8") from None


def _batch_named_in(body: str) -> str:
    """``data.id``; everything else in the body is only its sender's word."""
    try:
        event = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise _Refused(400, Outcome.BAD_BODY, "the body is not JSON") from None
    data = event.get("data") if isinstance(event, dict) else None
    named = data.get("id") if isinstance(data, dict) else None
    if not isinstance(named, str) or not _BATCH.fullmatch(named):
        raise _Refused(400, Outcome.BAD_BODY, "the body names no batch in data.id")
    return named
