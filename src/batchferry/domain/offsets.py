"""Sets of Kafka offsets, kept as 64-bit roaring bitmaps.

An offset set of a whole batch costs a few bytes when offsets are contiguous and at most two bytes an offset
when they are scattered, which is what lets one ledger record name 50,000 rows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Self

from pyroaring import BitMap64

BLOCK_SHIFT = 16
BLOCK_SIZE = 1 << BLOCK_SHIFT
"""Offsets in one settled block: a full block is one roaring container, so at most 8 KB."""


class OffsetSet:
    """A mutable set of offsets; compares and serialises by content."""

    __slots__ = ("_bits",)

    def __init__(self, offsets: Iterable[int] | BitMap64 = ()) -> None:
        self._bits = offsets.copy() if isinstance(offsets, BitMap64) else BitMap64(offsets)

    @classmethod
    def span(cls, start: int, stop: int) -> OffsetSet:
        """The offsets ``start`` up to but excluding ``stop``."""
        made = cls()
        if stop > start:
            made._bits.add_range(start, stop)
        return made

    def __len__(self) -> int:
        return len(self._bits)

    def __bool__(self) -> bool:
        return bool(self._bits)

    def __iter__(self) -> Iterator[int]:
        return iter(self._bits)

    def __contains__(self, offset: object) -> bool:
        return isinstance(offset, int) and offset >= 0 and offset in self._bits

    def __eq__(self, other: object) -> bool:
        return self._bits == other._bits if isinstance(other, OffsetSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        if not self._bits:
            return "OffsetSet()"
        return f"OffsetSet({len(self._bits)} offsets in {self._bits.min()}..{self._bits.max()})"

    def __or__(self, other: OffsetSet) -> OffsetSet:
        return _wrap(self._bits | other._bits)

    def __and__(self, other: OffsetSet) -> OffsetSet:
        return _wrap(self._bits & other._bits)

    def __sub__(self, other: OffsetSet) -> OffsetSet:
        return _wrap(self._bits - other._bits)

    def __ior__(self, other: OffsetSet) -> Self:
        self._bits |= other._bits
        return self

    def __isub__(self, other: OffsetSet) -> Self:
        self._bits -= other._bits
        return self

    def copy(self) -> OffsetSet:
        """An independent set with the same offsets."""
        return OffsetSet(self._bits)

    def add(self, offset: int) -> None:
        """Put one offset in; twice is once."""
        self._bits.add(offset)

    def update(self, offsets: Iterable[int]) -> None:
        """Put many offsets in."""
        self._bits.update(offsets)

    def discard(self, offset: int) -> None:
        """Take one offset out if it is there."""
        self._bits.discard(offset)

    def discard_below(self, offset: int) -> None:
        """Take out every offset smaller than ``offset``."""
        if self._bits and self._bits.min() < offset:
            self._bits.remove_range(0, offset)

    def first(self) -> int | None:
        """The smallest offset, or None when empty."""
        return self._bits.min() if self._bits else None

    def last(self) -> int | None:
        """The largest offset, or None when empty."""
        return self._bits.max() if self._bits else None

    def isdisjoint(self, other: OffsetSet) -> bool:
        """Whether no offset is in both."""
        return self._bits.isdisjoint(other._bits)

    def issubset(self, other: OffsetSet) -> bool:
        """Whether every offset of this set is in the other."""
        return self._bits.issubset(other._bits)

    def count_within(self, start: int, stop: int) -> int:
        """How many offsets lie in ``start`` up to but excluding ``stop``."""
        return self._bits.range_cardinality(start, stop) if stop > start else 0

    def within(self, start: int, stop: int) -> OffsetSet:
        """The offsets that lie in ``start`` up to but excluding ``stop``."""
        if stop - start <= BLOCK_SIZE:
            return self & OffsetSet.span(start, stop)
        bits = self._bits.copy()  # the cost of a long span grows with its length, however few offsets are in it
        bits.remove_range(0, start)
        if bits and bits.max() >= stop:
            bits.remove_range(stop, bits.max() + 1)
        return _wrap(bits)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The contiguous runs as (start, stop), ascending."""
        start = previous = None
        for offset in self._bits:
            if previous is None or start is None:
                start = offset
            elif offset != previous + 1:
                yield start, previous + 1
                start = offset
            previous = offset
        if start is not None and previous is not None:
            yield start, previous + 1

    def rank_below(self, offset: int) -> int:
        """How many offsets are smaller than ``offset``: the 0-based line of ``offset`` in a sorted segment."""
        return self._bits.rank(offset - 1) if offset > 0 else 0

    def nth(self, index: int) -> int:
        """The offset at 0-based ``index`` in ascending order.

        Raises:
            IndexError: there is no such offset.
        """
        return self._bits[index]

    def dumps(self) -> str:
        """Base64 of the portable 64-bit roaring format (run-optimised)."""
        bits = self._bits.copy()
        bits.run_optimize()
        return base64.b64encode(bits.serialize()).decode("ascii")

    @classmethod
    def loads(cls, text: str) -> OffsetSet:
        """Read back what ``dumps`` wrote.

        Raises:
            ValueError: the text is not a serialised offset set.
        """
        try:
            return _wrap(BitMap64.deserialize(base64.b64decode(text, validate=True)))
        except Exception as error:  # pyroaring raises several kinds for a damaged buffer
            raise ValueError("not a serialised offset set") from error


def _wrap(bits: BitMap64) -> OffsetSet:
    made = OffsetSet.__new__(OffsetSet)
    made._bits = bits  # noqa: SLF001 (the class's own constructor without the copy)
    return made
