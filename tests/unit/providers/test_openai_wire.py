import contextlib
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.provider import LineError, ProviderStatus, RequestCounts, Usage
from batchferry.providers.openai import wire
from batchferry.providers.shapes import NotOurShape, body_error, error_facts, read_instant, read_json

FULL = {
    "id": "batch_01",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "errors": None,
    "input_file_id": "file-in01",
    "completion_window": "24h",
    "status": "completed",
    "output_file_id": "file-out01",
    "error_file_id": "file-err01",
    "created_at": 1790000000,
    "expires_at": 1790086400,
    "completed_at": 1790000903,
    "failed_at": None,
    "request_counts": {"total": 3, "completed": 2, "failed": 1},
    "metadata": {"job": "j-1"},
}


def test_a_whole_batch_object():
    """Every member that we keep arrives in its own type."""
    batch = wire.read_batch(FULL)
    assert (batch.provider_batch_id, batch.status, batch.raw_status) == (
        "batch_01",
        ProviderStatus.COMPLETED,
        "completed",
    )
    assert (batch.input_file_id, batch.output_file_id, batch.error_file_id) == ("file-in01", "file-out01", "file-err01")
    assert batch.counts == RequestCounts(3, 2, 1)
    assert batch.created_at == datetime.fromtimestamp(1790000000, UTC)
    assert batch.ended_at == datetime.fromtimestamp(1790000903, UTC)
    assert batch.metadata == {"job": "j-1"}
    assert batch.errors == ()


@pytest.mark.parametrize("nothing", [None, "", False, 0, {}, []])
def test_an_id_that_says_nothing_is_no_id(nothing):
    """Null, an empty text and other falsy values never become a file to fetch."""
    batch = wire.read_batch(FULL | dict.fromkeys(("input_file_id", "output_file_id", "error_file_id"), nothing))
    assert (batch.input_file_id, batch.output_file_id, batch.error_file_id) == (None, None, None)


def test_members_may_be_missing():
    """A batch needs an id and a status, nothing else."""
    batch = wire.read_batch({"id": "0b9e0c7e-f6a3-4d5b-a1c5-54a31ad2e6d0", "status": "dreaming"})
    assert batch.status is ProviderStatus.UNKNOWN
    assert batch.raw_status == "dreaming"
    assert batch.counts == RequestCounts()
    assert batch.metadata == {}
    assert batch.ended_at is None


@pytest.mark.parametrize("body", [None, [], "x", {}, {"id": "", "status": "completed"}, {"id": "b", "status": None}])
def test_what_is_no_batch_is_refused(body):
    """Without an id or a status there is nothing to hold on to."""
    with pytest.raises(NotOurShape):
        wire.read_batch(body)


@pytest.mark.parametrize(
    ("counts", "read"),
    [
        (None, RequestCounts()),
        ({"total": None, "completed": 1}, RequestCounts(0, 1, 0)),
        ({"total": "7", "completed": 2.0, "failed": -1}, RequestCounts(7, 2, 0)),
        ({"total": "many"}, RequestCounts()),
        ([], RequestCounts()),
    ],
)
def test_counts_are_taken_as_they_come(counts, read):
    """Missing, null and odd counters are zero; they only inform."""
    assert wire.read_batch(FULL | {"request_counts": counts}).counts == read


