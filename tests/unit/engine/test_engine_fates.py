"""What becomes of rows that did not succeed: kept, sent again, bought, cut, or ended, and what their heirs carry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ACCOUNT, KEY, LOT, NOW, PLATFORM, Harbour, lot

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.envelope import EventKind
from batchferry.domain.ids import LotId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.retry import SYNC_TRIES
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.engine.fates import HELD_S, HELD_SINCE, PACK_TOKENS, SHAPE, Heirs, Onward, held_s, waiting_lot
from batchferry.engine.partition import PartitionTask
from batchferry.ports import OutRecord

HOUR_MS = 3_600_000
NOW_MS = round(NOW.timestamp() * 1000)
ROUTE = "routes.default"
LANE_ON = {f"accounts.{ACCOUNT}.sync.enabled": True}
FRESH = {"timestamp": NOW_MS - HOUR_MS}
"""An hour old: 29 h are left, enough for another batch."""
OLD = {"timestamp": NOW_MS - 20 * HOUR_MS}
"""Ten hours are left: no batch fits."""


class Room:
    """A lane with room for so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def reserve(self, _key: BatchKey, rows: int = 1) -> bool:
        if self.rows < rows:
            return False
        self.rows -= rows
        return True


class Court:
    """A lot whose rows are judged."""

    def __init__(self, harbour: Harbour, task: PartitionTask, judged: Lot) -> None:
        self.harbour = harbour
        self.task = task
        self.lot = judged
        self.heirs = Heirs()

    async def judge(self, ended: Mapping[int, RowClass], **more: Any) -> dict[Onward, dict[str, list[int]]]:
        """The ways that rows take which ended so; those that are final are settled."""
        await self.harbour.source.index(0, OffsetSet(ended))
        failed = [(offset, ResultLine("w", one, code=f"code_{one.value}")) for offset, one in ended.items()]
        await self.harbour.fates.judge(self.task, self.lot, failed, None, self.heirs, **more)
        await self.harbour.settled()
        return {
            onward: {counts: list(rows) for counts, rows in by_counts.items()}
            for onward, by_counts in self.heirs.rows.items()
        }

    def made(self, **cut: int) -> list[Lot]:
        """The waiting lots of the rows that travel again, and what a batch of them may hold."""
        return self.harbour.fates.heirs(self.task, self.lot, self.heirs, self.task.ledger, cut)


async def court(harbour: Harbour, times: Mapping[int, Mapping[str, Any]], **changes: Any) -> Court:
    """A lot of these rows at the provider; the input log has their records."""
    task = await harbour.task()
    for offset, record in times.items():
        harbour.log.put(offset, **record)
    state = LotState.SUBMITTING if changes.get("lane") is Lane.SYNC else LotState.SUBMITTED
    fields = {"provider_batch_ids": () if changes.get("lane") is Lane.SYNC else (PLATFORM,), **changes}
    return Court(harbour, task, await harbour.hold(lot(state, list(times), **fields)))


def fresh(rows: int) -> dict[int, Mapping[str, Any]]:
    """So many rows that another batch could still bring home."""
    return dict.fromkeys(range(rows), FRESH)


# ----------------------------------------------------------------------------------------------------- ends


async def test_what_is_final_is_settled_with_the_original(tmp_path: Path) -> None:
    """An invalid row fails with its code and words; nothing of it travels on."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(2))
        assert await one.judge({0: RowClass.INVALID_REQUEST, 1: RowClass.TOO_LONG}) == {}
        failures = harbour.failures()
        assert [failures[offset]["error"]["class"] for offset in (0, 1)] == ["invalid_request", "too_long"]
        assert failures[0]["error"]["code"] == "code_invalid_request"
        assert json.loads(failures[0]["original"]["value"])["custom_id"] == "c0"
        assert one.made() == []


async def test_filtered_rows_go_to_the_review_topic(tmp_path: Path) -> None:
    """A person should look at them; the failures topic does not have them too."""
    async with Harbour(tmp_path, **{"topics.review": "looked-at"}) as harbour:
        one = await court(harbour, fresh(1))
        assert await one.judge({0: RowClass.CONTENT_FILTERED}) == {}
        assert harbour.failures() == {}
        (record,) = harbour.written("looked-at")
        assert json.loads(record.value or b"")["error"]["class"] == "content_filtered"


async def test_a_row_that_another_submission_has_answered_is_left_alone(tmp_path: Path) -> None:
    """It is settled already: neither a failure nor an heir is made of it."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(2))
        await one.task.commit(lambda ledger: ledger.plan_settle(OffsetSet([0]), NOW), purpose="settle")
        assert await one.judge({0: RowClass.INVALID_REQUEST, 1: RowClass.INVALID_REQUEST}) == {}
        assert list(harbour.failures()) == [1]


