"""``batchferry replay``: what goes back, what does not, and that nothing goes back twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rows_kit import NOW, SECRET, Rows, chat, make_rows  # noqa: F401 - make_rows is a fixture

from batchferry import app
from batchferry.cli.exits import Exit
from batchferry.cli.replay import (
    PERMANENT,
    REPLAY_NUMBER,
    REPLAY_OF,
    CannotChange,
    Change,
    Choice,
    changed,
    merge_patch,
    replay_failures,
    replayed_place,
)
from batchferry.config import load_settings
from batchferry.domain.errors import PartitionLost
from batchferry.domain.requests import parse_request
from batchferry.domain.rows import RowClass
from batchferry.ports import OutRecord


def _headers(record: Any) -> dict[str, bytes | None]:
    return dict(record.headers)


# ------------------------------------------------------------------------------------------- what is sent


def test_nothing_is_sent_without_yes(rows: Rows) -> None:
    """A dry run tells what would go back, its new deadline and cost, and leaves the input as it was."""
    rows.fail(rows.ask("a"), custom_id="a")
    ran = rows.run("replay")
    assert ran.code == Exit.OK
    assert (ran.json["dry_run"], ran.json["chosen"], ran.json["sent"]) == (True, 1, 0)
    assert ran.json["new_deadline"] == "now + 30 h (SLA of the route)"
    assert ran.json["deadlines"]["first"] == "2026-05-02T18:00:00Z"
    assert float(ran.json["estimated_usd"]) > 0
    assert len(rows.requests()) == 1
    assert SECRET not in ran.out + ran.err
    table = rows.run("replay", "--table")
    assert "would be sent" in table.out
    assert "nothing was sent; --yes sends" in table.out


def test_a_replayed_record_keeps_what_is_the_callers(rows: Rows) -> None:
    """Value, key, partition and headers stay; the mark is added, the old promise goes, and the time is now."""
    value = b'{ "custom_id": "\\u0061",\t"body":{"model":"gpt-4o-mini","messages":[1.50, 1e5]} }'
    given_headers = [("tenant", b"x"), ("SLA", b"PT40H"), ("tenant", None), ("slice", b"s")]
    rows.ask("other", partition=1)
    offset = rows.ask("a", partition=1, headers=given_headers, value=value, key=b"key")
    rows.fail(offset, partition=1, custom_id="a", value=value)
    assert rows.run("replay", "--yes").json["sent"] == 1
    made = rows.requests(1)[-1]
    assert (made.value, made.key, made.partition) == (value, b"key", 1)
    assert made.timestamp == round(NOW.timestamp() * 1000)
    assert list(made.headers) == [
        ("tenant", b"x"),
        ("tenant", None),
        ("slice", b"s"),
        (REPLAY_OF, b"requests-1@1"),
        (REPLAY_NUMBER, b"1"),
    ]
    assert rows.requests(0) == []


def test_a_new_promise_is_one_the_service_understands(rows: Rows) -> None:
    """--sla takes the place of the caller's promise, in a header that the input rules accept."""
    rows.fail(rows.ask("a", headers=[("deadline", b"2026-05-01T13:00:00Z")]), custom_id="a")
    ran = rows.run("replay", "--yes", "--sla", "26h 30m")
    assert ran.json["deadlines"]["last"] == "2026-05-02T14:30:00Z"
    made = rows.requests()[-1]
    request = parse_request(made.value, made.headers)
    assert (request.sla_s, request.deadline) == (95_400, None)  # type: ignore[union-attr]
    assert rows.run("replay", "--sla", "100d").code == Exit.USAGE
    assert rows.run("replay", "--sla", "soon").code == Exit.USAGE


# --------------------------------------------------------------------------------------------- never twice


def test_a_repeated_command_sends_nothing_again(rows: Rows) -> None:
    """What an earlier run sent is found by its mark, whatever the filters were; new failures still go."""
    for number in range(3):
        rows.fail(rows.ask(f"c{number}"), custom_id=f"c{number}")
    first = rows.run("replay", "--yes", "--limit", 2)
    assert (first.json["sent"], first.json["beyond_limit"]) == (2, 1)
    second = rows.run("replay", "--yes", "--class", "transient")
    assert (second.json["sent"], second.json["replayed_before"]) == (1, 2)
    assert rows.run("replay", "--yes").json["sent"] == 0
    sent = [_headers(record).get(REPLAY_OF) for record in rows.requests()]
    assert sent == [None] * 3 + [b"requests-0@0", b"requests-0@1", b"requests-0@2"]


