"""One run from the first record to the last line of the report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchferry.domain.errors import KafkaUnavailable
from broker import RealBroker

from .books import Books, audit, dossiers, is_finished
from .history import History, Spans, Told, quantile, spans, told_by
from .plan import Kind, plan
from .stage import Scale, Stage

RESTORE_GOAL_S = 10.0
"""A moved partition can settle again within so long (99 of 100, from its assignment)."""
FINISH_LOOK_S = 1.0
BATCH_WORDS = ("sealed", "dissolved", "adopted", "refused", "failed_whole", "twin_cancelled")


@dataclass(slots=True)
class Verdict:
    """What a run came to."""

    stage: Stage
    books: Books
    spans: Spans
    told: Sequence[Told]
    unfinished: str
    finished_in_s: float
    dossiers: Sequence[str]

    @property
    def faults(self) -> list[str]:
        """All that is wrong; empty when every promise was kept."""
        books = self.books
        found = [f"not finished: {self.unfinished}"] if self.unfinished else []
        found += [f"exit: {text}" for text in self.stage.bad_exits]
        found += books.wrong
        found += [f"{where}: {'; '.join(what)}" for where, what in books.offenders.items()]
        return found


async def run(folder: Path, scale: Scale, *, finish_limit_s: float, broker: RealBroker | None = None) -> Verdict:
    """Let the plan of this seed happen to the service, wait for its end, read the books."""
    history = History(journal=folder / "history.txt")
    stage = Stage(folder, scale, history, broker)
    async with stage:
        await stage.ready()
        history.restart()
        misfortunes = plan(scale.seed, scale.length_s)
        keeper = asyncio.create_task(stage.keep())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(stage.produce())
                group.create_task(stage.suffer(misfortunes))
            await stage.put_right()
            over_s = history.now_s()
            unfinished = await _until_finished(stage, finish_limit_s)
            finished_in_s = history.now_s() - over_s
            told = sorted(
                (one for replica in stage.replicas for one in told_by(replica.name, replica.log, history)),
                key=lambda one: one.at_s,
            )
            async with stage.reader() as reader:
                books = await audit(stage, reader, told)
                known = await dossiers(stage, reader, books, told)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
    disturbed = {name: [*stage.outages, *frozen] for name, frozen in stage.frozen.items()}
    return Verdict(stage, books, spans(told, stage.life_ends, disturbed), told, unfinished, finished_in_s, known)


async def _until_finished(stage: Stage, limit_s: float) -> str:
    until = stage.history.now_s() + limit_s
    why = "nobody has looked"
    while stage.history.now_s() < until:
        with contextlib.suppress(KafkaUnavailable):
            async with stage.reader() as reader:
                why = await is_finished(stage, reader)
            if not why:
                return ""
        await asyncio.sleep(FINISH_LOOK_S)
    return f"{why} after {limit_s:g} s"


def summary(verdict: Verdict) -> list[tuple[str, str]]:
    """The table of a run: what, and how much."""
    stage, books, seen = verdict.stage, verdict.books, verdict.spans
    done = stage.done
    outcomes = sum(len(row.outcomes) for row in books.rows.values())
    events = {one.event for one in verdict.told}
    longest = max(seen.unowned, default=(0.0, -1, 0.0))
    table = [
        ("seed", str(stage.scale.seed)),
        ("records in", f"{len(books.rows):,} (acknowledged {stage.sent:,}, unsure {stage.unsure:,})"),
        ("outcomes out", f"{outcomes:,}"),
        ("outcomes by class", _counts(books.classes)),
        ("kill -9", f"{done[Kind.KILL] + done[Kind.KILL_FROZEN]} (of frozen replicas: {done[Kind.KILL_FROZEN]})"),
        ("freezes", f"{done[Kind.FREEZE_SHORT]} short, {done[Kind.FREEZE_LONG]} beyond the session"),
        ("orderly stops", f"{done[Kind.TERMINATE]}, rolling restarts {done[Kind.ROLLING]}"),
        ("ended by themselves", "; ".join(stage.ended_by_themselves) or "none"),
        ("broker", f"killed {done[Kind.BROKER_KILL]}, frozen {done[Kind.BROKER_FREEZE]}"),
        ("provider restarts", str(done[Kind.PROVIDER_DOWN])),
        *((f"  {name}", f"{hits} calls") for name, hits in sorted(stage.faults_fired.items())),
        ("provider batches", _counts(books.provider_batches)),
        ("batches", ", ".join(f"{word} {_told(verdict, f'batch_{word}')}" for word in BATCH_WORDS)),
        ("rows sent again", f"{books.retries_lived:,} (told: {_counts(books.retried_rows)})"),
        ("paid runs", f"{books.paid_runs:,}; more than one of a row: {_counts(books.paid_again)}"),
        ("possibly paid twice", _counts(books.allowances)),
        ("lots at the end", _counts(books.lots)),
        ("files left", _counts(books.files_left)),
        ("restores", _times(seen.restores_s)),
        ("assigned to restored", _times(seen.since_assigned_s)),
        ("  undisturbed", f"{_times(seen.calm_since_assigned_s)} (goal: p99 {RESTORE_GOAL_S:g} s)"),
        ("nobody's partition", _times([length for length, _, _ in seen.unowned])),
        ("longest gap", f"{longest[0]:.2f} s, partition {longest[1]}, from {longest[2]:.1f} s"),
        ("complaints", str(_told(verdict, "watchdog_complaint"))),
        ("finished after", f"{verdict.finished_in_s:.1f} s without misfortunes"),
    ]  # fmt: skip
    if "library_error" in events:
        table.append(("library errors", str(_told(verdict, "library_error"))))
    return table


def _told(verdict: Verdict, event: str) -> int:
    return sum(one.event == event for one in verdict.told)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _times(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return (
        f"{len(values)}: p50 {quantile(values, 0.5):.2f} s, p99 {quantile(values, 0.99):.2f} s, max {max(values):.2f} s"
    )


def report(verdict: Verdict) -> str:
    """What is printed: the table; of a failed run also seed, history and everything known of the offenders."""
    table = summary(verdict)
    width = max(len(name) for name, _ in table)
    lines = [f"{name:<{width}}  {text}" for name, text in table]
    faults = verdict.faults
    if not faults:
        return "\n".join([*lines, "", "The books agree."])
    scale = verdict.stage.scale
    shown = faults[:40] + ([f"and {len(faults) - 40} more"] if len(faults) > 40 else [])
    return "\n".join(
        [
            *lines,
            "",
            f"FAILED: seed {scale.seed}, {scale.length_s:g} s, {scale.records} records; logs in {verdict.stage.folder}",
            "",
            "history",
            *verdict.stage.history.lines(),
            "",
            *verdict.dossiers,
            "",
            "what is wrong",
            *shown,
        ]
    )
