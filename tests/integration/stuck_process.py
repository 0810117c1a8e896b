"""A replica whose event loop blocks for ever as soon as it is told to stop."""

from __future__ import annotations

import time

from replica_process import serve

from batchferry.engine.supervisor import Supervisor


async def _block(_self: Supervisor) -> bool:
    time.sleep(3600)  # noqa: ASYNC251 (what blocks the loop is the point)
    return True


def serve_stuck(config: str, log: str) -> None:
    """What a replica's process runs, with a stop that never ends."""
    Supervisor.stop = _block  # type: ignore[method-assign]
    serve(config, log)
