"""Behaviour case B15 between two processes: a submission that is handed over in the middle."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from service_kit import PARTITIONS, SPEED, Rig

from batchferry.domain import control
from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord


@pytest.mark.real_broker
async def test_b15_a_submission_is_handed_over(broker: Any, kafka: AioKafka, tmp_path: Path) -> None:
    """The group takes a partition away while its create is on the way: the successor adopts that batch instead of
    sending the rows again; the first one's late work is refused without harm; both go on in one stable group.
    """
    async with Rig(kafka, broker.bootstrap, tmp_path, max_rows=6) as rig:
        rig.put(call="create", kind="gate", gate="create", nth=1, after_work=True)
        one, two = rig.replica("one"), rig.replica("two")
        await rig.produce(6)
        one.go()
        await rig.reached("create")
        one.freeze()
        two.go()
        await rig.until(lambda: two.told("batch_adopted"), "the successor finding the batch")
        one.thaw()
        await rig.release("create")
        await rig.until(lambda: one.told("partition_lost"), "the first one noticing")

        async def both_share() -> bool:
            mine, theirs = await one.owned(), await two.owned()
            return bool(mine) and bool(theirs) and len(mine) + len(theirs) == len(mine | theirs) == PARTITIONS

        await rig.until(both_share, "both owning a share of the partitions")
        rounds = len(two.told("partitions_assigned"))
        await rig.produce(6)
        await flush(rig)
        await rig.settle_the_books()
        assert len(two.told("partitions_assigned")) == rounds


async def flush(rig: Rig) -> None:
    """Whatever waits is due now: two replicas share the rows, so that no batch is full."""
    now = rig.origin + (datetime.now(UTC) - rig.started) * SPEED
    key, value = control.encode(control.Flush("all", now))
    producer = rig.kafka.plain_producer()
    await producer.start()
    await producer.send([OutRecord(f"{rig.requests}.{rig.group}.control", key, value, partition=0)])
    await producer.stop()
