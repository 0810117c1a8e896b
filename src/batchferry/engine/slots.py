"""Places of which only so many may be taken at one time, and that can say how many are."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncGenerator
from itertools import count
from typing import Literal


class Slots(asyncio.Semaphore):
    """A semaphore that counts what it has given out. First come, first served."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit
        self.taken = 0

    async def acquire(self) -> Literal[True]:
        """Wait for a place and take it."""
        await super().acquire()
        self.taken += 1
        return True

    def release(self) -> None:
        """Give a place back."""
        self.taken -= 1
        super().release()


class OrderedSlots:
    """Places that go to whoever waits with the smallest ``order``; of equals, to the first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()

    @contextlib.asynccontextmanager
    async def place(self, order: float) -> AsyncGenerator[None, None]:
        """Wait for a place, and have it for the time of the block."""
        if self.taken < self.limit:
            self.taken += 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (order, next(self._number), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()  # it was given to us in the same moment
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1
