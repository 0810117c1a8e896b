"""The checker of batch files finds every way in which a provider would refuse a whole file."""

from __future__ import annotations

import pytest

from batchferry.domain.wellformed import MAX_DEFECTS, BatchFileChecker, Defect, FileRule, check_batch_file


def line(custom_id: str = "a", url: str = "/v1/chat/completions", model: str = "m", tail: str = "") -> bytes:
    """One good line, and what is to differ in it."""
    return f'{{"custom_id":"{custom_id}","method":"POST","url":"{url}","body":{{"model":"{model}","x":"é\u2028{tail}"}}}}\n'.encode()


GOOD = line("a-1") + line("a-2") + line("A" * 40)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_wellformed_file_in_any_pieces(size: int):
    """A good file has no defect however it is cut into chunks; U+2028 and other characters do not end lines."""
    checker = BatchFileChecker()
    for start in range(0, len(GOOD), size):
        checker.feed(GOOD[start : start + size])
    assert checker.finish() == []
    assert (checker.lines, checker.bytes) == (3, len(GOOD))
    assert (checker.url, checker.model) == ("/v1/chat/completions", "m")


@pytest.mark.parametrize(
    ("content", "defects"),
    [
        (b"", [(0, FileRule.EMPTY_FILE)]),
        (GOOD[:-1], [(3, FileRule.NO_LAST_NEWLINE)]),
        (b"\xef\xbb\xbf" + GOOD, [(1, FileRule.BOM)]),
        (line("a") + b"\n" + line("b"), [(2, FileRule.BLANK_LINE)]),
        (line("a") + b" \r\n", [(2, FileRule.BLANK_LINE)]),
        (line("a").replace(b"\n", b"\r\n"), [(1, FileRule.CARRIAGE_RETURN)]),
        (line("a") + line("b").replace(b"x", b"\xff"), [(2, FileRule.NOT_UTF8)]),
        (line("a") + b"nope\n", [(2, FileRule.NOT_JSON)]),
        (line("a") + line("b")[:-3] + b"\n", [(2, FileRule.NOT_JSON)]),
        (line("a") + line("b").strip() + line("c"), [(2, FileRule.NOT_JSON)]),
        (line("a").replace(b'"x":', b'"x":\n'), [(1, FileRule.NOT_JSON), (2, FileRule.NOT_JSON)]),
        (b"[]\n", [(1, FileRule.NOT_JSON)]),
        (b'{"custom_id":"a"}\n', [(1, FileRule.WRONG_MEMBERS)]),
        (line("a").replace(b'"method"', b'"extra":1,"method"'), [(1, FileRule.WRONG_MEMBERS)]),
        (line("a").replace(b'"a"', b"1"), [(1, FileRule.WRONG_MEMBERS)]),
        (line("a", url="https://api.openai.com/v1"), [(1, FileRule.WRONG_MEMBERS)]),
        (line("A" * 41), [(1, FileRule.BAD_CUSTOM_ID)]),
        (line("a_b"), [(1, FileRule.BAD_CUSTOM_ID)]),
        (line(""), [(1, FileRule.BAD_CUSTOM_ID)]),
        (line("a") + line("b") + line("a"), [(3, FileRule.DUPLICATE_CUSTOM_ID)]),
        (line("a").replace(b"POST", b"GET"), [(1, FileRule.METHOD_NOT_POST)]),
        (line("a") + line("b", url="/v1/embeddings"), [(2, FileRule.SECOND_URL)]),
        (line("a") + line("b", model="other"), [(2, FileRule.SECOND_MODEL)]),
    ],
)
def test_wellformed_defects(content: bytes, defects: list[tuple[int, FileRule]]):
    """Each defect is named with the number of its line."""
    assert check_batch_file([content]) == [Defect(*defect) for defect in defects]
    assert check_batch_file(content[i : i + 5] for i in range(0, len(content), 5)) == [Defect(*d) for d in defects]


@pytest.mark.parametrize(
    ("head", "before", "model"),
    [
        ('"custom_id"', ',"body":{"model":"m"', "m"),
        ('"custom_id"', ',"params":{"model":"m"', "m"),
        ('"key"', ',"request":{"contents":[]', None),
    ],
    ids=["mistral", "anthropic", "gemini"],
)
def test_wellformed_forms(head: str, before: str, model: str | None):
    """The files of the other families are well-formed too; a line of another form in one of them is not."""

    def shaped(wire_id: str) -> bytes:
        return f'{{{head}:"{wire_id}"{before}}}}}\n'.encode()

    checker = BatchFileChecker()
    checker.feed(shaped("a") + shaped("b"))
    assert checker.finish() == []
    assert (checker.url, checker.model) == (None, model)
    assert check_batch_file([shaped("a") + line("b")]) == [Defect(2, FileRule.WRONG_MEMBERS)]
    assert check_batch_file([line("a") + shaped("b")]) == [Defect(2, FileRule.WRONG_MEMBERS)]
    assert check_batch_file([shaped("a") + shaped("a")]) == [Defect(2, FileRule.DUPLICATE_CUSTOM_ID)]


def test_wellformed_bounds():
    """Too many lines and lines too long are one defect each, and memory holds neither."""
    checker = BatchFileChecker(max_lines=2, max_line_bytes=200)
    checker.feed(line("a") + line("b"))
    for _ in range(50):
        checker.feed(b"x" * 100)
    checker.feed(b"\n" + line("c"))
    assert checker.finish() == [Defect(3, FileRule.LINE_TOO_LONG), Defect(4, FileRule.TOO_MANY_LINES)]
    assert len(checker._rest) == 0


def test_wellformed_many_defects_are_counted():
    """Beyond a bounded list defects are only counted."""
    checker = BatchFileChecker()
    checker.feed(b"nope\n" * 1000)
    assert len(checker.finish()) == MAX_DEFECTS
    assert checker.defects_total == 1000


def test_wellformed_unended_long_line():
    """A line that is too long and never ends is both."""
    checker = BatchFileChecker(max_line_bytes=10)
    checker.feed(b"x" * 30)
    assert checker.finish() == [Defect(1, FileRule.LINE_TOO_LONG), Defect(1, FileRule.NO_LAST_NEWLINE)]
