"""``hold``, ``release``, ``flush``, ``cancel``, ``rescue``: what is written, what is refused, what is told."""

from __future__ import annotations

from datetime import timedelta

import pytest
import yaml
from rows_kit import BATCH, KEY, NOW, WAVE, BatchId, Rows, lot, make_rows  # noqa: F401 - make_rows is a fixture

from batchferry.cli.exits import Exit
from batchferry.domain.control import (
    CanaryVerdict,
    CancelWish,
    Flush,
    Hold,
    RescueWish,
    account_scope,
    key_scope,
    shape_scope,
)
from batchferry.domain.ledger import Lane, LotState

SCOPE = key_scope(KEY)


def test_an_account_is_held_until_it_is_released(rows: Rows) -> None:
    """The record is an operator's, stands without an end, and goes with release; both acts are among the events."""
    ran = rows.run("hold", "account:default", "--reason", "invoice unpaid", "--json")
    assert ran.code == Exit.OK
    (hold,) = rows.controls().holds.values()
    assert hold == Hold(account_scope("default"), "operator: invoice unpaid", NOW, None, 1, "default")
    assert rows.controls().standing(KEY, NOW) == [hold]
    assert rows.run("release", "default", "--json").json["released"][0]["reason"] == "operator: invoice unpaid"
    assert rows.controls().holds == {}
    assert [(event["kind"], event["scope"]) for event in rows.events()] == [
        ("held", "default"),
        ("released", "default"),
    ]


def test_a_hold_may_end_by_itself(rows: Rows) -> None:
    """--for sets the end."""
    rows.book(lot(1))
    assert "until 2026-05-01 14:00:00Z" in rows.run("hold", SCOPE, "--for", "2h", "--table").out
    assert rows.controls().holds[f"hold/{SCOPE}/operator"].until == NOW + timedelta(hours=2)
    assert rows.run("hold", SCOPE, "--for", "long").code == Exit.USAGE
    assert rows.run("hold", SCOPE, "--for", "0s").code == Exit.USAGE


@pytest.mark.parametrize("named", [SCOPE, "gpt-4o-mini", "GPT-4O", KEY.label, KEY.digest])
def test_a_batch_key_is_named_by_a_piece_of_its_label(rows: Rows, named: str) -> None:
    """Digest, label and a piece of it all mean the key of a batch the ledger knows."""
    rows.book(lot(1))
    rows.run("hold", named)
    (hold,) = rows.controls().holds.values()
    assert (hold.scope, hold.label) == (SCOPE, KEY.label)


def test_what_is_unknown_or_unclear_is_refused_with_what_there_is(rows: Rows) -> None:
    """A wrong account, a piece of nothing, a piece of several labels: nothing is written, the choices are told."""
    rows.book(lot(1), lot(2, batch_id=WAVE))
    rows.put(Hold(key_scope(KEY._replace(model="gpt-4o")), "quota", NOW, None, 1, KEY._replace(model="gpt-4o").label))
    before = rows.controls().holds
    for named, told in (
        ("account:nobody", "the settings have: default"),
        ("claude", "fits no account, batch key or hold"),
        ("gpt", "fits 2 scopes"),
        ("key:xyz", "16 hexadecimal characters"),
        ("shape:", "no kind of prompt"),
    ):
        ran = rows.run("hold", named)
        assert ran.code == Exit.USAGE, named
        assert told in ran.err
    assert rows.run("hold", SCOPE, "--reason", "a/b").code == Exit.USAGE
    assert rows.controls().holds == before


def test_an_unseen_key_is_held_with_a_warning(rows: Rows) -> None:
    """Rows that have never been in a batch are in no ledger: their key's digest is believed, and that is told."""
    ran = rows.run("hold", "key:0123456789abcdef")
    assert ran.code == Exit.OK
    assert "if it is misspelt" in ran.err
    assert [hold.scope for hold in rows.controls().holds.values()] == ["key:0123456789abcdef"]


def test_release_lifts_one_reason_and_tells_the_others(rows: Rows) -> None:
    """Of several reasons one must be named; those that still stand, the account's among them, are told."""
    for scope, reason, label in (
        (SCOPE, "quota", KEY.label),
        (SCOPE, "operator: test", KEY.label),
        (account_scope("default"), "billing", "default"),
    ):
        rows.put(Hold(scope, reason, NOW, None, 1, label))
    ran = rows.run("release", SCOPE)
    assert ran.code == Exit.USAGE
    assert "held for 2 reasons" in ran.err
    told = rows.run("release", SCOPE, "--reason", "test").json
    assert [one["reason"] for one in told["released"]] == ["operator: test"]
    assert [one["reason"] for one in told["still_held_for"]] == ["quota", "billing"]
    assert "still held" in rows.run("release", SCOPE, "--all", "--table").out
    assert [hold.reason for hold in rows.controls().holds.values()] == ["billing"]
    assert rows.run("release", SCOPE).code == Exit.FAILED
    assert rows.run("release", "account:default", "--reason", "quota").code == Exit.FAILED
    assert rows.run("release", "account:default", "--reason", "billing", "--all").code == Exit.USAGE


