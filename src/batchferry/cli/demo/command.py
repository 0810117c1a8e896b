"""``batchferry demo``: the story, from an empty folder to checked books."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from batchferry import __version__
from batchferry.cli.console import complain, out, print_json
from batchferry.cli.demo import books as accounts
from batchferry.cli.demo import live, questions, report, stage
from batchferry.cli.demo.ports import OPENAI, PORTS, port_of
from batchferry.cli.errors import TopicMissing
from batchferry.cli.exits import Exit
from batchferry.domain.errors import KafkaUnavailable

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import Clock, KafkaPort

LIMIT_S = 240.0
"""Real seconds after which a demo that is not done has failed."""
PRODUCE_CHUNK = 130
PRODUCE_PAUSE_S = 0.05
"""Between two chunks, so that the records come in over more than an hour of demo time."""
LOOK_S = 0.25


def demo(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Everything of the demo: settings, logs, broker, provider.")
    ] = Path(".demo"),
    provider: Annotated[
        str, typer.Option(metavar="NAME", help=f"Whose API is played: {', '.join(PORTS)}.")
    ] = OPENAI.profile,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a demo that was killed, and check its books.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Wait for another process to finish the work, and check the books.")
    ] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="Give up after so many seconds.")] = LIMIT_S,
    keep: Annotated[bool, typer.Option("--keep", help="Leave broker and provider running at the end.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Only end broker and provider of a demo.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Send 2,000 real questions through broker, service and a simulated provider; check that nothing was lost.

    One second is an hour. Needs no Java, no Docker and no key; KAFKA_BOOTSTRAP_SERVERS names a cluster to use
    instead of the embedded broker. Killed at any moment, it is finished by 'demo --resume', or by 'run' with the
    demo's settings.
    """
    if resume + verify + stop > 1:
        raise typer.BadParameter("give one of --resume, --verify and --stop")
    began = time.monotonic()
    if resume or verify or stop:
        scene = stage.find(folder)
    else:
        scene = stage.set_up(folder, os.environ.get("KAFKA_BOOTSTRAP_SERVERS") or None, provider)
    if stop:
        scene.end()
        return
    from batchferry.config import load_settings  # noqa: PLC0415 - see options.load

    # The file alone counts: what the environment says of other clusters and accounts must not leak in.
    settings = load_settings(scene.settings_path, {}, dotenv_path=None)
    if not as_json:
        _say_hello(scene, settings, resume=resume, verify=verify)
    try:
        read = asyncio.run(_play(scene, settings, produce=not (resume or verify), serve=not verify, limit_s=limit_s))
    except TimeoutError:
        complain(
            f"not finished within {limit_s:.0f} s; broker and provider go on for {stage.IDLE_EXIT_S / 60:.0f} minutes",
            f"the service's log: {scene.log_path}",
            f"go on:    batchferry demo --resume --folder {scene.folder}",
        )
        raise typer.Exit(Exit.FAILED) from None
    took_s = time.monotonic() - began
    if as_json:
        print_json(report.as_json(read, settings, round(took_s, 1)))
    else:
        report.show(read, settings, took_s)
    holds = all(check.holds for check in read.checks())
    if verify:
        complain("broker and provider go on for the process that did the work; to end them: batchferry demo --stop")
    elif not keep:
        scene.end()
    if not holds:
        complain("the books do not agree", f"the service's log: {scene.log_path}")
    raise typer.Exit(Exit.OK if holds else Exit.FAILED)


def _say_hello(scene: stage.Stage, settings: Settings, *, resume: bool, verify: bool) -> None:
    console = out()
    what = "going on" if resume else "waiting for the work to be finished" if verify else "set up"
    broker = "embedded" if scene.own_broker else "KAFKA_BOOTSTRAP_SERVERS"
    console.print(f"demo {what} in {scene.folder}", markup=False)
    console.print(f"  broker    {scene.bootstrap} ({broker})", markup=False)
    port = port_of(scene.provider)
    console.print(f"  provider  {port.title}, simulated at {scene.provider_url}", markup=False)
    route = next(iter(settings.routes.values()))
    console.print(
        f"  promise   {settings.wait_plan(route).sum_text}: the longest wait for a batch; one second is an hour",
        markup=False,
    )
    if not verify:
        console.print(
            "  kill it at any moment; then this finishes the work:"
            f"\n    batchferry run --config {scene.settings_path}"
            f"\n    (batchferry demo --verify --folder {scene.folder} waits for it and checks the books), or"
            f"\n    batchferry demo --resume --folder {scene.folder}\n",
            markup=False,
        )


