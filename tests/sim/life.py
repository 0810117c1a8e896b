"""One life: a world drawn from a seed, a time of misfortunes, a time in which everything must come to its end."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import batchferry.app
from batchferry.config import Settings, load_settings
from batchferry.domain import control
from batchferry.domain.ids import BatchId
from batchferry.domain.ledger import Lot
from batchferry.domain.money import warm_up
from batchferry.engine import partition as engine_partition
from batchferry.engine import supervisor as engine_supervisor
from batchferry.engine.failpoints import Failpoint, installed
from batchferry.ports import OutRecord
from batchferry.simulator import Scenario
from batchferry.simulator.clock import SimClock
from batchferry.simulator.kafka import FaultRates, SimCluster, SimKafka, SimKafkaSettings
from batchferry.simulator.state import Status
from sim import host as host_module
from sim.books import FENCE_S, Books, Request
from sim.entropy import seeded
from sim.families import (
    ANTHROPIC,
    FAMILIES,
    KEY,
    OPENAI,
    WEIGHTS,
    Family,
    InlineBatch,
    batches_of,
    files_left,
    identity_of,
    inline_content,
    input_file_of,
    our_batch_id,
)
from sim.host import BUGS, ORIGIN, BusinessClock, Host, Killed
from sim.loop import RUNNING, Stuck, run
from sim.provider import CALLER, SimProvider, WireRates

HOUR_S = 3600.0
TOPICS = {name: name for name in ("requests", "results", "failures", "events")} | {
    "ledger": "requests.group.ledger",
    "control": "requests.group.control",
}
GROUP = "group"
LOOK_S = 0.5
"""Real seconds between two looks whether the end has come."""
UNFENCED = "input_file_not_deleted"
"""The reason under which rows are counted whose create may come in after they have gone again."""
KINDS = ("plain", "filter", "http", "httpall", "missing", "unread", "dup", "foreign", "twin", "bad")
KIND_WEIGHTS = (70, 4, 5, 3, 4, 3, 4, 2, 3, 2)
TERMS = {
    "filter": {"outcome": "content_filter"},
    "http": {"outcome": "http_error", "status": 500, "first_attempts": 1},
    "httpall": {"outcome": "http_error", "status": 503},
    "missing": {"outcome": "missing", "first_attempts": 1},
    "unread": {"outcome": "unreadable", "first_attempts": 1},
    "dup": {"outcome": "duplicate"},
    "foreign": {"outcome": "foreign"},
}


class Broken(Exception):
    """A promise was broken."""


@dataclass(slots=True)
class Bomb:
    """What happens when a failpoint is reached for the n-th time."""

    point: Failpoint
    nth: int
    act: str
    for_s: float
    seen: int = 0


@dataclass(slots=True)
class Outcome:
    """How a life went."""

    seed: int
    family: str = OPENAI.name
    fault: str = ""
    history: list[str] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    """Failpoints, by how often they were reached."""
    struck: Counter[str] = field(default_factory=Counter)
    """Failpoints at which a process was killed, paused or stopped."""
    misfortunes: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    report: dict[str, Any] = field(default_factory=dict)
    """What a written life has to say beside."""
    real_s: float = 0.0
    business_h: float = 0.0


class World:
    """Everything of one life."""

    def __init__(self, seed: int, folder: Path, outcome: Outcome, family: Family = OPENAI) -> None:
        self.family = family
        self.rng = random.Random(f"{seed}:fate")
        self.seed = seed
        self.folder = folder
        self.outcome = outcome
        self._draw()
        self.clock = BusinessClock(self.speed)
        self.hosts: list[Host] = []
        self.incarnations: dict[str, Host] = {}
        self.bombs: list[Bomb] = []
        self.is_safe = False
        """The time of misfortunes is over."""
        self.fault = ""
        self.history: list[str] = []
        self.refusals: list[tuple[float, str]] = []
        self.paid_twice: Counter[str] = Counter()
        """Rows that the service counted as possibly paid twice, by reason."""
        self.outage_s = 0.0
        """How long the broker was away, in all: nobody ends a transaction meanwhile."""
        self.lost_waves: dict[str, int] = {}
        self._number = 0
        self._broken = asyncio.Event()
        self.cluster = SimCluster(
            random.Random(f"{seed}:cluster"),
            wall_clock=self.clock.now,
            latency_s=(0.001, 0.03),
            abort_check_s=2.0,
            history_lines=50_000,
        )
        self.cluster.history = _History(self.history)
        loop = asyncio.get_running_loop()
        sim_clock = SimClock(self.speed, ORIGIN, datetime.fromtimestamp(0, UTC), real_time=loop.time)
        self.provider = SimProvider(
            folder / "provider", self._scenario(), sim_clock, seed, random.Random(f"{seed}:wire"), self.note, family
        )
        self.books = Books(TOPICS, loop.time, self.note, self.fail)
        self.books.is_fenced = family.is_fenced
        self.cluster.on_append(self.books.hear)
        self.provider.lagging_share = self.lagging_share if family is OPENAI else 0.0
        self.provider.lag_s = 0.9 * self.speed
        self._inits: dict[int, list[tuple[float, str]]] = defaultdict(list)
        self._watch_provider()
        self.kafka_settings = self._kafka_settings()
        first = {partition: self.rng.choice((0, 65_520)) for partition in range(self.partitions)}
        self.cluster.create_topic("requests", self.partitions, {"retention.ms": "-1"}, first_offsets=first)
        for name in ("results", "failures", "events"):
            self.cluster.create_topic(name, self.partitions, {"retention.ms": "-1"})
        self.cluster.start_housekeeping(self.housekeeping_s)

    # ---------------------------------------------------------------------------------------- what it is made of

    def _draw(self) -> None:
        """What kind of life it is."""
        rng = self.rng
        self.speed = rng.choice((600.0, 900.0, 1500.0))
        self.partitions = rng.randint(1, 5)
        self.replicas = rng.choice((1, 2, 2, 3, 3))
        self.records = rng.randint(15, 90)
        self.max_rows = rng.choice((3, 6, 12, 30))
        self.sla_h = rng.choice((26.5, 27.0, 28.0, 30.0))
        self.safety_h = rng.uniform(4, 24)
        self.lagging_share = rng.choice((0.0, 0.9))
        self.housekeeping_s = rng.uniform(2.0, 20.0)
        self.has_lane = rng.random() < 0.5
        self.wave_rows = rng.choice((1, 4, 10, 50))
        self.sync = {
            "enabled": self.has_lane,
            "max_concurrency": rng.choice((1, 3, 16)),
            "call_timeout_s": 1.5,
            "tries": rng.choice((2, 3, 5)),
            "rows_per_hour": rng.choice((1, 5, 5000)),
            "breaker_failures": rng.choice((2, 8)),
        }
        self.route = {
            "sync_unknown": rng.choice(("rerun", "rerun", "fail")),
            "small": rng.choice(("batch", "batch", "sync")) if self.has_lane else "batch",
            "min_rows": 4,
            "cancel_share": rng.choice((0.2, 0.5, 1.0)),
        }
        self.rush = rng.choice((0.0, 0.1, 0.4)) if self.has_lane else 0.0
        """Share of the rows with little time, or that ask for the lane."""

    def _kafka_settings(self) -> SimKafkaSettings:
        return SimKafkaSettings(
            session_timeout_s=6.0,
            heartbeat_interval_s=0.5,
            rebalance_timeout_s=8.0,
            metadata_max_age_s=5.0,
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
        rng = self.rng
        slow = rng.random() < 0.3
        hours = rng.uniform(0.05, 3.0) if not slow else rng.uniform(2.0, 20.0)
        batches: list[dict[str, Any]] = []
        for number in sorted(rng.sample(range(1, 9), rng.choice((0, 0, 1, 2)))):
            kind = rng.choice(("expires", "fails", "lingers"))
            if kind == "expires":
                too_long_s = (self.family.window_h + 6) * HOUR_S
                batches.append({"nth": number, "durations": {"in_progress": {"minimum_s": too_long_s, "factor_s": 0}}})
            elif kind == "fails" and self.family.fails_whole:
                error = rng.choice(
                    (
                        [{"code": "invalid_json_line", "line": 1}],
                        [{"code": "token_limit_exceeded"}],
                        [],
                    )
                )
                batches.append({"nth": number, "fail_with": error})
            else:
                batches.append({"nth": number, "durations": {"finalizing_s": 6 * HOUR_S}})
        return Scenario.model_validate(
            {
                "durations": {
                    "validating_s": rng.uniform(1, 900),
                    "in_progress": {"minimum_s": hours * HOUR_S, "factor_s": 0},
                    "finalizing_s": rng.uniform(1, 900),
                    "cancelling_s": rng.uniform(1, 900),
                    "jitter": 0.8,
                },
                "rows": [{"match": {"body_contains": f"kind/{kind}/"}, **terms} for kind, terms in TERMS.items()],
                "batches": batches,
                "late_file_ids_s": rng.choice((0, 0, 120)),
                "error_file_when_clean": rng.choice(("null", "absent", "empty")),
                "list_unfinished_rows": rng.random() < 0.7,
                "unknown_file": rng.choice(("reject", "reject_404", "fail_job")),
            }
        )

    def settings(self, name: str) -> Settings:
        """A replica's settings: the shape of production, with short real times."""
        return load_settings(
            None,
            {},
            {
                "kafka": {
                    "session_timeout_s": 6.0,
                    "heartbeat_s": 0.5,
                    "rebalance_timeout_s": 8.0,
                    "request_timeout_s": 5.0,
                    "metadata_max_age_s": 5.0,
                    "transaction_timeout_s": 6.0,
                },
                "topics": {**{one: one for one in ("requests", "results", "failures", "events")}, "group": GROUP},
                "accounts": {
                    "default": {
                        **self.family.account,
                        "api_key": KEY,
                        "poll": {"first_s": 300, "floor_s": 120, "max_s": 1800},
                        "sync": self.sync,
                        "timeouts": {
                            "create_s": 3.0,
                            "read_s": 3.0,
                            "write_s": 3.0,
                            "upload_s": 8.0,
                            "download_s": 8.0,
                        },
                    }
                },
                "routes": {
                    "default": {
                        "endpoint": self.family.endpoint,
                        "max_rows": self.max_rows,
                        "sla_s": (self.sla_h + self.family.window_h - 24) * HOUR_S,
                        "margin_s": 2 * HOUR_S,
                    }
                    | self.route
                },
                "limits": {
                    "settle_max_delay_s": 0.2,
                    "settle_chunk_rows": 7,
                    "submit_ttl_s": 4.0,
                    "resolve_lag_s": 0.5,
                    "lookup_pause_s": 1.0 * self.speed,
                    "missing_confirm_s": 1.0 * self.speed,
                    "missing_grace_s": 6.0 * self.speed,
                    "file_reuse_s": 6.0 * self.speed,
                    "restore_timeout_s": 20.0,
                    "poll_records": 20,
                    "max_batches_in_flight": 6,
                    "wave_rows": self.wave_rows,
                    # A call's way takes minutes of the service's time, which looks like a difference of clocks.
                    "max_clock_skew_s": 600.0,
                },
                "state_dir": str(self.folder / name),
                "server": {"enabled": False},
                "otel": {"enabled": False},
                "stop_budget_s": 6.0,
            },
            dotenv_path=None,
        )

    def kafka(self, process: Any) -> SimKafka:
        """The port of one process."""
        return WatchedKafka(self, process)

    def claimed(self, partition: int, process: str) -> None:
        """A producer was initialised: two processes that fence each other in turns make no progress."""
        inits = self._inits[partition]
        inits.append((asyncio.get_running_loop().time(), process))
        del inits[:-TURNS]
        names = [name for _, name in inits]
        in_turns = len(inits) == TURNS and len(set(names)) == 2 and all(a != b for a, b in pairwise(names))
        if in_turns and inits[-1][0] - inits[0][0] < TURNS_S:
            self.fail(f"partition {partition} is taken in turns by {sorted(set(names))}")

    # ------------------------------------------------------------------------------------------- telling, failing

    def note(self, line: str) -> None:
        """Add a line to the history."""
        self.cluster.note(line)

    def fail(self, fault: str) -> None:
        """A promise is broken: the first fault ends the life."""
        if not self.fault:
            self.fault = fault
            self.note(f"BROKEN: {fault}")
            self._broken.set()

    def heard(self, host: Host, name: str, fields: Mapping[str, object]) -> None:
        """A replica told something."""
        if name in BUGS:
            self.fail(f"{host.name} told {name}: {dict(fields)}")
        elif name == "bound_broken":
            self.fail(f"{host.name} went beyond a bound: {dict(fields)}")
        elif name == "key_held":
            self.note(f"{host.name}: {name} {dict(fields)}")
            held = self.books.control["hold"]
            at_s = asyncio.get_running_loop().time()
            self.later(HOLD_S, lambda: self._check_hold(host, held, at_s))
        elif name == "possibly_paid_twice":
            rows, reason = int(str(fields["rows"])), str(fields["reason"])
            self.paid_twice[reason] += rows
            if reason == "sync_wave_lost":
                self.lost_waves[str(fields["batch_id"])] = rows
            self.note(f"{host.name}: {name} {dict(fields)}")
        elif name in NOTED:
            told = " ".join(f"{key}={value}" for key, value in fields.items())
            self.note(f"{host.name}: {name} {told}")

    def _check_hold(self, host: Host, held: int, at_s: float) -> None:
        """The others learn of a hold from the control topic alone."""
        is_well = host in self.alive and not host.is_paused and not host.is_stopping
        if is_well and host.undisturbed_since_s < at_s and self.books.control["hold"] <= held:
            self.fail(f"{host.name} told of a hold that no control record names")

    def later(self, wait_s: float, call: Callable[[], None]) -> None:
        """Do it later, whoever lives then."""
        self.cluster.later(wait_s, call)

    # ------------------------------------------------------------------------------------------------- provider

    def _watch_provider(self) -> None:
        world, books = self.provider.world, self.books
        create, delete, cancel = world.create, world.delete_file, world.cancel

        def watched_create(project: str, wanted: Any) -> Any:
            batch = create(project, wanted)
            content = world.state.file_path(batch.input_file_id).read_bytes()
            books.created(batch, content, batch.input_file_id if self.family is OPENAI else identity_of(content))
            self.note(f"provider: {batch.id} made for {CALLER.get()} of {our_batch_id(batch)}")
            return batch

        def watched_delete(project: str, file_id: str) -> None:
            self._check_delete(file_id)
            delete(project, file_id)

        async def watched_cancel(project: str, batch_id: str) -> Any:
            self.note(f"provider: {batch_id} cancelled by {CALLER.get()}")
            return await cancel(project, batch_id)

        self.provider.on_sync_call = books.called
        self.provider.on_sync_lost = books.lost
        books.wave_rows = self.wave_rows
        world.create = watched_create
        world.delete_file = watched_delete
        world.cancel = watched_cancel
        self._watch_messages()

    def _watch_messages(self) -> None:
        """The same for batches that come without a file."""
        messages, books = self.provider.messages, self.books
        create, delete, cancel = messages.create, messages.delete, messages.cancel
        self._delete_by_hand = delete

        async def watched_create(project: str, version: str, body_path: Path) -> Any:
            batch = await create(project, version, body_path)
            content = inline_content(self.provider, batch)
            books.created(InlineBatch(batch), content, identity_of(content))
            self.note(f"provider: {batch.id} made for {CALLER.get()} of {batch.rows} rows")
            return batch

        def watched_delete(project: str, batch_id: str) -> None:
            self._check_inline_delete(InlineBatch(messages.find(project, batch_id)))
            delete(project, batch_id)

        async def watched_cancel(project: str, batch_id: str) -> Any:
            self.note(f"provider: {batch_id} cancelled by {CALLER.get()}")
            return await cancel(project, batch_id)

        messages.create = watched_create
        messages.delete = watched_delete
        messages.cancel = watched_cancel

    @property
    def provider_batches(self) -> list[Any]:
        """Every batch that was ever made, oldest first."""
        return batches_of(self.family, self.provider)

    def _check_inline_delete(self, batch: InlineBatch) -> None:
        lots = self.books.lots_of(batch)
        early = [partition for partition, lot in lots.items() if lot.is_at_provider]
        if early or batch.id not in self.books.recorded:
            self.fail(f"{batch.id} deleted by {CALLER.get()} before partitions {early} are DONE")
        if lots:
            self._check_leader(batch.id, batch.id, lots)

    def _check_delete(self, file_id: str) -> None:
        for batch in self.provider.world.state.batches.values():
            lots = None
            if file_id in {batch.output_file_id, batch.error_file_id}:
                lots = self.books.lots_of(batch)
                early = [lot for lot in lots.values() if lot.is_at_provider]
                if early:
                    self.fail(
                        f"result file {file_id} of {batch.id} deleted by {CALLER.get()} before partitions "
                        f"{[p for p, lot in lots.items() if lot.is_at_provider]} are DONE"
                    )
            elif file_id == input_file_of(batch):
                lots = self.books.lots_of(batch)
                if any(lot.state.value == "SUBMITTED" for lot in lots.values()) and not batch.status.is_terminal:
                    self.fail(f"input file {file_id} of the running {batch.id} deleted by {CALLER.get()}")
            if lots and file_id != input_file_of(batch):
                self._check_leader(file_id, batch.id, lots)

    def _check_leader(self, what: str, batch_id: str, lots: Mapping[int, Lot]) -> None:
        """Only who leads the batch deletes its results."""
        if not self._was_awake(CALLER.get()):
            return
        leader = min(next(iter(lots.values())).partitions)
        leading = self.books.led_by(leader, self._host_name)
        if CALLER.get() not in leading:
            self.fail(
                f"{CALLER.get()} deleted {what} of {batch_id}, though partition {leader} is led by {sorted(leading)}"
            )

    def _was_awake(self, name: str) -> bool:
        """Whether the process has run without a pause for so long that its last look at its partition counts."""
        now_s = asyncio.get_running_loop().time()
        return any(
            host.name == name and host.undisturbed_since_s < now_s - FENCE_S - 5.0 for host in self.hosts
        ) or any(host.name == name and not host.undisturbed_since_s for host in self.hosts)

    def _host_name(self, incarnation: str) -> str:
        host = self.incarnations.get(incarnation)
        return incarnation if host is None else host.name

    # ------------------------------------------------------------------------------------------------- replicas

    def launch(self, slot: int) -> Host:
        """A new process in this replica's place."""
        self._number += 1
        host = Host(self, f"r{slot}.{self._number}")
        host.slot = slot
        self.hosts.append(host)
        host.start()
        return host

    def replace(self, host: Host, after_s: float) -> None:
        """Start the replica again after so long."""
        self.later(after_s, lambda: self._launch_in(host))

    def _launch_in(self, host: Host) -> None:
        slot = host.slot
        if any(one.slot == slot and not one.is_dead and not one.has_ended for one in self.hosts):
            return
        self.launch(slot)

    @property
    def alive(self) -> list[Host]:
        """Replicas whose process runs or is paused."""
        return [host for host in self.hosts if not host.is_dead and not host.has_ended]

    # ------------------------------------------------------------------------------------------------ failpoints

    def reach(self, point: Failpoint) -> None:
        """A place in the code was reached; perhaps it is somebody's last."""
        host = RUNNING.get()
        if not isinstance(host, Host) or host.is_dead:
            return
        self.outcome.reached[point.value] += 1
        if self.is_safe or host.is_paused:
            return
        for bomb in self.bombs:
            if bomb.point is not point:
                continue
            bomb.seen += 1
            if bomb.seen != bomb.nth:
                continue
            self.outcome.struck[point.value] += 1
            self.note(f"failpoint {point.value} of {host.name}: {bomb.act}")
            if bomb.act == "pause":
                host.pause(bomb.for_s)
            elif bomb.act == "stop":
                host.stop()
            else:
                host.kill()
                self.replace(host, bomb.for_s)
                raise Killed

    # ------------------------------------------------------------------------------------------------ misfortunes

    def _pause_s(self) -> float:
        """Shorter than a session, longer, or longer than everything."""
        return self.rng.choice((self.rng.uniform(0.3, 4), self.rng.uniform(5, 12), self.rng.uniform(20, 60)))

    def _arm(self) -> None:
        rng = self.rng
        points = [point for point in Failpoint if not self.family.is_fenced or point not in DISOWN_POINTS]
        for _ in range(rng.choice((0, 1, 2, 3, 5))):
            act = rng.choice(("kill", "kill", "kill", "pause", "pause", "stop"))
            nth = rng.choice((1, 1, 1, 2, 3, 6))
            point = rng.choice(LANE_POINTS if self.has_lane and rng.random() < 0.4 else points)
            self.bombs.append(Bomb(point, nth, act, self._pause_s()))

    async def misfortunes(self) -> None:
        """Until the safety phase is over, now and then something goes wrong."""
        rng = self.rng
        acts = ("kill", "pause", "stop", "broker", "cut_off", "rebalance", "kafka", "wire", "away", "refuse", "grow",
                "flush", "cancel", "abort", "late", "truncate", *(("sync", "sync", "rescue") if self.has_lane else ()))  # fmt: skip
        if self.family is ANTHROPIC:
            acts = (*acts, "unanswered")
        liked = rng.sample(acts, rng.randint(2, 7))
        if self.family is ANTHROPIC and rng.random() < VANISHING_LIVES:
            liked.append("vanish")
        pace_s = rng.uniform(2.0, 20.0)
        until_s = self.safety_h * HOUR_S / self.speed
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            await asyncio.sleep(rng.expovariate(1 / pace_s))
            act = rng.choice(liked)
            if getattr(self, f"_do_{act}")():
                self.outcome.misfortunes[act] += 1

    def _do_kill(self) -> bool:
        if not self.alive:
            return False
        host = self.rng.choice(self.alive)
        host.kill()
        self.replace(host, self.rng.choice((0.5, 3.0, 15.0)))
        return True

    def _do_pause(self) -> bool:
        if not self.alive:
            return False
        self.rng.choice(self.alive).pause(self._pause_s())
        return True

    def _do_stop(self) -> bool:
        if not self.alive:
            return False
        self.rng.choice(self.alive).stop()
        return True

    def _do_broker(self) -> bool:
        self._disturb(self.hosts)
        for_s = self.rng.choice((0.5, 3.0, 15.0))
        self.outage_s += for_s
        self.cluster.faults.take_broker_away(for_s)
        return True

    def _disturb(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            host.undisturbed_since_s = asyncio.get_running_loop().time() + 40.0

    def _do_cut_off(self) -> bool:
        if not self.alive:
            return False
        host = self.rng.choice(self.alive)
        self._disturb([host])
        self.cluster.faults.cut_off(host.name, self.rng.choice((1.0, 5.0, 20.0)))
        return True

    def _do_rebalance(self) -> bool:
        self.cluster.rebalance(GROUP, "misfortune")
        return True

    def _do_kafka(self) -> bool:
        rng = self.rng
        self._disturb(self.hosts)
        self.cluster.faults.rates = FaultRates(
            lose_commit_request=rng.choice((0, 0.05)),
            lose_commit_reply=rng.choice((0, 0.1)),
            lose_produce_reply=rng.choice((0, 0.05)),
            slow_request=rng.choice((0, 0.1)),
            slow_reply=rng.choice((0, 0.1)),
            abort_transaction=rng.choice((0, 0.05)),
            rebalance=rng.choice((0, 0.01)),
        )
        self.later(rng.uniform(1, 15), lambda: setattr(self.cluster.faults, "rates", FaultRates()))
        return True

    def _do_wire(self) -> bool:
        rng = self.rng
        call = rng.choice(("*", "create", "create", "upload", "content", "list", "retrieve", "delete", "cancel"))
        kinds = rng.sample(WireRates.KINDS, rng.randint(1, 3))
        rates = WireRates()
        for kind in kinds:
            if kind == "cut" and call not in {"*", "content", "list"}:
                continue
            setattr(rates, kind, rng.choice((0.1, 0.3, 0.9)))
        self.provider.rates[call] = rates
        self.note(f"wire of {call}: {rates}")
        self.later(rng.uniform(2, 30), lambda: self.provider.rates.pop(call, None) and None)
        return True

    def _do_sync(self) -> bool:
        """The ordinary endpoints lose answers, are busy, broken, or slower than anybody waits."""
        rng = self.rng
        rates = WireRates()
        for kind in rng.sample(WireRates.KINDS, rng.randint(1, 3)):
            setattr(rates, kind, rng.choice((0.2, 0.5, 1.0)))
        self.provider.rates["sync"] = rates
        self.note(f"wire of sync: {rates}")
        self.later(rng.uniform(2, 30), lambda: self.provider.rates.pop("sync", None) and None)
        return True

    def _do_rescue(self) -> bool:
        batch_id = self._some_batch()
        if batch_id is None:
            return False
        self._control(control.RescueWish(batch_id, self.clock.now()))
        self.note(f"operator wants {batch_id} rescued")
        return True

    def _do_late(self) -> bool:
        """The next create, or upload, comes in long after its caller has given up."""
        call = self.rng.choice(("create", "create", "upload"))
        self.provider.rates[call] = WireRates(late=1.0)
        self.later(self.rng.uniform(1, 6), lambda: self.provider.rates.pop(call, None) and None)
        return True

    def _do_away(self) -> bool:
        self.provider.is_away = True
        self.note("provider away")

        def back() -> None:
            self.provider.is_away = False

        self.later(self.rng.choice((2.0, 20.0, 60.0)), back)
        return True

    def _do_refuse(self) -> bool:
        status, code = self.rng.choice(self.family.refusals)
        self.provider.refuse(status, code)
        self.note(f"provider refuses creates: {status} {code}")

        def back() -> None:
            self.provider.refuse_creates = None
            self.note("provider takes creates again")

        self.later(self.rng.choice((2.0, 20.0)), back)
        return True

    def _do_grow(self) -> bool:
        if self.partitions >= 8 or self.outcome.misfortunes["grow"]:
            return False
        self.partitions += self.rng.randint(1, 3)
        self.cluster.create_partitions("requests", self.partitions)
        return True

    def _do_flush(self) -> bool:
        self._control(control.Flush("all", self.clock.now()))
        return True

    def _some_batch(self) -> BatchId | None:
        live = [
            named for batch in self.provider_batches if not batch.status.is_terminal and (named := self._named(batch))
        ]
        return BatchId(self.rng.choice(live)) if live else None

    def _named(self, batch: Any) -> str | None:
        """Our name of a provider batch, where it is known."""
        lots = self.books.lots_of(batch) if batch.metadata is None else {}
        return our_batch_id(batch) or next((lot.lot_id for lot in lots.values()), None)

    def _do_cancel(self) -> bool:
        batch_id = self._some_batch()
        if batch_id is None:
            return False
        self._control(control.CancelWish(batch_id, "requeue", self.clock.now()))
        self.note(f"operator cancels {batch_id}")
        return True

    def _do_abort(self) -> bool:
        open_now = self.cluster.open_transactions()
        return bool(open_now) and self.cluster.abort_transaction(open_now[0].transactional_id, "misfortune")

    def _do_truncate(self) -> bool:
        """Retention deletes the oldest records, settled or not."""
        partition = self.rng.randrange(self.cluster.partition_count("requests"))
        start, end = self.cluster.log_start("requests", partition), self.cluster.end_offset("requests", partition)
        if end == start:
            return False
        below = self.rng.randint(start, end)
        self.cluster.delete_records("requests", partition, below)
        deleted = self.books.deleted_below
        deleted[partition] = max(below, deleted.get(partition, 0))
        return True

    def _do_unanswered(self) -> bool:
        """The replies to several creates in a row are lost, so that those who look for their batches find many alike."""
        self.provider.rates["create"] = WireRates(lose_reply=self.rng.choice((0.5, 1.0)))
        self.later(self.rng.uniform(2, 30), lambda: self.provider.rates.pop("create", None) and None)
        return True

    def _do_vanish(self) -> bool:
        """Somebody deletes a batch as soon as it has ended, read or not; before that the provider does not let him."""
        live = [one for one in self.provider_batches if not one.is_deleted and self.books.live_lots_of(one)]
        if not live:
            return False
        self._vanish(self.rng.choice(live))
        return True

    def _vanish(self, batch: InlineBatch) -> None:
        if self.is_safe or batch.is_deleted:
            return
        if not batch.status.is_terminal:
            self.later(HAND_LOOK_S, lambda: self._vanish(batch))
            return
        self.books.taken_away.add(batch.id)
        self.note(f"somebody deletes {batch.id}")
        self._delete_by_hand(self.family.project, batch.id)

    def _control(self, entry: control.ControlEntry) -> None:
        if self.cluster.find_topic(TOPICS["control"]) is None:
            return
        key, value = control.encode(entry)
        self.cluster.append([OutRecord(TOPICS["control"], key, value, partition=0)])

    # ---------------------------------------------------------------------------------------------------- input

    async def arrivals(self) -> None:
        """Records come in over the first part of the safety phase, in bursts and drops."""
        rng = self.rng
        span_s = self.safety_h * HOUR_S / self.speed * rng.uniform(0.3, 0.9)
        left, twin = self.records, ""
        while left:
            await asyncio.sleep(rng.expovariate(1) * span_s / max(1, self.records / 4))
            for _ in range(min(left, rng.choice((1, 1, 2, 5, 12)))):
                left -= 1
                twin = self._arrive(twin)
        self.note(f"all {self.records} requests have come")

    def _kind(self) -> str:
        return self.rng.choices(KINDS, KIND_WEIGHTS)[0]

    def _haste(self) -> tuple[tuple[str, bytes], ...]:
        """The headers of a row, some of which have little time or want the lane."""
        rng = self.rng
        if not self.rush or rng.random() >= self.rush:
            return ()
        if rng.random() < 0.3:
            return (("priority", b"now"),)
        due = self.clock.now() + timedelta(hours=rng.choice((0.5, 3.0, 20.0, 25.0)))
        return (("deadline", due.isoformat().encode()),)

    def _arrive(self, twin: str) -> str:
        rng = self.rng
        kind = self._kind()
        number = len(self.books.requests)
        partition = rng.randrange(self.cluster.partition_count("requests"))
        custom_id = twin if kind == "twin" and twin else f"row-{number}"
        model = rng.choice(self.family.models)
        offset = self.cluster.end_offset("requests", partition)
        body = self.family.body(f"kind/{kind}/ {partition}/{offset}", model)
        value = json.dumps(self.family.record(custom_id, body)).encode()
        if kind == "bad":
            value = value[:-3]
        now = self.clock.now()
        (stored,) = self.cluster.append(
            [OutRecord("requests", custom_id.encode(), value, self._haste(), partition, round(now.timestamp() * 1000))]
        )
        assert stored.offset == offset
        self.books.add(Request(partition, offset, custom_id, kind, json.dumps(body).encode()))
        return custom_id

    # --------------------------------------------------------------------------------------------------- the life

    async def live(self) -> None:
        """Run it; ``fault`` says what was broken."""
        self._arm()
        for slot in range(self.replicas):
            self.launch(slot)
        tasks = [asyncio.create_task(self.misfortunes()), asyncio.create_task(self.arrivals())]
        broken = asyncio.create_task(self._broken.wait())
        both = asyncio.ensure_future(asyncio.gather(*tasks))
        await asyncio.wait({broken, both}, return_when=asyncio.FIRST_COMPLETED)
        if both.done():
            both.result()
        if not self.fault:
            self._calm()
            await self._until_done()
        if not self.fault:
            self._final()

    def _calm(self) -> None:
        self.is_safe = True
        self.note("---- no more misfortunes")
        self.cluster.faults.clear()
        self.provider.clear()
        for host in self.alive:
            host.wake()
        for slot in range(self.replicas):
            if not any(host.slot == slot for host in self.alive):
                self.launch(slot)

    async def _until_done(self) -> None:
        loop = asyncio.get_running_loop()
        limit_s = loop.time() + LIVENESS_H * HOUR_S / self.speed
        next_flush_s = 0.0
        while not self.fault:
            why = self._unfinished()
            if not why:
                return
            if loop.time() > limit_s:
                self.fail(f"not finished {LIVENESS_H} h after the last misfortune: {why}")
                return
            if loop.time() >= next_flush_s:  # rows of the account holds an operator would lift
                next_flush_s = loop.time() + 6 * HOUR_S / self.speed
                self._lift_holds()
            await asyncio.sleep(LOOK_S)

    def _lift_holds(self) -> None:
        """The operator comes by every six hours and lifts whatever holds he finds."""
        if self.cluster.find_topic(TOPICS["control"]) is None:
            return
        standing: dict[bytes, bool] = {}
        for record in self.cluster.committed_records(TOPICS["control"], 0):
            if record.key is not None and record.key.startswith(b"hold/"):
                standing[record.key] = record.value is not None
        for key, stands in standing.items():
            if stands:
                self.cluster.append([OutRecord(TOPICS["control"], key, None, partition=0)])

    def _unfinished(self) -> str:
        missing = self.books.open_requests()
        if missing:
            return f"{len(missing)} requests without an outcome: {[one.where for one in missing[:5]]}"
        lots = self.books.live_lots()
        if lots:
            return f"{len(lots)} lots are not CLEAN: {[(lot.lot_id, lot.state.value) for lot in lots[:3]]}"
        committed = self.cluster.group_offsets(GROUP, "requests")
        for partition in range(self.partitions):
            end = self.cluster.end_offset("requests", partition)
            if end > self.cluster.log_start("requests", partition) and committed.get(partition, 0) < end:
                return f"partition {partition} is committed to {committed.get(partition)} of {end}"
        running = [batch.id for batch in self.provider_batches if not batch.status.is_terminal]
        if running:
            return f"batches still run at the provider: {running[:3]}"
        files = files_left(self.family, self.provider)
        if files:
            return f"files left at the provider: {files[:3]}"
        if self.family is ANTHROPIC:
            left = [batch.id for batch in self.provider_batches if self._is_left(batch)]
            if left:
                return f"results left at the provider: {left[:3]}"
        return ""

    def _is_left(self, batch: InlineBatch) -> bool:
        """Whether its results are there though we know of them, and know that they are ours."""
        return not batch.is_deleted and batch.id in self.books.recorded - self.books.uncertain

    def _final(self) -> None:
        self._check_bill()
        for request in self.books.requests.values():
            self._check_class(request)
        longest_s = max((one.ended_at_s - one.began_at_s for one in self.cluster.finished), default=0.0)
        if longest_s > self.kafka_settings.transaction_timeout_s + OPEN_SLACK_S + self.outage_s:
            self.fail(f"a transaction was open for {longest_s:.1f} s")
        facts = self.outcome.facts
        facts["records"] += len(self.books.requests)
        facts["batches"] += len(self.provider_batches)
        facts["outcomes"] += self.books.outcomes

    def _check_bill(self) -> None:
        """Nothing was run twice but what was classified so, or counted as perhaps paid twice."""
        books, bill = self.books, self.provider.world.state.bill
        unread = strays = again = 0
        for where, request in books.requests.items():
            count = bill.body(request.body)
            stray = 0 if self.family.is_fenced else books.strays(where)
            strays += stray
            allowed = 1 + stray + (request.kind in {"missing", "unread"})
            # Answers that nobody got are held against the service's own count below.
            classified = allowed + books.rescued[where] + books.retried_sync[where] + books.sync_lost[where]
            classified += books.lost_in_waves[where]
            again += max(0, min(count.paid_runs - classified, books.vanished(where)))
            if count.paid_runs > classified + books.vanished(where):
                self.fail(
                    f"{where} ({request.kind}) was paid {count.paid_runs} times: {count.batch_runs} runs in batches, "
                    f"{count.sync_runs} by calls; rescued {books.rescued[where]}, retried {books.retried_sync[where]}, "
                    f"lost {books.lost_in_waves[where]}"
                )
            unread += max(0, min(count.paid_runs - allowed - books.rescued[where], books.sync_lost[where]))
        counted = sum(self.paid_twice.values())
        lawful = set() if self.family.is_fenced else {UNFENCED}
        other = {
            reason: rows
            for reason, rows in self.paid_twice.items()
            if not reason.startswith("sync_") and reason not in lawful
        }
        if strays + again > self.paid_twice[UNFENCED]:
            self.fail(
                f"{strays} rows were in batches that nobody found, {again} went again since somebody had deleted "
                f"theirs, and {self.paid_twice} were counted"
            )
        if other or (counted - self.paid_twice[UNFENCED] and not self.has_lane):
            self.fail(f"{self.paid_twice} counted as possibly paid twice, where the file could be deleted")
        if unread > counted:
            self.fail(f"{unread} rows were paid twice for answers nobody got, and {counted} were counted")
        lost = sum(books.lost_in_waves.values())
        if lost > self.paid_twice["sync_wave_lost"]:
            self.fail(f"{lost} rows of lost waves go again, and {self.paid_twice} were counted")
        by_owner: Counter[str] = Counter()
        for wave, rows in self.lost_waves.items():
            by_owner[books.wave_owners[wave]] += rows
        for host in self.hosts:
            most = self.wave_rows * (1 + host.told["partition_lost"])
            if by_owner[host.name] > most:
                self.fail(f"{host.name} left {by_owner[host.name]} rows in waves; it may have left {most}")
        facts = self.outcome.facts
        facts["sync_calls"] += sum(books.sync_calls.values())
        facts["rescued"] += sum(books.rescued.values())
        facts["lost_in_waves"] += lost
        facts["paid_twice_counted"] += counted
        facts["strays"] += strays
        facts["vanished"] += again

    def _check_class(self, request: Request) -> None:
        (said,) = request.outcomes
        ended = "succeeded" if said["kind"] == "result" else said["error"]["class"]
        books = self.books
        expired = books.times_ended(request.where, Status.EXPIRED) + books.times_ended(request.where, Status.CANCELLED)
        failed = books.times_ended(request.where, Status.FAILED)
        lawful = {
            "filter": {"content_filtered"},
            "httpall": {"transient"},
            "bad": {"bad_record"},
            "twin": {"succeeded", "duplicate"},
        }.get(request.kind, {"succeeded"})
        if expired > 1:
            lawful = lawful | {"expired", "cancelled"}
        if failed:
            lawful = lawful | {"invalid_request"}
        if self.provider.struck["lagging error"] and request.kind in {"httpall", "filter"}:
            lawful = lawful | {"unreadable", "transient"}  # its line was half there, or not yet the last word
        if any(name.startswith("sync ") for name in self.provider.struck) or (
            self.has_lane and self.outcome.misfortunes["away"]
        ):
            lawful = lawful | {"transient", "unreadable"}
        if self.provider.struck["sync cut"] and request.kind == "filter":
            lawful = lawful | {"invalid_request"}  # of the refusal only the status was read
        if self.has_lane and self.route["sync_unknown"] == "fail":
            lawful = lawful | {"sync_unknown"}
        if request.offset < self.books.deleted_below.get(request.partition, 0):
            lawful = lawful | {"retention"}
        if ended not in lawful:
            self.fail(f"{request.where} ({request.kind}) ended as {ended}; lawful: {sorted(lawful)}")


NOTED = frozenset(
    {
        "partition_restored", "partition_lost", "partition_released", "partition_refused", "restore_failed",
        "batch_state_changed", "batch_sealed", "batch_dissolved", "batch_adopted", "batch_submission_unknown",
        "batch_refused", "key_released", "topic_grown", "orphan_found", "orphan_cancelled", "orphan_collected", "orphan_file_deleted", "input_expiring", "rows_retried", "rows_missing", "settle_failed", "news_ignored",
        "batch_twin_cancelled", "batch_not_ours", "batch_gone", "batch_failed_whole", "batch_incomplete", "input_lost", "possibly_paid_twice",
    }
)  # fmt: skip
LANE_POINTS = tuple(point for point in Failpoint if point.name.startswith(("WAVE", "RESCUE", "SYNC_CALL")))
DISOWN_POINTS = (Failpoint.DISOWN_BEFORE, Failpoint.DISOWN_AFTER)
"""Only where nothing but its lines tells whose a batch is."""
HAND_LOOK_S = 0.1
"""Real seconds between two looks whether a batch has ended that somebody wants to delete."""
VANISHING_LIVES = 0.3
"""Share of the lives, where batches can be deleted, in which somebody may do that behind our back."""
TURNS = 5
TURNS_S = 15.0
"""So many takings by two processes in turns, within so many real seconds, are a quarrel."""
OPEN_SLACK_S = 3.0
"""The broker looks for transactions that are too old every two seconds."""
HOLD_S = 15.0
"""Real seconds in which a hold that a replica tells of must stand in the control topic."""
LIVENESS_H = 400.0
"""Hours of the service's time in which everything must come to its end once nothing goes wrong any more."""


class WatchedKafka(SimKafka):
    """The port, with an eye on who takes which partition."""

    def __init__(self, world: World, process: Any) -> None:
        super().__init__(world.cluster, process, world.kafka_settings)
        self._world = world

    def partition_producer(self, topic: str, partition: int, group: str, transactional_id: str) -> Any:
        made = super().partition_producer(topic, partition, group, transactional_id)
        init = made.init

        async def watched() -> None:
            await init()
            if transactional_id == f"{TOPICS['ledger']}.{partition}":  # not the start-up check's own producer
                self._world.claimed(partition, self.process.name)

        made.init = watched
        return made


class _History(list[str]):
    """The cluster's history and everybody else's in one list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def append(self, line: str) -> None:
        self._lines.append(line)


def ready() -> None:
    """Load what every life needs, once, before processes are forked off."""
    warm_up()
    gc.collect()
    gc.freeze()


def family_of(seed: int, name: str = OPENAI.name) -> Family:
    """The family of a life: the one that is named, or for ``any`` the one that the seed draws."""
    if name != "any":
        return FAMILIES[name]
    return FAMILIES[random.Random(f"{seed}:family").choices(list(WEIGHTS), list(WEIGHTS.values()))[0]]


def live(seed: int, make: Callable[[int, Path, Outcome], World] | None = None, provider: str = OPENAI.name) -> Outcome:
    """Run one life, in the world that ``make`` makes; never raises."""
    outcome = Outcome(seed)
    shm = Path("/dev/shm")  # in memory, where that can be
    folder = Path(tempfile.mkdtemp(prefix="batchferry-life-", dir=shm if shm.is_dir() else None))
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # tasks of dead processes, at the end of a life

    async def main() -> None:
        world = make(seed, folder, outcome) if make else World(seed, folder, outcome, family_of(seed, provider))
        loop = asyncio.get_running_loop()
        try:
            with installed(world.reach):
                await world.live()
        except Stuck:
            raise
        except Exception:  # noqa: BLE001 (a fault of the simulation is a fault too)
            world.fail(traceback.format_exc())
        outcome.fault = world.fault
        outcome.family = world.family.name
        outcome.history = world.history
        outcome.real_s = loop.time()
        outcome.business_h = loop.time() * world.speed / HOUR_S

    gc.disable()  # what dead processes leave behind is not to be run by a collection
    try:
        with (
            seeded(random.Random(f"{seed}:ids")),
            patch.multiple(batchferry.app, **host_module.parts(random.Random(f"{seed}:jitter"))),
            patch.multiple(engine_supervisor, STUB_SWEEP_S=20.0),
            patch.multiple(engine_partition, ORPHAN_HORIZON_S=36 * HOUR_S),
        ):
            run(main)
    except Stuck as error:
        outcome.fault = str(error)
    finally:
        gc.enable()
        shutil.rmtree(folder, ignore_errors=True)
    return outcome
