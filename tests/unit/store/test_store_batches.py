"""The batch machine's read model and history."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from batchferry.store import LocalState, batches

NOW = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[LocalState]:
    """A local state of the test's own."""
    made = LocalState(tmp_path / "state")
    await made.start()
    yield made
    await made.close()


def _full_row() -> dict[str, object]:
    row: dict[str, object] = {}
    for name in batches.BATCH_COLUMNS:
        if name.endswith("_at"):
            row[name] = NOW
        elif name in {"rows", "bytes", "tokens", "total_requests", "succeeded", "failed", "missing", "duplicate"}:
            row[name] = 7
        else:
            row[name] = f"{name} text"
    return row | {"partitions": [0, 3], "detail": {"hold": None, "n": [1, 2.5]}, "waiting_s": 12.5}


async def test_a_batch_comes_back_as_it_was(state: LocalState) -> None:
    """Every column survives: instants as aware datetimes, partitions and detail as values."""
    row = _full_row()
    await state.save_batch(row)
    assert await state.batches() == [row]


async def test_saving_again_changes_only_what_is_named(state: LocalState) -> None:
    """Columns that a later save does not name keep their value; None clears one."""
    await state.save_batch({"batch_id": "01A", "state": "sealed", "rows": 5, "next_poll_at": NOW})
    await state.save_batch({"state": "uploading", "batch_id": "01A", "next_poll_at": None})
    await state.save_batch({"batch_id": "01A"})
    (row,) = await state.batches()
    assert (row["state"], row["rows"], row["next_poll_at"]) == ("uploading", 5, None)


async def test_instants_are_one_instant(state: LocalState) -> None:
    """A time in another zone comes back as the same instant in UTC."""
    await state.save_batch({"batch_id": "01A", "created_at": NOW.astimezone(timezone(timedelta(hours=5)))})
    (row,) = await state.batches()
    assert row["created_at"] == NOW
    assert row["created_at"].tzinfo == UTC  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"batch_id": "01A", "colour": "red"}, "no column colour"),
        ({"batch_id": "01A", "rows = 1; --": 1}, "no column rows = 1"),
        ({"state": "sealed"}, "needs batch_id"),
        ({"batch_id": "01A", "created_at": NOW.replace(tzinfo=None)}, "created_at takes an aware datetime"),
        ({"batch_id": "01A", "created_at": 5}, "created_at takes an aware datetime"),
    ],
)
async def test_a_wrong_row_is_refused(state: LocalState, row: dict[str, object], complaint: str) -> None:
    """Unknown columns, a missing id and unclear times are named."""
    with pytest.raises(ValueError, match=complaint):
        await state.save_batch(row)
    assert await state.batches() == []


async def test_a_wrong_event_is_refused(state: LocalState) -> None:
    """An event needs batch, time and name, and only known columns."""
    with pytest.raises(ValueError, match="needs at, event"):
        await state.add_batch_event({"batch_id": "01A"})
    with pytest.raises(ValueError, match="no column seq"):
        await state.add_batch_event({"batch_id": "01A", "at": NOW, "event": "Sealed", "seq": 1})


async def test_history_in_order(state: LocalState) -> None:
    """A batch's events come oldest first, without those of others, also before the batch is saved."""
    for place, batch_id in enumerate(["01A", "01B", "01A"]):
        await state.add_batch_event(
            {"batch_id": batch_id, "at": NOW, "event": f"E{place}", "from_state": "a", "to_state": "b", "detail": [1]}
        )
    events = await state.batch_events("01A")
    assert [event["event"] for event in events] == ["E0", "E2"]
    assert events[0] == {
        "seq": 1,
        "batch_id": "01A",
        "at": NOW,
        "event": "E0",
        "from_state": "a",
        "to_state": "b",
        "detail": [1],
    }


async def test_history_is_bounded(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch keeps its newest events, and all batches together theirs."""
    monkeypatch.setattr(batches, "MAX_EVENTS_PER_BATCH", 3)
    monkeypatch.setattr(batches, "MAX_EVENTS", 5)
    for place in range(6):
        await state.add_batch_event({"batch_id": "01A", "at": NOW, "event": f"E{place}"})
    assert [event["event"] for event in await state.batch_events("01A")] == ["E3", "E4", "E5"]
    for place in range(3):
        await state.add_batch_event({"batch_id": f"01B{place}", "at": NOW, "event": "E"})
    assert [event["event"] for event in await state.batch_events("01A")] == ["E4", "E5"]


async def test_finished_batches_are_bounded(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest finished batches stay, with those that still live; a batch takes its history along."""
    monkeypatch.setattr(batches, "MAX_FINISHED_BATCHES", 2)
    await state.save_batch({"batch_id": "01Z", "state": "in_progress"})
    for place in range(4):
        await state.add_batch_event({"batch_id": f"01A{place}", "at": NOW, "event": "E"})
        await state.save_batch({"batch_id": f"01A{place}", "finalized_at": NOW + timedelta(seconds=place)})
    assert [row["batch_id"] for row in await state.batches()] == ["01Z", "01A3", "01A2"]
    assert await state.batch_events("01A1") == []
    assert len(await state.batch_events("01A2")) == 1


async def test_batches_are_bounded_whatever_their_state(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that never finish do not pile up for ever."""
    monkeypatch.setattr(batches, "MAX_BATCHES", 3)
    for place in range(5):
        await state.save_batch({"batch_id": f"01A{place}"})
    assert [row["batch_id"] for row in await state.batches()] == ["01A4", "01A3", "01A2"]
