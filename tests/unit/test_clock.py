"""Clocks."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from batchferry.clock import ScaledClock, SystemClock
from batchferry.ports import Clock


def test_clocks_keep_the_port():
    """Both clocks can stand where the engine wants a clock."""
    now = datetime.now(UTC)
    assert isinstance(SystemClock(), Clock)
    assert isinstance(ScaledClock(2, now, now), Clock)


def test_a_scaled_clock_follows_its_formula():
    """The time is origin + (wall clock - started) * speed, so two processes with the same numbers agree."""
    origin = datetime(2030, 1, 1, tzinfo=UTC)
    started = datetime.now(UTC) - timedelta(seconds=10)
    clock = ScaledClock(360, origin, started)
    passed = clock.now() - origin
    assert timedelta(hours=1) <= passed < timedelta(hours=1, minutes=30)
    assert ScaledClock(360, origin, started).now() - clock.now() < timedelta(minutes=5)


async def test_a_scaled_sleep_is_short_on_the_wall():
    """An hour of a fast clock is a moment here, and both its readings move by that hour."""
    now = datetime.now(UTC)
    clock = ScaledClock(36_000, now, now)
    wall, before, monotonic = time.monotonic(), clock.now(), clock.monotonic()
    await clock.sleep(3600)
    assert time.monotonic() - wall < 5
    assert clock.now() - before >= timedelta(minutes=59)
    assert clock.monotonic() - monotonic >= 3500


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_clock_runs_forward(speed: float):
    """A clock that stands or runs backwards is refused."""
    now = datetime.now(UTC)
    with pytest.raises(ValueError):
        ScaledClock(speed, now, now)


def test_instants_need_a_zone():
    """A naive instant could be any of 24."""
    with pytest.raises(ValueError):
        ScaledClock(1, datetime(2026, 1, 1), datetime.now(UTC))
