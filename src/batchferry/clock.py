"""Clocks that keep the ``Clock`` port: the wall clock, and one that runs faster for rehearsals."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta


class SystemClock:
    """The wall clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class ScaledClock:
    """A clock that stood at ``origin`` when the wall clock showed ``started`` and runs ``speed`` times as fast.

    ``now = origin + (wall clock - started) * speed``. Two processes given the same three numbers (a service and
    the simulated provider of a rehearsal) agree about the time without talking to each other.

    Raises:
        ValueError: ``speed`` is not above zero, or an instant has no time zone.
    """

    def __init__(self, speed: float, origin: datetime, started: datetime) -> None:
        if not speed > 0:
            raise ValueError("a clock's speed is above zero")
        if origin.tzinfo is None or started.tzinfo is None:
            raise ValueError("origin and started need a time zone")
        self.speed = speed
        self.origin = origin.astimezone(UTC)
        self.started = started.astimezone(UTC)

    def now(self) -> datetime:
        elapsed: timedelta = datetime.now(UTC) - self.started
        return self.origin + elapsed * self.speed

    def monotonic(self) -> float:
        return time.monotonic() * self.speed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self.speed)
