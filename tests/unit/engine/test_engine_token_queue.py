"""The queue of one model: who goes first, what a refusal proves, and what the provider bills for lost answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ACCOUNT, BATCH, KEY, LOT, NOW, PLATFORM, Harbour, lot, shown

from batchferry.domain.control import TokenLimit
from batchferry.domain.ids import BatchId, LotId, WireId
from batchferry.domain.ledger import UNREAD, Lot, LotState, LotTally
from batchferry.domain.machine import LandResults, ResultsRead
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import DownloadedFile, Usage
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.engine import admission as admission_module
from batchferry.engine.admission import PATIENCE_S, SAFETY, Wait
from batchferry.engine.landing import FileFacts, Landing, LandingMemory

MODEL = KEY.model
LIMIT = 10_000
LIMITED = {f"accounts.{ACCOUNT}.limits.enqueued_tokens": {MODEL: LIMIT}}


def name(number: int) -> BatchId:
    """Batch ids in their order."""
    return BatchId(f"01J{number:023}")


def put(harbour: Harbour, number: int, tokens: int, state: LotState = LotState.SUBMITTED, **changes: Any) -> None:
    """A lot in the ledger of another replica's partition."""
    partition = changes.pop("partition", 7)
    fields: dict[str, Any] = {"tokens": tokens, "own_tokens": tokens, "submitted_at": NOW, **changes}
    ledger = harbour.fleet.others.setdefault(partition, PartitionLedger(partition))
    ledger.apply(lot(state, [number], partition, lot_id=LotId(name(number)), **fields))


def take_away(harbour: Harbour, number: int) -> None:
    """The lot has ended."""
    del harbour.fleet.others[7].lots[LotId(name(number))]


async def ask(harbour: Harbour, number: int, tokens: int) -> Any:
    """The verdict on a batch of ten rows."""
    return await harbour.admission.verdict(name(number), KEY, 10, tokens)


async def test_the_smallest_waits_until_the_others_have_stepped_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes once the larger one, which cannot stay, is gone; the larger one is told at once."""
    monkeypatch.setattr(admission_module, "STEP_BACK_LOOK_S", 0.0)
    harbour = Harbour(tmp_path, **LIMITED)
    put(harbour, 1, 6_000, LotState.SUBMITTING)
    put(harbour, 2, 6_000, LotState.SUBMITTING)
    first = asyncio.create_task(harbour.admission.confirm(name(1), KEY))
    assert not await harbour.admission.confirm(name(2), KEY)
    assert not first.done()
    take_away(harbour, 2)
    assert await first


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
async def test_who_looked_before_the_smallest_could_be_seen_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """Both fit when each looked alone; the one that looked later sees both and steps back although its id is smaller,
    whether the other has arrived by then or is still on its way when the patience ends.
    """
    monkeypatch.setattr(admission_module, "STEP_BACK_LOOK_S", 0.0)
    monkeypatch.setattr(admission_module, "STEP_BACK_S", patience_s)
    harbour = Harbour(tmp_path, **LIMITED)
    put(harbour, 2, 6_000, LotState.SUBMITTING)
    assert await harbour.admission.confirm(name(2), KEY)
    put(harbour, 1, 6_000, LotState.SUBMITTING)
    waiting = asyncio.create_task(harbour.admission.confirm(name(1), KEY))
    await asyncio.sleep(0)
    put(harbour, 2, 6_000, LotState.SUBMITTED)
    assert not await waiting


async def test_a_batch_of_several_partitions_counts_whole_while_its_lots_come_into_sight(tmp_path: Path) -> None:
    """The tails show one lot after the other: what is not seen yet is counted from what was admitted, and once."""
    harbour = Harbour(tmp_path, **LIMITED)
    assert await ask(harbour, 1, 6_000) is None
    counted = [harbour.admission.enqueued(ACCOUNT, MODEL)]
    for partition in (7, 8):
        put(harbour, 1, 3_000, LotState.SUBMITTING, partition=partition, partitions=(7, 8))
        counted.append(harbour.admission.enqueued(ACCOUNT, MODEL))
    assert counted == [6_000] * 3


async def test_small_batches_overtake_a_large_one_only_for_a_while(tmp_path: Path) -> None:
    """They fill the gaps at first; after its patience the large one has the next room, and then they go on."""
    harbour = Harbour(tmp_path, **LIMITED)
    put(harbour, 100, 5_000)
    large = int(LIMIT * SAFETY)
    assert await ask(harbour, 1, large) == Wait("tokens")
    assert await ask(harbour, 2, 1_000) is None
    harbour.clock.at += timedelta(seconds=PATIENCE_S + 1)
    assert await ask(harbour, 1, large) == Wait("tokens")
    assert await ask(harbour, 3, 1_000) == Wait("tokens")
    assert await ask(harbour, 0, 1_000) is None, "it is older still"
    for number in (0, 2):
        harbour.admission.forget(name(number))
    take_away(harbour, 100)
    assert await ask(harbour, 1, large) is None
    take_over = [await ask(harbour, 3, 1), harbour.admission.forget(name(1)), await ask(harbour, 3, 1_000)]
    assert take_over == [Wait("tokens"), None, None]


async def test_who_has_gone_another_way_keeps_nobody_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that asks no more (it waits for a probe, or has been cut up) has no place in the line."""
    harbour = Harbour(tmp_path, **LIMITED)
    put(harbour, 100, 5_000)
    assert await ask(harbour, 1, 9_000) == Wait("tokens")
    harbour.clock.at += timedelta(seconds=PATIENCE_S + 1)
    assert await ask(harbour, 2, 1_000) == Wait("tokens")
    monkeypatch.setattr(admission_module, "ASKS_WITHIN_S", -1.0)
    assert await ask(harbour, 2, 1_000) is None


