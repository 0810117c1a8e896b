"""What becomes of the service when the input topic changes under it: made anew, away, cut off, or grown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from inprocess_kit import HOUR_S, Pier, Script, request
from service_kit import PARTITIONS, Rig

from batchferry.app import Service
from batchferry.engine import inputwatch
from batchferry.kafka import AioKafka
from batchferry.simulator import Durations, RunCurve
from broker.kit import delete_below

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(180)]

MONTH_MS = 30 * 86_400_000
KEPT = {"requests": {"retention.ms": str(MONTH_MS)}}
PATIENT = {"default": {"max_rows": 1000, "sla_s": 400 * HOUR_S, "margin_s": 3 * HOUR_S}}
"""Rows of these tests wait as long as the test lasts."""
QUICK_METADATA = {"metadata_max_age_s": 1.0, "request_timeout_s": 5.0}


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch on the input looks twice a second and compares each witness each time."""
    monkeypatch.setattr(inputwatch, "LOOK_S", 0.5)
    monkeypatch.setattr(inputwatch, "LOOK_PATIENCE_S", 4.0)
    monkeypatch.setattr(inputwatch, "TOPICS_LOOK_S", 1.0)
    monkeypatch.setattr(inputwatch, "WITNESS_LOOK_S", 0.0)


async def delete_topic(pier: Pier, eventually: Any) -> None:
    """Delete the input topic and wait until it is gone."""
    client = AIOKafkaAdminClient(bootstrap_servers=pier.bootstrap)
    await client.start()
    await client.delete_topics([pier.topics["requests"]])
    await client.close()
    admin = await pier.kafka.admin()

    async def is_gone() -> bool:
        return (await admin.describe([pier.topics["requests"]]))[pier.topics["requests"]] is None

    await eventually(is_gone, "the deletion of the topic")
    await admin.close()


async def make_topic(pier: Pier, records_each: int) -> None:
    """Make it anew with so many other records in each partition."""
    admin = await pier.kafka.admin()
    await admin.create(pier.topics["requests"], pier.partitions, KEPT["requests"])
    await admin.close()
    if records_each:
        await produce_at(pier, [(p, 0.0, f"new{n}") for p in range(pier.partitions) for n in range(records_each)])


async def produce_at(pier: Pier, records: list[tuple[int, float, str]]) -> None:
    """Records at (partition, hours ago, custom_id)."""
    producer = AIOKafkaProducer(bootstrap_servers=pier.bootstrap)
    await producer.start()
    for partition, hours_ago, custom_id in records:
        made = pier.now - timedelta(hours=hours_ago)
        sent = request("aged", custom_id)
        await producer.send_and_wait(
            pier.topics["requests"], sent.value, sent.key, partition, round(made.timestamp() * 1000), list(sent.headers)
        )
    await producer.stop()


async def refused_everywhere(pier: Pier) -> list[str]:
    """Wait until every partition is refused; what was said. The service goes on and says why it is not ready."""
    await pier.until(
        lambda: {one["partition"] for one in pier.events("partition_refused")} == set(range(pier.partitions)),
        "the refusal of every partition",
    )
    assert pier.service is not None
    assert len(pier.service.not_ready()) == pier.partitions
    assert not pier.service.not_live()
    return [str(one["reason"]) for one in pier.events("partition_refused")]


async def test_an_input_made_anew_while_nobody_looked_is_refused(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """The new topic has more records than were ever settled: its requests would pass for answered ones."""
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, topic_configs=KEPT) as pier:
        await pier.send("first", on_each(pier, "first", 3))
        await pier.landed("first")
        await pier.stop()
        await delete_topic(pier, eventually)
        await make_topic(pier, 20)
        pier.service = Service(pier.settings(), telemetry=pier.telemetry)
        await pier.service.start()
        for text in await refused_everywhere(pier):
            assert pier.topics["requests"] in text
            assert "made anew" in text
            assert "topics.group" in text
        assert sum(len(one) for one in pier.heard.outcomes.values()) == 3 * pier.partitions


