"""Canaries: which rows wait, which go ahead, what their answers come to, and what becomes of the others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import KEY, NOW, Harbour

from batchferry.config import CanarySettings
from batchferry.domain.control import CanaryVerdict, Hold, key_scope, shape_scope
from batchferry.domain.ledger import Lane, Lot
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.engine.canary import CanaryDesk
from batchferry.engine.fates import SHAPE
from batchferry.engine.partition import PartitionTask

SHAPE_ID = "f00d"
ENDPOINT = KEY.endpoint
NOW_MS = round(NOW.timestamp() * 1000)
SHIP_BY_MS = NOW_MS + 4 * 3_600_000
DEADLINE_MS = NOW_MS + 30 * 3_600_000
GOOD = ResultLine("w", RowClass.SUCCEEDED, 200, body=b'{"choices":[{"message":{"content":"{}"}}]}')
PROSE = ResultLine("w", RowClass.SUCCEEDED, 200, body=b'{"choices":[{"message":{"content":"no JSON"}}]}')


class Trial:
    """A desk, and the rows that it sent ahead."""

    def __init__(self, harbour: Harbour, **settings: Any) -> None:
        self.harbour = harbour
        self.settings = CanarySettings(**{"rows": 3, **settings})
        self.ahead: list[int] = []
        self.desk = CanaryDesk(
            harbour.clock, harbour.telemetry, harbour.fleet, harbour.holds, harbour.outcomes, self.offer, seed=1
        )

    def offer(self, _task: PartitionTask, _key: Any, offset: int, _deadline_ms: int, reason: str) -> None:
        assert reason == "canary"
        self.ahead.append(offset)

    def send(self, task: PartitionTask, *offsets: int, shape: str = SHAPE_ID) -> list[bool]:
        """Whether these rows wait."""
        return [
            self.desk.takes(
                task, KEY, "default", self.settings, shape, offset,
                deadline_ms=DEADLINE_MS, ship_by_ms=SHIP_BY_MS, tokens=10, size_bytes=100,
            )
            for offset in offsets
        ]  # fmt: skip

    def answer(self, line: ResultLine) -> None:
        """All rows that went ahead end so."""
        for offset in self.ahead:
            self.desk.note(0, offset, line, ENDPOINT)

    def parked(self) -> list[Lot]:
        """Waiting lots of all partitions."""
        return [one for task in self.harbour.tasks.values() for one in task.waiting_lots().values()]


async def test_a_sample_goes_ahead_and_a_good_one_lets_the_others_follow(tmp_path: Path) -> None:
    """Nothing is drawn before there are enough; the sample is of the waiting rows, each once; then all are free."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        task = await harbour.task()
        assert trial.send(task, 0, 1) == [True, True]
        await trial.desk.look()
        assert trial.ahead == []
        assert trial.send(task, *range(2, 20)) == [True] * 18
        await trial.desk.look()
        assert len(set(trial.ahead)) == len(trial.ahead) == 3
        assert trial.desk.waiting_rows == 17
        await trial.desk.look()
        assert trial.parked() == [], "they wait for the verdict"
        trial.answer(GOOD)
        await trial.desk.look()
        verdict = CanaryVerdict(SHAPE_ID, True, 3, 0, NOW)
        assert harbour.fleet.control.canaries == {SHAPE_ID: verdict}
        (waiting,) = trial.parked()
        assert sorted([*waiting.offsets, *trial.ahead]) == list(range(20))
        assert (waiting.lane, dict(waiting.extra), waiting.own_rows) == (Lane.BATCH, {}, 17)
        assert trial.send(task, 20) == [False]
        assert [one["kind"] for one in harbour.fleet.events] == ["canary"]


async def test_a_bad_one_holds_the_shape_and_keeps_its_rows(tmp_path: Path) -> None:
    """The rows wait in the ledger under the shape's hold, with an alarm; other shapes are not concerned."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        task = await harbour.task()
        trial.send(task, *range(10))
        await trial.desk.look()
        trial.answer(ResultLine("w", RowClass.INVALID_REQUEST, 400))
        await trial.desk.look()
        assert not harbour.fleet.control.canaries[SHAPE_ID].is_good
        (hold,) = harbour.fleet.control.all_standing(NOW)
        assert (hold.scope, hold.reason, hold.until) == (shape_scope(SHAPE_ID), "canary_bad", None)
        (waiting,) = trial.parked()
        assert waiting.extra == {SHAPE: SHAPE_ID}
        assert harbour.telemetry.total("alarms", what="canary_bad") == 1
        assert not harbour.holds.standing(KEY)


async def test_what_the_provider_failed_to_do_says_nothing(tmp_path: Path) -> None:
    """A row that is tried again is still in the sample: its second answer counts."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        trial.send(await harbour.task(), *range(10))
        await trial.desk.look()
        for row_class in (RowClass.TRANSIENT, RowClass.ACCOUNT, RowClass.EXPIRED):
            trial.answer(ResultLine("w", row_class))
        await trial.desk.look()
        assert harbour.fleet.control.canaries == {}
        trial.answer(GOOD)
        trial.answer(GOOD)
        await trial.desk.look()
        assert harbour.fleet.control.canaries[SHAPE_ID].rows == 3


