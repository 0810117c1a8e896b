"""Runs an application on a socket, bounded against slow and endless clients, and leaves the process's signals alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from batchferry.domain.errors import GateRefused

_START_TIMEOUT_S = 10.0
_GRACE_S = 2
MAX_CONNECTIONS = 200
"""Probes, a scraper and a few people; what is above gets 503 at once."""
MAX_HEAD_BYTES = 64 * 1024
"""Of one request: all that is not its body. The parser itself knows no bound."""
HEAD_LIMIT_S = 20.0
"""A client that sends the head of its request more slowly is let go,"""
BODY_LIMIT_S = 20.0
"""and one that sends the rest more slowly, even when it has its answer: the connection would be held for ever."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's quick HTTP/1.1, for whoever connects: heads end, in bytes and in seconds, and bodies in seconds."""

    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        self._await(HEAD_LIMIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._await(HEAD_LIMIT_S)

    def on_headers_complete(self) -> None:
        self._await(BODY_LIMIT_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = max(0, self._head_bytes - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._has_come()
        super().on_message_complete()

    def _await(self, limit_s: float) -> None:
        """The next part of a request must be there within so long."""
        self._has_come()
        self._timer = self.loop.call_later(limit_s, self.transport.close)

    def _has_come(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the application decides when to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


def listen(host: str, port: int, what: str, setting: str) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        GateRefused: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        remedy = f"stop what uses it, or set server.host and {setting} (0 takes a free port)"
        finding = f"{what} address {host}:{port} cannot be had ({error.strerror or 'unknown host'}): {remedy}"
        raise GateRefused([finding]) from error


def address_of(host: str, port: int) -> str:
    """``http://host:port``."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves one application on one socket, which it closes. Started and stopped once."""

    def __init__(self, app: ASGIApp, listener: socket.socket, max_connections: int) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._server.server_state.connections)

    @property
    def over(self) -> asyncio.Task[None]:
        """Done when it serves no more; there from ``start`` to ``stop``."""
        assert self._task is not None
        return self._task

    def complaints(self) -> list[str]:
        """Why the address no longer answers although nobody stopped it; empty when all is well."""
        if self._task is None or not self._task.done():
            return []
        return ["the server's task has ended"]

    async def start(self) -> bool:
        """Return when requests are answered, or false when they will not be."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http-server")
        up = asyncio.create_task(self._server.is_up.wait(), name="http-server-up")
        waited: set[asyncio.Task[Any]] = {self._task, up}
        try:
            await asyncio.wait(waited, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        return self._server.is_up.is_set()

    async def stop(self, timeout_s: float) -> None:
        """Finish what is being answered, within the time given; never raises, safe to call twice."""
        server, task, self._task = self._server, self._task, None
        if task is None:
            return
        server.should_exit = True
        _, unfinished = await asyncio.wait({task}, timeout=timeout_s)
        if unfinished:
            server.force_exit = True
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        for listening in getattr(server, "servers", ()):
            listening.close()
        self._listener.close()
        if task.done() and not task.cancelled():
            task.exception()  # looked at, so that nobody is told of an exception never retrieved


class AdminServer:
    """Serves the admin application on one address. Started and stopped once."""

    def __init__(self, host: str, port: int, app: ASGIApp) -> None:
        self._host = host
        self._port = port
        self._app = app
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port in use; differs from the wanted one only if that was 0."""
        return self._port

    @property
    def address(self) -> str:
        """``http://host:port``."""
        return address_of(self._host, self._port)

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return 0 if self._server is None else self._server.connections

    async def start(self) -> None:
        """Listen, and return when requests are answered.

        Raises:
            GateRefused: the address cannot be had.
        """
        listener = listen(self._host, self._port, "admin", "server.port")
        self._port = listener.getsockname()[1]
        self._server = HttpServer(self._app, listener, MAX_CONNECTIONS)
        if not await self._server.start():
            await self.stop(0)
            raise GateRefused([f"admin address {self._host}:{self._port} did not come up; see the log before this"])

    def complaints(self) -> list[str]:
        """Why the address no longer answers although nobody stopped it; empty when all is well."""
        return [] if self._server is None else self._server.complaints()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Finish what is being answered, within the time given; never raises, safe to call twice."""
        if self._server is not None:
            await self._server.stop(timeout_s)
