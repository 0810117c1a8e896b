"""The webhook process: ``python -m batchferry.server.webhookchild <fd of the socket pair> <fd of the listener>``.

It is started by ``webhookprocess`` only. It is told its secrets over the socket pair, and keeps none of the service's
other ones; it opens no file and calls nobody. It ends when the service says so or is gone: both end the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from importlib import import_module
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from batchferry.clock import ScaledClock, SystemClock
from batchferry.domain.errors import BatchferryError
from batchferry.ports import Clock
from batchferry.server.answers import failure, guarded_route, http_exception
from batchferry.server.runner import HttpServer
from batchferry.server.webhooks import PATHS, Deliveries, Gate, Receiver
from batchferry.server.webhookwire import (
    BROKE,
    JUST_LOOKED_AT,
    NOT_NOW,
    NOTED,
    UNKNOWN,
    BadMessage,
    Bounds,
    Link,
    Plan,
    Sheet,
    place_of,
)

MAX_CONNECTIONS = 1000
"""Senders keep connections open; what is above gets 503 at once."""
STOP_S = 2.0
"""For what is being answered when the end comes."""
_FIXED_TEXTS = frozenset({"uvicorn", "asyncio"})
"""Libraries whose messages quote nothing in their first line before the places are filled in."""


class CannotAsk(BatchferryError):
    """The service does not take further asks now."""


class Voice:
    """Speaks to the service, and keeps quiet for a while after each word."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self.link: Link | None = None
        self.sheet = Sheet()
        self._asks: list[tuple[int, str, str]] = []
        self._answers: dict[tuple[str, str], tuple[int, asyncio.Future[str]]] = {}
        self._by_number: dict[int, tuple[str, str]] = {}
        self._last_number = 0
        self._spoke_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = float("inf")
        self._is_over = False

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        """See ``WebhookSink``.

        Who asks about a batch that is being asked about waits with the others: the first delivery has the effect.

        Raises:
            CannotAsk: too much is being asked already, or the service cannot know now.
            HTTPException: the service met a bug.
        """
        pair = (account, provider_batch_id)
        is_first = pair not in self._answers
        if is_first:
            if self._is_over or len(self._answers) >= self._bounds.max_asks:
                raise CannotAsk("too many batches are being asked about")
            self._last_number += 1
            self._answers[pair] = (self._last_number, self._loop.create_future())
            self._by_number[self._last_number] = pair
            self._asks.append((self._last_number, *pair))
            self._speak_by(self._spoke_at + self._bounds.ask_pause_s)
        # Whoever gives up waiting leaves the ask where it is: it is still on its way, and counts.
        answer = await asyncio.shield(self._answers[pair][1])
        if answer == NOT_NOW:
            raise CannotAsk("the service cannot know now")
        if answer == BROKE:
            raise failure()
        return None if answer == UNKNOWN else is_first and answer == NOTED

    def answered(self, answers: list[list[Any]]) -> None:
        """The service's answers, by the numbers of the asks."""
        for number, answer in answers:
            if answer not in {NOTED, JUST_LOOKED_AT, UNKNOWN, NOT_NOW, BROKE}:
                raise BadMessage("no such answer")
            self._settle(number, answer)

    def noted(self) -> None:
        """Something is on the sheet."""
        self._speak_by(self._spoke_at + self._bounds.sheet_pause_s)

    def end(self) -> None:
        """The service is gone, or wants to end: nobody will answer any more."""
        self._is_over = True
        for number in list(self._by_number):
            self._settle(number, NOT_NOW)

    def speak(self) -> None:
        """Say now what there is to say."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_at = None, float("inf")
        if self.link is None or not (self._asks or self.sheet):
            return
        if self.link.is_held_up:  # the service is busy: what gathers meanwhile is bounded
            self._speak_by(self._loop.time() + self._bounds.sheet_pause_s)
            return
        message: dict[str, Any] = {"asks": self._asks} if self._asks else {}
        if self.sheet:
            message["sheet"] = self.sheet.plain()
        self.link.send(message)
        self._spoke_at = self._loop.time()
        self._asks = []
        self.sheet.clear()

    def _speak_by(self, at_s: float) -> None:
        if at_s >= self._due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = at_s
        # In the next turn of the loop at the earliest, so that what comes in one turn goes in one message.
        self._timer = self._loop.call_at(max(at_s, self._loop.time()), self.speak)

    def _settle(self, number: int, answer: str) -> None:
        pair = self._by_number.pop(number)
        _, waiting = self._answers.pop(pair)
        if not waiting.done():
            waiting.set_result(answer)


class _Noting(logging.Handler):
    """Puts what libraries warn of on the sheet, without anything that may quote a delivery."""

    def __init__(self, voice: Voice) -> None:
        super().__init__(logging.WARNING)
        self._voice = voice

    def emit(self, record: logging.LogRecord) -> None:
        is_fixed = record.name.partition(".")[0] in _FIXED_TEXTS and isinstance(record.msg, str)
        text = record.msg.partition("\n")[0] if is_fixed else ""
        self._voice.sheet.told(record.name, record.levelno, text)
        self._voice.noted()


class _Reporting:
    """Tally and report of the receiver: onto the sheet, and the sheet on its way."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self.taken = voice.sheet.taken
        self.refused = voice.sheet.refused
        self.failed = voice.sheet.failed

    def answered(self, route: str, status_code: int) -> None:
        """The last word on every request."""
        self._voice.sheet.answered(route, status_code)
        self._voice.noted()