@pytest.mark.parametrize(
    ("errors", "read"),
    [
        (None, ()),
        ({"object": "list", "data": None}, ()),
        (
            {"data": [{"code": "invalid_json_line", "line": 5, "message": "m", "param": None}]},
            (LineError("invalid_json_line", "m", None, 5),),
        ),
        ([{"code": None, "line": None, "message": None, "param": None}], (LineError(""),)),
        (
            {"data": [{"code": "c", "line": "3", "param": "url"}, 7, "text"]},
            (LineError("c", "", "url", 3), LineError("", "text")),
        ),
        ("whole text", (LineError("", "whole text"),)),
        ({"data": [{"code": "a sentence, with the prompt: hello"}]}, (LineError(""),)),
    ],
)
def test_error_lists_in_every_shape(errors, read):
    """An object, a bare list or a text; null members; and a code that is a sentence is not kept as a code."""
    assert wire.read_batch(FULL | {"errors": errors}).errors == read


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (1790000000, datetime.fromtimestamp(1790000000, UTC)),
        (1790000000.5, datetime.fromtimestamp(1790000000.5, UTC)),
        (1790000000000, datetime.fromtimestamp(1790000000, UTC)),
        ("1790000000", datetime.fromtimestamp(1790000000, UTC)),
        ("2026-09-21T14:13:20Z", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        ("2026-09-21T16:13:20+02:00", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        ("2026-09-21T14:13:20", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        (0, None),
        (-5, None),
        ("", None),
        ("soon", None),
        (None, None),
        (True, None),
        (float("inf"), None),
        (1e300, None),
        ([], None),
    ],
)
def test_instants_in_every_form(value, read):
    """Epochs in seconds or milliseconds and ISO texts become aware UTC; nonsense becomes nothing."""
    assert read_instant(value) == read


def test_the_end_is_the_end_of_that_status():
    """Some servers set completed_at on a failed batch; its own member goes first, any other helps out."""
    both = FULL | {"status": "failed", "failed_at": 1790000001, "completed_at": 1790000009}
    assert wire.read_batch(both).ended_at == datetime.fromtimestamp(1790000001, UTC)
    assert wire.read_batch(both | {"failed_at": None}).ended_at == datetime.fromtimestamp(1790000009, UTC)
    assert wire.read_batch(both | {"status": "in_progress"}).ended_at is None


@pytest.mark.parametrize(
    ("members", "status"),
    [
        ({}, ProviderStatus.EXPIRED),
        ({"request_counts": {"total": 3, "completed": 0, "failed": 3}}, ProviderStatus.FAILED),
        ({"request_counts": None}, ProviderStatus.FAILED),
        ({"output_file_id": ""}, ProviderStatus.FAILED),
    ],
)
def test_a_failed_batch_with_answers_has_only_ended_early(members, status):
    """Rows that the server counts as completed are paid for: their file is read before anything goes again."""
    read = wire.read_batch(FULL | {"status": "FAILED"} | members)
    assert (read.status, read.raw_status) == (status, "FAILED")


def test_the_batchs_own_usage_tells_what_was_written_to_the_cache():
    """Written tokens are a part of the input, and never more than what is left of it beside the cached ones."""
    details = {"cached_tokens": 30, "cache_write_tokens": 20}
    usage = {"input_tokens": 100, "output_tokens": 5, "input_tokens_details": details}
    assert wire.read_batch(FULL | {"usage": usage}).usage == Usage(100, 5, 30, 20)
    assert wire.read_batch(FULL | {"usage": usage | {"input_tokens": 40}}).usage == Usage(40, 5, 30, 10)


def test_metadata_values_become_texts():
    """Metadata is texts to texts, whatever a server makes of it."""
    assert wire.read_batch(FULL | {"metadata": {"a": 1, "b": None, "c": "x"}}).metadata == {"a": "1", "b": "", "c": "x"}
    assert wire.read_batch(FULL | {"metadata": None}).metadata == {}


def page(ids, **members):
    """A list page of batches."""
    return {"object": "list", "data": [{"id": each, "status": "completed"} for each in ids], **members}


@pytest.mark.parametrize(
    ("body", "cursor", "following"),
    [
        (page(["b2", "b1"], has_more=False, last_id="b1"), None, None),
        (page(["b2", "b1"], has_more=True, last_id="b1"), None, "b1"),
        (page(["b2", "b1"], has_more=True), None, "b1"),
        (page([], has_more=True), "b1", None),
        # `after` ignored: the same page, or a page that holds the cursor
        (page(["b2", "b1"], has_more=True, last_id="b1"), "b1", None),
        (page(["b3", "b2", "b1", "b0"], has_more=True, last_id="b0"), "b1", None),
        # has_more left out: a full page has a next one, a short page has none
        (page(["b2", "b1"]), None, "b1"),
        (page(["b2"]), None, None),
    ],
)
def test_paging_ends(body, cursor, following):
    """A list ends with has_more, on an empty page, and whenever the cursor does not move."""
    assert wire.read_batch_page(body, cursor, page_size=2).next_cursor == following


@pytest.mark.parametrize(
    ("instants", "is_trusted"),
    [
        ([], True),
        ([None, None], True),
        ([9_000, 5_000, 5_000, 1_000], True),
        ([9_000, None, 5_000, 5_001, 1_000], True),  # servers that disagree on the time
        ([9_000, 5_000, 5_299, 1_000], True),
        ([9_000, 9_001], True),
        ([9_000, 5_000, 5_301, 1_000], False),
        ([1_000, 5_000, 9_000], False),
        ([1_000, 1_002], False),
        ([5_000, 9_000, 1_000], False),
    ],
)
def test_a_list_of_another_order_ends_no_search(instants, is_trusted):
    """Whoever stops where a list gets old must not stop in one that is not newest first: its instants are left out."""
    entries = [FULL | {"id": f"b{number}", "created_at": at} for number, at in enumerate(instants)]
    page = wire.read_batch_page({"data": entries, "has_more": True}, None, 100)
    told = [one.created_at for one in page.batches]
    assert [one.provider_batch_id for one in page.batches] == [entry["id"] for entry in entries]
    assert told == [datetime.fromtimestamp(at, UTC) if is_trusted and at else None for at in instants]


def test_an_entry_without_an_id_does_not_hide_the_others():
    """One odd entry of a list is left out, the rest is read."""
    body = {"data": [{"status": "completed"}, None, {"id": "b1", "status": "completed"}], "has_more": False}
    assert [b.provider_batch_id for b in wire.read_batch_page(body, None, 100).batches] == ["b1"]
    with pytest.raises(NotOurShape):
        wire.read_batch_page({"error": "x"}, None, 100)


@pytest.mark.parametrize(
    ("body", "is_error"),
    [
        ({"error": {"message": "m"}}, True),
        ({"detail": "no such file"}, True),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, True),
        ({"object": "error", "message": "m", "code": 400}, True),
        ({"error": {}}, False),
        ({"error": "text"}, False),
        ({"message": "Too many requests"}, False),
        ("<html>", False),
        (None, False),
    ],
)
def test_whose_error_body_it_is(body, is_error):
    """Only shapes that providers use count as their own; a gateway's do not."""
    assert (body_error(body) is not None) is is_error


