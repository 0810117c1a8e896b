"""Bad input and a bad world: one clear failure for each bad record, no harm to its neighbours, and a clear refusal to start.

One service reads everything, is stopped, started again and read once more; the tests then look at what it published.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from inprocess_kit import Outcome, Pier, Sent, chat_body, request

from batchferry.app import Service, Verdict, check_gates
from batchferry.domain.errors import GateRefused, KafkaUnavailable
from batchferry.domain.requests import REMEDIES, RecordRule
from batchferry.telemetry import RecordingTelemetry

BODY = json.dumps(chat_body("bad")).encode()
SLICE = (("slice", b"bad"),)


def line(members: bytes, body: bytes = BODY) -> bytes:
    """A record's value from its members before ``body``."""
    return b"{" + members + b', "body": ' + body + b"}"


def body_with(**members: Any) -> bytes:
    """A good body with some members otherwise."""
    return json.dumps({**chat_body("bad"), **members}).encode()


GOOD_ID = b'"custom_id": "x"'
LONG_ID = ("🦓 é 東" * 75)[:300]

BAD: Mapping[str, tuple[bytes | None, RecordRule]] = {
    "tombstone": (None, RecordRule.TOMBSTONE),
    "empty": (b"", RecordRule.EMPTY),
    "blank line": (b" \r\n\t", RecordRule.EMPTY),
    "bom": (b"\xef\xbb\xbf" + line(GOOD_ID), RecordRule.BOM),
    "not JSON": (b"not json at all", RecordRule.NOT_JSON),
    "not UTF-8": (line(b'"custom_id": "caf\xe9"'), RecordRule.NOT_UTF8),
    "two values": (line(GOOD_ID) + b"\n" + line(GOOD_ID), RecordRule.TRAILING_DATA),
    "an array": (b"[" + line(GOOD_ID) + b"]", RecordRule.NOT_OBJECT),
    "half an emoji": (line(GOOD_ID, body_with(user="\ud83e")), RecordRule.LONE_SURROGATE),
    "too deep": (
        line(GOOD_ID, body_with(user=0).replace(b": 0", b": " + b"[" * 300 + b"]" * 300)),
        RecordRule.TOO_DEEP,
    ),
    "a member twice": (line(b'"custom_id": "a", "custom_id": "b"'), RecordRule.DUPLICATE_MEMBER),
    "no custom_id": (line(b'"method": "POST"'), RecordRule.MISSING_CUSTOM_ID),
    "integer custom_id": (line(b'"custom_id": 42'), RecordRule.CUSTOM_ID_TYPE),
    "empty custom_id": (line(b'"custom_id": ""'), RecordRule.CUSTOM_ID_EMPTY),
    "custom_id too long": (line(b'"custom_id": "%b"' % (b"a" * 2000)), RecordRule.CUSTOM_ID_TOO_LONG),
    "GET": (line(GOOD_ID + b', "method": "GET"'), RecordRule.METHOD_NOT_POST),
    "full URL": (line(GOOD_ID + b', "url": "https://api.openai.com/v1/chat/completions"'), RecordRule.URL_IS_ABSOLUTE),
    "unknown endpoint": (line(GOOD_ID + b', "url": "/v1/horoscopes"'), RecordRule.UNKNOWN_ENDPOINT),
    "no body": (b"{" + GOOD_ID + b"}", RecordRule.MISSING_BODY),
    "body is text": (line(GOOD_ID, json.dumps(BODY.decode()).encode()), RecordRule.BODY_NOT_OBJECT),
    "no model": (line(GOOD_ID, b'{"messages": [{"role": "user", "content": "hi"}]}'), RecordRule.MISSING_MODEL),
    "no messages": (line(GOOD_ID, b'{"model": "gpt-4o-mini"}'), RecordRule.MISSING_INPUT),
    "messages is text": (line(GOOD_ID, body_with(messages="hi")), RecordRule.WRONG_TYPE),
    "model is a number": (line(GOOD_ID, body_with(model=7)), RecordRule.WRONG_TYPE),
    "max_tokens is text": (line(GOOD_ID, body_with(max_tokens="many")), RecordRule.WRONG_TYPE),
    "stream": (line(GOOD_ID, body_with(stream=True)), RecordRule.STREAMING),
    "Anthropic's shape": (b'{"custom_id": "x", "params": {"model": "m"}}', RecordRule.SHAPE_NOT_SUPPORTED),
    "40 MB": (line(GOOD_ID, body_with(user="x" * 40_000_000)), RecordRule.TOO_LARGE),
}
BAD_HEADERS: Mapping[str, tuple[str, bytes]] = {
    "sla is no duration": ("sla", b"soon"),
    "deadline is no instant": ("deadline", b"tomorrow"),
    "sla of ten thousand years": ("sla", b"P4000000D"),
    "deadline at the end of time": ("deadline", b"9999-12-31T23:59:59Z"),
    "an account that is not ours": ("provider", b"nobody"),
}
NULL_HEADERS = ("note", "traceparent", "ce_id", "sla", "slice")