@pytest.mark.parametrize("after", ["at once", "later", "later and empty"])
async def test_an_input_made_anew_while_we_run_is_refused(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any, quick_watch: None, after: str
) -> None:
    """While there is no topic the service says so and waits; it takes nothing of the next one for its own."""
    del quick_watch
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, topic_configs=KEPT, kafka=QUICK_METADATA) as pier:
        await pier.send("first", on_each(pier, "first", 3))
        await pier.landed("first")
        await delete_topic(pier, eventually)
        if after != "at once":
            wanted = [f"the topic {pier.topics['requests']} does not exist"]
            await pier.until(
                lambda: pier.service is not None and pier.service.not_ready() == wanted, "a word on the missing topic"
            )
            assert [one["what"] for one in pier.events("alarm")] == ["input_topic_missing"]
        await make_topic(pier, 0 if after == "later and empty" else 20)
        assert all("made anew" in text for text in await refused_everywhere(pier))
        assert sum(len(one) for one in pier.heard.outcomes.values()) == 3 * pier.partitions


# ---------------------------------------------------------------------------------------------- lost input


def on_each(pier: Pier, case: str, rows: int) -> list[Any]:
    """So many requests for each partition."""
    made = []
    for partition in range(pier.partitions):
        for number in range(rows):
            plain = request(case, f"{case}-{partition}-{number}")
            made.append(type(plain)(plain.value, plain.key, plain.headers, partition))
    return made


async def waits(pier: Pier, rows: int) -> None:
    """So many rows are in open batches."""
    await pier.until(lambda: sum(one["rows"] for one in pier.supervisor.status()["waiting"]) == rows, f"{rows} waiting")


def lost_of(pier: Pier) -> dict[tuple[int, int], str]:
    """The code of each failure of class ``retention``, by request; there is one outcome each."""
    assert all(len(one) == 1 for one in pier.heard.outcomes.values())
    return {where: one[0].code for where, one in pier.heard.outcomes.items() if one[0].row_class == "retention"}


async def test_input_deleted_while_nobody_looked_is_told_offset_by_offset(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure for each deleted request and one alarm for each partition; the others go on waiting."""
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, topic_configs=KEPT, routes=PATIENT) as pier:
        await pier.send("w", on_each(pier, "w", 6))
        await waits(pier, 18)
        await pier.stop()
        await delete_below(pier.bootstrap, pier.topics["requests"], 0, 4)
        await delete_below(pier.bootstrap, pier.topics["requests"], 1, 6)
        await pier.start()
        await waits(pier, 8)
        expected = {(0, n): "input_deleted" for n in range(4)} | {(1, n): "input_deleted" for n in range(6)}
        await pier.until(lambda: lost_of(pier) == expected, "a failure for each lost offset")
        told = sorted((one["partition"], one["rows"]) for one in pier.events("input_lost"))
        assert told == [(0, 4), (1, 6)]
        await pier.until(
            lambda: pier.supervisor.status()["partitions"]["1"]["watermark"] == 6, "the watermark moving on"
        )
        assert set(pier.heard.outcomes) == set(expected)


async def test_input_deleted_while_it_waits_unread_is_told_too(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position is gone from the log: read and unread requests below the new start fail, later ones are read."""
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, topic_configs=KEPT, routes=PATIENT) as pier:
        await pier.send("w", on_each(pier, "w", 2))
        await waits(pier, 6)
        pier.supervisor.consumer.pause([0])
        await pier.send("more", [one for one in on_each(pier, "more", 4) if one.partition == 0])
        await delete_below(pier.bootstrap, pier.topics["requests"], 0, 5)
        pier.supervisor.consumer.resume(0)
        expected = {(0, n): "input_deleted" for n in range(5)}
        await pier.until(lambda: lost_of(pier) == expected, "a failure for each lost offset")
        await waits(pier, 5)
        assert [(one["rows"], one["first"], one["last"]) for one in pier.events("input_lost")] == [(5, 0, 4)]


class Slow(Script):
    """Batches that take long enough for a restart."""

    def durations(self, life: int) -> Durations | None:
        del life
        return Durations(validating_s=5.0, in_progress=RunCurve(minimum_s=8 * HOUR_S, factor_s=0.0), finalizing_s=3.0)


