"""The ways of fresh rows that are not plain, one by one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_kit import ACCOUNT, KEY, NOW, Harbour

from batchferry.domain.batchkey import BatchKey
from batchferry.engine.partition import PartitionTask, Settlement
from batchferry.engine.rowsource import Accepted
from batchferry.engine.ways import LONG_SLICE, PREFIX_FROM_ROWS, PREFIX_SLICE, Ways

ROUTE = "routes.default"
NOW_MS = round(NOW.timestamp() * 1000)
HOUR_MS = 3_600_000
HEAD = "x" * 8_000
"""A system prompt that is worth a batch of its own."""


class Lane:
    """The sync lane as far as a fresh row sees it."""

    def __init__(self, *, is_on: bool = True, room: int = 100) -> None:
        self._is_on = is_on
        self.room = room
        self.offered: list[tuple[int, int, str]] = []

    def is_on(self, _key: BatchKey) -> bool:
        return self._is_on

    def reserve(self, _key: BatchKey, rows: int = 1) -> bool:
        if not self._is_on or self.room < rows:
            return False
        self.room -= rows
        return True

    def offer(self, _task: PartitionTask, _key: BatchKey, offset: int, deadline_ms: int, reason: str) -> None:
        self.offered.append((offset, deadline_ms, reason))


class Desk:
    """A canary that takes the rows of shapes without a verdict."""

    def __init__(self) -> None:
        self.judged: set[str] = set()
        self.barred: set[str] = set()
        self.waiting: dict[int, str] = {}

    def is_barred(self, _key: BatchKey, shape: str) -> bool:
        return shape in self.barred

    def takes(
        self, _task: Any, _key: BatchKey, _route: str, _settings: Any, shape: str, offset: int, **_sizes: int
    ) -> bool:
        if shape in self.judged:
            return False
        self.waiting[offset] = shape
        return True


class Fork:
    """Where rows part, in a harbour with these settings."""

    def __init__(self, harbour: Harbour, lane: Lane | None = None) -> None:
        self.harbour = harbour
        self.lane = lane or Lane()
        self.desk = Desk()
        self.provider = SimpleNamespace(clock_skew_s=0.0)
        rooms: Any = (self.lane, self.desk)
        self.ways = Ways(
            harbour.settings, {ACCOUNT: self.provider}, harbour.clock, harbour.telemetry, harbour.outcomes,  # type: ignore[dict-item]
            *rooms, harbour.router, harbour.splitter,
        )  # fmt: skip
        self.task: PartitionTask | None = None

    async def send(self, offset: int, text: str = "hi", body: dict[str, Any] | None = None, **changes: Any) -> Any:
        """What becomes of a request; headers and timestamp are the record's."""
        if self.task is None:
            self.task = await self.harbour.task()
        asked = {"model": KEY.model, "messages": [{"role": "user", "content": text}], **(body or {})}
        url = changes.pop("url", None)
        value = {"custom_id": f"c{offset}", **({"url": url} if url else {}), "body": asked}
        self.harbour.log.put(offset, value=json.dumps(value).encode(), **changes)
        record = self.harbour.log.records[0, offset]
        accepted = self.harbour.source.accept(record, NOW_MS)
        assert type(accepted) is Accepted, accepted
        return self.ways.choose(self.task, record, accepted, 1_000, NOW)


def failure(way: Any) -> dict[str, Any]:
    """The error of a row that ends here."""
    assert isinstance(way, Settlement)
    told = json.loads(way.record.value or b"")
    assert told["kind"] == "failure"
    assert told["error"]["remedy"]
    error: dict[str, Any] = told["error"]
    return error


def late(hours: float = 25) -> dict[str, Any]:
    """A record whose deadline (30 h) is nearer than a window."""
    return {"timestamp": NOW_MS - round((30 - hours) * HOUR_MS) - 2 * HOUR_MS}


async def test_a_plain_row_waits_for_its_batch(tmp_path: Path) -> None:
    """Nothing is odd about it: it goes under its route's key."""
    async with Harbour(tmp_path) as harbour:
        fork = Fork(harbour)
        assert await fork.send(1) == KEY
        assert fork.lane.offered == []


