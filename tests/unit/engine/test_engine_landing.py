"""Landing where a partition goes, a file is large, or a provider had no room for a whole batch."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import BATCH, LOT, PLATFORM, Harbour, lot, shown

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.ids import LedgerId, WireId
from batchferry.domain.ledger import UNCERTAIN, LotState
from batchferry.domain.machine import LandResults, ResultsIncomplete, ResultsNotOurs, ResultsRead, ResultsUnavailable
from batchferry.domain.provider import CallFailed, CallFailure, DownloadedFile, LineError, ProviderStatus, RequestCounts
from batchferry.domain.rows import ResultLine, RowClass, UnreadableLine
from batchferry.engine import fates
from batchferry.engine import landing as rooms
from batchferry.engine.fates import PACK_TOKENS
from batchferry.engine.landing import FileFacts, Landing, LandingMemory
from batchferry.engine.partition import PartitionTask


class Holds:
    """Holds that are only noted."""

    def __init__(self) -> None:
        self.placed: list[str] = []
        self.alarms: list[tuple[str, dict[str, Any]]] = []

    def cancel_wish(self, _batch_id: str) -> None:
        """Nobody wants it cancelled."""

    def rescue_wish(self, _batch_id: str) -> None:
        """Nor run through the sync lane."""

    async def place_key(self, _key: object, reason: str) -> None:
        self.placed.append(reason)

    async def place_for_operator(self, _key: object, reason: str) -> None:
        self.placed.append(f"{reason} until lifted")

    async def alarm(self, alarm: str, _event_of: str, _key: object, **facts: Any) -> None:
        self.alarms.append((alarm, facts))


class Dock:
    """Landing of a harbour, and a provider whose result file is what is given here."""

    def __init__(self, harbour: Harbour) -> None:
        self.harbour = harbour
        self.holds: Any = Holds()
        self.lines: list[bytes] = []
        harbour.provider.download = self.download
        harbour.provider.parse_line = self.parse
        harbour.provider.classify_batch_error = lambda _error: BatchErrorKind.TOKEN_LIMIT
        self.landing = Landing(
            harbour.settings, harbour.store, harbour.clock, harbour.telemetry, harbour.router, harbour.source,
            harbour.outcomes, self.holds, harbour.fates, harbour.admission, FileFacts(),
        )  # fmt: skip

    async def download(self, _file_id: str, to: Path) -> DownloadedFile:
        content = b"".join(self.lines)
        await asyncio.to_thread(to.write_bytes, content)
        return DownloadedFile(len(content), hashlib.sha256(content).hexdigest())

    def parse(self, line: bytes, _endpoint: str) -> ResultLine:
        said = json.loads(line)
        return ResultLine(said["id"], RowClass(said["class"]), body=said["body"].encode(), code=said["class"])

    def answer(self, task: PartitionTask, offset: int, row_class: RowClass, body: str = "{}") -> None:
        """A line of the result file."""
        wire_id = str(WireId(task.ledger_id, task.partition, offset, 1))
        said = {"id": wire_id, "class": row_class.value, "body": body}
        self.lines.append(json.dumps(said).encode() + b"\n")

    async def land(self, effect: LandResults, memory: LandingMemory | None = None) -> Any:
        own = {
            partition: (task, task.ledger.lots[LOT])
            for partition, task in self.harbour.tasks.items()
            if LOT in task.ledger.lots
        }
        return await self.landing.land(BATCH, own, effect, self.harbour.provider, memory or LandingMemory())


def at_provider(offsets: list[int], **changes: Any) -> Any:
    """A lot whose batch exists."""
    return lot(LotState.SUBMITTED, offsets, provider_batch_ids=(PLATFORM,), **changes)


async def test_a_partition_that_goes_while_absent_rows_are_settled_is_no_bug(tmp_path: Path) -> None:
    """The reading ends as incomplete, like everywhere else in it, and the other partitions are read again."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(3):
            harbour.log.put(offset)
        retried_once = {RowClass.MISSING.value: {1: at_provider([0, 1, 2]).offsets}}
        await harbour.hold(at_provider([0, 1, 2], attempts=retried_once))
        originals = harbour.source.originals

        async def go(*arguments: Any) -> Any:
            quotes = await originals(*arguments)
            task.lose("moved")
            return quotes

        harbour.source.originals = go  # type: ignore[method-assign]
        event = await Dock(harbour).land(LandResults(shown(), is_last_chance=True))
        assert event == ResultsIncomplete("partition_moved")


