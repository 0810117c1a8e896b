"""The admin address: probes, metrics, the read-only JSON of what is waiting and on its way; and the webhook address.

It asks four small seams (``HealthSource``, ``ReadModel``, ``WebhookSink``, a function for the metrics). Nothing here
changes anything, except that a webhook gives its sink the name of a batch to look at. Further routes (a console) are
handed in. This room must not know the engine, Kafka, providers or the store, and shows ids, counts, times and states
only.

Webhooks are taken in this process beside the admin pages (``webhook_routes``), or by a process of their own
(``WebhookProcess``). That one begins inside this package too, and needs neither settings nor telemetry: so the names
below are loaded when they are asked for, which halves its memory and its start.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchferry.server.api import HealthSource, ReadModel, make_app
    from batchferry.server.runner import MAX_CONNECTIONS, AdminServer
    from batchferry.server.webhookprocess import WebhookProcess, try_webhook_process
    from batchferry.server.webhookroutes import HookPlan, hook_of, plans_of, webhook_routes
    from batchferry.server.webhooks import WebhookSink

__all__ = [
    "MAX_CONNECTIONS",
    "AdminServer",
    "HealthSource",
    "HookPlan",
    "ReadModel",
    "WebhookProcess",
    "WebhookSink",
    "hook_of",
    "make_app",
    "plans_of",
    "try_webhook_process",
    "webhook_routes",
]

_HOMES = {
    "api": ("HealthSource", "ReadModel", "make_app"),
    "runner": ("MAX_CONNECTIONS", "AdminServer"),
    "webhookprocess": ("WebhookProcess", "try_webhook_process"),
    "webhookroutes": ("HookPlan", "hook_of", "plans_of", "webhook_routes"),
    "webhooks": ("WebhookSink",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"{__name__} has no {name}")
