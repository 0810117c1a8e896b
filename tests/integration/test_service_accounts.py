"""Several accounts, masking, the archive, webhooks and lanes: the whole service on a real broker.

What the parts promise one by one is read here off the books of the whole: what was published on the topics, which key
each call to the provider bore, what stands on the provider's bill, and what is left on anybody's disk. Time runs an
hour a second, with webhooks a minute a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import stat
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import inprocess_kit
import pytest
import pytest_asyncio
import service_kit
import yaml
from inprocess_kit import HOUR_S, QUICK, Outcome, Pier, chat_body, request
from lane_kit import due_in, lane_of
from replica_process import serve
from service_kit import SPEED, Replica, Rig
from test_service_scenarios import ABROAD, HOME, Abroad

from batchferry.domain.control import Hold
from batchferry.engine import holds
from batchferry.engine.failpoints import Failpoint, installed
from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord
from batchferry.simulator import (
    DEFAULT_KEY,
    CallName,
    ClockSettings,
    Durations,
    FaultRule,
    RunCurve,
    Scenario,
    Simulator,
    SimulatorSettings,
    body_digest,
)
from batchferry.simulator.app import ServedCall
from batchferry.simulator.errors import Refused
from batchferry.simulator.state import Status
from batchferry.simulator.webhooks import Delivery, WebhookSender, _prover
from batchferry.store.archive import LOCK_NAME
from broker import RealBroker

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

POLL = {"first_s": 600, "floor_s": 600, "max_s": 1800}
SUBMISSION = {"submit_ttl_s": 4.0, "resolve_lag_s": 0.5, "lookup_pause_s": 900}
CALLS = {"create_s": 4.0, "upload_s": 1.0}
"""Deadlines of calls, in real seconds: a create, and what is added where its rows travel in it."""


# ---------------------------------------------------------------------------------------------- who called


@dataclass(frozen=True)
class Heard:
    """A call as a provider answered it."""

    port: int
    name: str
    path: str
    key: str
    status: int


def overhear(patch: pytest.MonkeyPatch) -> list[Heard]:
    """Every call that any simulator answers from now on, with the key that it bore, in the order of the answers."""
    calls: list[Heard] = []
    serve = ServedCall._serve

    async def heard(self: ServedCall, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        key = headers.get("x-api-key") or headers.get("x-goog-api-key") or bearer

        async def answered(message: Any) -> None:
            if message["type"] == "http.response.start":
                calls.append(Heard(scope["server"][1], self._name, scope["path"], key, message["status"]))
            await send(message)

        await serve(self, scope, receive, answered)

    patch.setattr(ServedCall, "_serve", heard)
    return calls


def of(events: Iterable[Mapping[str, Any]], **fields: object) -> list[Mapping[str, Any]]:
    """Those with these fields."""
    return [one for one in events if all(one.get(name) == value for name, value in fields.items())]


def load_of(sealed: Mapping[str, Any]) -> str:
    """The slice of a sealed batch, by its key's label."""
    return str(sealed["key"]).rpartition("[")[2].rstrip("]")


def hold_for(patch: pytest.MonkeyPatch, hours: float) -> None:
    """Holds last so long, however often they come back; the minute of real life would be over in no time here."""
    patch.setattr(holds, "FIRST_PAUSE_S", hours * HOUR_S)
    patch.setattr(holds, "MAX_PAUSE_S", hours * HOUR_S)
    patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)


