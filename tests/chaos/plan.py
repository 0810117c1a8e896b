"""The plan of misfortunes: a pure function of seed and length, so that a run can be planned again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REPLICAS = 3
SESSION_S = 5.0
"""Session timeout of the replicas (real seconds); freezes are planned around it."""
CREATE_S = 3.0
"""How long a create may take before its caller takes it for lost (real seconds); late ones are planned beyond it."""


class Kind(StrEnum):
    """What befalls somebody."""

    KILL = "kill"
    """SIGKILL, and a start some time later."""
    FREEZE_SHORT = "short freeze"
    """SIGSTOP for less than the session timeout."""
    FREEZE_LONG = "long freeze"
    """SIGSTOP beyond the session timeout, then SIGCONT: a zombie wakes up."""
    KILL_FROZEN = "kill while frozen"
    """SIGSTOP beyond the session timeout, then SIGKILL."""
    TERMINATE = "terminate"
    """SIGTERM, and a start some time later."""
    ROLLING = "rolling restart"
    """SIGTERM and start, one replica after the other."""
    BROKER_KILL = "broker kill"
    BROKER_FREEZE = "broker freeze"
    PROVIDER_DOWN = "provider restart"
    """The provider refuses connections for a while, and comes back on its data."""
    PROVIDER = "provider fault"


REPLICA_KINDS = frozenset({Kind.KILL, Kind.FREEZE_SHORT, Kind.FREEZE_LONG, Kind.KILL_FROZEN, Kind.TERMINATE})
BROKER_KINDS = frozenset({Kind.BROKER_KILL, Kind.BROKER_FREEZE})
BROKER_PEACE_S = 25.0
"""The broker is let alone for so long: while it is away (it takes seconds to start) nothing else can be proved."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule for the provider's transport (see ``FaultRule``), with a name for the count."""

    name: str
    rule: Mapping[str, Any]
    is_gate: bool = False
    """Calls are held until the fault ends."""


_CREATE, _SOME = {"call": "create"}, {"probability": 0.6}

FAULTS = (
    Fault("create: reply lost", {**_CREATE, "kind": "lose_reply", **_SOME}),
    Fault("create: dropped", {**_CREATE, "kind": "drop", **_SOME}),
    Fault("create: 500", {**_CREATE, "status": 500, **_SOME}),
    Fault("create: 500 though made", {**_CREATE, "status": 500, "after_work": True, **_SOME}),
    Fault(
        "create: gateway page though made", {**_CREATE, "status": 502, "body": "<html>", "after_work": True, **_SOME}
    ),
    Fault(
        "create: 429", {**_CREATE, "status": 429, "error_code": "rate_limit_exceeded", "retry_after_s": 900, **_SOME}
    ),
    Fault("create: refused", {**_CREATE, "status": 400, "error_type": "invalid_request_error", **_SOME}),
    Fault("create: key refused", {**_CREATE, "status": 401, "error_code": "invalid_api_key", **_SOME}),
    Fault("create: comes late", {**_CREATE, "kind": "gate", **_SOME}, is_gate=True),
    Fault("create: answer comes late", {**_CREATE, "kind": "gate", "after_work": True, **_SOME}, is_gate=True),
    Fault("upload: reply lost", {"call": "upload", "kind": "lose_reply", **_SOME}),
    Fault("upload: 500", {"call": "upload", "status": 500, **_SOME}),
    Fault("upload: hangs", {"call": "upload", "kind": "gate", **_SOME}, is_gate=True),
    Fault("retrieve: 500", {"call": "retrieve", "status": 500, **_SOME}),
    Fault("retrieve: 404", {"call": "retrieve", "status": 404, **_SOME}),
    Fault("retrieve: hangs", {"call": "retrieve", "kind": "gate", **_SOME}, is_gate=True),
    Fault("list: 500", {"call": "list", "status": 500, **_SOME}),
    Fault("list: cut", {"call": "list", "kind": "cut", **_SOME}),
    Fault("content: cut", {"call": "content", "kind": "cut", "share": 0.7, **_SOME}),
    Fault("content: shortened", {"call": "content", "kind": "shorten", "share": 0.6, **_SOME}),
    Fault("content: 500", {"call": "content", "status": 500, **_SOME}),
    Fault("content: hangs", {"call": "content", "kind": "gate", **_SOME}, is_gate=True),
    Fault("delete: reply lost", {"call": "delete", "kind": "lose_reply", **_SOME}),
    Fault("delete: 500", {"call": "delete", "status": 500, **_SOME}),
    Fault("any call: 503", {"call": "*", "status": 503, "probability": 0.3}),
    Fault("any call: dropped", {"call": "*", "kind": "drop", "probability": 0.2}),
)
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Misfortune:
    """One misfortune: when it comes (real seconds from the start), to whom, for how long."""

    at_s: float
    kind: Kind
    lasts_s: float
    """How long somebody is down, frozen, or badly treated."""
    replica: int | None = None
    forgets: bool = False
    """The replica's state folder is emptied before it starts again."""
    fault: str = ""

    @property
    def text(self) -> str:
        """For the history."""
        whom = "" if self.replica is None else f" of replica {self.replica + 1}"
        how = f" ({self.fault})" if self.fault else ""
        return f"{self.kind.value}{whom}{how} for {self.lasts_s:.1f} s{', folder emptied' if self.forgets else ''}"


