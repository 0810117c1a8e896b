"""Webhooks: what 500 deliveries a second take from the landing of results.

Three ways, in one run: taken by a process of their own (the product's default), the same with forged signatures, which
the service hears of only in counts, and taken in the landing process itself. Deliveries are signed beforehand and sent
by a process of its own over kept-alive connections; the service's sink looks a batch up in a dict, as an index of live
batches would.

The fair number is the CPU time of the landing process for each row: rows a second of wall time also depend on who else
uses the cores, and here the sender and the webhook process do. The forged run has the same neighbours and hardly a
message, so what it loses is theirs.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import orjson
import psutil
from pydantic import SecretStr

from batchferry.config import AccountSettings
from batchferry.server import AdminServer, WebhookProcess, hook_of, make_app, plans_of, webhook_routes
from batchferry.telemetry import RecordingTelemetry

from .kit import cpu_s

RATE_PER_S = 500
SECONDS = 3.0
ROUNDS = 5
CONNECTIONS = 16
CHUNK_ROWS = 100
"""Rows between two turns that the landing leaves to others."""
SECRET = "a secret of the measurement"
LIVE = 2_000
"""Batches that somebody waits for; every second delivery names another."""
GOAL = 0.97
MODES = ("own_process", "forged", "in_process")


class WallClock:
    """The real clock."""

    def now(self) -> datetime:
        """The instant."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that only go forward."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class IndexSink:
    """Live batches by name."""

    def __init__(self) -> None:
        self.live = {f"batch_{number}" for number in range(LIVE)}
        self.poked: set[str] = set()

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        """See ``WebhookSink``."""
        if provider_batch_id not in self.live:
            return None
        if provider_batch_id in self.poked:
            return False
        self.poked.add(provider_batch_id)
        return True


class Nothing:
    """No health, no pages."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def _signed(number: int, now: int, secret: str) -> bytes:
    body = json.dumps(
        {
            "id": f"evt_{number}",
            "object": "event",
            "type": "batch.completed",
            "data": {"id": f"batch_{number % (2 * LIVE)}"},
        }
    ).encode()
    mac = hmac.digest(secret.encode(), f"wh_{number}.{now}.".encode() + body, "sha256")
    return (
        f"POST /webhooks/default HTTP/1.1\r\nhost: x\r\nwebhook-id: wh_{number}\r\nwebhook-timestamp: {now}\r\n"
        f"webhook-signature: v1,{base64.b64encode(mac).decode()}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def _send(port: int, count: int, secret: str, told: Any, go: Any) -> None:
    """The sender's process: each round ``count`` deliveries at the rate, and how many were answered as they should be."""
    wanted = b"HTTP/1.1 200" if secret == SECRET else b"HTTP/1.1 401"

    async def one(requests: list[bytes], started: float) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        taken = 0
        for number, request in enumerate(requests):
            due = started + number * CONNECTIONS / RATE_PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            taken += head.startswith(wanted)
        writer.close()
        return taken

    async def a_round(first: int) -> int:
        now = int(time.time())
        requests = [_signed(number, now, secret) for number in range(first, first + count)]
        told.put("prepared")
        go.get(True, 120)
        started = time.monotonic()
        return sum(await asyncio.gather(*(one(requests[lane::CONNECTIONS], started) for lane in range(CONNECTIONS))))

    for number in range(ROUNDS):
        told.put(asyncio.run(a_round(number * count)))


@contextmanager
def _sender(port: int, count: int, secret: str) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    told, go = context.Queue(), context.Queue()
    process = context.Process(target=_send, args=(port, count, secret, told, go))
    process.start()
    try:
        yield told, go
    finally:
        process.join(60)


LINE = orjson.dumps(
    {
        "custom_id": "row-1",
        "response": {"status_code": 200, "body": {"choices": [{"message": {"content": "w " * 400}}]}},
    }
)


async def landing(seconds: float) -> tuple[int, float]:
    """Work like that of landing: lines read, judged and written again on the event loop. Rows, and CPU seconds of the
    process meanwhile: other processes of the machine have no part in them.
    """
    rows, until, started = 0, time.monotonic() + seconds, cpu_s()
    while time.monotonic() < until:
        for _ in range(CHUNK_ROWS):
            line = orjson.loads(LINE)
            orjson.dumps({"custom_id": line["custom_id"], "kind": "result", "body": line["response"]["body"]})
        rows += CHUNK_ROWS
        await asyncio.sleep(0)
    return rows, cpu_s() - started


