"""Fixtures everybody shares: a broker, names nobody else uses, and a plain word about what ran where."""

from __future__ import annotations

import asyncio
import inspect
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import pytest

from batchferry.domain.errors import KafkaUnavailable
from batchferry.kafka import AioKafka, EmbeddedBroker, KafkaClientSettings
from broker import BrokerFailed, BrokerUnavailable, RealBroker
from broker.kit import patient_settings
from broker.real import kafka_version

COUNTS = pytest.StashKey[dict[str, int]]()
BROKER_KIND = pytest.StashKey[str]()
BROKER_NOTE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--share K/N``: several runs side by side, each with whole files, since the tests of a file share their rig."""
    parser.addoption(
        "--share", metavar="K/N", help="only the K-th of N shares of the test files, for runs side by side"
    )


class Broker(Protocol):
    """What a test may know of the broker it runs on."""

    bootstrap: str
    is_real: bool
    kind: str


@dataclass(frozen=True)
class NamedCluster:
    """A cluster somebody else runs, named by ``KAFKA_BOOTSTRAP_SERVERS``."""

    bootstrap: str
    kind: str = "named-cluster"
    is_real: bool = True


START_ATTEMPTS = 2


def _start_real(folder: Path, settings: dict[str, str] | None = None) -> RealBroker:
    """Two tries: between choosing a port and listening on it somebody else may take it."""
    for attempt in range(1, START_ATTEMPTS + 1):
        real = RealBroker(folder / f"kafka-{attempt}", settings=settings)
        try:
            real.start()
        except BrokerFailed:
            real.kill()
            if attempt == START_ATTEMPTS:
                raise
        else:
            return real
    raise AssertionError


def _start_broker(folder: Path) -> tuple[Broker | None, str]:
    """The broker of this run, and why it is not a real one where it is not."""
    named = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if named:
        return NamedCluster(named), ""
    note = "BATCHFERRY_TEST_BROKER says embedded"
    if os.environ.get("BATCHFERRY_TEST_BROKER") != "embedded":
        try:
            return _start_real(folder), ""
        except BrokerUnavailable as reason:
            note = f"no real broker: {reason}"
    embedded = EmbeddedBroker(folder / "embedded")
    try:
        embedded.start()
    except KafkaUnavailable as reason:
        return None, f"{note}; {reason}"
    return embedded, note


@pytest.fixture(scope="session")
def _broker_process(request: pytest.FixtureRequest) -> Iterator[tuple[Broker | None, str]]:
    with tempfile.TemporaryDirectory(prefix="batchferry-broker-", ignore_cleanup_errors=True) as folder:
        made, note = _start_broker(Path(folder))
        request.config.stash[BROKER_KIND] = made.kind if made is not None else ""
        request.config.stash[BROKER_NOTE] = note
        try:
            yield made, note
        finally:
            stop = getattr(made, "stop", None)
            if stop is not None:
                stop()


@pytest.fixture(scope="session")
def broker(_broker_process: tuple[Broker | None, str]) -> Broker:
    """The broker of this run: ``bootstrap``, ``is_real``, ``kind``; started once."""
    made, note = _broker_process
    if made is None:
        pytest.skip(note)
    return made


@pytest.fixture(scope="session")
def _victim() -> Iterator[RealBroker | str]:
    with tempfile.TemporaryDirectory(prefix="batchferry-victim-", ignore_cleanup_errors=True) as folder:
        try:
            # A killed node may register again only when its old session is over; too short for a busy machine, so
            # not for everybody.
            made = _start_real(Path(folder), {"broker.session.timeout.ms": "4000"})
        except BrokerUnavailable as reason:
            yield f"no real broker: {reason}"
            return
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
def own_broker(_victim: RealBroker | str) -> Iterator[RealBroker]:
    """A second real broker, which a test may kill, freeze and start again; it is up again for the next one."""
    if isinstance(_victim, str):
        pytest.skip(_victim)
    yield _victim
    _victim.recover()


@pytest.fixture
def topic_name() -> Callable[[str], str]:
    """Makes topic, group and transactional ids nobody else uses: ``topic_name("input")``."""

    def make(stem: str) -> str:
        return f"{stem}-{uuid4().hex[:10]}"

    return make


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Bounded polling for what another process does, failing with the name of what did not come."""

    async def wait(condition: Callable[[], object], what: str = "the condition", limit_s: float = 20.0) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            held = condition()
            if inspect.isawaitable(held):
                held = await held
            if held:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not come about within {limit_s:g} s")
            await asyncio.sleep(0.02)

    return wait


