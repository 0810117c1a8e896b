"""Kafka as the engine needs it: the ports of ``batchferry.ports`` played by aiokafka.

The client has habits that would break our promises (a commit that succeeds although a record failed, records
delivered before the assignment callback ran, awaits without an end). Each is made impossible here, once, so
nobody else has to know. The room knows brokers, groups, offsets and bytes; it must not know what a record
means: no batches, ledgers or providers.
"""

from batchferry.kafka.embedded import EmbeddedBroker
from batchferry.kafka.port import AioKafka
from batchferry.kafka.settings import KafkaClientSettings

__all__ = ["AioKafka", "EmbeddedBroker", "KafkaClientSettings"]