async def test_a_row_too_old_is_given_up_whatever_else_it_is(tmp_path: Path) -> None:
    """Nobody is thought to want its answer; its age is said, and how to change it."""
    async with Harbour(tmp_path) as harbour:
        fork = Fork(harbour)
        way = await fork.send(1, timestamp=NOW_MS - 8 * 24 * HOUR_MS, headers=[("priority", b"now")])
        error = failure(way)
        assert error["class"] == "max_age"
        assert "192.0 h" in error["message"]
        assert "requests-0@1" in error["message"]
        assert fork.lane.offered == []


async def test_now_means_the_sync_lane_and_without_one_a_batch(tmp_path: Path) -> None:
    """The lane's hourly budget is not asked: who wants it so pays for it. Without a lane that is counted."""
    async with Harbour(tmp_path) as harbour:
        fork = Fork(harbour, Lane(room=0))
        now = [("priority", b"now")]
        assert await fork.send(1, headers=now) is None
        assert fork.lane.offered == [(1, NOW_MS - 60_000 + 30 * HOUR_MS, "priority")]
        without = Fork(harbour, Lane(is_on=False))
        without.task = fork.task
        assert await without.send(2, headers=now) == KEY
        assert without.lane.offered == []
        assert harbour.telemetry.total("late_rows", policy="no_lane") == 1


async def test_a_route_may_send_all_of_its_rows_through_the_lane(tmp_path: Path) -> None:
    """``lane: sync`` is for lanes at the price of a batch: every row goes there, and its hourly budget is not asked."""
    async with Harbour(tmp_path, **{f"{ROUTE}.lane": "sync", "accounts.default.sync.enabled": True}) as harbour:
        fork = Fork(harbour, Lane(room=0))
        assert await fork.send(1) is None
        assert fork.lane.offered == [(1, NOW_MS - 60_000 + 30 * HOUR_MS, "lane")]
        accepted = harbour.source.accept(harbour.log.records[0, 1], NOW_MS)
        assert isinstance(accepted, Accepted)
        assert accepted.routed.is_special


async def test_late_rows_buy_the_lane_as_far_as_its_budget_goes(tmp_path: Path) -> None:
    """Beyond it they go by batch, and a replayed backlog does not buy everything at the full price."""
    async with Harbour(tmp_path) as harbour:
        fork = Fork(harbour, Lane(room=1))
        assert await fork.send(1, **late()) is None
        assert await fork.send(2, **late()) == KEY
        assert [(offset, reason) for offset, _, reason in fork.lane.offered] == [(1, "late")]
        assert harbour.telemetry.total("late_rows", policy="sync") == 2


@pytest.mark.parametrize(("policy", "expected"), [("batch", KEY), ("fail", "late")])
async def test_the_route_says_what_late_rows_do(tmp_path: Path, policy: str, expected: object) -> None:
    """A batch all the same, or a failure with its remedy; the lane is not bought."""
    async with Harbour(tmp_path, **{f"{ROUTE}.late": policy}) as harbour:
        fork = Fork(harbour)
        way = await fork.send(1, **late())
        assert (failure(way)["class"] if policy == "fail" else way) == expected
        assert fork.lane.offered == []


async def test_nothing_is_late_while_the_clocks_disagree(tmp_path: Path) -> None:
    """Ours and the provider's differ by more than a minute: no lateness is judged, in either direction."""
    async with Harbour(tmp_path, **{f"{ROUTE}.late": "fail"}) as harbour:
        fork = Fork(harbour)
        for number, skew_s in enumerate((61.0, -61.0)):
            fork.provider.clock_skew_s = skew_s
            assert await fork.send(number, **late()) == KEY
        fork.provider.clock_skew_s = 59.0
        assert failure(await fork.send(9, **late()))["class"] == "late"


