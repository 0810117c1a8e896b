"""Reading topics through, with a bar on the terminal, and ending a read early without leaving it open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from batchferry.cli.console import err

if TYPE_CHECKING:
    from batchferry.ports import LogReader, Record

T = TypeVar("T")


@contextmanager
def records_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, nothing elsewhere; called with the records that came since the last call."""
    console = err()
    if not console.is_terminal:
        yield lambda _records: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda records: bar.advance(task, records)


@asynccontextmanager
async def ended(chunks: AsyncIterator[T]) -> AsyncGenerator[AsyncIterator[T], None]:
    """The same iterator, closed at the end of the block: a reader serves one read at a time."""
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def read_records(
    reader: LogReader, topic: str, partitions: Sequence[int], what: str, start: int | None = None
) -> AsyncGenerator[Record, None]:
    """Every record of these partitions, one partition after the other. Leave early only within ``ended``.

    Args:
        what: the words beside the bar.
        start: first offset, of every partition; None: where the log begins.

    Raises:
        KafkaUnavailable: the end could not be reached in time.
    """
    bounds = await reader.bounds(topic, partitions)
    first_of = {partition: max(bounds[partition][0], start or 0) for partition in partitions}
    total = sum(max(0, bounds[partition][1] - first) for partition, first in first_of.items())
    with records_bar(what, total) as advance:
        for partition, first in first_of.items():
            if bounds[partition][1] <= first:
                continue
            async with ended(reader.read_to_end(topic, partition, first)) as chunks:
                async for records in chunks:
                    for record in records:
                        yield record
                    advance(len(records))
