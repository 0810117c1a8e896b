"""Group members that have died, taken out of the embedded broker's groups.

A Kafka broker drops a member whose session has timed out. The embedded one keeps it for ever: it waits for it in
every rebalance, and where the dead one is the group's leader, nobody is ever assigned anything again. Seen from
outside, a group that has been rebalancing for longer than a session lasts waits for somebody dead, and those are
among the members it had before. They are made to leave. A live one among them is told so and joins again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest

from batchferry.kafka.faults import EXPECTED

PATIENCE_S = 7.0
"""A rebalance may take so long: twice what a member needs to hear of it from its heartbeats and to join again."""
LOOK_S = 1.0
_AT_REST = frozenset({"Stable", "Empty", "Dead"})


class LapsedMembers:
    """A background thread that looks after the groups of one embedded broker until ``stop``."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="lapsed-members", daemon=True)
        self._members: dict[str, frozenset[str]] = {}
        """Members of each group when it was last at rest."""
        self._restless_since: dict[str, float] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; bounded."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5 * LOOK_S)

    async def _run(self) -> None:
        while not self._stop.is_set():
            admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap, client_id="batchferry-lapsed")
            with suppress(*EXPECTED):
                await admin.start()
                while not self._stop.is_set():
                    await self._look(admin)
                    await asyncio.sleep(LOOK_S)
            with suppress(*EXPECTED):
                await admin.close()
            await asyncio.sleep(LOOK_S)

    async def _look(self, admin: AIOKafkaAdminClient) -> None:
        groups = [name for name, *_ in await admin.list_consumer_groups()]
        if not groups:
            return
        for answer in await admin.describe_consumer_groups(groups):
            for _, name, state, _, _, members, *_ in answer.groups:
                await self._mind(admin, name, state, frozenset(member[0] for member in members))

    async def _mind(self, admin: AIOKafkaAdminClient, group: str, state: str, members: frozenset[str]) -> None:
        now = time.monotonic()
        if state in _AT_REST:
            self._members[group] = members
            self._restless_since.pop(group, None)
            return
        if now - self._restless_since.setdefault(group, now) < PATIENCE_S:
            return
        self._restless_since[group] = now
        for member in self._members.get(group, frozenset()) & members:
            await admin._send_request(LeaveGroupRequest(group, member))  # noqa: SLF001 - the client has no call for it
        self._members[group] = members  # if that was not enough, those that joined meanwhile are next