async def test_giants_go_their_own_way(tmp_path: Path) -> None:
    """In batches of their own, or through the lane where there is one; those below the limit do not."""
    long = "word " * 3_000
    rule = {f"{ROUTE}.long_row": {"over_tokens": 2_000, "lane": "own_batch"}}
    async with Harbour(tmp_path / "own", **rule) as harbour:
        fork = Fork(harbour)
        assert await fork.send(1, long) == KEY._replace(slice=LONG_SLICE)
        assert await fork.send(2, long, headers=[("slice", b"eu")]) == KEY._replace(slice="eu" + LONG_SLICE)
        assert await fork.send(3, "word " * 100) == KEY
    on = {f"accounts.{ACCOUNT}.sync.enabled": True}
    rule = {f"{ROUTE}.long_row": {"over_tokens": 2_000, "lane": "sync"}, **on}
    async with Harbour(tmp_path / "sync", **rule) as harbour:
        fork = Fork(harbour)
        assert await fork.send(1, long) is None
        assert [(offset, reason) for offset, _, reason in fork.lane.offered] == [(1, "long")]
        without = Fork(harbour, Lane(is_on=False))
        without.task = fork.task
        assert await without.send(2, long) == KEY._replace(slice=LONG_SLICE)


async def test_a_canary_takes_the_rows_of_new_shapes(tmp_path: Path) -> None:
    """One shape a system prompt; when it is judged its rows wait for their batch like all others."""
    async with Harbour(tmp_path, **{f"{ROUTE}.canary": {}, f"accounts.{ACCOUNT}.sync.enabled": True}) as harbour:
        fork = Fork(harbour)

        async def send(offset: int, system: str) -> Any:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"question {offset}"}]
            return await fork.send(offset, body={"messages": messages})

        assert [await send(1, "a"), await send(2, "a"), await send(3, "b")] == [None] * 3
        shapes = fork.desk.waiting
        assert shapes[1] == shapes[2] != shapes[3]
        fork.desk.judged.add(shapes[1])
        assert await send(4, "a") == KEY
        assert await send(5, "b") is None


async def test_urgency_is_no_way_round_a_bad_verdict(tmp_path: Path) -> None:
    """A row that asks for the sync lane waits like the others when its kind of prompt was found bad."""
    async with Harbour(tmp_path, **{f"{ROUTE}.canary": {}, f"accounts.{ACCOUNT}.sync.enabled": True}) as harbour:
        fork = Fork(harbour)
        body = {"messages": [{"role": "user", "content": "question"}]}
        await fork.send(1, body=body)
        fork.desk.barred.add(fork.desk.waiting.pop(1))
        assert await fork.send(2, body=body, headers=(("priority", b"now"),)) is None
        assert list(fork.desk.waiting) == [2]


@pytest.mark.parametrize(
    ("rule", "way"), [("allow", "batch"), ("warn", "batch"), ("fail", "bad_record")], ids=["allow", "warn", "fail"]
)
async def test_answers_without_a_bound(tmp_path: Path, rule: str, way: str) -> None:
    """Allowed, counted or refused by the route; a bounded one is none of its business."""
    async with Harbour(tmp_path, **{f"{ROUTE}.missing_max_tokens": rule}) as harbour:
        fork = Fork(harbour)
        unbounded = await fork.send(1)
        assert (unbounded == KEY) is (way == "batch")
        if way == "bad_record":
            error = failure(unbounded)
            assert (error["class"], error["code"]) == ("bad_record", "missing_max_tokens")
        assert harbour.telemetry.total("missing_max_tokens") == (rule == "warn")
        assert await fork.send(2, body={"max_completion_tokens": 5}) == KEY


LONG = "A short sentence with some words in it. " * 400
"""About 3,600 tokens by any tokenizer's count."""


async def test_a_row_that_no_model_of_its_kind_takes_is_never_sent(tmp_path: Path) -> None:
    """Longer than the context for certain: it fails at once and says by how much. What might fit is sent."""
    async with Harbour(tmp_path, **{f"{ROUTE}.context_tokens": 1_000}) as harbour:
        fork = Fork(harbour)
        error = failure(await fork.send(1, LONG))
        assert error["class"] == "too_long"
        assert "takes 1000" in error["message"]
        assert await fork.send(2, LONG[:3_000]) == KEY


