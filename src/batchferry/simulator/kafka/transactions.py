"""The transaction coordinator: who owns a transactional id, and what is done in its name."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from batchferry.simulator.kafka.records import (
    FinishedTransaction,
    OpenTransaction,
    Refused,
    StoredRecord,
    Transaction,
    TransactionState,
    fenced,
)

if TYPE_CHECKING:
    from batchferry.simulator.kafka.cluster import SimCluster
    from batchferry.simulator.kafka.log import PartitionLog

WAIT_AGAIN_S: Final = 1.0
"""While the broker is away its own timers wait too; they look again after this."""


class _Identity:
    """One transactional id."""

    __slots__ = ("ended", "epoch", "last", "open", "owner", "timeout_s")

    def __init__(self) -> None:
        self.epoch = -1
        self.timeout_s = 0.0
        self.owner = ""
        self.open: Transaction | None = None
        self.ended = 0
        """Number of the last transaction of this epoch that has ended."""
        self.last: TransactionState | None = None


class TransactionCoordinator:
    """Every transactional id of the cluster. All methods take effect in one step."""

    def __init__(self, cluster: SimCluster, abort_check_s: float, most_finished: int) -> None:
        self._cluster = cluster
        self._abort_check_s = abort_check_s
        self._ids: dict[str, _Identity] = {}
        self.finished: deque[FinishedTransaction] = deque(maxlen=most_finished)

    def init(self, transactional_id: str, owner: str, timeout_s: float) -> int:
        """Make ``owner`` the only one who may use the id, end the predecessor's transaction; the new epoch."""
        identity = self._ids.setdefault(transactional_id, _Identity())
        if identity.open is not None:
            self._end(identity, identity.open, TransactionState.ABORTED, f"a successor, {owner}")
        identity.epoch += 1
        identity.owner = owner
        identity.timeout_s = timeout_s
        identity.ended = 0
        identity.last = None
        self._cluster.note(f"init {transactional_id} epoch {identity.epoch} by {owner}")
        return identity.epoch

    def append(
        self, transactional_id: str, epoch: int, number: int, records: Mapping[PartitionLog, Sequence[StoredRecord]]
    ) -> None:
        """Write these, invisible until the commit. A refused record refuses the whole request.

        Raises:
            Refused: fenced, or this transaction has ended.
        """
        transaction = self._running(transactional_id, epoch, number)
        for log, entries in records.items():
            transaction.logs[log] = None
            for entry in entries:
                entry.transaction = transaction
                log.append(entry)
            transaction.records.extend(entries)

    def add_offset(
        self, transactional_id: str, epoch: int, number: int, group: str, topic: str, partition: int, offset: int
    ) -> None:
        """Note a committed offset that counts with the commit; who is a member of the group does not matter.

        Raises:
            Refused: fenced, or this transaction has ended.
        """
        transaction = self._running(transactional_id, epoch, number)
        transaction.offsets[group, topic, partition] = offset

    def end(self, transactional_id: str, epoch: int, number: int, *, commit: bool) -> None:
        """Commit or abort; asking again for what was done is answered with yes.

        Raises:
            Refused: fenced, or the transaction ended otherwise.
        """
        identity = self._identity(transactional_id, epoch)
        wanted = TransactionState.COMMITTED if commit else TransactionState.ABORTED
        if identity.open is None:
            if identity.ended >= number and identity.last is not wanted:
                raise Refused("INVALID_TXN_STATE", 48)
            # Nothing had been written; a request of it that is still on the wire comes too late.
            identity.ended, identity.last = max(identity.ended, number), wanted
            return
        self._end(identity, identity.open, wanted, "its producer")

    def abort(self, transactional_id: str, why: str) -> bool:
        """The coordinator ends the open transaction and fences its producer; False where none is open."""
        identity = self._ids.get(transactional_id)
        if identity is None or identity.open is None:
            return False
        identity.epoch += 1
        self._end(identity, identity.open, TransactionState.ABORTED, f"the coordinator: {why}")
        return True

    def epoch(self, transactional_id: str) -> int:
        """The newest epoch; -1 for an id nobody has used."""
        identity = self._ids.get(transactional_id)
        return -1 if identity is None else identity.epoch

    def open(self) -> list[OpenTransaction]:
        """What is open now."""
        return [
            OpenTransaction(txn.transactional_id, txn.epoch, txn.owner, txn.began_at_s, len(txn.records))
            for txn in (identity.open for identity in self._ids.values())
            if txn is not None
        ]

    def _identity(self, transactional_id: str, epoch: int) -> _Identity:
        identity = self._ids.get(transactional_id)
        if identity is None:
            raise Refused("INVALID_PRODUCER_ID_MAPPING", 49)
        if identity.epoch != epoch:
            self._cluster.note(f"fenced {transactional_id} epoch {epoch}, newest is {identity.epoch}")
            raise fenced()
        return identity

    def _running(self, transactional_id: str, epoch: int, number: int) -> Transaction:
        """The open transaction of this number, begun if need be."""
        identity = self._identity(transactional_id, epoch)
        if number <= identity.ended:  # a request of a transaction that has ended, late on the wire
            raise Refused("INVALID_TXN_STATE", 48)
        if identity.open is None:
            identity.open = transaction = Transaction(
                transactional_id, epoch, number, identity.owner, self._cluster.now_s
            )
            patience_s = identity.timeout_s + self._cluster.rng.uniform(0, self._abort_check_s)
            self._watch(identity, transaction, patience_s)
        return identity.open

    def _watch(self, identity: _Identity, transaction: Transaction, wait_s: float) -> None:
        transaction.timer = self._cluster.later(wait_s, lambda: self._expired(identity, transaction))

    def _expired(self, identity: _Identity, transaction: Transaction) -> None:
        if identity.open is not transaction:
            return
        if self._cluster.faults.is_broker_away:
            self._watch(identity, transaction, WAIT_AGAIN_S)
        else:
            self.abort(transaction.transactional_id, "timed out")

    def _end(self, identity: _Identity, transaction: Transaction, state: TransactionState, why: str) -> None:
        cluster = self._cluster
        identity.open = None
        identity.ended = transaction.number
        identity.last = state
        if transaction.timer is not None:
            transaction.timer.cancel()
        transaction.state = state
        now_ms = cluster.wall_ms()
        for log in transaction.logs:
            log.mark(transaction, now_ms)
        is_committed = state is TransactionState.COMMITTED
        if is_committed:
            for (group, topic, partition), offset in transaction.offsets.items():
                cluster.groups.keep_offset(group, topic, partition, offset)
        self.finished.append(
            FinishedTransaction(
                transaction.transactional_id,
                transaction.epoch,
                transaction.owner,
                transaction.began_at_s,
                cluster.now_s,
                is_committed,
                why,
                tuple(transaction.records),
                dict(transaction.offsets),
            )
        )
        cluster.note(
            f"{state} {transaction.transactional_id} epoch {transaction.epoch} of {transaction.owner} "
            f"(by {why}): {_told(transaction)}"
        )
        if is_committed:
            cluster.tell(transaction.records)
        cluster.wake(transaction.logs)


def _told(transaction: Transaction) -> str:
    parts: dict[str, list[bytes | None]] = {}
    for record in transaction.records:
        parts.setdefault(f"{record.topic}-{record.partition}", []).append(record.key)
    told = [
        f"{place} x{len(keys)} [{', '.join(_short(key) for key in keys[:3])}{', ...' if len(keys) > 3 else ''}]"
        for place, keys in parts.items()
    ]
    told += [f"offset {group}/{topic}-{part}={at}" for (group, topic, part), at in transaction.offsets.items()]
    return "; ".join(told) or "nothing"


def _short(key: bytes | None) -> str:
    return "-" if key is None else key[:40].decode("utf-8", "backslashreplace")
