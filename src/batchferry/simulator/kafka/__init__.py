"""A Kafka cluster inside the process, for seeded simulations of a whole service in virtual time.

::

    cluster = SimCluster(random.Random(7), wall_clock=clock.now)   # the broker; make it outside any process's context
    cluster.create_topic("requests", 12, {"retention.ms": "-1"})
    process = SimProcess("replica-1")                             # who asks; ``process.alive = False`` kills it
    port = SimKafka(cluster, process, SimKafkaSettings())         # a ``ports.KafkaPort``
    cluster.append([OutRecord("requests", b"k", b"v")])           # arrivals from outside any process
    cluster.faults.take_broker_away(20.0)                         # see ``Faults``; ``clear()`` ends them all

What a checker may ask without a round trip: ``committed_records``, ``end_offset``, ``log_start``,
``last_stable_offset``, ``group_offsets``, ``open_transactions``, ``finished``, ``group_view``, ``history``; and
``on_append`` calls back for every batch of records the moment ``read_committed`` readers may see it. What an
operator may do: ``create_partitions``, ``recreate_topic``, ``delete_records``, ``compact``, ``apply_retention``,
``housekeeping``, ``abort_transaction``, ``rebalance``.

How a call travels. It waits a random request delay, has its effect at the broker in one synchronous step, and its
answer waits a random reply delay. The way is a chain of timers that belong to the cluster (``SimCluster.later``, in
the context the cluster was made in), so ending the caller's task never un-sends anything. A process that dies with a
request on the way loses it or not by a coin; it never gets an answer again: its calls wait for ever.

Time is the running loop's, randomness the ``random.Random`` given, the wall clock a callable: the same seed on a
loop in virtual time gives the same run. Nothing here may iterate over a set of strings or objects.

What it does not play: several brokers and replicas, bytes on the wire, compression, transaction markers that reach
different partitions at different times, ACLs. This room must not know what a record means.
"""

from batchferry.simulator.kafka.cluster import GroupView, SimCluster
from batchferry.simulator.kafka.faults import FaultKind, FaultRates, Faults
from batchferry.simulator.kafka.port import SimKafka
from batchferry.simulator.kafka.process import SimProcess
from batchferry.simulator.kafka.records import FinishedTransaction, OpenTransaction, StoredRecord
from batchferry.simulator.kafka.settings import SimKafkaSettings

__all__ = [
    "FaultKind",
    "FaultRates",
    "Faults",
    "FinishedTransaction",
    "GroupView",
    "OpenTransaction",
    "SimCluster",
    "SimKafka",
    "SimKafkaSettings",
    "SimProcess",
    "StoredRecord",
]