async def test_a_recording_is_not_taken_for_text(tmp_path: Path) -> None:
    """Kilobytes of base64 are no tokens: they are sent, and so are many short texts that share no context."""
    async with Harbour(tmp_path, **{f"{ROUTE}.context_tokens": 1_000}) as harbour:
        fork = Fork(harbour)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 20_000}}
        assert await fork.send(1, body={"messages": [{"role": "user", "content": [picture]}]}) == KEY
        inputs = ["A short sentence with some words in it. "] * 1_000
        vectors = {"model": "text-embedding-3-small", "input": inputs}
        way = await fork.send(2, body={**vectors, "messages": None}, url="/v1/embeddings")
        assert isinstance(way, BatchKey)


async def test_a_larger_model_may_take_what_is_too_long(tmp_path: Path) -> None:
    """With ``too_long: sync`` the provider's word is waited for, so that the row's way is the same as any other's."""
    rules = {
        f"{ROUTE}.context_tokens": 1_000,
        f"{ROUTE}.policies": {"too_long": "sync"},
        f"{ROUTE}.larger_model": "gpt-4.1",
        f"accounts.{ACCOUNT}.sync.enabled": True,
    }
    async with Harbour(tmp_path, **rules) as harbour:
        assert await Fork(harbour).send(1, LONG) == KEY


async def test_a_row_too_long_is_cut_before_it_is_sent(tmp_path: Path) -> None:
    """Its outcome and its parts are one settlement: records of the same partition and key, each shorter."""
    rules = {f"{ROUTE}.context_tokens": 1_000, f"{ROUTE}.policies": {"too_long": "split"}}
    async with Harbour(tmp_path, **rules) as harbour:
        fork = Fork(harbour)
        way = await fork.send(1, LONG)
        assert isinstance(way, Settlement)
        told = json.loads(way.record.value or b"")
        assert (told["kind"], told["custom_id"], told["parts"]) == ("split", "c1", len(way.also))
        assert {(part.topic, part.partition, part.key) for part in way.also} == {("requests", 0, b"k1")}
        ids = [json.loads(part.value or b"")["custom_id"] for part in way.also]
        assert ids == [f"c1#part{number}" for number in range(1, len(ids) + 1)]
        assert all(len(part.value or b"") < len(LONG) for part in way.also)
        assert harbour.telemetry.total("rows_split") == 1


async def test_a_row_that_cannot_be_cut_fails(tmp_path: Path) -> None:
    """The splitter knows no such request: the row is too long, and why it was not cut is told."""
    rules = {f"{ROUTE}.context_tokens": 1_000, f"{ROUTE}.policies": {"too_long": "split"}}
    async with Harbour(tmp_path, **rules) as harbour:
        fork = Fork(harbour)
        tools = [{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": LONG}]}]
        error = failure(await fork.send(1, body={"messages": tools}))
        assert error["class"] == "too_long"
        assert len(harbour.telemetry.named("row_not_split")) == 1


async def test_prompts_that_many_share_get_batches_of_their_own(tmp_path: Path) -> None:
    """From the hundredth row on, by prompt; short prompts and those of few rows stay together."""
    async with Harbour(tmp_path, **{f"{ROUTE}.group_prefixes": True}) as harbour:
        fork = Fork(harbour)

        async def send(offset: int, system: str) -> Any:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"question {offset}"}]
            return await fork.send(offset, body={"messages": messages})

        ways = [await send(offset, HEAD) for offset in range(PREFIX_FROM_ROWS + 1)]
        assert ways[: PREFIX_FROM_ROWS - 1] == [KEY] * (PREFIX_FROM_ROWS - 1)
        own = ways[-1]
        assert own == ways[-2]
        assert own.slice.startswith(PREFIX_SLICE)
        assert own._replace(slice="") == KEY
        assert await send(500, "y" * 8_000) == KEY
        assert await send(501, "short") == KEY
