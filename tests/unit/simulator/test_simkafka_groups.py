"""Groups of the cluster inside the process: barriers, sessions, zombies, lazy revocation, growth."""

from __future__ import annotations

import asyncio

import pytest
from simkafka_kit import World, producer, record, until, virtual

from batchferry.domain.errors import PartitionLost
from batchferry.simulator.kafka import FaultRates
from broker.kit import Member

QUICK = {
    "session_timeout_s": 10.0,
    "heartbeat_interval_s": 1.0,
    "rebalance_timeout_s": 20.0,
    "metadata_max_age_s": 15.0,
}


async def settled(*members: Member, partitions: int) -> None:
    """Wait until these share all partitions, each once."""
    await until(lambda: sorted(p for one in members for p in one.hears.owned) == list(range(partitions)))


@virtual
async def test_the_barrier_waits_for_every_member(world):
    """A join is answered only when the others have come back from their heartbeats; a frozen one holds it up."""
    world.cluster.create_topic("in", 4)
    async with Member(world.port("a", **QUICK), "in", "g") as first:
        await settled(first, partitions=4)
        slow = world.processes[0]
        slow.pause()
        began_s = world.cluster.now_s
        async with Member(world.port("b", **QUICK), "in", "g") as second:
            await until(lambda: second.hears.owned)
            waited_s = world.cluster.now_s - began_s
            assert 8 < waited_s <= 11  # the frozen one's session, not the rebalance timeout
            assert second.hears.owned == {0, 1, 2, 3}
            slow.wake()
            await settled(first, second, partitions=4)
            assert len(first.hears.owned) == 2


@virtual
async def test_a_zombie_is_dropped_and_learns_it_at_its_next_heartbeat(world):
    """It believes in its partitions until it wakes; then it is suspect, joins again, and is assigned anew."""
    world.cluster.create_topic("in", 2)
    ports = [world.port(name, **QUICK) for name in ("a", "b")]
    async with Member(ports[0], "in", "g") as zombie, Member(ports[1], "in", "g") as other:
        await settled(zombie, other, partitions=2)
        (mine,) = zombie.hears.owned
        fuse = await producer(ports[0], f"txn-{mine}")
        heard = len(zombie.hears.assignments)
        ports[0].process.pause()
        await until(lambda: len(other.hears.owned) == 2)
        successor = await producer(ports[1], f"txn-{mine}")
        assert zombie.consumer.assignment() == {mine}
        ports[0].process.wake()
        with pytest.raises(PartitionLost):
            await fuse.transact([record("in", b"zombie")], 99)
        await settled(zombie, other, partitions=2)
        assert len(zombie.hears.assignments) > heard
        assert zombie.hears.suspects[-1] == {mine}
        assert world.cluster.group_offsets("g", "in") == {}
        await successor.transact([], 5)
        assert world.cluster.group_offsets("g", "in") == {0: 5}


@virtual
async def test_an_offset_is_committed_by_the_transactional_id_alone(world):
    """No membership is asked for: whoever has the newest epoch commits the group's offset, member or not."""
    world.cluster.create_topic("in", 1)
    async with Member(world.port("member", **QUICK), "in", "g") as member:
        await settled(member, partitions=1)
        stranger = await producer(world.port("stranger"))
        await stranger.transact([], 7)
        assert world.cluster.group_offsets("g", "in") == {0: 7}


@virtual
async def test_a_cut_off_member_gives_up_after_its_time_and_comes_back(world):
    """With no answer for give_up_after_s everything is told lost; reachable again it is assigned as if new."""
    world.cluster.create_topic("in", 2)
    async with Member(world.port("a", **QUICK), "in", "g") as first:
        async with Member(world.port("b", **QUICK), "in", "g") as second:
            await settled(first, second, partitions=2)
            (mine,) = first.hears.owned
            suspected = len(first.hears.suspects)
            first.hears.on_suspect = lambda partitions: (
                first.hears.suspects.append(partitions),
                world.cluster.faults.cut_off("a", 60.0),
            )
            world.cluster.rebalance("g")
            await until(lambda: len(first.hears.suspects) > suspected)
            began_s = world.cluster.now_s
            assert not await first.consumer.confirms_assignment(mine, 2.0)
            await until(lambda: second.hears.owned == {0, 1})
            await until(lambda: first.hears.owned == frozenset())
            assert 15 <= world.cluster.now_s - began_s <= 25
            assert first.hears.assignments[-1] == (frozenset(), frozenset(), {mine})
            await until(lambda: first.hears.owned)
            await settled(first, second, partitions=2)
            assert world.cluster.now_s - began_s >= 60


