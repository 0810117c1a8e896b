"""The start-up checks one by one, on a cluster and an account that are described and not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from engine_kit import Producer

from batchferry.config import load_settings
from batchferry.domain.errors import KafkaRefused, KafkaUnavailable
from batchferry.domain.provider import BatchPage, CallFailed, CallFailure, FilePage, FileRole
from batchferry.engine.gates import Finding, Verdict, World, look
from batchferry.ports import TopicDescription

DAY_MS = 86_400_000
REFUSED = CallFailed("list", CallFailure.ACCOUNT, http_status=403)


class Cluster:
    """Topics by name; what is made or grown is there at once. Also its own admin client."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicDescription] = {}
        self.transactions: Any = Producer()
        self.transactional_ids: list[str] = []

    def has(self, name: str, partitions: int = 3, **configs: str) -> None:
        self.topics[name] = TopicDescription(name, partitions, {k.replace("_", "."): v for k, v in configs.items()})

    def partition_producer(self, _topic: str, _partition: int, _group: str, transactional_id: str) -> Any:
        self.transactional_ids.append(transactional_id)
        return self.transactions

    async def describe(self, topics: Sequence[str]) -> Mapping[str, TopicDescription | None]:
        return {name: self.topics.get(name) for name in topics}

    async def create(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        self.topics[topic] = TopicDescription(topic, partitions, configs)

    async def grow(self, topic: str, partitions: int) -> None:
        self.topics[topic] = self.topics[topic]._replace(partitions=partitions)


class Account:
    """A provider that answers as it is told."""

    clock_skew_s: float | None = 0.0
    is_inline = False

    def __init__(self) -> None:
        self.batches: Any = BatchPage(())
        self.files: Any = FilePage(())

    async def list_batches(self) -> Any:
        return self.batches

    async def list_files(self, role: FileRole) -> Any:
        assert role is FileRole.INPUT
        return self.files


class Dock:
    """Settings, a cluster on which all is well, and an account that may do everything."""

    def __init__(self) -> None:
        self.settings = self.configured()
        self.cluster = Cluster()
        self.account = Account()
        topics = self.settings.topics
        for name in (topics.requests, topics.results, topics.failures):
            self.cluster.has(name)
        self.cluster.has(topics.events, 1)
        self.cluster.has(topics.ledger_topic, 3, cleanup_policy="compact")
        self.cluster.has(topics.control_topic, 1, cleanup_policy="compact")

    @staticmethod
    def configured(**overrides: Any) -> Any:
        return load_settings(
            None, {"OPENAI_API_KEY": "sk-test-0123456789abcdef"}, dotenv_path=None, overrides=overrides or None
        )

    async def look(self) -> World:
        cluster: Any = self.cluster
        account: Any = self.account
        return await look(self.settings, cluster, cluster, {"default": account})

    async def odd(self) -> list[Finding]:
        """Everything that is not content."""
        return [one for one in (await self.look()).findings if one.verdict is not Verdict.OK]


@pytest.fixture
def dock() -> Dock:
    """All is well on it."""
    return Dock()


async def test_nothing_is_odd_where_all_is_well(dock: Dock) -> None:
    """Each gate says that it is content, and nothing is made or changed."""
    before = dict(dock.cluster.topics)
    assert await dock.odd() == []
    assert {one.gate for one in (await dock.look()).findings} >= {
        "input is not compacted", "input is kept long enough", "ledger is compacted", "control topic", "outcomes fit",
        "transactions are allowed", "account may use batches", "account may use files",
    }  # fmt: skip
    assert dock.cluster.topics == before


async def test_an_input_that_is_gone_is_not_made_anew(dock: Dock) -> None:
    """Its ledger is still there: a new topic's requests would meet the memory of the old one's."""
    del dock.cluster.topics[dock.settings.topics.requests]
    (finding,) = await dock.odd()
    assert (finding.verdict, finding.subject) == (Verdict.REFUSE, dock.settings.topics.requests)
    assert "topics.group" in finding.remedy
    assert dock.settings.topics.requests not in dock.cluster.topics


async def test_a_ledger_follows_its_input(dock: Dock) -> None:
    """The ledger is ours: it gets the partitions that the input got while nobody ran."""
    topics = dock.settings.topics
    dock.cluster.has(topics.requests, 6)
    world = await dock.look()
    assert dock.cluster.topics[topics.ledger_topic].partitions == 6
    assert world.partitions[topics.ledger_topic] == 6
    assert world.refusals == []


async def test_a_ledger_that_may_not_be_changed_is_named(dock: Dock) -> None:
    """With ``topics.create`` off the operator is told to how many partitions it must be raised."""
    dock.settings = dock.configured(topics={"create": False})
    topics = dock.settings.topics
    dock.cluster.has(topics.requests, 6)
    (text,) = (await dock.look()).refusals
    assert topics.ledger_topic in text
    assert "to 6 partitions" in text
    assert dock.cluster.topics[topics.ledger_topic].partitions == 3


async def test_transactions_that_are_not_allowed_refuse_the_start(dock: Dock) -> None:
    """It is tried under an id beside those of the partitions, so that nobody is fenced by it."""

    async def denied() -> None:
        raise KafkaRefused("TransactionalIdAuthorizationFailed")

    dock.cluster.transactions.init = denied
    (finding,) = await dock.odd()
    assert (finding.gate, finding.verdict) == ("transactions are allowed", Verdict.REFUSE)
    assert "WRITE and DESCRIBE" in finding.remedy
    assert dock.cluster.transactional_ids == [f"{dock.settings.topics.ledger_topic}.probe"]


async def test_a_cluster_that_does_not_answer_has_refused_nothing(dock: Dock) -> None:
    """A broker that goes away in the middle of the gates ends the start, and the next start asks again."""

    async def silent() -> None:
        raise KafkaUnavailable("no answer in time")

    dock.cluster.transactions.init = silent
    with pytest.raises(KafkaUnavailable):
        await dock.odd()


@pytest.mark.parametrize("topic", ["ledger_topic", "control_topic", "results", "failures", "events"])
async def test_a_topic_for_small_pieces_is_refused(dock: Dock, topic: str) -> None:
    """What we send at a time must fit everywhere we write, the internal topics included."""
    name = getattr(dock.settings.topics, topic)
    was = dock.cluster.topics[name]
    dock.cluster.topics[name] = was._replace(configs={**was.configs, "max.message.bytes": "10000"})
    (finding,) = await dock.odd()
    assert (finding.verdict, finding.subject) == (Verdict.REFUSE, name)
    assert "kafka.produce_batch_bytes to 10000" in finding.remedy


async def test_a_compacted_output_topic_is_refused(dock: Dock) -> None:
    """Of two outcomes with one key it would keep one."""
    dock.cluster.has(dock.settings.topics.results, 3, cleanup_policy="compact,delete")
    (finding,) = await dock.odd()
    assert (finding.verdict, finding.subject) == (Verdict.REFUSE, dock.settings.topics.results)


async def test_results_smaller_than_requests_are_warned_of(dock: Dock) -> None:
    """A long answer to a long request would not fit."""
    dock.cluster.has(dock.settings.topics.requests, 3, max_message_bytes="5000000")
    (finding,) = await dock.odd()
    assert (finding.verdict, finding.subject) == (Verdict.WARN, dock.settings.topics.results)


async def test_an_input_that_deletes_by_size_or_by_any_timestamp_is_warned_of(dock: Dock) -> None:
    """Neither is a loss yet; both can become one."""
    dock.cluster.has(
        dock.settings.topics.requests, 3, retention_bytes="1000000", message_timestamp_after_max_ms=str(10 * DAY_MS)
    )
    assert [one.verdict for one in await dock.odd()] == [Verdict.WARN, Verdict.WARN]


@pytest.mark.parametrize("lacking", ["batches", "files"])
async def test_rights_to_files_and_to_batches_are_told_apart(dock: Dock, lacking: str) -> None:
    """A key that may do one and not the other is refused with the right that it lacks."""
    setattr(dock.account, lacking, REFUSED)
    (finding,) = await dock.odd()
    assert (finding.gate, finding.verdict) == (f"account may use {lacking}", Verdict.REFUSE)
    has = {"batches": "files", "files": "batches"}[lacking]
    assert f"although it lists its {has}: the key is right and lacks a right" in finding.text
    assert f"read and write {lacking}" in finding.remedy
    assert "accounts.default.api_key" in finding.remedy


async def test_a_right_is_not_said_to_be_there_when_nobody_knows(dock: Dock) -> None:
    """One refused, the other not answered: nothing is said of the key as such."""
    dock.account.batches, dock.account.files = REFUSED, CallFailed("list", CallFailure.UNAVAILABLE)
    refused, unanswered = await dock.odd()
    assert (refused.verdict, unanswered.verdict) == (Verdict.REFUSE, Verdict.WARN)
    assert "although" not in refused.text
    assert "accounts.default.api_key and its project" in refused.remedy


async def test_where_rows_are_parts_of_a_batch_no_right_to_files_is_asked_for(dock: Dock) -> None:
    """A provider without files is not said to grant them; a wrong key is told once as ever."""
    dock.account.is_inline = True
    dock.account.files = AssertionError("not to be asked for")
    findings = (await look(dock.settings, dock.cluster, dock.cluster, {"default": dock.account})).findings
    assert [one.gate for one in findings if one.gate.startswith("account")] == ["account may use batches"]
    dock.account.batches = REFUSED
    (finding,) = await dock.odd()
    assert (finding.gate, finding.verdict) == ("account is let in", Verdict.REFUSE)
    assert finding.remedy.endswith("its rights to batches")


async def test_a_key_that_is_wrong_is_told_once(dock: Dock) -> None:
    """Refused for both: one finding, about the key."""
    dock.account.batches = dock.account.files = REFUSED
    (finding,) = await dock.odd()
    assert (finding.gate, finding.verdict) == ("account is let in", Verdict.REFUSE)


async def test_a_provider_that_does_not_answer_is_no_reason_to_refuse(dock: Dock) -> None:
    """Rows wait until it does; a clock that is far off is told as well."""
    dock.account.batches = dock.account.files = CallFailed("list", CallFailure.UNAVAILABLE)
    dock.account.clock_skew_s = 300.0
    assert [(one.gate, one.verdict) for one in await dock.odd()] == [
        ("account may use batches", Verdict.WARN),
        ("account may use files", Verdict.WARN),
        ("clocks agree", Verdict.WARN),
    ]
