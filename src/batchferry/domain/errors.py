"""The exceptions of batchferry. The type says what the caller should do.

::

BatchferryError
 |- ConfigError            start-up only: every fault listed at once, exit code 2
 |- GateRefused            start-up only: the world is not as it must be; says the remedy, exit code 3
 |- PartitionLost          a newer owner has fenced us, or we cannot know: drop the partition's work
 |   `- CommitUnknown      a commit was sent and no answer came: re-read the ledger to learn
 |- KafkaUnavailable       the broker does not answer: back off and try again
 |- LedgerTooNew           a newer version wrote this ledger: leave the partition to it
 |- LedgerDamaged          the ledger contradicts itself or the input topic: refuse, say the remedy
 |- StoreUnavailable       disk full or unwritable: pause consumption, try again
 |- IllegalTransition      our bug: quarantine that batch, go on with the others
 `- InvariantBroken        our bug: the partition is restored from its ledger
"""

from __future__ import annotations

from collections.abc import Sequence


class BatchferryError(Exception):
    """Something batchferry can name went wrong."""


class ConfigError(BatchferryError):
    """The settings are wrong; ``faults`` lists each one with its remedy."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        many = f"{len(self.faults)} faults" if len(self.faults) != 1 else "1 fault"
        super().__init__(f"settings refused, {many}:\n" + "\n".join(f"  - {fault}" for fault in self.faults))


class GateRefused(BatchferryError):
    """A start-up check failed; ``findings`` lists each one with its remedy."""

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        super().__init__("start refused:\n" + "\n".join(f"  - {finding}" for finding in self.findings))


class PartitionLost(BatchferryError):
    """This process no longer owns the partition, or cannot know that it does."""

    def __init__(self, partition: int, reason: str) -> None:
        self.partition = partition
        self.reason = reason
        super().__init__(f"partition {partition} lost: {reason}")


class CommitUnknown(PartitionLost):
    """A commit was sent and its outcome is not known; only the ledger can tell."""


class KafkaUnavailable(BatchferryError):
    """The Kafka cluster did not answer in time."""


class KafkaRefused(KafkaUnavailable):
    """The Kafka cluster answered, and does not let us do it: trying again does not help."""


class TimestampRefused(KafkaRefused):
    """The broker takes no record whose timestamp is so far from its own clock."""


class LedgerTooNew(BatchferryError):
    """The ledger of this partition demands a newer batchferry."""

    def __init__(self, partition: int, min_reader: int, ours: int) -> None:
        self.partition = partition
        super().__init__(
            f"ledger of partition {partition} needs reader version {min_reader}, this is {ours}: upgrade this replica"
        )


class LedgerDamaged(BatchferryError):
    """The ledger, the committed offset and the input topic cannot all be true."""

    def __init__(self, partition: int, problem: str, remedy: str) -> None:
        self.partition = partition
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"partition {partition}: {problem}; {remedy}")


class StoreUnavailable(BatchferryError):
    """The local disk does not take what we write."""


class IllegalTransition(BatchferryError):
    """No rule for this state and event, not even "ignore"."""

    def __init__(self, batch_id: str, state: str, event: str) -> None:
        self.batch_id = batch_id
        self.state = state
        self.event = event
        super().__init__(f"batch {batch_id}: no rule for {event} in state {state}")


class InvariantBroken(BatchferryError):
    """Something that must always hold does not."""
