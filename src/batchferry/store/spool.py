"""Spool segments: the ready request lines of one batch key and partition, offsets ascending, bodies only on disk.

A segment is a file of raw lines and, in memory, two arrays that say which offset each line belongs to and how
long it is: twelve bytes a row, so that a million waiting rows cost about twelve megabytes and no look-up reads
the disk. The arrays alone say what a segment holds; bytes in the file beyond them do not exist.

Appending happens on the event loop, in the middle of the ingest path. It only keeps the lines; now and then those
of a segment are written, gathered by the kernel without a copy of ours: a few hundred kilobytes into the page cache
(nothing is synced), which takes about as long as handing them to a thread would, and keeps lines, arrays and file
in step without a lock. Reading is done in threads, as it may wait for the disk.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import PartitionLost, StoreUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import SpoolRef

SEGMENT_PENDING_BYTES = 256 * 1024
"""A segment with more unwritten bytes than this is written."""
MAX_GATHERED_LINES = 1024
"""Lines of one write: IOV_MAX, as Linux and macOS have it."""
READ_BYTES = 1024 * 1024
"""Most bytes of one read, shared by the segments that are merged at that moment."""
MIN_READ_BYTES = 64 * 1024
CHUNK_BYTES = 256 * 1024
CHUNK_LINES = 500
"""A chunk of lines ends at either; one line alone may be longer than CHUNK_BYTES."""

Line = tuple[int, bytes]
"""An offset and its line."""

_offset_of = itemgetter(0)


class Segment:
    """One segment and its books. ``written`` bytes are in the file, the rest of ``size`` is pending."""

    __slots__ = ("_known", "is_gone", "lengths", "offsets", "path", "pending", "ref", "size", "written")

    def __init__(self, ref: SpoolRef, folder: Path) -> None:
        self.ref = ref
        self.path = folder / f"{ref.partition}-{ref.key_digest}-{ref.number}.jsonl"
        self.offsets = array("Q")
        self.lengths = array("I")
        self.pending: list[bytes] = []
        self.written = 0
        self.size = 0
        self.is_gone = False
        self._known = OffsetSet()

    def known(self) -> OffsetSet:
        """The offsets of its lines; not to be changed by the caller. Caught up when asked, to keep append cheap."""
        if behind := len(self.offsets) - len(self._known):
            self._known.update(self.offsets[-behind:])
        return self._known

    def size_of(self, offsets: OffsetSet) -> int:
        """Bytes of these lines, all of which it holds; looks at the smaller of what is in and what is not."""
        out = self.known() - offsets
        if len(out) <= len(offsets):
            return self.size - self._sum(out)
        return self._sum(offsets)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are not in the file yet."""
        return self.size - self.written

    def flush(self) -> int:
        """Write the pending lines behind what is in the file; returns the bytes written.

        Raises:
            StoreUnavailable: they could not all be written: the file is as before and they are still pending.
        """
        if not self.pending:
            return 0
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                self._write(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreUnavailable(
                f"spool segment {self.path}: {error.strerror}; free disk space for the state folder"
            ) from error
        count = self.pending_bytes
        self.written = self.size
        self.pending.clear()
        return count

    def _write(self, fd: int) -> None:
        position = self.written
        try:
            for start in range(0, len(self.pending), MAX_GATHERED_LINES):
                lines = self.pending[start : start + MAX_GATHERED_LINES]
                size = sum(map(len, lines))
                done = os.pwritev(fd, lines, position)
                if done < size:  # cut short by a signal or a nearly full disk
                    rest = memoryview(b"".join(lines))
                    while done < size:
                        done += os.pwrite(fd, rest[done:], position + done)
                position += size
        except OSError:
            # No half line stays behind. Should even this fail: the position is ours and the arrays rule, so the
            # next write covers it and no read ever looks there.
            os.ftruncate(fd, self.written)
            raise

    def _sum(self, offsets: OffsetSet) -> int:
        return sum(self.lengths[bisect_left(self.offsets, offset)] for offset in offsets)


class Spool:
    """All segments of this process."""

    def __init__(self, folder: Path, max_bytes: int, max_pending_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        self._open: dict[tuple[BatchKey, int], Segment] = {}
        self._segments: dict[int, Segment] = {}
        self._of_partition: dict[int, dict[int, Segment]] = {}
        self._last_number = 0
        self._pending = 0
        self.size = 0
        """Bytes of all lines, those still pending included."""

    @property
    def pending_bytes(self) -> int:
        """Bytes of lines that are not in a file yet."""
        return self._pending

    def append(self, key: BatchKey, partition: int, lines: Sequence[Line]) -> None:
        """Add lines behind those of the open segment: all of them, or none when this raises.

        Raises:
            StoreUnavailable: the disk or the limit does not take them; the same call may be made again later.
            ValueError: offsets do not ascend, or a line is not exactly one line: our bug.
        """
        if not lines:
            return
        segment = self._open.get((key, partition))
        last = segment.offsets[-1] if segment is not None else -1
        size = 0
        for offset, line in lines:
            if offset <= last:
                raise ValueError(f"partition {partition}: offset {offset} cannot be spooled behind offset {last}")
            length = len(line)
            if line.find(b"\n") + 1 != length or not length:
                raise ValueError(f"partition {partition}: offset {offset} is not one line with its line feed")
            last = offset
            size += length
        if self.size + size > self.max_bytes:
            raise StoreUnavailable(
                f"the spool holds {self.size} of at most {self.max_bytes} bytes: wait for batches to leave, or raise"
                " the limit"
            )
        if self._pending + size > self._max_pending_bytes:
            self._relieve()
        if segment is None:
            segment = self._begin(key, partition)
        self._add(segment, lines, size)
        if segment.pending_bytes > SEGMENT_PENDING_BYTES:
            try:
                self._pending -= segment.flush()
            except StoreUnavailable:
                self._take_back(segment, len(lines), size)
                if not segment.offsets:
                    self._delete([segment])
                raise

    def close_segment(self, key: BatchKey, partition: int) -> SpoolRef | None:
        """Write what is pending and seal the open segment; None when there is none.

        Raises:
            StoreUnavailable: the disk does not take it; the segment stays open.
        """
        segment = self._open.get((key, partition))
        if segment is None:
            return None
        self._pending -= segment.flush()
        del self._open[key, partition]
        return segment.ref

    def delete(self, refs: Iterable[SpoolRef]) -> None:
        """Delete segments; those that are gone already are no matter.

        Raises:
            StoreUnavailable: a file could not be deleted; the others are, and that one is no longer in the books.
        """
        numbers = {ref.number for ref in refs}
        self._delete([self._segments[number] for number in sorted(numbers & self._segments.keys())])

    def drop_partition(self, partition: int) -> None:
        """Delete every segment of the partition, the open ones too."""
        self._delete(list(self._of_partition.get(partition, {}).values()))

    def holds(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Which of these offsets are in any segment of the partition."""
        found = OffsetSet()
        for segment in self._of_partition.get(partition, {}).values():
            found |= segment.known() & offsets
        return found

    def sizes(self, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]) -> dict[int, int]:
        """Line bytes of the wanted offsets, by every wanted partition.

        Raises:
            PartitionLost: a segment of a wanted partition is gone.
        """
        return {
            partition: sum(segment.size_of(mine) for segment, mine in self._shares(refs, partition, offsets))
            for partition, offsets in wanted.items()
        }

    async def stream(
        self, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]
    ) -> AsyncIterator[Sequence[tuple[int, int, bytes]]]:
        """(partition, offset, line) of the wanted offsets, by partition and then offset, in bounded chunks.

        An offset that stands in several of the segments comes once.

        Raises:
            PartitionLost: a segment of a wanted partition is gone, or went meanwhile.
            StoreUnavailable: a file cannot be read.
        """
        for partition in sorted(wanted):
            shares = self._shares(refs, partition, wanted[partition])
            async for lines in _merged(shares):
                for chunk in _chunks(lines):
                    yield [(partition, offset, line) for offset, line in chunk]

    async def read(self, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[Line]]:
        """(offset, line) of these offsets, ascending, in bounded chunks; what no segment has (any more) is absent.

        Raises:
            StoreUnavailable: a file cannot be read, or an open segment not be written.
        """
        refs = [segment.ref for segment in self._of_partition.get(partition, {}).values()]
        shares = self._shares(refs, partition, offsets)
        for segment, _ in shares:
            self._pending -= segment.flush()
        async for lines in _merged(shares, may_go=True):
            for chunk in _chunks(lines):
                yield chunk

    def _begin(self, key: BatchKey, partition: int) -> Segment:
        self._last_number += 1
        segment = Segment(SpoolRef(key.digest, partition, self._last_number), self._folder)
        self._open[key, partition] = segment
        self._segments[segment.ref.number] = segment
        self._of_partition.setdefault(partition, {})[segment.ref.number] = segment
        return segment

    def _add(self, segment: Segment, lines: Sequence[Line], size: int) -> None:
        offsets, bodies = zip(*lines, strict=True)
        segment.offsets.extend(offsets)
        segment.lengths.extend(map(len, bodies))
        segment.pending.extend(bodies)
        segment.size += size
        self.size += size
        self._pending += size

    def _take_back(self, segment: Segment, rows: int, size: int) -> None:
        del segment.offsets[-rows:]
        del segment.lengths[-rows:]
        del segment.pending[-rows:]
        segment.size -= size
        self.size -= size
        self._pending -= size

    def _relieve(self) -> None:
        """Write segments, the fullest first, until half the allowance is free: few large writes, not many small."""
        for segment in sorted(self._open.values(), key=lambda each: each.pending_bytes, reverse=True):
            if self._pending <= self._max_pending_bytes // 2:
                return
            self._pending -= segment.flush()

    def _delete(self, segments: Iterable[Segment]) -> None:
        trouble: OSError | None = None
        for segment in segments:
            self._forget(segment)
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:
                trouble = error
        for place in [place for place, segment in self._open.items() if segment.is_gone]:
            del self._open[place]
        if trouble is not None:
            raise StoreUnavailable(f"spool segment {trouble.filename}: {trouble.strerror}") from trouble

    def _forget(self, segment: Segment) -> None:
        segment.is_gone = True
        del self._segments[segment.ref.number]
        of_partition = self._of_partition[segment.ref.partition]
        del of_partition[segment.ref.number]
        if not of_partition:
            del self._of_partition[segment.ref.partition]
        self.size -= segment.size
        self._pending -= segment.pending_bytes

    def _shares(self, refs: Sequence[SpoolRef], partition: int, offsets: OffsetSet) -> list[tuple[Segment, OffsetSet]]:
        """The partition's segments among ``refs``, each with the offsets that are to come from it."""
        left = offsets.copy()
        shares = []
        # Of an offset's several lines the newest stands: it was spooled for the later submission.
        for ref in sorted({ref for ref in refs if ref.partition == partition}, key=lambda ref: -ref.number):
            segment = self._segments.get(ref.number)
            if segment is None:
                raise PartitionLost(partition, f"its spool segment {ref.number} is gone")
            if mine := segment.known() & left:
                left -= mine
                shares.append((segment, mine))
        return shares


class _Cursor:
    """Reads the wanted lines of one segment from its start to its end."""

    def __init__(self, segment: Segment, wanted: OffsetSet, may_go: bool) -> None:
        self._segment = segment
        self._wanted = wanted
        self._may_go = may_go
        self._left = len(wanted)
        self._row = 0
        self._position = 0
        self.first = wanted.first() or 0
        self.ready: Sequence[Line] = ()

    @property
    def is_read(self) -> bool:
        """Whether nothing is left to be read."""
        return not self._left

    async def fill(self, budget_bytes: int) -> None:
        """Read on if nothing is ready and something is left."""
        if not self.ready and self._left:
            self.ready = await asyncio.to_thread(self._read, budget_bytes)

    def take(self, bound: int) -> Sequence[Line]:
        """The ready lines up to this offset."""
        count = bisect_right(self.ready, bound, key=_offset_of)
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def _read(self, budget_bytes: int) -> list[Line]:
        """The next wanted lines that lie within ``budget_bytes`` of each other, at least one."""
        offsets, lengths, wanted = self._segment.offsets, self._segment.lengths, self._wanted
        picked: list[tuple[int, int, int]] = []
        row, position, left = self._row, self._position, self._left
        start = stop = position
        while left:
            offset, length = offsets[row], lengths[row]
            if offset in wanted:
                if not picked:
                    start = position
                elif position + length - start > budget_bytes:
                    break
                stop = position + length
                picked.append((offset, position, stop))
                left -= 1
            row += 1
            position += length
        self._row, self._position, self._left = row, position, left
        # Opened each time: a reader that is cancelled leaves its thread behind, which must then own what it uses.
        try:
            fd = os.open(self._segment.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                data = _read_exactly(fd, stop - start, start)
            finally:
                os.close(fd)
        except OSError as error:
            if self._segment.is_gone:
                return self._gone()
            raise StoreUnavailable(f"spool segment {self._segment.path}: {error.strerror}") from error
        return [(offset, data[begin - start : end - start]) for offset, begin, end in picked]

    def _gone(self) -> list[Line]:
        if not self._may_go:
            ref = self._segment.ref
            raise PartitionLost(ref.partition, f"its spool segment {ref.number} went while it was read")
        self._left = 0
        return []


def _read_exactly(fd: int, size: int, position: int) -> bytes:
    data = os.pread(fd, size, position)
    while len(data) < size:
        more = os.pread(fd, size - len(data), position + len(data))
        if not more:
            raise OSError(0, "the file is shorter than what was written to it")
        data += more
    return data


async def _merged(
    shares: Sequence[tuple[Segment, OffsetSet]], *, may_go: bool = False
) -> AsyncIterator[Sequence[Line]]:
    """The lines of several segments in order of offset; a segment is opened when its first line is due."""
    waiting = sorted((_Cursor(*share, may_go) for share in shares), key=lambda cursor: cursor.first)
    running: list[_Cursor] = []
    while True:
        running = [cursor for cursor in running if cursor.ready or not cursor.is_read]
        if not running:
            if not waiting:
                return
            running.append(waiting.pop(0))
        budget_bytes = max(MIN_READ_BYTES, READ_BYTES // len(running))
        while True:
            for cursor in running:
                await cursor.fill(budget_bytes)
            # Nothing smaller than this can come any more from those that run.
            unfinished = [cursor.ready[-1][0] for cursor in running if cursor.ready and not cursor.is_read]
            all_ready = [cursor.ready[-1][0] for cursor in running if cursor.ready]
            bound = min(unfinished) if unfinished else max(all_ready, default=-1)
            if not waiting or waiting[0].first > bound:
                break
            running.append(waiting.pop(0))
        taken = [lines for cursor in running if (lines := cursor.take(bound))]
        if len(taken) == 1:
            yield taken[0]
        elif taken:
            yield sorted((line for lines in taken for line in lines), key=_offset_of)


def _chunks(lines: Sequence[Line]) -> Iterator[Sequence[Line]]:
    start = size = 0
    for end, (_, line) in enumerate(lines):
        if end > start and (size + len(line) > CHUNK_BYTES or end - start >= CHUNK_LINES):
            yield lines[start:end]
            start, size = end, 0
        size += len(line)
    if start < len(lines):
        yield lines[start:]
