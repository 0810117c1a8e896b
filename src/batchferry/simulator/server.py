"""A simulator that runs: inside a test's event loop, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchferry.domain.errors import ConfigError
from batchferry.simulator.admin import Admin
from batchferry.simulator.anthropic_surface import MessageSurface
from batchferry.simulator.anthropic_world import MessageWorld
from batchferry.simulator.app import TRANSPORT, Surface
from batchferry.simulator.azure import PREFIX as AZURE_PREFIX
from batchferry.simulator.azure import AzureSurface
from batchferry.simulator.bill import Bill
from batchferry.simulator.clock import VirtualClock
from batchferry.simulator.errors import envelope
from batchferry.simulator.faults import FaultPlan
from batchferry.simulator.gemini import GeminiSurface
from batchferry.simulator.mistral import PREFIX as MISTRAL_PREFIX
from batchferry.simulator.mistral import MistralSurface
from batchferry.simulator.settings import SimulatorSettings
from batchferry.simulator.state import State
from batchferry.simulator.webhooks import Delivery, WebhookSender
from batchferry.simulator.world import World

_MAX_IDLE_CHECK_S = 1.0
_BACKLOG = 2048
_LOOP_TURNS_TO_CLOSE = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Parts:
    """Everything a simulator is made of, put together and taken apart once."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        self._temporary = tempfile.TemporaryDirectory(prefix="batchferry-sim-") if settings.data_dir is None else None
        folder = Path(self._temporary.name) if self._temporary is not None else settings.data_dir
        assert folder is not None
        try:
            self.state = State(folder)
        except BaseException:
            if self._temporary is not None:
                self._temporary.cleanup()
            raise
        self.clock = settings.build_clock()
        self.faults = FaultPlan(settings.seed, self.clock.timestamp)
        for rule in (*settings.scenario.faults, *settings.faults):
            self.faults.put(rule)
        self.world = World(self.state, settings.scenario, self.clock, settings.seed, settings.patience_s)
        self.surface = Surface(settings, self.world, self.faults)
        self.gemini = GeminiSurface(settings, self.world, self.faults, self.surface.activity)
        self.azure = AzureSurface(settings, self.world, self.faults, self.surface.activity)
        self.mistral = MistralSurface(settings, self.world, self.faults, self.surface.activity)
        self.messages = MessageSurface(settings, MessageWorld(self.world), self.faults, self.surface.activity)
        hook = settings.scenario.webhooks
        self.webhooks = None if hook is None else WebhookSender(hook, self.world)

    def app(self) -> Starlette:
        """The ASGI application over these parts; its end takes them apart."""
        routes: list[Any] = [
            *self.surface.routes(),
            *self.mistral.routes(),
            *self.azure.routes(),
            *self.messages.routes(),
            *self.gemini.routes(),
        ]
        if self.settings.admin:
            routes += Admin(self.world, self.faults, self.surface.activity, self.webhooks).routes()

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> Any:
            del app
            if self.webhooks is not None:
                self.webhooks.start()
            try:
                yield
            finally:
                await self.close()

        async def not_served(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            message = f"Invalid URL ({request.method} {request.url.path})"
            code = "unknown_url" if error.status_code == 404 else None
            body = envelope(error.status_code, message, "invalid_request_error", code)
            own = {MISTRAL_PREFIX: self.mistral, AZURE_PREFIX: self.azure}
            surface: Surface = own.get(f"/{request.url.path.split('/')[1]}", self.surface)
            response = JSONResponse(surface.error_body(error.status_code, body["error"]), error.status_code)
            surface.stamp(response)
            return response

        async def broken(request: Request, error: Exception) -> Response:
            del request, error
            response = JSONResponse(envelope(500, "The server had an error while processing your request."), 500)
            self.surface.stamp(response)
            return response

        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers={HTTPException: not_served, Exception: broken}
        )

    async def close(self) -> None:
        """Let held calls go, wait for work on the files, close them."""
        if self.webhooks is not None:
            await self.webhooks.stop()
        await self.faults.release_all()
        self.world.let_go()
        await self.world.close()
        self.state.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def create_app(settings: SimulatorSettings) -> Starlette:
    """The simulator as an ASGI application. Faults that hang up need the simulator's own server.

    Raises:
        ConfigError: the data folder is in use or cannot be read.
    """
    return _Parts(settings).app()


