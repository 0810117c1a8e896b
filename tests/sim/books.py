"""What must be true at every moment, and what must be true at the end.

The books hear every committed record and every act at the provider, keep their own copy of each ledger, and say what
was broken the moment it is broken.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchferry.domain.ids import parse_wire_id
from batchferry.domain.ledger import (
    UNCERTAIN,
    Claim,
    Lane,
    LedgerHeader,
    Lot,
    LotState,
    SettledBlock,
    Watermark,
    decode,
)
from batchferry.domain.offsets import BLOCK_SHIFT, OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.simulator.kafka import StoredRecord
from batchferry.simulator.state import Status
from sim.families import our_batch_id

MAX_LEDGER_RECORD_BYTES = 16 * 1024
FENCE_S = 30.0
"""Real seconds: what is done once a batch follows a transaction of the leader at most so old."""
WIRE_S = 2.0
"""Real seconds a call may be under way."""


NEVER_RUN = frozenset({"account", "batch_failed"})
"""Classes of rows that travel again without having been run."""
_WHERE = re.compile(rb"kind/\w+/ (\d+)/(\d+)")


def where_of(body: bytes) -> tuple[int, int] | None:
    """Which input record a request body is from."""
    found = _WHERE.search(body)
    return None if found is None else (int(found[1]), int(found[2]))


@dataclass
class Request:
    """One input record."""

    partition: int
    offset: int
    custom_id: str
    kind: str
    body: bytes = b""
    outcomes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def where(self) -> tuple[int, int]:
        return self.partition, self.offset


class Books:
    """The checker of one life."""

    def __init__(
        self,
        topics: dict[str, str],
        now_s: Callable[[], float],
        note: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        self.topics = topics
        self.requests: dict[tuple[int, int], Request] = {}
        self.ledgers: dict[int, PartitionLedger] = {}
        self.ledger_ids: dict[int, str] = {}
        self.claims: dict[int, list[tuple[float, str]]] = defaultdict(list)
        """(when, incarnation), oldest first."""
        self.control: Counter[str] = Counter()
        self.outcomes = 0
        self.wires: dict[str, str] = {}
        """The input file that carries each wire id that was ever in a created batch."""
        self.running: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        """Provider batches by row."""
        self.recorded: set[str] = set()
        """The provider's ids that stand in the ledger of any partition, or did."""
        self.found: dict[tuple[int, int], set[str]] = defaultdict(set)
        """Provider batches by row that a lot with this row has named."""
        self.recorded_lots: set[str] = set()
        """Our batches for which such an id stands there, or did."""
        self.uncertain: set[str] = set()
        """Those of them that were only taken for ours."""
        self.lines: dict[str, list[tuple[int, int]]] = {}
        self.wave_rows = 50
        """The most rows that a wave may have."""
        self.waves: Counter[tuple[int, int]] = Counter()
        """Waves that name each row."""
        self.sync_calls: Counter[tuple[int, int]] = Counter()
        """Calls of the sync lane that reached the provider, by row."""
        self.sync_lost: Counter[tuple[int, int]] = Counter()
        """Those that were carried out and whose answers nobody got."""
        self.rescued: Counter[tuple[int, int]] = Counter()
        """How often each row was taken out of a living batch."""
        self.retried_sync: Counter[tuple[int, int]] = Counter()
        """How often each row goes again because a call of the lane did not bring its answer."""
        self.lost_in_waves: Counter[tuple[int, int]] = Counter()
        """How often each row was in a wave that its process did not live to end."""
        self.wave_owners: dict[str, str] = {}
        """The process that wrote each wave."""
        self.is_fenced = True
        """Whether every create without an answer can be made to fail before its rows go again."""
        self.taken_away: set[str] = set()
        """The provider's ids of batches that somebody else has deleted."""
        self.deleted_below: dict[int, int] = {}
        """Below which offset the input was deleted, by partition."""
        self._now_s = now_s
        self._note = note
        self._fail = fail
        self._step: dict[int, list[StoredRecord]] = {}
        self._is_closing = False

    # ----------------------------------------------------------------------------------------------- Kafka

    def add(self, request: Request) -> None:
        """An input record was written."""
        self.requests[request.where] = request

    def hear(self, topic: str, partition: int, records: Sequence[StoredRecord]) -> None:
        """Records became visible. They are looked at together with the others of their transaction."""
        for record in records:
            self._step.setdefault(id(record.transaction) if record.transaction else 0, []).append(record)
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._close)

    def _close(self) -> None:
        self._is_closing = False
        step, self._step = self._step, {}
        for number, records in step.items():
            self._transaction(records, is_plain=number == 0)

    def _transaction(self, records: Sequence[StoredRecord], *, is_plain: bool) -> None:
        outcomes: dict[tuple[int, int], dict[str, Any]] = {}
        ledger_records: dict[int, list[StoredRecord]] = {}
        missed: Counter[tuple[int, int]] = Counter()
        for record in records:
            if record.topic in {self.topics["results"], self.topics["failures"]}:
                said = json.loads(record.value or b"{}")
                source = said["source"]
                where = (source["partition"], source["offset"])
                if where in outcomes:
                    self._fail(f"two outcomes of {where} in one transaction")
                outcomes[where] = said
            elif record.topic == self.topics["ledger"]:
                ledger_records.setdefault(record.partition, []).append(record)
            elif record.topic == self.topics["events"]:
                self._event(json.loads(record.value or b"{}"), missed)
            elif record.topic == self.topics["control"] and record.key is not None:
                self.control[record.key.decode().split("/")[0]] += 1
        if is_plain and (outcomes or ledger_records):
            self._fail("an outcome or a ledger record outside a transaction")
        late = {where for where, said in outcomes.items() if said["deadline_met"] is False}
        if late != missed.keys() or max(missed.values(), default=1) > 1:
            self._fail(f"the late outcomes {sorted(late)} and the deadline_missed event of {sorted(missed)} differ")
        if len({partition for partition, _ in outcomes} | ledger_records.keys()) > 1:
            self._fail("a transaction about two partitions")
        for partition in {partition for partition, _ in outcomes} | ledger_records.keys():
            self._partition(partition, outcomes, ledger_records.get(partition, []))

    def _event(self, event: dict[str, Any], missed: Counter[tuple[int, int]]) -> None:
        kind = event["kind"]
        if kind not in {"deadline_missed", "rescued", "retried"}:
            return
        rows = [(event["partition"], offset) for offset in OffsetSet.loads(event["offsets"])]
        if kind == "deadline_missed":
            missed.update(rows)
            if event["rows"] != len(rows):
                self._fail(f"a deadline_missed event of {event['rows']} rows names {len(rows)} offsets")
        elif event["reason"] == "rescue":
            self.rescued.update(rows)
        elif event["reason"] == "crash":
            self.lost_in_waves.update(rows)
        elif event["reason"] == "sync" and not event["classes"].keys() <= NEVER_RUN:
            self.retried_sync.update(rows)

    def _partition(
        self, partition: int, outcomes: dict[tuple[int, int], dict[str, Any]], records: Sequence[StoredRecord]
    ) -> None:
        ledger = self.ledgers.setdefault(partition, PartitionLedger(partition))
        had_watermark, watermark, settled = ledger.has_watermark, ledger.watermark, ledger.settled.copy()
        for where, said in outcomes.items():
            self._outcome(ledger, where, said)
        for record in records:
            self._ledger_record(ledger, record)
        fresh = (OffsetSet.span(watermark, ledger.watermark) if had_watermark else OffsetSet()) - settled
        fresh |= ledger.settled - settled
        fresh.discard_below(watermark)
        marked = {(partition, offset) for offset in fresh if (partition, offset) in self.requests}
        for where in sorted(marked - outcomes.keys()):
            self._fail(f"{where} was marked as settled without its outcome in the same transaction")
        for where in sorted(outcomes.keys() - marked):
            self._fail(f"{where} got an outcome and was not marked as settled in the same transaction")

    def _outcome(self, ledger: PartitionLedger, where: tuple[int, int], said: dict[str, Any]) -> None:
        request = self.requests.get(where)
        if request is None:
            self._fail(f"an outcome for {where}, where nothing was asked")
            return
        request.outcomes.append(said)
        self.outcomes += 1
        if len(request.outcomes) > 1:
            self._fail(f"{where} got a second outcome")
        if said.get("custom_id") not in {request.custom_id, None} and request.kind != "bad":
            self._fail(f"{where} got the outcome of custom_id {said.get('custom_id')!r}")
        if said["kind"] != "result" and (said.get("wire_id") or said.get("submission")):
            holder = ledger.holder_of(where[1])
            submission = said.get("submission")
            if holder is not None and submission is not None and submission != holder.submission:
                self._fail(f"{where} failed by submission {submission} while submission {holder.submission} holds it")

    def _ledger_record(self, ledger: PartitionLedger, record: StoredRecord) -> None:
        partition = ledger.partition
        if record.key is None:
            self._fail("a ledger record without a key")
            return
        size = len(record.value or b"")
        if size > MAX_LEDGER_RECORD_BYTES:
            self._fail(f"a ledger record of {size} bytes")
        entry = decode(record.key, record.value)
        match entry:
            case LedgerHeader(ledger_id):
                if self.ledger_ids.setdefault(partition, ledger_id) != ledger_id:
                    self._fail(f"partition {partition} has another ledger id")
            case Claim(incarnation):
                self.claims[partition].append((self._now_s(), incarnation))
                self.claims[partition][:-20] = []
            case Watermark(offset):
                if not ledger.has_watermark:
                    self._forget_unseen(partition, offset)
                if ledger.has_watermark and offset < ledger.watermark:
                    self._fail(f"the watermark of {partition} went back from {ledger.watermark} to {offset}")
            case SettledBlock(block, offsets):
                strange = [offset for offset in offsets if offset >> BLOCK_SHIFT != block]
                if strange:
                    self._fail(f"block {block} of partition {partition} holds offsets of others: {strange[:3]}")
            case Lot():
                self._lot(ledger, entry, record.transaction.owner if record.transaction else "")
        if entry is not None:
            ledger.apply(entry)

    def _forget_unseen(self, partition: int, first: int) -> None:
        """Records that retention deleted before the service ever looked at the partition were never its own."""
        for where in [one for one in self.requests if one[0] == partition and one[1] < first]:
            if where[1] >= self.deleted_below.get(partition, 0):
                self._fail(f"the first watermark {first} of partition {partition} lies above {where}, which is there")
            del self.requests[where]

    def _lot(self, ledger: PartitionLedger, lot: Lot, owner: str) -> None:
        known = ledger.lots.get(lot.lot_id)
        if lot.lane is Lane.SYNC:
            self._sync_lot(ledger, lot, known, owner)
        self.recorded.update(lot.provider_batch_ids)
        for offset in lot.offsets if lot.provider_batch_ids else ():
            self.found[ledger.partition, offset].update(lot.provider_batch_ids)
        if lot.provider_batch_ids:
            self.recorded_lots.add(lot.lot_id)
        if lot.extra.get(UNCERTAIN):
            self.uncertain.update(lot.provider_batch_ids)
        if lot.lane is not Lane.SYNC and lot.state is LotState.SUBMITTING and lot.input_file_id is None:
            self._fail(f"lot {lot.lot_id} is SUBMITTING and names no input file")
        if (
            known is not None
            and known.state in {LotState.DONE, LotState.CLEAN}
            and lot.state
            in {
                LotState.SUBMITTING,
                LotState.SUBMITTED,
                LotState.WAITING,
            }
        ):
            self._fail(f"lot {lot.lot_id} went from {known.state} back to {lot.state}")
        for offset in lot.offsets:
            if (ledger.partition, offset) not in self.requests:
                self._fail(f"lot {lot.lot_id} names offset {offset}, where nothing was asked")

    def _sync_lot(self, ledger: PartitionLedger, lot: Lot, known: Lot | None, owner: str) -> None:
        """A wave, or rows that wait for one."""
        if lot.state is LotState.WAITING:
            return
        if lot.state is not LotState.SUBMITTING or known is not None:
            self._fail(f"wave {lot.lot_id} is {lot.state} after {known and known.state}")
        if len(lot.offsets) > self.wave_rows:
            self._fail(f"wave {lot.lot_id} has {len(lot.offsets)} rows, more than {self.wave_rows}")
        self.wave_owners[lot.lot_id] = owner
        for offset in lot.offsets:
            self.waves[ledger.partition, offset] += 1

    # -------------------------------------------------------------------------------------------- provider

    def called(self, body: bytes) -> None:
        """A call of the sync lane reached the provider: each wave that names a row is worth one."""
        where = where_of(body)
        if where is None or where not in self.requests:
            self._fail(f"a call for {where}, where nothing was asked")
            return
        self.sync_calls[where] += 1
        if self.sync_calls[where] > self.waves[where]:
            self._fail(f"call {self.sync_calls[where]} for {where}, which {self.waves[where]} waves name")

    def lost(self, body: bytes) -> None:
        """A call of the sync lane was carried out, and its answer reached nobody."""
        where = where_of(body)
        if where is not None:
            self.sync_lost[where] += 1

    def created(self, batch: Any, content: bytes, made_of: str) -> None:
        """The provider made a batch; ``made_of`` names the file, or whatever else it was made of."""
        rows = []
        for line in content.split(b"\n"):
            if not line:
                continue
            wire_id = json.loads(line)["custom_id"]
            wire = parse_wire_id(wire_id)
            if wire is None:
                self._fail(f"wire id {wire_id!r} is not one")
                continue
            known = self.ledger_ids.get(wire.partition)
            if known != wire.ledger_id:
                self._fail(f"wire id {wire_id} carries a ledger id that partition {wire.partition} does not have")
            before = self.wires.setdefault(wire_id, made_of)
            if before != made_of:
                self._fail(f"wire id {wire_id} is in two files that became batches")
            where = (wire.partition, wire.offset)
            for other in self.running[where].values():
                if not other.status.is_terminal and self.is_fenced:  # else the bill tells at the end
                    self._fail(f"{where} is in batch {batch.id} while batch {other.id} still has it")
            self.running[where][batch.id] = batch
            rows.append(where)
        self.lines[batch.id] = rows

    def times_ended(self, where: tuple[int, int], status: Status) -> int:
        """How many batches with this row ended so."""
        return sum(batch.status is status for batch in self.running[where].values())

    def lots_of(self, batch: Any) -> dict[int, Lot]:
        """The lots of a provider batch, by partition; where the provider keeps no name of ours, by its own id."""
        wanted = our_batch_id(batch)
        found = [
            (partition, lot)
            for partition, ledger in self.ledgers.items()
            for lot in ledger.lots.values()
            if (
                lot.lot_id == wanted
                if wanted is not None
                else batch.id in lot.provider_batch_ids
                and any(row in lot.offsets for at, row in self.lines.get(batch.id, ()) if at == partition)
            )
        ]
        # Whoever only took it for his has no part in it, once it is known whose it is.
        known = [(partition, lot) for partition, lot in found if not lot.extra.get(UNCERTAIN)]
        return dict(known or found)

    def live_lots_of(self, batch: Any) -> list[Lot]:
        """The lots of a provider batch that have not been cleaned up."""
        return [lot for lot in self.lots_of(batch).values() if lot.state is not LotState.CLEAN]

    def strays(self, where: tuple[int, int]) -> int:
        """Batches with this row that were made, and that nobody who looked after the row has found."""
        return sum(batch_id not in self.found[where] for batch_id in self.running[where])

    def vanished(self, where: tuple[int, int]) -> int:
        """Batches with this row that somebody else has deleted, perhaps before all their owners had read them."""
        return sum(batch_id in self.taken_away for batch_id in self.running[where])

    def led_by(self, partition: int, incarnation_of: Callable[[str], str]) -> set[str]:
        """Names of the processes that may act for this partition now, or did a moment ago."""
        now_s = self._now_s()
        claims = self.claims[partition]
        names = set()
        for number, (at_s, incarnation) in enumerate(claims):
            ended_s = claims[number + 1][0] if number + 1 < len(claims) else now_s
            if ended_s >= now_s - FENCE_S - WIRE_S or at_s >= now_s - FENCE_S - WIRE_S:
                names.add(incarnation_of(incarnation))
        return names

    # ------------------------------------------------------------------------------------------- at the end

    def open_requests(self) -> list[Request]:
        """Requests without an outcome."""
        return [request for request in self.requests.values() if not request.outcomes]

    def live_lots(self) -> list[Lot]:
        """Lots that are not CLEAN."""
        return [
            lot for ledger in self.ledgers.values() for lot in ledger.lots.values() if lot.state is not LotState.CLEAN
        ]
