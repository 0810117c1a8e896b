"""The group member that reads the input topic.

Theory of operation. aiokafka forgets pause flags and positions at every rebalance, also those of partitions that
stay, and restarts them at the committed offset; for us that is the settled watermark, far behind. So the truth
about each partition is a ``_Slot`` of ours: the next offset to be handed out, and whether it is paused. The client
is told again after every rebalance, in the assignment callback, before anything can be delivered: pause all,
seek all to our positions, resume what was running. New partitions get a position only from ``resume``; until
then they are paused at offset 0, so that the client neither asks for a committed offset nor fetches.

Records and positions move together. ``_fetch`` takes records out of the client and advances the slots in the same
step of the event loop; what a caller had no time to take (it was cancelled, or a rebalance made the client's call
outlast its timeout) waits in ``_transit``, tagged with the slot's turn. A seek begins a new turn and makes it void.

The client's call is never cancelled, since that would switch off its own supervision for good; ``poll`` runs it as
a task, waits as long as it promised, and finds the task again next time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.client import ConnectionGroup
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import ConsumerStoppedError, KafkaError, OffsetOutOfRangeError
from aiokafka.protocol.group import HeartbeatRequest

from batchferry.domain.errors import KafkaUnavailable
from batchferry.kafka.dispose import end_tasks, in_background, stop_consumer
from batchferry.kafka.faults import EXPECTED, name_of, unavailable
from batchferry.kafka.settings import KafkaClientSettings, connection_arguments, fetch_arguments, ms
from batchferry.ports import AssignmentListener, Record

log = logging.getLogger(__name__)

REJOIN_GRACE_S: Final = 30.0
"""A rebalance may last its timeout and so much longer before the watchdog complains."""
CUT_OFF_LIMIT_S: Final = 900.0
"""So long without an assignment is complained of also while no broker answers: then a restart may help only if their
addresses have changed."""
POLL_SILENCE_LIMIT_S: Final = 60.0
"""Nobody has come back from ``poll`` for so long: the intake loop is stuck."""
FETCH_SILENCE_LIMIT_S: Final = 60.0
"""The client's fetch call has not come back for so long although no rebalance holds it."""
POLL_GRACE_S: Final = 0.2
"""How much later than asked ``poll`` may return."""


class _Slot:
    """What we know of one assigned partition."""

    __slots__ = ("lost", "paused", "position", "turn")

    def __init__(self) -> None:
        self.position: int | None = None
        """Next offset to be handed out; None until ``resume`` has named one."""
        self.paused = True
        self.lost = False
        self.turn = 0
        """Counts seeks: records taken out in an earlier turn are void."""


class _Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka's classes are untyped
    """aiokafka's callbacks, as plain functions: nothing in them can wait, so no heartbeat is missed."""

    def __init__(self, owner: GroupConsumer) -> None:
        self._owner = owner

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        self._owner._revoked(revoked)  # noqa: SLF001 (two halves of one class)

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._owner._assigned(assigned)  # noqa: SLF001


