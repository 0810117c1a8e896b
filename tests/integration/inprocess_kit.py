"""The whole service in the test's own event loop, between a real broker and a provider that follows a script.

Time runs 3,600 times as fast: an hour of the service and of the provider is a second of ours. Every *case* has a
name, which is the ``slice`` of its requests (so that it gets batches of its own) and stands in their words (so that
the provider knows whose file it reads). The provider asks the case's ``Script`` how each of its batches lives; the
n-th batch of a case is its n-th *life*.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from aiokafka import AIOKafkaProducer

from batchferry.app import Service
from batchferry.config import load_settings
from batchferry.domain import control
from batchferry.domain.wellformed import check_batch_file
from batchferry.kafka import AioKafka
from batchferry.ports import Headers, OutRecord, Record
from batchferry.simulator import (
    DEFAULT_KEY,
    ClockSettings,
    Durations,
    JobError,
    RunCurve,
    Scenario,
    Simulator,
    SimulatorSettings,
)
from batchferry.simulator import app as simulator_app
from batchferry.simulator.errors import Refused
from batchferry.simulator.state import SimBatch, Status
from batchferry.simulator.world import SyncEnd, World
from batchferry.telemetry import RecordingTelemetry
from broker.kit import committed, patient_settings

SPEED = 3600.0
HOUR_S = 3600.0
AHEAD_H = 160
"""The virtual clock starts so long before now that no record is newer than the broker's clock, nor too old to be kept."""
MODEL = "gpt-4o-mini"
ROUTE: dict[str, Any] = {"max_rows": 1000, "sla_s": 28.5 * HOUR_S, "margin_s": 3 * HOUR_S}
"""28 h 30 min - 24 h - 3 h: a batch leaves an hour and a half after its first record."""
_CASE = re.compile(rb"case/([a-z0-9_-]+)/")
QUICK = Durations(validating_s=5.0, in_progress=RunCurve(minimum_s=4.0, factor_s=0.0), finalizing_s=3.0)
BUGS = ("task_failed", "effect_failed", "batch_quarantined", "telemetry_misused")


# ---------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Sent:
    """One input record. ``key`` decides its partition."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    age_s: float = 0.0
    """How long before its sending the record says that it was made."""


def chat_body(case: str, text: str = "hello", model: str = MODEL) -> dict[str, Any]:
    """A request whose words name its case."""
    return {"model": model, "messages": [{"role": "user", "content": f"case/{case}/ {text}"}]}


def request(
    case: str,
    custom_id: str,
    *,
    text: str | None = None,
    key: bytes | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    model: str = MODEL,
    body: bytes | None = None,
    slice_: str | None = None,
    url: str | None = None,
) -> Sent:
    """A well-behaved record of a case; all of a case go to one partition unless ``key`` says otherwise."""
    words = json.dumps(chat_body(case, custom_id if text is None else text, model)).encode() if body is None else body
    path = b"" if url is None else b'"url": "%b", ' % url.encode()
    value = b'{"custom_id": ' + json.dumps(custom_id).encode() + b", " + path + b'"body": ' + words + b"}"
    named = (("slice", (case if slice_ is None else slice_).encode()), *headers)
    return Sent(value, case.encode() if key is None else key, named)


# ------------------------------------------------------------------------------------------- the provider


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file as it was uploaded."""

    wire_id: str
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """The request's words without the case's name."""
        return words_of(self.body)


def words_of(body: Mapping[str, Any]) -> str:
    """What the last message (or the input) of a request says, without the case's name."""
    content = body["messages"][-1]["content"] if "messages" in body else body["input"]
    return str(content).partition("/ ")[2]


@dataclass(frozen=True, slots=True)
class SyncCall:
    """One call of the ordinary endpoint for a row of a case."""

    attempt: int
    """How often these words have been asked, this call included."""
    at: datetime
    endpoint: str
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """The request's words without the case's name."""
        return words_of(self.body)


