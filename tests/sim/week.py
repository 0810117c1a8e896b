"""A week of the service: rows around the clock, and a provider whose batches stall at random.

A batch may sit in ``validating``, ``in_progress`` or ``finalizing`` for hours or days, expire, or hang in
``cancelling`` once somebody has lost patience with it. What is looked at is the promise about deadlines: with the
sync lane on every outcome is in time; without it, or with hardly any budget, every miss is told.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchferry.config import Settings, load_settings
from batchferry.domain.offsets import OffsetSet
from batchferry.engine import canary, deadlines, fleet, intake, scheduler, supervisor, synclane, waiting
from batchferry.simulator import DEFAULT_KEY, Scenario
from batchferry.simulator.kafka import SimKafkaSettings
from sim import provider
from sim.life import GROUP, HOUR_S, TOPICS, Outcome, World, live

SLA_S, MARGIN_S = 30 * HOUR_S, 2 * HOUR_S
BATCHES = 400
"""So many batches are scripted; later ones end within the hour."""
TINY_ROWS_PER_HOUR = 1
COARSE = (
    (scheduler, "TICK_S", 0.25),
    (synclane, "TICK_S", 0.5),
    (waiting, "TICK_S", 0.5),
    (canary, "TICK_S", 60.0),
    (intake, "SEAL_TICK_S", 0.5),
    (intake, "POLL_TIMEOUT_MS", 500),
    (fleet, "POLL_TIMEOUT_MS", 2_000),
    (deadlines, "TICK_S", 0.5),
    (supervisor, "HOUSEKEEPING_S", 5.0),
    (supervisor, "CONTROL_LOOK_S", 5.0),
    (provider, "LATENCY_S", (0.002, 0.04)),
)
"""Looks that come often in real time are made rarer, or the week costs minutes; those that have to do with deadlines
stay below five minutes of the service's time. The wire is quick: what a call takes looks like a
difference between two clocks, and above a minute of that no lateness is judged."""


@dataclass(frozen=True)
class Plan:
    """What kind of week it is."""

    lane: str = "on"
    """``on``, ``off``, or ``tiny``: on with a budget of a row an hour."""
    days: float = 7.0
    rows: int = 300
    replicas: int = 1
    partitions: int = 2
    kills: int = 3
    speed: float = 450.0
    """Seconds of the service in one of the event loop. What is counted in the loop's time (a session, a call, a look)
    takes so much more of the service's: above this the lane no longer has the time that it has in truth."""


@dataclass
class Told:
    """What the events topic says of deadlines."""

    missed_rows: int
    """The sum of ``rows`` in ``deadline_missed``."""
    missed: Counter[tuple[int, int]]
    """How often each offset is named there."""
    at_risk: dict[tuple[int, int], datetime]
    """When each offset was first named in ``deadline_at_risk``."""


