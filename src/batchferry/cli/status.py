"""``batchferry status``, ``batches`` and ``show``: where everything stands, from Kafka alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from batchferry.cli.console import (
    count,
    counts_text,
    facts,
    fail,
    instant,
    length,
    money,
    out,
    print_json,
    rows,
    size,
    table,
    wants_json,
)
from batchferry.cli.exits import Exit
from batchferry.cli.history import Story, find_rows, parse_place, tell_rows
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.cli.standing import BatchStanding, Standing, find_batches, read_events, read_standing
from batchferry.domain.ledger import LotState

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import KafkaPort

_OVER = frozenset({LotState.DONE, LotState.CLEAN})
SHOWN_BATCHES = 20
T = TypeVar("T")


def status(config: ConfigOption = None, as_json: JsonOption = None) -> None:
    """Show what waits, what is at a provider and what is settled, for each partition and batch.

    Reads the service's own topics; the service need not run. Changes nothing.
    """
    settings = load(config, keys_needed=False)
    standing = _ask(settings, read_standing)
    if wants_json(as_json):
        print_json(_status_json(standing))
        return
    _show_partitions(standing)
    live = [batch for batch in standing.batches if batch.state not in _OVER]
    over = len(standing.batches) - len(live)
    if live:
        _show_batches(live[:SHOWN_BATCHES], "\nbatches under way")
    if len(live) > SHOWN_BATCHES:
        out().print(f"... and {count(len(live) - SHOWN_BATCHES)} more, see 'batchferry batches --live'")
    if over:
        out().print(f"\n{count(over)} batches have ended, see 'batchferry batches'")
    _show_holds(standing)


def batches(
    config: ConfigOption = None,
    live: Annotated[bool, typer.Option("--live", help="Only those that have not ended.")] = False,
    as_json: JsonOption = None,
) -> None:
    """List the batches the ledger knows: those under way, and the ended ones of the last days."""
    settings = load(config, keys_needed=False)
    standing = _ask(settings, read_standing)
    found = [batch for batch in standing.batches if not live or batch.state not in _OVER]
    if wants_json(as_json):
        print_json([batch.as_json() for batch in found])
        return
    _show_batches(found, None)


def show(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A batch (our id, its beginning, the provider's id), a custom_id, PARTITION:OFFSET, or"
            " TOPIC-PARTITION@OFFSET.",
        ),
    ],
    config: ConfigOption = None,
    custom_id: Annotated[
        bool, typer.Option("--custom-id", help="TARGET is a custom_id, whatever it looks like.")
    ] = False,
    answer: Annotated[
        bool, typer.Option("--answer", help="Also print the answer, the request and the provider's words.")
    ] = False,
    as_json: JsonOption = None,
) -> None:
    """Show one batch, or one request: its history, where it is, why it waits, or why it ended as it did.

    A custom_id is searched for in the output topics and in the unsettled part of the input; all rows that have it are
    told. Prompts and answers are not printed unless --answer is given.
    """
    settings = load(config, keys_needed=False)

    async def look(kafka: KafkaPort, settings: Settings, now: datetime) -> Shown:
        standing = await read_standing(kafka, settings, now)
        return await _look(kafka, settings, standing, target, is_custom_id=custom_id, with_answer=answer)

    shown = _ask(settings, look)
    if shown.batch is not None:
        if wants_json(as_json):
            print_json({**shown.batch.as_json(), "events": shown.events})
        else:
            _show_one(shown.batch, shown.events)
        return
    if wants_json(as_json):
        print_json({"target": target, "rows": [story.as_json() for story in shown.stories], "more_rows": shown.more})
        return
    for story in shown.stories:
        _show_story(story)
    if shown.more:
        out().print(f"\n... and {count(shown.more)} more rows have this custom_id; name one as PARTITION:OFFSET")


@dataclass(slots=True)
class Shown:
    """What a target turned out to be: a batch with its events, or rows."""

    batch: BatchStanding | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    stories: list[Story] = field(default_factory=list)
    more: int = 0


async def _look(
    kafka: KafkaPort, settings: Settings, standing: Standing, target: str, *, is_custom_id: bool, with_answer: bool
) -> Shown:
    batches = [] if is_custom_id else find_batches(standing, target)
    if len(batches) == 1:
        one = batches[0]
        return Shown(one, await read_events(kafka, settings, one.batch_id))
    if len(batches) > 1:
        shown = [batch.batch_id for batch in batches[:SHOWN_BATCHES]]
        fail(Exit.USAGE, f"{target!r} fits {len(batches)} batches; give more of the id", *shown)
    place = None if is_custom_id else parse_place(target, standing.topic)
    if place is not None and place.partition >= len(standing.partitions):
        fail(
            Exit.USAGE,
            f"topic {standing.topic} has partitions 0 to {len(standing.partitions) - 1}, there is no {target!r}",
            "if it is a custom_id, add --custom-id",
        )
    found = await find_rows(kafka, settings, standing, place or target)
    if not found.matches:
        fail(
            Exit.FAILED,
            f"{target!r} is no batch the ledger knows, and no record or outcome has it as its custom_id",
            "remedy: 'batchferry batches' lists the batches; of a row whose outcome the topics no longer have, give"
            " the place, as PARTITION:OFFSET",
        )
    stories = await tell_rows(kafka, settings, standing, found.matches, with_answer=with_answer)
    return Shown(stories=stories, more=found.more)


def _ask(settings: Settings, look: Callable[[KafkaPort, Settings, datetime], Awaitable[T]]) -> T:
    from batchferry import app  # noqa: PLC0415 - see run

    async def work() -> T:
        kafka = app.build_kafka(settings)
        try:
            return await look(kafka, settings, app.build_clock(settings).now())
        finally:
            await kafka.aclose()

    return asyncio.run(work())


def _status_json(standing: Standing) -> dict[str, object]:
    return {
        "topic": standing.topic,
        "group": standing.group,
        "at": standing.at,
        "unsettled": standing.unsettled,
        "partitions": [{**asdict(one), "open": one.open} for one in standing.partitions],
        "batches_by_state": dict(Counter(batch.state.value for batch in standing.batches)),
        "batches": [batch.as_json() for batch in standing.batches],
        "holds": [
            {
                "scope": hold.scope,
                "reason": hold.reason,
                "label": hold.label,
                "since": hold.since,
                "until": hold.until,
                "times": hold.times,
            }
            for hold in standing.holds
        ],
    }


def _show_partitions(standing: Standing) -> None:
    console = out()
    console.print(f"[bold]{standing.topic}[/], group {standing.group}: {count(standing.unsettled)} records unsettled\n")
    numbers = ("start", "end", "read to", "watermark", "unsettled", "no batch yet", "in batches")
    shown = table("partition", *numbers, "lots", right=("partition", *numbers))
    for one in standing.partitions:
        shown.add_row(
            str(one.partition),
            count(one.log_start),
            count(one.log_end),
            "-" if one.read is None else count(one.read),
            count(one.watermark),
            count(one.unsettled),
            count(one.open),
            count(one.in_lots),
            counts_text(one.lots) or "-",
        )
    console.print(shown)
    for one in standing.partitions:
        if one.fault:
            console.print(f"partition {one.partition}: {one.fault}", style="red", markup=False)
    if all(one.ledger_id is None for one in standing.partitions):
        console.print("\nThe service has not run on this topic yet: there is no ledger.")


def _show_batches(found: list[BatchStanding], title: str | None) -> None:
    if not found:
        out().print("no batches")
        return
    right = ("rows", "unsettled")
    shown = table(
        "batch", "state", "rows", "unsettled", "model", "sealed", "provider batch", "lines", title=title, right=right
    )
    shown.columns[0].no_wrap = True
    out().print(rows(shown, map(_batch_row, found)))


def _batch_row(batch: BatchStanding) -> tuple[object, ...]:
    lot = batch.any_lot
    return (
        batch.batch_id,
        batch.state.value,
        count(lot.rows),
        count(batch.unsettled),
        lot.key.model + (f" [{lot.key.slice}]" if lot.key.slice else ""),
        f"{lot.created_at:%m-%d %H:%M} {lot.seal_reason}",
        ", ".join(batch.provider_ids) or "-",
        counts_text(batch.classes) or "-",
    )


def _show_holds(standing: Standing) -> None:
    if not standing.holds:
        return
    shown = table("held", "reason", "since", "until", "times", title="\nholds")
    lines = (
        (
            hold.label or hold.scope,
            hold.reason,
            instant(hold.since),
            instant(hold.until) or "an operator releases it",
            hold.times,
        )
        for hold in standing.holds
    )
    out().print(rows(shown, lines))


def _show_one(batch: BatchStanding, events: list[dict[str, Any]]) -> None:
    console = out()
    lot = batch.any_lot
    paid, listed = batch.prices
    waited_s = None if lot.submitted_at is None else (lot.submitted_at - lot.created_at).total_seconds()
    told = [
        ("batch", batch.batch_id),
        ("state", batch.state.value),
        ("key", lot.key.label),
        ("rows", f"{count(lot.rows)} ({count(batch.unsettled)} unsettled)"),
        ("file", f"{size(lot.bytes)}, about {count(lot.tokens)} input tokens, {lot.input_file_id or 'no file yet'}"),
        ("sealed", f"{instant(lot.created_at)} because of {lot.seal_reason or '-'}"),
        ("submitted", f"{instant(lot.submitted_at) or '-'} ({length(waited_s)} after sealing)"),
        ("provider batch", ", ".join(batch.provider_ids) or "-"),
        ("lines", counts_text(batch.classes) or "-"),
        ("cost", f"{money(paid)} (outside a batch {money(listed)})"),
    ]
    console.print(facts(told))
    parts = table(
        "partition", "state", "rows", "submission", "lines", title="\nparts", right=("partition", "rows", "submission")
    )
    lines = (
        (
            partition,
            one.state.value,
            count(one.own_rows),
            one.submission,
            counts_text(one.tally.classes) if one.tally is not None else "-",
        )
        for partition, one in sorted(batch.lots.items())
    )
    console.print(rows(parts, lines))
    if events:
        console.print(rows(table("at", "event", "what", title="\nhistory"), map(_event_row, events)))


def _event_row(event: dict[str, Any]) -> tuple[object, ...]:
    told = {
        name: value
        for name, value in event.items()
        if name not in {"schema_version", "kind", "event_id", "at", "batch", "partitions"} and value is not None
    }
    return event.get("at"), event.get("kind"), ", ".join(f"{name} {value}" for name, value in told.items())


def _show_story(story: Story) -> None:
    console = out()
    key = "-" if story.key is None else f"{story.key.label} (key:{story.key.digest})"
    told: list[tuple[str, object]] = [
        ("request", story.where),
        ("custom_id", story.custom_id or "-"),
        ("batch key", key + (f", route {story.route}" if story.route else "")),
        ("began to wait", instant(story.t0) or "-"),
        ("deadline", instant(story.deadline) or "-"),
        ("now", story.now),
        ("why", story.why or "-"),
    ]
    outcome = story.outcome
    if outcome is not None:
        told += _outcome_facts(outcome)
    console.print(facts(told))
    if story.steps:
        lines = ((instant(step.at) or "-", step.what, step.told) for step in story.steps)
        console.print(rows(table("at", "event", "what", title="\nhistory"), lines))
    if outcome is not None:
        for name in ("response", "original"):
            if outcome.get(name) is not None:
                console.print(f"\n{name}")
                print_json(outcome[name])
    console.print()


def _outcome_facts(outcome: dict[str, Any]) -> list[tuple[str, object]]:
    error, batch, cost, usage = (outcome.get(name) or {} for name in ("error", "batch", "cost", "usage"))
    told: list[tuple[str, object]] = []
    if error:
        told.append(
            ("class, code", f"{error.get('class')}, {error.get('code')}, HTTP {error.get('http_status') or '-'}")
        )
        told += [(name, error[name]) for name in ("message", "remedy") if error.get(name)]
    if outcome.get("flags"):
        told.append(("flags", ", ".join(map(str, outcome["flags"]))))
    if usage:
        told.append(("tokens", f"{usage.get('input_tokens')} in, {usage.get('output_tokens')} out"))
    if cost:
        told.append(
            ("cost", f"{cost.get('usd')} USD (outside a batch {cost.get('sync_usd')} USD, {cost.get('basis')})")
        )
    ids = [batch.get("batch_id"), batch.get("provider_batch_id"), outcome.get("wire_id"), outcome.get("request_id")]
    told.append(("ids", ", ".join(str(one) for one in ids if one) or "-"))
    return told