@dataclass(frozen=True, slots=True)
class Files:
    """A batch's two result files; None where there is none."""

    output: bytes | None
    error: bytes | None


@dataclass(slots=True)
class Life:
    """One batch of a case at the provider."""

    number: int
    batch: SimBatch
    file: bytes
    lines: list[Line]

    @property
    def texts(self) -> list[str]:
        """The words of its rows, sorted."""
        return sorted(line.text for line in self.lines)


class Script:
    """How a case's batches live; the defaults are a provider on its best day."""

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        """A definite refusal of the ``attempt``-th create call for this life."""

    def durations(self, life: int) -> Durations | None:
        """How long its states last."""

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        """End as failed with this error list."""

    def ends(self, life: int) -> tuple[Status, int] | None:
        """End in another status, with so many rows done."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        """What the result files hold."""
        del life, lines
        return files

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        """What retrieve and list answer."""
        del life
        return shown

    def refuse_call(self, call: SyncCall) -> Refused | None:
        """Refuse a sync call, which is then neither run nor billed."""

    def answer_call(self, call: SyncCall, body: dict[str, Any]) -> dict[str, Any]:
        """What a sync call answers."""
        del call
        return body

    async def hold_call(self, call: SyncCall) -> None:
        """Keep the answer of a sync call back for a while; the row has run by then."""


def answer_line(wire_id: str, body: bytes, status: int = 200) -> bytes:
    """A result line around exactly these body bytes."""
    return (
        b'{"id":"batch_req_1","custom_id":"%b","response":{"status_code":%d,"request_id":"rq_%b","body":%b},"error":null}'
        % (wire_id.encode(), status, wire_id.encode(), body)
    )


def answer_body(text: str | bytes) -> bytes:
    """A chat completion; ``text`` given as bytes stands in the JSON string as it is."""
    inner = text if isinstance(text, bytes) else json.dumps(text)[1:-1].encode()
    return (
        b'{"object":"chat.completion","model":"gpt-4o-mini","choices":[{"index":0,"finish_reason":"stop",'
        b'"message":{"role":"assistant","content":"%b"}}],"usage":{"prompt_tokens":5,"completion_tokens":5}}' % inner
    )


def unrun_line(wire_id: str, code: str) -> bytes:
    """A line for a row that was not run."""
    return b'{"id":"b","custom_id":"%b","response":null,"error":{"code":"%b","message":"not run"}}' % (
        wire_id.encode(),
        code.encode(),
    )


def joined(lines: Iterable[bytes]) -> bytes:
    """Lines as a file."""
    return b"".join(line + b"\n" for line in lines)


class ScriptedProvider:
    """A simulator whose batches follow the scripts of the cases they belong to."""

    def __init__(self, simulator: Simulator, monkeypatch: Any, scripts: Mapping[str, Script]) -> None:
        self.simulator = simulator
        self.scripts = scripts
        self.lives: dict[str, list[Life]] = defaultdict(list)
        self.refused: dict[str, int] = defaultdict(int)
        self.calls: dict[str, list[SyncCall]] = defaultdict(list)
        """Calls of the ordinary endpoints by case, refused ones too."""
        self.shown: dict[str, list[str]] = defaultdict(list)
        """Statuses shown to somebody who asked, by case."""
        self._of_batch: dict[str, tuple[str, Life]] = {}
        self.world: World = simulator.world
        world = self.world
        create, validate, conclude = world.create, world._validate, world._conclude
        durations, step, render = world._durations, world._step, simulator_app.render_batch
        admit_call, answer_call, take_time = world.admit_sync, world.answer_now, world.take_time
        calling: ContextVar[tuple[str, SyncCall]] = ContextVar("calling")

        def scripted_create(project: str, wanted: Any) -> SimBatch:
            stored = world.state.files.get(wanted.input_file_id)
            content = b"" if stored is None else world.state.file_path(stored.id).read_bytes()
            case = case_of(content)
            number = len(self.lives[case]) + 1
            refusal = self.script(case).refuse_create(number, self.refused[case] + 1)
            if refusal is not None:
                self.refused[case] += 1
                raise refusal
            lines = lines_of(content)
            life = Life(number, None, content, lines)  # type: ignore[arg-type]
            self._coming = (case, life)
            try:
                life.batch = create(project, wanted)
            finally:
                self._coming = None
            self.lives[case].append(life)
            self._of_batch[life.batch.id] = (case, life)
            return life.batch

        def scripted_durations(batch: SimBatch) -> Durations:
            case, life = self._of_batch.get(batch.id) or self._coming or ("", None)
            made = None if life is None else self.script(case).durations(life.number)
            return durations(batch) if made is None else made

        async def scripted_validate(batch: SimBatch, due: float) -> None:
            case, life = self._of_batch[batch.id]
            errors = self.script(case).fail_with(life.number, life.lines)
            if errors is not None:
                world._fail(batch, due, list(errors))
                return
            await validate(batch, due)

        async def scripted_step(batch: SimBatch, due: float) -> None:
            case, life = self._of_batch[batch.id]
            end = self.script(case).ends(life.number)
            if batch.status is Status.FINALIZING and end is not None:
                codes = {Status.EXPIRED: "batch_expired", Status.CANCELLED: "batch_cancelled"}
                await world._conclude(batch, due, end[0], end[1], codes.get(end[0]))
                return
            await step(batch, due)

        async def scripted_conclude(
            batch: SimBatch, at: float, status: Status, reached: int, unrun_code: str | None
        ) -> None:
            await conclude(batch, at, status, reached, unrun_code)
            case, life = self._of_batch[batch.id]
            before = Files(self._content(batch.output_file_id), self._content(batch.error_file_id))
            after = self.script(case).files(life.number, life.lines, before)
            if after != before:
                batch.output_file_id = self._replace(batch, "output", batch.output_file_id, after.output, at)
                batch.error_file_id = self._replace(batch, "error", batch.error_file_id, after.error, at)
                world._save(batch)

        def scripted_render(batch: SimBatch, scenario: Scenario, now: float) -> dict[str, Any]:
            shown = render(batch, scenario, now)
            known = self._of_batch.get(batch.id)
            if known is None:
                return shown
            self.shown[known[0]].append(str(shown["status"]))
            return self.script(known[0]).shows(known[1].number, shown)

        def scripted_admit(project: str, endpoint: str, body: dict[str, Any]) -> dict[str, str]:
            named = _CASE.search(json.dumps(body).encode())
            case = "" if named is None else named[1].decode()
            words = words_of(body)
            attempt = 1 + sum(1 for call in self.calls[case] if call.text == words)
            call = SyncCall(attempt, world.clock.now(), endpoint, body)
            self.calls[case].append(call)
            calling.set((case, call))
            refusal = self.script(case).refuse_call(call)
            if refusal is not None:
                raise refusal
            return admit_call(project, endpoint, body)

        def scripted_answer(endpoint: str, body: dict[str, Any], client_id: str) -> SyncEnd:
            ended = answer_call(endpoint, body, client_id)
            case, call = calling.get()
            if ended.end is None:
                return ended
            changed = self.script(case).answer_call(call, ended.end.body)
            return replace(ended, end=replace(ended.end, body=changed))

        async def scripted_take_time() -> None:
            await take_time()
            case, call = calling.get()
            await self.script(case).hold_call(call)

        self._coming: tuple[str, Life] | None = None
        world.admit_sync = scripted_admit  # type: ignore[method-assign]
        world.answer_now = scripted_answer  # type: ignore[method-assign]
        world.take_time = scripted_take_time  # type: ignore[method-assign]
        world.create = scripted_create  # type: ignore[method-assign]
        world._durations = scripted_durations  # type: ignore[method-assign]
        world._validate = scripted_validate  # type: ignore[method-assign]
        world._step = scripted_step  # type: ignore[method-assign]
        world._conclude = scripted_conclude  # type: ignore[method-assign]
        monkeypatch.setattr(simulator_app, "render_batch", scripted_render)

    def script(self, case: str) -> Script:
        """The script of a case."""
        return self.scripts.get(case) or Script()

    def _content(self, file_id: str | None) -> bytes | None:
        return None if file_id is None else self.world.state.file_path(file_id).read_bytes()

    def _replace(self, batch: SimBatch, kind: str, file_id: str | None, content: bytes | None, at: float) -> str | None:
        if content is None:
            if file_id is not None:
                self.world.delete_file(batch.project, file_id)
            return None
        path = self.world.state.file_path(file_id or f"file-{batch.id}-{kind}")
        path.write_bytes(content)
        return self.world._keep(batch, kind, path, at)

    def files_left(self) -> list[str]:
        """Files that nobody has deleted."""
        now = self.world.clock.timestamp()
        return sorted(file.id for file in self.world.state.files.values() if file.is_there(now))


def case_of(content: bytes) -> str:
    """The case whose rows a file holds; one file never holds rows of two."""
    named = set(_CASE.findall(content))
    assert len(named) == 1, f"a file with rows of {sorted(named)}"
    return named.pop().decode()


def lines_of(content: bytes) -> list[Line]:
    """An uploaded file taken apart; a file that is not well-formed fails the test."""
    assert check_batch_file([content]) == [], "the provider was sent a file that is not well-formed"
    made = [json.loads(line) for line in content.split(b"\n")[:-1]]
    assert len({one["custom_id"] for one in made}) == len(made), "a file that names one id twice"
    return [Line(one["custom_id"], one["body"]) for one in made]


# ------------------------------------------------------------------------------------------- the outcomes


@dataclass(frozen=True, slots=True)
class Outcome:
    """One record of ``results`` or ``failures``."""

    record: Record
    said: dict[str, Any]

    @property
    def where(self) -> tuple[int, int]:
        """Partition and offset of the request."""
        return self.said["source"]["partition"], self.said["source"]["offset"]

    @property
    def is_result(self) -> bool:
        return self.said["kind"] == "result"

    @property
    def row_class(self) -> str:
        """``succeeded``, or the class of the failure."""
        return "succeeded" if self.is_result else str(self.said["error"]["class"])

    @property
    def code(self) -> str:
        return str(self.said["error"]["code"])

    @property
    def text(self) -> str:
        """The answer's words."""
        return str(self.said["response"]["body"]["choices"][0]["message"]["content"])

    def header(self, name: str) -> bytes | None:
        return next((value for key, value in self.record.headers if key == name), None)


