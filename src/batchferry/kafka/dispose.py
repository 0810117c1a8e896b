"""Ending aiokafka clients within a bound, whatever state the cluster is in.

``stop()`` of a producer waits for records that an absent broker will never acknowledge, and that of a consumer
for a group join in progress. Here each gets its time, and then its tasks are cancelled and its futures answered,
so that nothing hangs, nothing is left running and no warning is printed about it later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import ProducerClosed

log = logging.getLogger(__name__)

_NUDGES = 5
"""Cancelling a client task may only end the request it awaits; so it is repeated this often."""

_background: set[asyncio.Task[None]] = set()


def in_background(work: Coroutine[Any, Any, None], name: str) -> None:
    """Run bounded clean-up nobody waits for, holding on to the task until it is done."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _background.add(task)
    task.add_done_callback(_background.discard)


async def background_done(limit_s: float) -> None:
    """Wait until clean-up of this loop that runs in the background has ended, at most ``limit_s``."""
    loop = asyncio.get_running_loop()
    mine = {task for task in _background if task.get_loop() is loop}
    if mine:
        await asyncio.wait(mine, timeout=limit_s)


async def end_tasks(tasks: Iterable[asyncio.Future[Any] | None], limit_s: float) -> None:
    """Cancel these until they are done, at most about ``limit_s``, and take their exceptions."""
    left = {task for task in tasks if task is not None and not task.done()}
    for _ in range(_NUDGES):
        if not left:
            return
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=limit_s / _NUDGES)
        for task in done:
            if not task.cancelled():
                task.exception()


async def discard_producer(producer: AIOKafkaProducer, limit_s: float) -> None:
    """Give the producer up without waiting for what it has not sent; an open transaction is left to the broker."""
    producer._closed = True  # noqa: SLF001 (its own stop() would wait for the broker)
    accumulator, sender = producer._message_accumulator, producer._sender  # noqa: SLF001
    accumulator._closed = True  # noqa: SLF001
    pending = [*accumulator._pending_batches]  # noqa: SLF001
    pending += [batch for batches in accumulator._batches.values() for batch in batches]  # noqa: SLF001
    for batch in pending:
        batch.failure(ProducerClosed())
        for future in (batch.future, batch._drain_waiter):  # noqa: SLF001
            if future.done() and not future.cancelled():
                future.exception()  # taken, so that asyncio does not report it as forgotten
    await end_tasks([sender.sender_task], limit_s)
    waiter = getattr(producer._txn_manager, "_transaction_waiter", None)  # noqa: SLF001
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()
    await _close_client(producer.client, limit_s)


async def stop_producer(producer: AIOKafkaProducer, limit_s: float) -> None:
    """Stop an idle producer in order, or give it up when that takes longer than ``limit_s``. Never raises."""
    with contextlib.suppress(Exception):
        try:
            async with asyncio.timeout(limit_s):
                await producer.stop()
        except TimeoutError:
            await discard_producer(producer, limit_s)


async def stop_consumer(consumer: AIOKafkaConsumer, limit_s: float) -> None:
    """Leave the group if there is one and close; by force when that takes longer than ``limit_s``. Never raises."""
    # In a task of its own: with the brokers gone, the client lets a cancellation of its own escape, which must not
    # be taken for one of ours.
    stopping = asyncio.ensure_future(consumer.stop())
    try:
        await asyncio.wait({stopping}, timeout=limit_s)
    finally:
        if not stopping.done():
            stopping.cancel()
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return
    log.debug("consumer did not stop in order")
    await end_tasks([stopping], limit_s)
    await _force_consumer(consumer, limit_s)


async def _force_consumer(consumer: AIOKafkaConsumer, limit_s: float) -> None:
    consumer._closed = True  # noqa: SLF001 (its own stop() has just failed)
    coordinator, fetcher = consumer._coordinator, consumer._fetcher  # noqa: SLF001
    tasks: list[asyncio.Future[Any] | None] = [
        getattr(coordinator, name, None)
        for name in ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task")
    ]
    if fetcher is not None:
        tasks += [fetcher._fetch_task, *fetcher._pending_tasks]  # noqa: SLF001
    await end_tasks(tasks, limit_s)
    await _close_client(consumer._client, limit_s)  # noqa: SLF001


async def _close_client(client: Any, limit_s: float) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(limit_s):
            await client.close()
