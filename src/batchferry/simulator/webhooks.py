"""Webhooks of the simulated providers: proven, tried again, and on request lost, doubled, late, out of order or forged.

==================  ==================================================================================================
OpenAI, Azure       ``{"object": "event", "id": "evt_...", "type": "batch.completed", "created_at": ..., "data": {"id":
                    "batch_..."}}`` (platform.openai.com/docs/guides/webhooks)
Gemini              ``{"type": "batch.succeeded", "version": "v1", "timestamp": ..., "data": {"id": ...}}``, with the
                    results' name or the error beside the id (ai.google.dev/gemini-api/docs/webhooks). The page shows an
                    id without ``batches/``, the API's own names have it: they come in turn. Of a cancelled job nothing
                    is told: google-genai 3.6.1 has no event for it, though earlier libraries named one.
Mistral, Anthropic  none: they have no webhooks for batches
``generic``         ``{"batch_id": "batch_...", "status": "completed"}``, of the batches in OpenAI's form
==================  ==================================================================================================

Signed deliveries have the headers ``webhook-id``, ``webhook-timestamp`` and ``webhook-signature`` of Standard Webhooks
(standardwebhooks.com). Times are virtual. Every try is signed anew, with its own time, under the same id.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from standardwebhooks import Webhook

from batchferry.simulator.gemini import PROJECT_PREFIX as GEMINI_PREFIX
from batchferry.simulator.gemini import job_error, job_name, output_uri
from batchferry.simulator.jsontext import dump_json
from batchferry.simulator.mistral import PROJECT_PREFIX as MISTRAL_PREFIX
from batchferry.simulator.scenario import WebhookScript
from batchferry.simulator.state import SimBatch, Status
from batchferry.simulator.world import World

_log = logging.getLogger(__name__)

MAX_TOLD = 10_000
CALL_LIMIT_S = 5.0
"""Real seconds in which a receiver must have answered."""
HMAC_HEADER, SECRET_HEADER = "x-webhook-signature", "x-webhook-secret"
_FORGED_KEY_BYTES = 32
_MAX_ANSWER_BYTES = 4096
_HTTP_OK = range(200, 300)
_GEMINI_TYPES: Mapping[Status, str] = MappingProxyType(
    {
        Status.COMPLETED: "batch.succeeded",
        Status.FAILED: "batch.failed",
        Status.EXPIRED: "batch.expired",
    }
)


class Truth(Enum):
    """What a try is worth."""

    TRUE = "true"
    FORGED = "forged"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One try. ``status`` is what the receiver answered, 0 for nothing; ``at`` is virtual time (ISO 8601)."""

    event_id: str
    type: str
    batch_id: str
    is_forged: bool
    is_late: bool
    status: int
    at: str


@dataclass(frozen=True, slots=True)
class _Event:
    id: str
    type: str
    batch_id: str
    body: str


Prove = Callable[[str, int, str], tuple[str, dict[str, str]]]
"""Makes of an event's id, its time and its body the address that it goes to, and the headers that prove it."""


def _prover(script: WebhookScript, secret: str | bytes) -> Prove:
    """How the owner of this secret proves himself."""
    prefix = script.header_prefix

    def standard(event_id: str, at: int, body: str) -> tuple[str, dict[str, str]]:
        signed = Webhook(secret).sign(event_id, datetime.fromtimestamp(at, UTC), body)
        return script.url, {"webhook-id": event_id, "webhook-timestamp": str(at), "webhook-signature": signed}

    def body_mac(_event_id: str, _at: int, body: str) -> tuple[str, dict[str, str]]:
        mac = hmac.digest(_bytes(secret), body.encode(), "sha256")
        written = mac.hex() if script.digest == "hex" else base64.b64encode(mac).decode()
        return script.url, {script.header or HMAC_HEADER: f"{prefix}{written}"}

    def in_header(_event_id: str, _at: int, _body: str) -> tuple[str, dict[str, str]]:
        return script.url, {script.header or SECRET_HEADER: f"{prefix}{_text(secret)}"}

    def in_path(_event_id: str, _at: int, _body: str) -> tuple[str, dict[str, str]]:
        parts = urlsplit(script.url)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{_text(secret)}")), {}

    return {"standard": standard, "hmac": body_mac, "header": in_header, "path": in_path}[script.auth]


def _bytes(secret: str | bytes) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret


def _text(secret: str | bytes) -> str:
    return secret if isinstance(secret, str) else secret.hex()


