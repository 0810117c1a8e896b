"""``batchferry show`` of a request: found by custom_id or place, its story told, its words kept back."""

from __future__ import annotations

from datetime import timedelta

import pytest
from rows_kit import BATCH, KEY, NOW, SECRET, WAVE, Rows, chat, lot, make_rows  # noqa: F401 - a fixture

from batchferry.cli.exits import Exit
from batchferry.cli.history import MAX_ROWS, WHY, Place, event_text, parse_place
from batchferry.domain.control import Hold, account_scope, key_scope, shape_scope
from batchferry.domain.envelope import BatchFacts, EventKind
from batchferry.domain.ledger import Lane, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.rows import RowClass
from batchferry.domain.shapes import fingerprint


def _facts(batch_id: str = BATCH) -> BatchFacts:
    return BatchFacts(
        account="default",
        provider="openai",
        endpoint=KEY.endpoint,
        model=KEY.model,
        completion_window="24h",
        batch_id=batch_id,
        provider_batch_id="batch_abc",
    )


# ------------------------------------------------------------------------------------------------- the story


def test_the_whole_story_of_a_row_in_order(rows: Rows) -> None:
    """Began, submitted, held and released meanwhile, retried, submitted again, landed, settled: each with its time."""
    offset = rows.ask("a")
    mine, other = OffsetSet([offset]).dumps(), OffsetSet([77]).dumps()
    at = {minutes: NOW - timedelta(minutes=minutes) for minutes in range(61)}
    rows.tell(EventKind.HELD, at[50], scope="default", reason="quota")
    rows.tell(EventKind.RELEASED, at[48], scope="default", reason="quota")
    rows.tell(EventKind.HELD, at[47], scope="another account", reason="quota")
    rows.tell(EventKind.SUBMITTED, at[45], BATCH, partition=0, offsets=mine, submission=1, lane="batch", reason="time")
    rows.tell(EventKind.SUBMITTED, at[45], "OTHER", partition=0, offsets=other, submission=1, lane="batch")
    rows.tell(EventKind.SUBMITTED, at[44], "OTHER", partition=1, offsets=mine, submission=1, lane="batch")
    rows.tell(EventKind.STATE_CHANGED, at[43], BATCH, from_state="validating", to_state="in_progress")
    rows.tell(EventKind.STATE_CHANGED, at[42], "OTHER", from_state="validating", to_state="failed")
    retried = {"partition": 0, "offsets": mine, "row_class": "transient", "lane": "sync", "submission": 2}
    rows.tell(EventKind.RETRIED, at[40], BATCH, **retried)
    rows.tell(EventKind.LANDED, at[40], BATCH, partition=0, rows=3, classes={"succeeded": 2, "transient": 1})
    rows.tell(EventKind.LANDED, at[39], BATCH, partition=1, rows=9)
    rows.tell(EventKind.SUBMITTED, at[35], WAVE, partition=0, offsets=mine, submission=2, lane="sync")
    rows.tell(EventKind.HELD, at[10], scope="default", reason="quota")
    rows.fail(offset, custom_id="a", batch=_facts(WAVE), submission=2, attempts={"transient": 1}, hours_ago=0.4)
    rows.settle(offset + 1)
    (row,) = rows.run("show", "a").json["rows"]
    assert [step["event"] for step in row["history"]] == [
        "began to wait", "held", "released", "submitted", "state_changed", "retried", "landed", "submitted", "settled",
    ]  # fmt: skip
    assert "row_class transient" in row["history"][5]["told"]
    assert row["state"] == "settled"
    assert row["now"].startswith("failed as transient (server_error) at 2026-05-01 11:36:00Z before its deadline")
    assert "policy for transient: retry (the default); it had been sent again because of 1 transient" in row["why"]
    assert row["outcome"]["batch"]["provider_batch_id"] == "batch_abc"
    assert row["outcome"]["request_id"] == "req_1"


def test_no_word_of_a_request_or_answer_is_printed_unasked(rows: Rows) -> None:
    """Prompts, answers and the provider's messages appear only with --answer, in tables and in JSON."""
    rows.fail(rows.ask("bad"), custom_id="bad", value=chat("bad"))
    rows.succeed(rows.ask("good"), custom_id="good")
    for custom_id in ("bad", "good"):
        for form in ("--json", "--table"):
            ran = rows.run("show", custom_id, form)
            assert ran.code == Exit.OK
            assert SECRET not in ran.out + ran.err
        assert SECRET in rows.run("show", custom_id, "--answer", "--json").out
        assert SECRET in rows.run("show", custom_id, "--answer", "--table").out