@dataclass(slots=True)
class Heard:
    """Everything published so far, by request and by case."""

    outcomes: dict[tuple[int, int], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    control: list[Record] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


class Pier:
    """A service, its provider and its topics. ``start`` and ``stop`` may be repeated: the topics stay."""

    def __init__(
        self,
        bootstrap: str,
        folder: Path,
        monkeypatch: Any,
        scripts: Mapping[str, Script] | None = None,
        scenario: Scenario | None = None,
        topic_configs: Mapping[str, Mapping[str, str]] | None = None,
        partitions: int = 3,
        routes: Mapping[str, Mapping[str, Any]] | None = None,
        has_review: bool = False,
        **overrides: Any,
    ) -> None:
        self.tag = uuid4().hex[:8]
        self.bootstrap = bootstrap
        self.folder = folder
        self.partitions = partitions
        self.topics = {name: f"{name}-{self.tag}" for name in ("requests", "results", "failures", "events")}
        if has_review:
            self.topics["review"] = f"review-{self.tag}"
        self.heard = Heard()
        self.placed: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Where the records of a case were put, in the order they were sent."""
        self.started = datetime.now(UTC)
        self.origin = self.started - timedelta(hours=AHEAD_H)
        clock = ClockSettings(speed=SPEED, origin=self.origin, started_real=self.started)
        script = scenario or Scenario(durations=QUICK)
        self.simulator = Simulator(SimulatorSettings(clock=clock, scenario=script))
        self.telemetry = RecordingTelemetry()
        self.kafka = AioKafka(patient_settings(bootstrap))
        self.service: Service | None = None
        self.starts = 0
        self._monkeypatch = monkeypatch
        self._scripts = scripts or {}
        self._topic_configs = topic_configs or {}
        self._overrides = overrides
        self._routes = routes or {"default": ROUTE}
        self._reading: asyncio.Task[None] | None = None

    def settings(self, **overrides: Any) -> Any:
        """The service's settings; ``overrides`` are merged over those of the pier, sections member by member."""
        made: dict[str, Any] = {
            "kafka": {
                "bootstrap_servers": [self.bootstrap],
                "session_timeout_s": 10,
                "heartbeat_s": 0.3,
                "rebalance_timeout_s": 10,
                "partition_fetch_max_bytes": 64_000_000,
                "fetch_max_bytes": 64_000_000,
            },
            "topics": {**self.topics, "partitions": self.partitions, "group": f"ferry-{self.tag}"},
            "accounts": {
                "default": {
                    "base_url": self.simulator.base_url,
                    "api_key": DEFAULT_KEY,
                    "poll": {"first_s": 300, "floor_s": 120, "max_s": 900},
                    "max_concurrent_calls": 64,
                    "sync": {"enabled": False},
                }
            },
            "routes": self._routes,
            "clock": {"speed": SPEED, "origin": self.origin.isoformat(), "started": self.started.isoformat()},
            "limits": {
                "settle_max_delay_s": 0.2,
                "missing_confirm_s": 600,
                "missing_grace_s": 8 * HOUR_S,
                "file_reuse_s": HOUR_S,
                "max_uploads": 8,
                "max_downloads": 8,
            },
            "server": {"enabled": False},
            "state_dir": str(self.folder / "state"),
            "log": {"format": "human"},
        }
        made = _merged(_merged(made, self._overrides), overrides)
        reached = {"base_url": self.simulator.base_url, "api_key": DEFAULT_KEY}
        made["accounts"] = {name: {**reached, **account} for name, account in made["accounts"].items()}
        return load_settings(None, env={}, overrides=made)

    # -- life

    async def __aenter__(self) -> Self:
        await self.simulator.start()
        try:
            await self._set_up()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _set_up(self) -> None:
        self.provider = ScriptedProvider(self.simulator, self._monkeypatch, self._scripts)
        admin = await self.kafka.admin()
        for name, topic in self.topics.items():
            configs = self._topic_configs.get(name, {})
            await admin.create(topic, 1 if name == "events" else self.partitions, configs)
        await admin.close()
        await self.start()

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait([self._reading])
            await self.kafka.aclose()
            await self.simulator.stop()

    async def start(self, **overrides: Any) -> None:
        """Start the service and wait until it is ready."""
        self.starts += 1
        self.service = Service(self.settings(**overrides), telemetry=self.telemetry)
        await self.service.start()
        await self.until(lambda: self.service is not None and not self.service.not_ready(), "a ready service")
        await self.until(
            lambda: len(self.supervisor.status()["partitions"]) == self.partitions,  # type: ignore[arg-type]
            "every partition restored",
        )
        if self._reading is None:
            names = [topic for name, topic in self.topics.items() if name != "requests"]
            tail = self.kafka.tail()
            await tail.start([*names, self.service.settings.topics.control_topic])
            self._reading = asyncio.create_task(self._read(tail), name="reader of outcomes")

    async def stop(self) -> None:
        """Stop the service in order; a bug it met on the way fails the test."""
        service, self.service = self.service, None
        if service is not None:
            drained = await service.stop()
            assert drained
        met = [(name, fields) for name, fields in self.telemetry.events if name in BUGS]
        assert met == []

    @property
    def supervisor(self) -> Any:
        assert self.service is not None
        return self.service.supervisor

    @property
    def now(self) -> datetime:
        """The service's time."""
        passed_s = (datetime.now(UTC) - self.started).total_seconds()
        return self.origin + timedelta(seconds=passed_s * SPEED)

    async def until(self, condition: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
        """Wait for what other tasks bring about; fails by name."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.service is not None and self.service._run is not None and self.service._run.done():
                self.service._run.result()
            assert time.monotonic() < deadline, f"{what} did not come about within {limit_s:g} s"
            await asyncio.sleep(0.02)

    # -- traffic

    async def send(self, case: str, records: Sequence[Sent]) -> None:
        """Produce a case's records; ``placed[case]`` then says where they are."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self.bootstrap, max_request_size=64_000_000, max_batch_size=1_000_000
        )
        await producer.start()
        try:
            now_s = self.now.timestamp()
            waiting = [
                await producer.send(
                    self.topics["requests"],
                    record.value,
                    record.key,
                    partition=record.partition,
                    headers=list(record.headers),
                    timestamp_ms=int((now_s - record.age_s) * 1000),
                )
                for record in records
            ]
            for one in waiting:
                meta = await one
                self.placed[case].append((meta.partition, meta.offset))
        finally:
            await producer.stop()

    async def tell(self, entry: control.ControlEntry) -> None:
        """Write a control record as the command line would."""
        producer = self.kafka.plain_producer()
        await producer.start()
        control_topic = self.settings().topics.control_topic
        await producer.send([OutRecord(control_topic, *control.encode(entry), partition=0)])
        await producer.stop()

    async def _read(self, tail: Any) -> None:
        outcomes = {topic for name, topic in self.topics.items() if name not in {"requests", "events"}}
        try:
            while True:
                for record in await tail.poll(100):
                    if record.topic in outcomes:
                        outcome = Outcome(record, json.loads(record.value))
                        self.heard.outcomes[outcome.where].append(outcome)
                    elif record.topic == self.topics["events"]:
                        self.heard.events.append(json.loads(record.value))
                    else:
                        self.heard.control.append(record)
        finally:
            await tail.stop()

    def missing(self, case: str) -> list[tuple[int, int]]:
        """Records of a case that have no outcome yet."""
        return [where for where in self.placed[case] if not self.heard.outcomes.get(where)]

    async def landed(self, case: str, limit_s: float = 40.0) -> list[Outcome]:
        """Wait for an outcome of each record of the case; see ``outcomes``."""
        await self.until(lambda: not self.missing(case), f"an outcome of each record of {case}", limit_s)
        return self.outcomes(case)

    def outcomes(self, case: str) -> list[Outcome]:
        """The case's outcomes in the order its records were sent, each checked to be the only one."""
        found = [self.heard.outcomes.get(where, []) for where in self.placed[case]]
        assert [len(one) for one in found] == [1] * len(found), f"{case}: outcomes a record: {[len(o) for o in found]}"
        return [one[0] for one in found]

    def events(self, name: str) -> list[dict[str, object]]:
        """The fields of our own log events of this name."""
        return self.telemetry.named(name)

    async def jobs(self, case: str) -> list[Mapping[str, object]]:
        """The read model's rows of this case's batches."""
        assert self.service is not None
        return [row for row in await self.service.batches() if row["slice"] == case]

    async def settled_offsets(self) -> dict[int, int]:
        """The group's committed offsets."""
        return await committed(self.kafka, f"ferry-{self.tag}", self.topics["requests"])


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for name, value in over.items():
        known = both.get(name)
        both[name] = _merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return both
