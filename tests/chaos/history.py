"""What happened in a run, with its times: our own acts, and what the replicas logged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Act:
    """Something we did. ``until_s`` None: it had no length, or is not over."""

    at_s: float
    what: str
    until_s: float | None = None


@dataclass(slots=True)
class History:
    """Our acts, in real seconds since the start of the run."""

    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    acts: list[Act] = field(default_factory=list)
    journal: Path | None = None
    """Where acts are also written down as they begin, for a run that is cut off."""
    _began: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """The start is now."""
        self.started, self._began = datetime.now(UTC), time.monotonic()

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def tell(self, what: str) -> Act:
        """Write down an act; whoever knows its end sets ``until_s``."""
        act = Act(self.now_s(), what)
        self.acts.append(act)
        if self.journal is not None:
            with self.journal.open("a") as journal:
                journal.write(f"{act.at_s:8.2f} s  {act.what}\n")
        return act

    def since_start_s(self, stamp: str) -> float:
        """A log line's timestamp as seconds since the start."""
        return (datetime.fromisoformat(stamp) - self.started).total_seconds()

    def lines(self) -> Iterator[str]:
        """For people."""
        for act in sorted(self.acts, key=lambda one: one.at_s):
            until = "" if act.until_s is None else f"  [until {act.until_s:.1f} s]"
            yield f"{act.at_s:8.2f} s  {act.what}{until}"


@dataclass(frozen=True, slots=True)
class Told:
    """One line of a replica's log."""

    at_s: float
    replica: str
    life: int
    """Which of the replica's processes said it, from 1."""
    event: str
    fields: Mapping[str, Any]


def told_by(replica: str, log: Path, history: History) -> Iterator[Told]:
    """Every line of a log; a line that a kill tore is passed over."""
    life = 0
    with log.open("rb") as lines:
        for line in lines:
            try:
                fields = json.loads(line)
                at_s = history.since_start_s(fields["timestamp"])
                event = fields["event"]
            except (ValueError, KeyError, TypeError):
                continue
            life += event == "server_listening"  # the first word of every process
            yield Told(at_s, replica, life, event, fields)


@dataclass(slots=True)
class Spans:
    """How long partitions took to come back, in real seconds."""

    restores_s: list[float] = field(default_factory=list)
    """``took_s`` of every restore: the last attempt alone."""
    since_assigned_s: list[float] = field(default_factory=list)
    """From the assignment until the partition can settle, all attempts together."""
    calm_since_assigned_s: list[float] = field(default_factory=list)
    """Those of them that neither an outage of the broker nor a freeze of the replica itself touched."""
    unowned: list[tuple[float, int, float]] = field(default_factory=list)
    """(length, partition, when) of each time that nobody could settle a partition, from its first restore on."""


def spans(told: Iterable[Told], ends: Mapping[tuple[str, int], float], disturbed: Mapping[str, list[Act]]) -> Spans:
    """Read restores off the logs.

    Args:
        told: all lines, by time.
        ends: when each (replica, life) was killed or ended.
        disturbed: by replica, what kept it from restoring: its own freezes and the broker's outages.
    """
    found = Spans()
    assigned: dict[tuple[str, int, int], float] = {}
    owned_until: dict[int, float] = {}
    owners: dict[int, set[tuple[str, int]]] = {}
    steps: list[tuple[float, int, Told | tuple[str, int]]] = [(one.at_s, 1, one) for one in told]
    steps += [(at_s, 0, whose) for whose, at_s in ends.items()]
    steps.sort(key=lambda step: (step[0], step[1]))
    for at_s, _, step in steps:
        if not isinstance(step, Told):
            for partition, whose in owners.items():
                _leave(whose, step, partition, at_s, owned_until)
            continue
        if "partition" not in step.fields:
            continue
        partition, who = step.fields["partition"], (step.replica, step.life)
        if step.event == "partition_assigned":
            assigned[*who, partition] = at_s
        elif step.event == "partition_restored":
            found.restores_s.append(step.fields["took_s"])
            since = assigned.pop((*who, partition), None)
            if since is not None:
                found.since_assigned_s.append(at_s - since)
                if not any(_touches(act, since, at_s) for act in disturbed.get(step.replica, [])):
                    found.calm_since_assigned_s.append(at_s - since)
            mine = owners.setdefault(partition, set())
            if not mine and partition in owned_until:
                found.unowned.append((at_s - owned_until[partition], partition, owned_until[partition]))
            mine.add(who)
        elif step.event in {"partition_lost", "partition_released"}:
            assigned.pop((*who, partition), None)
            _leave(owners.get(partition, set()), who, partition, at_s, owned_until)
    return found


def _leave(
    whose: set[tuple[str, int]], who: tuple[str, int], partition: int, at_s: float, until: dict[int, float]
) -> None:
    if who in whose:
        whose.remove(who)
        if not whose:
            until[partition] = at_s


def _touches(act: Act, since_s: float, until_s: float) -> bool:
    return act.at_s <= until_s and (act.until_s is None or act.until_s >= since_s)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
