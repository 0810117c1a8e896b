"""Start-up gates: whether the world is as it must be before a single record is read. Also the ``doctor`` command.

A gate refuses, with the remedy, where going on could lose or double something; it warns where going on is safe.
Topics of ours that are missing are made (if the settings allow it); nobody's existing topic is ever changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from batchferry.config import Settings
from batchferry.domain.errors import KafkaRefused, KafkaUnavailable, PartitionLost
from batchferry.domain.provider import CallFailed, CallFailure, FileRole
from batchferry.domain.times import hours
from batchferry.ports import BatchProvider, KafkaAdmin, KafkaPort, TopicDescription

DAY_MS = 86_400_000
DEFAULT_MAX_MESSAGE_BYTES = 1_048_588
"""Kafka's own default of ``max.message.bytes``."""
PROBE = "probe"
"""Ends the transactional id under which it is tried whether transactions are allowed; no partition's id ends so."""
RECORD_OVERHEAD_BYTES = 512
"""Room for a record's key, headers and framing within the topic's limit."""

LEDGER_CONFIGS: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.2",
    "max.compaction.lag.ms": "21600000",
    "delete.retention.ms": "86400000",
}
"""Compacted within hours, so that a restore reads little; tombstones stay a day, so that every follower sees them."""


class Verdict(StrEnum):
    """What a gate says."""

    OK = "ok"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Finding:
    """One gate's answer. ``subject`` is the topic or account it is about."""

    gate: str
    verdict: Verdict
    subject: str = ""
    text: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """What the gates learned and the service needs."""

    findings: tuple[Finding, ...]
    max_outcome_bytes: Mapping[str, int]
    partitions: Mapping[str, int]
    """Partition counts by topic."""
    made: Mapping[str, int]
    """Topics that were missing and have been made, with their partitions."""
    input_retention_s: float | None
    """How long the input topic keeps a record; None: for ever, as far as time goes."""

    @property
    def refusals(self) -> list[str]:
        """One line for each refusing gate, remedy included."""
        return [
            f"{one.gate} ({one.subject}): {one.text}; {one.remedy}"
            for one in self.findings
            if one.verdict is Verdict.REFUSE
        ]


async def look(
    settings: Settings, kafka: KafkaPort, admin: KafkaAdmin, providers: Mapping[str, BatchProvider]
) -> World:
    """Go through every gate.

    Raises:
        KafkaUnavailable: no broker answered, so nothing can be said.
    """
    topics = settings.topics
    names = [topics.requests, topics.results, topics.failures, topics.events]
    names += [topics.review] if topics.review else []
    internal = [topics.ledger_topic, topics.control_topic]
    found = dict(await admin.describe([*names, *internal]))
    findings: list[Finding] = []
    made = await _make_missing(settings, admin, found, findings)
    found.update(await admin.describe([*names, *internal]))
    await _let_ledger_grow(settings, admin, found, findings)
    findings += _check_input(settings, found[topics.requests])
    findings += _check_ledger(settings, found[topics.ledger_topic], found[topics.requests])
    findings += _check_control(found[topics.control_topic], topics.control_topic)
    for name in internal:
        findings += _check_batch_fits(settings, "facts fit", name, found[name])
    findings += await _check_transactions(settings, kafka)
    limits: dict[str, int] = {}
    for name in names[1:]:
        findings += _check_output(settings, name, found[name], found[topics.requests], limits)
    for name, provider in providers.items():
        findings += await _check_account(settings, name, provider)
    counts = {name: topic.partitions for name, topic in found.items() if topic is not None}
    return World(tuple(findings), limits, counts, made, _retention_s(found[topics.requests]))


def _retention_s(requests: TopicDescription | None) -> float | None:
    retention_ms = -1 if requests is None else int(requests.configs.get("retention.ms", str(7 * DAY_MS)))
    return None if retention_ms < 0 else retention_ms / 1000


