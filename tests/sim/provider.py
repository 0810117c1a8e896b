"""The simulated provider behind a network that loses, delays and repeats.

The real HTTP simulator serves, the real adapter calls; only the wire between them is ours. A call that has left its
process arrives, or not, whatever becomes of the process: that is how a dead caller's create still makes a batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx

from batchferry.simulator import Scenario, SimulatorSettings
from batchferry.simulator.app import TRANSPORT, Surface
from batchferry.simulator.clock import SimClock
from batchferry.simulator.server import _Parts
from batchferry.simulator.state import SimBatch, Status
from batchferry.simulator.world import World
from sim.families import OPENAI, Family, call_of, refusal
from sim.loop import RUNNING

CALLER: ContextVar[str] = ContextVar("CALLER", default="")
"""Name of the process whose call the provider works on."""
LATENCY_S = (0.005, 0.15)
PROVISIONAL_SHARE = 0.6
"""Of the batches whose files lag: they lag in this way rather than by their counts."""


@dataclass(slots=True)
class WireRates:
    """Chances that a call meets a fault; all are off by default."""

    unreachable: float = 0.0
    """No connection: never sent."""
    lose_request: float = 0.0
    """Sent and never arrived; the caller waits in vain."""
    lose_reply: float = 0.0
    """Carried out, and the connection breaks."""
    late: float = 0.0
    """Arrives long after the caller has given up."""
    broken: float = 0.0
    """Answered with a 500 and nothing done."""
    broken_after: float = 0.0
    """Carried out and answered with a 500."""
    busy: float = 0.0
    """Answered with a 429."""
    cut: float = 0.0
    """The body ends in the middle."""

    KINDS = ("unreachable", "lose_request", "lose_reply", "late", "broken", "broken_after", "busy", "cut")


class SimProvider:
    """One provider account's server, and the way to it."""

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        clock: SimClock,
        seed: int,
        rng: random.Random,
        note: Callable[[str], None],
        family: Family = OPENAI,
    ) -> None:
        self.family = family
        self._parts = _Parts(SimulatorSettings(data_dir=folder, scenario=scenario, clock=clock, seed=seed))
        self.app = self._parts.app()
        self.world: World = self._parts.world
        self.messages = self._parts.messages.messages
        """What is kept of the API without files."""
        self.rng = rng
        self.rates: dict[str, WireRates] = {}
        """By call name; ``*`` for the others."""
        self.is_away = False
        self.refuse_creates: dict[str, Any] | None = None
        """Status, code and message of a definite refusal of every create."""
        self.refused = 0
        self.late_s = (5.0, 60.0)
        self.lagging_share = 0.0
        """Of batches that seem complete before their files are: the last lines come a little later."""
        self.lag_s = 0.0
        """Virtual seconds for which they do."""
        self.struck: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.on_sync_call: Callable[[bytes], None] = lambda _body: None
        """Told of the body of every call to an ordinary endpoint that arrives."""
        self.on_sync_lost: Callable[[bytes], None] = lambda _body: None
        """Told of the body of every one that was carried out and whose answer nobody gets."""
        self._note = note
        self._context = contextvars.copy_context()
        self._serving: dict[asyncio.Task[None], None] = {}

    def surface_of(self, family: Family) -> Surface:
        """The simulator's part that speaks like this family."""
        parts = self._parts
        own: dict[str, Surface] = {
            "anthropic": parts.messages,
            "mistral": parts.mistral,
            "gemini": parts.gemini,
            "azure": parts.azure,
            "azure-legacy": parts.azure,
        }
        return own.get(family.name, parts.surface)

    def error(self, status: int, kind: str, code: str | None, message: str) -> bytes:
        """The body of an answer that is no success."""
        error: dict[str, Any] = {"message": message, "type": kind}
        if self.family is OPENAI:
            return json.dumps({"error": error | ({"code": code} if code else {})}, separators=(",", ":")).encode()
        return json.dumps(
            self.surface_of(self.family).error_body(status, {"param": None, "code": code} | error)
        ).encode()

    def refuse(self, status: int, code: str) -> None:
        """Refuse every create from now on."""
        self.refuse_creates = {"status": status, "body": refusal(self.family, self, status, code)}

    def rates_of(self, call: str) -> WireRates:
        """The chances of this call."""
        return self.rates.get(call) or self.rates.get("*") or WireRates()

    def clear(self) -> None:
        """The provider is well and the wire is whole."""
        self.rates.clear()
        self.lagging_share = 0.0
        self.is_away = False
        self.refuse_creates = None

    def transport(self) -> httpx.AsyncBaseTransport:
        """A connection for one process."""
        return _Wire(self)

    def draw(self, call: str) -> str:
        """What becomes of the next call of this name."""
        if self.is_away:
            return "unreachable"
        rates = self.rates_of(call)
        for kind in WireRates.KINDS:
            rate = getattr(rates, kind)
            if rate and self.rng.random() < rate:
                self.struck[f"{call} {kind}"] += 1
                self._note(f"wire: {call} {kind}")
                return kind
        return ""

    def retry_after(self) -> list[tuple[str, str]]:
        """When a caller of the ordinary endpoints is to come back: in seconds, as a date, or no word of it."""
        wait_s = self.rng.choice((1, 20, 300, 1200))
        match self.rng.randrange(3):
            case 0:
                return [("retry-after", str(wait_s))]
            case 1:
                return [("retry-after", formatdate(self.world.clock.timestamp() + wait_s, usegmt=True))]
            case _:
                return []

    def later(self, wait_s: float, call: Callable[[], None]) -> None:
        """Do it later, whoever lives then."""
        asyncio.get_running_loop().call_later(wait_s, call, context=self._context)

    def serve(self, scope: dict[str, Any], body: bytes, caller: str, done: Callable[[Any], None]) -> None:
        """Carry the call out; ``done`` gets (status, headers, body, is whole)."""
        context = self._context.copy()
        context.run(CALLER.set, caller)
        task = asyncio.get_running_loop().create_task(self._serve(scope, body, done), context=context)
        self._serving[task] = None
        task.add_done_callback(lambda one: self._serving.pop(one, None))

    async def _serve(self, scope: dict[str, Any], body: bytes, done: Callable[[Any], None]) -> None:
        sent: list[Any] = []
        is_whole = True
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        class Line:
            def close(self) -> None:
                nonlocal is_whole
                is_whole = False
                messages.append({"type": "http.disconnect"})

        async def receive() -> Any:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app({**scope, "state": {TRANSPORT: Line()}}, receive, send)
        if not sent:
            done((0, [], b"", False))
            return
        content = b"".join(message.get("body", b"") for message in sent[1:])
        done((sent[0]["status"], sent[0]["headers"], content, is_whole))

    def _is_lagging(self, batch: SimBatch) -> bool:
        return (
            batch.status is Status.COMPLETED
            and batch.ended_at is not None
            and self.world.clock.timestamp() < batch.ended_at + self.lag_s
            and random.Random(f"lag:{batch.id}").random() < self.lagging_share
        )

    def _is_provisional(self, batch: SimBatch) -> bool:
        """Whether its counts are right from the beginning, and the last verdict in its error file is not."""
        return random.Random(f"provisional:{batch.id}").random() < PROVISIONAL_SHARE

    def _file_of_lagging(self, file_id: str) -> tuple[SimBatch, str] | None:
        for batch in self.world.state.batches.values():
            if file_id == batch.output_file_id and self._is_lagging(batch):
                return batch, "output"
            if file_id == batch.error_file_id and self._is_lagging(batch):
                return batch, "error"
        return None

    def seen(self, call: str, path: str, answer: Any) -> Any:
        """The answer of a provider whose files still grow when it calls a batch complete."""
        status, headers, content, is_whole = answer
        if not self.lagging_share or status != 200 or not is_whole:
            return answer
        if call == "content":
            found = self._file_of_lagging(path.split("/")[3])
            if found is None:
                return answer
            lines = content.splitlines(keepends=True)
            if found[1] == "output":
                content = b"".join(lines[:-1])
            elif self._is_provisional(found[0]):
                content = b"".join(lines[:-1]) + provisional(lines[-1] if lines else b"")
            else:  # what was written so far ends in the middle of a line
                content = b"".join(lines[:-1]) + (lines[-1][: len(lines[-1]) * 2 // 3] if lines else b"")
            self.struck[f"lagging {found[1]}"] += 1
            self._note(f"wire: the {found[1]} file of {found[0].id} is not whole yet")
        elif call in {"retrieve", "list"}:
            told = json.loads(content)
            for one in told["data"] if call == "list" else [told]:
                batch = self.world.state.batches.get(one.get("id"))
                if (
                    batch is not None
                    and self._is_lagging(batch)
                    and not self._is_provisional(batch)
                    and batch.output_file_id
                    and one["request_counts"]["completed"]
                ):
                    one["request_counts"]["completed"] -= 1
            content = json.dumps(told).encode()
        else:
            return answer
        return status, [pair for pair in headers if pair[0].lower() != b"content-length"], content, is_whole

    async def close(self) -> None:
        await self._parts.close()


def provisional(line: bytes) -> bytes:
    """The line as it stood before the provider had made up its mind: an error of its own."""
    try:
        told = json.loads(line)
    except ValueError:
        return line
    if not isinstance(told.get("response"), dict):
        return line
    told["response"] |= {
        "status_code": 500,
        "body": {"error": {"message": "later", "type": "server_error", "code": None}},
    }
    return json.dumps(told).encode() + b"\n"


class _Wire(httpx.AsyncBaseTransport):
    """The caller's end."""

    def __init__(self, provider: SimProvider) -> None:
        self._provider = provider

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        provider, loop = self._provider, asyncio.get_running_loop()
        process = RUNNING.get()
        body = b"".join([chunk async for chunk in request.stream])
        call = call_of(provider.family, request.method, request.url.path)
        await asyncio.sleep(0)  # a process that is paused here sends when it is resumed
        provider.calls[call] += 1
        fate = provider.draw(call)
        if fate == "unreachable":
            raise httpx.ConnectError("unreachable")
        reply: asyncio.Future[Any] = loop.create_future()
        rng = provider.rng

        def answer(what: Any) -> None:
            if not reply.done():
                reply.set_result(what)

        def refused(status: int, text: bytes) -> None:
            headers = provider.retry_after() if call == "sync" else []
            provider.later(rng.uniform(*LATENCY_S), lambda: answer((status, headers, text, True)))

        def done(what: Any) -> None:
            what = provider.seen(call, request.url.path, what)
            if fate in {"lose_reply", "late"}:
                what = (0, [], b"", False)
            elif fate == "broken_after":
                what = (500, [], provider.error(500, "server_error", None, "later"), True)
            elif fate == "cut" and what[2]:
                what = (*what[:2], what[2][: len(what[2]) // 2], False)
            if call == "sync" and (not what[3] or reply.done() or (process is not None and process.is_dead)):
                provider.on_sync_lost(body)
            provider.later(rng.uniform(*LATENCY_S), lambda: answer(what))

        def arrive() -> None:
            if process is not None and process.is_dead and rng.random() < 0.5:
                provider._note(f"wire: {call} of {process.name} died with it")
                return
            if fate == "lose_request":
                return
            if call == "create" and provider.refuse_creates is not None:
                provider.refused += 1
                refused(provider.refuse_creates["status"], provider.refuse_creates["body"])
                return
            if fate == "broken":
                status = rng.choice((500, 502, 503)) if call == "sync" else 500
                refused(status, provider.error(status, "server_error", None, "broken"))
                return
            if fate == "busy":
                refused(429, provider.error(429, "requests", "rate_limit_exceeded", "slow down"))
                return
            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": request.method,
                "headers": [(name.lower(), value) for name, value in request.headers.raw],
                "scheme": request.url.scheme,
                "path": request.url.path,
                "raw_path": request.url.raw_path.split(b"?")[0],
                "query_string": request.url.query,
                "server": (request.url.host, 80),
                "client": ("127.0.0.1", 1),
                "root_path": "",
            }
            if call == "sync":
                provider.on_sync_call(body)
            if call in {"create", "cancel", "delete", "upload", "sync"}:
                provider._note(f"wire: {call} {request.url.path} of {process.name if process else 'somebody'} arrives")
            provider.serve(scope, body, process.name if process else "", done)

        provider.later(rng.uniform(*provider.late_s) if fate == "late" else rng.uniform(*LATENCY_S), arrive)
        timeouts = request.extensions.get("timeout") or {}
        try:
            async with asyncio.timeout(timeouts.get("read")):
                status, headers, content, is_whole = await reply
        except TimeoutError:
            raise httpx.ReadTimeout("no answer", request=request) from None
        if status == 0:
            raise httpx.ReadError("broken", request=request)
        stream = _Content(content, is_whole)
        return httpx.Response(status, headers=headers, stream=stream, request=request)


class _Content(httpx.AsyncByteStream):
    def __init__(self, content: bytes, is_whole: bool) -> None:
        self._content = content
        self._is_whole = is_whole

    async def __aiter__(self) -> Any:
        if self._content:
            yield self._content
        if not self._is_whole:
            raise httpx.ReadError("cut")