async def test_lines_of_others_only_are_no_results_of_ours(tmp_path: Path) -> None:
    """A batch that was only taken for ours settles nothing; one that is surely ours is read as ever."""
    for is_uncertain, expected in ((True, ResultsNotOurs()), (False, ResultsIncomplete("rows_absent"))):
        folder = tmp_path / str(is_uncertain)
        folder.mkdir()
        async with Harbour(folder) as harbour:
            await harbour.task()
            for offset in range(2):
                harbour.log.put(offset)
            await harbour.hold(at_provider([0, 1], extra={UNCERTAIN: True} if is_uncertain else {}))
            dock = Dock(harbour)
            for number in range(2):
                said = {"id": f"stranger-{number}", "class": "succeeded", "body": "{}"}
                dock.lines.append(json.dumps(said).encode() + b"\n")
            assert await dock.land(LandResults(shown())) == expected
            assert harbour.tasks[0].ledger.lots[LOT].state is LotState.SUBMITTED


async def test_a_siblings_place_alone_does_not_make_a_batch_ours(tmp_path: Path) -> None:
    """Lines of a partition of the batch are also other batches', and other environments': only a known row proves it."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        harbour.log.put(0)
        await harbour.hold(at_provider([0], extra={UNCERTAIN: True}, partitions=(0, 7)))
        dock, its_id = Dock(harbour), LedgerId("5555555555")
        said = {"id": str(WireId(its_id, 7, 3, 1)), "class": "succeeded", "body": "{}"}
        dock.lines.append(json.dumps(said).encode() + b"\n")
        own = {0: (harbour.tasks[0], harbour.tasks[0].ledger.lots[LOT])}
        theirs = {7: at_provider([3], partitions=(0, 7))}

        async def land(siblings: dict[int, Any], ledger_id: LedgerId) -> Any:
            return await dock.landing.land(
                BATCH, own, LandResults(shown()), harbour.provider, LandingMemory(), siblings, {7: ledger_id}
            )

        assert await land({}, its_id) == ResultsNotOurs()
        assert await land(theirs, LedgerId("9999999999")) == ResultsNotOurs()
        assert await land({7: at_provider([4], partitions=(0, 7))}, its_id) == ResultsNotOurs()
        assert await land(theirs, its_id) == ResultsIncomplete("rows_absent")


@pytest.mark.parametrize("status", [ProviderStatus.EXPIRED, ProviderStatus.CANCELLED, ProviderStatus.COMPLETED])
async def test_without_a_line_nothing_is_believed_of_a_batch_that_may_be_anothers(
    tmp_path: Path, status: ProviderStatus
) -> None:
    """Neither that its rows have expired nor that they are missing: it is read again, and given back in the end."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        harbour.log.put(0)
        await harbour.hold(at_provider([0], extra={UNCERTAIN: True}))
        dock, memory = Dock(harbour), LandingMemory()
        for _ in range(2):
            assert await dock.land(LandResults(shown(status)), memory) == ResultsIncomplete("no_lines")
            harbour.clock.at = harbour.clock.now() + timedelta(hours=1)
        assert await dock.land(LandResults(shown(status), is_last_chance=True), memory) == ResultsNotOurs()
        assert await dock.land(LandResults(shown(ProviderStatus.FAILED)), memory) == ResultsNotOurs()
        assert harbour.tasks[0].ledger.lots[LOT].state is LotState.SUBMITTED
        assert dock.holds.placed == []