async def _make_missing(
    settings: Settings,
    admin: KafkaAdmin,
    found: Mapping[str, TopicDescription | None],
    findings: list[Finding],
) -> dict[str, int]:
    topics = settings.topics
    there = found.get(topics.requests)
    remembered = found.get(topics.ledger_topic)
    if there is None and remembered is not None:
        findings.append(
            Finding(
                "input is the one we know",
                Verdict.REFUSE,
                topics.requests,
                f"the topic does not exist, but its ledger {topics.ledger_topic} does: it was deleted, or never made",
                "name the right topic in topics.requests; for a new one make it with"
                f" {remembered.partitions} partitions and give topics.group a new name",
            )
        )
        return {}
    partitions = topics.partitions if there is None else there.partitions
    wanted: dict[str, tuple[int, Mapping[str, str]]] = {
        topics.requests: (partitions, {}),
        topics.results: (partitions, {}),
        topics.failures: (partitions, {}),
        topics.events: (1, {}),
        topics.ledger_topic: (partitions, LEDGER_CONFIGS),
        topics.control_topic: (1, LEDGER_CONFIGS),
    }
    if topics.review:
        wanted[topics.review] = (partitions, {})
    made: dict[str, int] = {}
    for name, (count, configs) in wanted.items():
        if found.get(name) is not None:
            continue
        if not topics.create:
            findings.append(
                Finding(
                    "topic exists",
                    Verdict.REFUSE,
                    name,
                    "the topic does not exist",
                    f"create it with {count} partitions"
                    + (f" and {', '.join(f'{k}={v}' for k, v in configs.items())}" if configs else "")
                    + ", or allow it with topics.create",
                )
            )
            continue
        await admin.create(name, count, configs)
        made[name] = count
        findings.append(Finding("topic exists", Verdict.OK, name, f"made with {count} partitions"))
    return made


async def _let_ledger_grow(
    settings: Settings, admin: KafkaAdmin, found: dict[str, TopicDescription | None], findings: list[Finding]
) -> None:
    """The ledger is ours: it follows the input's partitions, if the settings let us make topics."""
    topics = settings.topics
    ledger, requests = found[topics.ledger_topic], found[topics.requests]
    if ledger is None or requests is None or ledger.partitions >= requests.partitions or not topics.create:
        return
    await admin.grow(topics.ledger_topic, requests.partitions)
    found[topics.ledger_topic] = ledger._replace(partitions=requests.partitions)
    findings.append(
        Finding(
            "ledger has a partition for each of the input",
            Verdict.OK,
            topics.ledger_topic,
            f"raised from {ledger.partitions} to {requests.partitions} partitions",
        )
    )


async def _check_transactions(settings: Settings, kafka: KafkaPort) -> list[Finding]:
    """Whether the cluster lets us begin to write transactions; none is written.

    Raises:
        KafkaUnavailable: it did not answer, which says nothing of our rights.
    """
    topics = settings.topics
    transactional_id = f"{topics.ledger_topic}.{PROBE}"
    producer = kafka.partition_producer(topics.requests, 0, topics.group, transactional_id)
    try:
        await producer.init()
    except PartitionLost:
        pass  # another replica starts at this moment and asks the same
    except KafkaRefused as error:
        return [
            Finding(
                "transactions are allowed",
                Verdict.REFUSE,
                transactional_id,
                f"the cluster does not let us open a transactional producer ({error})",
                f"allow WRITE and DESCRIBE on transactional ids that begin with {topics.ledger_topic}.",
            )
        ]
    finally:
        await producer.close()
    return [Finding("transactions are allowed", Verdict.OK, transactional_id)]


