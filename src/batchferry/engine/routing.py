"""From a request to the batch key it travels under, with the limits and waiting times of its route."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from batchferry.config import RouteSettings, Settings
from batchferry.domain.accumulator import SealLimits
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.context import context_tokens
from batchferry.domain.requests import (
    OWN_ENDPOINTS,
    REMEDIES,
    BadRecord,
    RecordRule,
    Request,
)
from batchferry.domain.retry import RetryPolicy
from batchferry.domain.rows import RowClass
from batchferry.domain.times import WaitPlan, plan_waits

_NO_LIMIT = sys.maxsize
CACHE_ENTRIES = 10_000
"""The model and slice are the caller's words, so what is remembered of them is bounded."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Everything about a request that its route decides. The last three are worked out once, not once a record."""

    route: RouteSettings
    key: BatchKey
    limits: SealLimits
    plan: WaitPlan
    digest: str
    sla_ms: int
    wait_ms: int
    """From t0 to ``ship_by`` for a record that sets no SLA or deadline of its own."""
    late_ms: int
    """A row whose deadline is nearer than this is late: no batch that leaves now brings it home in time."""
    max_age_ms: int
    long_tokens: int
    """Rows of more estimated tokens go their own way, or may be too long for their model."""
    context_tokens: int | None
    max_line_bytes: int
    """What the account takes as one line."""
    marks_cache: bool
    """System prompts are marked for the provider's cache."""
    is_special: bool
    """Every row is looked at more closely: a canary, a demand for ``max_tokens``, prompts to group, or the sync lane
    for all."""


class Router:
    """Finds the route of a request; the answer for one (model, endpoint, slice, account) never changes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache: dict[tuple[str, str, str, str | None], Routed | BadRecord] = {}
        self.is_held: Callable[[str], bool] = lambda _account: False
        """Whether an account must not submit now; asked only for routes with accounts to fall back on."""

    def route(self, request: Request) -> Routed | BadRecord:
        """The route, or the refusal of a request that no route takes.

        While the route's account is held, a request that names none takes the first of the route's ``fallback`` that is
        not.
        """
        known = self._known(request.model, request.url, request.slice, request.account)
        if isinstance(known, BadRecord):
            return BadRecord(rule=known.rule, message=known.message, remedy=known.remedy, custom_id=request.custom_id)
        if known.route.fallback and request.account is None and self.is_held(known.key.account):
            for account in known.route.fallback:
                other = self._known(request.model, request.url, request.slice, account)
                if not isinstance(other, BadRecord) and not self.is_held(account):
                    return other
        return known

    def _known(self, model: str, url: str, slice_: str, account: str | None) -> Routed | BadRecord:
        asked = (model, url, slice_, account)
        known = self._cache.get(asked)
        if known is None:
            if len(self._cache) >= CACHE_ENTRIES:
                self._cache.clear()
            known = self._cache[asked] = self._find(*asked)
        return known

    def _find(self, model: str, url: str, slice_: str, account: str | None) -> Routed | BadRecord:
        route = self._settings.route_for(model, url)
        if route is None:
            rule = RecordRule.UNKNOWN_ENDPOINT
            return BadRecord(
                rule=rule,
                message="no route takes this model at this endpoint",
                remedy="add a route, or " + REMEDIES[rule],
            )
        name = account or route.account
        paying = self._settings.accounts[name]
        if not _speaks(paying.provider, url):
            rule = RecordRule.SHAPE_NOT_SUPPORTED
            text = f"account {name} ({paying.provider}) has no endpoint {url}"
            return BadRecord(rule=rule, message=text, remedy="name another account or route, or " + REMEDIES[rule])
        key = BatchKey(name, url, model, paying.completion_window, slice_)
        plan = plan_waits(route.sla_s, paying.window_s, route.margin_s, route.max_wait_s)
        context = route.context_tokens or context_tokens(paying.knows_models_of, model)
        return Routed(
            route,
            key,
            SealLimits(
                min(route.max_rows, paying.limits.max_rows),
                min(route.max_bytes, paying.limits.max_file_bytes),
                route.max_tokens,
                min(route.max_inputs, paying.limits.max_inputs) if url.endswith("/embeddings") else None,
            ),
            plan,
            key.digest,
            round(plan.sla_s * 1000),
            round(min(plan.max_wait_s, plan.formula_wait_s) * 1000),
            round((paying.window_s + self._settings.rescue_lead_s) * 1000),
            round(route.max_age_s * 1000),
            min(_NO_LIMIT if route.long_row is None else route.long_row.over_tokens, context or _NO_LIMIT),
            context,
            paying.limits.max_line_bytes or paying.limits.max_file_bytes,
            paying.provider == "anthropic" and paying.anthropic.cache_prompts,
            route.canary is not None
            or route.missing_max_tokens != "allow"
            or route.group_prefixes
            or route.lane == "sync",
        )

    def for_key(self, key: BatchKey) -> Routed | None:
        """The route of rows that already travel under a key; None when the settings know it no longer."""
        found = self._find(
            key.model, key.endpoint, key.slice, key.account if key.account in self._settings.accounts else None
        )
        return None if isinstance(found, BadRecord) else found


def retry_policy(settings: Settings, key: BatchKey, routed: Routed | None) -> RetryPolicy:
    """What is done with rows that did not succeed under a key; the default where no route takes it any more."""
    if routed is None:
        return RetryPolicy.default()
    route, paying = routed.route, settings.accounts[key.account]
    retries = route.retries
    return RetryPolicy(
        {
            RowClass.TRANSIENT: retries.transient,
            RowClass.UNREADABLE: retries.transient,
            RowClass.MISSING: retries.missing,
            RowClass.EXPIRED: retries.expired,
            RowClass.CANCELLED: retries.expired,
        },
        route.policies,
        retries.backoff_s,
        retries.backoff_max_s,
        paying.window_s,
        settings.rescue_lead_s,
        paying.sync.tries,
        paying.sync.enabled,
        route.late,
        route.larger_model,
    )


def _speaks(provider: str, url: str) -> bool:
    """Whether accounts of this family know the endpoint."""
    own = OWN_ENDPOINTS.get(provider)
    return url == own if own is not None else url not in OWN_ENDPOINTS.values()
