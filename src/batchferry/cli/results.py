"""``batchferry results``: outcomes as they are published."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.text import Text

from batchferry.cli.console import count, err, json_line, out, print_line, safe, wants_json
from batchferry.cli.errors import TopicMissing
from batchferry.cli.options import ConfigOption, JsonOption, load

if TYPE_CHECKING:
    from batchferry.ports import KafkaPort, LogReader, Record

FOLLOW_PAUSE_S = 0.5
"""Between two looks at the ends of the topics."""
SHOWN_CHARS = 60
"""Of an answer or an error in a table row; --json has all of it."""


def results(
    config: ConfigOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes; Ctrl-C ends it.")] = False,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="With --follow: also what is there already.")
    ] = False,
    most: Annotated[int | None, typer.Option("--max", min=1, metavar="N", help="End after so many outcomes.")] = None,
    only: Annotated[str, typer.Option(help="all, results or failures.")] = "all",
    as_json: JsonOption = None,
) -> None:
    """Print outcomes from the results and failures topics: committed ones only, one a line.

    Without --follow: everything there is now. With --json each line is the published message; characters that end a
    line for some readers (U+2028, U+2029, control characters) are written as escapes, so a line stays a line.
    """
    settings = load(config, keys_needed=False)
    topics = {
        "results": [settings.topics.results],
        "failures": list(dict.fromkeys([settings.topics.failures, settings.topics.review_topic])),
    }
    if only not in {"all", *topics}:
        raise typer.BadParameter(f"{only!r} is none of all, results, failures", param_hint="--only")
    wanted = [name for group, names in topics.items() if only in {"all", group} for name in names]
    from batchferry import app  # noqa: PLC0415 - see run

    kafka = app.build_kafka(settings)
    printer = _Printer(show_json=wants_json(as_json), most=most)

    async def work() -> None:
        try:
            await _print(kafka, wanted, printer, follow=follow, from_beginning=from_beginning or not follow)
        finally:
            await kafka.aclose()

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        if not follow:
            raise
    if not printer.show_json:
        err().print(f"{count(printer.printed)} outcomes")


async def _print(
    kafka: KafkaPort, topics: Sequence[str], printer: _Printer, *, follow: bool, from_beginning: bool
) -> None:
    reader = kafka.reader()
    await reader.start()
    try:
        positions: dict[tuple[str, int], int] = {}
        partitions = await _partitions(kafka, topics)
        for topic, number in partitions.items():
            for partition, (start, end) in (await reader.bounds(topic, range(number))).items():
                positions[topic, partition] = start if from_beginning else end
        while True:
            for where, position in list(positions.items()):
                positions[where] = await _print_partition(reader, where, position, printer)
                if printer.is_done:
                    return
            if not follow:
                return
            await asyncio.sleep(FOLLOW_PAUSE_S)
            await _skip_idle(reader, partitions, positions)
    finally:
        await reader.stop()


async def _skip_idle(reader: LogReader, partitions: Mapping[str, int], positions: dict[tuple[str, int], int]) -> None:
    """Wait until some partition has grown: one question for each topic instead of one read a partition."""
    while True:
        for topic, number in partitions.items():
            for partition, (_, end) in (await reader.bounds(topic, range(number))).items():
                if end > positions[topic, partition]:
                    return
        await asyncio.sleep(FOLLOW_PAUSE_S)


async def _print_partition(reader: LogReader, where: tuple[str, int], position: int, printer: _Printer) -> int:
    topic, partition = where
    (_, end) = (await reader.bounds(topic, [partition]))[partition]
    if end <= position:
        return position
    async for records in reader.read_to_end(topic, partition, position):
        for record in records:
            printer.show(record)
            position = record.offset + 1
            if printer.is_done:
                return position
    return max(position, end)


async def _partitions(kafka: KafkaPort, topics: Sequence[str]) -> Mapping[str, int]:
    admin = await kafka.admin()
    try:
        found = await admin.describe(topics)
    finally:
        await admin.close()
    missing = [topic for topic, description in found.items() if description is None]
    if missing:
        raise TopicMissing(
            f"topic {', '.join(missing)} does not exist; 'batchferry run' makes it, or correct the topics settings"
        )
    return {topic: description.partitions for topic, description in found.items() if description is not None}


class _Printer:
    """Prints outcomes until there were enough."""

    def __init__(self, *, show_json: bool, most: int | None) -> None:
        self.show_json = show_json
        self.printed = 0
        self._most = most
        self._console = out()

    @property
    def is_done(self) -> bool:
        """Whether no more are wanted."""
        return self._most is not None and self.printed >= self._most

    def show(self, record: Record) -> None:
        """Print one outcome."""
        value = record.value or b"null"
        if self.show_json:
            print_line(json_line(value))
        else:
            self._console.print(_row(record, value), soft_wrap=True)
        self.printed += 1


def _row(record: Record, value: bytes) -> Text:
    try:
        outcome: dict[str, Any] = orjson.loads(value)
        succeeded = outcome["status"] == "succeeded"
        what = "succeeded" if succeeded else str(outcome["error"]["class"])
        text = _answer_of(outcome) if succeeded else f"{outcome['error']['code']}: {outcome['error']['message']}"
        flags = "".join(f" [{flag}]" for flag in outcome.get("flags") or ())
        late = "" if outcome.get("deadline_met") is not False else " LATE"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return Text(f"{record.topic}-{record.partition}@{record.offset} is no outcome", style="red")
    shown = safe(text)
    shown = shown if len(shown) <= SHOWN_CHARS else shown[: SHOWN_CHARS - 1] + "…"
    source = outcome["source"]
    return Text.assemble(
        (f"{what:<17}", "green" if succeeded else "red"),
        (f" {source['partition']}@{source['offset']:<8}", "dim"),
        f" {safe(outcome.get('custom_id') or '-')[:40]:<24} ",
        shown,
        (flags + late, "yellow"),
    )


def _answer_of(outcome: Mapping[str, Any]) -> str:
    """The text of a native answer, for the eye; its JSON where it is of an unknown shape."""
    body = (outcome.get("response") or {}).get("body")
    if isinstance(body, dict):
        for choice in body.get("choices") or ():
            message = choice.get("message") or {}
            return str(message.get("content") or message.get("refusal") or choice.get("text") or "")
        for item in body.get("output") or ():
            for part in item.get("content") or ():
                return str(part.get("text") or part.get("refusal") or "")
        if body.get("object") == "list":
            return f"{len(body.get('data') or ())} embeddings"
    return "" if body is None else orjson.dumps(body).decode()
