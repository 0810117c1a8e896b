"""The parts of the Kafka room that need no broker."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from aiokafka.errors import (
    BrokerResponseError,
    InvalidProducerEpoch,
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    ProducerFenced,
    TransactionalIdAuthorizationFailed,
    for_code,
)
from aiokafka.partitioner import murmur2
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.errors import ConfigError, KafkaUnavailable, TimestampRefused
from batchferry.domain.offsets import OffsetSet
from batchferry.kafka import EmbeddedBroker, KafkaClientSettings
from batchferry.kafka.embedded import answers
from batchferry.kafka.faults import is_fenced, name_of, unavailable
from batchferry.kafka.partitioner import partition_of
from batchferry.kafka.reader import SEEK_GAP_OFFSETS, _stretches


@given(st.binary(max_size=80), st.integers(1, 200))
def test_partitions_are_those_of_every_kafka_client(key: bytes, partitions: int) -> None:
    """The fast partitioner and the client's own agree on every key."""
    assert partition_of(key, partitions) == (murmur2(key) & 0x7FFFFFFF) % partitions


@pytest.mark.parametrize(
    ("key", "hashed"), [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536)]
)
def test_partitions_are_those_of_java(key: bytes, hashed: int) -> None:
    """Hashes that Kafka's own test of its Java client expects."""
    assert partition_of(key, 2**31) == hashed & 0x7FFFFFFF


@pytest.mark.parametrize(
    ("code", "retriable"),
    [(74, True), (75, True), (78, True), (82, False), (87, False), (88, True), (89, True), (90, False), (120, False)],
)
def test_codes_unknown_to_the_client_keep_their_number(code: int, retriable: bool) -> None:
    """Broker codes the client has no class for arrive named, numbered and rightly retriable."""
    kind = for_code(code)
    assert issubclass(kind, BrokerResponseError)
    assert (kind.errno, kind.retriable) == (code, retriable)
    assert name_of(kind()).endswith(f"({code})")


def test_codes_the_client_knows_stay_its_own() -> None:
    """Nothing the client defines is replaced."""
    assert for_code(10).__module__ == "aiokafka.errors"
    assert for_code(79).__name__ == "MemberIdRequired"


def test_fencing_is_recognised_in_every_shape() -> None:
    """Old and new broker answers, and one wrapped by the client's sender, all count as fenced; others do not."""
    wrapped = KafkaError("unexpected")
    wrapped.__cause__ = InvalidProducerEpoch()
    for error in (ProducerFenced(), InvalidProducerEpoch(), for_code(90)(), wrapped):
        assert is_fenced(error)
    for error in (KafkaError(), for_code(10)(), None):
        assert not is_fenced(error)


def test_unavailable_says_what_to_do() -> None:
    """The text names the action, the target, the error's number and a remedy."""
    assert str(unavailable("reading", KafkaConnectionError("secret text"), target="requests")) == (
        "reading requests: KafkaConnectionError; is the cluster up, and are the bootstrap servers right?"
    )
    refused = str(unavailable("starting", TransactionalIdAuthorizationFailed("x")))
    assert "(53)" in refused
    assert "ACL" in refused
    dated = unavailable("producing", InvalidTimestampError(), target="requests")
    assert isinstance(dated, TimestampRefused)
    assert "INVALID_TIMESTAMP (32)" in str(dated)
    assert "broker's clock" in str(dated)


def test_the_client_never_logs_requests() -> None:
    """At DEBUG the client would print keys and values, so its logger stays above."""
    assert not logging.getLogger("aiokafka.producer.producer").isEnabledFor(logging.DEBUG)


def test_secrets_do_not_show() -> None:
    """Neither user nor password is in the settings' repr."""
    made = KafkaClientSettings(
        bootstrap_servers="a:1, b:2", security_protocol="SASL_PLAINTEXT", username="someone", password="hidden"
    )
    assert "hidden" not in repr(made)
    assert "someone" not in repr(made)
    assert made.bootstrap_list == ["a:1", "b:2"]
    assert made.ssl_context() is None


def test_settings_name_every_fault_at_once() -> None:
    """All contradictions are listed together."""
    with pytest.raises(ConfigError) as caught:
        KafkaClientSettings(
            bootstrap_servers=" ",
            security_protocol="SASL_SSL",
            ssl_keyfile="key.pem",
            transaction_deadline_s=60,
            transaction_timeout_s=50,
            session_timeout_s=3,
            fetch_max_bytes=1,
        )
    assert len(caught.value.faults) == 7


def test_unreadable_tls_files_are_a_configuration_fault() -> None:
    """A missing CA file is a ConfigError, not a traceback from the ssl module."""
    made = KafkaClientSettings(bootstrap_servers="a:1", security_protocol="SSL", ssl_cafile="/nowhere/ca.pem")
    with pytest.raises(ConfigError, match="No such file"):
        made.ssl_context()


def test_stretches_read_over_small_gaps() -> None:
    """Near runs are read as one, far ones apart."""
    assert _stretches(OffsetSet()) == []
    wanted = OffsetSet([1, 2, 5, 5 + SEEK_GAP_OFFSETS + 1])
    assert _stretches(wanted) == [(1, 6), (5 + SEEK_GAP_OFFSETS + 1, 5 + SEEK_GAP_OFFSETS + 2)]


def test_nobody_answers_on_an_unused_port() -> None:
    """The probe says no, quickly, where nothing listens."""
    assert not answers("127.0.0.1:1")


def test_the_embedded_broker_comes_goes_and_comes_again(tmp_path: Path) -> None:
    """It starts on its own port, can be killed and restarted on the same one, and stopping twice is once."""
    if EmbeddedBroker.binary() is None:
        pytest.skip("the demo extra is not installed")
    broker = EmbeddedBroker(tmp_path)
    broker.start()
    assert answers(broker.bootstrap)
    assert broker.pid
    broker.restart()
    assert answers(broker.bootstrap)
    broker.stop()
    broker.stop()
    assert broker.pid is None
    assert not answers(broker.bootstrap)


def test_an_embedded_broker_that_is_not_there_says_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    """Without the extra the error names it and the alternative."""
    monkeypatch.setattr(EmbeddedBroker, "binary", staticmethod(lambda: None))
    with pytest.raises(KafkaUnavailable, match=r"batchferry\[demo\].*KAFKA_BOOTSTRAP_SERVERS"):
        EmbeddedBroker(tmp_path).start()
