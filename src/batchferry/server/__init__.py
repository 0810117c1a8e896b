"""The admin address: probes, metrics and the read-only JSON of what is waiting and what is on its way.

It asks three small seams (``HealthSource``, ``ReadModel``, a function for the metrics) and changes nothing;
further routes (webhooks, a console) are handed in. This room must not know the engine, Kafka, providers or the
store, and shows ids, counts, times and states only.
"""

from batchferry.server.api import HealthSource, ReadModel, make_app
from batchferry.server.runner import MAX_CONNECTIONS, AdminServer

__all__ = ["MAX_CONNECTIONS", "AdminServer", "HealthSource", "ReadModel", "make_app"]
