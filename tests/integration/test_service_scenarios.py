"""The scenario library through the whole service: what loses or doubles a naive client's rows does neither here.

One service has an account for each scenario of the library, each with a simulator of its own that plays it. All are
played at once, at an hour a second; then the books of each are read: one outcome a record, every answer that of its
request, and on the bill each row as often as the scenario makes unavoidable. Completion windows are an hour here
where the scenario does not need longer ones. The worst four are played on the APIs of Anthropic, Gemini, Mistral and
Azure too. The one fault that needs a process to kill is at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from inprocess_kit import HOUR_S, Pier, chat_body, request
from service_kit import SPEED, Replica, Rig, Row

from batchferry.domain.control import CancelWish, SweepWish
from batchferry.domain.ids import BatchId
from batchferry.domain.machine import WINDOW_PASSED
from batchferry.domain.requests import GENERATE_ENDPOINT, MESSAGES_ENDPOINT
from batchferry.engine import holds
from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord
from batchferry.simulator import (
    DEFAULT_KEY,
    ClockSettings,
    Durations,
    RunCurve,
    Scenario,
    Simulator,
    SimulatorSettings,
    anthropic_world,
    body_digest,
    gemini,
    scenarios,
)
from batchferry.simulator.state import Status
from batchferry.simulator.syncgate import SyncGate
from broker import RealBroker
from broker.real import free_port

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

ROWS = 20
CHAT = "/v1/chat/completions"
WINDOW, LONG_WINDOW = "1h", "24h"
ROUTE: dict[str, Any] = {"sla_s": 72 * HOUR_S, "margin_s": 20 * HOUR_S, "max_wait_s": 600}
POLL = {"first_s": 600, "floor_s": 600, "max_s": 1800}


@dataclass(frozen=True)
class Play:
    """How a scenario is played, and how it ends. Failures are counted by class; all other rows are answered."""

    rows: int = ROWS
    failures: Mapping[str, int] = field(default_factory=dict)
    paid_again: int = 0
    """Rows whose paid answer cannot be used, so that they have to run again: the scenario leaves no other way."""
    paid_failures: int = 0
    """Answers that are paid and no results: the filter stopped them half-way."""
    has_twin: bool = False
    """A second batch runs until a sweep cancels it; what it ran has been counted as waste."""
    window: str = WINDOW
    route: Mapping[str, Any] = field(default_factory=dict)
    account: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, bytes | None], ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Members of the scenario that the hurry of a test wants otherwise."""


@dataclass(frozen=True)
class Abroad:
    """Another provider's API: how it is reached and asked, and by what an answer of it is known to be that request's."""

    root: str
    answer_id: Callable[[str], str]
    """The id of an answer, by the digest of its request."""
    endpoint: str = CHAT
    id_member: str = "id"
    account: Mapping[str, Any] = field(default_factory=dict)

    def body(self, case: str, text: str, model: str) -> dict[str, Any]:
        """A request whose words name its case."""
        chat = chat_body(case, text, model)
        if self.endpoint == MESSAGES_ENDPOINT:
            return {**chat, "max_tokens": 64}
        if self.endpoint == GENERATE_ENDPOINT:
            words = chat["messages"][0]["content"]
            return {"model": model, "contents": [{"role": "user", "parts": [{"text": words}]}]}
        return chat


HOME = Abroad("/v1", lambda digest: f"chatcmpl-{digest[:28]}")
ABROAD: dict[str, Abroad] = {
    "anthropic": Abroad("", lambda digest: f"msg_{digest[:24]}", MESSAGES_ENDPOINT),
    "gemini": Abroad(
        "/v1beta",
        lambda digest: hashlib.sha256(f"chatcmpl-{digest[:28]}".encode()).hexdigest()[:22],
        GENERATE_ENDPOINT,
        "responseId",
    ),
    "mistral": Abroad("/mistral/v1", lambda digest: digest[:28], account={"completion_window": WINDOW}),
    "azure": Abroad("/openai/v1", HOME.answer_id),
}
FAULTS = ("half_expired", "line_separators", "rows_missing", "model_not_found_rows")
"""The four of the five faults that need no process to kill."""
OUTRUN = "window_outrun-azure"
NAMES = [
    *(name for name in scenarios.names() if "openai" in scenarios.load(name).surfaces),
    *(f"{name}-{provider}" for provider in ABROAD for name in FAULTS if provider in scenarios.load(name).surfaces),
    OUTRUN,
]
"""The library at home, and the faults abroad. No job of Azure's expires: there the window is outrun instead."""