def test_what_fails_again_is_a_failure_of_its_own_and_the_count_is_bounded(rows: Rows) -> None:
    """Each replay counts on in its header; at --max-replays the record is refused, by name."""
    offset = rows.ask("a")
    for number in (1, 2):
        rows.fail(offset, custom_id="a")
        assert rows.run("replay", "--yes", "--max-replays", 2).json["sent"] == 1
        made = rows.requests()[-1]
        assert _headers(made)[REPLAY_OF] == b"requests-0@%d" % offset
        assert _headers(made)[REPLAY_NUMBER] == b"%d" % number
        offset = made.offset
    rows.fail(offset, custom_id="a")
    ran = rows.run("replay", "--yes", "--max-replays", 2)
    assert ran.code == Exit.LINES_REFUSED
    assert (ran.json["sent"], ran.json["refused"]) == (0, 1)
    assert "it was replayed 2 times, the limit is 2" in ran.err


class _Crowded:
    """A port on which another whole run takes place just before this one's first call of a kind."""

    def __init__(self, rows: Rows, call: str) -> None:
        self._rows = rows
        self._kafka = rows.kafka()
        self._call = call
        self.other: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kafka, name)

    def partition_producer(self, *named: Any) -> Any:
        producer = self._kafka.partition_producer(*named)
        real = getattr(producer, self._call)

        async def crowded(*arguments: Any) -> None:
            if self.other is None:
                self.other = await _replay(self._rows, self._rows.kafka())
            await real(*arguments)

        setattr(producer, self._call, crowded)
        return producer


async def _replay(rows: Rows, kafka: Any) -> Any:
    settings = load_settings(rows.config, None, {})
    clock = app.build_clock(settings)
    return await replay_failures(kafka, settings, clock, Choice(), Change(), sla_s=None, send=True)


def test_of_two_runs_at_one_time_only_the_later_writes(rows: Rows) -> None:
    """A run that begins later fences the first, sends everything, and the first writes nothing and says so."""
    for number in range(3):
        rows.fail(rows.ask(f"c{number}"), custom_id=f"c{number}")
    port = _Crowded(rows, "transact")
    report, stopped = asyncio.run(_replay(rows, port))
    other, other_stopped = port.other
    assert (report.sent, other.sent, other_stopped) == (0, 3, None)
    assert stopped is not None
    assert "another replay has begun" in stopped
    assert len(rows.requests()) == 6


def test_what_an_earlier_run_sends_until_it_is_fenced_is_seen(rows: Rows) -> None:
    """The marks are read after the fence, so that nothing an earlier run wrote before it can be missed."""
    for number in range(3):
        rows.fail(rows.ask(f"c{number}"), custom_id=f"c{number}")
    port = _Crowded(rows, "init")
    report, stopped = asyncio.run(_replay(rows, port))
    other, _ = port.other
    assert (other.sent, report.sent, report.replayed_before, stopped) == (3, 0, 3, None)


