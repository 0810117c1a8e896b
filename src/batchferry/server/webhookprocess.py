"""The webhook address in a process of its own, seen from the service: started, listened to, replaced when it dies.

Signatures and HTTP are worth some hundred microseconds a delivery. A flood of them in the service's event loop would
be taken from the landing of results; in a process of its own it takes another core, and the service sees some twenty
short messages a second however many deliveries come.

The service binds the address and keeps it: while no process is there, senders wait in the socket's queue or give up
and deliver again. A process that dies takes with it what it remembered of deliveries, so one may have its effect
twice, which is one poll too many. Everything else a delivery could do is found out by polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from subprocess import DEVNULL
from typing import Any

from batchferry.domain.errors import BatchferryError
from batchferry.ports import Clock, Telemetry
from batchferry.server.api import TelemetryReport
from batchferry.server.runner import address_of, listen
from batchferry.server.webhooks import PATH, PATHS, SINK_LIMIT_S, WebhookSink
from batchferry.server.webhooktally import ToldSink, WebhookTally
from batchferry.server.webhookwire import (
    BROKE,
    JUST_LOOKED_AT,
    NOT_NOW,
    NOTED,
    UNKNOWN,
    BadMessage,
    Bounds,
    HookPlan,
    Link,
    Plan,
    Rehearsal,
    Sheet,
)
from batchferry.telemetry import RecordingTelemetry, error_fields

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Between the end of a process and the next; each is twice the one before."""
STEADY_S = 60.0
"""A process that lived so long was well: the pause begins anew."""
ALARM_ENDS = 5
"""So many ends in a row are an alarm."""
BEAT_S = 10.0
MAX_SILENT_BEATS = 3
"""A process that says nothing for so many beats is ended: it hangs, or never came up."""
MAX_POKES = 16
"""Batches asked about at one time: some wait for Kafka."""
RENEW_S = 0.5
"""The sink's limit is set anew when so much of it may be gone."""
STOP_S = 3.0
"""For a process that is to end, or whose stream has ended, until it is killed."""

_CHILD = "batchferry.server.webhookchild"
_INHERITED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "SYSTEMROOT")
_INHERITED_BEGINNINGS = ("LC_", "PYTHON", "LD_", "COVERAGE_")
"""Of the service's environment. The rest holds its keys, and the process faces the network."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a process ended."""

    reason: str
    exit_code: int | None = None
    error: str | None = None
    where: str | None = None


