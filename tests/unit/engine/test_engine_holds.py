"""Holds: who may try when one has ended by its time, how long the next one is, and what lifts which."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from engine_kit import ACCOUNT, KEY, NOW, Harbour

from batchferry.domain.control import Hold, Lifted, account_scope, key_scope, shape_scope
from batchferry.engine.holds import FIRST_PAUSE_S, FORGET_AFTER_S, MAX_PAUSE_S

OTHER = KEY._replace(model="gpt-4o")
"""Another key of the same account."""


async def ended(harbour: Harbour, reason: str = "quota") -> Hold:
    """A hold of the account that has just ended by its time."""
    await harbour.holds.place_account(KEY, reason)
    harbour.clock.at += timedelta(seconds=FIRST_PAUSE_S)
    return harbour.fleet.control.holds[f"hold/{account_scope(ACCOUNT)}/{reason}"]


async def test_when_a_hold_ends_one_batch_tries_and_the_others_wait(tmp_path: Path) -> None:
    """The first to ask is the one; it may ask again; batches of every key of the account wait for it."""
    harbour = Harbour(tmp_path)
    holds = harbour.holds
    await holds.place_account(KEY, "quota")
    assert holds.standing(KEY)
    assert holds.standing(OTHER)
    harbour.clock.at += timedelta(seconds=FIRST_PAUSE_S)
    assert not holds.standing(KEY)
    assert holds.may_probe(KEY, "a")
    assert holds.may_probe(KEY, "a")
    assert not holds.may_probe(KEY, "b")
    assert not holds.may_probe(OTHER, "c")
    (told,) = harbour.telemetry.named("hold_probed")
    assert told["batch_id"] == "a"


async def test_a_probe_that_comes_to_nothing_leaves_its_place(tmp_path: Path) -> None:
    """A batch that ended without an answer to the question lets another one try."""
    harbour = Harbour(tmp_path)
    await ended(harbour)
    assert harbour.holds.may_probe(KEY, "a")
    harbour.holds.probe_ended("b")
    assert not harbour.holds.may_probe(KEY, "b")
    harbour.holds.probe_ended("a")
    assert harbour.holds.may_probe(KEY, "b")


async def test_a_probe_that_succeeds_lifts_the_hold_for_all(tmp_path: Path) -> None:
    """Its record goes from the control topic, so that every replica's batches go; readers of events are told."""
    harbour = Harbour(tmp_path)
    hold = await ended(harbour)
    assert harbour.holds.may_probe(KEY, "a")
    await harbour.holds.probe_succeeded(KEY, "b")
    assert harbour.fleet.control.holds, "another batch proves nothing of what this one tries"
    await harbour.holds.probe_succeeded(KEY, "a")
    assert harbour.fleet.published[-1] == Lifted(f"hold/{hold.scope}/{hold.reason}")
    assert harbour.fleet.control.holds == {}
    assert [one["kind"] for one in harbour.fleet.events] == ["held", "released"]
    assert harbour.holds.may_probe(KEY, "b")
    assert harbour.holds.may_probe(OTHER, "c")


async def test_success_lifts_nothing_that_still_stands(tmp_path: Path) -> None:
    """A batch that was at the provider before its account was held lands: that says nothing of the next one."""
    harbour = Harbour(tmp_path)
    await harbour.holds.place_account(KEY, "quota")
    await harbour.holds.place_for_operator(KEY, "by hand")
    await harbour.holds.probe_succeeded(KEY, "a")
    await harbour.holds.sync_succeeded(KEY)
    assert {hold.reason for hold in harbour.holds.standing(KEY)} == {"quota", "by hand"}


async def test_an_answer_of_the_lane_lifts_what_it_refutes(tmp_path: Path) -> None:
    """One paid call says that the account pays; of a full queue for batches it says nothing."""
    harbour = Harbour(tmp_path)
    await harbour.holds.place_account(KEY, "sync_account")
    await harbour.holds.place_key(KEY, "token_limit_exceeded")
    harbour.clock.at += timedelta(seconds=FIRST_PAUSE_S)
    await harbour.holds.sync_succeeded(KEY)
    assert {hold.reason for hold in harbour.fleet.control.holds.values()} == {"token_limit_exceeded"}


