"""What the measurements share: a broker, a simulated provider in a process of its own, settings, CPU time."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaProducer

from batchferry.config import Settings, load_settings
from broker import BrokerUnavailable, RealBroker
from broker.real import free_port

SPEED = 3600.0
KEY = "sk-simulated"


@contextmanager
def cluster() -> Iterator[str]:
    """The bootstrap address of a broker: the one named in the environment, else a real one of our own."""
    named = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if named:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="batchferry-bench-", ignore_cleanup_errors=True) as folder:
        broker = RealBroker(Path(folder) / "kafka")
        try:
            broker.start()
        except BrokerUnavailable as reason:
            raise SystemExit(f"the measurements need a real broker: {reason}") from None
        try:
            yield broker.bootstrap
        finally:
            broker.stop()


class Rehearsal:
    """A clock that runs fast, the same for the service and the simulator."""

    def __init__(self, speed: float = SPEED) -> None:
        self.speed = speed
        self.started = datetime.now(UTC)
        self.origin = self.started - timedelta(hours=100)

    def now(self) -> datetime:
        """The instant on that clock."""
        return self.origin + (datetime.now(UTC) - self.started) * self.speed


@contextmanager
def simulator(clock: Rehearsal) -> Iterator[str]:
    """A simulated provider in its own process, so that its CPU time is not ours; yields its base URL."""
    with tempfile.TemporaryDirectory(prefix="batchferry-bench-sim-") as folder:
        port = free_port()
        command = [
            sys.executable, "-m", "bench.provider", str(port), str(Path(folder) / "data"), str(clock.speed),
            clock.origin.isoformat(), clock.started.isoformat(),
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    urllib.request.urlopen(f"{url}/_sim/clock", timeout=1).read()
                    break
                except OSError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise SystemExit("the simulator did not start") from None
                    time.sleep(0.05)
            yield f"{url}/v1"
        finally:
            process.terminate()
            process.wait(20)


def settings_for(bootstrap: str, base_url: str, clock: Rehearsal, folder: Path, **route: Any) -> Settings:
    """Settings of a rehearsal with topics of its own."""
    tag = uuid4().hex[:8]
    return load_settings(
        None,
        env={},
        overrides={
            "kafka": {"bootstrap_servers": bootstrap.split(",")},
            "topics": {
                "requests": f"bench-{tag}-requests",
                "results": f"bench-{tag}-results",
                "failures": f"bench-{tag}-failures",
                "events": f"bench-{tag}-events",
                "partitions": 4,
            },
            "accounts": {
                "default": {
                    "base_url": base_url,
                    "api_key": KEY,
                    "limits": {"max_rows": 1_000_000, "max_file_bytes": 2_000_000_000},
                    "poll": {"first_s": 300, "floor_s": 120, "max_s": 900},
                    "sync": {"enabled": False},
                }
            },
            "routes": {"default": {"margin_s": 3 * 3600, **route}},
            "clock": {
                "speed": clock.speed,
                "origin": clock.origin.isoformat(),
                "started": clock.started.isoformat(),
            },
            "server": {"enabled": False},
            "state_dir": str(folder / "state"),
            "log": {"format": "json", "level": "warning"},
        },
    )


def request(number: int, body_bytes: int) -> bytes:
    """One request of about that size, with text-like content."""
    words = "What should I do when my card has not arrived after two weeks, and whom do I ask about it? "
    text = (words * (body_bytes // len(words) + 1))[: max(1, body_bytes - 130)]
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": f"{number} {text}"}]}
    return json.dumps({"custom_id": f"row-{number}", "body": body}).encode()


async def fill(bootstrap: str, topic: str, rows: int, body_bytes: int, at: datetime, partitions: int = 4) -> int:
    """Produce ``rows`` requests; returns their bytes."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20, max_batch_size=512 * 1024)
    await producer.start()
    total = 0
    stamp = round(at.timestamp() * 1000)
    try:
        futures = []
        for number in range(rows):
            value = request(number, body_bytes)
            total += len(value)
            futures.append(await producer.send(topic, value, partition=number % partitions, timestamp_ms=stamp))
            if len(futures) >= 2000:
                await asyncio.gather(*futures)
                futures.clear()
        await asyncio.gather(*futures)
    finally:
        await producer.stop()
    return total


@asynccontextmanager
async def folder() -> AsyncIterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="batchferry-bench-") as made:
        yield Path(made)


def cpu_s() -> float:
    """CPU seconds of this process, all threads."""
    return time.process_time()


def peak_rss_bytes(pid: int) -> int:
    """The most memory a process ever held."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
