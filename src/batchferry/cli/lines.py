"""A file or pipe of lines, read with bounded memory and told apart from what is no line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from batchferry.cli.console import err, fail
from batchferry.cli.exits import Exit
from batchferry.domain.requests import BadRecord

STDIN = "-"
"""The name that means standard input."""
UTF8_BOM = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

READ_BYTES = 1024 * 1024
"""One read; what a pipe has ready counts as one, so that slow input is passed on as it comes."""


class Line(NamedTuple):
    """One line without its end. ``value`` is None for one longer than allowed: only its size is known."""

    number: int
    value: bytes | None
    bytes: int


class LineReader:
    r"""The lines behind a file descriptor, in blocks of what one read gave. A ``\r`` before the end goes with it."""

    def __init__(self, descriptor: int, max_line_bytes: int) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_line_bytes
        self.read_bytes = 0
        """Bytes read so far."""
        self.first = b""
        """The first bytes of the file, to know its encoding by."""

    def blocks(self) -> Iterator[list[Line]]:
        """Every line; the last one counts with or without a line break.

        Raises:
            OSError: the file cannot be read.
        """
        number = 0
        head = b""
        """The beginning of a line whose end has not come yet; at most the limit and one byte are kept."""
        seen = 0
        """Bytes of that line, those that were not kept included."""
        while data := os.read(self._descriptor, READ_BYTES):
            if not self.read_bytes:
                self.first = data[:4]
            self.read_bytes += len(data)
            *ended, rest = data.split(b"\n")
            lines = []
            for piece in ended:
                number += 1
                lines.append(self._line(number, head + piece, seen + len(piece)))
                head, seen = b"", 0
            seen += len(rest)
            head += rest[: self._max_bytes + 2 - len(head)]
            if lines:
                yield lines
        if seen:
            yield [self._line(number + 1, head, seen)]

    def _line(self, number: int, value: bytes, size_bytes: int) -> Line:
        if len(value) == size_bytes and value.endswith(b"\r"):
            value, size_bytes = value[:-1], size_bytes - 1
        if size_bytes > self._max_bytes:
            return Line(number, None, size_bytes)
        return Line(number, value, size_bytes)


def refusal(bad: BadRecord) -> str:
    """What is wrong with a line, its rule, and what to do."""
    return f"{bad.message} ({bad.rule}); {bad.remedy}"


@contextmanager
def opened(file: str, max_line_bytes: int) -> Iterator[tuple[LineReader, int | None]]:
    """The lines of a file or of standard input, and the file's size in bytes (None: not known).

    Raises:
        typer.Exit: it cannot be read; why has been told.
    """
    if file == STDIN:
        yield LineReader(sys.stdin.fileno(), max_line_bytes), None
        return
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        fail(Exit.USAGE, f"{file} cannot be read ({error.strerror}); correct the path or its rights")
    try:
        yield LineReader(descriptor, max_line_bytes), os.fstat(descriptor).st_size
    except IsADirectoryError:
        fail(Exit.USAGE, f"{file} is a folder; name a file")
    finally:
        os.close(descriptor)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, nothing elsewhere; called with the bytes read so far."""
    console = err()
    if not console.is_terminal:
        yield lambda _done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