async def test_a_refusal_is_judged_by_what_was_there_at_admission(tmp_path: Path) -> None:
    """When it is seen, those that stood in its way have landed: its own size would teach far too small a limit."""
    harbour = Harbour(tmp_path)
    put(harbour, 1, 90_000)
    assert await ask(harbour, 2, 10_000) is None
    harbour.fleet.others.clear()
    await harbour.admission.refused(name(2), KEY, 10_000)
    assert harbour.fleet.published == [TokenLimit(ACCOUNT, MODEL, 80_000, NOW)]


async def test_lost_answers_that_the_provider_counted_teach_like_others(tmp_path: Path) -> None:
    """Half of the answers are lost: the sum of the tokens is of all rows where the provider told it, else of half."""
    classes = {"succeeded": 5, "missing": 5}
    for tally in (
        LotTally(classes=classes, usage=Usage(20_000, 10)),
        LotTally(classes=classes, usage=Usage(10_000, 5), extra={UNREAD: 5}),
    ):
        harbour = Harbour(tmp_path, **LIMITED)
        put(harbour, 1, 10_000, LotState.DONE, rows=10, own_rows=10, tally=tally)
        await ask(harbour, 2, 1)
        assert harbour.admission.estimates.factor(ACCOUNT, MODEL) == 2


# ----------------------------------------------------------------------------------------- lost answers


class Quiet:
    """No holds, no wishes."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


async def _landed(harbour: Harbour, own: Lot, usage: Usage | None) -> Any:
    """The tally of a batch whose row 0 has its answer, and whose row 1 is in no file."""
    task = await harbour.task()
    for offset in (0, 1):
        harbour.log.put(offset)
    await harbour.hold(own)
    wire_id = str(WireId(task.ledger_id, 0, 0, 1))
    line = ResultLine(wire_id, RowClass.SUCCEEDED, body=b"{}", usage=Usage(100, 10), model=MODEL)

    async def download(_file_id: str, to: Path) -> DownloadedFile:
        await asyncio.to_thread(to.write_bytes, b"{}\n")
        return DownloadedFile(3, "0" * 64)

    harbour.provider.download = download
    harbour.provider.parse_line = lambda _line, _endpoint: line
    landing = Landing(
        harbour.settings, harbour.store, harbour.clock, harbour.telemetry, harbour.router, harbour.source,
        harbour.outcomes, Quiet(), harbour.fates, harbour.admission, FileFacts(),  # type: ignore[arg-type]
    )  # fmt: skip
    snapshot = replace(shown(output_file_id="file-out"), usage=usage)
    event = await landing.land(
        BATCH, {0: (task, own)}, LandResults(snapshot, is_last_chance=True), harbour.provider, LandingMemory()
    )
    assert event == ResultsRead()
    events = [json.loads(one.value or b"") for one in harbour.written(harbour.settings.topics.events)]
    return next(one for one in events if one["kind"] == "landed")


@pytest.mark.parametrize(
    ("usage", "partitions", "tokens", "usd", "unknown"),
    [
        (Usage(150, 40), (0,), (150, 40), "0.00002325", None),
        (Usage(100, 10), (0,), (100, 10), "0.0000105", None),
        (None, (0,), (100, 10), "0.0000105", 1),
        (Usage(50, 10), (0,), (100, 10), "0.0000105", 1),
        (Usage(150, 40), (0, 1), (100, 10), "0.0000105", 1),
    ],
    ids=["billed", "not billed", "not told", "makes no sense", "not all lines are ours"],
)
async def test_tokens_of_lost_answers_are_booked_where_the_provider_tells_them(
    tmp_path: Path,
    usage: Usage | None,
    partitions: tuple[int, ...],
    tokens: tuple[int, int],
    usd: str,
    unknown: int | None,
) -> None:
    """What it counted beyond the lines that were read is the lost rows', at the price of their batch; where that
    cannot be known the rows are told apart, as perhaps paid and in no sum.
    """
    async with Harbour(tmp_path) as harbour:
        own = lot(
            LotState.SUBMITTED, [0, 1], lot_id=LOT, provider_batch_ids=(PLATFORM,), submitted_at=NOW,
            partitions=partitions,
        )  # fmt: skip
        landed = await _landed(harbour, own, usage)
    assert landed["classes"] == {"succeeded": 1, "missing": 1}
    assert (landed["input_tokens"], landed["output_tokens"]) == tokens
    assert landed["usd"] == usd
    assert landed.get("unknown_rows") == unknown