def test_a_hold_on_trial_can_be_lifted(rows: Rows) -> None:
    """One whose time is over, and whose record one batch is still trying, goes at an operator's word."""
    rows.put(Hold(SCOPE, "quota", NOW - timedelta(hours=1), NOW - timedelta(minutes=5), 3, KEY.label))
    assert rows.run("release", "gpt-4o-mini").code == Exit.OK
    assert rows.controls().holds == {}


def test_releasing_a_shape_forgets_the_canarys_verdict(rows: Rows) -> None:
    """A bad verdict beats every good one, so it must go with its hold; a verdict alone can be lifted too."""
    for shape in ("abc", "def"):
        rows.put(CanaryVerdict(shape, is_good=False, rows=50, bad_rows=40, at=NOW))
    rows.put(Hold(shape_scope("abc"), "canary", NOW, None, 1, KEY.label))
    rows.put(Hold(shape_scope("abc"), "operator", NOW, None, 1, KEY.label))
    assert rows.run("release", "shape:abc", "--reason", "canary").json["canary_verdict_lifted"] is None
    assert rows.run("release", "shape:abc").json["canary_verdict_lifted"] == "abc"
    assert "sampled anew" in rows.run("release", "shape:def", "--table").out
    assert rows.controls().canaries == {}
    assert rows.controls().holds == {}


def test_flush_makes_what_waits_due(rows: Rows) -> None:
    """Of all keys or of one, up to now; a hold that will stop it is told."""
    rows.book(lot(1))
    assert rows.run("flush").json == {"key": "all", "before": "2026-05-01T12:00:00Z", "held": []}
    rows.put(Hold(account_scope("default"), "quota", NOW, None, 1, "default"))
    ran = rows.run("flush", "gpt-4o-mini")
    assert [one["scope"] for one in ran.json["held"]] == ["account:default"]
    assert rows.controls().flushes == {"all": Flush("all", NOW), KEY.digest: Flush(KEY.digest, NOW)}
    assert rows.run("flush", "account:default").code == Exit.USAGE
    assert rows.run("flush", "nothing").code == Exit.USAGE


@pytest.mark.parametrize("unrun", ["fail", "requeue", "hold"])
def test_cancel_says_what_becomes_of_the_rows(rows: Rows, unrun: str) -> None:
    """The wish names the batch whole, whatever was typed."""
    rows.book(lot(1))
    ran = rows.run("cancel", "batch_abc", "--rows", unrun)
    assert ran.json["batch_id"] == BATCH
    assert rows.controls().cancels == {BatchId(BATCH): CancelWish(BatchId(BATCH), unrun, NOW)}


def test_only_a_batch_under_way_can_be_cancelled_or_rescued(rows: Rows) -> None:
    """Unknown, ended, waiting ones and waves are refused with the reason; nothing is written."""
    ended, waiting, wave = BATCH[:-1] + "7", BATCH[:-1] + "8", BATCH[:-1] + "9"
    rows.book(
        lot(1, batch_id=ended, state=LotState.DONE),
        lot(2, batch_id=waiting, state=LotState.WAITING, provider=None),
        lot(3, batch_id=wave, state=LotState.SUBMITTING, lane=Lane.SYNC, provider=None),
    )
    for command, named, told in (
        ("cancel", "nothing", "the ledger knows no batch"),
        ("cancel", BATCH[:8], "fits 3 batches"),
        ("cancel", ended, "has ended"),
        ("cancel", waiting, "not at a provider"),
        ("cancel", wave, "a wave"),
        ("rescue", ended, "has ended"),
        ("rescue", wave, "a wave"),
    ):
        ran = rows.run(command, named)
        assert ran.code != Exit.OK
        assert told in ran.err
    assert rows.run("cancel", waiting, "--rows", "drop").code == Exit.USAGE
    assert rows.controls().cancels == {}
    assert rows.controls().rescues == {}


def test_rescue_needs_a_sync_lane(rows: Rows) -> None:
    """With the lane the wish is written; without it the setting to change is told."""
    rows.book(lot(1, 2))
    assert rows.run("rescue", BATCH).json["unsettled"] == 2
    assert rows.controls().rescues == {BatchId(BATCH): RescueWish(BatchId(BATCH), NOW)}
    settings = rows.settings()
    settings["accounts"]["default"]["sync"] = {"enabled": False}
    rows.config.write_text(yaml.safe_dump(settings))
    ran = rows.run("rescue", BATCH)
    assert ran.code == Exit.USAGE
    assert "sync.enabled" in ran.err


def test_before_the_first_run_there_is_nothing_to_write_to(rows: Rows) -> None:
    """Without a control topic the remedy is told."""
    rows.cluster.delete_topic("requests.batchferry.control")
    ran = rows.run("hold", "account:default")
    assert ran.code == Exit.FAILED
    assert "'batchferry run' makes it" in ran.err
