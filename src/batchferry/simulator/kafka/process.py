"""A process of the simulated world: it can be slow, frozen or dead, and everything it asks for goes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn


class SimProcess:
    """One process that uses the cluster.

    ``alive`` may be set False at any moment and is never set True again: a restart is a new process. A simulation
    that freezes processes by holding back their part of the event loop needs neither ``pause`` nor ``wake``;
    those freeze the Kafka clients only.
    """

    def __init__(self, name: str, latency_s: tuple[float, float] | None = None) -> None:
        self.name = name
        self.alive = True
        self.latency_s = latency_s
        """Shortest and longest one-way delay to the broker; None takes the cluster's."""
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """What the clients of this process run in the background, for whoever must cancel it after a death."""
        self._woken: asyncio.Event | None = None
        self._limbo: list[asyncio.Future[None]] = []

    @property
    def is_paused(self) -> bool:
        """Whether the clients are frozen now."""
        return self._woken is not None

    def pause(self) -> None:
        """Freeze the clients: no request leaves, no answer is taken, no heartbeat is sent."""
        if self._woken is None:
            self._woken = asyncio.Event()

    def wake(self) -> None:
        """Let the clients go on, with whatever they were at."""
        woken, self._woken = self._woken, None
        if woken is not None:
            woken.set()

    async def ready(self) -> None:
        """Return at once for a running process, later for a frozen one, never for a dead one."""
        while self._woken is not None:
            await self._woken.wait()
        if not self.alive:
            await self.never()

    async def never(self) -> NoReturn:
        """What a call of a dead process does; the future is kept, or the waiting task would be collected."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limbo.append(future)
        await future
        raise AssertionError("nobody answers a dead process")

    def run(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a client's own background work in the caller's context."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}:{name}")
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task
