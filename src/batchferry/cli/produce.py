"""``batchferry produce``: a file of provider batch lines onto the input topic, one record a line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import typer

from batchferry.cli.console import complain, count, facts, fail, out, print_json, size, wants_json
from batchferry.cli.errors import TopicMissing
from batchferry.cli.exits import Exit
from batchferry.cli.lines import (
    READ_BYTES,
    STDIN,
    UTF8_BOM,
    UTF16_MARKS,
    Line,
    LineReader,
    opened,
    progress,
    refusal,
)
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.domain.errors import KafkaUnavailable, TimestampRefused
from batchferry.domain.requests import BadRecord, RequestRules, parse_request
from batchferry.domain.times import parse_duration_s
from batchferry.ports import Headers, OutRecord

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import Clock, KafkaPort

NAMED_LINES = 50
"""Lines named one by one; what is beyond is counted only."""
DEFAULT_TOPIC_BYTES = 1_048_588
"""Kafka's own default of ``max.message.bytes``."""
RECORD_OVERHEAD_BYTES = 512
"""Room for key, framing and header names within the topic's limit."""


class _Keyed(msgspec.Struct, gc=False):
    custom_id: Any = None
    key: Any = None


_decode_keyed = msgspec.json.Decoder(_Keyed).decode


@dataclass(slots=True)
class _Tally:
    """What became of the lines."""

    sent: int = 0
    sent_bytes: int = 0
    blank: int = 0
    without_key: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    last_line: int = 0
    """The last line that is surely in the topic, or was left out."""

    def refuse(self, line: int, why: str) -> None:
        self.refused += 1
        if len(self.faults) < NAMED_LINES:
            self.faults.append(f"line {line}: {why}")

    def told(self) -> list[str]:
        more = self.refused - len(self.faults)
        return [*self.faults, *([f"... and {count(more)} more"] if more else [])]


def produce(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL: one provider batch line a line; - is stdin.")],
    config: ConfigOption = None,
    topic: Annotated[str | None, typer.Option(help="Topic to produce to; left out: topics.requests.")] = None,
    key: Annotated[
        str,
        typer.Option(help="Record key: custom_id, none, or a member of the line such as body.user."),
    ] = "custom_id",
    sla: Annotated[str | None, typer.Option(help="Header sla of every record, such as 30h or PT30H.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Header deadline: an ISO 8601 instant with a zone.")] = None,
    slice_: Annotated[str | None, typer.Option("--slice", help="Header slice: batches are kept apart by it.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A further header.")] = None,
    timestamps: Annotated[str, typer.Option(help="Record timestamps: now, or one ISO 8601 instant.")] = "now",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Look at every line first and send nothing if one is bad (stdin: leave bad ones out)."
        ),
    ] = False,
    from_line: Annotated[int, typer.Option(min=1, help="Begin at this line, to go on after a failure.")] = 1,
    as_json: JsonOption = None,
) -> None:
    """Send each line of a file as a request.

    The line is the record's value as it stands: what it must be is the service's to judge, and a bad one ends on the
    failures topic with rule and remedy. Blank lines are skipped. Memory stays small whatever the file's size.
    """
    headers = _headers(sla, deadline, slice_, header or [])
    at_ms = _instant_ms(timestamps)
    settings = load(config, keys_needed=False)
    _look_at(file)
    from batchferry import app  # noqa: PLC0415 - see run

    clock = app.build_clock(settings)
    rules = app.request_rules(settings)
    target = topic or settings.topics.requests
    began = time.monotonic()
    tally = _Tally(last_line=from_line - 1)
    kafka = app.build_kafka(settings)

    async def work() -> None:
        try:
            max_bytes = await _ready_topic(kafka, settings, target)
            sender = _Sender(kafka, target, headers, _key_of(key), clock, at_ms, max_bytes, rules if check else None)
            if check and file != STDIN:
                with opened(file, max_bytes) as (reader, total):
                    await _check_all(reader, total, sender, tally, from_line)
                if tally.refused:
                    return
            with opened(file, max_bytes) as (reader, total):
                await _send_all(reader, total, sender, tally, from_line)
        finally:
            await kafka.aclose()

    asyncio.run(work())
    _report(tally, target, time.monotonic() - began, show_json=wants_json(as_json))
    if tally.refused:
        complain(f"{count(tally.refused)} line{'' if tally.refused == 1 else 's'} not sent:", *tally.told())
        raise typer.Exit(Exit.LINES_REFUSED)


