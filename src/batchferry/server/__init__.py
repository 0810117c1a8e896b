"""The admin address: probes, metrics, the read-only JSON of what is waiting and on its way, and the webhook address.

It asks four small seams (``HealthSource``, ``ReadModel``, ``WebhookSink``, a function for the metrics). Nothing here
changes anything, except that a webhook gives its sink the name of a batch to look at. Further routes (a console) are
handed in. This room must not know the engine, Kafka, providers or the store, and shows ids, counts, times and states
only.
"""

from batchferry.server.api import HealthSource, ReadModel, make_app
from batchferry.server.runner import MAX_CONNECTIONS, AdminServer
from batchferry.server.webhooks import WebhookSink, webhook_route

__all__ = ["MAX_CONNECTIONS", "AdminServer", "HealthSource", "ReadModel", "WebhookSink", "make_app", "webhook_route"]