def _check_input(settings: Settings, topic: TopicDescription | None) -> list[Finding]:
    name = settings.topics.requests
    if topic is None:
        return []
    found: list[Finding] = []
    policy = topic.configs.get("cleanup.policy", "delete")
    if "compact" in policy:
        found.append(
            Finding(
                "input is not compacted",
                Verdict.REFUSE,
                name,
                f"cleanup.policy is {policy}: compaction would delete requests that still wait",
                "set cleanup.policy=delete on the input topic, or produce into another topic",
            )
        )
    else:
        found.append(Finding("input is not compacted", Verdict.OK, name, f"cleanup.policy={policy}"))
    retention_ms = int(topic.configs.get("retention.ms", str(7 * DAY_MS)))
    needed_ms = round(max(route.sla_s for route in settings.routes.values()) * 1000) + DAY_MS
    if 0 <= retention_ms < needed_ms:
        found.append(
            Finding(
                "input is kept long enough",
                Verdict.REFUSE,
                name,
                f"retention.ms keeps records {hours(retention_ms / 1000)}, the longest SLA and a day of retries"
                f" need {hours(needed_ms / 1000)}",
                f"set retention.ms to {needed_ms} or more (seven days is a good value)",
            )
        )
    else:
        found.append(Finding("input is kept long enough", Verdict.OK, name, f"retention.ms={retention_ms}"))
    size_limit = int(topic.configs.get("retention.bytes", "-1"))
    if size_limit >= 0:
        found.append(
            Finding(
                "input is kept long enough",
                Verdict.WARN,
                name,
                f"retention.bytes={size_limit} deletes waiting requests when traffic is high",
                "set retention.bytes=-1 and let time alone delete",
            )
        )
    if topic.configs.get("message.timestamp.type", "CreateTime") == "CreateTime":
        ahead_ms = int(topic.configs.get("message.timestamp.after.max.ms", "3600000"))
        if ahead_ms > DAY_MS:
            found.append(
                Finding(
                    "timestamps can be trusted",
                    Verdict.WARN,
                    name,
                    "producers may set any timestamp, and retention goes by it",
                    "set message.timestamp.type=LogAppendTime, or bound message.timestamp.after.max.ms",
                )
            )
    return found


def _check_ledger(
    settings: Settings, ledger: TopicDescription | None, requests: TopicDescription | None
) -> list[Finding]:
    name = settings.topics.ledger_topic
    if ledger is None:
        return []
    found: list[Finding] = []
    policy = ledger.configs.get("cleanup.policy", "delete")
    if policy != "compact":
        found.append(
            Finding(
                "ledger is compacted",
                Verdict.REFUSE,
                name,
                f"cleanup.policy is {policy}: the memory of what was settled would be deleted or grow for ever",
                "set cleanup.policy=compact on the ledger topic",
            )
        )
    else:
        found.append(Finding("ledger is compacted", Verdict.OK, name))
    if requests is not None and ledger.partitions < requests.partitions:
        found.append(
            Finding(
                "ledger has a partition for each of the input",
                Verdict.REFUSE,
                name,
                f"{ledger.partitions} partitions for {requests.partitions} of the input",
                f"raise the ledger topic to {requests.partitions} partitions",
            )
        )
    kept_ms = int(ledger.configs.get("delete.retention.ms", str(DAY_MS)))
    if kept_ms < DAY_MS:
        found.append(
            Finding(
                "ledger keeps tombstones a day",
                Verdict.WARN,
                name,
                f"delete.retention.ms={kept_ms}: a replica that follows slowly may miss an end",
                f"set delete.retention.ms={DAY_MS}",
            )
        )
    return found


def _check_control(control: TopicDescription | None, name: str) -> list[Finding]:
    if control is None:
        return []
    policy = control.configs.get("cleanup.policy", "delete")
    if policy == "compact" and control.partitions == 1:
        return [Finding("control topic", Verdict.OK, name)]
    return [
        Finding(
            "control topic",
            Verdict.REFUSE,
            name,
            f"it has {control.partitions} partitions and cleanup.policy={policy}",
            "make it anew with one partition and cleanup.policy=compact",
        )
    ]


def _check_output(
    settings: Settings,
    name: str,
    topic: TopicDescription | None,
    requests: TopicDescription | None,
    limits: dict[str, int],
) -> list[Finding]:
    if topic is None:
        return []
    takes = int(topic.configs.get("max.message.bytes", str(DEFAULT_MAX_MESSAGE_BYTES)))
    limits[name] = max(1024, takes - RECORD_OVERHEAD_BYTES)
    if "compact" in (policy := topic.configs.get("cleanup.policy", "delete")):
        return [
            Finding(
                "outcomes are kept",
                Verdict.REFUSE,
                name,
                f"cleanup.policy is {policy}: of several outcomes with one key compaction keeps only the last",
                "set cleanup.policy=delete on this topic",
            )
        ]
    too_small = _check_batch_fits(settings, "outcomes fit", name, topic)
    if too_small:
        return too_small
    gives = DEFAULT_MAX_MESSAGE_BYTES
    if requests is not None:
        gives = int(requests.configs.get("max.message.bytes", str(gives)))
    if name == settings.topics.results and takes < gives:
        return [
            Finding(
                "outcomes fit",
                Verdict.WARN,
                name,
                f"the topic takes records of {takes} bytes, the input of {gives}: a long answer becomes a failure"
                " of class outcome_too_large",
                f"set max.message.bytes={gives} or more on this topic",
            )
        ]
    return [Finding("outcomes fit", Verdict.OK, name, f"max.message.bytes={takes}")]


