"""The bill: which row was run how often, by batch and by sync call.

A row has two names here: the ``custom_id`` it had in its batch file, and the identity of its body
(``body_digest``), which stays the same when a retry gives the row another custom_id.

*Run* means that the model was asked. *Paid* means that it answered with something that costs money: rows that
ended in an error were run and are not paid. Rows an expired or cancelled batch did not reach were neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple

from batchferry.simulator.jsontext import body_digest


class RunKind(IntEnum):
    """What was done for a row."""

    NOT_RUN = 0
    """Its turn came and the script let it lapse: it counts as an attempt only."""
    RUN = 1
    PAID = 2


class Run(NamedTuple):
    """One row's turn. ``wire_id`` is the custom_id, None in a sync call; ``digest`` is hex."""

    wire_id: str | None
    digest: str
    kind: RunKind
    input_tokens: int = 0
    output_tokens: int = 0
    model: str = ""


class RowCount(NamedTuple):
    """How often a row was run."""

    batch_runs: int
    sync_runs: int
    paid_runs: int


_FIELD_BITS = 32
_MASK = (1 << _FIELD_BITS) - 1
_BATCH, _SYNC, _PAID, _ATTEMPTS = 1, 1 << _FIELD_BITS, 1 << 2 * _FIELD_BITS, 1 << 3 * _FIELD_BITS


def _unpack(packed: int) -> RowCount:
    return RowCount(packed & _MASK, packed >> _FIELD_BITS & _MASK, packed >> 2 * _FIELD_BITS & _MASK)


class Bill:
    """Counts every run. About 200 bytes of memory a row, so a million rows cost some 200 MB."""

    def __init__(self) -> None:
        # Counters are packed into one integer a row: four fields of 32 bits. A million tuples would cost twice that.
        self._bodies: dict[int, int] = {}
        self._wires: dict[str, int] = {}
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        self._runs: Counter[str] = Counter()

    def add_batch(self, runs: Iterable[Run]) -> None:
        """Book the rows one batch ran. Equal bodies in one batch are one attempt."""
        attempted: set[int] = set()
        for run in runs:
            key = self._book("batch", run, _BATCH)
            if key not in attempted:
                attempted.add(key)
                self._bodies[key] += _ATTEMPTS

    def add_sync(self, run: Run) -> None:
        """Book one sync call."""
        self._bodies[self._book("sync", run, _SYNC)] += _ATTEMPTS

    def _book(self, lane: str, run: Run, unit: int) -> int:
        key = _key(run.digest)
        added = 0
        if run.kind is not RunKind.NOT_RUN:
            paid = run.kind is RunKind.PAID
            added = unit + (_PAID if paid else 0)
            self._runs[f"{lane}_runs"] += 1
            if paid:
                self._runs[f"{lane}_paid_runs"] += 1
                self._tokens[lane, run.model, "input_tokens"] += run.input_tokens
                self._tokens[lane, run.model, "output_tokens"] += run.output_tokens
        self._bodies[key] = self._bodies.get(key, 0) + added
        if run.wire_id is not None and added:
            self._wires[run.wire_id] = self._wires.get(run.wire_id, 0) + added
        return key

    def attempts(self, digest: str) -> int:
        """How many batches and sync calls have had this body's turn."""
        return self._bodies.get(_key(digest), 0) >> 3 * _FIELD_BITS

    def body(self, body: bytes | str | dict[str, Any]) -> RowCount:
        """How often the row with this body was run."""
        return self.body_of_digest(body_digest(body))

    def body_of_digest(self, digest: str) -> RowCount:
        """How often the row whose body has this hex SHA-256 was run."""
        return _unpack(self._bodies.get(_key(digest), 0))

    def runs_of_body(self, body: bytes | str | dict[str, Any]) -> int:
        """How often the row with this body was run, by batch and sync together."""
        count = self.body(body)
        return count.batch_runs + count.sync_runs

    def paid_runs_of_body(self, body: bytes | str | dict[str, Any]) -> int:
        """How often the row with this body was paid."""
        return self.body(body).paid_runs

    def wire(self, wire_id: str) -> RowCount:
        """How often the row with this custom_id was run."""
        return _unpack(self._wires.get(wire_id, 0))

    def page(self, start: int, limit: int) -> list[tuple[str, RowCount]]:
        """Custom ids ``start`` (0-based, in the order of their first run) up to ``limit`` of them."""
        return [(wire_id, _unpack(packed)) for wire_id, packed in islice(self._wires.items(), start, start + limit)]

    def rows(self) -> Iterator[tuple[str, RowCount]]:
        """Every custom id with its counts. Do not let runs be booked meanwhile."""
        return ((wire_id, _unpack(packed)) for wire_id, packed in self._wires.items())

    def summary(self) -> dict[str, Any]:
        """Totals: runs by lane, tokens by lane and model, and how many rows were paid how often."""
        tokens: dict[str, dict[str, dict[str, int]]] = {}
        for (lane, model, what), count in sorted(self._tokens.items()):
            tokens.setdefault(lane, {}).setdefault(model, {})[what] = count
        return {
            "batch_runs": self._runs["batch_runs"],
            "sync_runs": self._runs["sync_runs"],
            "batch_paid_runs": self._runs["batch_paid_runs"],
            "sync_paid_runs": self._runs["sync_paid_runs"],
            "distinct_wire_ids": len(self._wires),
            "distinct_bodies": len(self._bodies),
            "bodies_by_paid_runs": _histogram(self._bodies.values()),
            "wire_ids_by_paid_runs": _histogram(self._wires.values()),
            "tokens": tokens,
        }


def _key(digest: str) -> int:
    return int(digest[:16], 16)


def _histogram(packed: Iterable[int]) -> dict[str, int]:
    counts = Counter(_unpack(one).paid_runs for one in packed)
    return {str(paid): rows for paid, rows in sorted(counts.items())}
