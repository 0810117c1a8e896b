"""The group coordinator: the classic protocol, eager, with a sticky assignment made at the coordinator.

Join and sync are one step: the answer to a join, given when the barrier falls, carries the assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from batchferry.simulator.kafka.fetch import Deferred
from batchferry.simulator.kafka.records import Refused

if TYPE_CHECKING:
    from batchferry.simulator.kafka.cluster import SimCluster

WAIT_AGAIN_S: Final = 1.0
UNKNOWN_MEMBER: Final = 25
ILLEGAL_GENERATION: Final = 22
REBALANCE_IN_PROGRESS: Final = 27


class GroupState(StrEnum):
    """Where a group stands."""

    EMPTY = "empty"
    PREPARING = "preparing"
    STABLE = "stable"


class Joined(NamedTuple):
    """The answer to a join."""

    member_id: str
    generation: int
    partitions: frozenset[int]


class Claim(NamedTuple):
    """What a member had before: the sticky assignor's memory."""

    generation: int
    partitions: frozenset[int]


class Member:
    """One member of a group."""

    __slots__ = (
        "claim",
        "expires_at_s",
        "member_id",
        "partitions",
        "process",
        "session_s",
        "timer",
        "topic",
        "waiting",
    )

    def __init__(self, member_id: str, process: str, topic: str, session_s: float) -> None:
        self.member_id = member_id
        self.process = process
        self.topic = topic
        self.session_s = session_s
        self.claim = Claim(-1, frozenset())
        self.partitions: frozenset[int] = frozenset()
        self.waiting: Deferred[Joined | Refused] | None = None
        """The unanswered join."""
        self.expires_at_s = 0.0
        self.timer: asyncio.TimerHandle | None = None


class Group:
    """One consumer group: its members and its committed offsets, which need no members."""

    __slots__ = ("generation", "holds", "members", "name", "offsets", "rebalance_s", "state", "timer")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = GroupState.EMPTY
        self.generation = 0
        self.members: dict[str, Member] = {}
        self.offsets: dict[tuple[str, int], int] = {}
        self.rebalance_s = 0.0
        self.holds = False
        """The first join of an empty group waits a moment for others."""
        self.timer: asyncio.TimerHandle | None = None