class Reading:
    """The pier after a stop and a second start."""

    def __init__(self, pier: Pier) -> None:
        self.pier = pier

    def outcome(self, name: str) -> Outcome:
        (found,) = self.pier.outcomes(name)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reading(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reading]:
    """Everything bad, read in one life and met by a second one."""
    folder = tmp_path_factory.mktemp("bad-input")
    with pytest.MonkeyPatch.context() as patch:
        async with Pier(
            broker.bootstrap, folder, patch, topic_configs={"requests": {"max.message.bytes": "50000000"}}
        ) as pier:
            # All in one partition, each bad record between two good ones.
            for number, (name, (value, _)) in enumerate(BAD.items()):
                await pier.send("good", [request("good", f"g{number}", key=b"a")])
                await pier.send(name, [Sent(value, b"a", SLICE)])
            for name, header in BAD_HEADERS.items():
                await pier.send(name, [Sent(line(GOOD_ID), b"a", (*SLICE, header))])
            await pier.send("huge key", [Sent(b"{", b"k" * 2_000_000, SLICE, 0)])
            await pier.send("good", [request("good", "last", key=b"a"), request("good", LONG_ID, key=b"a")])
            await pier.send("b02", [request("b02", "req-5", text=text) for text in ("France", "Norway", "France")])
            for name in NULL_HEADERS:
                await pier.send(f"null {name}", [request("good", f"null-{name}", key=b"a", headers=[(name, None)])])
                await pier.send(f"bad null {name}", [Sent(b"{", b"a", ((name, None),))])
            # B14 as it is told, in a partition of its own
            good = [request("b14", one, text=one) for one in ("k10", "k13")]
            b14 = [good[0], Sent(None, b"a"), Sent(b"not json at all"), good[1]]
            await pier.send("b14", [Sent(one.value, one.key, one.headers, 2) for one in b14])
            for name in list(pier.placed):
                await pier.landed(name)
            await pier.until(lambda: not pier.supervisor.status()["batches"], "every batch at its end")
            await pier.stop()
            # A second life on an empty folder must not meet any of them again; a later record shows that it has read on.
            await pier.start()
            await pier.send("after", [request("after", f"a{p}") for p in range(3)])
            await pier.landed("after")
            await pier.until(lambda: not pier.supervisor.status()["batches"], "every batch at its end")
            yield Reading(pier)


@pytest.mark.parametrize("name", [*BAD, *BAD_HEADERS])
def test_a_bad_record_is_one_failure_that_says_why(reading: Reading, name: str) -> None:
    """Class, rule, topic, partition and offset, remedy, and the value in a bounded form; once, also after a restart."""
    rule = BAD[name][1] if name in BAD else RecordRule.BAD_HEADER
    value = BAD[name][0] if name in BAD else line(GOOD_ID)
    outcome = reading.outcome(name)
    error = outcome.said["error"]
    partition, offset = outcome.where
    assert outcome.record.topic == reading.pier.topics["failures"]
    assert (error["class"], error["code"]) == ("bad_record", rule.value)
    assert f"{reading.pier.topics['requests']}-{partition}@{offset}" in error["message"]
    assert error["remedy"] == REMEDIES[rule]
    original = outcome.said.get("original")
    if value is None:
        assert original is None
    else:
        assert original["bytes"] == len(value)
        assert original["sha256"] == hashlib.sha256(value).hexdigest()
        assert len(outcome.record.value or b"") < 200_000