@dataclass(frozen=True)
class Load:
    """What was seen in one mode."""

    mode: str
    ratio: float
    """Rows that a CPU second of the landing process lands beside the deliveries, against those without: the median of
    the rounds."""
    ratios: tuple[float, ...]
    wall_ratio: float
    """The same of seconds on the wall; the median."""
    row_us: float
    """CPU microseconds of a landed row without deliveries; the median."""
    child_us: float | None
    """CPU microseconds of a delivery in the webhook process."""
    answered: int
    sent: int


async def _told(queue: Any) -> Any:
    return await asyncio.to_thread(queue.get, True, 60)


@dataclass(frozen=True)
class Address:
    """Where deliveries go, and which process takes them besides this one."""

    port: int
    pid: int | None


@asynccontextmanager
async def receiver(mode: str) -> AsyncIterator[Address]:
    """The real receiver, as the service joins it."""
    account = AccountSettings(api_key=SecretStr("k"), webhook_secret=SecretStr(SECRET))
    telemetry, sink, clock = RecordingTelemetry(), IndexSink(), WallClock()
    if mode != "in_process":
        plans = plans_of({"default": account})
        process = WebhookProcess(plans, sink, host="127.0.0.1", port=0, clock=clock, telemetry=telemetry)
        await process.start()
        try:
            await asyncio.wait_for(process.is_up.wait(), 60)
            yield Address(process.port, process.pid)
        finally:
            await process.stop()
        return
    hook = hook_of(account)
    assert hook is not None
    routes = webhook_routes({"default": hook}, sink, clock=clock, telemetry=telemetry)
    server = AdminServer(
        "127.0.0.1", 0, make_app(Nothing(), bytes, Nothing(), telemetry=telemetry, extra_routes=routes)
    )
    await server.start()
    try:
        yield Address(server.port, None)
    finally:
        await server.stop()


def _cpu_s_of(pid: int | None) -> float:
    if pid is None:
        return 0.0
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


async def measure(mode: str) -> Load:
    """Rounds of landing without and with deliveries."""
    count = int(RATE_PER_S * SECONDS)
    ratios, walls, row_us = [], [], []
    answered, child_s = 0, 0.0
    secret = f"not {SECRET}" if mode == "forged" else SECRET
    async with receiver(mode) as address:
        with _sender(address.port, count, secret) as (told, go):
            for _ in range(ROUNDS):
                assert await _told(told) == "prepared"
                rows, used_s = await landing(SECONDS)
                child_s -= _cpu_s_of(address.pid)
                go.put("go")
                beside_rows, beside_s = await landing(SECONDS)
                answered += await _told(told)
                child_s += _cpu_s_of(address.pid)
                row_us.append(used_s / rows * 1e6)
                ratios.append((used_s / rows) / (beside_s / beside_rows))
                walls.append(beside_rows / rows)
    child_us = None if address.pid is None else child_s / (count * ROUNDS) * 1e6
    return Load(mode, median(ratios), tuple(ratios), median(walls), median(row_us), child_us, answered, count * ROUNDS)


def explain(load: Load) -> str:
    """A line."""
    child = "" if load.child_us is None else f"; a delivery costs the webhook process {load.child_us:,.0f} us CPU"
    goal = f" (goal {GOAL})" if load.mode == "own_process" else ""
    return (
        f"webhooks {load.mode:<11}: {load.answered:,} of {load.sent:,} answered at {RATE_PER_S}/s; rows landed a CPU"
        f" second beside them {load.ratio:.3f}{goal} of those without, rounds"
        f" {min(load.ratios):.3f} to {max(load.ratios):.3f}; by the wall {load.wall_ratio:.2f};"
        f" a row {load.row_us:.1f} us{child}"
    )


async def _all() -> None:
    for mode in MODES:
        print(explain(await measure(mode)), flush=True)


def main() -> None:
    """Measure on the event loop that the service runs on, and print."""
    import uvloop  # noqa: PLC0415 - the product's own choice of loop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_all())


if __name__ == "__main__":
    main()
