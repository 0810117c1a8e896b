"""What commands print and how: safe text, tables on a terminal, JSON elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NoReturn

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchferry.cli.exits import Exit
from batchferry.domain.money import format_usd
from batchferry.domain.times import hours

PLAIN_WIDTH_CHARS = 120
"""Width of tables that go into a file or a pipe."""

# Characters that would end a line for some reader, move the cursor, or turn the direction of what follows.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_BETWEEN_TOKENS = str.maketrans("\t\r\n", "   ")


def out() -> Console:
    """Standard output, as it is now."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH_CHARS, highlight=False)


def err() -> Console:
    """Standard error, as it is now."""
    return Console(
        stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH_CHARS, highlight=False, soft_wrap=True
    )


def wants_json(flag: bool | None) -> bool:
    """The flag where it was given; else JSON wherever standard output is no terminal."""
    return not sys.stdout.isatty() if flag is None else flag


def safe(value: object) -> str:
    """Text on one line: whatever could break or disguise a line is shown as an escape."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value))


def json_line(value: bytes) -> str:
    """A JSON text as one line that stays one in every reader, with the same meaning.

    Raw line breaks and tabs can only stand between tokens, where a space means the same; all other unsafe
    characters can only stand in strings, where an escape means the same.
    """
    return safe(value.decode(errors="replace").translate(_BETWEEN_TOKENS))


def cell(value: object) -> Text:
    """A table cell that shows a value as it is, never as markup."""
    return Text("" if value is None else safe(value))


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """An empty table; ``right`` names the columns of numbers."""
    made = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def rows(into: Table, lines: Iterable[Sequence[object]]) -> Table:
    """The table with these rows added."""
    for line in lines:
        into.add_row(*(value if isinstance(value, Text) else cell(value) for value in line))
    return into


def facts(lines: Iterable[Sequence[object]]) -> Table:
    """Names and what stands behind them, without a head."""
    made = table("", "")
    made.show_header = False
    return rows(made, lines)


def print_json(value: object, *, indent: bool = True) -> None:
    """One JSON document on standard output."""
    option = orjson.OPT_UTC_Z | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    print_line(orjson.dumps(value, option=option, default=str).decode())


def print_line(text: str) -> None:
    """A line on standard output, past every markup.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str, *more: str) -> None:
    """A message for people on standard error; ``more`` stands on lines of its own."""
    with contextlib.suppress(BrokenPipeError):
        err().print(Text("\n".join([f"batchferry: {text}", *(f"  {line}" for line in more)])))


def fail(code: Exit, text: str, *more: str) -> NoReturn:
    """Say why and leave with this code."""
    complain(text, *more)
    raise typer.Exit(code)


def count(number: float) -> str:
    """A count with thousands apart."""
    return f"{number:,.0f}"


def size(number_bytes: float) -> str:
    """Bytes for people."""
    value, unit = float(number_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def money(picodollars: int | None) -> str:
    """An amount for people; a dash where it is not known."""
    if picodollars is None:
        return "-"
    usd = picodollars / 10**12
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:,.4f}"


def amount(picodollars: int | None) -> str:
    """As ``money``, in a word where it is not known: for sums that somebody might take a dash in for nothing."""
    return "unknown" if picodollars is None else money(picodollars)


def usd(picodollars: int | None) -> str | None:
    """An exact decimal for ``--json``; None where it is not known."""
    return None if picodollars is None else format_usd(picodollars)


def instant(at: datetime | None) -> str:
    """An instant to the second, UTC."""
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def length(seconds: float | None) -> str:
    """A length of time; a dash where it is not known."""
    return "-" if seconds is None else hours(seconds)


def counts_text(counts: Mapping[str, int]) -> str:
    """``12 succeeded, 3 expired``, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count(number)} {name}" for name, number in ordered)
