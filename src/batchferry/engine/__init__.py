"""The service itself: intake, partitions, batch actors, polling, landing, restore, supervision.

This room knows the ports and the domain. It must not know which Kafka client, HTTP client, database or web
framework plays a port, nor read the environment; those are joined to it by ``app``.
"""