SMALL: dict[str, Any] = {"max_rows": 5}
PLAYS: dict[str, Play] = {
    "every_status": Play(route=SMALL),
    "rows_missing": Play(paid_again=2),
    "rows_unreadable": Play(paid_again=4),
    "row_errors": Play(failures={"content_filtered": 2, "too_long": 1}, paid_failures=1),
    "model_not_found_rows": Play(failures={"model_unavailable": ROWS}),
    "refused_lines": Play(failures={"invalid_request": 2}),
    "cancelling_ten_minutes": Play(window=LONG_WINDOW),
    # Nearly the whole window: on a busy machine twelve seconds are few for finding and cancelling a twin.
    "create_twice": Play(
        window=LONG_WINDOW,
        has_twin=True,
        changes={"durations": Durations(in_progress=RunCurve(minimum_s=22 * HOUR_S))},
    ),
    "provider_down": Play(window=LONG_WINDOW),
    "create_late": Play(account={"timeouts": {"create_s": 1.0}}),
    "last_line_cut": Play(paid_again=1),
    "sync_outage": Play(headers=(("priority", b"now"),), account={"sync": {"enabled": True}}),
    "webhook_gateway": Play(route=SMALL, account={"webhook": {"form": "generic", "auth": "hmac"}}),
    "webhook_late": Play(route=SMALL),
    "webhook_lost": Play(route=SMALL),
    "webhook_doubled": Play(route=SMALL),
    "webhook_reordered": Play(route=SMALL),
}
WEBHOOK_SECRET = "whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0"


def play_of(name: str) -> Play:
    """How this scenario is played."""
    return PLAYS.get(name) or PLAYS.get(name.partition("-")[0], Play())


def api_of(name: str) -> Abroad:
    """The API on which it is played."""
    return ABROAD.get(name.partition("-")[2], HOME)


def body_of(name: str, number: int) -> dict[str, Any]:
    """The request of a row."""
    return api_of(name).body(name, f"r{number}", name)