def test_our_own_words_about_a_bad_record_are_told(rows: Rows) -> None:
    """The message of a class of ours names the rule, so it is shown."""
    rows.fail(rows.ask("a"), RowClass.BAD_RECORD, "streaming", custom_id="a")
    (row,) = rows.run("show", "a").json["rows"]
    assert "message" in row["outcome"]["error"]
    assert row["why"] == WHY[RowClass.BAD_RECORD]


def test_every_class_has_its_why() -> None:
    """No end of a row is left without an explanation."""
    assert set(WHY) == set(RowClass)


# ----------------------------------------------------------------------------------------------- where it is


def test_an_open_row_waits_for_its_batch_until_ship_by(rows: Rows) -> None:
    """A row that was read and is in no lot: when its batch leaves at the latest, and when it is due."""
    rows.ask("a", hours_ago=1)
    (row,) = rows.run("show", "a").json["rows"]
    assert row["state"] == "open"
    assert row["ship_by"] == "2026-05-01T15:00:00Z"
    assert row["deadline"] == "2026-05-02T17:00:00Z"
    assert "at the latest at 2026-05-01 15:00:00Z (in 3 h)" in row["why"]
    assert "key:" + KEY.digest in rows.run("show", "a", "--table").out


def test_a_held_row_says_which_hold_and_until_when(rows: Rows) -> None:
    """Holds of its account, its key and its kind of prompt are named; an ended or a foreign one is not."""
    offset = rows.ask("a")
    value = rows.requests()[offset].value or b""
    body = value[value.index(b'"body": ') + 8 : -1]
    rows.put(Hold(account_scope("default"), "quota", NOW - timedelta(minutes=9), NOW + timedelta(minutes=1)))
    rows.put(Hold(key_scope(KEY), "operator: wait", NOW - timedelta(minutes=8), None, 1, KEY.label))
    rows.put(Hold(shape_scope(fingerprint(body, KEY.model)), "canary", NOW - timedelta(minutes=7), None))
    rows.put(Hold(account_scope("default"), "billing", NOW - timedelta(hours=2), NOW - timedelta(hours=1)))
    rows.put(Hold(account_scope("other"), "quota", NOW, None))
    (row,) = rows.run("show", "a").json["rows"]
    assert sorted(one["reason"] for one in row["holds"]) == ["canary", "operator: wait", "quota"]
    assert "account:default is held for 'quota'" in row["why"]
    assert "until 2026-05-01 12:01:00Z" in row["why"]
    assert "until an operator releases it" in row["why"]


def test_the_ledger_says_where_a_row_is(rows: Rows) -> None:
    """Waiting for its next batch, on its way, at the provider, in a wave: by the lot that holds it."""
    for name in ("waiting", "way", "provider", "wave"):
        rows.ask(name)
    attempts = {"transient": {1: OffsetSet([0])}}
    rows.book(
        lot(0, state=LotState.DONE),
        lot(0, batch_id=BATCH[:-1] + "4", state=LotState.WAITING, submission=2, provider=None, attempts=attempts,
            not_before=NOW + timedelta(minutes=2)),
        lot(1, batch_id=BATCH[:-1] + "5", state=LotState.SUBMITTING, provider=None),
        lot(2, batch_id=BATCH[:-1] + "6"),
        lot(3, batch_id=WAVE[:-1] + "7", state=LotState.SUBMITTING, lane=Lane.SYNC, provider=None),
    )  # fmt: skip
    told = {name: rows.run("show", name).json["rows"][0] for name in ("waiting", "way", "provider", "wave")}
    assert told["waiting"]["state"] == "waiting"
    assert "as submission 2" in told["waiting"]["now"]
    assert "not before 2026-05-01 12:02:00Z; it has ended before: 1 transient" in told["waiting"]["why"]
    assert told["way"]["state"] == "on its way"
    assert told["provider"]["state"] == "at provider"
    assert "at the provider as batch_abc since 2026-05-01 11:15:00Z" in told["provider"]["now"]
    assert f"in wave {WAVE[:-1]}7" in told["wave"]["now"]
    steps = [step["event"] for step in told["waiting"]["history"]]
    assert steps == ["began to wait", "in a batch"]


def test_rows_that_are_not_there_are_told_apart(rows: Rows) -> None:
    """Beyond the end, deleted unanswered, and settled with its outcome gone: three different stories, by place."""
    for number in range(3):
        rows.ask(f"c{number}")
    rows.cluster.delete_records("requests", 0, 1)
    rows.settle(0)
    assert rows.run("show", "0:0").json["rows"][0]["state"] == "gone"
    assert rows.run("show", "0:9").json["rows"][0]["state"] == "absent"
    rows.settle(2)
    (row,) = rows.run("show", "requests-0@1").json["rows"]
    assert (row["state"], row["custom_id"]) == ("settled", "c1")
    assert "no output topic has its outcome" in row["now"]


