"""A 50,000-row, 150 MB batch through ``produce``, ``run`` and the results topic, with the service's peak memory."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import yaml
from aiokafka import AIOKafkaConsumer, TopicPartition

from .kit import KEY, Rehearsal, cluster, peak_rss_bytes, request, simulator

ROWS = 50_000
ROW_BYTES = 3_000
LIMIT_BYTES = 300_000_000
GIVE_UP_S = 400.0
PARTITIONS = 4
TOPIC = f"big-{uuid4().hex[:8]}"


def main() -> None:
    """Run it; exit code 1 when a row is missing or the memory passes the limit."""
    with cluster() as bootstrap, tempfile.TemporaryDirectory(prefix="batchferry-big-") as folder:
        clock = Rehearsal(speed=1800.0)
        with simulator(clock) as base_url:
            sys.exit(_run(bootstrap, base_url, clock, Path(folder)))


def _run(bootstrap: str, base_url: str, clock: Rehearsal, folder: Path) -> int:
    config = folder / "batchferry.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "kafka": {"bootstrap_servers": bootstrap.split(",")},
                "topics": {
                    "requests": f"{TOPIC}-requests",
                    "results": f"{TOPIC}-results",
                    "failures": f"{TOPIC}-failures",
                    "events": f"{TOPIC}-events",
                    "partitions": PARTITIONS,
                },
                "accounts": {
                    "default": {
                        "base_url": base_url,
                        "api_key": KEY,
                        "poll": {"first_s": 300, "floor_s": 120, "max_s": 900},
                        "sync": {"enabled": False},
                    }
                },
                "routes": {"default": {"sla_s": "90h", "margin_s": 10_800, "max_rows": ROWS, "max_bytes": 200_000_000}},
                "clock": {
                    "speed": clock.speed,
                    "origin": clock.origin.isoformat(),
                    "started": clock.started.isoformat(),
                },
                "server": {"port": 0},
                "state_dir": str(folder / "state"),
                "log": {"format": "json", "level": "warning"},
            }
        )
    )
    rows = folder / "requests.jsonl"
    with rows.open("wb") as file:
        for number in range(ROWS):
            file.write(request(number, ROW_BYTES) + b"\n")
    print(f"{ROWS:,} rows, {rows.stat().st_size / 1e6:,.0f} MB", flush=True)
    cli = [sys.executable, "-m", "batchferry"]
    service = subprocess.Popen([*cli, "run", "--config", str(config)])
    try:
        started = time.monotonic()
        subprocess.run([*cli, "produce", str(rows), "--config", str(config)], check=True)
        print(f"produced after {time.monotonic() - started:.0f} s", flush=True)
        seen, batches = asyncio.run(_results(bootstrap, service))
        peak = peak_rss_bytes(service.pid)
        print(f"{seen:,} of {ROWS:,} rows answered in {batches} batch(es) after {time.monotonic() - started:.0f} s")
        print(f"peak memory of the service: {peak / 1e6:,.0f} MB (limit {LIMIT_BYTES / 1e6:,.0f} MB)")
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(60)
    return 0 if seen == ROWS and peak < LIMIT_BYTES else 1


async def _results(bootstrap: str, service: subprocess.Popen[bytes]) -> tuple[int, int]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, isolation_level="read_committed")
    await consumer.start()
    seen: set[str] = set()
    batches: set[str] = set()
    try:
        partitions = [TopicPartition(f"{TOPIC}-results", number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        deadline = time.monotonic() + GIVE_UP_S
        while len(seen) < ROWS and time.monotonic() < deadline and service.poll() is None:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    outcome = json.loads(record.value)
                    seen.add(outcome["outcome_id"])
                    batches.add(outcome["batch"]["batch_id"])
    finally:
        await consumer.stop()
    return len(seen), len(batches)