class Fleet(Pier):
    """A pier with a simulator and an account for each scenario."""

    def __init__(self, bootstrap: str, folder: Path, patch: Any) -> None:
        self.sims: dict[str, Simulator] = {}
        self.late: dict[str, str] = {}
        self.port = free_port()
        self._stack = AsyncExitStack()
        routes: dict[str, Any] = {
            name: {
                **ROUTE,
                **play_of(name).route,
                "models": [name],
                "account": name,
                "endpoint": api_of(name).endpoint,
            }
            for name in NAMES
        }
        super().__init__(
            bootstrap,
            folder,
            patch,
            routes={**routes, "default": ROUTE},
            limits={"submit_ttl_s": 4.0, "resolve_lag_s": 0.5, "lookup_pause_s": 900, "missing_grace_s": HOUR_S},
            # At an hour a second the five minutes of a signature are 83 ms: too few for a second process's turn.
            server={"enabled": True, "port": self.port, "webhooks": "in_process"},
        )

    async def _set_up(self) -> None:
        accounts: dict[str, Any] = {}
        for name in NAMES:
            play, api = play_of(name), api_of(name)
            clock = ClockSettings(speed=3600.0, origin=self.origin, started_real=self.started)
            made = SimulatorSettings(clock=clock, scenario=self.scenario(name))
            sim = self.sims[name] = await self._stack.enter_async_context(Simulator(made))
            own: dict[str, Any] = {"completion_window": play.window, "webhook_secret": WEBHOOK_SECRET}
            if api is not HOME:
                own = {"profile": name.partition("-")[2], **api.account}
            accounts[name] = {
                "base_url": f"{sim.origin_url}{api.root}",
                "api_key": DEFAULT_KEY,
                "poll": POLL,
                # Where rows travel in the create, the time of an upload is waited out as well before a batch is judged.
                "timeouts": {"create_s": 4.0, "upload_s": 1.0},
                "sync": {"enabled": False},
                **own,
                **play.account,
            }
        accounts["default"] = {"timeouts": {"create_s": 4.0}}
        self._overrides = {**self._overrides, "accounts": accounts}
        await super()._set_up()

    async def __aexit__(self, *about: object) -> None:
        try:
            await super().__aexit__(*about)
        finally:
            await self._stack.aclose()

    def scenario(self, name: str) -> Scenario:
        """The library's, with the windows and addresses of this test."""
        found = scenarios.load(name.partition("-")[0])
        changes: dict[str, Any] = {"windows": (WINDOW, LONG_WINDOW), **play_of(name).changes}
        if found.webhooks is not None:
            url = f"http://127.0.0.1:{self.port}/webhooks/{name}"
            changes["webhooks"] = found.webhooks.model_copy(update={"url": url})
        if name == "create_late":  # a client's patience is counted in real seconds, so the delay has to be longer
            changes["faults"] = tuple(one.model_copy(update={"delay_s": 3 * HOUR_S}) for one in found.faults)
        return found.model_copy(update=changes)

    async def play(self) -> None:
        """All scenarios from the beginning, at once."""
        async with asyncio.TaskGroup() as playing:
            for name in self.sims:
                playing.create_task(self._play(name))
        await self.until(lambda: not self.supervisor.status()["batches"], "every batch at its end")

    async def _play(self, name: str) -> None:
        sim, play = self.sims[name], play_of(name)
        # What the service asked at its start does not count: the story begins with the first row.
        sim.faults.clear()
        for rule in self.scenario(name).faults:
            sim.faults.put(rule)
        sim.world.sync_gate = SyncGate(sim.world.scenario, sim.clock)
        bodies = [json.dumps(body_of(name, number)).encode() for number in range(play.rows)]
        records = [request(name, f"r{number}", body=body, headers=play.headers) for number, body in enumerate(bodies)]
        await self.send(name, records)
        try:
            async with asyncio.TaskGroup() as acting:
                acting.create_task(self._act(name, sim))
                acting.create_task(self._wait(name))
        except* AssertionError as error:
            batches = [f"{one.number} {one.status}" for one in sim.world.state.batches.values()]
            self.late[name] = f"{error.exceptions}; batches {batches}; jobs {await self.jobs(name)}"

    async def _wait(self, name: str) -> None:
        await self.landed(name, 60.0)

    async def _act(self, name: str, sim: Simulator) -> None:
        """What somebody does meanwhile."""
        if name == "create_held":
            gate = sim.faults.gate("create")
            await self.until(lambda: gate.waiting, "a create at the gate")
            await gate.release()
        if play_of(name).has_twin:
            await self.until(lambda: len(sim.world.state.batches) == 2, "a batch and its twin")
            # A batch is asked for once it is on record; before, a sweep leaves all of its name alone.
            await self.until(lambda: sim.faults.calls.get("retrieve"), "the first poll")
            # In real life the hourly sweep does it; here an hour is a second, which is too soon for one.
            await self.tell(SweepWish(name, self.now))
            await self.until(
                lambda: [one for one in self.events("orphan_collected") if one["account"] == name], "the twin's end"
            )
        if name == "cancelling_ten_minutes":
            batches = sim.world.state.batches
            await self.until(
                lambda: any(
                    one.status is Status.IN_PROGRESS and one.reached_rows(sim.clock.timestamp()) >= 5
                    for one in batches.values()
                ),
                "a batch with some answers, to be cancelled",
            )
            (job,) = await self.jobs(name)
            await self.tell(CancelWish(BatchId(str(job["batch_id"])), "requeue", self.now))

    # -- the books

    def paid(self, name: str) -> list[int]:
        """How often each row was paid."""
        bill = self.sims[name].bill
        bodies = [body_of(name, number) for number in range(play_of(name).rows)]
        return [bill.paid_runs_of_body(body) for body in bodies]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """All scenarios, played."""
    with pytest.MonkeyPatch.context() as patch:
        # Hours pass here between two submissions: a hold's reason must be remembered for longer than in real life.
        patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)
        # The windows of these two are fixed at a day or two, which is too long to wait for.
        patch.setattr(anthropic_world, "WINDOW_S", HOUR_S)
        patch.setattr(gemini, "EXPIRES_AFTER", WINDOW)
        async with Fleet(broker.bootstrap, tmp_path_factory.mktemp("scenarios"), patch) as made:
            await made.play()
            yield made


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_and_nothing_paid_twice(fleet: Fleet, name: str) -> None:
    """Each record has one outcome, answers are those of their requests, the bill has no row that need not be there."""
    assert name not in fleet.late, fleet.late[name]
    play = play_of(name)
    outcomes = fleet.outcomes(name)
    failures = Counter(one.row_class for one in outcomes if not one.is_result)
    assert failures == dict(play.failures)
    for number, one in enumerate(outcomes):
        if one.is_result:
            digest = body_digest(body_of(name, number))
            assert one.said["response"]["body"][api_of(name).id_member] == api_of(name).answer_id(digest)
    paid = fleet.paid(name)
    assert [times for one, times in zip(outcomes, paid, strict=True) if one.is_result and times < 1] == []
    paid_again = sum(max(times - 1, 0) for times in paid)
    if play.has_twin:
        (twin,) = [one for one in fleet.events("orphan_collected") if one["account"] == name]
        assert paid_again == twin["rows"] < play.rows
    else:
        assert paid_again == play.paid_again
    assert sum(times for one, times in zip(outcomes, paid, strict=True) if not one.is_result) == play.paid_failures


