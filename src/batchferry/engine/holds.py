"""Placing and lifting holds: scopes that must not submit for a while, kept in the control topic.

A hold that comes back soon after it ended lasts longer each time, so that a refused account is not hammered;
one that has stayed away for an hour starts small again. Nobody's attempts are used up by a hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import (
    CancelWish,
    Hold,
    Lifted,
    RescueWish,
    account_scope,
    hold_key,
    key_scope,
    shape_scope,
)
from batchferry.domain.envelope import EventKind
from batchferry.domain.ids import BatchId
from batchferry.engine.fleet import FleetView
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.ports import Clock, Telemetry

FIRST_PAUSE_S = 60.0
MAX_PAUSE_S = 3600.0
FORGET_WISH_AFTER_S = 7 * 86_400.0
"""A cancel, flush or sweep this old concerns nothing that is still under way."""
INPUT_FAILURES = "input_failures"
"""Many rows were refused for what they say. A person lifts it, or a later good canary."""
SYNC_PROVES = frozenset({"account", "row_account_error", "sync_account", "model_unavailable"})
"""Reasons that an answer of the sync lane refutes."""
UNTRIED = frozenset({"spending_limit"})
"""Reasons that end with their time: there is nothing to try."""
FORGET_AFTER_S = 3600.0
"""A reason that has not come back for so long after its hold ended is new."""


class Holds:
    """The holds as one replica places and reads them."""

    def __init__(self, fleet: FleetView, clock: Clock, telemetry: Telemetry, outcomes: OutcomeWriter) -> None:
        self._fleet = fleet
        self._outcomes = outcomes
        self._clock = clock
        self._telemetry = telemetry
        self._probes: dict[str, str] = {}
        """By scope, the batch that tries whether a hold that has ended may be forgotten."""

    def standing(self, key: BatchKey, shape: str = "") -> list[Hold]:
        """What keeps this batch key (or this kind of prompt in it) from being submitted now."""
        return self._fleet.control.standing(key, self._clock.now(), shape)

    def account_is_held(self, account: str) -> bool:
        """Whether the whole account must not submit now."""
        scope, now = account_scope(account), self._clock.now()
        return any(hold.scope == scope for hold in self._fleet.control.all_standing(now))

    @property
    def are_known(self) -> bool:
        """Whether the control topic has been read to its end; before that nothing may be submitted."""
        return self._fleet.is_ready

    # A hold that has ended by its time is only half over: one batch (or call) tries whether the reason has gone, the
    # others wait for it. Its success lifts the record, so that all may go; its failure holds again, for longer.

    def may_probe(self, key: BatchKey, batch_id: str) -> bool:
        """Whether this batch may go: nothing is on trial, or it is the one that tries."""
        ended = self._on_trial(key)
        if any(self._probes.get(hold.scope, batch_id) != batch_id for hold in ended):
            return False
        for hold in ended:
            if hold.scope not in self._probes:
                self._probes[hold.scope] = batch_id
                self._telemetry.event("hold_probed", scope=hold.scope, reason=hold.reason, batch_id=batch_id)
        return True

    def probe_ended(self, batch_id: str) -> None:
        """The batch is over, however it ended: another may try."""
        for scope in [scope for scope, prober in self._probes.items() if prober == batch_id]:
            del self._probes[scope]

    async def probe_succeeded(self, key: BatchKey, batch_id: str) -> None:
        """The provider runs this batch: what it was on trial for is over."""
        await self._lift([hold for hold in self._on_trial(key) if self._probes.get(hold.scope) == batch_id])

    async def sync_succeeded(self, key: BatchKey) -> None:
        """A single call of this key was answered: the account pays, the model is there; of batches it says nothing."""
        await self._lift([hold for hold in self._on_trial(key) if hold.reason in SYNC_PROVES])

    async def _lift(self, holds: Sequence[Hold]) -> None:
        for hold in holds:
            self._probes.pop(hold.scope, None)
            self._telemetry.event("key_released", scope=hold.scope, reason=hold.reason, label=hold.label)
            await self._fleet.publish(Lifted(hold_key(hold)))
            await self._announce(EventKind.RELEASED, hold)

    def _on_trial(self, key: BatchKey) -> list[Hold]:
        """Holds of this key that ended by their time not long ago and were not lifted."""
        now = self._clock.now()
        scopes = (account_scope(key.account), key_scope(key))
        return [
            hold
            for hold in self._fleet.control.expired(now)
            if hold.scope in scopes
            and hold.until is not None
            and (now - hold.until).total_seconds() < FORGET_AFTER_S
            and hold.reason not in UNTRIED
        ]

    async def place_account(self, key: BatchKey, reason: str) -> None:
        """Hold the whole account that pays for this key."""
        await self._place(account_scope(key.account), reason, key.account)

    async def place_key(self, key: BatchKey, reason: str) -> None:
        """Hold this batch key."""
        await self._place(key_scope(key), reason, key.label)

    async def place_until(self, key: BatchKey, reason: str, until: datetime) -> None:
        """Hold this batch key until an instant that is known."""
        hold = Hold(key_scope(key), reason, self._clock.now(), until, 1, key.label)
        before = self._fleet.control.holds.get(hold_key(hold))
        if before is None or (before.until is not None and before.until < until):
            await self._publish(hold)

    async def place_shape(self, key: BatchKey, shape: str, reason: str) -> None:
        """Hold one kind of prompt until an operator lifts it."""
        hold = Hold(shape_scope(shape), reason, self._clock.now(), None, 1, key.label)
        if hold_key(hold) not in self._fleet.control.holds:
            await self._publish(hold)

    def rescue_wish(self, batch_id: BatchId) -> RescueWish | None:
        """The operator's wish to have this batch's rows run through the sync lane."""
        return self._fleet.control.rescues.get(batch_id)

    def cancel_wish(self, batch_id: BatchId) -> CancelWish | None:
        """The operator's wish to have this batch cancelled, with what is to become of its rows."""
        return self._fleet.control.cancels.get(batch_id)

    async def place_for_operator(self, key: BatchKey, reason: str) -> None:
        """Hold this batch key until an operator lifts it."""
        hold = Hold(key_scope(key), reason, self._clock.now(), None, 1, key.label)
        if hold_key(hold) not in self._fleet.control.holds:
            await self._publish(hold)

    async def alarm(
        self, alarm: str, event_of: str, key: BatchKey, *, rows: int = 0, codes: Mapping[str, int] | None = None
    ) -> None:
        """Something needs an operator: told in the log and on the events topic.

        Args:
            event_of: batch or shape it is about; with the alarm's name it makes the event's id.
            rows: rows that it is about.
            codes: the most frequent codes among them, with their rows.
        """
        self._telemetry.event("alarm", what=alarm, scope=key.label, batch_id=event_of, rows=rows, codes=codes or {})
        self._telemetry.count("alarms", what=alarm)
        event = self._outcomes.plain_event(
            EventKind.ALARM, f"{event_of}-{alarm}", alarm=alarm, scope=key.label, rows=rows, codes=codes or {}
        )
        await self._fleet.send([event])

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
        await self._publish(Hold(scope, reason, now, now + timedelta(seconds=pause_s), times, label))

    async def _publish(self, hold: Hold) -> None:
        self._telemetry.event(
            "key_held",
            scope=hold.scope,
            reason=hold.reason,
            label=hold.label,
            until=_iso(hold.until),
            times=hold.times,
        )
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
        for rescue in list(self._fleet.control.rescues.values()):
            if (now - rescue.at).total_seconds() > FORGET_WISH_AFTER_S:
                await self._fleet.publish(Lifted(f"rescue/{rescue.batch_id}"))
        for poke in list(self._fleet.control.pokes.values()):
            if (now - poke.at).total_seconds() > FORGET_AFTER_S:
                await self._fleet.publish(Lifted(f"poke/{poke.provider_batch_id}"))
        for sweep in list(self._fleet.control.sweeps.values()):
            if (now - sweep.at).total_seconds() > FORGET_WISH_AFTER_S:
                await self._fleet.publish(Lifted(f"sweep/{sweep.scope}"))


def _iso(at: datetime | None) -> str:
    return "" if at is None else at.isoformat()
