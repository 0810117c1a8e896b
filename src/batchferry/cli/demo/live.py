"""What is seen while the demo runs: outcomes as they are committed, batches as they move."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchferry.cli.console import cell, count, counts_text, length, out, table

if TYPE_CHECKING:
    from batchferry.ports import Record

PLAIN_EVERY_S = 3.0
"""Between two lines where there is no terminal."""
SHOWN_BATCHES = 12
POLL_MS = 200


class _Told(msgspec.Struct, gc=False):
    status: str
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Told).decode


@dataclass(slots=True)
class Progress:
    """What is known while it runs."""

    planned: int
    began: datetime
    now: datetime
    produced: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Committed outcomes by class."""
    batches: Sequence[Mapping[str, object]] = ()

    @property
    def outcomes(self) -> int:
        """All committed outcomes."""
        return sum(self.ended.values())

    def take(self, records: Sequence[Record]) -> None:
        """Count committed outcomes."""
        for record in records:
            told = _decode(record.value or b'{"status":"unreadable"}')
            self.ended[told.status if told.error is None else str(told.error.get("class"))] += 1

    @property
    def line(self) -> str:
        """One line of it."""
        states = Counter(str(batch["state"]) for batch in self.batches)
        return (
            f"{length((self.now - self.began).total_seconds()):>12}  {count(self.produced)} produced,"
            f" {count(self.outcomes)} of {count(self.planned)} outcomes; batches: {counts_text(states) or 'none yet'}"
        )


@contextlib.contextmanager
def shown(progress: Progress) -> Iterator[Callable[[], None]]:
    """Show the progress; call what is yielded whenever it has changed."""
    console = out()
    if not console.is_terminal:
        last = 0.0

        def tell() -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_EVERY_S:
                last = time.monotonic()
                console.print(progress.line, markup=False)

        yield tell
        return
    with Live(_picture(progress), console=console, refresh_per_second=5, transient=True) as live:
        yield lambda: live.update(_picture(progress))


def _picture(progress: Progress) -> RenderableType:
    passed = length((progress.now - progress.began).total_seconds())
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text(f"{passed} of demo time"),
        ProgressBar(total=progress.planned, completed=progress.outcomes, width=40),
        Text(f"{count(progress.outcomes)} of {count(progress.planned)} outcomes ({count(progress.produced)} produced)"),
    )
    batches = table("batch", "state", "at the provider", "rows", "sealed by", "waited", right=("rows", "waited"))
    for batch in progress.batches[:SHOWN_BATCHES]:
        waited = batch.get("waiting_s")
        batches.add_row(
            cell(batch.get("batch_id")),
            cell(batch.get("state")),
            cell(batch.get("provider_status")),
            cell(batch.get("rows")),
            cell(batch.get("seal_reason")),
            cell(length(float(waited)) if isinstance(waited, int | float) else ""),
        )
    return Group(bar, Text(counts_text(progress.ended) or "no outcome yet", style="dim"), Text(), batches)