@pytest.fixture(autouse=True)
def _real_broker_only(request: pytest.FixtureRequest) -> None:
    """Skip what only a real broker can prove when there is none."""
    if request.node.get_closest_marker("real_broker") is None or "own_broker" in request.fixturenames:
        return
    found = request.getfixturevalue("broker")
    if not found.is_real:
        pytest.skip(f"needs a real Apache Kafka broker, this run has the {found.kind} one")


@pytest.fixture
def kafka_settings(broker: Broker) -> Callable[..., KafkaClientSettings]:
    """Client settings for this run's broker with the patience of a test; any of them can be given otherwise."""

    def make(**otherwise: object) -> KafkaClientSettings:
        return patient_settings(broker.bootstrap, **otherwise)

    return make


@pytest.fixture
async def kafka(kafka_settings: Callable[..., KafkaClientSettings]) -> AsyncIterator[AioKafka]:
    """The Kafka port on this run's broker."""
    made = AioKafka(kafka_settings())
    yield made
    await made.aclose()


def _uses_broker(item: pytest.Item) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & {"broker", "own_broker"}) or item.get_closest_marker("broker") is not None


LONGEST_S = {
    "test_service_crashes": 190,
    "test_service_input_changes": 55,
    "test_service_scenarios": 55,
    "test_service_accounts": 50,
    "test_chaos_short": 50,
    "test_cli_topics": 45,
    "test_cli_demo": 45,
    "test_service_stopping": 40,
    "test_service_quota": 40,
    "test_service_submission": 40,
    "test_kafka_facts": 40,
    "test_kafka_traps": 40,
    "test_behaviour_cases": 35,
    "test_ten_thousand_rows": 30,
    "test_every_port": 55,
    "test_every_adapter": 40,
    "test_week": 35,
    "test_machine_properties": 25,
    "test_sim_short": 20,
    "test_webhook_process": 20,
    "test_scenarios": 20,
}
"""About how long these files take, in seconds: shares are dealt by it. It need only be true enough to be fair."""
OTHERS_S = 6


def _share(files: Iterable[Path], number: int, shares: int) -> set[Path]:
    """The files of a share: the longest first, each to the one that has least."""
    load_s, dealt = [0] * shares, [set[Path]() for _ in range(shares)]
    for path in sorted(files, key=lambda one: (-LONGEST_S.get(one.stem, OTHERS_S), one)):
        least = load_s.index(min(load_s))
        load_s[least] += LONGEST_S.get(path.stem, OTHERS_S)
        dealt[least].add(path)
    return dealt[number - 1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whoever asks for a broker carries its marker, so that ``-m "not broker"`` means what it says.

    Of several shares every file is in exactly one.
    """
    for item in items:
        if _uses_broker(item) or item.get_closest_marker("real_broker") is not None:
            item.add_marker("broker")
    number, _, shares = str(config.getoption("--share") or "1/1").partition("/")
    mine = _share({item.path for item in items}, int(number), int(shares))
    others = [item for item in items if item.path not in mine]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.path in mine]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Count broker tests as they end."""
    outcome = yield
    report = outcome.get_result()
    if not _uses_broker(item):
        return
    counts = item.config.stash.setdefault(COUNTS, {"ran": 0, "unproven": 0})
    if report.when == "call" and not report.skipped:
        counts["ran"] += 1
    elif report.skipped and item.get_closest_marker("real_broker") is not None:
        counts["unproven"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say on what broker the tests ran, and what that leaves unproven."""
    counts = config.stash.get(COUNTS, None)
    if counts is None:
        return
    kind = config.stash.get(BROKER_KIND, RealBroker.kind)
    note = config.stash.get(BROKER_NOTE, "")
    write = terminalreporter.write_line
    terminalreporter.section("broker")
    if kind == RealBroker.kind:
        write(f"{counts['ran']} tests ran on a real Apache Kafka {kafka_version()} broker.")
    elif kind == NamedCluster.kind:
        write(f"{counts['ran']} tests ran on the cluster named by KAFKA_BOOTSTRAP_SERVERS.")
    elif kind == EmbeddedBroker.kind:
        write(f"0 tests ran on a real broker; {counts['ran']} ran on the embedded one ({note}).")
        write(
            f"Not proven in this run: {counts['unproven']} tests, on fencing during an open transaction, stable "
            "offsets, broker loss, group timing and fetch limits. Install Java and Maven, or set "
            "KAFKA_BOOTSTRAP_SERVERS."
        )
    else:
        write(f"No test ran on any broker: {note}")
