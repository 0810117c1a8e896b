"""The way of one call: request delay, effect at the broker, reply delay. All of it by timers of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from batchferry.simulator.kafka.faults import FaultKind
from batchferry.simulator.kafka.fetch import Deferred, Fetch
from batchferry.simulator.kafka.process import SimProcess
from batchferry.simulator.kafka.records import Refused

if TYPE_CHECKING:
    from batchferry.simulator.kafka.cluster import SimCluster

T = TypeVar("T")

REACH_AGAIN_S: Final = 0.1
"""A client that could not connect tries again about so long after the broker is back."""


class NoAnswer(Exception):
    """The deadline of a call has passed."""


class GivenUp(Exception):
    """The client of this call was closed while it ran."""


class _Delivery:
    """One request and its answer on their way."""

    __slots__ = (
        "_cluster",
        "_effect",
        "_name",
        "_outlives",
        "_process",
        "_reply",
        "_struck",
        "_transactional_id",
        "is_abandoned",
        "waiting",
    )

    def __init__(
        self,
        cluster: SimCluster,
        process: SimProcess,
        name: str,
        effect: Callable[[], Any],
        reply: asyncio.Future[tuple[bool, Any]],
        transactional_id: str,
        *,
        outlives: bool,
    ) -> None:
        self._cluster = cluster
        self._process = process
        self._name = name
        self._effect = effect
        self._reply = reply
        self._outlives = outlives
        self._transactional_id = transactional_id
        self._struck: frozenset[FaultKind] = frozenset()
        self.is_abandoned = False
        """The caller no longer waits."""
        self.waiting: Deferred[Any] | None = None
        """The answer the broker has not given yet."""

    def depart(self) -> None:
        """Put the request on the wire."""
        self._struck = self._cluster.faults.strike(self._name, self._process.name)
        delay_s = self._cluster.latency(self._process)
        if FaultKind.SLOW_REQUEST in self._struck:
            delay_s += self._cluster.faults.slow_s()
        self._cluster.later(delay_s, self._arrive)

    def _arrive(self) -> None:
        cluster, process = self._cluster, self._process
        if not process.alive:
            arrives = cluster.rng.random() < 0.5
            if self._outlives:
                cluster.note(f"{self._name} of dead {process.name} {'arrives' if arrives else 'is lost'}")
            if not arrives:
                return
        if cluster.faults.is_away(process.name):
            # No connection: the client tries again for as long as it wants the answer.
            if process.alive and not self._is_over():
                cluster.faults.when_back(process.name, self._again)
            return
        if FaultKind.LOSE_REQUEST in self._struck or (not self._outlives and self._is_over()):
            return
        if FaultKind.ABORT in self._struck:
            cluster.abort_transaction(self._transactional_id, "a fault")
        try:
            if FaultKind.TOO_LARGE in self._struck:
                raise Refused("MESSAGE_TOO_LARGE", 10)  # noqa: TRY301 (as if the effect had)
            result = self._effect()
        except Refused as refusal:
            self._answer((False, refusal))
            return
        if isinstance(result, Deferred):
            self.waiting = result
            result.then(lambda value: self._answer((not isinstance(value, Refused), value)))
        else:
            self._answer((True, result))

    def _is_over(self) -> bool:
        return self.is_abandoned or self._reply.done()

    def _again(self) -> None:
        if self._process.alive and not self._is_over():
            self._cluster.later(self._cluster.rng.uniform(0, REACH_AGAIN_S), self._arrive)

    def _answer(self, answer: tuple[bool, Any]) -> None:
        self.waiting = None
        if FaultKind.LOSE_REPLY in self._struck or self._is_over():
            return
        delay_s = self._cluster.latency(self._process)
        if FaultKind.SLOW_REPLY in self._struck:
            delay_s += self._cluster.faults.slow_s()
        self._cluster.later(delay_s, lambda: self._deliver(answer))

    def _deliver(self, answer: tuple[bool, Any]) -> None:
        if not self._process.alive or self._is_over():
            return
        if self._cluster.faults.is_away(self._process.name):
            # The client asks again when it can, and is told the same: no request here has its effect twice.
            self._cluster.faults.when_back(self._process.name, lambda: self._deliver(answer))
            return
        self._reply.set_result(answer)


class Wire:
    """The connection of one client: every call to the cluster goes through here."""

    def __init__(self, cluster: SimCluster, process: SimProcess) -> None:
        self.cluster = cluster
        self.process = process
        self._open: dict[asyncio.Future[tuple[bool, Any]], None] = {}

    async def call(
        self,
        name: str,
        effect: Callable[[], T],
        deadline_s: float,
        *,
        outlives: bool = False,
        transactional_id: str = "",
    ) -> T:
        """The effect's result, or what it refused.

        ``transactional_id``: whose transaction the coordinator aborts where that fault strikes.
        ``outlives``: once sent, the effect takes place although the caller has given up or been cancelled.

        Raises:
            Refused: the broker said no.
            NoAnswer: ``deadline_s`` has passed.
            GivenUp: ``close`` was called meanwhile.
        """
        result: T = await self._send(name, effect, deadline_s, outlives=outlives, transactional_id=transactional_id)
        return result

    async def wait(self, name: str, effect: Callable[[], Deferred[T]], deadline_s: float) -> T:
        """What the broker answers in its own time; raises as ``call``."""
        result: T = await self._send(name, effect, deadline_s)
        return result

    async def _send(
        self,
        name: str,
        effect: Callable[[], Any],
        deadline_s: float,
        *,
        outlives: bool = False,
        transactional_id: str = "",
    ) -> Any:
        process = self.process
        await process.ready()
        reply: asyncio.Future[tuple[bool, Any]] = asyncio.get_running_loop().create_future()
        delivery = _Delivery(self.cluster, process, name, effect, reply, transactional_id, outlives=outlives)
        self._open[reply] = None
        delivery.depart()
        try:
            async with asyncio.timeout(deadline_s):
                is_result, answer = await reply
        except TimeoutError:
            await process.ready()
            raise NoAnswer from None
        finally:
            self._open.pop(reply, None)
            delivery.is_abandoned = True  # not by cancelling the reply: this also runs when a dead task is collected
            if isinstance(delivery.waiting, Fetch):
                delivery.waiting.drop()
        await process.ready()
        if not is_result:
            raise answer
        return answer

    def close(self) -> None:
        """End every call under way with ``GivenUp``; what has been sent stays sent."""
        for reply in list(self._open):
            if not reply.done():
                reply.set_result((False, GivenUp()))


def reason(error: BaseException) -> str:
    """What went wrong, in the words of the real client's room; no payload."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, NoAnswer):
        return "no answer in time"
    if isinstance(error, GivenUp):
        return "closed meanwhile"
    return type(error).__name__


def rotated(items: Iterable[T], turn: int) -> list[T]:
    """The items, beginning with another one each turn, so that none is served last for ever."""
    listed = list(items)
    at = turn % len(listed) if listed else 0
    return listed[at:] + listed[:at]


EXPECTED: Final = (Refused, NoAnswer, GivenUp)
"""What a call may end with when the cluster, not we, is at fault."""