def test_a_numeric_code_is_a_status():
    """Servers built on vLLM write the HTTP status where others have a code."""
    facts = error_facts({"object": "error", "message": "m", "type": "BadRequestError", "code": 400})
    assert (facts.code, facts.http_status, facts.type) == (None, 400, "BadRequestError")


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("[server_error] http://10.0.0.1:8000: HTTP 503", 503),
        ("upstream said status=429 after 3 tries", 429),
        ("status code: 400", 400),
        ("I have 500 tokens", None),
        ("HTTP 777", None),
    ],
)
def test_a_status_in_a_text_is_found(message, status):
    """A server that has no other place for the status writes it into the message."""
    assert error_facts({"code": "inference_failed", "message": message}).http_status == status


@pytest.mark.parametrize("broken", [b"", b"<html>", b"\xff", b'{"a":', b"[" * 100_000])
def test_not_json(broken):
    """Whatever is not JSON is refused with one exception."""
    with pytest.raises(NotOurShape):
        read_json(broken)


MEMBERS = st.sampled_from(
    ["id", "status", "errors", "data", "request_counts", "created_at", "metadata", "line", "code", "error", "detail"]
)
SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=5),
        max_leaves=8,
    )
)
def test_no_answer_breaks_the_reader(value):
    """Any JSON value is either a batch or refused; nothing else happens."""
    with contextlib.suppress(NotOurShape):
        wire.read_batch(value)
    body_error(value)
    error_facts(value)


def test_a_request_line_is_one_line_of_json():
    """Head and rendered line together are a JSON object with the body inside as it was."""
    body = b'{"model":"m","n":1e400,"big":123456789012345678901234567890}'
    line = wire.request_head("0123456789-3-17-1") + wire.request_line("/v1/chat/completions", body)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    read = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    assert bytes(read["body"]) == body
    assert [bytes(read[name]) for name in ("custom_id", "method", "url")] == [
        b'"0123456789-3-17-1"',
        b'"POST"',
        b'"/v1/chat/completions"',
    ]


@pytest.mark.parametrize("break_", [b"\n", b"\r"])
def test_a_line_break_in_a_body_is_refused(break_):
    """A raw line break would make two lines of one request."""
    with pytest.raises(ValueError, match="line break"):
        wire.request_line("/v1/embeddings", b'{"a":' + break_ + b"1}")