def _check_batch_fits(settings: Settings, gate: str, name: str, topic: TopicDescription | None) -> list[Finding]:
    """Nothing, or that the topic is too small for what we send at a time."""
    if topic is None:
        return []
    takes = int(topic.configs.get("max.message.bytes", str(DEFAULT_MAX_MESSAGE_BYTES)))
    if takes >= settings.kafka.produce_batch_bytes:
        return []
    return [
        Finding(
            gate,
            Verdict.REFUSE,
            name,
            f"the topic takes {takes} bytes at a time, but we send in batches of up to"
            f" {settings.kafka.produce_batch_bytes}: a full one would be refused again and again",
            f"set kafka.produce_batch_bytes to {takes} or less, or raise max.message.bytes of this topic",
        )
    ]


async def _check_account(settings: Settings, name: str, provider: BatchProvider) -> Sequence[Finding]:
    """A key may have one right and lack the other: both are asked for, and told apart."""
    answers: dict[str, object] = {"batches": await provider.list_batches()}
    if not provider.is_inline:  # else rows and results are parts of a batch, and a right to files is not needed
        answers["files"] = await provider.list_files(FileRole.INPUT)
    granted = [what for what, answer in answers.items() if not isinstance(answer, CallFailed)]
    found = [_check_right(name, what, answer, granted) for what, answer in answers.items()]
    if all(one.verdict is Verdict.REFUSE for one in found):
        remedy = f"check accounts.{name}.api_key, its project and its rights to {' and '.join(reversed(answers))}"
        found = [Finding("account is let in", Verdict.REFUSE, name, found[0].text, remedy)]
    skew_s = provider.clock_skew_s
    if skew_s is not None and abs(skew_s) > settings.limits.max_clock_skew_s:
        found.append(
            Finding(
                "clocks agree",
                Verdict.WARN,
                name,
                f"our clock differs from the provider's by {skew_s:.0f} s",
                "let NTP set this machine's clock",
            )
        )
    return found


_WITHOUT = {
    "batches": "no batch can be started or watched",
    "files": "no input can be uploaded, and no result read or deleted",
}


def _check_right(name: str, what: str, answer: object, granted: Sequence[str]) -> Finding:
    """What the answer to listing ``what`` says of the account's rights; ``granted`` are those that it has."""
    gate = f"account may use {what}"
    if not isinstance(answer, CallFailed):
        return Finding(gate, Verdict.OK, name)
    if answer.kind is CallFailure.ACCOUNT:
        text = f"the provider refuses to list this account's {what} ({answer.summary})"
        remedy = f"check accounts.{name}.api_key and its project, and give the key the right to read and write {what}"
        if granted:
            text += f", although it lists its {granted[0]}: the key is right and lacks a right; {_WITHOUT[what]}"
            remedy = f"give the key of accounts.{name}.api_key the right to read and write {what}, or name another key"
        return Finding(gate, Verdict.REFUSE, name, text, remedy)
    return Finding(
        gate,
        Verdict.WARN,
        name,
        f"the provider could not be asked for {what} ({answer.summary})",
        f"check accounts.{name}.base_url and the network; rows wait until it answers",
    )


async def look_without_broker(reason: KafkaUnavailable) -> list[Finding]:
    """The one finding there is when no broker answers."""
    return [
        Finding(
            "broker answers",
            Verdict.REFUSE,
            "kafka",
            str(reason),
            "check kafka.bootstrap_servers, the network and the login",
        )
    ]
