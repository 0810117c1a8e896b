"""The promise about deadlines over a simulated week: a provider that stalls at random, kills, rows around the clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
WEEKS = """
import json, sys
from sim.life import ready
from sim.week import Plan, week
ready()
seed, plan = int(sys.argv[1]), json.loads(sys.argv[2])
one = week(seed, Plan(**plan))
print(json.dumps({"fault": one.fault, "facts": one.facts, "kills": one.misfortunes["kill"], "end": one.history[-40:]}))
"""


def lived(seed: int, **plan: Any) -> dict[str, int]:
    """Live through this week in a process of its own; what was counted, once no promise was broken."""
    done = subprocess.run(
        [sys.executable, "-c", WEEKS, str(seed), json.dumps(plan)],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    week = json.loads(done.stdout)
    assert week["fault"] == "", f"seed {seed}, {plan}\n" + "\n".join([*week["end"], week["fault"]])
    facts: dict[str, int] = week["facts"]
    assert week["kills"] == plan.get("kills", 3), f"seed {seed}, {plan}"
    assert facts["records"] == plan.get("rows", 300), f"seed {seed}, {plan}"
    assert facts["batch expired"] + facts["batch cancelled"] >= 5, f"seed {seed}, {plan}: {facts}"
    return facts


def check_kept(seed: int, **plan: Any) -> None:
    """With the lane on, every outcome of the week is in time, and none is told to be late."""
    facts = lived(seed, lane="on", **plan)
    assert facts["lane sync"] >= 20, f"seed {seed}: {facts}"
    assert facts["late"] == facts["missed_rows"] == 0, f"seed {seed}: {facts}"


def check_told(seed: int, **plan: Any) -> None:
    """Every miss of the week is told when it happens, and was told as a risk before its deadline."""
    facts = lived(seed, **plan)
    assert facts["late"] >= 5, f"seed {seed}: {facts}"
    assert facts["missed_rows"] == facts["late"] == facts["foretold"], f"seed {seed}: {facts}"
    assert ("lane sync" in facts) == (plan["lane"] == "tiny"), f"seed {seed}: {facts}"


def test_every_deadline_of_a_week_is_kept_with_the_lane() -> None:
    """Batches stall for hours and days, expire and hang in cancelling; no outcome comes after its deadline."""
    check_kept(1)


def test_every_miss_of_a_week_without_the_lane_is_told() -> None:
    """The outcomes that are late are exactly the offsets that the events topic names, each once."""
    check_told(1, lane="off", speed=900)


@pytest.mark.long
def test_every_miss_of_a_week_with_hardly_any_budget_is_told() -> None:
    """What the sync budget does not take goes by batch: some deadlines are missed, each is told, the rest is kept."""
    check_told(3, lane="tiny", days=4, rows=200)


LONG = {"replicas": 3, "partitions": 4, "rows": 700, "kills": 8}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_weeks_keep_every_deadline_with_the_lane() -> None:
    """More seeds, and a fleet whose partitions move."""
    for seed in range(100, 106):
        check_kept(seed)
    for seed in range(200, 203):
        check_kept(seed, **LONG)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_weeks_tell_every_miss() -> None:
    """More seeds without the lane and with hardly any budget, and a fleet whose partitions move."""
    for lane in ("off", "tiny"):
        for seed in range(100, 103):
            check_told(seed, lane=lane)
        check_told(200, lane=lane, **LONG)