class _Protocol(H11Protocol):
    """Leaves the connection's transport in every request's state, so that a fault can hang up."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}


class _Server(uvicorn.Server):
    """Says when it serves, and leaves signals alone when it is a guest in somebody's event loop."""

    def __init__(self, config: uvicorn.Config, *, owns_signals: bool) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()
        self._leaving = asyncio.Event()
        self._owns_signals = owns_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """See uvicorn."""
        if not self._owns_signals:
            yield
            return
        # Unlike uvicorn's own, these do not raise the signal again: a simulator told to stop has ended well.
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        """End the server; it finishes the calls under way."""
        self.should_exit = True
        self._leaving.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        super().handle_exit(sig, frame)
        self._leaving.set()

    async def main_loop(self) -> None:
        """See uvicorn; without its ticking, which serves features that are not used here."""
        await self._leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; at once when no call is under way, since tests start and end many simulators."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(_LOOP_TURNS_TO_CLOSE):
            await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets=sockets)
            return
        for listener in sockets or []:
            listener.close()
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets=sockets)
        self.serving.set()


def _listen(settings: SimulatorSettings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError([f"simulator host {settings.host!r} is not an address of this machine"]) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(
            [f"simulator cannot listen on {where} ({error.strerror}): free it or take another"]
        ) from error
    listener.setblocking(False)
    return listener


class Simulator:
    """A simulator inside the running event loop; use it as an async context manager.

    ``faults``, ``bill`` and ``clock`` are the objects themselves. The bill is as new as the last request or the
    last ``settle``.

    Raises (on entry):
        ConfigError: the data folder or the port cannot be had.
    """

    def __init__(self, settings: SimulatorSettings | None = None) -> None:
        self.settings = settings or SimulatorSettings()
        self._parts: _Parts | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def origin_url(self) -> str:
        """Where the server listens, without a path."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{self._port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"{self.origin_url}/v1"

    @property
    def mistral_url(self) -> str:
        """Mistral's API, version included; its official client takes this without the version."""
        return f"{self.origin_url}{MISTRAL_PREFIX}/v1"

    @property
    def azure_url(self) -> str:
        """Azure's current API, version included; without the version it is the dated one, with ``api-version``."""
        return f"{self.origin_url}{AZURE_PREFIX}/v1"

    @property
    def faults(self) -> FaultPlan:
        """The faults in force."""
        return self._running().faults

    @property
    def bill(self) -> Bill:
        """Which rows were run."""
        return self._running().state.bill

    @property
    def clock(self) -> VirtualClock:
        """Virtual time."""
        return self._running().clock

    @property
    def world(self) -> World:
        """Files and batches, past the HTTP surface."""
        return self._running().world

    @property
    def deliveries(self) -> list[Delivery]:
        """Webhooks sent so far, one entry a try, oldest first (the newest ``MAX_TOLD`` of them)."""
        sender = self._running().webhooks
        return [] if sender is None else list(sender.told)

    async def settle(self) -> None:
        """Make happen what must have happened by now on the virtual clock."""
        await self._running().world.settle()

    def _running(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("the simulator does not run: enter it with 'async with'")
        return self._parts

    async def start(self, *, owns_signals: bool = False) -> None:
        """Listen and serve; returns when calls are answered."""
        listener = _listen(self.settings)
        try:
            parts = _Parts(self.settings)
        except BaseException:
            listener.close()
            raise
        self._port = listener.getsockname()[1]
        self._parts = parts
        config = uvicorn.Config(
            parts.app(),
            http=_Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,  # the date is virtual and written by the application
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config, owns_signals=owns_signals)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="simulator-server")
        ready = asyncio.create_task(self._server.serving.wait())
        await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self._task
            raise RuntimeError("the simulator's server ended before it served")

    async def wait_closed(self) -> None:
        """Wait until the server ends: by a signal, by ``stop``, or by idleness (see ``idle_exit_s``)."""
        server, task, idle_exit_s = self._server, self._task, self.settings.idle_exit_s
        if server is None or task is None:
            return
        if idle_exit_s is not None:
            activity = self._running().surface.activity
            while not task.done():
                await asyncio.wait({task}, timeout=min(idle_exit_s / 4, _MAX_IDLE_CHECK_S))
                if activity.idle_s() >= idle_exit_s:
                    server.leave()
        await task

    async def stop(self) -> None:
        """End the server; safe to call twice."""
        if self._server is None or self._task is None:
            return
        if self._parts is not None:
            await self._parts.faults.release_all()
            self._parts.world.let_go()
        self._server.leave()
        await self._task
        self._server = self._task = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


async def serve(settings: SimulatorSettings, on_ready: Callable[[str], None] | None = None) -> None:
    """Run a simulator until a signal or idleness ends it.

    ``on_ready`` is called with the base URL when calls are answered.

    Raises:
        ConfigError: the data folder or the port cannot be had.
    """
    simulator = Simulator(settings)
    await simulator.start(owns_signals=True)
    if on_ready is not None:
        on_ready(simulator.base_url)
    await simulator.wait_closed()


def run_forever(settings: SimulatorSettings, on_ready: Callable[[str], None] | None = None) -> None:
    """``serve`` in an event loop of its own; returns after SIGINT, SIGTERM or idleness."""
    asyncio.run(serve(settings, on_ready))