class Week(World):
    """The world of one week."""

    def __init__(self, seed: int, folder: Path, outcome: Outcome, plan: Plan) -> None:
        self.plan = plan
        super().__init__(seed, folder, outcome)

    def _draw(self) -> None:
        self.speed = self.plan.speed
        self.partitions = self.plan.partitions
        self.replicas = self.plan.replicas
        self.records = self.plan.rows
        self.max_rows = 12
        self.sla_h = SLA_S / HOUR_S
        self.safety_h = self.plan.days * 24
        self.lagging_share = 0.0
        self.housekeeping_s = 60.0
        self.has_lane = self.plan.lane != "off"
        self.wave_rows = 50
        self.rush = 0.0

    def _kafka_settings(self) -> SimKafkaSettings:
        return SimKafkaSettings(
            session_timeout_s=2.0,
            heartbeat_interval_s=0.6,
            rebalance_timeout_s=4.0,
            metadata_max_age_s=60.0,
            transaction_timeout_s=6.0,
            transaction_deadline_s=4.0,
            commit_deadline_s=3.0,
            abort_deadline_s=1.0,
            init_deadline_s=10.0,
            request_timeout_s=5.0,
            connect_deadline_s=5.0,
            close_deadline_s=1.0,
            read_stall_s=9.0,
        )

    def _scenario(self) -> Scenario:
        rng = random.Random(f"{self.seed}:stalls")
        well = {
            "validating_s": 120,
            "in_progress": {"minimum_s": HOUR_S / 2, "factor_s": 0},
            "finalizing_s": 120,
            "cancelling_s": 300,
        }
        batches = []
        for number in range(1, BATCHES + 1):
            how: dict[str, Any] = {
                "validating_s": rng.uniform(10, 900),
                "in_progress": {"minimum_s": rng.uniform(0.1, 9) * HOUR_S, "factor_s": 0},
                "finalizing_s": rng.uniform(10, 900),
                "cancelling_s": rng.choice((rng.uniform(30, 900), rng.uniform(1, 60) * HOUR_S)),
            }
            stall = rng.choices(("none", "validating", "in_progress", "finalizing"), (45, 7, 28, 20))[0]
            stalled_s = rng.choice((rng.uniform(4, 20), rng.uniform(20, 72))) * HOUR_S
            if stall == "in_progress":
                how["in_progress"] = {"minimum_s": stalled_s, "factor_s": 0}
            elif stall != "none":
                how[f"{stall}_s"] = stalled_s
            batches.append({"nth": number, "durations": how})
        return Scenario.model_validate(
            {
                "durations": well,
                "batches": batches,
                "list_unfinished_rows": rng.random() < 0.5,
                "in_flight_rows": rng.choice((0, 2, 20)),
                "cancel_while_finalizing": rng.choice(("cancels", "completes")),
                "sync": {"latency_s": 20.0, "latency_jitter": 0.9},
            }
        )

    def settings(self, name: str) -> Settings:
        """The defaults, but for what is counted in the event loop's time."""
        sync: dict[str, Any] = {"enabled": self.plan.lane != "off", "call_timeout_s": 2.0}
        if self.plan.lane == "tiny":
            sync["rows_per_hour"] = TINY_ROWS_PER_HOUR
        return load_settings(
            None,
            {},
            {
                "kafka": {
                    "session_timeout_s": 6.0,
                    "heartbeat_s": 0.6,
                    "rebalance_timeout_s": 8.0,
                    "request_timeout_s": 5.0,
                    "transaction_timeout_s": 6.0,
                },
                "topics": {**{one: one for one in ("requests", "results", "failures", "events")}, "group": GROUP},
                "accounts": {
                    "default": {
                        "base_url": "http://provider/v1",
                        "api_key": DEFAULT_KEY,
                        "poll": {"first_s": 1200, "floor_s": 600, "max_s": 3600},
                        "sync": sync,
                        "timeouts": {"create_s": 2.0, "read_s": 2.0, "write_s": 2.0},
                    }
                },
                "routes": {"default": {"max_rows": self.max_rows, "sla_s": SLA_S, "margin_s": MARGIN_S}},
                "limits": {"settle_max_delay_s": 0.2, "submit_ttl_s": 2.0, "resolve_lag_s": 0.2},
                "state_dir": str(self.folder / name),
                "server": {"enabled": False},
                "otel": {"enabled": False},
                "stop_budget_s": 6.0,
            },
            dotenv_path=None,
        )

    # ---------------------------------------------------------------------------------------- what happens in it

    def _arm(self) -> None:
        """No failpoint strikes: kills come by the clock."""

    async def misfortunes(self) -> None:
        """A few replicas die, and are back half a minute later."""
        span_s = self.safety_h * HOUR_S / self.speed
        loop = asyncio.get_running_loop()
        for at_s in sorted(self.rng.uniform(0.0, span_s) for _ in range(self.plan.kills)):
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            host = self.rng.choice(self.alive)
            host.kill()
            self.replace(host, 0.1)
            self.outcome.misfortunes["kill"] += 1

    async def arrivals(self) -> None:
        """Rows around the clock, half as many at night."""
        rng = self.rng
        loop = asyncio.get_running_loop()
        hours: list[float] = []
        while len(hours) < self.records:
            hour = rng.uniform(0.0, self.safety_h)
            if hour % 24 < 16 or rng.random() < 0.5:
                hours.append(hour)
        for hour in sorted(hours):
            await asyncio.sleep(max(0.0, hour * HOUR_S / self.speed - loop.time()))
            self._arrive("")
        self.note(f"all {self.records} requests have come")

    def _kind(self) -> str:
        return "plain"

    def _unfinished(self) -> str:
        missing = self.books.open_requests()
        return f"{len(missing)} requests without an outcome: {[one.where for one in missing[:5]]}" if missing else ""

    # --------------------------------------------------------------------------------------------- at its end

    def told(self) -> Told:
        """The events about deadlines."""
        told = Told(0, Counter(), {})
        for partition in range(self.cluster.partition_count(TOPICS["events"])):
            for record in self.cluster.committed_records(TOPICS["events"], partition):
                event = json.loads(record.value or b"{}")
                if event["kind"] not in {"deadline_missed", "deadline_at_risk"}:
                    continue
                places = [(event["partition"], offset) for offset in OffsetSet.loads(event["offsets"])]
                if event["rows"] != len(places):
                    self.fail(f"a {event['kind']} event of {event['rows']} rows names {len(places)} offsets")
                if event["kind"] == "deadline_missed":
                    told.missed_rows += event["rows"]
                    told.missed.update(places)
                else:
                    at = datetime.fromisoformat(event["at"])
                    for place in places:
                        told.at_risk[place] = min(at, told.at_risk.get(place, at))
        return told

    def _final(self) -> None:
        told, facts = self.told(), self.outcome.facts
        late = set()
        for where, request in self.books.requests.items():
            (said,) = request.outcomes
            lane = said["batch"]["lane"]
            facts[f"lane {lane}"] += 1
            facts[f"kind {said['kind']}"] += 1
            if said["deadline_met"] is None:
                self.fail(f"the outcome of {where} does not say whether its deadline was met")
            elif not said["deadline_met"]:
                late.add(where)
                self.note(f"late: {where}, due {said['deadline']}, lane {lane}")
            if said["kind"] != "result" and (
                self.plan.lane == "on" or said["error"]["class"] not in {"expired", "cancelled"}
            ):  # two batches that did not run it are all that a row without a lane is worth
                self.fail(f"{where} failed as {said['error']['class']}, though nothing was wrong with it")
        facts["records"] += len(self.books.requests)
        facts["late"] += len(late)
        facts["missed_rows"] += told.missed_rows
        facts["at_risk"] += len(told.at_risk)
        facts["batches"] += len(self.provider.world.state.batches)
        for batch in self.provider.world.state.batches.values():
            facts[f"batch {batch.status.value}"] += 1
        if self.plan.lane == "on" and late:
            self.fail(f"{len(late)} deadlines were missed although the lane was on: {sorted(late)[:5]}")
        if told.missed_rows != len(late) or set(told.missed) != late or max(told.missed.values(), default=1) > 1:
            self.fail(
                f"{len(late)} outcomes were late and deadline_missed events tell of {told.missed_rows} rows; "
                f"untold: {sorted(late - told.missed.keys())[:5]}, told and not late: {sorted(told.missed.keys() - late)[:5]}"
            )
        due = {where: datetime.fromisoformat(self.books.requests[where].outcomes[0]["deadline"]) for where in late}
        facts["foretold"] += sum(where in told.at_risk and told.at_risk[where] <= due[where] for where in late)


def week(seed: int, plan: Plan) -> Outcome:
    """Live through one week; never raises."""
    with ExitStack() as stack:
        for module, name, value in COARSE:
            stack.enter_context(patch.object(module, name, value))
        return live(seed, lambda number, folder, outcome: Week(number, folder, outcome, plan))
