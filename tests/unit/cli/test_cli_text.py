"""Lines of files, safe text, sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.cli.console import count, counts_text, json_line, money, safe, size
from batchferry.cli.lines import Line, LineReader


@contextmanager
def _reader(path: Path, data: bytes, max_bytes: int) -> Iterator[LineReader]:
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield LineReader(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def _lines(path: Path, data: bytes, max_bytes: int = 100) -> list[Line]:
    with _reader(path, data, max_bytes) as reader:
        return [line for block in reader.blocks() for line in block]


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """A carriage return before the end goes with it; U+2028 and a lone carriage return end nothing."""
    data = b"one\r\ntwo\rmore\n\n\xe2\x80\xa8three"
    assert _lines(tmp_path / "f", data) == [
        Line(1, b"one", 3),
        Line(2, b"two\rmore", 8),
        Line(3, b"", 0),
        Line(4, b"\xe2\x80\xa8three", 8),
    ]


def test_an_empty_file_has_no_line(tmp_path: Path) -> None:
    """Nothing in, nothing out."""
    assert _lines(tmp_path / "f", b"") == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_long_line_is_only_measured(tmp_path: Path, end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line above the limit has its size and no value; one of exactly the limit has its value."""
    monkeypatch.setattr("batchferry.cli.lines.READ_BYTES", 7)
    lines = _lines(tmp_path / "f", b"a" * 100 + b"\r\n" + b"b" * 101 + b"\n" + b"c" * 5_000 + end)
    assert [(line.number, line.value is None, line.bytes) for line in lines[:2]] == [(1, False, 100), (2, True, 101)]
    assert lines[2].value is None
    assert lines[2].bytes - 5_000 in {0, 1}


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line and not line.endswith(b"\r"))))
def test_reading_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    """Whatever the lines are and however they are cut into reads, they come back in order."""
    path = tmp_path_factory.mktemp("lines") / "f"
    data = b"".join(line + b"\n" for line in lines)
    assert [line.value for line in _lines(path, data)] == lines


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_a_json_line_is_one_line_and_means_the_same(value: object) -> None:
    """Any JSON, printed or compact, becomes one line for every reader without changing its meaning."""
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, indent=2)):
        line = json_line(text.encode(errors="surrogatepass").decode(errors="replace").encode())
        assert len(line.splitlines()) <= 1
        assert json.loads(line) == json.loads(text.encode(errors="surrogatepass").decode(errors="replace"))


def test_unsafe_characters_are_shown_as_escapes() -> None:
    """Escape sequences and direction marks cannot reach a terminal."""
    assert safe("a\x1b[31mb\u202ec\n") == "a\\u001b[31mb\\u202ec\\u000a"
    assert safe("Grüße 你好 🦜") == "Grüße 你好 🦜"


def test_numbers_for_people() -> None:
    """Counts, sizes and amounts as they are shown."""
    assert count(1234567) == "1,234,567"
    assert (size(999), size(200_000_000), size(3_000_000_000_000_000)) == ("999 B", "200.0 MB", "3000.0 TB")
    assert (money(None), money(82_300_000_000), money(1_620_000_000_000)) == ("-", "$0.0823", "$1.62")
    assert counts_text({"b": 2, "a": 2, "c": 30}) == "30 c, 2 a, 2 b"
