"""What aiokafka and the broker raise, told in our words and without losing the broker's number.

aiokafka 0.14 knows the error codes up to 72 and 79; every other number arrives as "unknown", not retriable and
without its number. The missing ones are entered into its table when this module is imported. A later aiokafka
that knows a code keeps its own class. Source of codes, names and "retriable": Kafka protocol guide, error codes.
"""

from __future__ import annotations

import logging
from typing import Final

import aiokafka.errors
from aiokafka.errors import (
    BrokerResponseError,
    ClusterAuthorizationFailedError,
    ConsumerStoppedError,
    GroupAuthorizationFailedError,
    IllegalOperation,
    InvalidProducerEpoch,
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    ProducerFenced,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from batchferry.domain.errors import KafkaRefused, KafkaUnavailable, TimestampRefused

PRODUCER_FENCED: Final = 90

# code: (name, retriable, the client's metadata is stale)
_MISSING: Final[dict[int, tuple[str, bool, bool]]] = {
    73: ("TOPIC_DELETION_DISABLED", False, False),
    74: ("FENCED_LEADER_EPOCH", True, True),
    75: ("UNKNOWN_LEADER_EPOCH", True, True),
    76: ("UNSUPPORTED_COMPRESSION_TYPE", False, False),
    77: ("STALE_BROKER_EPOCH", False, False),
    78: ("OFFSET_NOT_AVAILABLE", True, False),
    80: ("PREFERRED_LEADER_NOT_AVAILABLE", True, True),
    81: ("GROUP_MAX_SIZE_REACHED", False, False),
    82: ("FENCED_INSTANCE_ID", False, False),
    83: ("ELIGIBLE_LEADERS_NOT_AVAILABLE", True, True),
    84: ("ELECTION_NOT_NEEDED", True, True),
    85: ("NO_REASSIGNMENT_IN_PROGRESS", False, False),
    86: ("GROUP_SUBSCRIBED_TO_TOPIC", False, False),
    87: ("INVALID_RECORD", False, False),
    88: ("UNSTABLE_OFFSET_COMMIT", True, False),
    89: ("THROTTLING_QUOTA_EXCEEDED", True, False),
    PRODUCER_FENCED: ("PRODUCER_FENCED", False, False),
    91: ("RESOURCE_NOT_FOUND", False, False),
    92: ("DUPLICATE_RESOURCE", False, False),
    94: ("INCONSISTENT_VOTER_SET", False, False),
    95: ("INVALID_UPDATE_VERSION", False, False),
    96: ("FEATURE_UPDATE_FAILED", False, False),
    99: ("SNAPSHOT_NOT_FOUND", False, False),
    100: ("UNKNOWN_TOPIC_ID", True, True),
    103: ("INCONSISTENT_TOPIC_ID", True, True),
    105: ("TRANSACTIONAL_ID_NOT_FOUND", False, False),
    106: ("FETCH_SESSION_TOPIC_ID_ERROR", True, True),
    107: ("INELIGIBLE_REPLICA", False, False),
    108: ("NEW_LEADER_ELECTED", False, True),
    109: ("OFFSET_MOVED_TO_TIERED_STORAGE", False, False),
    110: ("FENCED_MEMBER_EPOCH", False, False),
    111: ("UNRELEASED_INSTANCE_ID", False, False),
    112: ("UNSUPPORTED_ASSIGNOR", False, False),
    113: ("STALE_MEMBER_EPOCH", False, False),
    119: ("UNKNOWN_SUBSCRIPTION_ID", False, False),
    120: ("TRANSACTION_ABORTABLE", False, False),
}


def _teach_client() -> None:
    known = aiokafka.errors.kafka_errors
    for code, (name, retriable, stale) in _MISSING.items():
        if code not in known:
            known[code] = type(
                "".join(part.capitalize() for part in name.split("_")),
                (BrokerResponseError,),
                {
                    "errno": code,
                    "message": name,
                    "description": name,
                    "retriable": retriable,
                    "invalid_metadata": stale,
                },
            )


_teach_client()

# At DEBUG the client prints the requests it sends, and with them keys and values.
_client_log = logging.getLogger("aiokafka")
_client_log.setLevel(max(_client_log.getEffectiveLevel(), logging.INFO))


def name_of(error: BaseException) -> str:
    """The error's name and, where the broker gave one, its number: ``MESSAGE_TOO_LARGE (10)``. No payload."""
    if isinstance(error, BrokerResponseError):
        return f"{error.message} ({error.errno})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return type(error).__name__


def is_fenced(error: BaseException | None) -> bool:
    """Whether a newer producer with our transactional id is the cause, in any of the shapes this arrives in."""
    while error is not None:
        if isinstance(error, ProducerFenced | InvalidProducerEpoch):
            return True
        if isinstance(error, BrokerResponseError) and error.errno == PRODUCER_FENCED:
            return True
        error = error.__cause__
    return False


def unavailable(doing: str, error: BaseException, *, target: str = "") -> KafkaUnavailable:
    """``KafkaUnavailable`` that says what was tried, on what, why it failed and what may help.

    It is a ``KafkaRefused`` when the cluster's answer was that we have no right to do it, a ``TimestampRefused`` when
    it was that records are dated too far from its clock.
    """
    remedy = ""
    kind: type[KafkaUnavailable] = KafkaUnavailable
    if isinstance(
        error,
        TopicAuthorizationFailedError
        | GroupAuthorizationFailedError
        | ClusterAuthorizationFailedError
        | TransactionalIdAuthorizationFailed,
    ):
        kind = KafkaRefused
        remedy = "; grant this client's principal the right in the cluster's ACLs"
    elif isinstance(error, InvalidTimestampError):
        kind = TimestampRefused
        remedy = (
            "; the records are dated too far from the broker's clock (Kafka takes an hour ahead, unless the topic's"
            " message.timestamp.after.max.ms says otherwise)"
        )
    elif isinstance(error, KafkaConnectionError | TimeoutError | OSError):
        remedy = "; is the cluster up, and are the bootstrap servers right?"
    where = f" {target}" if target else ""
    return kind(f"{doing}{where}: {name_of(error)}{remedy}")


EXPECTED: Final = (KafkaError, IllegalOperation, ConsumerStoppedError, OSError, TimeoutError, AssertionError)
"""What a client call may end with when the cluster, not we, is at fault. aiokafka states broken states by assert."""
