"""``python -m sim``: see the package."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from batchferry.engine.failpoints import Failpoint
from sim.families import FAMILIES, OPENAI
from sim.life import DISOWN_POINTS, live, ready
from sim.mutants import BY_NAME


def _one(what: tuple[int, str, str]) -> Any:
    """One life in a process of its own."""
    seed, mutant, provider = what
    if mutant:
        BY_NAME[mutant].plant()
    return live(seed, provider=provider)


def _hunt(names: list[str], first_seed: int, runs: int, jobs: int, provider: str) -> int:
    """Each planted fault must break a life within so many; the answer is the exit code."""
    survived = []
    for name in names:
        began = time.monotonic()
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
            lives = ((seed, name, provider) for seed in range(first_seed, first_seed + runs))
            caught = next((outcome for outcome in _in_order(pool, lives, jobs) if outcome.fault), None)
            pool.terminate()
        if caught is None:
            survived.append(name)
            print(f"{name:24} SURVIVED {runs} lives: {BY_NAME[name].what}", flush=True)
        else:
            fault = caught.fault.strip().splitlines()[-1]
            print(
                f"{name:24} caught by life {caught.seed - first_seed + 1} (seed {caught.seed}) in {time.monotonic() - began:.0f} s: {fault}",
                flush=True,
            )
    print(f"{len(names) - len(survived)} of {len(names)} planted faults caught")
    return 1 if survived else 0


def _in_order(pool: Any, lives: Iterator[tuple[int, str, str]], ahead: int) -> Iterator[Any]:
    """Results as they were asked for, with few more asked for than are wanted."""
    waiting: deque[Any] = deque()
    for life in lives:
        waiting.append(pool.apply_async(_one, (life,)))
        if len(waiting) > ahead:
            yield waiting.popleft().get()
    while waiting:
        yield waiting.popleft().get()


def main() -> int:
    """The exit code: 0 when no life broke, or every planted fault was caught."""
    parser = argparse.ArgumentParser(prog="sim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutants", nargs="*", help="plant these faults (none named: each) and see them caught")
    parser.add_argument(
        "--provider",
        choices=[*FAMILIES, "any"],
        default=OPENAI.name,
        help="whose API the lives speak; any: the seed draws it, OpenAI's most often",
    )
    parser.add_argument("--history", type=int, default=60, help="lines of a broken life's history")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of words is part of a life
        os.execve(sys.executable, [sys.executable, "-m", "sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    ready()
    if arguments.mutants is not None:
        names = arguments.mutants or list(BY_NAME)
        return _hunt(names, arguments.seed, arguments.runs, arguments.jobs, arguments.provider)

    began = time.monotonic()
    reached: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    misfortunes: Counter[str] = Counter()
    families: Counter[str] = Counter()
    facts: Counter[str] = Counter()
    broken = []
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    hours = 0.0
    with multiprocessing.get_context("fork").Pool(min(arguments.jobs, arguments.runs), maxtasksperchild=1) as pool:
        lives = ((seed, "", arguments.provider) for seed in seeds)
        for done, outcome in enumerate(pool.imap_unordered(_one, lives), 1):
            families[outcome.family] += 1
            reached += outcome.reached
            struck += outcome.struck
            misfortunes += outcome.misfortunes
            facts += outcome.facts
            hours += outcome.business_h
            if outcome.fault:
                broken.append(outcome)
                print(f"\nseed {outcome.seed} ({outcome.family}) broke: {outcome.fault}")
                print("\n".join(f"  {line}" for line in outcome.history[-arguments.history :]))
                print(f"repeat it: make sim SEED={outcome.seed} RUNS=1 PROVIDER={outcome.family}", flush=True)
            elif done % 50 == 0:
                print(f"{done} lives, {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{'failpoint':28} {'reached':>9} {'struck':>7}")
    for point in Failpoint:
        print(f"{point.value:28} {reached[point.value]:9} {struck[point.value]:7}")
    print("misfortunes: " + ", ".join(f"{name} {count}" for name, count in sorted(misfortunes.items())))
    print("families: " + ", ".join(f"{name} {count}" for name, count in sorted(families.items())))
    print(
        f"{arguments.runs} lives, {len(broken)} broken; {facts['records']} records, {facts['outcomes']} outcomes, "
        f"{facts['batches']} provider batches, {hours / 24:.0f} days in {time.monotonic() - began:.0f} s"
    )
    may_disown = arguments.provider == "any" or not FAMILIES[arguments.provider].is_fenced
    expected = [point for point in Failpoint if may_disown or point not in DISOWN_POINTS]
    unreached = [point.value for point in expected if not reached[point.value]]
    if unreached and arguments.runs >= 200:
        print(f"never reached: {', '.join(unreached)}")
    if broken:
        print(f"broken seeds: {sorted(one.seed for one in broken)}")
    return 1 if broken or (unreached and arguments.runs >= 1000 and arguments.provider in {OPENAI.name, "any"}) else 0


if __name__ == "__main__":
    sys.exit(main())
