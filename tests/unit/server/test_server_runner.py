"""The admin server on a real socket."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from batchferry.domain.errors import GateRefused
from batchferry.server import AdminServer


async def hello(_request: Request) -> Response:
    """Answer at once."""
    return PlainTextResponse("hello")


async def test_it_answers_and_stops_and_leaves_signals_alone():
    """Start returns when requests are answered; stop frees the port; SIGTERM keeps its handler throughout."""
    before = signal.getsignal(signal.SIGTERM)
    server = AdminServer("127.0.0.1", 0, Starlette(routes=[Route("/", hello)]))
    await server.start()
    try:
        assert server.port != 0
        assert signal.getsignal(signal.SIGTERM) is before
        async with httpx.AsyncClient() as client:
            assert (await client.get(server.address)).text == "hello"
        assert server.complaints() == []
    finally:
        await server.stop()
        await server.stop()
    again = AdminServer("127.0.0.1", server.port, Starlette())
    await again.start()
    await again.stop()


async def test_a_taken_port_is_refused_with_the_remedy():
    """Two services on one port: the second says what to set."""
    first = AdminServer("127.0.0.1", 0, Starlette())
    await first.start()
    try:
        with pytest.raises(GateRefused, match=r"server\.port"):
            await AdminServer("127.0.0.1", first.port, Starlette()).start()
    finally:
        await first.stop()


async def test_a_hanging_answer_does_not_hold_up_the_stop():
    """Stop is bounded although a page never ends."""
    entered = asyncio.Event()

    async def hang(_request: Request) -> Response:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = AdminServer("127.0.0.1", 0, Starlette(routes=[Route("/", hang)]))
    await server.start()
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.get(server.address))
        await entered.wait()
        await asyncio.wait_for(server.stop(0.2), 5)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