async def _play(
    scene: stage.Stage, settings: Settings, *, produce: bool, serve: bool, limit_s: float
) -> accounts.Books:
    """Run the service until every record is settled, and read the books.

    Raises:
        TimeoutError: not settled within ``limit_s``.
    """
    from batchferry import app  # noqa: PLC0415 - see run

    kafka = app.build_kafka(settings)
    clock = app.build_clock(settings)
    try:
        async with asyncio.timeout(limit_s), contextlib.AsyncExitStack() as stack:
            ended: asyncio.Task[None] | None = None
            service = None
            if serve:
                service = await stack.enter_async_context(_service(scene, settings))
                ended = asyncio.create_task(service.wait(), name="service")
                stack.callback(ended.cancel)
            items = questions.items(port_of(scene.provider)) if produce else []
            await _watch(kafka, settings, clock, service, ended, items)
        bill, sync_billed = None, 0
        with contextlib.suppress(httpx.HTTPError):
            bill = await asyncio.to_thread(scene.bill)
            sync_billed = await asyncio.to_thread(scene.sync_billed)
        return await accounts.read_books(kafka, settings, bill, sync_billed)
    finally:
        await kafka.aclose()


@contextlib.asynccontextmanager
async def _service(scene: stage.Stage, settings: Settings) -> Any:
    """The service in this process; its log goes into the demo's folder."""
    from ulid import ULID  # noqa: PLC0415 - see run

    from batchferry import app  # noqa: PLC0415 - see run
    from batchferry.telemetry import build_telemetry  # noqa: PLC0415 - see run

    with scene.log_path.open("a", encoding="utf-8") as log:
        with contextlib.redirect_stderr(log):  # where the log set-up looks for its stream
            telemetry = build_telemetry(
                version=__version__,
                incarnation=str(ULID()),
                log_format="json",
                log_level=settings.log.level,
                otel_enabled=False,
            )
        service = app.Service(settings, telemetry)
        try:
            await service.start()
            yield service
        finally:
            await service.stop()


async def _watch(
    kafka: KafkaPort,
    settings: Settings,
    clock: Clock,
    service: Any,
    ended: asyncio.Task[None] | None,
    items: list[questions.Item],
) -> None:
    """Produce these, show what happens, and return when every record is settled."""
    topics = settings.topics
    counts = await _partition_count(kafka, settings)
    planned = len(items) or await _records(kafka, topics.requests, counts)
    began = clock.now()
    progress = live.Progress(planned, began, began, produced=0 if items else planned)
    tail = kafka.tail()
    await tail.start(list(dict.fromkeys((topics.results, topics.failures, topics.review_topic))))
    producing = asyncio.create_task(_produce(kafka, topics.requests, items, clock, progress), name="produce")
    try:
        with live.shown(progress) as refresh:
            while True:
                progress.take(await tail.poll(live.POLL_MS))
                progress.now = clock.now()
                if service is not None:
                    progress.batches = await service.batches()
                refresh()
                if producing.done():
                    producing.result()
                    if progress.outcomes >= planned and await _all_settled(kafka, settings, counts):
                        return
                if ended is not None and ended.done():
                    ended.result()
                    raise KafkaUnavailable("the service ended before the work was done; see its log")
                await asyncio.sleep(LOOK_S if service is None else 0)
    finally:
        producing.cancel()
        await tail.stop()


async def _produce(
    kafka: KafkaPort, topic: str, items: list[questions.Item], clock: Clock, progress: live.Progress
) -> None:
    """Send the records with the demo's time as their timestamp."""
    from batchferry.ports import OutRecord  # noqa: PLC0415 - see run

    producer = kafka.plain_producer()
    try:
        for start in range(0, len(items), PRODUCE_CHUNK):
            now_ms = round(clock.now().timestamp() * 1000)
            chunk = items[start : start + PRODUCE_CHUNK]
            await producer.send(
                [
                    OutRecord(topic, one.key, one.value, one.headers, timestamp_ms=now_ms + round(one.ahead_s * 1000))
                    for one in chunk
                ]
            )
            progress.produced += len(chunk)
            await asyncio.sleep(PRODUCE_PAUSE_S)
    finally:
        await producer.stop()


async def _partition_count(kafka: KafkaPort, settings: Settings) -> int:
    admin = await kafka.admin()
    try:
        found = (await admin.describe([settings.topics.requests]))[settings.topics.requests]
    finally:
        await admin.close()
    if found is None:
        raise TopicMissing("the demo was killed before it had begun; start it anew")
    return found.partitions


async def _records(kafka: KafkaPort, topic: str, partitions: int) -> int:
    return sum(end - start for start, end in (await _bounds(kafka, topic, partitions)).values())


async def _all_settled(kafka: KafkaPort, settings: Settings, partitions: int) -> bool:
    """Whether the settled watermark of every partition has reached the end of the input."""
    admin = await kafka.admin()
    try:
        committed = await admin.committed(settings.topics.group, settings.topics.requests)
    finally:
        await admin.close()
    bounds = await _bounds(kafka, settings.topics.requests, partitions)
    return all(committed.get(partition, start) >= end for partition, (start, end) in bounds.items())


async def _bounds(kafka: KafkaPort, topic: str, partitions: int) -> Mapping[int, tuple[int, int]]:
    reader = kafka.reader()
    await reader.start()
    try:
        return await reader.bounds(topic, range(partitions))
    finally:
        await reader.stop()
