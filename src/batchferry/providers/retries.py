"""Which provider call is repeated after which failure, and when: one table.

The machine has its own patience on top of this (polls come again, batches are made anew); what stands here only
bridges the hiccups inside one call. ``SENT_ONCE`` have no line and get none from a server hint either: they are not
idempotent, and a repeated one is a second bill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from types import MappingProxyType

from batchferry.domain.provider import CallFailed, CallFailure

MAX_OBEYED_HINT_S = 120.0
"""A server that asks for a longer pause is not waited for inside a call; the caller learns its wish instead."""


class Call(StrEnum):
    """The calls of a provider, as they are named in ``CallFailed.call``."""

    UPLOAD = "upload"
    CREATE = "create"
    RETRIEVE = "retrieve"
    LIST = "list"
    LIST_FILES = "list_files"
    CANCEL = "cancel"
    DOWNLOAD = "download"
    DELETE = "delete"
    ANSWER = "answer"
    """One row at the ordinary endpoint."""


SENT_ONCE = frozenset({Call.CREATE, Call.ANSWER})
"""Calls that go out once: what is lost on the way may have been carried out, and paid."""


_BROKEN, _SLOWED, _ODD = CallFailure.UNAVAILABLE, CallFailure.THROTTLED, CallFailure.PROTOCOL

_PAUSES_S: Mapping[tuple[Call, CallFailure], tuple[float, ...]] = MappingProxyType(
    {
        # An upload starts from zero each time: the file is on our disk, and a half-sent one has no id.
        (Call.UPLOAD, _BROKEN): (1, 2, 4, 8, 16),
        (Call.UPLOAD, _SLOWED): (2, 4, 8, 16, 32),
        (Call.UPLOAD, _ODD): (1,),
        # Polls come again by themselves, and the account's shared back-off wants to hear of a 429 at once.
        (Call.RETRIEVE, _BROKEN): (1, 2),
        (Call.LIST, _BROKEN): (1, 2, 4),
        (Call.LIST_FILES, _BROKEN): (1, 2, 4),
        (Call.CANCEL, _BROKEN): (1, 2, 4),
        (Call.CANCEL, _SLOWED): (1, 2, 4),
        # No server is known to resume, so a download starts from zero; some answer 502 for minutes after the end.
        (Call.DOWNLOAD, _BROKEN): (1, 2, 4, 8, 16, 32, 64),
        (Call.DOWNLOAD, _SLOWED): (2, 4, 8, 16, 32),
        (Call.DELETE, _BROKEN): (1, 2, 4),
        (Call.DELETE, _SLOWED): (1, 2, 4),
    }
)
"""Pauses in seconds before the second, third, ... try. No line: the first failure is handed up."""

_BUDGET_S: Mapping[Call, float] = MappingProxyType(
    {
        Call.UPLOAD: 1800.0,
        Call.RETRIEVE: 60.0,
        Call.LIST: 60.0,
        Call.LIST_FILES: 60.0,
        Call.CANCEL: 60.0,
        Call.DOWNLOAD: 1800.0,
        Call.DELETE: 60.0,
    }
)
"""Seconds from the first try after which no further one begins."""


@dataclass(frozen=True, slots=True)
class CallRetries:
    """The table with its bounds; the default is what every account gets."""

    pauses_s: Mapping[tuple[Call, CallFailure], tuple[float, ...]] = field(default_factory=lambda: _PAUSES_S)
    budget_s: Mapping[Call, float] = field(default_factory=lambda: _BUDGET_S)
    urged_pauses_s: tuple[float, ...] = (1, 2)
    """For a failure without a line when the server says ``x-should-retry: true``."""
    max_obeyed_hint_s: float = MAX_OBEYED_HINT_S
    jitter: float = 0.25
    """Largest random share added to a pause, so that calls that broke together do not return together."""

    def pause_before_next(
        self, failed: CallFailed, tries: int, elapsed_s: float, should_retry: bool | None, rng: Random
    ) -> float | None:
        """Seconds to wait before the next try, or None when this failure is the answer.

        Args:
            failed: what the last try met; its ``retry_after_s`` is a lower bound for the pause.
            tries: how many tries there have been, at least 1.
            elapsed_s: seconds since the first try began.
            should_retry: the server's ``x-should-retry``, which overrules the table; None if it said nothing.
            rng: source of the jitter.
        """
        call = Call(failed.call)
        if call in SENT_ONCE or should_retry is False:
            return None
        pauses = self.pauses_s.get((call, failed.kind), self.urged_pauses_s if should_retry else ())
        if tries > len(pauses):
            return None
        pause = pauses[tries - 1]
        if failed.retry_after_s is not None:
            if failed.retry_after_s > self.max_obeyed_hint_s:
                return None
            pause = max(pause, failed.retry_after_s)
        pause *= 1 + self.jitter * rng.random()
        return pause if elapsed_s + pause <= self.budget_s.get(call, 0.0) else None


DEFAULT_RETRIES = CallRetries()