@virtual
async def test_kept_partitions_keep_position_and_pause(world):
    """Rebalances for no reason disturb no stream: every record once and in order, a paused one stays paused."""
    world.cluster.create_topic("in", 3)
    async with Member(world.port("a", **QUICK), "in", "g") as member:
        await settled(member, partitions=3)
        for partition in range(3):
            member.consumer.resume(partition, 0)
        member.consumer.pause([2])
        world.cluster.faults.rates = FaultRates(rebalance=0.5)
        for number in range(60):
            world.cluster.append([record("in", b"%d" % number, partition=partition) for partition in range(3)])
            await asyncio.sleep(1)
        world.cluster.faults.clear()
        await until(lambda: len(member.got[0]) == len(member.got[1]) == 60)
        assert len(member.hears.suspects) > 5
        assert all([one.offset for one in member.got[p]] == list(range(60)) for p in (0, 1))
        assert not member.got[2]
        assert not any(added or lost for _, added, lost in member.hears.assignments[1:])
        member.consumer.resume(2)
        await until(lambda: len(member.got[2]) == 60)


@virtual
async def test_growth_is_noticed_within_the_metadata_age(world):
    """New partitions come with a rebalance, added ones paused; the old ones are kept."""
    world.cluster.create_topic("in", 2)
    async with Member(world.port("a", **QUICK), "in", "g") as member:
        await settled(member, partitions=2)
        world.cluster.create_partitions("in", 4)
        began_s = world.cluster.now_s
        await settled(member, partitions=4)
        assert world.cluster.now_s - began_s <= QUICK["metadata_max_age_s"] + 3
        assert member.hears.assignments[-1] == ({0, 1}, {2, 3}, frozenset())


@virtual
async def test_a_position_the_log_does_not_have_is_told(world):
    """Below a start above zero, and beyond the end of a topic made anew: paused and named, not jumped."""
    world.cluster.create_topic("in", 2, first_offsets={0: 50})
    world.cluster.append([record("in", b"%d" % number, partition=number % 2) for number in range(10)])
    async with Member(world.port("a", **QUICK), "in", "g") as member:
        await settled(member, partitions=2)
        member.consumer.resume(0, 10)
        member.consumer.resume(1, 0)
        await until(lambda: member.consumer.lost_positions() == {0: 10} and len(member.got[1]) == 5)
        assert not member.got[0]
        world.cluster.recreate_topic("in")
        await until(lambda: member.consumer.lost_positions() == {0: 10, 1: 5})


@virtual
async def test_a_missed_poll_is_complained_of(world):
    """The watchdog speaks after a minute without a poll, and is quiet again after one."""
    world.cluster.create_topic("in", 1)
    member = Member(world.port("a", **QUICK), "in", "g")
    await member.consumer.start(member.hears)
    await until(lambda: member.hears.owned)
    assert member.consumer.complaints() == []
    await asyncio.sleep(70)
    (silence,) = member.consumer.complaints()
    assert "no poll has returned" in silence
    await member.consumer.poll(1, 10)
    assert member.consumer.complaints() == []
    await member.consumer.stop()
    assert member.consumer.complaints() == ()


@virtual
async def test_a_missing_assignment_is_complained_of(world):
    """A quarter of an hour after the last one while no broker answers; the absence alone is no fault of ours."""
    world.cluster.create_topic("in", 1)
    async with Member(world.port("a", **QUICK), "in", "g") as member:
        await settled(member, partitions=1)
        member.hears.on_suspect = lambda _: world.cluster.faults.cut_off("a", 2000.0)
        world.cluster.rebalance("g")
        await asyncio.sleep(800)
        assert member.hears.owned == frozenset()
        assert member.consumer.complaints() == []
        await asyncio.sleep(105)
        (missing,) = member.consumer.complaints()
        assert "no assignment from the group" in missing
        world.cluster.faults.clear()
        await settled(member, partitions=1)
        assert member.consumer.complaints() == []


@virtual
async def test_a_process_that_dies_leaves_its_partitions_after_its_session(world):
    """Nothing is heard of it any more, and the survivor has everything within the session timeout and a join."""
    world.cluster.create_topic("in", 4)
    ports = [world.port(name, **QUICK) for name in ("a", "b")]
    async with Member(ports[1], "in", "g") as survivor:
        victim = Member(ports[0], "in", "g")
        await victim.__aenter__()
        await settled(victim, survivor, partitions=4)
        ports[0].process.alive = False
        began_s = world.cluster.now_s
        await until(lambda: len(survivor.hears.owned) == 4)
        assert 9 <= world.cluster.now_s - began_s <= 12


def test_the_same_seed_gives_the_same_history():
    """A run with several members, rebalances and transactions is repeated line by line from its seed."""

    async def run(world: World) -> None:
        world.cluster.create_topic("in", 6)
        world.cluster.faults.rates = FaultRates(rebalance=0.1, slow_reply=0.1, lose_commit_reply=0.2, slow_request=0.1)
        async with Member(world.port("a", **QUICK), "in", "g"), Member(world.port("b", **QUICK), "in", "g"):
            for number in range(30):
                made = await producer(world.port("c"), f"txn-{number % 3}")
                try:
                    await made.transact([record("in", b"v", partition=p) for p in range(3)], number)
                except PartitionLost:
                    world.cluster.note("lost")
                await asyncio.sleep(1)

    def history(seed: int) -> list[str]:
        kept: list[str] = []

        async def once(_: World) -> None:
            world = World(seed)
            await run(world)
            kept.extend(world.cluster.history)

        virtual(once)()
        return kept

    first = history(5)
    assert len(first) > 50
    assert history(5) == first
    assert history(6) != first
