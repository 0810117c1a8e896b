"""What can go wrong between clients and the cluster: switched on by a simulation, struck by seeded chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """One thing that goes wrong once, for ``Faults.once``."""

    LOSE_REQUEST = "lose request"
    """The request never arrives. Of a commit: not done, and CommitUnknown told."""
    LOSE_REPLY = "lose reply"
    """Done, and never told. Of a commit: done, and CommitUnknown told."""
    SLOW_REQUEST = "slow request"
    """Arrives after a delay from ``FaultRates.slow_s``, perhaps after its caller gave up."""
    SLOW_REPLY = "slow reply"
    ABORT = "abort"
    """The coordinator aborts the transaction before the request (of a transactional producer) is looked at."""
    TOO_LARGE = "too large"
    """The broker refuses a produce request as MESSAGE_TOO_LARGE."""


@dataclass(frozen=True, kw_only=True)
class FaultRates:
    """Chances between 0 and 1 that a request is struck; all off by default."""

    lose_commit_request: float = 0.0
    lose_commit_reply: float = 0.0
    lose_produce_reply: float = 0.0
    """Of a producer's records: its deadline passes although they were written."""
    slow_request: float = 0.0
    """Of any request; a commit that arrives after its caller gave up counts, unless a successor was faster."""
    slow_reply: float = 0.0
    slow_s: tuple[float, float] = (0.5, 5.0)
    abort_transaction: float = 0.0
    """Of an end request: the coordinator had aborted the transaction just before."""
    too_large: float = 0.0
    """Of a produce request."""
    rebalance: float = 0.0
    """Of a heartbeat: the group is rebalanced for no reason."""


class Faults:
    """The switchboard of one cluster."""

    def __init__(
        self,
        rng: random.Random,
        later: Callable[[float, Callable[[], None]], object],
        note: Callable[[str], None],
        on_back: Callable[[], None],
    ) -> None:
        self._rng = rng
        self._later = later
        self._note = note
        self._on_back = on_back
        self.rates = FaultRates()
        self._once: list[tuple[FaultKind, str, str | None]] = []
        self._is_away = False
        self._cut: dict[str, None] = {}
        self._spans: dict[str, int] = {}
        """The newest span of each absence, so that an older one's end does not end it."""
        self._waiting: list[tuple[str, Callable[[], None]]] = []

    @property
    def is_broker_away(self) -> bool:
        """Whether nobody reaches the broker now."""
        return self._is_away

    def is_away(self, process: str) -> bool:
        """Whether this process does not reach the broker now."""
        return self._is_away or process in self._cut

    def take_broker_away(self, for_s: float) -> None:
        """Nobody reaches the broker for so long. What it holds stays; sessions begin anew when it is back."""
        self._is_away = True
        self._note(f"fault: broker away for {for_s:.1f} s")
        self._end_later("", for_s)

    def cut_off(self, process: str, for_s: float) -> None:
        """This process does not reach the broker for so long; for the others it looks dead."""
        self._cut[process] = None
        self._note(f"fault: {process} cut off for {for_s:.1f} s")
        self._end_later(process, for_s)

    def once(self, kind: FaultKind, call: str, process: str | None = None) -> None:
        """Strike the next request of this name, of this process if one is named.

        Names: ``init``, ``produce``, ``offsets``, ``commit``, ``abort``, ``plain``, ``fetch``, ``bounds``,
        ``join``, ``heartbeat``, ``leave``, ``metadata``, ``admin``, ``read-position``.
        """
        self._once.append((kind, call, process))

    def clear(self) -> None:
        """End every fault and every absence now."""
        self._note("faults cleared")
        self.rates = FaultRates()
        self._once.clear()
        self._cut.clear()
        was_away, self._is_away = self._is_away, False
        self._spans.clear()
        if was_away:
            self._on_back()
        self._call_back()

    def when_back(self, process: str, call: Callable[[], None]) -> None:
        """Call this once the process reaches the broker again."""
        self._waiting.append((process, call))

    def strike(self, call: str, process: str) -> frozenset[FaultKind]:
        """What goes wrong with this request."""
        struck: dict[FaultKind, None] = {}
        for entry in self._once:
            kind, wanted, whose = entry
            if wanted == call and whose in {None, process}:
                self._once.remove(entry)
                struck[kind] = None
                break
        rates = self.rates
        if call == "commit":
            self._try(struck, FaultKind.LOSE_REQUEST, rates.lose_commit_request)
            self._try(struck, FaultKind.LOSE_REPLY, rates.lose_commit_reply)
            self._try(struck, FaultKind.ABORT, rates.abort_transaction)
        elif call in {"produce", "plain"}:
            self._try(struck, FaultKind.LOSE_REPLY, rates.lose_produce_reply)
            self._try(struck, FaultKind.TOO_LARGE, rates.too_large)
        self._try(struck, FaultKind.SLOW_REQUEST, rates.slow_request)
        self._try(struck, FaultKind.SLOW_REPLY, rates.slow_reply)
        if struck:
            self._note(f"fault: {', '.join(struck)} ({call} of {process})")
        return frozenset(struck)

    def slow_s(self) -> float:
        """How much longer a slow message takes."""
        return self._rng.uniform(*self.rates.slow_s)

    def wants_rebalance(self) -> bool:
        """Whether this heartbeat starts a rebalance nobody needs."""
        rate = self.rates.rebalance
        return rate > 0 and self._rng.random() < rate

    def _try(self, struck: dict[FaultKind, None], kind: FaultKind, rate: float) -> None:
        if rate > 0 and self._rng.random() < rate:
            struck[kind] = None

    def _end_later(self, process: str, for_s: float) -> None:
        span = self._spans[process] = self._spans.get(process, 0) + 1
        self._later(for_s, lambda: self._end(process, span))

    def _end(self, process: str, span: int) -> None:
        if self._spans.get(process) != span:
            return
        if process:
            self._cut.pop(process, None)
            self._note(f"{process} reaches the broker again")
        elif self._is_away:
            self._is_away = False
            self._note("broker back")
            self._on_back()
        self._call_back()

    def _call_back(self) -> None:
        waiting, self._waiting = self._waiting, []
        for process, call in waiting:
            if self.is_away(process):
                self._waiting.append((process, call))
            else:
                call()