@pytest.mark.parametrize("name", NULL_HEADERS)
def test_a_header_without_a_value_is_lawful(reading: Reading, name: str) -> None:
    """An unknown one goes on as it came, on a result and on a failure; one of ours says nothing or breaks its rule."""
    for outcome in (reading.outcome(f"null {name}"), reading.outcome(f"bad null {name}")):
        if outcome.row_class == "succeeded":
            assert name != "sla"
        else:
            assert outcome.code == ("bad_header" if name == "sla" else "not_json")
        if name in {"note", "traceparent"}:
            assert (name, None) in list(outcome.record.headers)


def test_a_failure_sheds_a_key_that_its_topic_does_not_take(reading: Reading) -> None:
    """The key is two megabytes, the failures topic takes one: the failure comes without it."""
    outcome = reading.outcome("huge key")
    assert (outcome.code, outcome.record.key) == ("not_json", None)


def test_the_neighbours_of_bad_records_are_answered(reading: Reading) -> None:
    """Every good record between the bad ones has its answer, also one whose id has 300 characters and emoji."""
    outcomes = reading.pier.outcomes("good")
    assert [one.row_class for one in outcomes] == ["succeeded"] * (len(BAD) + 2)
    assert outcomes[-1].said["custom_id"] == LONG_ID


def test_no_bad_record_reached_the_provider(reading: Reading) -> None:
    """What was refused was neither sent nor paid."""
    assert "bad" not in reading.pier.provider.lives


def test_b02_one_id_and_different_bodies(reading: Reading) -> None:
    """The first two are both answered, each by its own body; the repetition is told as such and not run again."""
    first, second, third = reading.pier.outcomes("b02")
    assert (first.row_class, second.row_class, third.row_class) == ("succeeded", "succeeded", "duplicate")
    (life,) = reading.pier.provider.lives["b02"]
    assert life.texts == ["France", "Norway"]
    wires = {line.wire_id: line.text for line in life.lines}
    assert [wires[one.said["wire_id"]] for one in (first, second)] == ["France", "Norway"]
    assert third.said["duplicate_of"] == {
        "topic": reading.pier.topics["requests"], "partition": first.where[0], "offset": first.where[1],
    }  # fmt: skip
    assert third.said["error"]["remedy"]


def test_b14_a_tombstone_and_words_between_good_records(reading: Reading) -> None:
    """Two answers and two failures, and the raw value of the words is kept."""
    first, tombstone, words, last = reading.pier.outcomes("b14")
    assert (first.row_class, last.row_class) == ("succeeded", "succeeded")
    assert (tombstone.code, words.code) == ("tombstone", "not_json")
    assert words.said["original"]["value"] == "not json at all"
    assert words.said["source"] == {
        "topic": reading.pier.topics["requests"], "partition": 2, "offset": words.where[1], "event_id": None,
    }  # fmt: skip


async def test_the_committed_offset_reaches_the_end(reading: Reading) -> None:
    """Nothing bad keeps the group's offset back."""
    ends: dict[int, int] = {}
    for partition, offset in [where for one in reading.pier.placed.values() for where in one]:
        ends[partition] = max(ends.get(partition, 0), offset + 1)
    assert await reading.pier.settled_offsets() == ends


def test_a_restart_reports_nothing_twice(reading: Reading) -> None:
    """Across both lives each record has one outcome, and each bad one was refused once in our events too."""
    assert {len(one) for one in reading.pier.heard.outcomes.values()} == {1}
    assert len(reading.pier.events("record_refused")) == len(BAD) + len(BAD_HEADERS) + len(NULL_HEADERS) + 4


# ------------------------------------------------------------------------------------------- the gates


@contextlib.asynccontextmanager
async def quay(broker: Any, folder: Path, **topic_configs: Mapping[str, str]) -> AsyncIterator[Pier]:
    """A provider and, if any is described, topics; no service."""
    with pytest.MonkeyPatch.context() as patch:
        pier = Pier(broker.bootstrap, folder, patch)
        await pier.simulator.start()
        try:
            admin = await pier.kafka.admin()
            for name, configs in topic_configs.items():
                await admin.create(pier.topics[name], 3, configs)
            await admin.close()
            yield pier
        finally:
            await pier.kafka.aclose()
            await pier.simulator.stop()


