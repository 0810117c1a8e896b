"""Placing and lifting holds: scopes that must not submit for a while, kept in the control topic.

A hold that comes back soon after it ended lasts longer each time, so that a refused account is not hammered;
one that has stayed away for an hour starts small again. Nobody's attempts are used up by a hold.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import CancelWish, Hold, Lifted, account_scope, hold_key, key_scope
from batchferry.domain.envelope import EventKind
from batchferry.domain.ids import BatchId
from batchferry.engine.fleet import FleetView
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.ports import Clock, Telemetry

FIRST_PAUSE_S = 60.0
MAX_PAUSE_S = 3600.0
FORGET_WISH_AFTER_S = 7 * 86_400.0
"""A cancel, flush or sweep this old concerns nothing that is still under way."""
FORGET_AFTER_S = 3600.0
"""A reason that has not come back for so long after its hold ended is new."""


class Holds:
    """The holds as one replica places and reads them."""

    def __init__(self, fleet: FleetView, clock: Clock, telemetry: Telemetry, outcomes: OutcomeWriter) -> None:
        self._fleet = fleet
        self._outcomes = outcomes
        self._clock = clock
        self._telemetry = telemetry

    def standing(self, key: BatchKey) -> list[Hold]:
        """What keeps this batch key from being submitted now."""
        return self._fleet.control.standing(key, self._clock.now())

    async def place_account(self, key: BatchKey, reason: str) -> None:
        """Hold the whole account that pays for this key."""
        await self._place(account_scope(key.account), reason, key.account)

    async def place_key(self, key: BatchKey, reason: str) -> None:
        """Hold this batch key."""
        await self._place(key_scope(key), reason, key.label)

    def cancel_wish(self, batch_id: BatchId) -> CancelWish | None:
        """The operator's wish to have this batch cancelled, with what is to become of its rows."""
        return self._fleet.control.cancels.get(batch_id)

    async def place_for_operator(self, key: BatchKey, reason: str) -> None:
        """Hold this batch key until an operator lifts it."""
        hold = Hold(key_scope(key), reason, self._clock.now(), None, 1, key.label)
        if hold_key(hold) not in self._fleet.control.holds:
            self._telemetry.event(
                "key_held", scope=hold.scope, reason=reason, label=hold.label, until="", times=hold.times
            )
            await self._fleet.publish(hold)
            await self._announce(EventKind.HELD, hold)

    async def alarm(self, alarm: str, batch_id: BatchId, key: BatchKey) -> None:
        """Something needs an operator: told in the log and on the events topic."""
        self._telemetry.event("alarm", what=alarm, scope=key.label, batch_id=batch_id)
        self._telemetry.count("alarms", what=alarm)
        event_id = f"{batch_id}-{alarm}"
        await self._fleet.send([self._outcomes.plain_event(EventKind.ALARM, event_id, alarm=alarm, scope=key.label)])

    async def _announce(self, kind: EventKind, hold: Hold) -> None:
        event_id = f"{hold.scope}-{hold.reason}-{kind.value}-{round(hold.since.timestamp() * 1000)}"
        await self._fleet.send(
            [self._outcomes.plain_event(kind, event_id, scope=hold.label or hold.scope, reason=hold.reason)]
        )

    async def _place(self, scope: str, reason: str, label: str) -> None:
        now = self._clock.now()
        before = self._fleet.control.holds.get(f"hold/{scope}/{reason}")
        times = 1
        if before is not None:
            if before.until is None or now < before.until:
                return  # it stands already
            if (now - before.until).total_seconds() < FORGET_AFTER_S:
                times = before.times + 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times - 1, 20))
        hold = Hold(scope, reason, now, now + timedelta(seconds=pause_s), times, label)
        self._telemetry.event("key_held", scope=scope, reason=reason, label=label, until=_iso(hold.until), times=times)
        await self._fleet.publish(hold)
        await self._announce(EventKind.HELD, hold)

    async def tidy(self) -> None:
        """Remove the records of holds that ended long ago; one replica does it (the owner of partition 0)."""
        now = self._clock.now()
        for hold in self._fleet.control.expired(now):
            if hold.until is not None and (now - hold.until).total_seconds() > FORGET_AFTER_S:
                self._telemetry.event("key_released", scope=hold.scope, reason=hold.reason, label=hold.label)
                await self._fleet.publish(Lifted(hold_key(hold)))
                await self._announce(EventKind.RELEASED, hold)
        for wish in list(self._fleet.control.cancels.values()):
            if (now - wish.at).total_seconds() > FORGET_WISH_AFTER_S:
                await self._fleet.publish(Lifted(f"cancel/{wish.batch_id}"))
        for flush in list(self._fleet.control.flushes.values()):
            if (now - flush.before).total_seconds() > FORGET_WISH_AFTER_S:
                await self._fleet.publish(Lifted(f"flush/{flush.key_digest}"))
        for sweep in list(self._fleet.control.sweeps.values()):
            if (now - sweep.at).total_seconds() > FORGET_WISH_AFTER_S:
                await self._fleet.publish(Lifted(f"sweep/{sweep.scope}"))


def _iso(at: datetime | None) -> str:
    return "" if at is None else at.isoformat()
