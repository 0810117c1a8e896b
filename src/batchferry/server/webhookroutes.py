"""The webhook address beside the admin pages, in the service's own process; and hooks as the settings have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.routing import Route

from batchferry.config import AccountSettings
from batchferry.config.values import webhook_key
from batchferry.ports import Clock, Telemetry
from batchferry.server.answers import guarded_route
from batchferry.server.api import TelemetryReport
from batchferry.server.webhookauth import AuthPlan
from batchferry.server.webhooks import (
    MAX_CONCURRENT,
    MAX_PER_S,
    MAX_REMEMBERED_IDS,
    PATHS,
    Deliveries,
    Gate,
    Hook,
    Receiver,
    WebhookSink,
)
from batchferry.server.webhooktally import ToldSink, WebhookTally
from batchferry.server.webhookwire import HookPlan

__all__ = ["HookPlan", "hook_of", "plans_of", "webhook_routes"]


def plans_of(accounts: Mapping[str, AccountSettings]) -> dict[str, HookPlan]:
    """The webhooks as the settings have them, by account; accounts without a secret have none."""
    return {name: plan for name, account in accounts.items() if (plan := _plan_of(account)) is not None}


def hook_of(account: AccountSettings) -> Hook | None:
    """The webhook as the account's settings have it; None while it has no secret."""
    plan = _plan_of(account)
    return None if plan is None else plan.hook()


def webhook_routes(
    hooks: Mapping[str, Hook],
    sink: WebhookSink,
    *,
    clock: Clock,
    telemetry: Telemetry,
    max_remembered_ids: int = MAX_REMEMBERED_IDS,
    max_concurrent: int = MAX_CONCURRENT,
    max_per_s: float = MAX_PER_S,
) -> Sequence[Route]:
    """The routes for the accounts that have a webhook, by account name."""
    receiver = Receiver(
        hooks,
        ToldSink(sink, telemetry),
        WebhookTally(hooks, clock, telemetry),
        clock,
        Deliveries(max_remembered_ids),
        Gate(max_concurrent, max_per_s),
    )
    return [guarded_route(path, receiver.receive, "POST", TelemetryReport(telemetry)) for path in PATHS]


def _plan_of(account: AccountSettings) -> HookPlan | None:
    secrets, hook = account.webhook_secrets, account.webhook
    if not secrets:
        return None
    keys = tuple(webhook_key(one) if hook.auth == "standard" else one.encode() for one in secrets)
    batch_id, status, prefix = account.webhook_fields
    return HookPlan(
        AuthPlan(hook.auth, keys, hook.header, hook.header_prefix, hook.digest),
        tuple(batch_id.split(".")),
        tuple(status.split(".")),
        prefix,
        tuple(one.lower() for one in hook.running_statuses),
        hook.alarm_rejected,
        hook.alarm_quiet_s,
    )
