"""Transport faults, scripted per call: lost replies, refusals, cut downloads and gates that hold a call.

A rule counts the calls it is about and fires on some of them. Rules can be put and taken away while the
simulator runs, by the object in the same process or over the admin API from another one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class CallName(StrEnum):
    """The calls a fault can be about."""

    ANY = "*"
    UPLOAD = "upload"
    CREATE = "create"
    RETRIEVE = "retrieve"
    LIST = "list"
    CANCEL = "cancel"
    CONTENT = "content"
    DELETE = "delete"
    SYNC = "sync"
    FILE_RETRIEVE = "file_retrieve"
    FILE_LIST = "file_list"
    MODELS = "models"


class FaultKind(StrEnum):
    """What goes wrong."""

    ANSWER = "answer"
    """Another answer instead of the true one, before the work or (``after_work``) behind it."""
    LOSE_REPLY = "lose_reply"
    """The work is done, then the connection is closed without an answer."""
    DROP = "drop"
    """The connection is closed and nothing was done."""
    CUT = "cut"
    """The answer's headers promise everything, the connection is closed after ``share`` of the body."""
    SHORTEN = "shorten"
    """A well-formed answer with only ``share`` of the body: nothing in the transport shows it."""
    REPEAT = "repeat"
    """A gateway sends the call on twice: the work is done two times and the second answer is given."""
    DELAY = "delay"
    """The work is done at once, and answered ``delay_s`` later."""
    GATE = "gate"
    """The call is held at the gate named ``gate`` until it is released."""


class FaultRule(BaseModel):
    """One fault. Without ``nth``, ``every`` and ``probability`` it hits each call it is about."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    call: CallName
    kind: FaultKind = FaultKind.ANSWER
    nth: Annotated[int, Field(ge=1)] | None = None
    """Only the n-th call since the rule was put (1-based)."""
    every: Annotated[int, Field(ge=1)] | None = None
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    until_count: Annotated[int, Field(ge=1)] | None = None
    """Fires so often at most."""
    start_s: Annotated[float, Field(ge=0)] = 0.0
    """In force from so many virtual seconds after the rule was put; calls before are not counted,"""
    for_s: Annotated[float, Field(gt=0)] | None = None
    """and for so many; None: for good."""
    after_work: bool = False
    """Do the work first; for ``answer`` and ``gate``."""
    status: Annotated[int, Field(ge=400, le=599)] = 500
    error_type: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    message: str | None = None
    body: str | None = None
    """This text instead of the error envelope; an empty text is an answer without a body."""
    retry_after_s: Annotated[float, Field(ge=0)] | None = None
    retry_after_ms: Annotated[int, Field(ge=0)] | None = None
    should_retry: bool | None = None
    """Sent as ``x-should-retry``."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    """Virtual seconds."""
    gate: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "gate"


class Gate:
    """A place where calls wait until they are let through."""

    def __init__(self) -> None:
        self.waiting = 0
        self.passed = 0
        self._permits = 0
        self._open = False
        self._changed = asyncio.Condition()

    async def pass_through(self) -> None:
        """Wait here until released."""
        async with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: self._open or self._permits > 0)
                if not self._open:
                    self._permits -= 1
                self.passed += 1
            finally:
                self.waiting -= 1
                self._changed.notify_all()

    async def release(self, count: int | None = None) -> None:
        """Let ``count`` calls through, those to come included; None opens the gate for good."""
        async with self._changed:
            if count is None:
                self._open = True
            else:
                self._permits += count
            self._changed.notify_all()

    async def reached(self, count: int = 1) -> None:
        """Wait until that many calls stand here or have passed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.waiting + self.passed >= count)


@dataclass(slots=True)
class _Standing:
    """A rule with what it has seen."""

    rule: FaultRule
    calls: int = 0
    fired: int = 0
    number: int = 0
    put_at: float = 0.0


@dataclass(slots=True)
class FaultPlan:
    """The rules in force, in the order they were put."""

    seed: int = 0
    time: Callable[[], float] = time.monotonic
    """Seconds of the clock by which ``start_s`` and ``for_s`` go."""
    _standing: list[_Standing] = field(default_factory=list)
    _gates: dict[str, Gate] = field(default_factory=dict)
    _numbers: int = 0
    _rng: random.Random = field(init=False)
    calls: dict[str, int] = field(default_factory=dict)
    """Calls seen so far, by name."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def put(self, rule: FaultRule) -> int:
        """Put a rule in force; the answer is its number."""
        self._numbers += 1
        self._standing.append(_Standing(rule, number=self._numbers, put_at=self.time()))
        return self._numbers

    def take_away(self, number: int) -> bool:
        """Take a rule out of force; False when there is none of this number."""
        kept = [standing for standing in self._standing if standing.number != number]
        found = len(kept) < len(self._standing)
        self._standing = kept
        return found

    def clear(self) -> None:
        """Take every rule out of force; calls held at gates stay held."""
        self._standing.clear()

    def gate(self, name: str) -> Gate:
        """The gate of this name; it exists from the first time it is named."""
        return self._gates.setdefault(name, Gate())

    async def release_all(self) -> None:
        """Open every gate."""
        for gate in self._gates.values():
            await gate.release()

    def draw(self, call: CallName) -> list[FaultRule]:
        """The faults that hit this call: any number of gates, and at most one fault of another kind."""
        self.calls[call] = self.calls.get(call, 0) + 1
        hits: list[FaultRule] = []
        broken = False
        for standing in self._standing:
            rule = standing.rule
            if rule.call not in {call, CallName.ANY}:
                continue
            elapsed_s = self.time() - standing.put_at
            if elapsed_s < rule.start_s or (rule.for_s is not None and elapsed_s >= rule.start_s + rule.for_s):
                continue
            standing.calls += 1
            if broken and rule.kind is not FaultKind.GATE:
                continue
            if rule.until_count is not None and standing.fired >= rule.until_count:
                continue
            if rule.nth is not None and standing.calls != rule.nth:
                continue
            if rule.every is not None and standing.calls % rule.every != 0:
                continue
            if rule.probability < 1 and self._rng.random() >= rule.probability:
                continue
            standing.fired += 1
            hits.append(rule)
            broken = broken or rule.kind is not FaultKind.GATE
        return hits

    def describe(self) -> dict[str, Any]:
        """Rules with their counters, and gates, as JSON-ready values."""
        return {
            "rules": [
                {
                    "number": standing.number,
                    "calls": standing.calls,
                    "fired": standing.fired,
                    "rule": standing.rule.model_dump(mode="json", exclude_defaults=True),
                }
                for standing in self._standing
            ],
            "gates": {
                name: {"waiting": gate.waiting, "passed": gate.passed} for name, gate in sorted(self._gates.items())
            },
            "calls": dict(sorted(self.calls.items())),
        }
