"""The local state as the engine sees it: folder, index, spool and batch view joined behind one port."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.ids import BatchId
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import IndexRow, SpoolRef
from batchferry.store.batches import MAX_BATCHES, BatchView
from batchferry.store.database import Database
from batchferry.store.folder import StateFolder
from batchferry.store.index import RowIndex
from batchferry.store.spool import Spool

MAX_SPOOL_BYTES = 16 * 1024**3
"""Room for about a hundred full provider files."""
MAX_INDEX_BYTES = 4 * 1024**3
"""About forty million rows of a hundred bytes."""
MAX_PENDING_BYTES = 8 * 1024**2


class LocalState:
    """``LocalStore`` on a folder of the local disk; one instance a process and folder.

    ``max_spool_bytes`` is where an append is refused (consumption should pause well below it);
    ``max_pending_bytes`` of lines may wait to be written, besides those of the append in hand; ``max_index_bytes`` is
    the largest index file. Beyond a limit the answer is StoreUnavailable, as with a full disk.

    Everything except the reading of lines is for the event loop's thread only.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_spool_bytes: int = MAX_SPOOL_BYTES,
        max_index_bytes: int = MAX_INDEX_BYTES,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._folder = StateFolder(folder)
        self._max_pending_bytes = max_pending_bytes
        self._max_index_bytes = max_index_bytes
        self._database = Database(self._folder.index_path, max_index_bytes)
        self._index = RowIndex(self._database)
        self._batches = BatchView(self._database)
        self._spool = Spool(self._folder.spool_path, max_spool_bytes, max_pending_bytes)
        self._rows: dict[int, int] = {}
        self._is_open = False
        self._was_started = False

    def fullness(self) -> Mapping[str, tuple[int, int]]:
        """``spool_buffer_bytes``, ``index_bytes`` and ``batch_jobs_rows``: what is used, and the limit."""
        return {
            "spool_buffer_bytes": (self._spool.pending_bytes, self._max_pending_bytes),
            "index_bytes": (self._database.size_bytes, self._max_index_bytes),
            "batch_jobs_rows": (self._batches.rows, MAX_BATCHES),
        }

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Free (lines that are not written yet taken off) and all bytes of the file system; (0, 0): not known."""
        try:
            found = os.statvfs(self._folder.path)
        except OSError:
            return 0, 0
        free = found.f_bavail * found.f_frsize - self._spool.pending_bytes
        return max(0, free), found.f_blocks * found.f_frsize

    async def start(self) -> None:
        """Take the folder for this process, wipe what an earlier life left there, and open. Once in a life.

        Raises:
            GateRefused: the folder holds files that are not ours, or another process uses it.
            StoreUnavailable: the folder cannot be written.
        """
        if self._was_started:
            raise RuntimeError("a local state starts once: make a new one")
        await asyncio.to_thread(self._folder.open)
        try:
            await self._database.open()
        except BaseException:
            self._folder.close()
            raise
        self._was_started = self._is_open = True

    # ------------------------------------------------------------------------------------------- index

    async def put_rows(self, partition: int, rows: Sequence[IndexRow]) -> None:
        """Index these rows; an offset that is there already is replaced."""
        await self._index.put(partition, rows)
        self._rows[partition] = self._rows.get(partition, 0) + len(rows)

    async def get_rows(self, partition: int, offsets: Sequence[int]) -> Mapping[int, IndexRow]:
        """The rows found; offsets that are not indexed are absent."""
        return await self._index.get(partition, offsets)

    async def indexed(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Which of these offsets the index knows."""
        return await self._index.known(partition, offsets)

    async def drop_rows(self, partition: int, offsets: OffsetSet) -> None:
        """Forget these rows; offsets that are not indexed are no matter."""
        dropped = await self._index.drop(partition, offsets)
        self._rows[partition] = max(0, self._rows.get(partition, 0) - dropped)

    async def drop_partition(self, partition: int) -> None:
        """Forget rows and segments of a partition; put nothing of it again before this has returned."""
        self._require_open()
        self._spool.drop_partition(partition)
        await self._index.drop_partition(partition)
        self._rows.pop(partition, None)

    @property
    def indexed_rows(self) -> int:
        """Rows in the index; one put twice counts twice until its partition is dropped."""
        return sum(self._rows.values())

    async def same_custom_ids(self, partition: int, offsets: OffsetSet) -> Sequence[Sequence[int]]:
        """Groups of two or more of these offsets that share a custom_id, by first offset, each ascending."""
        return await self._index.same_custom_ids(partition, offsets)

    # ------------------------------------------------------------------------------------------- spool

    def append(self, key: BatchKey, partition: int, lines: Sequence[tuple[int, bytes]]) -> None:
        """Add (offset, line) pairs to the open segment of this key and partition: all, or none when this raises.

        Raises:
            StoreUnavailable: the disk or the limit does not take them; the same call may be made again later.
            ValueError: an offset is not above the segment's last, or a line is not exactly one line.
        """
        self._require_open()
        self._spool.append(key, partition, lines)

    async def close_segment(self, key: BatchKey, partition: int) -> SpoolRef | None:
        """Seal the open segment; None when there is none. When this raises, the segment stays open."""
        self._require_open()
        return self._spool.close_segment(key, partition)

    def stream(
        self, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]
    ) -> AsyncIterator[Sequence[tuple[int, int, bytes]]]:
        """(partition, offset, line) of the wanted offsets, partition then offset ascending.

        Chunks hold at most 500 lines or 256 KiB (a longer line comes alone). Segments of partitions that are
        not wanted are passed over; each call starts from the beginning.

        Raises:
            PartitionLost: a segment of a wanted partition is gone.
        """
        self._require_open()
        return self._spool.stream(refs, wanted)

    def line_sizes(self, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]) -> Mapping[int, int]:
        """Sum of line bytes of the wanted offsets by wanted partition: what ``stream`` will yield.

        Raises:
            PartitionLost: a segment of a wanted partition is gone.
        """
        return self._spool.sizes(refs, wanted)

    def spooled(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Which of these offsets have a line in any segment, open or sealed."""
        return self._spool.holds(partition, offsets)

    def read_spooled(self, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[tuple[int, bytes]]]:
        """(offset, line) of these offsets from any segment, ascending, in bounded chunks; others are absent.

        A segment that is deleted meanwhile ends quietly: ask the input topic for what did not come.
        """
        self._require_open()
        return self._spool.read(partition, offsets)

    def delete_segments(self, refs: Iterable[SpoolRef]) -> None:
        """Delete sealed segments; those that are gone already are no matter."""
        self._spool.delete(refs)

    @property
    def spooled_bytes(self) -> int:
        """Bytes of all spooled lines, those not yet written included."""
        return self._spool.size

    @property
    def spool_limit_bytes(self) -> int:
        """Where appends are refused."""
        return self._spool.max_bytes

    def download_path(self, batch_id: BatchId, kind: str) -> Path:
        """Where a result file goes: an empty 0600 file, or the one that is there; write into it, do not rename over it.

        Raises:
            ValueError: ``batch_id`` or ``kind`` is no plain name.
        """
        self._require_open()
        return self._folder.download_path(batch_id, kind)

    # ------------------------------------------------------------------------------------------- batches

    async def save_batch(self, row: Mapping[str, object]) -> None:
        """Insert the batch, or change the columns named; see ``BatchView`` for columns and types.

        Raises:
            ValueError: an unknown column, no ``batch_id``, or an instant that is not an aware datetime.
        """
        await self._batches.save(row)

    async def add_batch_event(self, row: Mapping[str, object]) -> None:
        """Write one event of a batch down.

        Raises:
            ValueError: an unknown column, a missing one, or an instant that is not an aware datetime.
        """
        await self._batches.add_event(row)

    async def batches(self) -> Sequence[Mapping[str, object]]:
        """The batches kept, newest first."""
        return await self._batches.batches()

    async def batch_events(self, batch_id: str) -> Sequence[Mapping[str, object]]:
        """The batch's events kept, oldest first."""
        return await self._batches.events(batch_id)

    async def close(self) -> None:
        """Give the folder up; what is in it is left to the next start's wipe. Safe to call twice."""
        self._is_open = False
        await self._database.close()
        self._folder.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("the local state is not open")