class _Sender:
    """Makes records of lines and sends them."""

    def __init__(
        self,
        kafka: KafkaPort,
        topic: str,
        headers: Headers,
        key_of: Callable[[bytes], bytes | None] | None,
        clock: Clock,
        at_ms: int | None,
        max_bytes: int,
        rules: RequestRules | None,
    ) -> None:
        self._producer = kafka.plain_producer()
        self._topic = topic
        self._headers = headers
        self._key_of = key_of
        self._clock = clock
        self._at_ms = at_ms
        self._max_bytes = max_bytes
        self._rules = rules

    def fault(self, line: Line) -> str | None:
        """Why this line is not sent; None when it is."""
        if line.value is None:
            return (
                f"{count(line.bytes)} bytes, the topic takes {count(self._max_bytes)}; shorten it, or raise"
                " max.message.bytes of the topic"
            )
        if self._rules is not None:
            found = parse_request(line.value, self._headers, self._rules)
            if isinstance(found, BadRecord):
                return refusal(found)
        return None

    async def send(self, lines: list[Line], tally: _Tally) -> None:
        """One block of lines.

        Raises:
            KafkaUnavailable: saying how far it surely came.
            TimestampRefused: the same of records that the broker finds too far from its clock, with a remedy.
        """
        now_ms = self._at_ms if self._at_ms is not None else round(self._clock.now().timestamp() * 1000)
        records: list[OutRecord] = []
        size_bytes = 0
        for line in lines:
            if not line.bytes:
                tally.blank += 1
                continue
            why = self.fault(line)
            if why is not None or line.value is None:
                tally.refuse(line.number, why or "")
                continue
            key = None if self._key_of is None else self._key_of(line.value)
            if key is None and self._key_of is not None:
                tally.without_key += 1
            records.append(OutRecord(self._topic, key, line.value, self._headers, timestamp_ms=now_ms))
            size_bytes += line.bytes
        try:
            await self._producer.send(records)
        except TimestampRefused as error:
            remedy = "give --timestamps an instant nearer to it"
            if self._at_ms is None:
                remedy += ", or let clock.origin of the settings begin further in the past"
            raise TimestampRefused(f"{error}; lines up to {tally.last_line} are sent; {remedy}") from error
        except KafkaUnavailable as error:
            raise type(error)(
                f"{error}; lines up to {tally.last_line} are sent, lines {lines[0].number} to {lines[-1].number} may"
                f" be: go on with --from-line {tally.last_line + 1} (the service answers a repeated request once)"
            ) from error
        tally.sent += len(records)
        tally.sent_bytes += size_bytes
        tally.last_line = lines[-1].number

    async def stop(self) -> None:
        await self._producer.stop()


async def _ready_topic(kafka: KafkaPort, settings: Settings, topic: str) -> int:
    """Largest line the topic takes; a missing input topic is made as ``run`` would make it."""
    admin = await kafka.admin()
    try:
        found = (await admin.describe([topic]))[topic]
        if found is None:
            if not settings.topics.create or topic != settings.topics.requests:
                raise TopicMissing(f"topic {topic} does not exist; create it, or correct topics.requests")
            await admin.create(topic, settings.topics.partitions, {})
            complain(f"made topic {topic} with {settings.topics.partitions} partitions")
            found = (await admin.describe([topic]))[topic]
    finally:
        await admin.close()
    takes = DEFAULT_TOPIC_BYTES if found is None else int(found.configs.get("max.message.bytes", DEFAULT_TOPIC_BYTES))
    return max(1024, takes - RECORD_OVERHEAD_BYTES)


async def _send_all(reader: LineReader, total: int | None, sender: _Sender, tally: _Tally, from_line: int) -> None:
    try:
        with progress("producing", total) as advance:
            async for lines in _blocks(reader, from_line):
                await sender.send(lines, tally)
                advance(reader.read_bytes)
    finally:
        await sender.stop()


async def _check_all(reader: LineReader, total: int | None, sender: _Sender, tally: _Tally, from_line: int) -> None:
    with progress("checking", total) as advance:
        async for lines in _blocks(reader, from_line):
            for line in lines:
                if line.bytes and (why := sender.fault(line)) is not None:
                    tally.refuse(line.number, why)
            advance(reader.read_bytes)