async def test_rows_at_the_provider_land_though_their_records_are_gone(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no loss: each gets its answer, which says that key and headers could not be had; an alarm tells why."""
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, {"slow": Slow()}, topic_configs=KEPT) as pier:
        await pier.send("slow", on_each(pier, "slow", 3))
        await pier.until(lambda: pier.events("batch_submitted"), "the batch at the provider")
        await pier.stop()
        for partition in range(pier.partitions):
            await delete_below(pier.bootstrap, pier.topics["requests"], partition, 3)
        await pier.start()
        outcomes = await pier.landed("slow")
        assert [one.row_class for one in outcomes] == ["succeeded"] * 9
        assert all("source_deleted" in one.said["flags"] for one in outcomes)
        assert all(one.record.key is None for one in outcomes)
        assert sum(int(str(one["rows"])) for one in pier.events("input_lost")) == 9


async def test_rows_that_retention_would_take_are_given_up_in_time(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_watch: None
) -> None:
    """Unread requests near their deletion become failures that quote them, oldest first; younger ones are answered."""
    del quick_watch
    async with Pier(
        broker.bootstrap, tmp_path, monkeypatch, topic_configs=KEPT, limits={"headroom_min_s": 168 * HOUR_S}
    ) as pier:
        pier.supervisor.consumer.pause(range(3))
        await produce_at(pier, [(0, 555.0, f"old{n}") for n in range(4)] + [(0, 1.0, "young0"), (0, 1.0, "young1")])
        expected = {(0, n): "input_expiring" for n in range(4)}
        await pier.until(lambda: lost_of(pier) == expected, "a failure for each expiring offset")
        for number in range(4):
            (outcome,) = pier.heard.outcomes[0, number]
            assert outcome.said["custom_id"] == f"old{number}"
            assert outcome.record.key == b"aged"
            assert f"old{number}" in outcome.said["original"]["value"]
        assert [one.record.offset for n in range(4) for one in pier.heard.outcomes[0, n]] == sorted(
            one.record.offset for n in range(4) for one in pier.heard.outcomes[0, n]
        )
        await pier.until(lambda: len(pier.heard.outcomes) == 6, "an answer to the younger ones")
        assert pier.heard.outcomes[0, 4][0].row_class == "succeeded"
        assert [one["rows"] for one in pier.events("input_expiring")] == [4]
        await pier.until(
            lambda: pier.supervisor.status()["partitions"]["0"]["watermark"] == 6, "the watermark moving on"
        )


# ---------------------------------------------------------------------------------------------- more partitions


@pytest.fixture
async def rig(broker: Any, kafka: AioKafka, tmp_path: Path) -> AsyncIterator[Rig]:
    """Topics, a provider, room for replicas."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(Rig(kafka, broker.bootstrap, tmp_path))


async def test_new_partitions_of_the_input_are_served_while_we_run(rig: Rig) -> None:
    """Three become six under two replicas: the ledger gets its partitions first, and each request its one outcome.

    The outcome topics stay as they are, so that from then on the key of an outcome says where it goes.
    """
    one, two = rig.replica("one"), rig.replica("two")
    one.go()
    await rig.produce(30)
    await rig.settle_the_books()
    two.go()
    await rig.until(two.owned, "the second replica owning something")
    admin = await rig.kafka.admin()
    await asyncio.gather(admin.grow(rig.requests, 6), admin.grow(rig.requests, 6))
    rig.partitions = 6

    async def shared_out() -> bool:
        mine, theirs = await one.owned(), await two.owned()
        return len(mine) == len(theirs) == 3 and mine | theirs == set(range(6))

    await rig.until(shared_out, "three partitions for each replica")
    await rig.produce(120, range(6))  # twenty each: with batches of thirty each batch spans partitions
    described = await admin.describe([rig.ledger, rig.results])
    await admin.close()
    assert [topic.partitions for topic in described.values() if topic is not None] == [6, PARTITIONS]
    await rig.settle_the_books()
    assert not one.told("partition_lost", reason="fenced")
    # A batch across old and new partitions was led, landed and cleaned: both replicas follow the new ledgers.
    ledgers = await rig.ledgers()
    assert any(
        len(lot.partitions) > 1 and max(lot.partitions) > 2 for one in ledgers.values() for lot in one.lots.values()
    )