async def test_several_reasons_are_tried_together(tmp_path: Path) -> None:
    """A key and its account both ended: one batch answers for both, and one that tries only its key keeps it back."""
    harbour = Harbour(tmp_path)
    await harbour.holds.place_key(KEY, "token_limit_exceeded")
    await ended(harbour)
    assert harbour.holds.may_probe(OTHER, "o")
    assert not harbour.holds.may_probe(KEY, "a"), "its account is being tried"
    await harbour.holds.probe_succeeded(OTHER, "o")
    assert harbour.holds.may_probe(KEY, "a")
    assert not harbour.holds.may_probe(KEY, "b")
    await harbour.holds.probe_succeeded(KEY, "a")
    assert harbour.holds.may_probe(KEY, "b")


async def test_a_hold_that_comes_back_lasts_longer_and_forgets_in_time(tmp_path: Path) -> None:
    """Doubled while it returns, up to an hour; after an hour of peace it is a new one, which nobody must try."""
    harbour = Harbour(tmp_path)
    pauses_s = []
    for _ in range(8):
        await harbour.holds.place_account(KEY, "quota")
        (hold,) = harbour.holds.standing(KEY)
        assert hold.until is not None
        pauses_s.append((hold.until - hold.since).total_seconds())
        harbour.clock.at = hold.until
    assert pauses_s == [min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(8)]
    assert harbour.holds.may_probe(KEY, "a")
    harbour.clock.at += timedelta(seconds=FORGET_AFTER_S)
    assert harbour.holds.may_probe(KEY, "b")
    await harbour.holds.place_account(KEY, "quota")
    (hold,) = harbour.holds.standing(KEY)
    assert hold.times == 1


async def test_a_hold_until_an_instant_is_only_made_longer(tmp_path: Path) -> None:
    """Written once; a shorter one does not cut it, and what a person placed is not given an end."""
    harbour = Harbour(tmp_path)
    late, later = NOW + timedelta(hours=1), NOW + timedelta(hours=2)
    for until in (late, late, later, late):
        await harbour.holds.place_until(KEY, "spending_limit", until)
    assert [hold.until for hold in harbour.fleet.published] == [late, later]
    await harbour.holds.place_for_operator(OTHER, "spending_limit")
    await harbour.holds.place_until(OTHER, "spending_limit", later)
    (hold,) = harbour.holds.standing(OTHER)
    assert hold.until is None


async def test_a_shape_is_held_apart_from_its_key(tmp_path: Path) -> None:
    """Other prompts of the key go on; a person lifts it, so time does not."""
    harbour = Harbour(tmp_path)
    await harbour.holds.place_shape(KEY, "f00d", "canary_bad")
    await harbour.holds.place_shape(KEY, "f00d", "canary_bad")
    assert len(harbour.fleet.published) == 1
    harbour.clock.at += timedelta(days=30)
    assert not harbour.holds.standing(KEY)
    assert not harbour.holds.standing(KEY, "beef")
    (hold,) = harbour.holds.standing(KEY, "f00d")
    assert hold.scope == shape_scope("f00d")
    assert hold.label == KEY.label


async def test_old_records_are_removed_and_standing_ones_stay(tmp_path: Path) -> None:
    """A hold that ended an hour ago has nothing to say any more; one that just ended is on trial."""
    harbour = Harbour(tmp_path)
    await harbour.holds.place_key(KEY, "token_limit_exceeded")
    harbour.clock.at += timedelta(seconds=FIRST_PAUSE_S + FORGET_AFTER_S)
    await harbour.holds.place_key(OTHER, "token_limit_exceeded")
    await harbour.holds.tidy()
    assert len(harbour.fleet.control.holds) == 2
    harbour.clock.at += timedelta(seconds=FIRST_PAUSE_S)
    await harbour.holds.tidy()
    assert [hold.scope for hold in harbour.fleet.control.holds.values()] == [key_scope(OTHER)]


async def test_an_alarm_is_told_everywhere_once(tmp_path: Path) -> None:
    """In the log, the metric and on the events topic, with the codes and without a word of a request."""
    harbour = Harbour(tmp_path)
    await harbour.holds.alarm("input_failures", "01J", KEY, rows=40, codes={"context_length_exceeded": 30})
    (event,) = harbour.fleet.events
    assert (event["kind"], event["alarm"], event["rows"]) == ("alarm", "input_failures", 40)
    assert event["codes"] == {"context_length_exceeded": 30}
    assert event["event_id"] == "01J-input_failures"
    assert harbour.telemetry.total("alarms", what="input_failures") == 1
