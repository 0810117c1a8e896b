"""The simulator's time: the wall clock at any speed, or a clock that stands until it is moved."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol


class VirtualClock(Protocol):
    """Where the simulator reads the time. Every time stamp it writes comes from here."""

    def timestamp(self) -> float:
        """Virtual seconds since the epoch; never goes back."""
        ...

    def now(self) -> datetime:
        """The virtual instant, aware UTC."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait that many virtual seconds."""
        ...

    def describe(self) -> dict[str, Any]:
        """What another process needs to run the same clock."""
        ...


class SimClock:
    """``origin + (real time - started_real) * speed``.

    Two processes that are given the same three values agree on the time without talking. ``real_time`` gives
    real seconds since the epoch.
    """

    def __init__(
        self,
        speed: float = 1.0,
        origin: datetime | None = None,
        started_real: datetime | None = None,
        real_time: Callable[[], float] = time.time,
    ) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"clock speed is {speed}: give a number above 0, such as 1440 for a day in a minute")
        self._real_time = real_time
        self.speed = speed
        self.started_real = started_real or datetime.fromtimestamp(real_time(), UTC)
        self.origin = origin or self.started_real
        for name, instant in (("origin", self.origin), ("started_real", self.started_real)):
            if instant.tzinfo is None:
                raise ValueError(f"clock {name} has no time zone: write it with an offset, such as a final Z")

    def timestamp(self) -> float:
        """See ``VirtualClock``."""
        return self.origin.timestamp() + (self._real_time() - self.started_real.timestamp()) * self.speed

    def now(self) -> datetime:
        """See ``VirtualClock``."""
        return datetime.fromtimestamp(self.timestamp(), UTC)

    async def sleep(self, seconds: float) -> None:
        """See ``VirtualClock``."""
        await asyncio.sleep(max(seconds, 0.0) / self.speed)

    def describe(self) -> dict[str, Any]:
        """See ``VirtualClock``."""
        return {
            "kind": "running",
            "now": self.now().isoformat(),
            "speed": self.speed,
            "origin": self.origin.isoformat(),
            "started_real": self.started_real.isoformat(),
        }


class ManualSimClock:
    """A clock that moves only when it is told to, for tests."""

    def __init__(self, origin: datetime = datetime(2026, 11, 16, 8, 0, tzinfo=UTC)) -> None:
        self._now = origin
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._slept = asyncio.Event()

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now += timedelta(seconds=seconds)
        while self._sleepers and self._sleepers[0][0] <= self.timestamp():
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)

    @property
    def sleepers(self) -> int:
        """Calls that wait for this clock to be moved."""
        return sum(not sleeper.done() for _, _, sleeper in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """See ``VirtualClock``; ends when the clock has been moved so far."""
        if seconds <= 0:
            return
        sleeper = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.timestamp() + seconds, next(self._numbers), sleeper))
        self._slept.set()
        await sleeper

    async def slept_on(self, count: int) -> None:
        """Wait until so many calls wait for this clock."""
        while self.sleepers < count:
            self._slept.clear()
            await self._slept.wait()

    def timestamp(self) -> float:
        """See ``VirtualClock``."""
        return self._now.timestamp()

    def now(self) -> datetime:
        """See ``VirtualClock``."""
        return self._now

    def describe(self) -> dict[str, Any]:
        """See ``VirtualClock``."""
        return {"kind": "manual", "now": self._now.isoformat()}