def plan(seed: int, length_s: float) -> list[Misfortune]:
    """Misfortunes of a run, by time: of processes and broker in one row, of the provider in another.

    Kinds are drawn from a shuffled deck that is only shuffled again when it is empty: nothing stays away by chance.
    """
    rng = random.Random(f"misfortunes {seed}")
    found = [*_to_processes(rng, length_s), *_to_provider(rng, length_s)]
    return sorted(found, key=lambda one: one.at_s)


def _deck(rng: random.Random, cards: list[Any]) -> Iterator[Any]:
    while True:
        rng.shuffle(cards)
        yield from cards


def _to_processes(rng: random.Random, length_s: float) -> Iterator[Misfortune]:
    rare = [Kind.ROLLING] if length_s >= 60 else []
    kinds = _deck(
        rng,
        [
            *([Kind.KILL] * 4), *([Kind.FREEZE_SHORT] * 2), *([Kind.FREEZE_LONG] * 2), Kind.KILL_FROZEN,
            Kind.TERMINATE, Kind.BROKER_KILL, Kind.BROKER_FREEZE, *rare,
        ],
    )  # fmt: skip
    first = [Kind.KILL, Kind.BROKER_KILL, Kind.FREEZE_LONG]  # even the shortest run has these
    rng.shuffle(first)
    free_at = [0.0] * REPLICAS
    broker_free_at = 0.0
    at_s = rng.uniform(2.0, 4.0)
    while at_s < length_s:
        kind = first.pop() if first else next(kinds)
        if kind in REPLICA_KINDS:
            idle = [one for one in range(REPLICAS) if free_at[one] <= at_s]
            if not idle:
                at_s = min(free_at)
                continue
            one = rng.choice(idle)
            lasts_s = _lasts_s(rng, kind)
            free_at[one] = at_s + lasts_s + 2.0
            yield Misfortune(at_s, kind, lasts_s, one, forgets=kind is not Kind.TERMINATE and rng.random() < 0.5)
        else:
            if kind in BROKER_KINDS:
                if at_s < broker_free_at:
                    continue
                broker_free_at = at_s + BROKER_PEACE_S
            yield Misfortune(at_s, kind, _lasts_s(rng, kind))
        paces = (rng.uniform(0.0, 1.0), rng.uniform(1.0, 6.0), rng.uniform(3.0, 10.0))
        at_s += rng.uniform(0.5, 3.0) if first else rng.choice(paces)


def _lasts_s(rng: random.Random, kind: Kind) -> float:
    match kind:
        case Kind.FREEZE_SHORT:
            return rng.uniform(0.3, SESSION_S * 0.8)
        case Kind.FREEZE_LONG | Kind.KILL_FROZEN:
            return SESSION_S + rng.uniform(1.0, 8.0)
        case Kind.BROKER_FREEZE:
            return rng.uniform(0.5, 9.0)
        case Kind.BROKER_KILL:
            return rng.uniform(0.0, 4.0)
        case _:
            return rng.choice((0.0, rng.uniform(0.0, 2.0), rng.uniform(2.0, 9.0)))


def _to_provider(rng: random.Random, length_s: float) -> Iterator[Misfortune]:
    faults = _deck(rng, [fault.name for fault in FAULTS])
    at_s = rng.uniform(1.0, 3.0)
    down_at_s = rng.uniform(0.3, 0.9) * min(length_s, 90.0)
    while at_s < length_s:
        if at_s >= down_at_s:
            yield Misfortune(at_s, Kind.PROVIDER_DOWN, rng.uniform(0.5, 4.0))
            down_at_s = at_s + rng.uniform(40.0, 90.0)
        else:
            name = next(faults)
            lasts_s = rng.uniform(0.8, 3.0)
            if name.startswith("create: ") and name.endswith(" late"):
                lasts_s = rng.choice((CREATE_S * 0.5, CREATE_S + rng.uniform(0.2, 3.0)))
            yield Misfortune(at_s, Kind.PROVIDER, lasts_s, fault=name)
        at_s += rng.uniform(0.5, 3.0)
