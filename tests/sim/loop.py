"""An event loop whose time stands still until nothing is left to do, and processes that can be stopped in it.

A *process* is whatever runs in a context in which ``RUNNING`` is set: its tasks, their callbacks and timers. A paused
process runs nothing until it is resumed, and then everything that has come due meanwhile: what SIGSTOP and SIGCONT
do. A killed one runs nothing any more, not even its ``finally`` blocks: what SIGKILL does.

Work that the service gives to threads is done on the spot, so that a seed is a life.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_STEPS_AT_ONE_INSTANT = 200_000
"""So many steps without a moment passing are a busy loop."""


class Stuck(Exception):
    """Nothing will ever happen again, or time does not go on."""


class Stoppable:
    """What the loop must know of a process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False
        self.parked: deque[Any] = deque()
        self.graveyard: list[Any] = []
        """What a dead process would have run: kept, so that nothing of it is collected, and thereby run, meanwhile."""

    def __repr__(self) -> str:
        return self.name


RUNNING: ContextVar[Stoppable | None] = ContextVar("RUNNING", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs until nothing is ready, then goes to the instant of the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._steps = 0
        self._ready: deque[Any]
        self._scheduled: list[Any]
        self.steps = 0
        """Callbacks that were run, in all."""

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Do it now."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except StopIteration as stop:  # a future cannot carry it
            future.set_exception(RuntimeError(repr(stop)))
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever awaits)
            future.set_exception(error)
        return future

    def resume(self, process: Stoppable) -> None:
        """Let a paused process run what came due meanwhile."""
        process.is_paused = False
        self._ready.extend(process.parked)
        process.parked.clear()

    # ------------------------------------------------------------------ what a loop without sockets needs not

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        if self._timer_cancelled_count > 1000 and self._timer_cancelled_count * 2 > len(scheduled):
            kept = []
            for timer in scheduled:
                if timer._cancelled:
                    timer._scheduled = False
                else:
                    kept.append(timer)
            heapq.heapify(kept)
            self._scheduled = scheduled = kept
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Stuck("no timer is set and nothing is ready: everybody waits for somebody else")
            if scheduled[0]._when > self._now_s:
                self._now_s = scheduled[0]._when
                self._steps = 0
        while scheduled and scheduled[0]._when <= self._now_s:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            if not timer._cancelled:
                ready.append(timer)
        self._steps += len(ready)
        self.steps += len(ready)
        if self._steps > MAX_STEPS_AT_ONE_INSTANT:
            raise Stuck(f"{self._steps} steps at {self._now_s:.3f} s: somebody is busy without an end")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(RUNNING)
            if process is None:
                handle._run()
            elif process.is_dead:
                process.graveyard.append(handle)
            elif process.is_paused:
                process.parked.append(handle)
            else:
                handle._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the running loop of the thread for a moment, to build what asks for one."""
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(None)


def run(main: Callable[[], Any]) -> Any:
    """Run an async function to its end in virtual time. What it leaves behind is left alone, not cancelled."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _loop, _context: None)  # tasks of killed processes are never awaited
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main())
    finally:
        asyncio.set_event_loop(None)
        loop._ready.clear()
        loop._scheduled.clear()
        loop.close()
