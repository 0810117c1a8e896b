"""An event loop in virtual time and a world on it, for tests of the cluster inside the process."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from batchferry.ports import OutRecord
from batchferry.simulator.kafka import SimCluster, SimKafka, SimKafkaSettings, SimProcess

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class _Jumps(selectors.SelectSelector):
    """Never waits: where the loop would, its time jumps."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None):
        if timeout is None:
            raise RuntimeError("everything waits and no timer is set")
        self.loop.now_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while everybody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _Jumps()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


class World:
    """A cluster and its processes."""

    def __init__(self, seed: int = 1, **cluster: Any) -> None:
        self.rng = random.Random(seed)
        self.started_s = asyncio.get_running_loop().time()
        self.cluster = SimCluster(self.rng, wall_clock=self.now, **cluster)
        self.processes: list[SimProcess] = []

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())

    def port(self, name: str = "replica", **settings: Any) -> SimKafka:
        process = SimProcess(name)
        self.processes.append(process)
        return SimKafka(self.cluster, process, SimKafkaSettings(**settings))

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [record.value for record in self.cluster.committed_records(topic, partition)]

    def remembers(self, words: str) -> bool:
        return any(words in line for line in self.cluster.history)


def virtual(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """Run the test on a loop in virtual time, in a world of its own; every task it leaves is cancelled."""

    def run() -> None:
        loop = VirtualLoop()

        async def whole() -> None:
            await test(World())

        try:
            loop.run_until_complete(whole())
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left)) if left else None
        finally:
            loop.close()

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def record(topic: str, value: bytes | None, key: bytes | None = b"k", partition: int | None = 0) -> OutRecord:
    """A record to be written."""
    return OutRecord(topic, key, value, partition=partition)


async def producer(port: SimKafka, transactional_id: str = "txn", topic: str = "in", group: str = "g"):
    """A partition producer that has started."""
    made = port.partition_producer(topic, 0, group, transactional_id)
    await made.init()
    return made


async def read(port: SimKafka, topic: str, partition: int = 0, start: int | None = None) -> list:
    """Everything to the end."""
    reader = port.reader()
    await reader.start()
    try:
        return [one async for chunk in reader.read_to_end(topic, partition, start) for one in chunk]
    finally:
        await reader.stop()


async def until(condition: Callable[[], object], limit_s: float = 300.0, step_s: float = 0.05) -> None:
    """Let virtual time pass until this holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        assert loop.time() < deadline, "it did not come about"
        await asyncio.sleep(step_s)
