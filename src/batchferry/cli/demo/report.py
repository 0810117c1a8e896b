"""The table at the end of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from batchferry.cli.console import count, counts_text, facts, length, money, out, table

if TYPE_CHECKING:
    from batchferry.cli.demo.books import Books
    from batchferry.config import Settings


def as_json(books: Books, settings: Settings, took_s: float | None) -> dict[str, object]:
    """The same for --json."""
    wait = settings.wait_plan(next(iter(settings.routes.values())))
    return {
        "ok": all(check.holds for check in books.checks()),
        "records": books.records,
        "succeeded": books.succeeded,
        "failed": dict(books.failed),
        "flags": dict(books.flags),
        "sent_again": dict(books.sent_again),
        "batches": len(books.batches),
        "sync_answered": books.sync_answered,
        "waited_at_most_s": round(max(books.waits_s, default=0.0)),
        "wait_threshold_s": wait.max_wait_s,
        "answered_after_at_most_s": round(max(books.spans_s, default=0.0)),
        "deadlines_met": books.met,
        "deadlines_missed": books.missed,
        "cost_picodollars": books.paid,
        "sync_cost_picodollars": books.listed,
        "unpriced": books.unpriced,
        "checks": [check._asdict() for check in books.checks()],
        "took_s": took_s,
    }


def show(books: Books, settings: Settings, took_s: float | None) -> None:
    """Print it."""
    console = out()
    wait = settings.wait_plan(next(iter(settings.routes.values())))
    saved = books.listed - books.paid
    share = f" ({saved / books.listed:.0%})" if books.listed else ""
    told: list[tuple[object, object]] = [
        ("records in", count(books.records)),
        ("succeeded", count(books.succeeded) + (f"  ({counts_text(books.flags)})" if books.flags else "")),
        ("failed", f"{count(books.all_failed)}  ({counts_text(books.failed)})"),
        ("sent again", counts_text(books.sent_again) or "none"),
        ("batches", count(len(books.batches))),
        ("sync lane", f"{count(books.sync_answered)} answers in {count(len(books.waves))} waves"),
        (
            "waited for a batch",
            (f"{_spread(books.waits_s)}; threshold {length(wait.max_wait_s)}"),
        ),
        ("answered after", f"{_spread(books.spans_s)}; promised {length(wait.sla_s)}"),
        ("deadlines", f"{count(books.met)} met, {count(books.missed)} missed"),
        ("tokens", f"{count(books.input_tokens)} in, {count(books.output_tokens)} out"),
        (
            "money",
            f"{money(books.paid)} spent, {money(books.listed)} outside a batch: {money(saved)} saved{share}",
        ),
        (
            "answers",
            (
                f"{count(books.agreeing)} of {count(books.labelled)} name the data set's label"
                " (the simulated model guesses by words)"
            ),
        ),
    ]
    if took_s is not None:
        told.append(("took", f"{took_s:.0f} s"))
    console.print(facts(told))
    checked = table("", "check", "", title="\nthe books, from the topics alone (read_committed)")
    for check in books.checks():
        mark = Text("ok", style="green") if check.holds else Text("FAILED", style="bold red")
        checked.add_row(mark, Text(check.promise), Text(check.detail))
    console.print(checked)


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    return f"half within {length(ordered[len(ordered) // 2])}, all within {length(ordered[-1])}"