async def test_results_that_somebody_has_deleted_were_his(tmp_path: Path) -> None:
    """Whoever knew the batch for his own has read and deleted it: ours is looked for elsewhere, and nothing missing."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        harbour.log.put(0)
        await harbour.hold(at_provider([0], extra={UNCERTAIN: True}))
        dock = Dock(harbour)

        async def gone(*_: Any) -> CallFailed:
            return CallFailed("download", CallFailure.NOT_FOUND, http_status=404)

        harbour.provider.download = gone
        assert isinstance(await dock.land(LandResults(shown())), ResultsUnavailable)
        assert await dock.land(LandResults(shown(), is_last_chance=True)) == ResultsNotOurs()


async def test_answers_are_handed_on_by_their_bytes_too(tmp_path: Path, monkeypatch: Any) -> None:
    """Few rows with long answers do not gather in memory until there are many of them."""
    monkeypatch.setattr(rooms, "CHUNK_BYTES", 40_000)
    monkeypatch.setattr(rooms, "READ_BYTES", 1_000)
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        offsets = list(range(12))
        for offset in offsets:
            harbour.log.put(offset)
        await harbour.hold(at_provider(offsets))
        dock = Dock(harbour)
        for offset in offsets:
            dock.answer(task, offset, RowClass.SUCCEEDED, '"' + "x" * 15_000 + '"')
        settle, sizes = task.settle, []

        async def watched(settlements: Any) -> None:
            sizes.append(len(settlements))
            await settle(settlements)

        task.settle = watched  # type: ignore[method-assign]
        assert await dock.land(LandResults(shown())) == ResultsRead()
        assert sizes == [3, 3, 3, 3]
        assert task.ledger.lots[LOT].state is LotState.DONE


async def test_failing_lines_are_read_again_within_bounds(tmp_path: Path, monkeypatch: Any) -> None:
    """Of long lines fewer are in memory at a time; one longer than the bound is read alone."""
    monkeypatch.setattr(fates, "CHUNK_BYTES", 5_000)
    read: list[int] = []
    read_places = rooms._read_places

    def watched(paths: Any, places: Any) -> Any:
        read.append(len(places))
        return read_places(paths, places)

    monkeypatch.setattr(rooms, "_read_places", watched)
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(5):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(5))))
        dock = Dock(harbour)
        for offset, size in enumerate([2_000, 2_000, 2_000, 9_000, 100]):
            dock.answer(task, offset, RowClass.INVALID_REQUEST, '"' + "x" * size + '"')
        assert await dock.land(LandResults(shown())) == ResultsRead()
        assert read == [2, 1, 1, 1]
        assert {one["error"]["class"] for one in harbour.failures().values()} == {"invalid_request"}
        assert len(harbour.failures()) == 5


async def test_an_answer_to_a_record_that_todays_rules_refuse_keeps_the_callers_words(tmp_path: Path) -> None:
    """The record is in the log, so it is not lost input, and its outcome carries its key and custom_id."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        harbour.log.put(0, value=b'{"custom_id": "c0", "body": {"model": "gpt-4o-mini", "stream": true}}')
        await harbour.hold(at_provider([0]))
        dock = Dock(harbour)
        dock.answer(task, 0, RowClass.SUCCEEDED)
        assert await dock.land(LandResults(shown())) == ResultsRead()
        results = harbour.settings.topics.results
        transactions = harbour.log.producers[0].transactions
        (record,) = (one for records, _ in transactions for one in records if one.topic == results)
        assert (record.key, json.loads(record.value or b"")["custom_id"]) == (b"k0", "c0")
        assert not harbour.telemetry.named("input_lost")


async def test_a_batch_that_was_too_many_tokens_comes_back_by_halves(tmp_path: Path) -> None:
    """Its waiting rows say how many tokens may travel together: half of what was refused, half again the next time."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(4):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(4)), tokens=80_000, own_tokens=80_000))
        dock = Dock(harbour)
        refused = shown(ProviderStatus.FAILED, output_file_id=None, errors=(LineError("token_limit_exceeded"),))
        assert await dock.land(LandResults(refused)) == ResultsRead()
        assert dock.holds.placed == ["token_limit_exceeded"]
        (waiting,) = task.waiting_lots().values()
        assert waiting.extra == {PACK_TOKENS: 40_000}
        assert not waiting.attempts


async def test_rows_that_travel_again_are_not_told_as_failed(tmp_path: Path) -> None:
    """The tally of a reading knows them apart: a file refused as a whole, and rows that are sent again one by one."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(4):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(4))))
        dock = Dock(harbour)
        dock.answer(task, 0, RowClass.SUCCEEDED)
        dock.answer(task, 1, RowClass.TRANSIENT)
        dock.answer(task, 2, RowClass.TRANSIENT)
        dock.answer(task, 3, RowClass.INVALID_REQUEST)
        memory = LandingMemory()
        assert await dock.land(LandResults(shown()), memory) == ResultsRead()
        assert (memory.tally.all_rows, memory.tally.retried) == (4, 2)
        assert sum(len(lot.offsets) for lot in task.waiting_lots().values()) == 2

    async with Harbour(tmp_path / "refused") as harbour:
        await harbour.task()
        for offset in range(4):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(4))))
        memory = LandingMemory()
        refused = shown(ProviderStatus.FAILED, output_file_id=None, errors=(LineError("token_limit_exceeded"),))
        assert await Dock(harbour).land(LandResults(refused), memory) == ResultsRead()
        assert (memory.tally.all_rows, memory.tally.retried) == (4, 4)


