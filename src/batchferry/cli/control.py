"""How a command writes what an operator wants: one record on the control topic, which every replica follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchferry.cli.errors import TopicMissing
from batchferry.domain import control
from batchferry.ports import OutRecord

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import KafkaPort


async def write_control(kafka: KafkaPort, settings: Settings, entry: control.ControlEntry) -> None:
    """Write a control record; returns when the broker has it.

    Raises:
        KafkaUnavailable: no broker answered; the record may be there or not, and writing it again is harmless.
        TopicMissing: the service has never run here.
    """
    topic = settings.topics.control_topic
    admin = await kafka.admin()
    try:
        if (await admin.describe([topic]))[topic] is None:
            raise TopicMissing(f"topic {topic} does not exist; 'batchferry run' makes it at its first start")
    finally:
        await admin.close()
    producer = kafka.plain_producer()
    await producer.start()
    try:
        await producer.send([OutRecord(topic, *control.encode(entry), partition=0)])
    finally:
        await producer.stop()