async def refusals(pier: Pier, **overrides: Any) -> list[str]:
    """What the service says when it refuses to start; ``doctor`` must say the same."""
    settings = pier.settings(**overrides)
    service = Service(settings, telemetry=RecordingTelemetry())
    with pytest.raises(GateRefused) as caught:
        await service.start()
    await service.stop()
    found = await check_gates(settings)
    doctored = [one for one in found if one.verdict is Verdict.REFUSE]
    assert len(doctored) == len(caught.value.findings)
    assert all(one.remedy in text for one, text in zip(doctored, caught.value.findings, strict=True))
    return list(caught.value.findings)


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
async def test_a_compacted_input_topic_is_refused(broker: Any, tmp_path: Path, policy: str) -> None:
    """Compaction would delete requests that still wait: refused, with the topic, the reason and the remedy."""
    async with quay(broker, tmp_path, requests={"cleanup.policy": policy}) as pier:
        (text,) = await refusals(pier)
        assert pier.topics["requests"] in text
        assert "set cleanup.policy=delete" in text


async def test_an_input_topic_that_forgets_too_soon_is_refused(broker: Any, tmp_path: Path) -> None:
    """Records must outlive the longest promise."""
    async with quay(broker, tmp_path, requests={"retention.ms": "3600000"}) as pier:
        (text,) = await refusals(pier)
        assert "set retention.ms to" in text


async def test_an_output_topic_for_small_pieces_only_is_refused(broker: Any, tmp_path: Path) -> None:
    """A full batch of outcomes would be refused by it again and again."""
    async with quay(broker, tmp_path, requests={}, results={"max.message.bytes": "60000"}) as pier:
        (text,) = await refusals(pier)
        assert pier.topics["results"] in text
        assert "set kafka.produce_batch_bytes to 60000 or less" in text


async def test_missing_topics_are_named_when_they_may_not_be_made(broker: Any, tmp_path: Path) -> None:
    """With ``topics.create`` off every missing topic is listed with how to make it, and none is made."""
    async with quay(broker, tmp_path, requests={}) as pier:
        found = await refusals(pier, topics={"create": False})
        assert len(found) == 5
        for name in ("results", "failures", "events"):
            assert any(pier.topics[name] in text and "create it with" in text for text in found)
        assert sum("cleanup.policy=compact" in text for text in found) == 2
        admin = await pier.kafka.admin()
        described = await admin.describe([pier.topics["results"]])
        await admin.close()
        assert described[pier.topics["results"]] is None


async def test_a_wrong_key_is_refused(broker: Any, tmp_path: Path) -> None:
    """The account and the setting are named, the key is not."""
    async with quay(broker, tmp_path) as pier:
        (text,) = await refusals(pier, accounts={"default": {"api_key": "sk-wrong-secret"}})
        assert "accounts.default.api_key" in text
        assert "sk-wrong-secret" not in text


async def test_a_ledger_topic_that_is_not_compacted_is_refused(broker: Any, tmp_path: Path) -> None:
    """Our own memory must not be deleted by age."""
    async with quay(broker, tmp_path, requests={}) as pier:
        topic = pier.settings().topics.ledger_topic
        admin = await pier.kafka.admin()
        await admin.create(topic, 3, {"cleanup.policy": "delete"})
        await admin.close()
        (text,) = await refusals(pier)
        assert topic in text
        assert "set cleanup.policy=compact" in text


async def test_no_broker_is_said_at_once(broker: Any, tmp_path: Path) -> None:
    """Nobody listens at the address: an error that names it, within seconds; ``doctor`` says what to check."""
    async with quay(broker, tmp_path) as pier:
        settings = pier.settings(kafka={"bootstrap_servers": ["127.0.0.1:1"], "request_timeout_s": 2})
        service = Service(settings, telemetry=RecordingTelemetry())
        async with asyncio.timeout(15):
            with pytest.raises(KafkaUnavailable, match=r"127\.0\.0\.1:1"):
                await service.start()
            await service.stop()
            (finding,) = await check_gates(settings)
        assert finding.verdict is Verdict.REFUSE
        assert "kafka.bootstrap_servers" in finding.remedy
