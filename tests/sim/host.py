"""One replica of the service as a process of the simulated world: it starts, is killed, paused, stopped."""

from __future__ import annotations

import asyncio
import contextvars
import random
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from batchferry.app import AnthropicProvider, GeminiProvider, MistralProvider, OpenAIProvider, Service
from batchferry.config import Settings
from batchferry.domain.errors import BatchferryError, GateRefused
from batchferry.simulator.kafka import SimKafka, SimProcess
from batchferry.telemetry import RecordingTelemetry
from sim.loop import RUNNING, Stoppable, VirtualLoop

if TYPE_CHECKING:
    from sim.life import World

ORIGIN = datetime(2026, 3, 2, 6, 0, tzinfo=UTC)
BUGS = frozenset({"task_failed", "effect_failed", "batch_quarantined", "telemetry_misused"})
RESTART_S = 2.0
"""Real seconds until a replica that ended by itself is started again, as a cluster would."""


class Killed(BaseException):
    """Ends the step of the event loop in which a process dies."""


class BusinessClock:
    """The service's and the provider's time: so many times as fast as the loop's."""

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def now(self) -> datetime:
        return ORIGIN + timedelta(seconds=asyncio.get_running_loop().time() * self.speed)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() * self.speed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self.speed)


class Ears(RecordingTelemetry):
    """Keeps counters and what speaks of bugs; the other events only pass by."""

    def __init__(self, heard: Callable[[str, Mapping[str, object]], None]) -> None:
        super().__init__()
        self._heard = heard

    def event(self, name: str, **fields: object) -> None:
        super().event(name, **fields)
        self.events.clear()
        self._heard(name, fields)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges[name, tuple(sorted(labels.items()))] = value
        if name == "bound_used":
            limit = self.gauges.get(("bound_limit", tuple(sorted(labels.items()))))
            # A takeover brings the batches that are there already; only admission waits for room.
            if limit is not None and value > limit and labels["bound"] != "batches_in_flight":
                self._heard("bound_broken", {**labels, "used": value, "limit": limit})

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def batch_span(self, name: str, attributes: Mapping[str, object], parents: Any = ()) -> None: ...


class WireProcess(SimProcess):
    """The process as the cluster's clients see it: a pause takes hold before each request."""

    async def ready(self) -> None:
        await asyncio.sleep(0)
        await super().ready()


class Host(Stoppable):
    """One replica: a chain of processes, each with an empty folder."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self.world = world
        self.kafka = WireProcess(name)
        self.clock = world.clock
        self.service: Service | None = None
        self.told: Counter[str] = Counter()
        self.is_stopping = False
        self.has_ended = False
        self.undisturbed_since_s = 0.0
        """Nothing has kept this process from the broker since."""
        self._context = contextvars.copy_context()
        self._context.run(RUNNING.set, self)
        self._main: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to run."""
        self.world.note(f"{self.name} starts")
        self._main = self._loop.create_task(self._run(), context=self._context)

    @property
    def _loop(self) -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop

    async def _run(self) -> None:
        try:
            await self._live()
        except Exception:  # a fault of ours or the simulation's: nobody else looks at this task
            self.world.fail(f"{self.name} ended: {traceback.format_exc()}")
            raise

    async def _live(self) -> None:
        service = self.service = Service(self.world.settings(self.name), Ears(self._heard))
        self.world.incarnations[service.incarnation] = self
        self._starting = asyncio.ensure_future(service.start())
        try:
            await self._starting
            if not self.is_stopping:
                await service.wait()
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            return
        except BatchferryError as error:
            self.world.note(f"{self.name} ends: {type(error).__name__}")
            if isinstance(error, GateRefused):
                self.world.fail(f"{self.name} refused to start: {error.findings}")
        if self.is_stopping:
            return
        self.is_stopping = True
        await service.stop()
        self.has_ended = True
        self.world.replace(self, RESTART_S)

    def _heard(self, name: str, fields: Mapping[str, object]) -> None:
        self.told[name] += 1
        self.world.heard(self, name, fields)

    def kill(self) -> None:
        """SIGKILL. What it has sent may still arrive."""
        if self.is_dead or self.has_ended:
            return
        self.world.note(f"{self.name} killed")
        self.is_dead = True
        self.kafka.alive = False
        self.graveyard.extend(asyncio.all_tasks(self._loop))
        self.graveyard.extend(self.parked)

    def pause(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        if self.is_dead or self.is_paused or self.has_ended:
            return
        self.world.note(f"{self.name} paused for {for_s:.1f} s")
        self.is_paused = True
        self.world.later(for_s, self._wake)

    def _wake(self) -> None:
        if not self.is_dead and self.is_paused:
            self.world.note(f"{self.name} wakes")
            self.undisturbed_since_s = self._loop.time()
            self._loop.resume(self)

    def wake(self) -> None:
        """SIGCONT now."""
        self._wake()

    def stop(self) -> None:
        """SIGTERM."""
        if self.is_dead or self.is_stopping or self.has_ended:
            return
        self.is_stopping = True
        self.world.note(f"{self.name} told to stop")

        async def stop() -> None:
            if self._starting is not None and not self._starting.done():
                self._starting.cancel()
                await asyncio.wait({self._starting})
            if self.service is not None:
                await self.service.stop()
            self.has_ended = True
            self.world.note(f"{self.name} has stopped")
            self.world.replace(self, RESTART_S)

        self._loop.create_task(stop(), context=self._context)


def here() -> Host:
    """The replica in whose process this runs."""
    host = RUNNING.get()
    assert isinstance(host, Host)
    return host


def parts(provider_rng: random.Random) -> dict[str, Any]:
    """What ``batchferry.app`` is to build instead of the real parts."""

    def build_clock(_settings: Settings) -> BusinessClock:
        return here().clock

    def build_kafka(_settings: Settings) -> SimKafka:
        host = here()
        return host.world.kafka(host.kafka)

    def adapter(make: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """The real adapter, over the wire of our own and with a jitter that follows the seed."""

        def made(account: Any, clock: Any) -> Any:
            return make(account, clock, here().world.provider.transport(), random.Random(provider_rng.random()))

        return made

    return {
        "build_clock": build_clock,
        "build_kafka": build_kafka,
        "OpenAIProvider": adapter(OpenAIProvider),
        "AnthropicProvider": adapter(AnthropicProvider),
        "MistralProvider": adapter(MistralProvider),
        "GeminiProvider": adapter(GeminiProvider),
    }
