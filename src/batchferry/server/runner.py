"""Runs the admin application on a socket, and leaves the process's signals alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from batchferry.domain.errors import GateRefused

_START_TIMEOUT_S = 10.0
_GRACE_S = 2
MAX_CONNECTIONS = 200
"""Probes, a scraper and a few people; what is above gets 503 at once."""


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


class AdminServer:
    """Serves one application on one address. Started and stopped once."""

    def __init__(self, host: str, port: int, app: ASGIApp) -> None:
        self._host = host
        self._wanted_port = port
        self._app = app
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._port = port

    @property
    def port(self) -> int:
        """The port in use; differs from the wanted one only if that was 0."""
        return self._port

    @property
    def address(self) -> str:
        """``http://host:port``."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    async def start(self) -> None:
        """Listen, and return when requests are answered.

        Raises:
            GateRefused: the address cannot be had.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._wanted_port), family=family, backlog=128)
        except OSError as error:
            wanted = f"{self._host}:{self._wanted_port}"
            remedy = "stop what uses it, or set server.host and server.port (0 takes a free port)"
            finding = f"admin address {wanted} cannot be had ({error.strerror or 'unknown host'}): {remedy}"
            raise GateRefused([finding]) from error
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]), name="admin-server")
        up = asyncio.create_task(self._server.is_up.wait(), name="admin-server-up")
        try:
            await asyncio.wait({self._task, up}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if not self._server.is_up.is_set():
            await self.stop(0)
            listener.close()
            raise GateRefused([f"admin address {self._host}:{self._port} did not come up; see the log before this"])

    def complaints(self) -> list[str]:
        """Why the address no longer answers although nobody stopped it; empty when all is well."""
        if self._task is None or not self._task.done():
            return []
        return ["the admin server's task has ended"]

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Finish what is being answered, within the time given; never raises, safe to call twice."""
        server, task, self._task = self._server, self._task, None
        if server is None or task is None:
            return
        server.should_exit = True
        _, unfinished = await asyncio.wait({task}, timeout=timeout_s)
        if unfinished:
            server.force_exit = True
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        for listening in getattr(server, "servers", ()):
            listening.close()
        if task.done() and not task.cancelled():
            task.exception()  # looked at, so that nobody is told of an exception never retrieved
