"""Mistral's payload shapes: jobs, files, pages and request lines, whole and with members missing."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_kit import FILE, job
from mistralai.client.models import BatchJob

from batchferry.domain.provider import FileRole, LineError, ProviderStatus, RequestCounts
from batchferry.providers.mistral import wire
from batchferry.providers.shapes import NotOurShape

FULL = job(
    status="TIMEOUT_EXCEEDED",
    output_file="out-1",
    error_file="err-1",
    metadata={"a": "b"},
    started_at=1_790_000_005,
    completed_at=1_790_000_009,
    errors=[{"message": "Invalid model: x", "count": 3}],
)


def test_a_job_is_read_whole():
    """Every member that tells something has its place; the official client takes the same object."""
    BatchJob.model_validate(FULL)
    read = wire.read_job(FULL)
    assert (read.provider_batch_id, read.raw_status, read.status) == (
        "job-1",
        "TIMEOUT_EXCEEDED",
        ProviderStatus.EXPIRED,
    )
    assert (read.input_file_id, read.output_file_id, read.error_file_id) == (FILE, "out-1", "err-1")
    assert read.counts == RequestCounts(3, 1, 1)
    assert read.errors == (LineError("invalid_model", "Invalid model: x"),)
    assert read.created_at == datetime.fromtimestamp(1_790_000_000, UTC)
    assert read.ended_at == datetime.fromtimestamp(1_790_000_009, UTC)
    assert (read.expires_at, read.usage, read.metadata) == (None, None, {"a": "b"})


def test_a_failed_job_with_answers_has_only_ended_early():
    """Rows that succeeded in a failed job are paid for, so its file is read; without a file or answers nothing ran."""
    assert wire.read_job(FULL | {"status": "FAILED"}).status is ProviderStatus.EXPIRED
    assert wire.read_job(FULL | {"status": "FAILED", "output_file": None}).status is ProviderStatus.FAILED
    assert wire.read_job(FULL | {"status": "FAILED", "succeeded_requests": 0}).status is ProviderStatus.FAILED


def test_a_list_of_another_order_ends_no_search():
    """A server that ignores the wish for the newest first shows jobs without their instants."""
    old, new = job(id="j-1", created_at=1_700_000_000), job(id="j-2", created_at=1_790_000_000)
    told = [
        [one.created_at is not None for one in wire.read_job_page({"data": jobs, "total": 9}, 0, 2).batches]
        for jobs in ([new, old], [old, new])
    ]
    assert told == [[True, True], [False, False]]


def test_a_job_under_way_has_no_end():
    """``completed_at`` counts only where the status is an end."""
    assert wire.read_job(FULL | {"status": "RUNNING"}).ended_at is None
    assert wire.read_job(FULL | {"status": "PAUSED"}).ended_at is None


@pytest.mark.parametrize("nothing", [None, "", []])
def test_members_may_be_missing(nothing):
    """Files that are null, empty or absent are None, and a job of nothing but id and status is one."""
    read = wire.read_job(FULL | dict.fromkeys(("input_files", "output_file", "error_file", "errors"), nothing))
    assert (read.input_file_id, read.output_file_id, read.error_file_id, read.errors) == (None, None, None, ())
    assert wire.read_job({"id": 7, "status": "scheduling"}).status is ProviderStatus.UNKNOWN


@pytest.mark.parametrize("body", [None, [], "x", {}, {"id": "j"}, {"status": "QUEUED"}, {"id": "", "status": "QUEUED"}])
def test_no_job_without_id_and_status(body):
    """Anything else is not the object that was asked for."""
    with pytest.raises(NotOurShape):
        wire.read_job(body)


@pytest.mark.parametrize(
    ("counts", "read"),
    [
        ({"total_requests": 5, "completed_requests": 4, "succeeded_requests": None, "failed_requests": 1}, (5, 3, 1)),
        ({"total_requests": "5", "succeeded_requests": "3", "failed_requests": None}, (5, 3, 0)),
        ({"total_requests": -1, "completed_requests": 0, "succeeded_requests": 0, "failed_requests": 2}, (0, 0, 2)),
    ],
)
def test_counters_lie_flat(counts, read):
    """Successes are told, or what is left of the ends without the failures."""
    assert wire.read_job({"id": "j", "status": "RUNNING", **counts}).counts == RequestCounts(*read)


@pytest.mark.parametrize(
    ("errors", "read"),
    [
        ([{"message": "m", "count": 2}], (LineError("", "m"),)),
        (["Unauthorized"], (LineError("unauthorized", "Unauthorized"),)),
        ([{"message": "m", "type": "invalid_model"}], (LineError("invalid_model", "m"),)),
        ([{"message": "m", "code": "not a word"}], (LineError("", "m"),)),
        ([{}, None, 3], ()),
        ({"message": "m"}, ()),
    ],
)
def test_the_error_list(errors, read):
    """Entries have a message and a count; a code is taken where one is, and ours where the message is known."""
    assert wire.read_job({"id": "j", "status": "FAILED", "errors": errors}).errors == read


@pytest.mark.parametrize(
    ("body", "page", "following"),
    [
        ({"data": [job()], "total": 3}, 0, "1"),
        ({"data": [job()], "total": 3}, 1, "2"),
        ({"data": [job()], "total": 3}, 2, None),
        ({"data": [], "total": 3}, 1, None),
        ({"total": 0}, 0, None),
        ({"data": [job()]}, 4, "5"),
        ({"data": [job(), "x"], "total": 1}, 0, None),
        ({"data": [job()]}, wire.MAX_PAGES - 1, None),
    ],
)
def test_pages_of_jobs(body, page, following):
    """The next page is told by the total, without one by a full page, and there is a last one in any case."""
    got = wire.read_job_page(body, page, page_size=1)
    assert got.next_cursor == following
    assert [one.provider_batch_id for one in got.batches] == ["job-1"] * ("data" in body and bool(body["data"]))


@pytest.mark.parametrize("body", [{"data": {}}, {"total": 3}, [], "x", {"error": "x"}])
def test_no_page_without_a_list(body):
    """Only an empty list may be absent."""
    with pytest.raises(NotOurShape):
        wire.read_job_page(body, 0, 100)


@pytest.mark.parametrize(
    ("role", "ids"), [(FileRole.INPUT, ["in", "untold"]), (FileRole.OUTPUT, ["out", "err", "untold"])]
)
def test_files_are_told_apart_by_their_kind(role, ids):
    """Files of another kind are left out, for servers that ignore the wish for one."""
    kinds = {"in": "batch_request", "out": "batch_result", "err": "batch_error", "tune": "instruct", "untold": None}
    data = [
        {
            "id": name,
            "purpose": "batch",
            "sample_type": kind,
            "bytes": 4,
            "created_at": 1_790_000_000,
            "filename": "a.jsonl",
        }
        for name, kind in kinds.items()
    ]
    page = wire.read_file_page({"data": [*data, {}], "total": 6}, 0, 100, role)
    assert [file.file_id for file in page.files] == ids
    assert (page.files[0].name, page.files[0].size_bytes, page.next_cursor) == ("a.jsonl", 4, None)


@pytest.mark.parametrize(("cursor", "page"), [(None, 0), ("0", 0), ("17", 17)])
def test_cursors_are_page_numbers(cursor, page):
    """A list begins at page 0."""
    assert wire.page_of(cursor) == page


@pytest.mark.parametrize("cursor", ["", "-1", "batch_1", "1.5", "\u0663"])
def test_another_cursor_is_a_bug(cursor):
    """What no page could have given is not asked for."""
    with pytest.raises(ValueError, match="page number"):
        wire.page_of(cursor)


MEMBERS = st.sampled_from(
    ["id", "status", "errors", "data", "total", "input_files", "created_at", "metadata", "message", "output_file"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON)
def test_any_json_is_read_or_refused(value):
    """No answer of a server makes the readers stumble."""
    for read in (
        wire.read_job,
        wire.read_file,
        lambda body: wire.read_job_page(body, 0, 10),
        lambda body: wire.read_file_page(body, 0, 10, FileRole.INPUT),
    ):
        with contextlib.suppress(NotOurShape):
            read(value)


@pytest.mark.parametrize("body", [b'{"model":"m","x": 1.0e2}', '{"a":"\u2028 é"}'.encode()])
def test_a_request_line_has_the_body_as_it_came(body):
    """A line is a custom_id and a body, byte for byte, with neither method nor address."""
    line = wire.request_head("0123456789-3-17-1") + wire.request_line(body)
    assert body in line
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    read = msgspec.json.decode(line)
    assert read == {"custom_id": "0123456789-3-17-1", "body": json.loads(body)}


@pytest.mark.parametrize("break_", [b"\n", b"\r"])
def test_a_raw_line_break_is_refused(break_):
    """It would make two lines of one."""
    with pytest.raises(ValueError, match="line break"):
        wire.request_line(b'{"a":' + break_ + b"1}")