async def test_rows_that_the_index_does_not_know_keep_their_words(tmp_path: Path) -> None:
    """After a restart the lane reads its rows itself: their failure carries id, key and deadline all the same."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(1), lane=Lane.SYNC)
        accepted: Any = harbour.source.accept(harbour.log.records[0, 0], NOW_MS)
        failed = [(0, ResultLine("w", RowClass.INVALID_REQUEST, code="x"))]
        await harbour.fates.judge(one.task, one.lot, failed, None, one.heirs, rows={0: accepted.row})
        await harbour.settled()
        assert await harbour.store.get_rows(0, [0]) == {}
        (record,) = harbour.written(harbour.settings.topics.failures)
        told = json.loads(record.value or b"")
        assert (record.key, told["custom_id"], told["deadline_met"]) == (b"k0", "c0", True)


async def test_unknown_codes_are_counted(tmp_path: Path) -> None:
    """They have the default class, and an operator sees that there are some."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(1))
        await harbour.source.index(0, OffsetSet([0]))
        line = ResultLine("w", RowClass.INVALID_REQUEST, code="never_seen", is_unknown=True)
        await harbour.fates.judge(one.task, one.lot, [(0, line)], None, one.heirs)
        assert harbour.telemetry.total("unknown_row_codes", account=ACCOUNT) == 1


# ----------------------------------------------------------------------------------------------- once more


