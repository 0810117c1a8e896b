"""``batchferry status``, ``batches`` and ``show``: where everything stands, from Kafka alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
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
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.cli.standing import BatchStanding, Standing, read_events, read_standing
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
    batch: Annotated[str, typer.Argument(help="Our batch id, the beginning of one, or the provider's id.")],
    config: ConfigOption = None,
    as_json: JsonOption = None,
) -> None:
    """Show one batch: its parts, its history, and how it ended."""
    settings = load(config, keys_needed=False)

    async def look(kafka: KafkaPort, settings: Settings, now: datetime) -> tuple[BatchStanding, list[dict[str, Any]]]:
        standing = await read_standing(kafka, settings, now)
        one = _chosen(standing, batch)
        return one, await read_events(kafka, settings, one.batch_id)

    one, events = _ask(settings, look)
    if wants_json(as_json):
        print_json({**one.as_json(), "events": events})
        return
    _show_one(one, events)


def _ask(settings: Settings, look: Callable[[KafkaPort, Settings, datetime], Awaitable[T]]) -> T:
    from batchferry import app  # noqa: PLC0415 - see run

    async def work() -> T:
        kafka = app.build_kafka(settings)
        try:
            return await look(kafka, settings, app.build_clock(settings).now())
        finally:
            await kafka.aclose()

    return asyncio.run(work())


def _chosen(standing: Standing, named: str) -> BatchStanding:
    wanted = named.upper()
    found = [batch for batch in standing.batches if batch.batch_id.startswith(wanted) or named in batch.provider_ids]
    if not found:
        fail(Exit.FAILED, f"the ledger knows no batch {named!r}; 'batchferry batches' lists those it knows")
    if len(found) > 1:
        shown = [batch.batch_id for batch in found[:SHOWN_BATCHES]]
        fail(Exit.USAGE, f"{named!r} fits {len(found)} batches; give more of the id", *shown)
    return found[0]


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
