"""The group member that reads the input topic, with the habits of the real one.

The truth about each partition is a ``_Slot``: the next offset to be handed out and whether it is paused; neither a
rebalance nor the coordinator changes it. Nothing is delivered between the start of a rebalance and the assignment.
Heartbeats are a task of the process, so a process that stands still misses them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from batchferry.ports import AssignmentListener, Record
from batchferry.simulator.kafka.fetch import Deferred, Fetched, Place
from batchferry.simulator.kafka.groups import ILLEGAL_GENERATION, UNKNOWN_MEMBER, Claim, Joined
from batchferry.simulator.kafka.producers import connect
from batchferry.simulator.kafka.readers import LongPoll
from batchferry.simulator.kafka.records import Refused
from batchferry.simulator.kafka.settings import SimKafkaSettings
from batchferry.simulator.kafka.wire import EXPECTED, GivenUp, NoAnswer, Wire

log = logging.getLogger(__name__)

REJOIN_GRACE_S: Final = 30.0
CUT_OFF_LIMIT_S: Final = 900.0
"""So long without an assignment is complained of also while no broker answers."""
POLL_SILENCE_LIMIT_S: Final = 60.0
JOIN_GRACE_S: Final = 10.0
"""A join may take the rebalance timeout and so much longer before it is sent again."""


class _Slot:
    """What we know of one assigned partition."""

    __slots__ = ("lost", "paused", "position", "turn")

    def __init__(self) -> None:
        self.position: int | None = None
        self.paused = True
        self.lost = False
        self.turn = 0
        """Counts seeks: records fetched in an earlier turn are void."""


class SimConsumer:
    """A member of the consumer group (``ports.RequestConsumer``)."""

    def __init__(self, wire: Wire, settings: SimKafkaSettings, topic: str, group: str) -> None:
        self._wire = wire
        self._settings = settings
        self._topic = topic
        self._group = group
        self._poll = LongPoll(wire, self._fetched)
        self._asked_turns: dict[int, int] = {}
        self._listener: AssignmentListener | None = None
        self._listener_fault = ""
        self._slots: dict[int, _Slot] = {}
        self._transit: dict[int, tuple[int, Sequence[Record]]] = {}
        self._member_id: str | None = None
        self._generation = -1
        self._claim = Claim(-1, frozenset())
        self._known_partitions = 0
        self._membership: asyncio.Task[None] | None = None
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._unsettled_since: float | None = None
        self._cut_off_at = float("-inf")
        """When we last saw that no broker answers."""
        self._polled_at = 0.0
        self._is_polling = False
        self._polled = asyncio.Event()
        self._stopped = False

    @property
    def give_up_after_s(self) -> float:
        """A rebalance that brings no assignment for so long has gone on without us: everything is lost."""
        return max(self._settings.session_timeout_s, self._settings.rebalance_timeout_s)

    async def start(self, listener: AssignmentListener) -> None:
        """Connect and begin to join the group; the first assignment comes through the listener.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        self._listener = listener
        await connect(self._wire, self._settings, "joining the group at")
        self._polled_at = self._unsettled_since = self._now()
        self._membership = self._wire.process.run(self._live(), "membership")

    async def poll(self, max_records: int, timeout_ms: int) -> Mapping[int, Sequence[Record]]:
        """Records of resumed partitions, offsets ascending; empty after ``timeout_ms``. May be cancelled."""
        until = self._now() + timeout_ms / 1000
        self._is_polling = True
        self._polled.set()
        try:
            while self._membership is not None and not self._stopped:
                handed = self._hand_over()
                if handed:
                    return handed
                self._ask(max_records)
                left_s = until - self._now()
                if left_s <= 0:
                    break
                await self._poll.wait(left_s)
            return {}
        finally:
            self._is_polling = False
            self._polled.clear()
            self._polled_at = self._now()
            self._watch_broker()

    def lost_positions(self) -> Mapping[int, int]:
        """Partitions whose position lies outside the log, with that position; cleared by ``resume``."""
        return {
            partition: slot.position
            for partition, slot in self._slots.items()
            if slot.lost and slot.position is not None
        }

    def assignment(self) -> frozenset[int]:
        """The partitions that are ours as far as we know, also during a rebalance."""
        return frozenset(self._slots)

    def pause(self, partitions: Iterable[int]) -> None:
        """Deliver nothing more of these until ``resume``; unassigned ones are passed over."""
        for partition in partitions:
            slot = self._slots.get(partition)
            if slot is not None:
                slot.paused = True

    def resume(self, partition: int, offset: int | None = None) -> None:
        """Deliver this partition again, from ``offset`` if given, else from where it was paused.

        Raises:
            ValueError: no offset given and none known, or the position is lost.
        """
        slot = self._slots.get(partition)
        if slot is None:
            return
        if offset is None and (slot.position is None or slot.lost):
            raise ValueError(f"partition {partition} has no position to resume from: name an offset")
        changed = slot.paused or offset is not None
        if offset is not None:
            slot.position = offset
            slot.turn += 1
            self._transit.pop(partition, None)
        slot.lost = False
        slot.paused = False
        if changed and self._asked_turns.get(partition) != slot.turn:
            self._poll.drop()  # what waits at the broker does not ask for this one

    def position(self, partition: int) -> int | None:
        """The next offset that will be delivered, past control markers as of the last poll; None if unknown."""
        slot = self._slots.get(partition)
        if slot is None:
            return None
        waiting = self._transit.get(partition)
        if waiting is not None and waiting[0] == slot.turn:
            return waiting[1][0].offset
        return slot.position

    def complaints(self) -> Sequence[str]:
        """What is wrong with the consumer now; empty when healthy, also before ``start`` and after ``stop``."""
        if self._membership is None or self._stopped:
            return ()
        found, now = [], self._now()
        if self._membership.done():
            found.append("the group coordination task has died")
        self._watch_broker()
        limit_s = self._settings.rebalance_timeout_s + REJOIN_GRACE_S
        if self._unsettled_since is not None and (
            # A rebalance cannot begin before there is a broker again.
            now - max(self._unsettled_since, self._cut_off_at) > limit_s
            or now - self._unsettled_since > max(limit_s, CUT_OFF_LIMIT_S)
        ):
            found.append(f"no assignment from the group for {now - self._unsettled_since:.0f} s")
        if not self._is_polling and now - self._polled_at > POLL_SILENCE_LIMIT_S:
            found.append(f"no poll has returned for {now - self._polled_at:.0f} s")
        if self._listener_fault:
            found.append(f"the assignment listener failed: {self._listener_fault}")
        return found

    async def confirms_assignment(self, partition: int, timeout_s: float) -> bool:
        """Whether a heartbeat answered after this call still has the partition assigned to us."""
        if self._stopped or not self._is_ours_for_sure(partition):
            return False
        generation = self._generation
        try:
            await self._heartbeat(timeout_s)
        except EXPECTED:
            return False
        return self._generation == generation and self._is_ours_for_sure(partition)

    async def stop(self) -> None:
        """Leave the group; bounded, safe to call twice. The listener hears nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._cancel_timer()
        membership = self._membership
        if membership is not None:
            membership.cancel()
        self._poll.drop()
        member_id, self._member_id = self._member_id, None
        if member_id is not None:
            groups, group = self._wire.cluster.groups, self._group
            with suppress(*EXPECTED):
                await self._wire.call(
                    "leave", lambda: groups.leave(group, member_id), self._settings.close_deadline_s, outlives=True
                )
        self._wire.close()

    # ------------------------------------------------------------------------------ fetching

    def _ask(self, max_records: int) -> None:
        if self._transit or self._unsettled_since is not None:
            return
        wanted: dict[Place, int] = {}
        turns: dict[int, int] = {}
        for partition, slot in self._slots.items():
            if not slot.paused and slot.position is not None:
                wanted[self._topic, partition] = slot.position
                turns[partition] = slot.turn
        if not self._poll.is_asking:
            self._asked_turns = turns
            self._poll.ask(wanted, max_records)

    def _fetched(self, answer: Mapping[Place, Fetched]) -> None:
        turns, self._asked_turns = self._asked_turns, {}
        for (_, partition), found in answer.items():
            slot = self._slots.get(partition)
            if slot is None or slot.turn != turns.get(partition):
                continue
            if found.is_out_of_range:
                slot.lost = slot.paused = True
                continue
            if found.records:
                self._transit[partition] = (slot.turn, found.records)
            slot.position = found.position

    def _hand_over(self) -> Mapping[int, Sequence[Record]]:
        if not self._transit:
            return {}
        waiting, self._transit = self._transit, {}
        handed: dict[int, Sequence[Record]] = {}
        for partition, (turn, records) in waiting.items():
            slot = self._slots.get(partition)
            if slot is None or slot.turn != turn:
                continue
            if slot.paused:  # paused since they were fetched: they are fetched again after resume
                slot.position = records[0].offset
                slot.turn += 1
                continue
            handed[partition] = records
        return handed

    # ---------------------------------------------------------------------------- membership

    async def _live(self) -> None:
        with suppress(GivenUp):
            while not self._stopped:
                await self._join()
                await self._stay()

    async def _join(self) -> None:
        """Join, again and again, until there is an assignment."""
        self._begin_rebalance()
        settings, groups = self._settings, self._wire.cluster.groups
        while True:
            member_id, claim = self._member_id, self._claim

            def effect(member_id: str | None = member_id, claim: Claim = claim) -> Deferred[Joined | Refused]:
                return groups.join(
                    self._group,
                    member_id,
                    process=self._wire.process.name,
                    topic=self._topic,
                    session_s=settings.session_timeout_s,
                    rebalance_s=settings.rebalance_timeout_s,
                    claim=claim,
                )

            try:
                joined = await self._wire.wait("join", effect, settings.rebalance_timeout_s + JOIN_GRACE_S)
            except NoAnswer:
                continue
            except Refused:
                self._member_id = None
                continue
            if isinstance(joined, Joined):
                break
        self._member_id = joined.member_id
        self._generation = joined.generation
        self._known_partitions = self._wire.cluster.partition_count(self._topic)
        self._assigned(joined.partitions)

    async def _stay(self) -> None:
        """Send heartbeats until it is time to join again."""
        settings, cluster = self._settings, self._wire.cluster
        metadata_at = self._now() + cluster.rng.uniform(0, settings.metadata_max_age_s)
        while True:
            await asyncio.sleep(settings.heartbeat_interval_s)
            await self._wire.process.ready()
            if not self._is_polling and self._now() - self._polled_at > settings.max_poll_interval_s:
                await self._leave_until_polled()
                return
            try:
                if self._now() >= metadata_at:
                    metadata_at = self._now() + settings.metadata_max_age_s
                    count = await self._wire.call(
                        "metadata", lambda: cluster.partition_count(self._topic), settings.request_timeout_s
                    )
                    if count != self._known_partitions:
                        return
                await self._heartbeat(settings.session_timeout_s)
            except NoAnswer:
                continue
            except Refused as refusal:
                if refusal.code in {UNKNOWN_MEMBER, ILLEGAL_GENERATION}:
                    self._member_id = None
                return

    async def _heartbeat(self, deadline_s: float) -> None:
        groups, member_id, generation = self._wire.cluster.groups, self._member_id, self._generation
        if member_id is None:
            raise Refused("UNKNOWN_MEMBER_ID", UNKNOWN_MEMBER)
        await self._wire.call("heartbeat", lambda: groups.heartbeat(self._group, member_id, generation), deadline_s)

    async def _leave_until_polled(self) -> None:
        """Nobody polls: give the partitions to others, as the client's own supervision does."""
        member_id, self._member_id = self._member_id, None
        if member_id is not None:
            groups = self._wire.cluster.groups
            with suppress(Refused, NoAnswer):
                await self._wire.call(
                    "leave", lambda: groups.leave(self._group, member_id), self._settings.request_timeout_s
                )
        self._begin_rebalance()
        await self._polled.wait()

    def _begin_rebalance(self) -> None:
        """Nothing is given up: most partitions will come straight back."""
        if self._unsettled_since is None:
            self._unsettled_since = self._now()
        self._poll.drop()
        if not self._slots or self._stopped or self._give_up_timer is not None:
            return  # the first join revokes nothing
        self._give_up_timer = asyncio.get_running_loop().call_later(self.give_up_after_s, self._give_up)
        self._call_listener("on_suspect", frozenset(self._slots))

    def _assigned(self, partitions: frozenset[int]) -> None:
        if self._stopped:
            return
        self._cancel_timer()
        self._unsettled_since = None
        self._claim = Claim(self._generation, partitions)
        before = frozenset(self._slots)
        kept, added, lost = partitions & before, partitions - before, before - partitions
        for partition in lost:
            del self._slots[partition]
            self._transit.pop(partition, None)
        for partition in sorted(added):
            self._slots[partition] = _Slot()
        self._poll.drop()
        self._call_listener("on_assignment", kept, added, lost)

    def _give_up(self) -> None:
        self._give_up_timer = None
        if not self._wire.process.alive:
            return
        lost = frozenset(self._slots)
        self._slots.clear()
        self._transit.clear()
        if lost:
            self._call_listener("on_assignment", frozenset(), frozenset(), lost)

    def _call_listener(self, name: str, *arguments: frozenset[int]) -> None:
        try:
            getattr(self._listener, name)(*arguments)
        except Exception as error:
            self._listener_fault = f"{name}: {type(error).__name__}"
            log.exception("assignment listener failed in %s", name)

    def _is_ours_for_sure(self, partition: int) -> bool:
        return self._unsettled_since is None and partition in self._slots

    def _watch_broker(self) -> None:
        if self._wire.cluster.faults.is_away(self._wire.process.name):
            self._cut_off_at = self._now()

    def _cancel_timer(self) -> None:
        timer, self._give_up_timer = self._give_up_timer, None
        if timer is not None:
            timer.cancel()

    def _now(self) -> float:
        return self._wire.cluster.now_s
