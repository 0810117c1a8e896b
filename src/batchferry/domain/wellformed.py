"""Whether a batch file is what a provider takes: the last look before (and while) a file is uploaded.

A provider refuses the whole file for one bad line, hours later at worst. So what the service writes is proven here
by a reader that shares no code with the writer, and the same reader checks files of other origin.

A well-formed file: one JSON object a line, strict UTF-8, no byte order mark, no blank line, a line feed at the very
end; in each line an id of 1 to 40 characters ``[A-Za-z0-9-]`` that no other line has, and the one url and the one
model of the file. A line has one of four forms, and all lines have that of the first: ``custom_id, method, url, body``
with method POST (OpenAI), ``custom_id, body`` (Mistral), ``custom_id, params`` (Anthropic), or ``key, request`` without
a model (Gemini).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from batchferry.domain.ids import MAX_WIRE_ID_CHARS

MAX_LINES = 50_000
"""Rows OpenAI takes in one batch."""
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_DEFECTS = 100
"""Defects kept with their place; the rest is only counted."""


class FileRule(StrEnum):
    """Every rule a batch file can break."""

    EMPTY_FILE = "empty_file"
    BOM = "bom"
    NO_LAST_NEWLINE = "no_last_newline"
    TOO_MANY_LINES = "too_many_lines"
    LINE_TOO_LONG = "line_too_long"
    BLANK_LINE = "blank_line"
    CARRIAGE_RETURN = "carriage_return"
    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    WRONG_MEMBERS = "wrong_members"
    BAD_CUSTOM_ID = "bad_custom_id"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    METHOD_NOT_POST = "method_not_post"
    SECOND_URL = "second_url"
    SECOND_MODEL = "second_model"


class Defect(NamedTuple):
    """A broken rule and its 1-based line; line 0 means the file as a whole. Holds nothing of the file's text."""

    line: int
    rule: FileRule


class _Named(msgspec.Struct, gc=False):
    model: str


