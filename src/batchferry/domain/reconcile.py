"""Result lines against the lots of a batch: whose line is this, and which rows are nowhere.

The truth about a batch is the join of the rows we sent with the lines of both result files; counters, order
and the ending of the file prove nothing. This class keeps that join for the lots that one process owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from batchferry.domain.ids import LedgerId, WireId, parse_wire_id
from batchferry.domain.ledger import Lot
from batchferry.domain.offsets import OffsetSet


class Whose(StrEnum):
    """To whom a result line belongs."""

    OURS = "ours"
    """A row of a lot this process owns, seen for the first time."""
    AGAIN = "again"
    """The same, but an earlier line has already named the row."""
    SIBLING = "sibling"
    """A row of a partition that another replica owns, of its lot as far as that is known; it reads the same files."""
    FOREIGN = "foreign"
    """Not of this batch: another environment's id, another partition, or not an id of ours at all."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a wire id turned out to be; ``wire`` is None when the text is no wire id."""

    whose: Whose
    wire: WireId | None


class Reconciliation:
    """The join of one batch's lots with its result lines; bounded by the rows of the lots."""

    def __init__(
        self,
        lots: Mapping[int, Lot],
        ledger_ids: Mapping[int, LedgerId],
        siblings: Mapping[int, Lot] = MappingProxyType({}),
    ) -> None:
        """Take the lots this process owns, by partition, and their ledgers' ids.

        Args:
            lots: all of one batch.
            ledger_ids: of the same partitions, and of others as far as they are known: there they tell another
                environment's rows from a sibling's.
            siblings: the batch's lots in partitions of others, as far as they are known.
        """
        # A lot that was cleaned up names no rows any more, and tells nothing.
        self._siblings = {p: lot for p, lot in siblings.items() if p not in lots and lot.offsets}
        self._lots = dict(lots)
        self._ledger_ids = dict(ledger_ids)
        self._all_partitions = frozenset(p for lot in lots.values() for p in lot.partitions)
        self._by_head = {f"{self._ledger_ids[p]}-{p}": p for p in lots if p in self._ledger_ids}
        self._seen = {partition: OffsetSet() for partition in lots}
        self.lines = 0
        self.foreign = 0
        self.again = 0
        self.siblings = 0
        self.is_proven = False
        """A line was of a row that a lot of this batch names: the result files are of this batch. A sibling's line of
        which no lot is known does not say so."""

    def match(self, wire_id: str) -> Match:
        """Say whose line this is, and remember that its row was seen."""
        self.lines += 1
        head, _, submission = wire_id.rpartition("-")
        mine, _, offset_text = head.rpartition("-")
        partition = self._by_head.get(mine)
        # The usual case first, without taking the whole id apart: this runs for every line of every batch.
        if partition is not None and offset_text.isdecimal() and submission.isdecimal() and wire_id.isascii():
            wire: WireId | None = WireId(self._ledger_ids[partition], partition, int(offset_text), int(submission))
        else:
            wire = parse_wire_id(wire_id)
        if wire is None or wire.partition not in self._all_partitions:
            self.foreign += 1
            return Match(Whose.FOREIGN, wire)
        lot = self._lots.get(wire.partition)
        if lot is None:
            sibling = self._siblings.get(wire.partition)
            ledger_id = self._ledger_ids.get(wire.partition)
            is_anothers = ledger_id is not None and wire.ledger_id != ledger_id
            if is_anothers or (sibling is not None and wire.offset not in sibling.offsets):
                self.foreign += 1
                return Match(Whose.FOREIGN, wire)
            self.siblings += 1
            self.is_proven = self.is_proven or (sibling is not None and ledger_id is not None)
            return Match(Whose.SIBLING, wire)
        if wire.ledger_id != self._ledger_ids[wire.partition] or wire.offset not in lot.offsets:
            self.foreign += 1
            return Match(Whose.FOREIGN, wire)
        self.is_proven = True
        seen = self._seen[wire.partition]
        if wire.offset in seen:
            self.again += 1
            return Match(Whose.AGAIN, wire)
        seen.add(wire.offset)
        return Match(Whose.OURS, wire)

    def absent(self, partition: int) -> OffsetSet:
        """Rows of our lot in this partition that no line has named."""
        return self._lots[partition].offsets - self._seen[partition]

    @property
    def absent_rows(self) -> int:
        """How many rows of all our lots no line has named."""
        return sum(len(self.absent(partition)) for partition in self._lots)
