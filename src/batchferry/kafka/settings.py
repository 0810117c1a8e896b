"""How to reach the cluster and how patient to be; one frozen value, built from the configuration."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, Literal

from aiokafka.helpers import create_ssl_context

from batchferry.domain.errors import ConfigError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class KafkaClientSettings:
    """Everything the Kafka clients are told. Secrets never show in ``repr``.

    Raises:
        ConfigError: values that cannot work together, all of them listed.
    """

    bootstrap_servers: str
    """``host:port``, several separated by commas."""
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    client_id: str = "batchferry"
    client_rack: str | None = None
    """Rack or zone of this replica, so that fetches may go to the nearest copy."""

    compression: Compression = "lz4"
    max_batch_bytes: int = 512 * 1024
    """Size at which records of one partition are sent as one batch (before compression)."""
    max_record_bytes: int = 64 * MIB
    """Larger records are refused before a transaction begins; the topic's own limit is the broker's to keep."""

    fetch_max_bytes: int = 16 * MIB
    """Bound of one fetch answer, so of what a consumer holds per broker."""
    max_partition_fetch_bytes: int = 4 * MIB
    fetch_min_bytes: int = 1
    fetch_max_wait_s: float = 0.5
    check_crcs: bool = True
    """Checking costs about a third of the fetch CPU; it is what tells a damaged record from a good one."""

    session_timeout_s: float = 45.0
    heartbeat_interval_s: float = 3.0
    rebalance_timeout_s: float = 60.0
    max_poll_interval_s: float = 300.0
    metadata_max_age_s: float = 60.0
    """A topic's new partitions are noticed within this time."""

    transaction_timeout_s: float = 30.0
    """The broker aborts an open transaction after this; a dead owner holds back readers at most so long."""
    transaction_deadline_s: float = 20.0
    """Writing a transaction may take so long before it is given up."""
    commit_deadline_s: float = 15.0
    """Waiting for a commit's answer may take so long before its outcome counts as unknown."""
    abort_deadline_s: float = 3.0
    init_deadline_s: float = 60.0
    request_timeout_s: float = 20.0
    connect_deadline_s: float = 20.0
    close_deadline_s: float = 5.0
    read_stall_s: float = 45.0
    """A read to the end that makes no progress for so long is given up; longer than any transaction lives."""

    def __post_init__(self) -> None:
        faults = []
        if not self.bootstrap_servers.strip():
            faults.append("kafka bootstrap servers are empty: name at least one host:port")
        if self.security_protocol.startswith("SASL") and not (self.username and self.password):
            faults.append(f"security protocol {self.security_protocol} needs a username and a password")
        if self.ssl_keyfile and not self.ssl_certfile:
            faults.append("an SSL key file without its certificate file: name both")
        if self.transaction_deadline_s >= self.transaction_timeout_s:
            faults.append("transaction_deadline_s must be below transaction_timeout_s, or the broker aborts first")
        if self.read_stall_s <= self.transaction_timeout_s:
            faults.append("read_stall_s must be above transaction_timeout_s, or a dead owner's transaction fails reads")
        if self.heartbeat_interval_s * 3 > self.session_timeout_s:
            faults.append("session_timeout_s must be at least three heartbeat intervals")
        if self.max_partition_fetch_bytes > self.fetch_max_bytes:
            faults.append("max_partition_fetch_bytes must not exceed fetch_max_bytes")
        if faults:
            raise ConfigError(faults)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context, None for a protocol without TLS; reads the files each time, so rotated ones count.

        Raises:
            ConfigError: a certificate or key file cannot be read.
        """
        if not self.security_protocol.endswith("SSL"):
            return None
        try:
            made: ssl.SSLContext = create_ssl_context(
                cafile=self.ssl_cafile, certfile=self.ssl_certfile, keyfile=self.ssl_keyfile
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                [f"the Kafka TLS files cannot be used: {error.strerror or type(error).__name__}"]
            ) from None
        return made

    @property
    def bootstrap_list(self) -> list[str]:
        """The bootstrap servers one by one."""
        return [part.strip() for part in self.bootstrap_servers.split(",") if part.strip()]


def connection_arguments(settings: KafkaClientSettings, role: str) -> dict[str, Any]:
    """Constructor arguments every aiokafka client shares; ``role`` ends the client id."""
    return {
        "bootstrap_servers": settings.bootstrap_list,
        "client_id": f"{settings.client_id}-{role}",
        "security_protocol": settings.security_protocol,
        "ssl_context": settings.ssl_context(),
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.username,
        "sasl_plain_password": settings.password,
        "request_timeout_ms": ms(settings.request_timeout_s),
        "metadata_max_age_ms": ms(settings.metadata_max_age_s),
    }


def fetch_arguments(settings: KafkaClientSettings) -> dict[str, Any]:
    """Constructor arguments every aiokafka consumer shares; all of them read committed records only."""
    return {
        "isolation_level": "read_committed",
        "enable_auto_commit": False,
        "fetch_max_bytes": settings.fetch_max_bytes,
        "max_partition_fetch_bytes": settings.max_partition_fetch_bytes,
        "fetch_min_bytes": settings.fetch_min_bytes,
        "fetch_max_wait_ms": ms(settings.fetch_max_wait_s),
        "check_crcs": settings.check_crcs,
        "client_rack": settings.client_rack,
    }


def ms(seconds: float) -> int:
    """Whole milliseconds."""
    return round(seconds * 1000)