def application(plan: Plan, voice: Voice) -> Starlette:
    """The webhook address."""
    rehearsal, bounds = plan.rehearsal, plan.bounds
    clock: Clock = SystemClock()
    if rehearsal is not None:
        clock = ScaledClock(rehearsal.speed, rehearsal.origin, rehearsal.started)
    reporting = _Reporting(voice)
    receiver = Receiver(
        {name: hook.hook() for name, hook in plan.hooks.items()},
        voice,
        reporting,
        clock,
        Deliveries(bounds.max_remembered_ids),
        Gate(bounds.max_concurrent, bounds.max_per_s),
    )
    return Starlette(
        routes=[guarded_route(path, receiver.receive, "POST", reporting) for path in PATHS],
        exception_handlers={HTTPException: http_exception},
    )


async def _serve(pair: socket.socket, listener: socket.socket) -> None:
    told: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
    voice: Voice | None = None

    def heard(message: dict[str, Any]) -> None:
        if "plan" in message:
            told.set_result(Plan.of_plain(message["plan"]))
        if "answers" in message and voice is not None:
            voice.answered(message["answers"])
        if "ping" in message:
            link.send({"pong": message["ping"]})

    link = Link(heard)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=pair)
    try:
        first: set[asyncio.Future[Any]] = {told, link.ended}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if link.ended.done():
            _raise_what_ended(link)
            return
        plan = told.result()
        voice = Voice(plan.bounds)
        voice.link = link
        logging.getLogger().addHandler(_Noting(voice))
        server = HttpServer(application(plan, voice), listener, MAX_CONNECTIONS)
        await server.start()
        link.send({"is_up": True})
        try:
            last: set[asyncio.Future[Any]] = {link.ended, server.over}
            await asyncio.wait(last, return_when=asyncio.FIRST_COMPLETED)
        finally:
            voice.end()
            await server.stop(STOP_S)
            voice.speak()
        _raise_what_ended(link)
    except Exception as error:
        link.send({"broke": [type(error).__name__, place_of(error)]})
        raise
    finally:
        link.close()
        await asyncio.sleep(0)  # the transport closes in the loop's next turn


def _raise_what_ended(link: Link) -> None:
    if link.ended.done() and (error := link.ended.result()) is not None:
        raise error


def main() -> int:
    """Serve until the service ends the stream; 1 after a bug."""
    # A terminal's Ctrl-C and a container's SIGTERM are for the service, which stops this process in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pair, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    loop_factory: Any = None
    with contextlib.suppress(ImportError):  # not on every platform
        loop_factory = import_module("uvloop").new_event_loop
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(pair, listener))
    except Exception as error:  # noqa: BLE001 - no traceback: it might quote what was sent
        sys.stderr.write(f"webhook process: {type(error).__name__} at {place_of(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