def test_a_run_that_dies_half_way_is_gone_on_with(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a transaction that was lost, a repetition sends exactly what was missing; the broken run leaves with 1."""
    monkeypatch.setattr("batchferry.cli.replay.TRANSACTION_RECORDS", 2)
    for number in range(5):
        rows.fail(rows.ask(f"c{number}"), custom_id=f"c{number}")
    kafka = rows.kafka()
    made = kafka.partition_producer
    calls = 0

    def fragile(*named: Any) -> Any:
        producer = made(*named)
        transact = producer.transact

        async def once(records: Any, committed_offset: int | None = None) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise PartitionLost(0, "planted")
            await transact(records, committed_offset)

        producer.transact = once
        return producer

    kafka.partition_producer = fragile  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setattr(app, "build_kafka", lambda _settings: kafka)
        broken = rows.run("replay", "--yes")
    assert broken.code == Exit.FAILED
    assert broken.json["sent"] == 2
    assert "goes on from there" in broken.err
    assert rows.run("replay", "--yes").json["sent"] == 3
    marks = [_headers(record).get(REPLAY_OF) for record in rows.requests()[5:]]
    assert sorted(marks) == [b"requests-0@%d" % offset for offset in range(5)]  # type: ignore[type-var]


# ------------------------------------------------------------------------------------------------ choosing


def test_filters_choose_and_the_oldest_go_first(rows: Rows) -> None:
    """Class, code, custom_id and time narrow the choice; a limit takes those that failed first."""
    for number, (row_class, code, hours_ago) in enumerate(
        [(RowClass.TRANSIENT, "overloaded", 3), (RowClass.EXPIRED, "expired", 9), (RowClass.TRANSIENT, "timeout", 5)]
    ):
        rows.fail(rows.ask(f"c{number}"), row_class, code, custom_id=f"c{number}", hours_ago=hours_ago)

    def chosen(*flags: object) -> list[str]:
        return [one["custom_id"] for one in rows.run("replay", *flags).json["first"]]

    assert chosen("--class", "transient") == ["c0", "c2"]
    assert chosen("--class", "transient", "--class", "expired") == ["c0", "c1", "c2"]
    assert chosen("--code", "timeout") == ["c2"]
    assert chosen("--custom-id", "c1") == ["c1"]
    assert chosen("--since", "4h") == ["c0"]
    assert chosen("--until", "2026-05-01T08:00:00Z", "--since", "8h") == ["c2"]
    assert chosen("--limit", 1) == ["c1"]
    assert rows.run("replay", "--class", "transcient").code == Exit.USAGE
    assert rows.run("replay", "--since", "2026-05-01T08:00:00").code == Exit.USAGE


def test_results_splits_and_other_topics_are_no_failures(rows: Rows) -> None:
    """Only failed outcomes of this very input topic are looked at; what is no outcome is passed over."""
    offset = rows.ask("a")
    rows.succeed(offset)
    stranger = {
        "status": "failed",
        "source": {"topic": "other", "partition": 0, "offset": offset},
        "error": {"class": "transient"},
    }
    for value in (json.dumps(stranger).encode(), b"junk", b"null", None):
        rows.cluster.append([OutRecord("failures", b"k", value, (), 0)])
    assert rows.run("replay").json["matching"] == 0


def test_a_deleted_or_strange_source_is_refused(rows: Rows) -> None:
    """What retention has taken is counted as gone; a record that is not the one that failed is refused."""
    for number in range(3):
        rows.ask(f"c{number}")
        rows.fail(number, custom_id=f"c{number}", value=chat(f"c{number}") if number == 1 else None)
    rows.cluster.delete_records("requests", 0, 1)
    assert rows.run("replay").json["gone"] == 1
    rows.cluster.recreate_topic("requests", 2)
    for number in range(3):
        rows.ask(f"new{number}")
    ran = rows.run("replay", "--yes")
    assert (ran.json["sent"], ran.json["refused"]) == (0, 3)
    assert "made anew" in ran.err


def test_reviewed_rows_are_found_too(rows: Rows) -> None:
    """A failure on a review topic of its own is chosen like the others."""
    settings = rows.settings() | {"topics": {"review": "review"}}
    rows.config.write_text(json.dumps(settings))
    rows.cluster.create_topic("review", 2)
    rows.fail(rows.ask("a"), RowClass.CONTENT_FILTERED, "content_filter", custom_id="a", topic="review")
    assert rows.run("replay").json["permanent_left_out"] == {"content_filtered": 1}
    assert rows.run("replay", "--force", "--yes").json["sent"] == 1


# ------------------------------------------------------------------------------------ the classic mistake


def test_the_same_words_are_not_sent_to_the_same_end(rows: Rows) -> None:
    """A permanent class asked for without a change is refused with the remedy; unasked it is left out."""
    for row_class in PERMANENT:
        rows.fail(rows.ask(row_class.value), row_class, custom_id=row_class.value)
        asked = rows.run("replay", "--yes", "--class", row_class.value)
        assert asked.code == Exit.USAGE
        assert "classic mistake" in asked.err
        assert "--model or --patch" in asked.err
    unasked = rows.run("replay", "--yes")
    assert unasked.code == Exit.OK
    assert unasked.json["permanent_left_out"] == {row_class.value: 1 for row_class in PERMANENT}
    assert "--force" in unasked.err
    assert len(rows.requests()) == len(PERMANENT)
    forced = rows.run("replay", "--yes", "--class", "invalid_request", "--class", "duplicate", "--force")
    assert forced.json["sent"] == 2


def test_a_change_must_change_something(rows: Rows) -> None:
    """A permanent failure whose body the patch leaves as it is is refused; one that it changes goes."""
    rows.fail(rows.ask("same"), RowClass.TOO_LONG, custom_id="same")
    rows.fail(rows.ask("other", value=chat("other", model="gpt-4o")), RowClass.TOO_LONG, custom_id="other")
    ran = rows.run("replay", "--yes", "--model", "gpt-4o-mini")
    assert (ran.json["sent"], ran.json["refused"]) == (1, 1)
    assert "changes nothing" in ran.err
    assert json.loads(rows.requests()[-1].value or b"")["custom_id"] == "other"


def test_a_changed_record_is_held_against_the_rules_of_the_input(rows: Rows, tmp_path: Path) -> None:
    """A change that would make a bad record is refused with rule and remedy; a bad one that it mends goes."""
    rows.fail(rows.ask("a"), RowClass.INVALID_REQUEST, custom_id="a")
    path = tmp_path / "patch.json"
    path.write_text('{"stream": true}')
    ran = rows.run("replay", "--yes", "--patch", path)
    assert (ran.code, ran.json["sent"]) == (Exit.LINES_REFUSED, 0)
    assert "streaming" in ran.err
    value = b'{"custom_id":"b","body":{"messages":[]}}'
    rows.fail(rows.ask("b", value=value), RowClass.BAD_RECORD, "missing_model", custom_id="b", value=value)
    ran = rows.run("replay", "--yes", "--custom-id", "b", "--model", "gpt-4o")
    assert ran.json["sent"] == 1
    assert rows.requests()[-1].value == b'{"custom_id":"b","body":{"messages":[],"model":"gpt-4o"}}'
    blank = rows.ask("n", value=b"[]")
    rows.fail(blank, RowClass.BAD_RECORD, "not_object", custom_id=None)
    assert "no JSON object with a body" in rows.run("replay", "--yes", "--model", "m").err


@pytest.mark.parametrize("text", ["[]", "{}", "{", '"x"', '{"a": 1} x', "\x00"])
def test_a_patch_that_is_none_is_refused_before_anything_is_read(rows: Rows, tmp_path: Path, text: str) -> None:
    """A patch file must hold one JSON object that names something."""
    path = tmp_path / "patch.json"
    path.write_text(text)
    assert rows.run("replay", "--patch", path).code == Exit.USAGE
    assert rows.run("replay", "--patch", tmp_path / "none.json").code == Exit.USAGE


# ------------------------------------------------------------------------------------------------ the patch


@pytest.mark.parametrize(
    ("target", "patch", "merged"),
    [
        ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
        ('{"a":"b"}', '{"a":null}', "{}"),
        ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
        ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
        ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
        ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
        ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
        ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
    ],
)
def test_the_examples_of_the_rfc(target: str, patch: str, merged: str) -> None:
    """The object cases of RFC 7386, appendix A."""
    made = merge_patch(target.encode(), msgspec.json.decode(patch, type=dict[str, msgspec.Raw]))
    assert json.loads(made) == json.loads(merged)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_OBJECT = st.dictionaries(st.text(max_size=3), _JSON, max_size=4)


def _by_the_book(target: Any, patch: Any) -> Any:
    """The pseudo code of RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    made = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = _by_the_book(made.get(name), value)
    return made


@hypothesis_settings(max_examples=50)
@given(_OBJECT, _OBJECT)
def test_a_patch_does_what_the_rfc_says(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """For any objects the result is that of the RFC's own algorithm."""
    raw = msgspec.json.decode(json.dumps(patch), type=dict[str, msgspec.Raw])
    assert json.loads(merge_patch(json.dumps(target).encode(), raw)) == _by_the_book(target, patch)


def test_untouched_tokens_keep_their_bytes() -> None:
    """Numbers, escapes and nested values that the patch does not name are there as they were written."""
    value = (
        b'{"custom_id":"a","body":{"model":"m","temperature":1.0e-2,"seed":123456789012345678901234567890,'
        b'"messages":[{"content":"\\u00e9 \\/ \xe2\x80\xa8"}],"o":{"x":1.00,"y":2}}}'
    )
    change = Change(msgspec.json.decode(b'{"model":"n","o":{"y":3}}', type=dict[str, msgspec.Raw]))
    assert changed(value, (), change) == value.replace(b'"m"', b'"n"').replace(b'"y":2', b'"y":3')
    spaced = value.replace(b'"body":', b'"body" : ')
    assert changed(spaced, (), Change({"model": msgspec.Raw(b'"m"')})) == spaced


def test_a_cloudevent_is_changed_inside() -> None:
    """The body of a structured CloudEvent's data is changed; one in base64 cannot be."""
    headers = [("content-type", b"application/cloudevents+json")]
    change = Change({"model": msgspec.Raw(b'"n"')})
    event = b'{"specversion":"1.0","data":{"custom_id":"a","body":{"model":"m"}}}'
    assert changed(event, headers, change) == event.replace(b'"m"', b'"n"')
    with pytest.raises(CannotChange, match="CloudEvent"):
        changed(b'{"specversion":"1.0","data_base64":"e30="}', headers, change)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (b"requests-3@17", (3, 17)),
        (b"requests-b-3@17", None),
        (b"requests-x@1", None),
        (b"requests-1@", None),
        (b"\xff", None),
        (None, None),
    ],
)
def test_a_mark_is_read_strictly(value: bytes | None, place: tuple[int, int] | None) -> None:
    """Only a place on this very topic marks a replay."""
    assert replayed_place([("x", b"y"), (REPLAY_OF, value)], "requests") == place
