"""The long poll: a fetch that waits at the broker until one of its partitions has something new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from batchferry.simulator.kafka.log import PartitionLog
from batchferry.simulator.kafka.records import Refused, StoredRecord

T = TypeVar("T")
Place = tuple[str, int]
"""Topic and partition."""
_NOTHING: Final = object()


class Deferred(Generic[T]):
    """An answer the broker gives later: one value, one listener."""

    __slots__ = ("_listener", "_value")

    def __init__(self) -> None:
        self._value: T | object = _NOTHING
        self._listener: Callable[[T], None] | None = None

    @property
    def is_set(self) -> bool:
        """Whether the answer has been given."""
        return self._value is not _NOTHING

    def set(self, value: T) -> None:
        """Give the answer; a second one is passed over."""
        if self.is_set:
            return
        self._value = value
        if self._listener is not None:
            self._listener(value)

    def then(self, listener: Callable[[T], None]) -> None:
        """Call this with the answer, at once if it is there."""
        self._listener = listener
        if self._value is not _NOTHING:
            listener(self._value)  # type: ignore[arg-type]  # not the mark, so a T


class Fetched(NamedTuple):
    """What a fetch found in one partition."""

    records: Sequence[StoredRecord]
    position: int
    """Where to read on: behind the records, and behind markers and gaps after them."""
    is_out_of_range: bool = False


class Fetch(Deferred[Mapping[Place, Fetched]]):
    """One fetch request at the broker."""

    __slots__ = ("_max_records", "_positions", "_resolve", "_watched")

    def __init__(
        self, resolve: Callable[[str, int], PartitionLog], positions: Mapping[Place, int], max_records: int
    ) -> None:
        super().__init__()
        self._resolve = resolve
        self._positions = positions
        self._max_records = max_records
        self._watched: list[PartitionLog] = []

    def begin(self) -> Fetch:
        """Answer at once if there is anything, else wait in the logs."""
        if not self.look():
            for topic, partition in self._positions:
                try:
                    log = self._resolve(topic, partition)
                except Refused:
                    continue
                log.waiters[self] = None
                self._watched.append(log)
        return self

    def look(self) -> bool:
        """Answer if any partition has records, a position behind markers, or no such position."""
        found: dict[Place, Fetched] = {}
        room = self._max_records
        for place, position in self._positions.items():
            try:
                log = self._resolve(*place)
            except Refused:  # deleted, and perhaps made anew in a moment
                continue
            try:
                records, after = log.read(position, room)
            except Refused:
                found[place] = Fetched((), position, is_out_of_range=True)
                continue
            room -= len(records)
            if after != position:
                found[place] = Fetched(records, after)
        if not found:
            return False
        self.drop()
        self.set(found)
        return True

    def drop(self) -> None:
        """Wait no more."""
        for log in self._watched:
            log.waiters.pop(self, None)
        self._watched.clear()


class StableWait(Fetch):
    """Waits until everything below an offset is stable, then picks single records."""

    __slots__ = ("_offsets", "_place")

    def __init__(self, resolve: Callable[[str, int], PartitionLog], place: Place, offsets: Sequence[int]) -> None:
        super().__init__(resolve, {place: 0}, 0)
        self._place = place
        self._offsets = offsets

    def look(self) -> bool:
        """Answer when the last offset asked for is stable, or is not in the log."""
        log = self._resolve(*self._place)
        last = self._offsets[-1]
        if log.stable_end <= last < log.end:
            return False
        self.drop()
        self.set({self._place: Fetched(log.pick(self._offsets), last + 1)})
        return True
