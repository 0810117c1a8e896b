"""A few whole lives in every run of the tests; ``make sim`` runs a thousand, ``make sim-mutants`` plants every fault."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LIVES = """
import hashlib, json, sys
from sim.life import live, ready
from sim.mutants import BY_NAME
ready()
mutant, *seeds = sys.argv[1:]
if mutant:
    BY_NAME[mutant].plant()
for seed in seeds:
    one = live(int(seed))
    digest = hashlib.sha256("\\n".join(one.history).encode()).hexdigest()
    print(json.dumps({"fault": one.fault, "history": digest, "records": one.facts["records"], "end": one.history[-30:]}))
"""


@functools.cache
def lives(*seeds: int, mutant: str = "") -> list[dict[str, object]]:
    """Run these lives in a process of their own, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", LIVES, mutant, *map(str, seeds)],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


SEEDS = (7002, 7005, 7022)
"""The second has the sync lane."""


def test_a_few_lives_end_well() -> None:
    """Replicas die, pause and move, replies are lost, the broker goes away: every promise is kept."""
    for seed, life in zip(SEEDS, lives(*SEEDS), strict=True):
        assert life["fault"] == "", f"make sim SEED={seed} RUNS=1 repeats it\n" + "\n".join(map(str, life["end"]))
        assert life["records"]


def test_a_seed_is_a_life() -> None:
    """The same seed has the same history, line by line, in another process and whatever was lived before it."""
    (alone,) = lives(SEEDS[1])
    assert alone == lives(*SEEDS)[1]


def test_a_planted_fault_breaks_a_life() -> None:
    """The books notice: a life that is well without the fault breaks with it."""
    (life,) = lives(7005, mutant="claim-makes-a-ledger")
    assert "another ledger id" in str(life["fault"])
