"""The admin server on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from batchferry.domain.errors import GateRefused
from batchferry.server import AdminServer, runner


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


async def read_to_the_end(address: str, *pieces: bytes) -> bytes:
    """What the server says to these pieces until it closes the connection."""
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), 10)
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-long: ", b"x" * 1000),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x-one: 1\r\n" * 100),
        (b"GET /", b"x" * 1000),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x-trailer: 1\r\n" * 70),
    ],
    ids=["one header", "many headers", "address", "trailers"],
)
async def test_a_head_without_end_is_cut_off(begin: bytes, piece: bytes):
    """A client that never comes to its body is let go before it takes much memory."""
    taken: list[bytes] = []

    async def swallow(request: Request) -> Response:
        taken.append(await request.body())
        return PlainTextResponse("hello")

    server = AdminServer("127.0.0.1", 0, Starlette(routes=[Route("/", swallow, methods=["GET", "POST"])]))
    await server.start()
    try:
        assert b"hello" not in await read_to_the_end(server.address, begin, *[piece] * 200)
        assert taken == []
        async with httpx.AsyncClient() as client:  # a long body is none of this
            assert (await client.post(server.address, content=b"x" * 1_000_000)).text == "hello"
        assert [len(body) for body in taken] == [1_000_000]
    finally:
        await server.stop()


async def test_a_slow_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    """A connection on which no request comes to the end of its head is closed; one that waits for its answer is not."""
    monkeypatch.setattr(runner, "HEAD_LIMIT_S", 0.2)
    go_on = asyncio.Event()

    async def wait(_request: Request) -> Response:
        await go_on.wait()
        return PlainTextResponse("hello")

    server = AdminServer("127.0.0.1", 0, Starlette(routes=[Route("/", wait)]))
    await server.start()
    try:
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(client.get(server.address))
            assert await read_to_the_end(server.address, b"GET / HTTP/1.1\r\nhost") == b""
            assert await read_to_the_end(server.address, b"") == b""
            go_on.set()
            assert (await asking).text == "hello"
    finally:
        await server.stop()


@pytest.mark.parametrize("first", [b"GET /none HTTP/1.1\r\nhost: x\r\n", b"POST / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_body_without_end_is_not_waited_for(first: bytes, monkeypatch: pytest.MonkeyPatch):
    """Whoever goes on sending a body, before or after the answer, does not keep the connection by it."""
    monkeypatch.setattr(runner, "BODY_LIMIT_S", 0.3)

    async def swallow(request: Request) -> Response:
        with contextlib.suppress(ClientDisconnect):
            await request.body()
        return PlainTextResponse("hello")

    server = AdminServer("127.0.0.1", 0, Starlette(routes=[Route("/", swallow, methods=["POST"])]))
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(first + b"content-length: 1000000000\r\n\r\n")

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        try:
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1000):
                        pass
        finally:
            trickling.cancel()
            await asyncio.wait({trickling})
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        async with httpx.AsyncClient() as client:
            assert (await client.post(server.address, content=b"x" * 1_000_000)).text == "hello"
            assert (await client.post(server.address, content=b"y")).text == "hello"
    finally:
        await server.stop()
