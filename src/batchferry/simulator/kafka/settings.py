"""How patient the simulated clients are; the names and defaults are those of the real client's settings."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SimKafkaSettings:
    """What the clients of one process are told.

    Raises:
        ValueError: values that cannot work together.
    """

    max_record_bytes: int = 64 * MIB
    session_timeout_s: float = 45.0
    heartbeat_interval_s: float = 3.0
    rebalance_timeout_s: float = 60.0
    max_poll_interval_s: float = 300.0
    metadata_max_age_s: float = 60.0
    transaction_timeout_s: float = 30.0
    transaction_deadline_s: float = 20.0
    commit_deadline_s: float = 15.0
    abort_deadline_s: float = 3.0
    init_deadline_s: float = 60.0
    request_timeout_s: float = 20.0
    connect_deadline_s: float = 20.0
    close_deadline_s: float = 5.0
    read_stall_s: float = 45.0

    def __post_init__(self) -> None:
        if self.transaction_deadline_s >= self.transaction_timeout_s:
            raise ValueError("transaction_deadline_s must be below transaction_timeout_s, or the broker aborts first")
        if self.read_stall_s <= self.transaction_timeout_s:
            raise ValueError("read_stall_s must be above transaction_timeout_s, or a dead owner fails reads")
        if self.heartbeat_interval_s * 3 > self.session_timeout_s:
            raise ValueError("session_timeout_s must be at least three heartbeat intervals")
