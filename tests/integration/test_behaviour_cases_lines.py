"""Behaviour cases B03, B04, B05 and B12 where they begin: in the bytes of a result file.

A file goes the service's own way, without a broker: downloaded in pieces of any size, cut into lines, read. What the
whole service makes of them is in ``test_behaviour_cases``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import httpx
import pytest

from batchferry.domain.ids import FileId
from batchferry.domain.provider import DownloadedFile
from batchferry.domain.rows import ResultLine, RowClass, UnreadableLine
from batchferry.engine.landing import read_lines
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from batchferry.providers.openai.lines import read_line

CHAT = "/v1/chat/completions"
WIRES = tuple(f"0123456789-0-{offset}-1" for offset in (1, 2, 3))
SEPARATORS = {
    "line separator": "\u2028", "paragraph separator": "\u2029", "next line": "\u0085", "no-break space": "\u00a0",
    "zero width": "\ufeff", "both": "\u2028\u2029",
}  # fmt: skip
"""Raw in JSON text they are lawful, and text readers in many languages break lines at some of them."""


class StillClock:
    """A clock that nobody waits by."""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


def answered(wire_id: str, content: str) -> bytes:
    """A success line whose answer stands in it exactly so: ``content`` is the inside of a JSON string."""
    return (
        b'{"id":"batch_req","custom_id":"%b","response":{"status_code":200,"request_id":"rq","body":{"object":'
        b'"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":'
        b'"%b"}}]}},"error":null}' % (wire_id.encode(), content.encode())
    )


def refused(wire_id: str, status: int, error: object) -> bytes:
    """An error-file line as the provider writes it: the outer ``error`` is null."""
    body = {"error": error}
    response = {"status_code": status, "request_id": "rq1", "body": body}
    return json.dumps({"id": "batch_req", "custom_id": wire_id, "response": response, "error": None}).encode()


async def read_file(content: bytes, piece_bytes: int, folder: Path) -> list[ResultLine | UnreadableLine]:
    """Download a result file in pieces of this size, and read every line of it."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), piece_bytes):
            yield content[start : start + piece_bytes]

    def serve(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=pieces())

    account = OpenAIAccount(name="main", base_url="https://llm.example/v1", api_key="sk-test")
    provider = OpenAIProvider(account, StillClock(), httpx.MockTransport(serve), Random(1))
    try:
        got = await provider.download(FileId("file-out"), folder / "out.jsonl")
    finally:
        await provider.close()
    assert isinstance(got, DownloadedFile)
    return [read_line(line, CHAT) async for some in read_lines(folder / "out.jsonl") for _, line in some]


def texts(lines: Sequence[ResultLine | UnreadableLine]) -> list[str]:
    """The answers' words; every line must be a success."""
    found = []
    for line in lines:
        assert isinstance(line, ResultLine), line
        assert line.row_class is RowClass.SUCCEEDED
        found.append(json.loads(line.body or b"")["choices"][0]["message"]["content"])
    return found


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64, 65_536])
@pytest.mark.parametrize("separator", SEPARATORS.values(), ids=SEPARATORS)
async def test_b03_separators_inside_an_answer_end_no_line(separator: str, piece_bytes: int, tmp_path: Path) -> None:
    """Three rows are three results with their texts as they were, though the file comes in pieces of any size, cut
    inside the separator's own bytes.
    """
    wanted = [f"first{separator}second", f"{separator}para{separator}", "plain"]
    lines = [answered(wire, text) for wire, text in zip(WIRES, wanted, strict=True)]
    got = await read_file(b"".join(line + b"\n" for line in lines), piece_bytes, tmp_path)
    assert texts(got) == wanted
    assert [one.wire_id for one in got] == list(WIRES)


UNREADABLE = {
    "cut in the middle": answered(WIRES[1], "two")[:120],
    "cut inside the id": answered(WIRES[1], "two")[:36],
    "no JSON": b"upstream error, try again",
    "a web page": b"<html><body>502 Bad Gateway</body></html>",
    "two halves": answered(WIRES[1], "two")[60:],
    "brackets without end": b"[" * 3000,
    "an unclosed string": b'{"custom_id":"' + WIRES[1].encode() + b'","response":{"status_code":200,"body":{"x":"',
}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_b04_an_unreadable_line_costs_only_itself(kind: str, tmp_path: Path) -> None:
    """The lines before and after it are read as they are; the bad one says why, and shows nothing of its content."""
    bad = UNREADABLE[kind]
    lines = [answered(WIRES[0], "one"), bad, answered(WIRES[2], "three")]
    first, second, third = await read_file(b"\n".join(lines), 50, tmp_path)
    assert texts([first, third]) == ["one", "three"]
    assert isinstance(second, UnreadableLine)
    assert second.reason
    assert bad[:30].decode() not in repr(second)


REFUSALS = {
    "too long": (400, {"type": "invalid_request_error", "code": "context_length_exceeded"}, RowClass.TOO_LONG),
    "a bad value": (400, {"type": "invalid_request_error", "code": "invalid_value"}, RowClass.INVALID_REQUEST),
    "no code": (400, {"type": "invalid_request_error", "code": None}, RowClass.INVALID_REQUEST),
    "a code nobody knows": (400, {"type": "invalid_request_error", "code": "brand_new"}, RowClass.INVALID_REQUEST),
    "filtered": (400, {"type": "invalid_request_error", "code": "content_policy_violation"}, RowClass.CONTENT_FILTERED),
    "no such model": (404, {"type": "invalid_request_error", "code": "model_not_found"}, RowClass.MODEL_UNAVAILABLE),
    "a server's fault": (500, {"type": "server_error", "code": None}, RowClass.TRANSIENT),
    "too many": (429, {"type": "requests", "code": "rate_limit_exceeded"}, RowClass.TRANSIENT),
    "no money": (429, {"type": "insufficient_quota", "code": "insufficient_quota"}, RowClass.ACCOUNT),
    "hidden behind 200": (200, {"type": "invalid_request_error", "code": "invalid_value"}, RowClass.INVALID_REQUEST),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_b05_a_refusal_inside_the_body_is_no_answer(kind: str) -> None:
    """``error`` null and the error object where the completion should be: class, code, message and status come from
    there, and nothing is missed about ``choices``.
    """
    status, error, row_class = REFUSALS[kind]
    got = read_line(refused(WIRES[0], status, {"message": "because", "param": "messages", **error}), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.wire_id, got.row_class, got.http_status, got.message) == (WIRES[0], row_class, status, "because")
    if error["code"] is not None:
        assert got.code == error["code"]


@pytest.mark.parametrize(
    "text", ["nov\x00mber", "\x00", "\x00\x00 at the start", "at the end\x00", "é\x00\U0001f993\x00"]
)
async def test_b12_a_nul_in_an_answer_is_kept(text: str, tmp_path: Path) -> None:
    """Escaped, as JSON has it: the text is not cut at the NUL and its neighbours are read with it."""
    escaped = json.dumps(text)[1:-1]
    lines = [answered(WIRES[0], "before"), answered(WIRES[1], escaped), answered(WIRES[2], "after")]
    got = await read_file(b"".join(line + b"\n" for line in lines), 11, tmp_path)
    assert texts(got) == ["before", text, "after"]
    assert escaped.encode() in (got[1].body or b"")  # type: ignore[union-attr]  # texts() has seen that it is a result


def test_b12_a_nul_in_a_failure_message_is_kept() -> None:
    """A refusal's words are no C string either."""
    got = read_line(refused(WIRES[0], 400, {"message": "bad\x00value", "code": "invalid_value"}), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.message) == (RowClass.INVALID_REQUEST, "bad\x00value")