class WebhookProcess:
    """Keeps a process at the webhook address. Started and stopped once.

    Args:
        plans: the webhooks by account.
        sink: who looks after batches; not asked about more than ``MAX_POKES`` at one time.
        host: where to listen,
        port: and at which port; 0 takes a free one.
        clock: the service's,
        rehearsal: and how the process can have the same, unless it is the wall clock.
        bounds: of the process.
    """

    def __init__(
        self,
        plans: Mapping[str, HookPlan],
        sink: WebhookSink,
        *,
        host: str,
        port: int,
        clock: Clock,
        telemetry: Telemetry,
        rehearsal: Rehearsal | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._plan = Plan(plans, bounds or Bounds(), rehearsal)
        self._sink = ToldSink(sink, telemetry)
        self._host = host
        self._port = port
        self._telemetry = telemetry
        self._tally = WebhookTally({name: plan.hook() for name, plan in plans.items()}, clock, telemetry)
        self._report = TelemetryReport(telemetry)
        self._listener: socket.socket | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._was_heard = False
        self._broke: tuple[str, str] | None = None
        self._asks: deque[tuple[int, str, str]] = deque()
        self._asking: set[asyncio.Task[None]] = set()
        self._answers: list[tuple[int, str]] = []
        self._ends = 0
        self.is_up = asyncio.Event()
        """Set while deliveries are answered."""

    @property
    def port(self) -> int:
        """The port in use; differs from the wanted one only if that was 0."""
        return self._port

    @property
    def address(self) -> str:
        """``http://host:port``."""
        return address_of(self._host, self._port)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def status(self) -> Mapping[str, object]:
        """For people: whether deliveries are answered now, where, and how often the process has died."""
        state = "stopped" if self._keeping is None else "up" if self.is_up.is_set() else "down"
        return {"state": state, "port": self._port, "pid": self.pid, "ends": self._ends}

    async def start(self) -> None:
        """Bind the address and begin to start the process; ``is_up`` says when it answers.

        Raises:
            GateRefused: the address cannot be had.
        """
        self._listener = listen(self._host, self._port, "webhook", "server.webhook_port")
        self._port = self._listener.getsockname()[1]
        self._telemetry.gauge("webhook_process_is_up", 0)
        self._keeping = asyncio.create_task(self._keep(), name="webhook-process")

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Let it finish what is being answered, within the time given; never raises, safe to call twice."""
        keeping = self._keeping
        if keeping is None:
            return
        self._is_stopping = True
        if self._link is not None:
            self._link.finish()
            await asyncio.wait({keeping}, timeout=timeout_s)
        self._kill()
        if not keeping.done():
            keeping.cancel()
            await asyncio.wait({keeping}, timeout=1.0)
        self._keeping = None
        if keeping.done() and not keeping.cancelled():
            keeping.exception()  # looked at, so that nobody is told of an exception never retrieved
        if self._listener is not None:
            self._listener.close()

    # ------------------------------------------------------------------------------------ its life

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s, in_a_row = FIRST_PAUSE_S, 0
        while True:
            started_s = loop.time()
            end = await self._live()
            if self._is_stopping:
                return
            if loop.time() - started_s >= STEADY_S:
                pause_s, in_a_row = FIRST_PAUSE_S, 0
            in_a_row += 1
            self._ends += 1
            self._telemetry.count("webhook_process_ends")
            self._telemetry.event(
                "webhook_process_ended",
                reason=end.reason,
                exit_code=end.exit_code,
                error=end.error,
                where=end.where,
                pause_s=pause_s,
            )
            if in_a_row % ALARM_ENDS == 0:
                self._telemetry.event("webhook_process_failing", ends=in_a_row)
                self._telemetry.count("alarms", what="webhook_process_failing")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _live(self) -> _End:
        """One process, from its start to its end."""
        assert self._listener is not None
        ours, theirs = socket.socketpair()
        self._was_heard, self._broke = True, None
        link: Link | None = None
        watching: set[asyncio.Task[Any]] = set()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    _CHILD,
                    str(theirs.fileno()),
                    str(self._listener.fileno()),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    env=_environment(),
                    pass_fds=(theirs.fileno(), self._listener.fileno()),
                    start_new_session=True,  # a terminal's Ctrl-C is for the service alone
                )
            self._process = process
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(lambda: Link(self._heard), sock=ours)
            self._link = link
            if self._is_stopping:
                link.finish()
            link.send({"plan": self._plan.plain()})
            exited = asyncio.create_task(process.wait(), name="webhook-process-exit")
            silent = asyncio.create_task(self._silence(link), name="webhook-process-beat")
            watching = {exited, silent}
            any_of: set[asyncio.Future[Any]] = {exited, silent, link.ended}
            await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            if link.ended.done() and link.ended.result() is not None:
                link.close()
            if not silent.done():  # its last words, and its end
                await asyncio.wait({exited}, timeout=STOP_S)
            if exited.done():
                await asyncio.wait({link.ended}, timeout=STOP_S)
            return self._end_of(link, process.returncode, is_silent=silent.done())
        except OSError as error:
            return _End("not_started", error=type(error).__name__)
        finally:
            self.is_up.clear()
            self._telemetry.gauge("webhook_process_is_up", 0)
            self._link = None
            if link is None:
                ours.close()
            else:
                link.close()
            self._kill()
            await _over(watching)
            self._asks.clear()
            self._answers.clear()
            await _over(self._asking)
            if self._process is not None:
                await self._process.wait()
            self._process = None

    def _end_of(self, link: Link, exit_code: int | None, *, is_silent: bool) -> _End:
        error = link.ended.result() if link.ended.done() else None
        if error is not None:  # what it said made no sense: a bug on either side
            told = error_fields(error)
            return _End("bad_message", exit_code, told["error"], told.get("where"))
        if is_silent:
            return _End("silent", exit_code)
        kind, where = self._broke or (None, None)
        return _End("ended", exit_code, kind, where)

    async def _silence(self, link: Link) -> None:
        """Return when nothing has been heard for too long."""
        silent_beats = 0
        while silent_beats < MAX_SILENT_BEATS:
            self._was_heard = False
            link.send({"ping": silent_beats})
            await asyncio.sleep(BEAT_S)
            silent_beats = 0 if self._was_heard else silent_beats + 1

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # ---------------------------------------------------------------------------------- what it says

    def _heard(self, message: dict[str, Any]) -> None:
        self._was_heard = True
        if "asks" in message:
            self._asked([(number, account, batch) for number, account, batch in message["asks"]])
        if "sheet" in message:
            self._note(Sheet.of_plain(message["sheet"]))
        if "is_up" in message:
            self.is_up.set()
            self._telemetry.gauge("webhook_process_is_up", 1)
            self._telemetry.event("webhooks_listening", host=self._host, port=self._port)
        if "broke" in message:
            kind, where = message["broke"]
            self._broke = (kind, where)

    def _note(self, sheet: Sheet) -> None:
        if not sheet.believed <= self._plan.hooks.keys() or not {route for route, _ in sheet.answers} <= set(PATHS):
            raise BadMessage("an account or a route that is not ours")
        self._tally.add(sheet)
        for (route, status), times in sheet.answers.items():
            self._report.answered(route, status, times)
        for route, kind, where in sheet.failures:
            self._telemetry.event("api_failed", route=route, error=kind, where=where)
        for name, level, text in sheet.library:
            logging.getLogger(name).log(level, text)

    def _asked(self, asks: list[tuple[int, str, str]]) -> None:
        if any(account not in self._plan.hooks for _, account, _ in asks):
            raise BadMessage("an account that is not ours")
        if len(self._asks) + len(asks) > self._plan.bounds.max_asks:
            raise BadMessage("more asks than agreed")
        self._asks.extend(asks)
        self._another()

    def _another(self) -> None:
        """One more to go through the asks, while there are any."""
        if self._asks and len(self._asking) < MAX_POKES and self._link is not None:
            task = asyncio.create_task(self._ask(self._link), name="webhook-poke")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, link: Link) -> None:
        self._another()  # it comes to its turn when this one has to wait; most asks need no waiting at all
        loop = asyncio.get_running_loop()
        while self._asks:
            # One limit for all asks that need no waiting: to set one costs more than to answer one of these.
            renew_s = loop.time() + RENEW_S
            number: int | None = None
            try:
                async with asyncio.timeout(SINK_LIMIT_S):
                    while self._asks and loop.time() < renew_s:
                        number, account, batch = self._asks.popleft()
                        self._answered(link, number, await self._answer(account, batch))
                        number = None
            except TimeoutError:
                if number is not None:
                    self._answered(link, number, NOT_NOW)

    def _answered(self, link: Link, number: int, answer: str) -> None:
        self._answers.append((number, answer))
        if len(self._answers) == 1:
            asyncio.get_running_loop().call_soon(self._say, link)

    async def _answer(self, account: str, batch: str) -> str:
        try:
            is_poked = await self._sink.poke(account, batch)
        except (BatchferryError, TimeoutError):
            return NOT_NOW
        except Exception as error:  # noqa: BLE001 - one delivery's bug stays with it
            self._report.failed(PATH, error)
            return BROKE
        if is_poked is None:
            return UNKNOWN
        return NOTED if is_poked else JUST_LOOKED_AT

    def _say(self, link: Link) -> None:
        if self._answers:
            link.send({"answers": self._answers})
            self._answers = []


async def try_webhook_process(plans: Mapping[str, HookPlan], clock: Clock, timeout_s: float = 20.0) -> str | None:
    """Start a process at a free port of this machine and stop it again; what went wrong, or None."""
    telemetry = RecordingTelemetry()
    process = WebhookProcess(plans, _Nobody(), host="127.0.0.1", port=0, clock=clock, telemetry=telemetry)
    try:
        await process.start()
        try:
            await asyncio.wait_for(process.is_up.wait(), timeout_s)
        finally:
            await process.stop()
    except BatchferryError as error:
        return str(error)
    except TimeoutError:
        ends = telemetry.named("webhook_process_ended")
        told = [
            str(value) for key, value in (ends[0] if ends else {}).items() if key != "pause_s" and value is not None
        ]
        return f"it did not answer within {timeout_s:g} s" + (f" ({', '.join(told)})" if told else "")
    return None


class _Nobody:
    async def poke(self, account: str, provider_batch_id: str) -> bool | None:  # noqa: ARG002
        return None


async def _over(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel them and wait for their ends."""
    ending = set(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


def _environment() -> dict[str, str]:
    """What the process may have of the service's environment: no key is in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_BEGINNINGS)
    }
