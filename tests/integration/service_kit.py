"""Replicas of the service as real processes, a simulated provider beside them, and the books at the end.

Time runs an hour a second for the service and the provider alike. What a test waits for is always a fact that can
be seen: a line in a replica's log, a call that stands at a gate of the simulator, a record on a topic.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import cycle
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import httpx
import pytest
import yaml
from replica_process import serve

from batchferry.domain.ledger import LotState
from batchferry.domain.partition import PartitionLedger
from batchferry.kafka import AioKafka
from batchferry.ports import LogReader, LogTail, OutRecord, Record
from batchferry.simulator import DEFAULT_KEY, ClockSettings, FaultRule, Scenario, Simulator, SimulatorSettings
from batchferry.simulator.settings import DEFAULT_PROJECT
from broker.kit import committed, made_topic
from broker.real import free_port

SPEED = 3600.0
STOP_LIMIT_S = 30.0
PARTITIONS = 3
MODEL = "gpt-4o-mini"

FORKS = multiprocessing.get_context("forkserver")
"""Each replica is a process of its own, forked from one that has loaded the service: loading takes seconds."""
FORKS.set_forkserver_preload(["batchferry.app", "batchferry.config"])


class Replica:
    """One replica of the service; its processes come and go, its settings and its state folder stay."""

    def __init__(self, rig: Rig, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self._folder = rig.folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._config = self._folder / "config.yaml"
        own = {**settings, "state_dir": str(self._folder / "state"), "server": {"port": self.port}}
        self._config.write_text(yaml.safe_dump(own))
        self._log = self._folder / "log.jsonl"
        self._log.touch()
        self._process: ForkServerProcess | None = None
        self._seen_to = 0

    def go(self) -> None:
        """Start a process; what was logged before does not count for ``told`` any more."""
        assert self._process is None
        self._seen_to = self._log.stat().st_size
        self._process = FORKS.Process(target=serve, args=(str(self._config), str(self._log)))
        self._process.start()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL: the crash."""
        self._signal(signal.SIGKILL)
        self._joined()

    def _joined(self) -> int | None:
        assert self._process is not None
        process, self._process = self._process, None
        process.join(STOP_LIMIT_S)
        code = process.exitcode
        process.close()
        return code

    def forget_state(self) -> None:
        """The next start finds an empty folder."""
        shutil.rmtree(self._folder / "state", ignore_errors=True)

    async def terminate(self) -> int | None:
        """SIGTERM; the exit code."""
        self._signal(signal.SIGTERM)
        return await asyncio.to_thread(self._joined)

    @property
    def has_ended(self) -> bool:
        """Whether the process ended by itself."""
        return self._process is not None and self._process.exitcode is not None

    def collect(self) -> int | None:
        """The exit code of a process that ended by itself; afterwards ``go`` may start the next one."""
        assert self.has_ended
        return self._joined()

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.exitcode is None

    @property
    def log(self) -> Path:
        """Where all its processes, one after the other, have logged."""
        return self._log

    def freeze(self) -> None:
        """SIGSTOP: alive for the system, dead for everybody else."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End whatever runs."""
        if self._process is not None:
            self.kill()

    # ------------------------------------------------------------------------------------ what can be seen

    def lines(self) -> list[dict[str, Any]]:
        """Log lines of the present process."""
        with self._log.open("rb") as log:
            log.seek(self._seen_to)
            found = []
            for line in log.read().split(b"\n"):
                try:
                    one = json.loads(line)
                except ValueError:
                    continue
                if isinstance(one, dict):
                    found.append(one)
            return found

    def told(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Log lines of this event with these fields."""
        return [
            line
            for line in self.lines()
            if line.get("event") == event and all(line.get(name) == value for name, value in fields.items())
        ]

    def tail_of_log(self, lines: int = 60) -> str:
        """For the message of a test that failed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    async def status(self) -> dict[str, Any]:
        """``/api/status``; empty while nobody answers."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
                answer = await client.get(f"http://127.0.0.1:{self.port}/api/status")
        except httpx.HTTPError:
            return {}
        return answer.json() if answer.status_code == 200 else {}

    async def waiting_rows(self) -> int:
        """Rows in open batches."""
        return sum(one["rows"] for one in (await self.status()).get("waiting", []))

    async def owned(self) -> set[int]:
        """Partitions restored and live in this replica."""
        return {int(partition) for partition in (await self.status()).get("partitions", {})}


@dataclass(frozen=True)
class Row:
    """One request that was produced."""

    partition: int
    offset: int
    body: dict[str, Any]


class Named:
    """The names of a run's topics and group, told apart from those of other runs by ``tag``."""

    tag: str

    @property
    def requests(self) -> str:
        return f"requests-{self.tag}"

    @property
    def results(self) -> str:
        return f"results-{self.tag}"

    @property
    def failures(self) -> str:
        return f"failures-{self.tag}"

    @property
    def events(self) -> str:
        return f"events-{self.tag}"

    @property
    def group(self) -> str:
        return f"group-{self.tag}"

    @property
    def ledger(self) -> str:
        return f"{self.requests}.{self.group}.ledger"


class Rig(Named):
    """Broker topics, a simulator in this process, and replicas."""

    def __init__(
        self,
        kafka: AioKafka,
        bootstrap: str,
        folder: Path,
        *,
        session_s: float = 3.0,
        max_rows: int = 30,
        submit_ttl_s: float = 2.0,
        scenario: Scenario | None = None,
        partitions: int = PARTITIONS,
        **limits: object,
    ) -> None:
        self.kafka = kafka
        self.folder = folder
        self.tag = uuid4().hex[:8]
        self.rows: list[Row] = []
        self.partitions = partitions
        """Of the input and the ledger; a test that lets them grow says so."""
        self.outcomes: dict[tuple[int, int], list[Record]] = defaultdict(list)
        self.replicas: list[Replica] = []
        self._bootstrap = bootstrap
        self._session_s = session_s
        self._max_rows = max_rows
        self._ttl_s = submit_ttl_s
        self._limits = limits
        self.started = datetime.now(UTC)
        self.origin = self.started - timedelta(days=60)
        self.simulator = Simulator(
            SimulatorSettings(
                clock=ClockSettings(speed=SPEED, origin=self.origin, started_real=self.started),
                scenario=scenario or Scenario(),
            )
        )
        self._tail: LogTail | None = None
        self._reader: LogReader | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    # -------------------------------------------------------------------------------------- life of the rig

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.simulator)
        for topic in (self.requests, self.results, self.failures, self.events):
            await made_topic(self.kafka, topic, self.partitions, retention_ms="-1")  # virtual time begins long ago
        self._tail = self.kafka.tail()
        await self._tail.start([self.results, self.failures])
        self._reading = asyncio.create_task(self._read_outcomes())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for replica in self.replicas:
            replica.close()
            if kind is not None:
                print(f"---- {replica.name}\n{replica.tail_of_log()}")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        for client in (self._tail, self._reader):
            if client is not None:
                await client.stop()
        await self._stack.aclose()

    def replica(self, name: str = "one") -> Replica:
        """A replica that starts with ``go``."""
        hour = 3600.0
        settings = {
            "kafka": {
                "bootstrap_servers": self._bootstrap,
                "session_timeout_s": self._session_s,
                "heartbeat_s": self._session_s / 6,
                "rebalance_timeout_s": 8.0,
                "request_timeout_s": 8.0,
                "metadata_max_age_s": 2.0,
            },
            "topics": {
                "requests": self.requests,
                "results": self.results,
                "failures": self.failures,
                "events": self.events,
                "group": self.group,
                "partitions": self.partitions,
            },
            "accounts": {
                "default": {
                    "base_url": self.simulator.base_url,
                    "api_key": DEFAULT_KEY,
                    "poll": {"first_s": 300, "floor_s": 120, "max_s": 900},
                    "timeouts": {"create_s": self._ttl_s},
                    "sync": {"enabled": False},
                }
            },
            # Batches of these tests leave by count; the time threshold is far away.
            "routes": {"default": {"max_rows": self._max_rows, "sla_s": 400 * hour, "margin_s": 3 * hour}},
            "clock": {"speed": SPEED, "origin": self.origin.isoformat(), "started": self.started.isoformat()},
            "limits": {
                "settle_max_delay_s": 0.1,
                "submit_ttl_s": self._ttl_s,
                "resolve_lag_s": 0.5,
                "lookup_pause_s": 900,
                **self._limits,
            },
            "log": {"format": "json"},
            "otel": {"enabled": False},
            "stop_budget_s": 10,
        }
        made = Replica(self, name, settings)
        self.replicas.append(made)
        return made

    # --------------------------------------------------------------------------------------------- input

    async def produce(self, rows: int, partitions: Iterable[int] | None = None) -> None:
        """So many requests, over these partitions (None: all) in turn, each with a body of its own."""
        producer = self.kafka.plain_producer()
        await producer.start()
        at_ms = int((self.origin + (datetime.now(UTC) - self.started) * SPEED).timestamp() * 1000)
        next_offset = Counter(dict.fromkeys(range(self.partitions), 0))
        partitions = range(self.partitions) if partitions is None else partitions
        for row in self.rows:
            next_offset[row.partition] += 1
        records = []
        for _, partition in zip(range(rows), cycle(sorted(partitions)), strict=False):
            number = len(self.rows)
            body = {"model": MODEL, "messages": [{"role": "user", "content": f"question {number} of {self.tag}"}]}
            value = json.dumps({"custom_id": f"row-{number}", "body": body}).encode()
            records.append(OutRecord(self.requests, b"key", value, (), partition, at_ms))
            self.rows.append(Row(partition, next_offset[partition], body))
            next_offset[partition] += 1
        await producer.send(records)
        await producer.stop()

    # ----------------------------------------------------------------------------------- the provider's side

    def put(self, **rule: object) -> int:
        """Put a fault or a gate in force."""
        return self.simulator.faults.put(FaultRule.model_validate(rule))

    async def reached(self, gate: str, count: int = 1, limit_s: float = 30.0) -> None:
        """So many calls have come to this gate."""
        held = self.simulator.faults.gate(gate)
        await self.until(lambda: held.waiting + held.passed >= count, f"call {count} at the gate {gate!r}", limit_s)

    async def release(self, gate: str, count: int | None = None) -> None:
        """Open a gate, for good or for so many calls."""
        await self.simulator.faults.gate(gate).release(count)

    def calls(self, call: str) -> int:
        """Calls of this name the provider has seen."""
        return self.simulator.faults.calls.get(call, 0)

    def provider_files(self) -> list[str]:
        """Files still there."""
        return [file.id for file in self.simulator.world.list_files(DEFAULT_PROJECT)]

    def provider_batches(self) -> int:
        """Batches that were ever created."""
        return len(self.simulator.world.list_batches(DEFAULT_PROJECT))

    # ----------------------------------------------------------------------------------- the reader's side

    async def _read_outcomes(self) -> None:
        assert self._tail is not None
        while True:
            for record in await self._tail.poll(50):
                source = json.loads(record.value or b"{}")["source"]
                self.outcomes[source["partition"], source["offset"]].append(record)

    async def until(
        self, condition: Callable[[], object], what: str, limit_s: float = 30.0, pause_s: float = 0.02
    ) -> None:
        """Poll for a fact; fails with its name and the replicas' logs."""
        deadline = time.monotonic() + limit_s
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            if time.monotonic() > deadline or any(replica.has_ended for replica in self.replicas):
                pytest.fail(f"{what} did not come about within {limit_s:g} s\n{self.logs()}")
            await asyncio.sleep(pause_s)

    def logs(self) -> str:
        """The end of every replica's log."""
        return "\n".join(f"---- {replica.name}\n{replica.tail_of_log()}" for replica in self.replicas)

    async def ledgers(self) -> dict[int, PartitionLedger]:
        """Every ledger partition, read to its end."""
        if self._reader is None:
            self._reader = self.kafka.reader()
            await self._reader.start()
        found = {}
        for partition in range(self.partitions):
            ledger = found[partition] = PartitionLedger(partition)
            async for records in self._reader.read_to_end(self.ledger, partition):
                for record in records:
                    if record.key is not None:
                        ledger.replay(record.key, record.value)
        return found

    async def settle_the_books(self, *, runs: Callable[[Row], int] = lambda _: 1, orphan_files: int | None = 0) -> None:
        """Wait until everything is through, then hold it against what was promised.

        ``runs``: how often the provider may have run a row. ``orphan_files``: uploaded by a life that ended before
        it could write the file's id down; they expire by themselves. None: however many.
        """
        wanted = {(row.partition, row.offset) for row in self.rows}
        await self.until(lambda: wanted <= self.outcomes.keys(), "an outcome for every request", 40)
        await self.until(self._all_clean, "the end of every lot", 40, 0.2)
        assert self._tail is not None
        await self.until(self._tail.caught_up, "the end of the outputs")
        seen = {where: len(records) for where, records in self.outcomes.items()}
        assert seen == dict.fromkeys(wanted, 1), "exactly one outcome for each input offset"
        ledgers = await self.ledgers()
        for (partition, offset), (record,) in self.outcomes.items():
            header = ledgers[partition].header
            assert header is not None
            expected = f"{header.ledger_id}-{partition}-{offset}"
            assert dict(record.headers)["ce_id"] == expected.encode()
            assert json.loads(record.value or b"")["outcome_id"] == expected
        ends = Counter(row.partition for row in self.rows)
        assert await committed(self.kafka, self.group, self.requests) == dict(ends)
        await self.simulator.settle()
        ran = {(row.partition, row.offset): self.simulator.bill.runs_of_body(row.body) for row in self.rows}
        assert ran == {(row.partition, row.offset): runs(row) for row in self.rows}, "rows the provider ran"
        paid = {self.simulator.bill.paid_runs_of_body(row.body) for row in self.rows}
        assert paid == {1}
        if orphan_files is not None:
            await self.until(
                lambda: len(self.provider_files()) == orphan_files, "the provider's files to be as expected"
            )
        for replica in self.replicas:
            assert not replica.told("batch_quarantined"), replica.tail_of_log()
            assert not replica.told("task_failed"), replica.tail_of_log()
            assert not replica.told("effect_failed"), replica.tail_of_log()

    async def _all_clean(self) -> bool:
        ends = Counter(row.partition for row in self.rows)
        for partition, ledger in (await self.ledgers()).items():
            if ledger.watermark != ends[partition] or ledger.settled:
                return False
            if not all(lot.state is LotState.CLEAN for lot in ledger.lots.values()):
                return False
        return True