async def _blocks(reader: LineReader, from_line: int) -> Any:
    """The reader's blocks without blocking the event loop: a pipe may be slow."""
    blocks = reader.blocks()
    is_first = True
    while (lines := await asyncio.to_thread(next, blocks, None)) is not None:
        if is_first:
            is_first = False
            _mind_the_mark(reader.first)  # of a pipe it can only be known now
        wanted = lines if lines[0].number >= from_line else [line for line in lines if line.number >= from_line]
        if wanted:
            yield wanted


def _look_at(file: str) -> None:
    """Leave at once, before the cluster is asked for anything, when the file cannot be read."""
    if file != STDIN:
        with opened(file, READ_BYTES) as (reader, _):
            next(reader.blocks(), None)


def _mind_the_mark(first: bytes) -> None:
    if first.startswith(UTF16_MARKS):
        fail(Exit.LINES_REFUSED, "the file is UTF-16, nothing was sent; write it as UTF-8")
    if first.startswith(UTF8_BOM):
        complain(
            "the file starts with a byte order mark; line 1 goes out as it stands and will be refused by the service",
            "remedy: write the file as UTF-8 without one (in Python: encoding='utf-8', not 'utf-8-sig')",
        )


def _report(tally: _Tally, topic: str, took_s: float, *, show_json: bool) -> None:
    if show_json:
        print_json(
            {
                "topic": topic,
                "sent": tally.sent,
                "bytes": tally.sent_bytes,
                "blank_lines": tally.blank,
                "without_key": tally.without_key,
                "refused": tally.refused,
                "faults": tally.told(),
                "seconds": round(took_s, 3),
            }
        )
        return
    lines: list[tuple[str, str]] = [
        ("topic", topic),
        ("records sent", count(tally.sent)),
        ("bytes", size(tally.sent_bytes)),
        ("blank lines skipped", count(tally.blank)),
        ("without a key", count(tally.without_key)),
        ("lines not sent", count(tally.refused)),
        ("took", f"{took_s:.1f} s"),
    ]
    out().print(facts(lines))


# ------------------------------------------------------------------------------------------------- the flags


def _headers(sla: str | None, deadline: str | None, slice_: str | None, more: list[str]) -> Headers:
    made: list[tuple[str, bytes]] = []
    if sla is not None:
        try:
            seconds = parse_duration_s(sla)
        except ValueError as error:
            fail(Exit.USAGE, f"--sla: {error}")
        made.append(("sla", f"PT{seconds:g}S".encode()))
    if deadline is not None:
        if _parsed_instant(deadline) is None:
            fail(Exit.USAGE, f"--deadline: {deadline!r} is no ISO 8601 instant with a zone")
        made.append(("deadline", deadline.encode()))
    if slice_:
        made.append(("slice", slice_.encode()))
    for one in more:
        name, equals, value = one.partition("=")
        if not name or not equals:
            fail(Exit.USAGE, f"--header: {one!r} is not NAME=VALUE")
        made.append((name, value.encode()))
    return tuple(made)


def _instant_ms(text: str) -> int | None:
    """Milliseconds of one instant for all records; None means now, for each block anew."""
    if text == "now":
        return None
    found = _parsed_instant(text)
    if found is None:
        fail(Exit.USAGE, f"--timestamps: {text!r} is neither now nor an ISO 8601 instant with a zone")
    return round(found.timestamp() * 1000)


def _parsed_instant(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.astimezone(UTC) if found.tzinfo is not None else None


def _key_of(named: str) -> Callable[[bytes], bytes | None] | None:
    """How a line gets its key; None when it gets none."""
    if named == "none":
        return None
    if named == "custom_id":
        return _custom_id
    path = named.split(".")

    def member(line: bytes) -> bytes | None:
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            return None
        for part in path:
            if not isinstance(found, Mapping) or part not in found:
                return None
            found = found[part]
        return _key_bytes(found)

    return member


def _custom_id(line: bytes) -> bytes | None:
    try:
        found = _decode_keyed(line)
        return _key_bytes(found.key if found.custom_id is None else found.custom_id)
    except (ValueError, RecursionError):
        return None


def _key_bytes(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode(errors="replace")
    return str(value).encode() if isinstance(value, int) and not isinstance(value, bool) else None