class GroupCoordinator:
    """Every group of the cluster. All methods take effect in one step."""

    def __init__(self, cluster: SimCluster, initial_delay_s: float) -> None:
        self._cluster = cluster
        self._initial_delay_s = initial_delay_s
        self._groups: dict[str, Group] = {}
        self._made = 0

    def group(self, name: str) -> Group:
        """The group, made if need be."""
        return self._groups.setdefault(name, Group(name))

    def join(
        self,
        name: str,
        member_id: str | None,
        *,
        process: str,
        topic: str,
        session_s: float,
        rebalance_s: float,
        claim: Claim,
    ) -> Deferred[Joined | Refused]:
        """Join or join again; answered when every member has, or the rebalance timeout has passed.

        Raises:
            Refused: the member is unknown (it was dropped): join without an id.
        """
        group = self.group(name)
        if member_id is None:
            self._made += 1
            member_id = f"{process}/{self._made}"
            group.members[member_id] = Member(member_id, process, topic, session_s)
        member = group.members.get(member_id)
        if member is None:
            raise Refused("UNKNOWN_MEMBER_ID", UNKNOWN_MEMBER)
        member.claim = claim
        group.rebalance_s = max(group.rebalance_s, rebalance_s)
        if group.state is not GroupState.PREPARING:
            self._prepare(group, f"{process} joins")
        member.waiting = Deferred()
        answer = member.waiting
        self._complete_if_all(group)
        return answer

    def heartbeat(self, name: str, member_id: str, generation: int) -> None:
        """Show that the member lives.

        Raises:
            Refused: it was dropped, its generation is over, or it must join again.
        """
        group = self.group(name)
        member = self._member(group, member_id)
        if generation != group.generation:
            raise Refused("ILLEGAL_GENERATION", ILLEGAL_GENERATION)
        member.expires_at_s = self._cluster.now_s + member.session_s
        if group.state is GroupState.STABLE and self._cluster.faults.wants_rebalance():
            self._prepare(group, "a fault")
        if group.state is GroupState.PREPARING:
            raise Refused("REBALANCE_IN_PROGRESS", REBALANCE_IN_PROGRESS)

    def leave(self, name: str, member_id: str) -> None:
        """Take the member out at once.

        Raises:
            Refused: it is not a member.
        """
        group = self.group(name)
        self._drop(group, self._member(group, member_id), "leaves")

    def rebalance(self, name: str, why: str) -> None:
        """Start a rebalance of a group at rest."""
        group = self.group(name)
        if group.state is GroupState.STABLE:
            self._prepare(group, why)

    def commit(self, name: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets without being a member.

        Raises:
            Refused: the group has members.
        """
        if self.group(name).members:
            raise Refused("UNKNOWN_MEMBER_ID", UNKNOWN_MEMBER)
        for partition, offset in offsets.items():
            self.keep_offset(name, topic, partition, offset)

    def keep_offset(self, name: str, topic: str, partition: int, offset: int) -> None:
        """Set the committed offset, whoever says so."""
        self.group(name).offsets[topic, partition] = offset

    def offsets(self, name: str, topic: str) -> dict[int, int]:
        """Committed offsets by partition."""
        group = self._groups.get(name)
        return {} if group is None else {part: at for (of, part), at in sorted(group.offsets.items()) if of == topic}

    def forget_topic(self, topic: str) -> None:
        """A deleted topic's offsets go with it."""
        for group in self._groups.values():
            group.offsets = {place: at for place, at in group.offsets.items() if place[0] != topic}

    def restart_sessions(self) -> None:
        """The coordinator has come back: everybody gets a whole session to show up."""
        for group in self._groups.values():
            for member in group.members.values():
                member.expires_at_s = self._cluster.now_s + member.session_s

    def _member(self, group: Group, member_id: str) -> Member:
        member = group.members.get(member_id)
        if member is None:
            raise Refused("UNKNOWN_MEMBER_ID", UNKNOWN_MEMBER)
        return member

    def _prepare(self, group: Group, why: str) -> None:
        was_empty = group.state is GroupState.EMPTY
        group.state = GroupState.PREPARING
        self._cluster.note(f"group {group.name}: rebalance begins ({why})")
        group.holds = was_empty and self._initial_delay_s > 0
        self._arm(group, self._initial_delay_s if was_empty else group.rebalance_s)

    def _arm(self, group: Group, wait_s: float) -> None:
        if group.timer is not None:
            group.timer.cancel()
        group.timer = self._cluster.later(wait_s, lambda: self._barrier_due(group))

    def _barrier_due(self, group: Group) -> None:
        if group.state is not GroupState.PREPARING:
            return
        if self._cluster.faults.is_broker_away:
            self._arm(group, WAIT_AGAIN_S)
            return
        if group.holds:
            group.holds = False
            self._arm(group, group.rebalance_s)
            self._complete_if_all(group)
            return
        for member in list(group.members.values()):
            if member.waiting is None:
                self._remove(group, member, "did not join again in time")
        self._complete(group)

    def _complete_if_all(self, group: Group) -> None:
        if group.state is not GroupState.PREPARING or group.holds:
            return
        if all(member.waiting is not None for member in group.members.values()):
            self._complete(group)

    def _complete(self, group: Group) -> None:
        if group.timer is not None:
            group.timer.cancel()
            group.timer = None
        group.generation += 1
        if not group.members:
            group.state = GroupState.EMPTY
            group.rebalance_s = 0.0
            self._cluster.note(f"group {group.name}: empty")
            return
        group.state = GroupState.STABLE
        self._assign(group)
        told = ", ".join(f"{member.member_id}={sorted(member.partitions)}" for member in group.members.values())
        self._cluster.note(f"group {group.name}: generation {group.generation}: {told}")
        for member in list(group.members.values()):
            answer, member.waiting = member.waiting, None
            member.expires_at_s = self._cluster.now_s + member.session_s
            self._watch(group, member)
            if answer is not None:
                answer.set(Joined(member.member_id, group.generation, member.partitions))

    def _assign(self, group: Group) -> None:
        by_topic: dict[str, list[Member]] = {}
        for member in group.members.values():
            by_topic.setdefault(member.topic, []).append(member)
        for topic, members in by_topic.items():
            for member, partitions in zip(members, self._spread(topic, members), strict=True):
                member.partitions = frozenset(partitions)

    def _spread(self, topic: str, members: list[Member]) -> list[list[int]]:
        """Balanced, and each keeps as much as balance allows; of two claims the newer generation's counts."""
        count = self._cluster.partition_count(topic)
        claimed: dict[int, tuple[int, int]] = {}
        for at, member in enumerate(members):
            for partition in sorted(member.claim.partitions):
                if partition < count and member.claim.generation > claimed.get(partition, (-1, 0))[0]:
                    claimed[partition] = (member.claim.generation, at)
        held: list[list[int]] = [[] for _ in members]
        for partition in sorted(claimed):
            held[claimed[partition][1]].append(partition)
        least, more = divmod(count, len(members))
        by_size = sorted(range(len(members)), key=lambda at: -len(held[at]))
        quota = {at: least + (rank < more) for rank, at in enumerate(by_size)}
        free = [partition for partition in range(count) if partition not in claimed]
        for at in by_size:
            while len(held[at]) > quota[at]:
                free.append(held[at].pop(self._cluster.rng.randrange(len(held[at]))))
        for at in by_size:
            while len(held[at]) < quota[at]:
                held[at].append(free.pop())
        return held

    def _watch(self, group: Group, member: Member) -> None:
        if member.timer is None:
            member.timer = self._cluster.later(member.session_s, lambda: self._session_due(group, member))

    def _session_due(self, group: Group, member: Member) -> None:
        member.timer = None
        if group.members.get(member.member_id) is not member or member.waiting is not None:
            return  # gone, or waiting at the barrier: completing it starts the session again
        left_s = member.expires_at_s - self._cluster.now_s
        if self._cluster.faults.is_broker_away:
            left_s = WAIT_AGAIN_S
        if left_s > 0:
            member.timer = self._cluster.later(left_s, lambda: self._session_due(group, member))
            return
        self._drop(group, member, "session timed out")

    def _remove(self, group: Group, member: Member, why: str) -> None:
        del group.members[member.member_id]
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        if member.waiting is not None:
            member.waiting.set(Refused("UNKNOWN_MEMBER_ID", UNKNOWN_MEMBER))
        self._cluster.note(f"group {group.name}: {member.member_id} {why}")

    def _drop(self, group: Group, member: Member, why: str) -> None:
        self._remove(group, member, why)
        if group.state is GroupState.STABLE:
            self._prepare(group, f"{member.member_id} is gone")
        self._complete_if_all(group)