class Quay(Pier):
    """A pier with simulators of its own beside the default one, which nobody uses, and an ear on their calls."""

    def __init__(
        self,
        bootstrap: str,
        folder: Path,
        patch: pytest.MonkeyPatch,
        scenarios: Mapping[str, Scenario],
        keys: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> None:
        self.sims: dict[str, Simulator] = {}
        self.calls = overhear(patch)
        self._stack = AsyncExitStack()
        self._scenarios = scenarios
        self._keys = dict(keys or {DEFAULT_KEY: "project"})
        super().__init__(bootstrap, folder, patch, **overrides)

    async def _set_up(self) -> None:
        for name, script in self._scenarios.items():
            clock = ClockSettings(speed=inprocess_kit.SPEED, origin=self.origin, started_real=self.started)
            made = SimulatorSettings(clock=clock, scenario=script, keys=self._keys)
            self.sims[name] = await self._stack.enter_async_context(Simulator(made))
        accounts = {"default": {"timeouts": CALLS}, **self.accounts()}
        self._overrides = {**self._overrides, "accounts": accounts}
        await super()._set_up()

    async def __aexit__(self, *about: object) -> None:
        try:
            await super().__aexit__(*about)
        finally:
            await self._stack.aclose()

    def accounts(self) -> dict[str, Any]:
        """The accounts, now that the simulators' addresses are known."""
        raise NotImplementedError

    def calls_at(self, sim: str, name: str | None = None) -> list[Heard]:
        """Calls to a simulator."""
        port = int(self.sims[sim].origin_url.rpartition(":")[2])
        return [one for one in self.calls if one.port == port and name in {None, one.name}]

    def files_at(self, sim: str) -> list[str]:
        """Files that are still there."""
        world = self.sims[sim].world
        now = world.clock.timestamp()
        return [one.id for one in world.state.files.values() if one.is_there(now)]

    def submitted(self, **fields: object) -> list[Mapping[str, Any]]:
        """The batches made so far, as told."""
        return of(self.events("batch_submitted"), **fields)

    def paid(self, sim: str, bodies: Iterable[Mapping[str, Any]]) -> list[int]:
        """How often each of these requests was paid."""
        return [self.sims[sim].bill.paid_runs_of_body(dict(body)) for body in bodies]

    def released(self, scope: str) -> list[Mapping[str, Any]]:
        """Ends of holds of this account on the events topic."""
        return of(self.heard.events, kind="released", scope=scope)


# ------------------------------------------------------------------------------------ four providers, and lanes


@dataclass(frozen=True)
class Cargo:
    """Requests that travel together, and where they are to arrive."""

    account: str
    model: str
    api: Abroad
    window: str
    waits_h: float
    """From a record to the departure of its batch: SLA - window - margin."""
    rows: int = 4
    by_header: bool = False

    def body(self, name: str, number: int) -> dict[str, Any]:
        return self.api.body(name, f"r{number}", self.model)


SLA_H, MARGIN_H = 85.0, 10.0
LONG_ROUTE = {"sla_s": SLA_H * HOUR_S, "margin_s": MARGIN_H * HOUR_S, "max_rows": 4}
SHORT_ROUTE = {"sla_s": 20 * HOUR_S, "margin_s": 10 * HOUR_S, "max_wait_s": 1200.0}
CARGOES = {
    "by_default": Cargo("default", "gpt-4o-mini", HOME, "24h", 51),
    "by_pattern": Cargo("gemini", "gemini-2.5-flash", ABROAD["gemini"], "48h", 27),
    "by_pattern_late": Cargo("mistral", "mistral-small", ABROAD["mistral"], "72h", 3, rows=3),
    "by_header": Cargo("anthropic", "claude-haiku-4-5", ABROAD["anthropic"], "24h", 51, by_header=True),
    "by_header_late": Cargo("mistral", "gpt-4o-mini", HOME, "72h", 3, rows=3, by_header=True),
}
"""The late ones leave by their time, with three rows; the others would wait for a day, and leave with their fourth."""
LANES = {"chat": "qwen-plus", "plain": "plain-model"}
PRICES = {"*": {"input_usd": 1.0, "output_usd": 2.0, "batch_share": 0.5}}
LATE_H = 9.5
"""Due so soon: cancelled after 4.5 h (lead + cancel before), called after 7.5 h, and the batch ends after 10 h. As no row
is late before 8 h (window + lead), and no batch expires before 6 h, each step has an hour and a half to spare."""
FORBIDDEN_FILE = FaultRule(call=CallName.CONTENT, status=403, error_type="permission_error")


class Port(Quay):
    """Every account of the first tests, at one service."""

    def __init__(self, bootstrap: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        endless = QUICK.model_copy(
            update={"in_progress": RunCurve(minimum_s=400 * HOUR_S), "cancelling_s": 5.5 * HOUR_S}
        )
        routes: dict[str, Any] = {
            "gemini": {
                **LONG_ROUTE,
                "models": ["gemini-*"],
                "account": "gemini",
                "endpoint": ABROAD["gemini"].endpoint,
            },
            "mistral": {**LONG_ROUTE, "models": ["mistral-*"], "account": "mistral"},
            "chat": {**SHORT_ROUTE, "models": ["qwen-*"], "account": "chat", "lane": "sync"},
            "plain": {**SHORT_ROUTE, "models": ["plain-*"], "lane": "sync"},
            **{
                name: {**SHORT_ROUTE, "models": [name], "account": name, "max_rows": 4}
                for name in ("once", "twice", "late")
            },
            "default": LONG_ROUTE,
        }
        # The default one has no window; a batch-chat lane waits for none.
        routes["chat"]["sla_s"] = routes["plain"]["sla_s"] = 48 * HOUR_S
        super().__init__(
            bootstrap,
            folder,
            patch,
            {
                "home": Scenario(durations=QUICK),
                "chat": Scenario(),
                "once": Scenario(durations=QUICK, windows=("6h",)),
                "twice": Scenario(durations=QUICK, windows=("6h",)),
                "late": Scenario(durations=endless, windows=("6h",)),
            },
            {DEFAULT_KEY: "project", **{f"key-of-{one.account}": one.account for one in CARGOES.values()}},
            routes=routes,
            limits=SUBMISSION,
            rescue_lead_s=2 * HOUR_S,
            cancel_s=3 * HOUR_S,
        )

    def accounts(self) -> dict[str, Any]:
        home = self.sims["home"].origin_url
        common = {"poll": POLL, "timeouts": CALLS, "sync": {"enabled": False}, "max_concurrent_calls": 32}
        lane = {"enabled": True, "call_timeout_s": 30}
        found: dict[str, Any] = {
            name: {**common, "base_url": f"{home}{api.root}", "api_key": f"key-of-{name}", "profile": name}
            for name, api in ABROAD.items()
            if name != "azure"
        }
        found["mistral"]["completion_window"] = "72h"
        found["default"] = {
            **common,
            "base_url": f"{home}/v1",
            "api_key": "key-of-default",
            "sync": lane,
            "prices": PRICES,
        }
        for name in ("once", "twice", "late"):
            found[name] = {**common, "base_url": self.sims[name].base_url, "completion_window": "6h"}
        found["late"]["sync"] = lane
        found["chat"] = {
            **common,
            "profile": "dashscope",
            # The batches of this account would go elsewhere: only the lane's address is answered.
            "base_url": f"{self.sims['chat'].origin_url}/nobody",
            "dialect": {"sync_base_url": self.sims["chat"].base_url},
            "sync": {**lane, "batch_chat": True},
            "prices": PRICES,
        }
        return found

    # -- what is played

    async def play(self) -> None:
        """Everything at once."""
        async with asyncio.TaskGroup() as playing:
            for act in (self._ship, self._call, self._forbid_once, self._forbid_twice, self._come_late):
                playing.create_task(act())
        await self.until(lambda: not self.supervisor.status()["batches"], "every batch at its end")

    async def _load(self, name: str, numbers: Iterable[int]) -> None:
        cargo = CARGOES[name]
        await self.send(
            name,
            [
                request(
                    name,
                    f"r{number}",
                    body=json.dumps(cargo.body(name, number)).encode(),
                    headers=[("provider", cargo.account.encode())] if cargo.by_header else [],
                    url=cargo.api.endpoint if cargo.by_header else None,
                )
                for number in numbers
            ],
        )

    async def _ship(self) -> None:
        for name in CARGOES:
            await self._load(name, range(3))
        self.seen_waiting: dict[str, Any] = {}

        def waiting() -> bool:
            for one in self.supervisor.intake.accumulator:
                if one.rows == 3:
                    self.seen_waiting.setdefault(one.key.slice, (one.key, one.ship_by_ms - one.oldest_t0_ms))
            return CARGOES.keys() <= self.seen_waiting.keys()

        await self.until(waiting, "three rows of each cargo waiting")
        for name, cargo in CARGOES.items():
            if cargo.rows == 4:
                await self._load(name, [3])
        for name in CARGOES:
            await self.landed(name)

    async def _call(self) -> None:
        for name, model in LANES.items():
            await self.send(name, [request(name, f"r{number}", model=model) for number in range(3)])
        for name in LANES:
            await self.landed(name)

    async def _forbid_once(self) -> None:
        self.sims["once"].faults.put(FORBIDDEN_FILE.model_copy(update={"until_count": 1}))
        await self.send("once", [request("once", f"r{number}", model="once") for number in range(4)])
        await self.landed("once")

    async def _forbid_twice(self) -> None:
        self.sims["twice"].faults.put(FORBIDDEN_FILE.model_copy(update={"until_count": 2}))
        await self.send("twice", [request("twice", f"r{number}", model="twice") for number in range(4)])
        await self.until(lambda: of(self.events("key_held"), label="twice"), "the account's hold")
        await self.send("twice", [request("twice", f"s{number}", model="twice") for number in range(4)])
        await self.landed("twice")
        await self.until(lambda: self.released("twice"), "the hold's end")

    async def _come_late(self) -> None:
        due = due_in(self, LATE_H)
        await self.send("late", [request("late", f"r{number}", model="late", headers=[due]) for number in range(4)])
        await self.landed("late")
        await self.until(lambda: self.telemetry.total("waste_rows", lane="batch"), "the late answers, counted as waste")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Port]:
    """All of it, played."""
    with pytest.MonkeyPatch.context() as patch:
        hold_for(patch, 2.0)
        async with Port(broker.bootstrap, tmp_path_factory.mktemp("port"), patch) as made:
            await made.play()
    yield made  # the books are read when all is over: nothing of it has to run meanwhile


def test_four_accounts_each_in_its_own_shape(port: Port) -> None:
    """By header, by model and by default: every row is answered by its provider, in that provider's form, paid once."""
    for name, cargo in CARGOES.items():
        outcomes = port.outcomes(name)
        assert len(outcomes) == cargo.rows
        bodies = [cargo.body(name, number) for number in range(cargo.rows)]
        assert port.paid("home", bodies) == [1] * cargo.rows
        # The answer is made by whom the account names, also where the request is in the form of OpenAI.
        api = ABROAD.get(cargo.account, HOME)
        for body, one in zip(bodies, outcomes, strict=True):
            assert one.row_class == "succeeded"
            assert one.said["batch"]["account"] == cargo.account
            assert one.said["batch"]["completion_window"] == cargo.window
            assert one.said["response"]["body"][api.id_member] == api.answer_id(body_digest(body))
    assert port.sims["home"].bill.summary()["batch_runs"] == sum(one.rows for one in CARGOES.values())


def test_windows_decide_when_a_batch_leaves(port: Port) -> None:
    """One SLA and margin: the longer an account's window, the sooner its rows leave; and so they did leave."""
    for name, cargo in CARGOES.items():
        key, waits_ms = port.seen_waiting[name]
        assert (key.account, key.completion_window) == (cargo.account, cargo.window)
        assert waits_ms == cargo.waits_h * HOUR_S * 1000
    sealed = {load_of(one): one["reason"] for one in port.events("batch_sealed")}
    assert {name: sealed[name] for name in CARGOES} == {
        name: "time" if cargo.rows == 3 else "count" for name, cargo in CARGOES.items()
    }


def test_a_batch_is_followed_with_the_key_that_made_it(port: Port) -> None:
    """Create, polls, results and deletes of a batch bear its account's key; the provider refuses none of them."""
    calls = port.calls_at("home")
    assert [one for one in calls if one.status >= 400] == []
    landed = {one["batch_id"]: one for one in port.events("batch_landed")}
    made = [one for one in port.submitted() if one["account"] in {cargo.account for cargo in CARGOES.values()}]
    assert len(made) == len(CARGOES)
    for one in made:
        assert one["batch_id"] in landed
        name = str(one["provider_batch_id"]).rpartition("/")[2]
        about = [call for call in calls if name in call.path]
        assert CallName.RETRIEVE in {call.name for call in about}
        assert {call.key for call in about} == {f"key-of-{one['account']}"}
    fetched = Counter(call.key for call in port.calls_at("home", CallName.CONTENT))
    assert fetched == Counter(f"key-of-{cargo.account}" for cargo in CARGOES.values())
    assert port.files_at("home") == []


def test_batch_chat_is_paid_like_a_batch(port: Port) -> None:
    """A lane of single calls at half the price, and one at the full price; neither makes a batch or a file."""
    for name, model in LANES.items():
        outcomes = port.outcomes(name)
        assert {one.row_class for one in outcomes} == {"succeeded"}
        assert {lane_of(one) for one in outcomes} == {"sync"}
        costs = [(float(one.said["cost"]["usd"]), float(one.said["cost"]["sync_usd"])) for one in outcomes]
        share = 0.5 if name == "chat" else 1.0
        assert all(paid == pytest.approx(listed * share) and paid > 0 for paid, listed in costs)
        sim = "chat" if name == "chat" else "home"
        counted = [port.sims[sim].bill.body(chat_body(name, f"r{number}", model)) for number in range(3)]
        assert [(one.batch_runs, one.sync_runs, one.paid_runs) for one in counted] == [(0, 1, 1)] * 3
    assert {one.name for one in port.calls_at("chat") if one.status == 200} == {CallName.SYNC}
    assert {one.key for one in port.calls_at("home", CallName.SYNC)} == {"key-of-default"}


def test_a_stale_link_is_asked_for_again(port: Port) -> None:
    """403 on a result file: the batch is read again, and the file fetched by what that shows; nobody is held."""
    assert {one.row_class for one in port.outcomes("once")} == {"succeeded"}
    told = [(one.name, one.status) for one in port.calls_at("once")]
    refused = told.index((CallName.CONTENT, 403))
    assert (CallName.CONTENT, 200) in told[refused:]
    between = told[refused : told.index((CallName.CONTENT, 200))]
    assert {name for name, _ in between[1:]} & {CallName.RETRIEVE, CallName.LIST}
    assert of(port.events("key_held"), label="once") == []
    assert port.paid("once", [chat_body("once", f"r{number}", "once") for number in range(4)]) == [1] * 4


def test_a_second_403_holds_the_account(port: Port) -> None:
    """New rows wait until the hold has ended and one batch was taken; the results are fetched, and nothing runs twice."""
    outcomes = port.outcomes("twice")
    assert {one.row_class for one in outcomes} == {"succeeded"}
    (held,) = of(port.events("key_held"), label="twice")
    assert (held["reason"], held["times"]) == ("account", 1)
    contents = [one.status for one in port.calls_at("twice", CallName.CONTENT)]
    assert contents[:3] == [403, 403, 200]
    _, second = port.submitted(account="twice")
    (released,) = of(port.events("key_released"), label="twice")
    assert released["reason"] == "account"
    told = [fields for name, fields in port.telemetry.events if name in {"key_held", "batch_submitted"}]
    assert told.index(dict(held)) < told.index(dict(second))
    (of_second,) = {one.said["batch"]["submitted_at"] for one in outcomes[4:]}
    assert datetime.fromisoformat(of_second) >= datetime.fromisoformat(held["until"])
    bodies = [chat_body("twice", f"{kind}{number}", "twice") for kind in "rs" for number in range(4)]
    assert port.paid("twice", bodies) == [1] * 8


def test_late_results_of_a_rescued_batch_are_waste(port: Port) -> None:
    """Rows called because their batch would not end in time have one outcome; its answers are counted, its files go."""
    outcomes = port.outcomes("late")
    assert {lane_of(one) for one in outcomes} == {"sync"}
    assert all(one.said["deadline_met"] for one in outcomes)
    (batch,) = port.sims["late"].world.state.batches.values()
    assert (batch.status, batch.completed) == (Status.CANCELLED, 4)
    assert port.telemetry.total("waste_rows", lane="batch") == 4
    counted = [port.sims["late"].bill.body(chat_body("late", f"r{number}", "late")) for number in range(4)]
    assert [(one.batch_runs, one.sync_runs, one.paid_runs) for one in counted] == [(1, 1, 2)] * 4
    assert port.files_at("late") == []
    gone = {one["file_id"] for one in port.events("provider_file_deleted")}
    assert {batch.input_file_id, batch.output_file_id} <= gone
    # Rescued, of the batch at the provider, and paid for all the same: the books say so on the events topic.
    assert of(port.heard.events, kind="rescued") != []


# ------------------------------------------------------------------------------------------- a second account


FIRSTS = ("keyed", "quota")
"""Two pairs of accounts: the first key of one is revoked for a while, of the other has no quota left."""
PAUSE_H = 40.0
"""Longer than anybody waits: the test says when it is over."""


class Pairs(Quay):
    """Two pairs of accounts at one provider, each with a key and a project of its own."""

    def __init__(self, bootstrap: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        # As long as it takes to see what becomes of a batch that is under way when its account is held.
        slow = QUICK.model_copy(update={"in_progress": RunCurve(minimum_s=3 * HOUR_S, factor_s=0.0)})
        names = [f"{pair}-{which}" for pair in FIRSTS for which in ("first", "second")]
        routes: dict[str, Any] = {
            pair: {
                "sla_s": 60 * HOUR_S,
                "margin_s": 20 * HOUR_S,
                "max_rows": 3,
                "models": [pair],
                "account": f"{pair}-first",
                "fallback": [f"{pair}-second"],
            }
            for pair in FIRSTS
        }
        super().__init__(
            bootstrap,
            folder,
            patch,
            {"home": Scenario(durations=slow)},
            {DEFAULT_KEY: "project", **{f"key-of-{name}": name for name in names}},
            routes={**routes, "default": {"sla_s": 60 * HOUR_S, "margin_s": 20 * HOUR_S}},
            limits=SUBMISSION,
        )
        self._names = names

    def accounts(self) -> dict[str, Any]:
        common = {"poll": POLL, "timeouts": CALLS, "sync": {"enabled": False}, "base_url": self.sims["home"].base_url}
        return {name: {**common, "api_key": f"key-of-{name}"} for name in self._names}

    # -- what befalls the first ones

    def refuse(self, patch: pytest.MonkeyPatch) -> None:
        """The one's key is no longer known, the other's project may create nothing."""
        home = self.sims["home"]
        surface = home._parts.surface  # type: ignore[union-attr]
        known = [pair for pair in surface._keys if pair[1] != "keyed-first"]
        assert len(known) == len(surface._keys) - 1
        patch.setattr(surface, "_keys", known)
        create = home.world.create

        def no_quota(project: str, wanted: Any) -> Any:
            if project == "quota-first":
                raise Refused(
                    429,
                    "You exceeded your current quota.",
                    error_type="insufficient_quota",
                    code="insufficient_quota",
                )
            return create(project, wanted)

        patch.setattr(home.world, "create", no_quota)

    async def load(self, name: str) -> None:
        """Three rows for each pair: a batch."""
        for pair in FIRSTS:
            rows = [request(f"{pair}-{name}", f"r{number}", model=pair) for number in range(3)]
            await self.send(f"{pair}-{name}", rows)

    async def all_submitted(self, name: str) -> None:
        """The batches of these rows are at the provider."""

        def all_there() -> bool:
            return {f"{pair}-{name}" for pair in FIRSTS} <= self.account_of().keys()

        await self.until(all_there, f"the batches of {name}")

    async def end_holds(self) -> None:
        """The time of every hold is up."""
        for one in self.events("key_held"):
            until = self.now + timedelta(minutes=1)
            await self.tell(Hold(str(one["scope"]), str(one["reason"]), self.now, until, 1, str(one["label"])))
        await self.until(lambda: not self.supervisor.status()["holds"], "the end of the holds")

    def account_of(self) -> dict[str, set[str]]:
        """The accounts that made batches of each load."""
        loads = {one["batch_id"]: load_of(one) for one in self.events("batch_sealed")}
        found: dict[str, set[str]] = {}
        for one in self.submitted():
            if one["batch_id"] in loads:
                found.setdefault(loads[one["batch_id"]], set()).add(str(one["account"]))
        return found


async def test_a_second_account_takes_over_while_the_first_is_held(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by 401 or for its quota the first account is held: new rows go to the second, across a restart too, rows
    sent before stay, and what was under way is fetched with its own key. After the hold new rows go to the first.
    """
    hold_for(monkeypatch, PAUSE_H)
    firsts = {f"{pair}-first" for pair in FIRSTS}
    async with Pairs(broker.bootstrap, tmp_path, monkeypatch) as pier:
        await pier.load("before")
        await pier.all_submitted("before")
        with monkeypatch.context() as refused:
            pier.refuse(refused)
            await pier.load("struck")
            await pier.until(
                lambda: firsts <= {one["label"] for one in pier.events("key_held")}, "both first accounts held"
            )
            await pier.load("during")
            await pier.all_submitted("during")
        await pier.stop()
        await pier.start()
        await pier.load("restarted")
        await pier.all_submitted("restarted")
        await pier.end_holds()
        await pier.load("after")
        loads = [f"{pair}-{name}" for pair in FIRSTS for name in ("before", "struck", "during", "restarted", "after")]
        for name in loads:
            await pier.landed(name)
        await pier.until(lambda: all(pier.released(name) for name in firsts), "the end of both holds, told")
        await pier.until(lambda: not pier.supervisor.status()["batches"], "every batch at its end")

        for pair in FIRSTS:
            for name in ("before", "struck", "during", "restarted", "after"):
                outcomes = pier.outcomes(f"{pair}-{name}")
                which = "second" if name in {"during", "restarted"} else "first"
                assert {(one.row_class, one.said["batch"]["account"]) for one in outcomes} == {
                    ("succeeded", f"{pair}-{which}")
                }, name
                assert all(one.said["attempts"] == {} for one in outcomes), "a hold is nobody's failed attempt"
                bodies = [chat_body(f"{pair}-{name}", f"r{number}", pair) for number in range(3)]
                assert pier.paid("home", bodies) == [1] * 3
        assert {one["scope"] for one in of(pier.heard.events, kind="held")} == firsts
        for one in pier.submitted():
            about = [call for call in pier.calls_at("home") if str(one["provider_batch_id"]) in call.path]
            assert {call.key for call in about} == {f"key-of-{one['account']}"}
        statuses = Counter((call.key, call.status) for call in pier.calls_at("home") if call.status >= 400)
        assert statuses.keys() == {("key-of-keyed-first", 401), ("key-of-quota-first", 429)}
        assert pier.files_at("home") == []


# ------------------------------------------------------------------------------------- masking and the archive


SECRETS = {
    "email": "jane.doe@example.org",
    "phone": "+49 30 9018 2045",
    "card": "4111 1111 1111 1111",
    "national-id": "536-22-1234",
    "iban": "DE89 3704 0044 0532 0130 00",
}
WORDS = {
    "plain": "what is the capital of France?",
    "address": f"write to {SECRETS['email']} and again to {SECRETS['email']}",
    "papers": f"I am {SECRETS['national-id']}, pay {SECRETS['card']} into {SECRETS['iban']}",
    "wobbly": f"wobbly: call {SECRETS['phone']}",
    "unwelcome": f"unwelcome: {SECRETS['email']} or {SECRETS['phone']}",
}
PLACES = {"plain": 0, "address": 2, "papers": 3, "wobbly": 1, "unwelcome": 2}
TOO_LONG = f"{SECRETS['email']} " + "x" * 3000
MASK_BYTES = 2000


def traces(*folders: Path) -> dict[str, list[str]]:
    """Files under these folders (or these files) in which personal data stands, with what stands there."""
    needles = [*SECRETS.values(), *("".join(one.split()) for one in SECRETS.values())]
    found: dict[str, list[str]] = {}
    for folder in folders:
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                stands = [one for one in needles if one.encode() in data]
                if stands:
                    found[path.name] = stands
    return found


def holds_text(folder: Path, text: str) -> bool:
    """Whether some file under the folder has it."""
    return any(text.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def local_results(state: Path) -> list[Path]:
    """Result files in a state folder."""
    return [path for path in state.rglob("*result*") if path.is_file()]


def serve_until_results_are_read(config: str, log: str) -> None:
    """What a replica's process runs: it stops dead before the first transaction that would settle a row of a batch."""
    are_here = False

    def stop(place: Failpoint) -> None:
        nonlocal are_here
        are_here = are_here or place is Failpoint.RESULTS_DOWNLOADED
        if are_here and place is Failpoint.SETTLE_BEFORE:
            os.kill(os.getpid(), signal.SIGSTOP)

    with installed(stop):
        serve(config, log)


class Vault(Rig):
    """A replica that masks and archives, beside a provider that keeps all files."""

    @property
    def archive(self) -> Path:
        return self.folder / "archive"

    @property
    def at_provider(self) -> Path:
        assert self.simulator._parts is not None
        return self.simulator._parts.state.folder

    def replica(self, name: str = "one") -> Replica:
        made = super().replica(name)
        settings = yaml.safe_load(made._config.read_text())
        settings["mask"] = {"masker": "stock", "max_body_bytes": MASK_BYTES}
        settings["archive"] = {"folder": str(self.archive)}
        settings["log"]["level"] = "debug"
        settings["limits"]["spool_buffer_bytes"] = 1
        settings["accounts"]["default"]["keep_files"] = True
        settings["routes"]["default"] |= {"max_rows": len(WORDS), "sla_s": 60 * HOUR_S, "max_wait_s": 6 * HOUR_S}
        made._config.write_text(yaml.safe_dump(settings))
        return made

    async def send(self, named: Mapping[str, str]) -> None:
        """These words as requests, in partition 0."""
        producer = self.kafka.plain_producer()
        await producer.start()
        at_ms = int((self.origin + (datetime.now(UTC) - self.started) * SPEED).timestamp() * 1000)
        records = []
        for name, words in named.items():
            body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": words}]}
            value = json.dumps({"custom_id": name, "body": body}).encode()
            records.append(OutRecord(self.requests, b"key", value, (), 0, at_ms))
        await producer.send(records)
        await producer.stop()

    def said(self) -> dict[str, list[dict[str, Any]]]:
        """Outcomes by custom id."""
        found: dict[str, list[dict[str, Any]]] = {}
        for records in self.outcomes.values():
            for record in records:
                one = json.loads(record.value or b"")
                found.setdefault(one["custom_id"], []).append(one)
        return found


async def test_what_is_personal_stays_at_home_and_results_are_kept_once(
    broker: Any, kafka: AioKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked before the spool, so in no file of ours or the provider's, in no log and no topic of ours, and the same
    again when a row travels twice. Result files are in the archive, private, whole and once, though a process that
    was killed before it settled a row of them had read them before its successor did; the local ones are gone.
    """
    session_s = 3.0 if isinstance(broker, RealBroker) else 6.0
    scenario = Scenario.model_validate(
        {
            "durations": QUICK.model_dump(),
            "rows": [
                {"match": {"body_contains": "wobbly"}, "outcome": "http_error", "status": 500, "first_attempts": 1},
                {"match": {"body_contains": "unwelcome"}, "outcome": "http_error", "status": 400},
            ],
        }
    )
    async with Vault(kafka, broker.bootstrap, tmp_path, session_s=session_s, scenario=scenario, partitions=1) as rig:
        state = rig.folder / "one" / "state"
        one = rig.replica()
        with monkeypatch.context() as patch:
            patch.setattr(service_kit, "serve", serve_until_results_are_read)
            one.go()

        async def ready() -> bool:
            return await one.owned() == {0}

        await rig.until(ready, "a replica that has the partition")
        *early, last = WORDS
        await rig.send({**{name: WORDS[name] for name in early[:-1]}, "too_long": TOO_LONG})
        await rig.until(lambda: "too_long" in rig.said(), "the refusal")
        await rig.send({early[-1]: WORDS[early[-1]]})  # with further rows the earlier ones are written out

        async def spooled() -> bool:
            return await one.waiting_rows() == len(early) and holds_text(state, "<national-id-1>")

        await rig.until(spooled, "the rows that may travel, waiting on disk")
        assert traces(state, one.log) == {}
        await rig.send({last: WORDS[last]})
        await rig.until(lambda: len(one.told("result_archived")) == 2, "both result files in the archive")
        assert len(local_results(state)) == 2
        assert holds_text(rig.at_provider, "<card-1>")
        assert traces(state, one.log, rig.at_provider) == {}
        one.kill()
        assert rig.said().keys() == {"too_long"}
        one.go()
        await rig.until(lambda: WORDS.keys() <= rig.said().keys(), "an outcome of each request", 40)

        async def at_rest() -> bool:
            return not (await one.status())["batches"]

        await rig.until(at_rest, "every batch at its end")
        assert local_results(state) == []
        assert await one.terminate() == 0
        one._seen_to = 0

        # Topics.
        said = rig.said()
        assert {name: len(found) for name, found in said.items()} == dict.fromkeys([*WORDS, "too_long"], 1)
        for name, places in PLACES.items():
            assert said[name][0].get("masked", 0) == places
            assert said[name][0]["kind"] == ("failure" if name == "unwelcome" else "result")
        assert "<email-1>" in said["unwelcome"][0]["original"]["value"]
        refused = said["too_long"][0]
        assert (refused["error"]["code"], refused.get("original")) == ("not_maskable", None)
        published = tmp_path / "published"
        published.write_text(json.dumps(said))
        assert traces(published, one.log, state, rig.at_provider, rig.archive) == {}

        # The provider: what a row says the second time is byte for byte what it said the first time.
        uploads = [path.read_bytes() for path in rig.at_provider.rglob("*") if path.is_file()]
        sent = [line for data in uploads for line in data.split(b"\n") if b"wobbly" in line and b'"method"' in line]
        assert len(sent) == 2
        first, again = (line.partition(b'"method"')[2] for line in sent)
        assert first == again
        assert b"<phone-1>" in first
        asked = json.loads(sent[0])["body"]
        counted = rig.simulator.bill.body(asked)
        assert (counted.batch_runs, counted.paid_runs, said["wobbly"][0]["attempts"]) == (2, 1, {"transient": 1})

        # The archive.
        kept = {path.name: path for path in rig.archive.iterdir() if path.name != LOCK_NAME}
        archived = one.told("result_archived")
        fetched = one.told("batch_downloaded")
        assert stat.S_IMODE(rig.archive.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in kept.values()} == {0o600}
        named = {f"{one['batch_id']}.{one['file_kind']}.{one['sha256']}.jsonl": int(one["bytes"]) for one in archived}
        assert {name: path.stat().st_size for name, path in kept.items()} == named
        assert len(archived) == len(named) == 3  # two files of the first batch, one of the second
        for name, path in kept.items():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == name.split(".")[2]
        assert {line["sha256"] for line in fetched} == {line["sha256"] for line in archived}
        times = Counter((line["batch_id"], line["file_kind"]) for line in fetched)
        assert sorted(times.values()) == [1, 2, 2]


# ----------------------------------------------------------------------------------------------- webhooks


STANDARD_SECRET = "whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0"
PLAIN_SECRET = "a-gateways-own-shared-secret"
HOOKS: dict[str, dict[str, Any]] = {
    "openai": {"api": HOME, "secret": STANDARD_SECRET, "webhook": {}, "script": {"auth": "standard"}},
    "gemini": {
        "api": ABROAD["gemini"],
        "secret": STANDARD_SECRET,
        "webhook": {},
        "script": {"auth": "standard"},
    },
    "gateway": {
        "api": HOME,
        "secret": PLAIN_SECRET,
        "webhook": {"form": "generic", "auth": "hmac", "header_prefix": "sha256="},
        "script": {"form": "generic", "auth": "hmac", "header_prefix": "sha256=", "tells_progress": True},
    },
}
MINUTE_A_SECOND = 60.0
FIRST_POLL_S = 1800.0
"""Half a minute of ours: what lands sooner was told of."""


class Told(Quay):
    """A service that takes webhooks in a process of its own, at a port that is known when it listens."""

    def __init__(self, bootstrap: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        quick = Durations(validating_s=5.0, in_progress=RunCurve(minimum_s=10.0, factor_s=0.0), finalizing_s=3.0)
        route = {"sla_s": 100 * HOUR_S, "margin_s": 20 * HOUR_S, "max_wait_s": 600, "max_rows": 3}
        super().__init__(
            bootstrap,
            folder,
            patch,
            {
                name: Scenario.model_validate(
                    {
                        "durations": quick.model_dump(),
                        "webhooks": {
                            "url": "http://127.0.0.1:9/",
                            "secret": hook["secret"],
                            "forge_every": 1,
                            **hook["script"],
                        },
                    }
                )
                for name, hook in HOOKS.items()
            },
            routes={
                **{
                    name: {**route, "models": [name], "account": name, "endpoint": hook["api"].endpoint}
                    for name, hook in HOOKS.items()
                },
                "default": route,
            },
            limits=SUBMISSION,
            server={"enabled": True, "port": 0, "webhooks": "own_process", "webhook_port": 0},
        )

    def accounts(self) -> dict[str, Any]:
        return {
            name: {
                **({"profile": name} if name in ABROAD else {}),
                "base_url": f"{self.sims[name].origin_url}{hook['api'].root}",
                "poll": {"first_s": FIRST_POLL_S, "floor_s": 30, "max_s": FIRST_POLL_S},
                "timeouts": CALLS,
                "sync": {"enabled": False},
                "webhook_secret": hook["secret"],
                "webhook": hook["webhook"],
            }
            for name, hook in HOOKS.items()
        }

    @property
    def child(self) -> Any:
        """The webhook process as the service sees it."""
        assert self.service is not None
        return self.service._webhooks

    async def start(self, **overrides: Any) -> None:
        await super().start(**overrides)
        assert self.service is not None
        for name in HOOKS:
            sender = self.sender(name)
            script = sender._script.model_copy(update={"url": f"{self.service.webhook_address}/webhooks/{name}"})
            sender._script = script
            sender._prove = _prover(script, script.secret.get_secret_value())
            sender._forge = _prover(script, b"somebody else's key of 32 bytes.")
        await self.until(self.child.is_up.is_set, "a webhook process")

    def sender(self, name: str) -> WebhookSender:
        """Who delivers for the simulator of this name."""
        parts = self.sims[name]._parts
        assert parts is not None
        assert parts.webhooks is not None
        return parts.webhooks

    def forged(self, name: str) -> list[Delivery]:
        """Deliveries under somebody else's signature; there is one before each true one."""
        return [one for one in self.sims[name].deliveries if one.is_forged]

    async def all_counted(self) -> None:
        """Every delivery has been answered, and each refusal is in the metrics: its process tells of them now and then."""

        def counted() -> bool:
            total = self.telemetry.total
            return all(
                not self.sender(name)._sending
                and total("webhooks_received", account=name, outcome="bad_signature") == len(self.forged(name)) > 0
                for name in HOOKS
            )

        await self.until(counted, "the count of refused deliveries", 10)

    async def load(self, name: str) -> None:
        """Three rows for each account."""
        for account, hook in HOOKS.items():
            case = f"{account}-{name}"
            bodies = [json.dumps(hook["api"].body(case, f"r{number}", account)).encode() for number in range(3)]
            await self.send(case, [request(case, f"r{number}", body=body) for number, body in enumerate(bodies)])

    async def all_landed(self, name: str, limit_s: float) -> None:
        """All of them have their answers, each paid once."""
        for account, hook in HOOKS.items():
            case = f"{account}-{name}"
            found: list[Outcome] = await self.landed(case, limit_s)
            assert {one.row_class for one in found} == {"succeeded"}
            assert self.paid(account, [hook["api"].body(case, f"r{number}", account) for number in range(3)]) == [1] * 3


async def test_webhooks_bring_polls_forward_and_survive_their_process(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends are told to a process of its own and land long before the first poll; forged deliveries are refused and
    counted; the process is killed, a batch ends meanwhile, and its successor is told of it: nothing is lost or doubled.
    """
    monkeypatch.setattr(inprocess_kit, "SPEED", MINUTE_A_SECOND)
    async with Told(broker.bootstrap, tmp_path, monkeypatch) as pier:
        assert pier.service is not None
        assert pier.service.webhook_address != pier.service.admin_address
        began = pier.now
        await pier.load("one")
        await pier.all_landed("one", 20)
        assert (pier.now - began).total_seconds() < FIRST_POLL_S, "too slow a machine, or nobody was told"

        await pier.all_counted()  # what the process has not told of would die with it

        began, pid = pier.now, pier.child.pid
        os.kill(pid, signal.SIGKILL)
        await pier.until(lambda: not pier.child.is_up.is_set(), "the process's end to be noticed")
        await pier.load("two")
        await pier.all_landed("two", 20)
        assert (pier.now - began).total_seconds() < FIRST_POLL_S
        assert pier.child.status()["ends"] == 1
        assert pier.child.pid not in {None, pid}
        assert [one["reason"] for one in pier.events("webhook_process_ended")] == ["ended"]

        await pier.load("three")
        await pier.all_landed("three", 20)
        told = {one["provider_batch_id"] for one in pier.events("webhook_received")}
        assert told == {one["provider_batch_id"] for one in pier.submitted()}

        await pier.all_counted()
        assert {one.status for name in HOOKS for one in pier.forged(name)} == {401}
        for name in HOOKS:
            assert pier.telemetry.total("webhooks_received", account=name, outcome="poked") > 0
        await pier.until(lambda: not pier.supervisor.status()["batches"], "every batch at its end")
