"""What became of deliveries, told in the service's telemetry: counts, logged refusals, and the alarm."""

from __future__ import annotations

from collections.abc import Mapping

from batchferry.domain.webhooktrust import RefusalAlarm
from batchferry.ports import Clock, Telemetry
from batchferry.server.webhookauth import Outcome
from batchferry.server.webhooks import Hook, WebhookSink
from batchferry.server.webhookwire import Sheet
from batchferry.telemetry.catalogue import OTHER

TELL_PAUSE_S = 60.0
"""Of one account and reason a refusal is logged once in so long; the metric counts them all."""

_ALARMING = frozenset({Outcome.BAD_HEADERS, Outcome.OUT_OF_TIME, Outcome.BAD_SIGNATURE, Outcome.BAD_BODY})
"""Refusals that a replaced secret, a wrong clock or a wrong setting brings to all deliveries alike."""


class WebhookTally:
    """Keeps the ``Tally`` of the receiver, one delivery at a time or a sheet of them."""

    def __init__(self, hooks: Mapping[str, Hook], clock: Clock, telemetry: Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._told_at: dict[tuple[str, Outcome], float] = {}
        self._alarms = {
            account: RefusalAlarm(clock.monotonic(), hook.alarm_rejected, hook.alarm_quiet_s)
            for account, hook in hooks.items()
        }
        for account in hooks:
            telemetry.gauge("webhooks_refused_in_a_row", 0, account=account)

    def taken(self, account: str, outcome: Outcome) -> None:
        """A delivery was believed."""
        self._believed(account)
        self._count(account, outcome, 1)

    def refused(self, account: str | None, outcome: Outcome) -> None:
        """A delivery was not believed; ``account`` None: a name that somebody made up."""
        self._count(account or OTHER, outcome, 1)
        self._tell(account or OTHER, outcome)
        if account is not None:
            self._not_believed(account, outcome, 1)

    def add(self, sheet: Sheet) -> None:
        """Many deliveries at once.

        Of those refused before one of the same account was taken only the count is told: that one shows that they were
        no cause for alarm.
        """
        for (account, outcome), times in sheet.outcomes.items():
            self._count(account or OTHER, outcome, times)
            if outcome.is_refusal:
                self._tell(account or OTHER, outcome)
        for account in sheet.believed:
            self._believed(account)
        for (account, outcome), times in sheet.refused_since.items():
            self._not_believed(account, outcome, times)

    def _count(self, account: str, outcome: Outcome, times: int) -> None:
        self._telemetry.count("webhooks_received", times, account=account, outcome=outcome.value)

    def _tell(self, account: str, outcome: Outcome) -> None:
        now = self._clock.monotonic()
        told_at = self._told_at.get((account, outcome))
        if told_at is None or now - told_at >= TELL_PAUSE_S:
            self._told_at[account, outcome] = now
            self._telemetry.event("webhook_refused", account=account, outcome=outcome.value)

    def _believed(self, account: str) -> None:
        alarm = self._alarms[account]
        if alarm.in_a_row:
            self._telemetry.gauge("webhooks_refused_in_a_row", 0, account=account)
        if alarm.taken(self._clock.monotonic()):
            self._telemetry.event("webhooks_taken_again", account=account)

    def _not_believed(self, account: str, outcome: Outcome, times: int) -> None:
        if outcome not in _ALARMING:
            return
        alarm, now = self._alarms[account], self._clock.monotonic()
        for _ in range(times):
            reason = alarm.refused(now, outcome.value)
            if reason is None:
                continue
            self._telemetry.event(
                "webhooks_all_refused",
                account=account,
                outcome=reason,
                refused=alarm.in_a_row,
                quiet_s=round(alarm.quiet_s(now)),
            )
            self._telemetry.count("alarms", what="webhooks_all_refused")
        self._telemetry.gauge("webhooks_refused_in_a_row", alarm.in_a_row, account=account)


class ToldSink:
    """A sink whose effects are logged."""

    def __init__(self, sink: WebhookSink, telemetry: Telemetry) -> None:
        self._sink = sink
        self._telemetry = telemetry

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        """See ``WebhookSink``."""
        is_poked = await self._sink.poke(account, provider_batch_id)
        if is_poked:
            self._telemetry.event(
                "webhook_received",
                account=account,
                provider_batch_id=provider_batch_id,
                outcome=Outcome.POKED.value,
            )
        return is_poked