@pytest.mark.parametrize(("check", "is_good"), [("none", True), ("json", False)])
async def test_answers_are_looked_at_too(tmp_path: Path, check: str, is_good: bool) -> None:
    """An answer that is no JSON is a good one only where none was asked for."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour, check=check)
        trial.send(await harbour.task(), *range(5))
        await trial.desk.look()
        trial.answer(PROSE)
        await trial.desk.look()
        assert harbour.fleet.control.canaries[SHAPE_ID].is_good is is_good


async def test_a_few_bad_answers_are_borne(tmp_path: Path) -> None:
    """At the ratio it is good, above it is bad."""
    for bad, is_good in ((2, True), (3, False)):
        async with Harbour(tmp_path / str(bad)) as harbour:
            trial = Trial(harbour, rows=20, max_bad_ratio=0.1)
            trial.send(await harbour.task(), *range(30))
            await trial.desk.look()
            for number, offset in enumerate(trial.ahead):
                line = ResultLine("w", RowClass.CONTENT_FILTERED) if number < bad else GOOD
                trial.desk.note(0, offset, line, ENDPOINT)
            await trial.desk.look()
            assert harbour.fleet.control.canaries[SHAPE_ID].is_good is is_good


async def test_few_rows_are_drawn_after_a_while(tmp_path: Path) -> None:
    """A shape of two rows does not wait until a sample's worth has come."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour, gather_s=300.0)
        trial.send(await harbour.task(), 0, 1)
        harbour.clock.at += timedelta(seconds=299)
        await trial.desk.look()
        assert trial.ahead == []
        harbour.clock.at += timedelta(seconds=1)
        await trial.desk.look()
        assert sorted(trial.ahead) == [0, 1]


@pytest.mark.parametrize(("timeout", "extra"), [("ship", {}), ("hold", {SHAPE: SHAPE_ID})])
async def test_without_a_verdict_in_time_the_route_decides(
    tmp_path: Path, timeout: str, extra: dict[str, object]
) -> None:
    """At their time to leave the rows ship, or wait for a person; no verdict is made up."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour, timeout=timeout)
        trial.send(await harbour.task(), *range(10))
        await trial.desk.look()
        harbour.clock.at += timedelta(hours=4)
        await trial.desk.look()
        (waiting,) = trial.parked()
        assert (len(waiting.offsets), dict(waiting.extra)) == (7, extra)
        assert [hold.reason for hold in harbour.fleet.control.all_standing(harbour.clock.now())] == (
            ["canary_timeout"] if timeout == "hold" else []
        )
        assert harbour.fleet.control.canaries == {}


async def test_the_sample_may_travel_in_a_batch_of_its_own(tmp_path: Path) -> None:
    """Where two windows fit the SLA it costs half: the sample is a waiting lot that is due at once."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour, lane="batch")
        trial.send(await harbour.task(), *range(10))
        await trial.desk.look()
        assert trial.ahead == []
        (sample,) = trial.parked()
        assert (sample.lane, len(sample.offsets), dict(sample.extra)) == (Lane.BATCH, 3, {})
        for offset in sample.offsets:
            trial.desk.note(0, offset, GOOD, ENDPOINT)
        await trial.desk.look()
        assert sorted(len(one.offsets) for one in trial.parked()) == [3, 7]


async def test_another_replicas_verdict_is_ours(tmp_path: Path) -> None:
    """It stands in the control topic: our rows follow it without a sample of our own."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        task = await harbour.task()
        trial.send(task, 0)
        await harbour.fleet.publish(CanaryVerdict(SHAPE_ID, True, 3, 0, NOW))
        await trial.desk.look()
        assert [list(one.offsets) for one in trial.parked()] == [[0]]
        assert trial.ahead == []
        assert trial.send(task, 1) == [False]


async def test_a_good_canary_lifts_what_many_failures_had_held(tmp_path: Path) -> None:
    """The key's hold for its input failures goes; a person's stays."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        await harbour.fleet.publish(Hold(key_scope(KEY), "input_failures", NOW))
        await harbour.fleet.publish(Hold(key_scope(KEY), "by hand", NOW))
        trial.send(await harbour.task(), *range(5))
        await trial.desk.look()
        trial.answer(GOOD)
        await trial.desk.look()
        assert [hold.reason for hold in harbour.holds.standing(KEY)] == ["by hand"]


async def test_more_shapes_than_are_remembered_switch_the_canary_off(tmp_path: Path) -> None:
    """Rows of further shapes go as if there were none, with one alarm."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour, max_shapes=2)
        task = await harbour.task()
        assert [trial.send(task, number, shape=f"s{number}") for number in range(4)] == [
            [True],
            [True],
            [False],
            [False],
        ]
        assert trial.send(task, 9, shape="s1") == [True]
        assert harbour.telemetry.total("alarms", what="canary_off") == 1


async def test_rows_of_a_lost_partition_are_forgotten(tmp_path: Path) -> None:
    """Its next owner reads them again: nothing of them is parked, judged or waited for here."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        trial.send(await harbour.task(), *range(10))
        await trial.desk.look()
        trial.desk.drop_partition(0)
        assert trial.desk.waiting_rows == 0
        trial.answer(ResultLine("w", RowClass.INVALID_REQUEST))
        await trial.desk.look()
        assert harbour.fleet.published == []


async def test_a_sample_that_went_with_its_partition_is_drawn_again(tmp_path: Path) -> None:
    """The rows of the other partitions do not wait for answers that nobody here will see."""
    async with Harbour(tmp_path) as harbour:
        trial = Trial(harbour)
        first, second = await harbour.task(0), await harbour.task(1)
        trial.send(first, *range(3))
        await trial.desk.look()
        assert sorted(trial.ahead) == [0, 1, 2]
        trial.send(second, *range(100, 110))
        trial.desk.drop_partition(0)
        harbour.clock.at += timedelta(seconds=300)
        await trial.desk.look()
        assert len([offset for offset in trial.ahead if offset >= 100]) == 3
