"""Written lives, the same at every port: what anybody who relies on batches has met, and a thousand customers' questions.

Two replicas with a partition each, and one of five faults: half of a batch expires, answers hold U+2028, a tenth of
the rows is missing, every row is rejected for its model, or the process is killed in the middle of a create.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from batchferry.engine.failpoints import Failpoint
from batchferry.ports import OutRecord
from batchferry.simulator import Scenario, scenarios
from sim.books import Request
from sim.families import ANTHROPIC, FAMILIES, Family, batches_of, our_batch_id
from sim.host import Host
from sim.life import HOUR_S, TOPICS, Bomb, Outcome, World, live
from sim.provider import CALLER, WireRates

ROWS = 40
SEED = 1
SETTLED_S = 12.0
"""Real seconds until both replicas have their partition."""
PATIENCE_S = 600.0
"""Real seconds that a written life waits for something that must happen."""
MAX_WAIT_S = 1800.0
"""Of the service's time, until the rows that have come leave."""
AWAY_S = 6.0
"""Real seconds for which the model is away, after its first refusal."""
BACK_S = 3.0
"""Real seconds until a killed replica is back."""
PACE: Mapping[str, Any] = {
    "validating_s": 60,
    "in_progress": {"minimum_s": HOUR_S, "factor_s": 0},
    "finalizing_s": 60,
    "cancelling_s": 60,
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a life."""

    scenario: str = "calm"
    """Of the simulator's library."""
    bomb: Failpoint | None = None
    """Where a process is killed, the first time it is reached."""
    reply: str = ""
    """What becomes of the answer to the first create: ``dies`` with the process that waits for it, or is ``lost``."""
    model_away: bool = False
    """The model may not be used in batches until ``AWAY_S`` after the first refusal."""
    rejected: bool = False
    """The rows are sent again, as a replay does, once they have been rejected and the model is there."""
    stranger: str = ""
    """When somebody else makes a batch of as many rows as ours: ``before`` our create, or ``after`` the kill."""


FAULTS: Mapping[str, Fault] = {
    "half_expired": Fault("half_expired"),
    "line_separators": Fault("line_separators"),
    "rows_missing": Fault("rows_missing"),
    "model_not_found_rows": Fault("model_not_found_rows", rejected=True),
    "model_away": Fault(model_away=True),
    "killed_before_create": Fault(bomb=Failpoint.CREATE_BEFORE),
    "killed_after_create": Fault(bomb=Failpoint.CREATE_AFTER),
    "killed_while_answered": Fault(reply="dies"),
    "answer_lost": Fault(reply="lost"),
    "killed_beside_a_stranger": Fault(bomb=Failpoint.CREATE_BEFORE, stranger="after"),
    "killed_behind_a_stranger": Fault(bomb=Failpoint.CREATE_AFTER, stranger="before"),
}


class PortWorld(World):
    """The world of one written life."""

    def __init__(self, seed: int, folder: Path, outcome: Outcome, family: Family, fault: Fault) -> None:
        self.plan = fault
        self.told: Counter[str] = Counter()
        """Events of all replicas."""
        self.held: Counter[str] = Counter()
        """Holds, by reason."""
        self.sent: dict[tuple[int, int], tuple[bytes, tuple[tuple[str, bytes], ...]]] = {}
        """Key and headers of each record."""
        self.first_create = ""
        """The process that made the first batch."""
        self.strangers_id = ""
        super().__init__(seed, folder, outcome, family)
        created = self.books.created

        def watched(batch: Any, content: bytes, made_of: str) -> None:
            created(batch, content, made_of)
            if not self.first_create:
                self.first_create = CALLER.get()
                self._first_created()

        self.books.created = watched

    def _draw(self) -> None:
        self.speed = 1500.0
        self.partitions = 2
        self.replicas = 2
        self.records = ROWS
        self.max_rows = 2 * ROWS  # batches leave by the time: what the provider takes at most is another matter
        self.sla_h = 60.0
        self.safety_h = 0.0
        self.lagging_share = 0.0
        self.housekeeping_s = 20.0
        self.has_lane = False
        self.wave_rows = 50
        self.sync = {"enabled": False}
        self.route = {"max_wait_s": MAX_WAIT_S}
        self.rush = 0.0

    def _scenario(self) -> Scenario:
        chosen = scenarios.load(self.plan.scenario)
        changes: dict[str, Any] = {"durations": Scenario.model_validate({"durations": PACE}).durations}
        changes["in_flight_rows"] = 2
        if self.plan.model_away:
            changes["no_batch_models"] = self.family.models
        return chosen.model_copy(update=changes)

    # --------------------------------------------------------------------------------------------- what happens

    def heard(self, host: Host, name: str, fields: Mapping[str, object]) -> None:
        super().heard(host, name, fields)
        self.told[name] += 1
        if name == "batch_sealed" and self.plan.stranger == "before" and self.told[name] == 1:
            self.later(0.0, self._let_a_stranger_in)
        if name == "key_held":
            self.held[str(fields["reason"])] += 1

    def _arm(self) -> None:
        if self.plan.bomb is not None:
            self.bombs.append(Bomb(self.plan.bomb, 1, "kill", BACK_S))
        if self.plan.reply == "lost":
            self.provider.rates["create"] = WireRates(lose_reply=1.0)

    def _first_created(self) -> None:
        """The provider has made a batch, and its answer is not yet on its way."""
        if self.plan.reply == "dies":
            (host,) = [one for one in self.hosts if one.name == self.first_create]
            self.later(0.0, host.kill)
            self.replace(host, BACK_S)
        self.provider.rates.clear()

    async def misfortunes(self) -> None:
        """Until the one that is written has come, and what it asks for is done."""
        plan = self.plan
        if plan.bomb is not None:
            await self._until(lambda: self.outcome.struck[plan.bomb.value])
        if plan.stranger == "after":
            self.strangers_id = await self._strangers_batch()
        if plan.reply:
            await self._until(lambda: self.first_create)
        if plan.model_away:
            await self._until(lambda: self.held)
            await asyncio.sleep(AWAY_S)
            self._let_everything_succeed()
        if plan.rejected:
            await self._until(lambda: len(self.sent) == ROWS and not self.books.open_requests())
            self._let_everything_succeed()
            for where in list(self.sent):
                self._send_again(where)

    async def _until(self, happened: Any) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PATIENCE_S
        while not happened():
            if loop.time() > until_s:
                self.fail("what was written did not come")
                return
            await asyncio.sleep(0.05)

    def _let_everything_succeed(self) -> None:
        world = self.provider.world
        self.note("every model is there from now on")
        world.scenario = world.scenario.model_copy(update={"no_batch_models": (), "rows": ()})

    def _let_a_stranger_in(self) -> None:
        async def come() -> None:
            self.strangers_id = await self._strangers_batch()

        self.stranger = asyncio.create_task(come())

    async def _strangers_batch(self) -> str:
        """Another client of the same account makes a batch like ours, in the same minute."""
        messages = self.provider.messages
        rows = [
            {
                "custom_id": f"stranger-{number}",
                "params": self.family.body(f"Who am I? {number}", self.family.models[0]),
            }
            for number in range(ROWS // 2)
        ]
        path = messages.new_body_path()
        path.write_text(json.dumps({"requests": rows}))
        batch = await type(messages).create(messages, self.family.project, "2023-06-01", path)
        return str(batch.id)

    async def arrivals(self) -> None:
        """All at once, when everybody is at his place."""
        await asyncio.sleep(SETTLED_S)
        for number in range(self.records):
            text = f"kind/plain/ {number % 2}/{number // 2}"
            self._send(number % 2, f"row-{number}", self.family.body(text, self.family.models[0]), number)

    def _send(self, partition: int, custom_id: str, body: dict[str, Any], number: int) -> None:
        value = json.dumps(self.family.record(custom_id, body)).encode()
        headers = (("tenant", f"t-{number % 3}".encode()), ("number", str(number).encode()))
        self._append(partition, custom_id, value, headers, json.dumps(body).encode())

    def _send_again(self, where: tuple[int, int]) -> None:
        """As a replay does: the same request, with two headers more."""
        request = self.books.requests[where]
        key, headers = self.sent[where]
        value = json.dumps(self.family.record(request.custom_id, json.loads(request.body))).encode()
        again = (("replay-of", f"requests-{where[0]}@{where[1]}".encode()), ("replay-number", b"1"))
        self._append(where[0], key.decode(), value, (*headers, *again), request.body)

    def _append(
        self, partition: int, custom_id: str, value: bytes, headers: tuple[tuple[str, bytes], ...], body: bytes
    ) -> None:
        now_ms = round(self.clock.now().timestamp() * 1000)
        record = OutRecord("requests", custom_id.encode(), value, headers, partition, now_ms)
        (stored,) = self.cluster.append([record])
        self.sent[partition, stored.offset] = custom_id.encode(), headers
        self.books.add(Request(partition, stored.offset, custom_id, "plain", body))

    # ------------------------------------------------------------------------------------------------ at its end

    def _check_class(self, request: Request) -> None:
        """What a row must end as is the test's to say."""

    def _check_bill(self) -> None:
        """The same of how often it may be paid."""

    def _final(self) -> None:
        super()._final()
        bill = self.provider.world.state.bill
        self._check_envelopes()
        requests = self.books.requests.values()
        paid = {request.body: bill.body(request.body).paid_runs for request in requests}
        self.outcome.report = {
            "outcomes": Counter(_class_of(request.outcomes[0]) for request in requests),
            "paid": Counter(paid.values()),
            "delivered": sum(_class_of(request.outcomes[0]) == "succeeded" for request in requests),
            "batches": [
                {"rows": batch.rows, "status": batch.status.value, "is_ours": self._is_recorded(batch)}
                for batch in batches_of(self.family, self.provider)
                if batch.id != self.strangers_id
            ],
            "uncertain": len(self.books.uncertain),
            "told": self.told,
            "held": self.held,
            "possibly_paid_twice": self.paid_twice,
            "separators": sum("\u2028" in json.dumps(said, ensure_ascii=False) for said in self._said()),
            "stranger": self._stranger_is_well(),
        }

    def _is_recorded(self, batch: Any) -> bool:
        return batch.id in self.books.recorded or our_batch_id(batch) in self.books.recorded_lots

    def _said(self) -> list[Any]:
        return [request.outcomes[0] for request in self.books.requests.values()]

    def _stranger_is_well(self) -> bool:
        """Nobody has cancelled or deleted what is not ours."""
        batch = self.provider.messages._batches.get(self.strangers_id)
        return batch is not None and batch.cancel_at is None and not batch.deleted and batch.ended_at is not None

    def _check_envelopes(self) -> None:
        """Each outcome stands where it belongs, with its record's key, custom_id and headers."""
        seen = 0
        for topic, kinds in (("results", {"result"}), ("failures", {"failure"})):
            for partition in range(self.cluster.partition_count(TOPICS[topic])):
                for record in self.cluster.committed_records(TOPICS[topic], partition):
                    said = json.loads(record.value or b"{}")
                    where = (said["source"]["partition"], said["source"]["offset"])
                    key, headers = self.sent[where]
                    seen += 1
                    if record.key != key or said["custom_id"] != self.books.requests[where].custom_id:
                        self.fail(f"the outcome of {where} has another key or custom_id")
                    if not set(headers) <= set(record.headers):
                        self.fail(f"the outcome of {where} has lost headers: {record.headers}")
                    if said["kind"] not in kinds:
                        self.fail(f"a {said['kind']} stands in {topic}")
        if seen != len(self.sent):
            self.fail(f"{seen} outcomes for {len(self.sent)} records")


def _class_of(said: Mapping[str, Any]) -> str:
    return "succeeded" if said["kind"] == "result" else str(said["error"]["class"])


# -------------------------------------------------------------------------------------------------- questions

QUESTIONS = 1_000
SYSTEM = "Which intent is the customer's question about? Answer with its name alone."
WORDS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("refund", {"outcome": "content_filter"}),
    ("exchange", {"outcome": "http_error", "status": 500, "first_attempts": 1}),
    ("transfer", {"outcome": "http_error", "status": 503}),
    ("PIN", {"outcome": "missing", "first_attempts": 1}),
    ("cash", {"outcome": "unreadable", "first_attempts": 1}),
    ("identity", {"outcome": "context_length_exceeded"}),
    ("top", {"outcome": "line_separator"}),
    ("virtual", {"outcome": "duplicate"}),
    ("ATM", {"outcome": "foreign"}),
)
"""What becomes of a question that has this word in it; the first that fits."""


def questions() -> list[str]:
    """The first thousand of the demo's questions."""
    text = resources.files("batchferry.cli").joinpath("data/banking77.csv").read_text(encoding="utf-8")
    return [row["text"] for row in csv.DictReader(io.StringIO(text, newline=""))][:QUESTIONS]


class QuestionWorld(PortWorld):
    """A thousand questions, some of which meet with what a provider does to rows."""

    def _draw(self) -> None:
        super()._draw()
        self.replicas = 1
        self.max_rows = 300
        self.records = QUESTIONS

    def _scenario(self) -> Scenario:
        rows = [{"match": {"body_contains": word}, **terms} for word, terms in WORDS]
        return Scenario.model_validate({"durations": PACE, "rows": rows})

    async def arrivals(self) -> None:
        await asyncio.sleep(SETTLED_S)
        for number, text in enumerate(questions()):
            body = self.family.body(text, self.family.models[0], SYSTEM)
            self._send(number % 2, f"q-{number:05}", body, number)

    def _final(self) -> None:
        super()._final()
        ended = {}
        for request in self.books.requests.values():
            (said,) = request.outcomes
            answer = self.family.text_of(said["response"]["body"]) if said["kind"] == "result" else None
            if answer == "":
                self.fail(f"{request.custom_id} was answered with nothing")
            ended[request.custom_id] = [_class_of(said), "results" if said["kind"] == "result" else "failures"]
        self.outcome.report["ended"] = ended


def port(provider: str, fault: str) -> Outcome:
    """Live the written life of a fault at a port; never raises."""
    family = FAMILIES[provider]
    return live(SEED, lambda seed, folder, outcome: PortWorld(seed, folder, outcome, family, FAULTS[fault]))


def asked(provider: str) -> Outcome:
    """Have a port answer the thousand questions; never raises."""
    family = FAMILIES[provider]
    return live(SEED, lambda seed, folder, outcome: QuestionWorld(seed, folder, outcome, family, Fault()))


def faults_of(provider: str) -> list[str]:
    """The faults that can befall this family.

    Anthropic's refuses no batch as a whole, and is the only one that knows a batch by nothing but its time and size.
    """
    family = FAMILIES[provider]
    return [
        name
        for name, fault in FAULTS.items()
        if (not fault.stranger or family is ANTHROPIC) and (not fault.model_away or family.fails_whole)
    ]