class WebhookSender:
    """Watches a world and tells a URL of every batch that ends."""

    def __init__(self, script: WebhookScript, world: World) -> None:
        self.told: deque[Delivery] = deque(maxlen=MAX_TOLD)
        self._script = script
        self._world = world
        self._prove = _prover(script, script.secret.get_secret_value())
        self._forge = _prover(script, secrets.token_bytes(_FORGED_KEY_BYTES))
        self._number = 0
        self._tries = 0
        self._held: asyncio.Event | None = None
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        world.subscribe(self._saw)

    def describe(self, limit: int) -> dict[str, Any]:
        """How it delivers, and the newest tries, oldest first; no secret, and of the address only where it leads."""
        newest = list(self.told)[-limit:] if limit else []
        return {
            "to": self._script.receiver,
            "form": self._script.form,
            "auth": self._script.auth,
            "events": self._number,
            "tries": self._tries,
            "deliveries": [asdict(one) for one in newest],
        }

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._watching = asyncio.create_task(self._watch(), name="simulator-webhooks")

    async def stop(self) -> None:
        """Send nothing more."""
        tasks = [*self._sending, *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _watch(self) -> None:
        """Nothing happens in a world by itself, so somebody has to ask when something is due."""
        while True:
            self._changed.clear()
            due = self._world.next_due_at
            waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._changed.wait())]
            if due is not None:
                waits.append(asyncio.create_task(self._sleep_until(due)))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            await self._world.settle()

    async def _sleep_until(self, due: float) -> None:
        await self._world.clock.sleep(due - self._world.clock.timestamp())

    def _saw(self, batch: SimBatch) -> None:
        self._changed.set()
        event = self._event_of(batch)
        if event is not None:
            self._number += 1
            task = asyncio.create_task(self._deliver(self._number, event), name="simulator-webhook")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _event_of(self, batch: SimBatch) -> _Event | None:
        """What is told of the batch as it is now, if anything."""
        is_gemini = batch.project.startswith(GEMINI_PREFIX)
        if batch.project.startswith(MISTRAL_PREFIX):
            return None
        if self._script.form == "generic":
            if is_gemini or not (batch.status.is_terminal or self._script.tells_progress):
                return None
            return _generic(batch)
        if not batch.status.is_terminal:
            return None
        if not is_gemini:
            return _of_openai(batch)
        return _of_gemini(batch, is_bare=self._number % 2 == 1) if batch.status in _GEMINI_TYPES else None

    async def _deliver(self, number: int, event: _Event) -> None:
        script = self._script
        # Whoever was held back goes once this event is out.
        before, self._held = self._held, None
        try:
            if _hits(script.lose_every, number):
                return
            if _hits(script.hold_every, number):
                self._held = asyncio.Event()
                await self._until(self._held, script.hold_s)
            await self._world.clock.sleep(script.delay_s)
            if _hits(script.forge_every, number):
                await self._try(event, Truth.FORGED)
            await self._send(event, Truth.LATE if _hits(script.late_every, number) else Truth.TRUE)
            if _hits(script.double_every, number):
                await self._send(event)
        finally:
            if before is not None:
                before.set()

    async def _until(self, released: asyncio.Event, limit_s: float) -> None:
        waits = [asyncio.create_task(released.wait()), asyncio.create_task(self._world.clock.sleep(limit_s))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _send(self, event: _Event, first: Truth = Truth.TRUE) -> None:
        """Until it is taken, or the tries are used up."""
        wait_s = self._script.retry_s
        for attempt in range(1, self._script.attempts + 1):
            if await self._try(event, first if attempt == 1 else Truth.TRUE) in _HTTP_OK:
                return
            if attempt < self._script.attempts:
                await self._world.clock.sleep(wait_s)
                wait_s *= 2

    async def _try(self, event: _Event, truth: Truth) -> int:
        now = self._world.clock.timestamp()
        signed_at = int(now - (self._script.late_s if truth is Truth.LATE else 0.0))
        prove = self._forge if truth is Truth.FORGED else self._prove
        url, proof = prove(event.id, signed_at, event.body)
        headers = {"content-type": "application/json", "user-agent": "batchferry-simulator", **proof}
        status = 0
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                status = await _post(url, headers, event.body.encode())
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            _log.warning("a webhook did not get through (%s)", type(error).__name__)
        self._tries += 1
        is_forged, is_late = truth is Truth.FORGED, truth is Truth.LATE
        at = datetime.fromtimestamp(now, UTC).isoformat()
        self.told.append(Delivery(event.id, event.type, event.batch_id, is_forged, is_late, status, at))
        return status


def _of_openai(batch: SimBatch) -> _Event:
    event_id, kind = f"evt_{secrets.token_hex(16)}", f"batch.{batch.status.value}"
    at = int(batch.ended_at or 0.0)
    body = {"object": "event", "id": event_id, "type": kind, "created_at": at, "data": {"id": batch.id}}
    return _made(event_id, kind, batch.id, body)


def _of_gemini(batch: SimBatch, *, is_bare: bool) -> _Event:
    kind, name = _GEMINI_TYPES[batch.status], job_name(batch)
    data: dict[str, Any] = {"id": name.rpartition("/")[2] if is_bare else name}
    if batch.status is Status.COMPLETED:
        data["output_file_uri"] = output_uri(batch)
    elif batch.status is Status.FAILED:
        error = job_error(batch)
        data |= {"error_code": error["code"], "error_message": error["message"]}
    at = datetime.fromtimestamp(batch.ended_at or 0.0, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    body = {"type": kind, "version": "v1", "timestamp": at, "data": data}
    return _made(f"msg_{secrets.token_hex(16)}", kind, name, body)


def _generic(batch: SimBatch) -> _Event:
    body = {"batch_id": batch.id, "status": batch.status.value}
    return _made(f"msg_{secrets.token_hex(16)}", batch.status.value, batch.id, body)


def _made(event_id: str, kind: str, batch_id: str, body: dict[str, Any]) -> _Event:
    return _Event(event_id, kind, batch_id, dump_json(body).decode())


def _hits(every: int | None, number: int) -> bool:
    return every is not None and number % every == 0


async def _post(url: str, headers: dict[str, str], body: bytes) -> int:
    """POST on a connection of its own; the status.

    Raises:
        OSError: nobody there.
        ValueError: no HTTP answer.
        asyncio.IncompleteReadError: no answer.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    told = {"host": parts.netloc, **headers, "content-length": str(len(body)), "connection": "close"}
    head = f"POST {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in told.items()) + "\r\n"
    reader, writer = await asyncio.open_connection(
        parts.hostname, port, ssl=True if secure else None, limit=_MAX_ANSWER_BYTES
    )
    try:
        writer.write(head.encode("ascii") + body)
        await writer.drain()
        version, _, rest = (await reader.readuntil(b"\r\n")).partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError("no HTTP answer")
        return int(rest[:3])
    except asyncio.LimitOverrunError as error:
        raise ValueError("no HTTP answer") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