def test_a_split_row_names_its_parts(rows: Rows) -> None:
    """A parent's end is the split, and where its parts are."""
    offset = rows.ask("a")
    rows.succeed(offset, custom_id="a")
    value = rows.cluster.committed_records("results", 0)[0].value or b""
    from batchferry.ports import OutRecord  # noqa: PLC0415

    rows.cluster.recreate_topic("results", 2)
    split = value.replace(b'"status":"succeeded"', b'"status":"split","parts":3')
    rows.cluster.append([OutRecord("results", b"k", split, (), 0)])
    (row,) = rows.run("show", "a").json["rows"]
    assert row["now"].startswith("split into 3 parts")
    assert "a#part1" in row["why"]


# ------------------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize("custom_id", ["plain", 'qu"ote\\', "Grüße/你好 🦜", "\u2028\x00\n", "*", "7:7"])
@pytest.mark.parametrize("settled", [True, False])
def test_any_custom_id_is_found(rows: Rows, custom_id: str, settled: bool) -> None:
    """Whatever characters it has, and however the producer's JSON escaped them."""
    offset = rows.ask("other", partition=1)
    offset = rows.ask(custom_id, partition=1)
    if settled:
        rows.succeed(offset, partition=1, custom_id=custom_id)
    (row,) = rows.run("show", "--custom-id", custom_id).json["rows"]
    assert (row["custom_id"], row["source"]["offset"]) == (custom_id, offset)
    assert row["state"] == ("settled" if settled else "open")


def test_an_escaped_plain_character_does_not_hide_a_row(rows: Rows) -> None:
    """A producer may write any character as an escape; the row is found all the same."""
    rows.ask("", value=chat("a/b").replace(b"a/b", b"\\u0061\\/b"))
    assert rows.run("show", "a/b").json["rows"][0]["custom_id"] == "a/b"


def test_a_word_in_a_prompt_is_no_custom_id(rows: Rows) -> None:
    """Text that stands elsewhere in a record or an answer does not count."""
    rows.ask("x", value=chat("x", user="needle"))
    rows.succeed(rows.ask("y"), custom_id="y", wire_id="needle")
    ran = rows.run("show", "needle")
    assert ran.code == Exit.FAILED
    assert "no record or outcome has it" in ran.err


def test_rows_of_one_custom_id_are_all_told_up_to_a_bound(rows: Rows) -> None:
    """A custom_id may come again: settled and open ones are told together, and the rest is counted."""
    for _ in range(MAX_ROWS + 3):
        rows.ask("same")
    for offset in range(MAX_ROWS + 1):
        rows.succeed(offset, custom_id="same")
    shown = rows.run("show", "same").json
    assert (len(shown["rows"]), shown["more_rows"]) == (MAX_ROWS, 3)
    assert "and 3 more rows have this custom_id" in rows.run("show", "same", "--table").out


def test_a_batch_is_still_shown_as_a_batch(rows: Rows) -> None:
    """By our id, six characters of it, or the provider's; a shorter text is taken for a custom_id."""
    rows.ask("01J")
    rows.book(lot(5))
    for named in (BATCH, BATCH[:6].lower(), "batch_abc"):
        assert rows.run("show", named).json["batch_id"] == BATCH
    assert rows.run("show", "01J").json["rows"][0]["custom_id"] == "01J"
    rows.book(lot(6, batch_id=WAVE))
    ran = rows.run("show", BATCH[:8])
    assert ran.code == Exit.USAGE
    assert WAVE in ran.err


def test_a_partition_that_is_not_there_is_refused(rows: Rows) -> None:
    """A place outside the topic is told with its partitions."""
    ran = rows.run("show", "9:1")
    assert ran.code == Exit.USAGE
    assert "partitions 0 to 1" in ran.err


def test_places_are_read_in_two_spellings() -> None:
    """``PARTITION:OFFSET``, or as messages name a record; another topic's is none."""
    assert parse_place("3:17", "requests") == Place(3, 17)
    assert parse_place("requests-3@17", "requests") == Place(3, 17)
    assert parse_place("other-3@17", "requests") is None
    assert parse_place("3:", "requests") is None
    assert parse_place("a:1", "requests") is None


def test_an_event_is_one_safe_line() -> None:
    """Counts and names of an event on one line, whatever characters it brings."""
    text = event_text({"batch": {"batch_id": "B"}, "rows": 12345, "classes": {"expired": 2}, "reason": "a\nb\x1b"})
    assert text == "batch B, reason a\\u000ab\\u001b, rows 12,345, classes 2 expired"