class _FileLine(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: Annotated[str, msgspec.Meta(pattern="^/")]
    body: _Named


class _BodyLine(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    custom_id: str
    body: _Named
    method: ClassVar[str] = "POST"
    url: ClassVar[str] = ""


class _ParamsLine(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    custom_id: str
    body: _Named = msgspec.field(name="params")
    method: ClassVar[str] = "POST"
    url: ClassVar[str] = ""


class _Nameless(msgspec.Struct, gc=False):
    model: ClassVar[str] = ""


class _KeyLine(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    custom_id: str = msgspec.field(name="key")
    body: _Nameless = msgspec.field(name="request")
    method: ClassVar[str] = "POST"
    url: ClassVar[str] = ""


_Line = _FileLine | _BodyLine | _ParamsLine | _KeyLine
_DECODERS: tuple[Callable[[bytes], _Line], ...] = (
    msgspec.json.Decoder(_FileLine).decode,
    msgspec.json.Decoder(_BodyLine).decode,
    msgspec.json.Decoder(_ParamsLine).decode,
    msgspec.json.Decoder(_KeyLine).decode,
)
_decode_any_object = msgspec.json.Decoder(dict[str, Any]).decode
_CUSTOM_ID = re.compile(rf"[A-Za-z0-9-]{{1,{MAX_WIRE_ID_CHARS}}}")


class BatchFileChecker:
    """Checks a file as it streams by. Memory: one line, the custom_ids seen, and a bounded list of defects.

    Args:
        max_lines: more lines than this are one defect, and are no longer looked at.
        max_line_bytes: a longer line is one defect and skipped.
    """

    def __init__(self, max_lines: int = MAX_LINES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._decoders = _DECODERS
        """Those of the forms a line may have: all of them, until the first line that can be read says which."""
        self._rest = bytearray()
        self._is_skipping = False
        self._is_overfull = False
        self._defects: list[Defect] = []
        self._ids: set[str] = set()
        self._url: str | None = None
        self._model: str | None = None
        self.lines = 0
        """Lines read whole so far."""
        self.bytes = 0
        """Bytes fed so far."""
        self.defects_total = 0
        """All defects found, those beyond ``MAX_DEFECTS`` included."""

    @property
    def url(self) -> str | None:
        """The file's one endpoint, once a line has named it."""
        return self._url or None

    @property
    def model(self) -> str | None:
        """The file's one model, once a line has named it."""
        return self._model or None

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes of the file, cut anywhere."""
        self.bytes += len(chunk)
        start = 0
        while True:
            end = chunk.find(b"\n", start)
            if end < 0:
                break
            if self._is_skipping:
                self._is_skipping = False
            elif self._rest:
                self._rest += chunk[start:end]
                self._line(bytes(self._rest))
                self._rest.clear()
            else:
                self._line(chunk[start:end])
            start = end + 1
        if not self._is_skipping:
            self._rest += chunk[start:]
            if len(self._rest) > self._max_line_bytes:
                self._rest.clear()
                self._is_skipping = True
                self.lines += 1
                self._found(FileRule.LINE_TOO_LONG)

    def finish(self) -> list[Defect]:
        """Everything found wrong, in the order of the lines; empty means well-formed."""
        if self._rest:
            self._line(bytes(self._rest))
            self._rest.clear()
            self._found(FileRule.NO_LAST_NEWLINE)
        elif self._is_skipping:
            self._is_skipping = False
            self._found(FileRule.NO_LAST_NEWLINE)
        if self.lines == 0:
            self._found(FileRule.EMPTY_FILE, line=0)
        return list(self._defects)

    def _read(self, line: bytes) -> _Line:
        """The line by the form of the file.

        Raises:
            ValueError, RecursionError: it has another one, or none.
        """
        *others, last = self._decoders
        for decode in others:
            with contextlib.suppress(ValueError):
                found = decode(line)
                self._decoders = (decode,)
                return found
        found = last(line)
        self._decoders = (last,)
        return found

    def _found(self, rule: FileRule, line: int | None = None) -> None:
        self.defects_total += 1
        if len(self._defects) < MAX_DEFECTS:
            self._defects.append(Defect(self.lines if line is None else line, rule))

    def _line(self, line: bytes) -> None:
        self.lines += 1
        if self.lines > self._max_lines:
            if not self._is_overfull:
                self._is_overfull = True
                self._found(FileRule.TOO_MANY_LINES)
            return
        if len(line) > self._max_line_bytes:
            self._found(FileRule.LINE_TOO_LONG)
            return
        try:
            # The decoder does not look at the UTF-8 of what it skips.
            if not line.isascii():
                line.decode()
            found = self._read(line)
        except (ValueError, RecursionError):
            self._found(_why(line, is_first=self.lines == 1))
            return
        if 0x0D in line:
            self._found(FileRule.CARRIAGE_RETURN)
        custom_id = found.custom_id
        if _CUSTOM_ID.fullmatch(custom_id) is None:
            self._found(FileRule.BAD_CUSTOM_ID)
        elif custom_id in self._ids:
            self._found(FileRule.DUPLICATE_CUSTOM_ID)
        else:
            self._ids.add(custom_id)
        if found.method != "POST":
            self._found(FileRule.METHOD_NOT_POST)
        if found.url != self._url:
            if self._url is None:
                self._url = found.url
            else:
                self._found(FileRule.SECOND_URL)
        if found.body.model != self._model:
            if self._model is None:
                self._model = found.body.model
            else:
                self._found(FileRule.SECOND_MODEL)


def check_batch_file(chunks: Iterable[bytes]) -> list[Defect]:
    """Check a whole file given in chunks; empty means well-formed."""
    checker = BatchFileChecker()
    for chunk in chunks:
        checker.feed(chunk)
    return checker.finish()


def _why(line: bytes, *, is_first: bool) -> FileRule:
    if not line.strip():
        return FileRule.BLANK_LINE
    if is_first and line.startswith(b"\xef\xbb\xbf"):
        return FileRule.BOM
    try:
        line.decode()
    except UnicodeDecodeError:
        return FileRule.NOT_UTF8
    try:
        _decode_any_object(line)
    except (ValueError, RecursionError):
        return FileRule.NOT_JSON
    return FileRule.WRONG_MEMBERS