async def test_a_transient_end_is_tried_again_and_then_no_more(tmp_path: Path) -> None:
    """The first waits for the back-off and its attempt counts; with its retries used up a row fails."""
    async with Harbour(tmp_path) as harbour:
        before = {RowClass.TRANSIENT.value: {1: OffsetSet([1])}}
        one = await court(harbour, fresh(2), attempts=before)
        ways = await one.judge({0: RowClass.TRANSIENT, 1: RowClass.TRANSIENT})
        assert ways == {Onward(Lane.BATCH, 60.0): {"transient": [0]}}
        assert harbour.failures()[1]["attempts"] == {"transient": 1}
        (heir,) = one.made()
        assert (heir.state, heir.lane, heir.submission) == (LotState.WAITING, Lane.BATCH, 2)
        assert list(heir.offsets) == [0]
        assert heir.attempts_of("transient", 0) == 1
        assert heir.not_before == NOW + timedelta(seconds=60)
        assert dict(heir.due) == {(NOW_MS + 29 * HOUR_MS) // 900_000: 1}


async def test_an_account_that_is_refused_uses_nothing_up(tmp_path: Path) -> None:
    """The rows stay as they were, and the time they wait for the hold is none of their age."""
    async with Harbour(tmp_path) as harbour:
        before = {RowClass.TRANSIENT.value: {1: OffsetSet([0])}}
        one = await court(harbour, fresh(2), attempts=before)
        await one.judge({0: RowClass.ACCOUNT, 1: RowClass.ACCOUNT})
        (heir,) = one.made()
        assert heir.attempts == before
        assert heir.extra[HELD_SINCE] == NOW_MS
        assert held_s(heir, NOW + timedelta(hours=5)) == 5 * 3600
        assert harbour.failures() == {}


async def test_every_row_has_one_heir(tmp_path: Path) -> None:
    """Rows of one way travel together whatever their class was; all that travel are named, none twice."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(6))
        ends = [
            RowClass.TRANSIENT, RowClass.MISSING, RowClass.UNREADABLE, RowClass.EXPIRED, RowClass.ACCOUNT,
            RowClass.INVALID_REQUEST,
        ]  # fmt: skip
        await one.judge(dict(enumerate(ends)))
        made = one.made()
        assert sorted(offset for heir in made for offset in heir.offsets) == [0, 1, 2, 3, 4]
        assert list(harbour.failures()) == [5]
        assert one.heirs.has(RowClass.MISSING)
        assert not one.heirs.has(RowClass.INVALID_REQUEST)


async def test_heirs_are_made_only_of_rows_that_the_lot_still_holds(tmp_path: Path) -> None:
    """Between judging and the transaction a row may be answered by another submission."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(2))
        await one.judge({0: RowClass.TRANSIENT, 1: RowClass.TRANSIENT})
        await one.task.commit(lambda ledger: ledger.plan_settle(OffsetSet([0]), NOW), purpose="settle")
        (heir,) = one.made(**{PACK_TOKENS: 77})
        assert list(heir.offsets) == [1]
        assert heir.extra[PACK_TOKENS] == 77
        await one.task.commit(lambda ledger: ledger.plan_settle(OffsetSet([1]), NOW), purpose="settle")
        assert one.made() == []


async def test_what_travels_again_is_told_once_a_way(tmp_path: Path) -> None:
    """The event names the classes of its own heir's rows, and the metric counts every row."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        harbour.fates.room = Room(10)
        one = await court(harbour, {0: FRESH, 1: OLD, 2: OLD})
        await one.judge({0: RowClass.TRANSIENT, 1: RowClass.TRANSIENT, 2: RowClass.EXPIRED})
        made = one.made()

        def record(_lot: Lot, heir: Lot, classes: Mapping[str, int]) -> OutRecord:
            return harbour.outcomes.onward_event(one.lot, heir, classes, EventKind.RETRIED, "landed")

        events = [json.loads(r.value or b"") for r in harbour.fates.tell(one.task, one.lot, one.heirs, made, record)]
        told = {event["lane"]: (event["rows"], event["classes"]) for event in events}
        assert told == {"batch": (1, {"transient": 1}), "sync": (2, {"transient": 1, "expired": 1})}
        assert harbour.telemetry.total("rows_retried", **{"class": "transient"}) == 2
        assert harbour.telemetry.total("rows_retried", **{"class": "expired"}) == 1


# --------------------------------------------------------------------------------------------- the sync lane


async def test_a_row_whose_time_is_short_buys_the_lane(tmp_path: Path) -> None:
    """No second batch fits; there is no wait, and the attempt counts."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        harbour.fates.room = Room(1)
        one = await court(harbour, {0: OLD})
        assert await one.judge({0: RowClass.EXPIRED}) == {Onward(Lane.SYNC, 0.0): {"expired": [0]}}
        (heir,) = one.made()
        assert (heir.lane, heir.attempts_of("expired", 0)) == (Lane.SYNC, 1)


async def test_beyond_the_lanes_budget_a_row_does_what_it_would_without_a_lane(tmp_path: Path) -> None:
    """With a retry left it goes by batch and will be late; without one it fails. Every refusal is counted."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        harbour.fates.room = Room(1)
        used_up = {RowClass.EXPIRED.value: {1: OffsetSet([2])}}
        one = await court(harbour, {0: OLD, 1: OLD, 2: OLD}, attempts=used_up)
        ways = await one.judge(dict.fromkeys(range(3), RowClass.EXPIRED))
        assert ways == {Onward(Lane.SYNC, 0.0): {"expired": [0]}, Onward(Lane.BATCH, 60.0): {"expired": [1]}}
        assert harbour.failures()[2]["error"]["class"] == "expired"
        assert harbour.telemetry.total("sync_lane_refused", reason="budget") == 2


async def test_a_lane_that_is_not_there_is_not_asked(tmp_path: Path) -> None:
    """Switched off, a row that will be late goes by batch, and no budget is said to have refused it."""
    async with Harbour(tmp_path) as harbour:
        harbour.fates.room = Room(100)
        one = await court(harbour, {0: OLD})
        assert await one.judge({0: RowClass.TRANSIENT}) == {Onward(Lane.BATCH, 60.0): {"transient": [0]}}
        assert harbour.telemetry.total("sync_lane_refused") == 0


async def test_a_row_of_the_lane_is_called_again_and_its_tries_count_apart(tmp_path: Path) -> None:
    """The provider's wish is obeyed; its tries of the lane are no attempts of a class."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        one = await court(harbour, fresh(2), lane=Lane.SYNC, attempts={SYNC_TRIES: {1: OffsetSet([1])}})
        ways = await one.judge({0: RowClass.TRANSIENT, 1: RowClass.TRANSIENT}, retry_after_s=700.0)
        assert ways == {Onward(Lane.SYNC, 700.0): {SYNC_TRIES: [0, 1]}}
        (heir,) = one.made()
        assert [heir.attempts_of(SYNC_TRIES, offset) for offset in (0, 1)] == [1, 2]
        assert heir.attempts_of("transient", 0) == 0


async def test_a_row_of_the_lane_does_not_take_its_budget_again(tmp_path: Path) -> None:
    """Its room was reserved when it came; a second call of the same row is no second row."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        room = harbour.fates.room = Room(0)
        one = await court(harbour, {0: OLD}, lane=Lane.SYNC)
        ways = await one.judge({0: RowClass.TRANSIENT})
        assert [onward.lane for onward in ways] == [Lane.SYNC]
        assert room.rows == 0
        assert harbour.telemetry.total("sync_lane_refused") == 0


async def test_a_row_of_the_lane_whose_account_is_refused_stays_in_the_lane(tmp_path: Path) -> None:
    """It was bought for its deadline's sake; in a batch it would come home too late once the hold is over."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        one = await court(harbour, {0: OLD}, lane=Lane.SYNC)
        ways = await one.judge({0: RowClass.ACCOUNT})
        assert [(onward.lane, rows) for onward, rows in ways.items()] == [(Lane.SYNC, {"account": [0]})]


# ------------------------------------------------------------------------------------------ wanted cancelled


@pytest.mark.parametrize(
    ("wish", "lane", "counts"),
    [
        ("requeue", Lane.BATCH, "batch_failed"),
        ("hold", Lane.BATCH, "batch_failed"),
        ("rescue", Lane.SYNC, "cancelled"),
    ],
)
async def test_whoever_cancels_says_what_becomes_of_the_rows(
    tmp_path: Path, wish: str, lane: Lane, counts: str
) -> None:
    """His word goes before the retry table: nothing is used up by a requeue, and a rescue runs them in the lane."""
    async with Harbour(tmp_path, **LANE_ON) as harbour:
        harbour.fates.room = Room(0)
        used_up = {RowClass.CANCELLED.value: {5: OffsetSet([0])}}
        one = await court(harbour, fresh(1), attempts=used_up)
        ways = await one.judge({0: RowClass.CANCELLED}, wish_rows=wish)
        assert [(onward.lane, rows) for onward, rows in ways.items()] == [(lane, {counts: [0]})]
        (heir,) = one.made()
        assert heir.attempts_of("cancelled", 0) == (6 if wish == "rescue" else 5)


async def test_cancelled_to_fail_fails_and_only_what_was_cancelled(tmp_path: Path) -> None:
    """Rows that the provider had judged before the cancel follow their own class."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(2))
        ways = await one.judge({0: RowClass.CANCELLED, 1: RowClass.TRANSIENT}, wish_rows="fail")
        assert list(ways.values()) == [{"transient": [1]}]
        assert harbour.failures()[0]["error"]["class"] == "cancelled"


async def test_a_rescue_without_a_lane_keeps_the_rows(tmp_path: Path) -> None:
    """Nobody's rows are lost because a wish cannot be granted."""
    async with Harbour(tmp_path) as harbour:
        one = await court(harbour, fresh(1))
        ways = await one.judge({0: RowClass.CANCELLED}, wish_rows="rescue")
        assert [(onward.lane, rows) for onward, rows in ways.items()] == [(Lane.BATCH, {"batch_failed": [0]})]


# ---------------------------------------------------------------------------------------------------- parts

SPLIT = {f"{ROUTE}.policies": {"too_long": "split"}, f"{ROUTE}.context_tokens": 1_000}
LONG = "A short sentence with some words in it. " * 400


async def test_a_row_too_long_becomes_parts_in_the_transaction_that_ends_it(tmp_path: Path) -> None:
    """Its outcome on the results topic, its parts on the input topic, together; they are requests that can be read."""
    async with Harbour(tmp_path, **SPLIT) as harbour:
        one = await court(harbour, {0: {**FRESH, "text": LONG}})
        assert await one.judge({0: RowClass.TOO_LONG}) == {}
        (transaction,) = (
            records
            for records, _ in harbour.log.producers[0].transactions
            if any(record.topic == "requests" for record in records)
        )
        (outcome,) = (record for record in transaction if record.topic == harbour.settings.topics.results)
        parts = [record for record in transaction if record.topic == "requests"]
        told = json.loads(outcome.value or b"")
        assert (told["kind"], told["parts"], told["error"]["class"]) == ("split", len(parts), "too_long")
        assert len(parts) >= 2
        for number, part in enumerate(parts, start=1):
            harbour.log.put(100 + number, value=part.value, headers=part.headers, **FRESH)
            accepted: Any = harbour.source.accept(harbour.log.records[0, 100 + number], NOW_MS)
            assert accepted.row.custom_id == f"c0#part{number}"
            assert accepted.row.deadline_ms == NOW_MS + 29 * HOUR_MS
        assert one.task.ledger.is_settled(0)
        assert harbour.failures() == {}


async def test_a_row_that_cannot_be_cut_fails_with_its_own_code(tmp_path: Path) -> None:
    """A part at its depth's end, or a record that the log has deleted: the others of the batch are cut all the same."""
    async with Harbour(tmp_path, **SPLIT) as harbour:
        at_the_end = [("split-depth", b"3")]
        one = await court(
            harbour, {0: {**FRESH, "text": LONG, "headers": at_the_end}, 1: {**FRESH, "text": LONG}, 2: FRESH}
        )
        del harbour.log.records[0, 2]
        assert await one.judge(dict.fromkeys(range(3), RowClass.TOO_LONG)) == {}
        assert sorted(harbour.failures()) == [0, 2]
        assert harbour.failures()[0]["error"]["code"] == "code_too_long"
        results = [json.loads(one.value or b"") for one in harbour.written(harbour.settings.topics.results)]
        assert [(told["kind"], told["source"]["offset"]) for told in results] == [("split", 1)]
        assert harbour.telemetry.total("rows_split") == 1


# ------------------------------------------------------------------------------------------- waiting lots


async def heir_of(harbour: Harbour, sources: Sequence[Lot], rows: list[int], **more: Any) -> Lot:
    """A waiting lot of some rows of these lots."""
    task = harbour.tasks.get(0) or await harbour.task()
    return waiting_lot(task, task.ledger, sources, OffsetSet(rows), {}, harbour.clock, 0.0, **more)


async def test_a_waiting_lot_weighs_its_share(tmp_path: Path) -> None:
    """Tokens and bytes by rows, the submission above all that named one of them."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        one = await harbour.hold(lot(LotState.SUBMITTING, range(4), own_tokens=100, own_bytes=1_000))
        await harbour.hold(lot(LotState.WAITING, [2], lot_id=LotId("B2"), submission=7))
        heir = await heir_of(harbour, [one], [1, 2])
        assert (heir.own_rows, heir.own_tokens, heir.own_bytes) == (2, 50, 500)
        assert heir.submission == 8
        assert heir.lot_id != LOT
        assert heir.key == KEY


async def test_time_spent_in_holds_adds_up(tmp_path: Path) -> None:
    """Held, released, tried, held again: only the time in holds is taken off the age, across all the lots."""
    async with Harbour(tmp_path) as harbour:
        first = await heir_of(harbour, [lot(LotState.SUBMITTED, [0])], [0], is_held=True)
        harbour.clock.at += timedelta(hours=2)
        again = await heir_of(harbour, [first], [0])
        assert again.extra == {HELD_S: 7_200}
        harbour.clock.at += timedelta(hours=3)
        assert held_s(again, harbour.clock.now()) == 7_200
        held_again = await heir_of(harbour, [again], [0], is_held=True)
        harbour.clock.at += timedelta(hours=1)
        assert held_s(held_again, harbour.clock.now()) == 10_800


async def test_only_what_belongs_to_the_rows_is_carried(tmp_path: Path) -> None:
    """The kind of prompt goes on with them; what one provider had no room for does not, nor strangers' members."""
    async with Harbour(tmp_path) as harbour:
        extra = {SHAPE: "f00d", PACK_TOKENS: 9, "added_later": 1}
        heir = await heir_of(harbour, [lot(LotState.WAITING, [0], extra=extra)], [0])
        assert heir.extra == {SHAPE: "f00d"}
