"""Places of which only so many may be taken at one time, and that can say how many are."""

from __future__ import annotations

import asyncio
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
