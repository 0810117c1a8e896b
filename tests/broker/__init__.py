"""A broker for the tests: a real Apache Kafka where Java and Maven are at hand, an embedded one elsewhere.

Knows processes, folders and ports; knows nothing of batchferry except its embedded broker and how to tell
that a cluster answers. Also a command, ``python -m tests.broker start --port N --dir D``.
"""

from .real import BrokerFailed, BrokerUnavailable, RealBroker, fetch_jars, free_port

__all__ = ["BrokerFailed", "BrokerUnavailable", "RealBroker", "fetch_jars", "free_port"]