@pytest.mark.parametrize("name", [OUTRUN, *(one for one in NAMES if one.partition("-")[0] in FAULTS)])
def test_the_fault_has_struck(fleet: Fleet, name: str) -> None:
    """What came back of a first batch is what its scenario leaves of it: half, all but every tenth row, none, or all."""
    ours = {one["batch_id"] for one in fleet.events("batch_submitted") if one["account"] == name}
    first, *later = [one for one in fleet.events("batch_landed") if one["batch_id"] in ours]
    done, rest = int(str(first["succeeded"])), sum(int(str(one["succeeded"])) for one in later)
    match name.partition("-")[0]:
        case "half_expired":
            # Gemini keeps nothing of a job that has expired.
            assert (done, rest) == ((0, ROWS) if name.endswith("gemini") else (ROWS // 2, ROWS // 2))
        case "window_outrun":
            cancelled = [one["reason"] for one in fleet.events("batch_cancel_sent") if one["batch_id"] in ours]
            assert cancelled == [WINDOW_PASSED]
            assert ROWS // 3 < done < ROWS * 2 // 3
            assert done + rest == ROWS
        case "rows_missing":
            assert (done, first["missing"], rest) == (ROWS - 2, 2, 2)
        case "model_not_found_rows":
            assert (done, later) == (0, [])
        case _:
            assert (done, later) == (ROWS, [])


def test_a_refused_signature_is_never_taken(fleet: Fleet) -> None:
    """Deliveries get through under their own signature only, and each scenario does what its name says."""
    told = {name: fleet.sims[name].deliveries for name in scenarios.names() if name.startswith("webhook_")}
    for name in ("webhook_reordered", "webhook_gateway"):
        assert {one.status for one in told[name] if one.is_forged} == {401}
    assert {one.status for one in told["webhook_late"] if one.is_late} == {400}
    taken = {name: [one.event_id for one in all_ if one.status == 200] for name, all_ in told.items()}
    assert all(taken.values())
    assert len(taken["webhook_doubled"]) > len(set(taken["webhook_doubled"]))
    assert {one.batch_id for one in told["webhook_lost"]} < set(fleet.sims["webhook_lost"].world.state.batches)
    assert fleet.telemetry.total("webhooks_received") > 0


async def test_killed_inside_create(broker: Any, kafka: AioKafka, tmp_path: Path) -> None:
    """``kill -9`` while the answer to create is on its way: the next life adopts the batch, and each row is paid once."""
    session_s = 3.0 if isinstance(broker, RealBroker) else 6.0
    async with Rig(
        kafka, broker.bootstrap, tmp_path, session_s=session_s, scenario=scenarios.load("create_held")
    ) as rig:
        rig.simulator.faults.clear()
        for rule in scenarios.load("create_held").faults:
            rig.simulator.faults.put(rule)
        one = rig.replica()
        await rig.produce(30)
        one.go()
        await rig.reached("create")
        one.kill()
        one.forget_state()
        one.go()
        await rig.release("create")
        await rig.settle_the_books()
        assert rig.provider_batches() == 1
        assert one.told("batch_adopted")


class RigAbroad(Rig):
    """One service with an account at each of the other providers; one simulator plays them all."""

    def replica(self, name: str = "one") -> Replica:
        made = super().replica(name)
        settings = yaml.safe_load(made._config.read_text())
        account, route = settings["accounts"].pop("default"), settings["routes"]["default"]
        settings["routes"].clear()
        for provider, api in ABROAD.items():
            settings["accounts"][provider] = {
                **account,
                "profile": provider,
                "base_url": f"{self.simulator.origin_url}{api.root}",
                "timeouts": {**account["timeouts"], "upload_s": 1.0},
            }
            own = {"models": [provider], "account": provider, "endpoint": api.endpoint}
            settings["routes"][provider] = {**route, **own}
        settings["routes"]["default"] = {**route, "account": "mistral"}
        made._config.write_text(yaml.safe_dump(settings, sort_keys=False))  # the first route that fits is taken
        return made

    async def produce(self, rows: int, partitions: Iterable[int] | None = None) -> None:
        """So many requests for each provider, all in one partition."""
        del partitions
        producer = self.kafka.plain_producer()
        await producer.start()
        at_ms = int((self.origin + (datetime.now(UTC) - self.started) * SPEED).timestamp() * 1000)
        records = []
        for offset in range(rows * len(ABROAD)):
            provider, api = list(ABROAD.items())[offset % len(ABROAD)]
            body = api.body("abroad", f"question {offset} of {self.tag}", provider)
            value = json.dumps({"custom_id": f"row-{offset}", "body": body}).encode()
            records.append(OutRecord(self.requests, b"key", value, (), 0, at_ms))
            self.rows.append(Row(0, offset, body))
        await producer.send(records)
        await producer.stop()

    def provider_files(self) -> list[str]:
        now = self.simulator.clock.timestamp()
        return [one.id for one in self.simulator.world.state.files.values() if one.is_there(now)]

    def provider_batches(self) -> int:
        assert self.simulator._parts is not None
        return len(self.simulator.world.state.batches) + len(self.simulator._parts.messages.messages._batches)


async def test_killed_inside_create_abroad(broker: Any, kafka: AioKafka, tmp_path: Path) -> None:
    """The same with a create at each of the other four under way: as many batches adopted, and no row paid twice."""
    session_s = 3.0 if isinstance(broker, RealBroker) else 6.0
    (rule,) = scenarios.load("create_held").faults
    async with RigAbroad(kafka, broker.bootstrap, tmp_path, session_s=session_s, max_rows=10, partitions=1) as rig:
        rig.put(**(rule.model_dump(mode="json") | {"nth": None, "until_count": len(ABROAD)}))
        one = rig.replica()
        await rig.produce(10)
        one.go()
        await rig.reached("create", len(ABROAD))
        one.kill()
        one.forget_state()
        one.go()
        await rig.release("create")
        await rig.settle_the_books()
        assert rig.provider_batches() == len(ABROAD)
        assert len({line["batch_id"] for line in one.told("batch_adopted")}) == len(ABROAD)