class GroupConsumer:
    """A member of the consumer group (``ports.RequestConsumer``); one a process, used from one event loop."""

    def __init__(self, settings: KafkaClientSettings, topic: str, group: str) -> None:
        self._settings = settings
        self._topic = topic
        self._group = group
        # The client keeps the sticky assignor's memory on the class, so two consumers of one process would share it.
        self._assignor: Any = type("OwnStickyAssignor", (StickyPartitionAssignor,), {"member_assignment": None})
        self._client: AIOKafkaConsumer | None = None
        self._listener: AssignmentListener | None = None
        self._slots: dict[int, _Slot] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._transit: dict[int, tuple[int, Sequence[Record]]] = {}
        self._failure: BaseException | None = None
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._listener_fault = ""
        self._stopped = False
        now = time.monotonic()
        self._polled_at = now
        self._fetch_began_at = now
        self._unsettled_since: float | None = None
        """When the group last ceased to be in order for us; None while it is."""
        self.cut_off_at = float("-inf")
        """Monotonic seconds when we last saw that no broker answers for the group."""

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
        settings = self._settings
        arguments = connection_arguments(settings, "intake") | fetch_arguments(settings)
        # A join is answered only when the slowest member has joined; a shorter limit would break it off each time.
        arguments["request_timeout_ms"] = ms(settings.rebalance_timeout_s + 10)
        client = AIOKafkaConsumer(
            **arguments,
            group_id=self._group,
            auto_offset_reset="none",
            partition_assignment_strategy=(self._assignor,),
            session_timeout_ms=ms(settings.session_timeout_s),
            heartbeat_interval_ms=ms(settings.heartbeat_interval_s),
            rebalance_timeout_ms=ms(settings.rebalance_timeout_s),
            max_poll_interval_ms=ms(settings.max_poll_interval_s),
        )
        try:
            async with asyncio.timeout(settings.connect_deadline_s):
                await client.start()
        except BaseException as error:
            in_background(stop_consumer(client, settings.close_deadline_s), name="discard-consumer")
            if isinstance(error, EXPECTED):
                raise unavailable("joining the group at", error, target=settings.bootstrap_servers) from error
            raise
        self._client = client
        self._polled_at = self._unsettled_since = time.monotonic()
        client.subscribe([self._topic], listener=_Rebalances(self))

    async def poll(self, max_records: int, timeout_ms: int) -> Mapping[int, Sequence[Record]]:
        """Records of resumed partitions, offsets ascending; empty after about ``timeout_ms``.

        Returns in time also during a rebalance, and may be cancelled: what was fetched meanwhile comes with the
        next call. A partition whose position the log no longer has is paused and told by ``lost_positions``.

        Raises:
            KafkaUnavailable: the client cannot go on (not authorised, or its tasks have died); nothing is skipped.
        """
        client = self._client
        if client is None or self._stopped:
            return {}
        try:
            if not self._transit and self._failure is None:
                if self._fetching is None:
                    self._fetch_began_at = time.monotonic()
                    self._fetching = asyncio.get_running_loop().create_task(
                        self._fetch(client, max_records, timeout_ms), name="kafka-intake-fetch"
                    )
                await asyncio.wait((self._fetching,), timeout=timeout_ms / 1000 + POLL_GRACE_S)
            return self._hand_over()
        finally:
            self._polled_at = time.monotonic()
            self._watch_rejoin()

    def lost_positions(self) -> Mapping[int, int]:
        """Partitions whose position lies outside the log, with that position; cleared by ``resume``.

        Below the log start is the usual reason (retention); beyond its end means the topic lost records or was
        made anew.
        """
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
                self._tell(partition, slot)

    def resume(self, partition: int, offset: int | None = None) -> None:
        """Deliver this partition again, from ``offset`` if given, else from where it was paused.

        A partition that is no longer assigned is passed over: the rebalance was faster than the caller.

        Raises:
            ValueError: no offset given and none known, or the position is lost.
        """
        slot = self._slots.get(partition)
        if slot is None:
            return
        if offset is None and (slot.position is None or slot.lost):
            raise ValueError(f"partition {partition} has no position to resume from: name an offset")
        if offset is not None:
            slot.position = offset
            slot.turn += 1
            self._transit.pop(partition, None)
        slot.lost = False
        slot.paused = False
        self._tell(partition, slot, seek=offset is not None)

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
        client = self._client
        if client is None or self._stopped:
            return ()
        found = []
        coordinator, fetcher = client._coordinator, client._fetcher  # noqa: SLF001 (nothing public tells)
        now = time.monotonic()
        if coordinator._coordination_task.done():  # noqa: SLF001
            found.append("the group coordination task has died")
        heartbeat = coordinator._heartbeat_task  # noqa: SLF001
        if heartbeat is not None and heartbeat.done() and not heartbeat.cancelled() and heartbeat.exception():
            found.append("the heartbeat task has died")
        if fetcher._fetch_task.done():  # noqa: SLF001
            found.append("the fetch task has died")
        self._watch_rejoin()
        limit_s = self._settings.rebalance_timeout_s + REJOIN_GRACE_S
        if self._unsettled_since is not None and (
            # A rebalance cannot begin before there is a broker again.
            now - max(self._unsettled_since, self.cut_off_at) > limit_s
            or now - self._unsettled_since > max(limit_s, CUT_OFF_LIMIT_S)
        ):
            found.append(f"no assignment from the group for {now - self._unsettled_since:.0f} s")
        if now - self._polled_at > POLL_SILENCE_LIMIT_S:
            found.append(f"no poll has returned for {now - self._polled_at:.0f} s")
        if (
            self._fetching is not None
            and not self._fetching.done()
            and self._unsettled_since is None
            and now - self._fetch_began_at > FETCH_SILENCE_LIMIT_S
        ):
            found.append(f"the client's fetch call has not returned for {now - self._fetch_began_at:.0f} s")
        if self._listener_fault:
            found.append(f"the assignment listener failed: {self._listener_fault}")
        return found

    async def confirms_assignment(self, partition: int, timeout_s: float) -> bool:
        """Whether a heartbeat answered after this call still has the partition assigned to us.

        False whenever that is not certain: no answer in time, a rebalance under way, another generation.
        """
        client = self._client
        if client is None or self._stopped or not self._is_ours_for_sure(partition):
            return False
        coordinator = client._coordinator  # noqa: SLF001 (the client offers no heartbeat on demand)
        generation, member, node = coordinator.generation, coordinator.member_id, coordinator.coordinator_id
        if node is None or generation < 0:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await client._client.send(  # noqa: SLF001
                    node, HeartbeatRequest(self._group, generation, member), group=ConnectionGroup.COORDINATION
                )
        except EXPECTED:
            return False
        if answer.error_code != 0 or coordinator.generation != generation:
            return False
        return self._is_ours_for_sure(partition)

    async def stop(self) -> None:
        """Leave the group; bounded, safe to call twice. The listener hears nothing: drain before."""
        if self._stopped:
            return
        self._stopped = True
        self._cancel_timer()
        client, self._client = self._client, None
        if client is None:
            return
        await stop_consumer(client, self._settings.close_deadline_s)
        # Now that the client is gone nothing is left that a cancelled fetch could harm.
        await end_tasks([self._fetching], self._settings.close_deadline_s)

    # ------------------------------------------------------------------------------ fetching

    async def _fetch(self, client: AIOKafkaConsumer, max_records: int, timeout_ms: int) -> None:
        """One call of the client; its records go to ``_transit`` and the slots advance, in one step of the loop."""
        try:
            fetched: Mapping[TopicPartition, Sequence[Record]] = await client.getmany(
                timeout_ms=timeout_ms, max_records=max_records
            )
        except ConsumerStoppedError:
            return
        except OffsetOutOfRangeError as error:
            fetched = {}
            for where, offset in error.args[0].items():
                slot = self._slots.get(where.partition)
                if slot is not None and slot.position == offset:
                    slot.lost = slot.paused = True
            self._rewind()
        except Exception as error:  # noqa: BLE001 (told to the caller of poll)
            # What the client had already taken out of other partitions for this call is gone with the exception.
            fetched = {}
            self._failure = error
            self._rewind()
        for where, records in fetched.items():
            slot = self._slots.get(where.partition)
            if slot is not None:
                self._transit[where.partition] = (slot.turn, records)
        states = self._states()
        for partition, slot in self._slots.items():
            state = states.get(TopicPartition(self._topic, partition))
            if state is not None and slot.position is not None and not slot.lost and state.has_valid_position:
                slot.position = state.position

    def _hand_over(self) -> Mapping[int, Sequence[Record]]:
        if self._fetching is not None and self._fetching.done():
            finished, self._fetching = self._fetching, None
            if not finished.cancelled():
                finished.result()  # a bug of ours, if anything
        failure, self._failure = self._failure, None
        if failure is not None:
            if isinstance(failure, KafkaError | OSError | TimeoutError):
                raise unavailable("reading", failure, target=self._topic) from failure
            raise KafkaUnavailable(f"reading {self._topic}: {name_of(failure)}") from failure
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
                self._tell(partition, slot, seek=True)
                continue
            handed[partition] = records
        return handed

    # ---------------------------------------------------------------------------- the client

    def _states(self) -> Mapping[TopicPartition, Any]:
        """The client's state of each assigned partition; positions have no public synchronous getter."""
        subscription = self._client._subscription.subscription if self._client is not None else None  # noqa: SLF001
        assignment = subscription.assignment if subscription is not None else None
        return assignment._tp_state if assignment is not None else {}  # noqa: SLF001

    def _tell(self, partition: int, slot: _Slot, *, seek: bool = False) -> None:
        """Bring the client in line with the slot, if it has the partition; pauses before it seeks."""
        client, where = self._client, TopicPartition(self._topic, partition)
        if client is None or where not in self._states():
            return
        if slot.paused:
            client.pause(where)
        if seek:
            client.seek(where, slot.position or 0)
        if not slot.paused:
            client.resume(where)

    def _rewind(self) -> None:
        """Put the client back to our positions, wherever the two differ."""
        states = self._states()
        for partition, slot in self._slots.items():
            state = states.get(TopicPartition(self._topic, partition))
            if state is not None and slot.position is not None:
                self._tell(partition, slot, seek=not state.has_valid_position or state.position != slot.position)

    # ------------------------------------------------------------------------------- rebalances

    def _revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """A rebalance begins. Nothing is given up: most partitions will come straight back."""
        if self._unsettled_since is None:
            self._unsettled_since = time.monotonic()
        suspects = frozenset(where.partition for where in revoked) & self._slots.keys()
        if not suspects or self._stopped:
            return  # the first join revokes nothing
        self._cancel_timer()
        self._give_up_timer = asyncio.get_running_loop().call_later(self.give_up_after_s, self._give_up)
        self._call_listener("on_suspect", suspects)

    def _assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """The new generation. The client could deliver from here on, so the very first thing is to pause."""
        client = self._client
        if client is None:
            return
        mine = [where for where in assigned if where.topic == self._topic]
        client.pause(*mine)
        self._cancel_timer()
        self._unsettled_since = None
        self._assignor.on_generation_assignment(client._coordinator.generation)  # noqa: SLF001 (it never does itself)
        now_ours = frozenset(where.partition for where in mine)
        before = frozenset(self._slots)
        kept, added, lost = now_ours & before, now_ours - before, before - now_ours
        for partition in lost:
            del self._slots[partition]
            self._transit.pop(partition, None)
        for partition in added:
            self._slots[partition] = _Slot()
        for partition in now_ours:
            self._tell(partition, self._slots[partition], seek=True)
        # Told also when nothing is ours: a member more than there are partitions must know that it has joined.
        self._call_listener("on_assignment", kept, added, lost)

    def _give_up(self) -> None:
        lost = frozenset(self._slots)
        self._slots.clear()
        self._transit.clear()
        if lost:
            self._call_listener("on_assignment", frozenset(), frozenset(), lost)

    def _call_listener(self, name: str, *arguments: frozenset[int]) -> None:
        try:
            getattr(self._listener, name)(*arguments)
        except Exception as error:  # aiokafka would swallow it without a trace
            self._listener_fault = f"{name}: {type(error).__name__}"
            log.exception("assignment listener failed in %s", name)

    def _is_ours_for_sure(self, partition: int) -> bool:
        return self._unsettled_since is None and partition in self._slots

    def _cancel_timer(self) -> None:
        timer, self._give_up_timer = self._give_up_timer, None
        if timer is not None:
            timer.cancel()

    def _watch_rejoin(self) -> None:
        """Note since when a rejoin is wanted; the client has been seen to want one for ever without doing it."""
        client = self._client
        if client is None:
            return
        if client._coordinator.coordinator_id is None:  # noqa: SLF001 (nothing public tells)
            self.cut_off_at = time.monotonic()
        if self._unsettled_since is not None:
            return
        if client._coordinator._rejoin_needed_fut.done():  # noqa: SLF001 (the only signal there is)
            self._unsettled_since = time.monotonic()