@pytest.mark.parametrize("lines", [2, 3])
async def test_a_line_cut_with_its_file_is_not_sent_again(tmp_path: Path, lines: int) -> None:
    """A file that ends in half a line, be it the last one, is not whole: that row waits for the next reading."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(3):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(3))))
        dock = Dock(harbour)
        for offset in range(3):
            dock.answer(task, offset, RowClass.SUCCEEDED)
        whole = list(dock.lines)
        dock.lines = [*whole[: lines - 1], whole[lines - 1][:-9]]
        parse = dock.parse

        def cut(line: bytes, endpoint: str) -> Any:
            if line.endswith(b"}"):
                return parse(line, endpoint)
            return UnreadableLine("not JSON", str(WireId(task.ledger_id, task.partition, lines - 1, 1)))

        harbour.provider.parse_line = cut
        counted = LandResults(shown(counts=RequestCounts(total=3, completed=3)))
        assert await dock.land(counted) == ResultsIncomplete("fewer_lines_than_counted")
        assert not task.waiting_lots()
        dock.lines = whole
        assert await dock.land(counted) == ResultsRead()
        assert not task.waiting_lots()
        assert task.ledger.watermark == 3


@pytest.mark.parametrize(
    ("row_class", "rows", "alarm", "hold"),
    [
        (RowClass.INVALID_REQUEST, 20, "input_failures", ["input_failures until lifted"]),
        (RowClass.CONTENT_FILTERED, 20, "input_failures", ["input_failures until lifted"]),
        (RowClass.TOO_LONG, 20, "input_failures", ["input_failures until lifted"]),
        (RowClass.INVALID_REQUEST, 19, None, []),
        (RowClass.TRANSIENT, 20, None, []),
        (RowClass.TRANSIENT, 21, "provider_failures", []),
        (RowClass.EXPIRED, 21, "provider_failures", []),
    ],
)
async def test_many_failures_of_one_kind_alarm(
    tmp_path: Path, row_class: RowClass, rows: int, alarm: str | None, hold: list[str]
) -> None:
    """What speaks about the input holds the key, from twenty rows and a twentieth on, with its codes; what the
    provider failed to do is an alarm of its own, from a fifth on, and holds nothing.
    """
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(100):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(100))))
        dock = Dock(harbour)
        for offset in range(100):
            dock.answer(task, offset, row_class if offset < rows else RowClass.SUCCEEDED)
        assert await dock.land(LandResults(shown())) == ResultsRead()
        assert dock.holds.placed == hold
        told = dict(dock.holds.alarms)
        assert told == ({} if alarm is None else {alarm: {"rows": rows, "codes": {row_class.value: rows}}})


async def test_a_small_share_of_refusals_is_borne(tmp_path: Path) -> None:
    """Twenty of five hundred are below a twentieth: each fails by itself and the key goes on."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(500):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(500))))
        dock = Dock(harbour)
        for offset in range(500):
            dock.answer(task, offset, RowClass.INVALID_REQUEST if offset < 20 else RowClass.SUCCEEDED)
        assert await dock.land(LandResults(shown())) == ResultsRead()
        assert (dock.holds.placed, dock.holds.alarms) == ([], [])
        assert len(harbour.failures()) == 20


async def test_whoever_listens_hears_every_line_of_ours(tmp_path: Path) -> None:
    """A canary in a batch: answers and failures alike, before their rows are judged."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(3):
            harbour.log.put(offset)
        await harbour.hold(at_provider(list(range(3))))
        dock = Dock(harbour)
        ends = [RowClass.SUCCEEDED, RowClass.INVALID_REQUEST, RowClass.TRANSIENT]
        for offset, row_class in enumerate(ends):
            dock.answer(task, offset, row_class)
        heard: dict[int, RowClass] = {}
        dock.landing.on_answer = lambda _partition, offset, line, _endpoint: heard.update({offset: line.row_class})
        await dock.land(LandResults(shown()))
        assert heard == dict(enumerate(ends))
