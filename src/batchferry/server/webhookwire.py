"""What the service and its webhook process say to each other: JSON behind a four-byte length, over a socket pair.

===================  ==========================================================================================
service -> process   ``plan`` (first, once), ``answers`` to asks, ``ping``; the end of the stream: stop
process -> service   ``is_up``, ``asks`` (which batches deserve a look), ``sheet`` (what became of deliveries),
                     ``pong``, ``broke`` (the last word of a bug)
===================  ==========================================================================================

One message holds whatever has gathered. Both sides keep what is under way bounded: the process asks about so many
batches at one time and no more, and a sheet grows with accounts and outcomes, not with deliveries.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self, cast

import orjson

from batchferry.server.webhookauth import AuthPlan, Outcome
from batchferry.server.webhooks import MAX_PER_S, MAX_REMEMBERED_IDS, Hook

MAX_MESSAGE_BYTES = 1024 * 1024
"""Beyond any lawful message: 512 asks are some 150 kB."""
MAX_FAILURES = 10
"""Bugs told in one sheet, and messages of libraries."""
NOTED, JUST_LOOKED_AT, UNKNOWN, NOT_NOW, BROKE = "noted", "just_looked_at", "unknown", "not_now", "broke"
"""Answers to an ask."""

_LENGTH_BYTES = 4


class BadMessage(Exception):
    """The other side does not keep to the form: a bug."""


@dataclass(frozen=True, slots=True)
class HookPlan:
    """One account's webhook as plain values; secrets are in it, but not in its text."""

    auth: AuthPlan
    batch_id_field: tuple[str, ...]
    status_field: tuple[str, ...]
    batch_id_prefix: str
    running_statuses: tuple[str, ...]
    alarm_rejected: int
    alarm_quiet_s: float

    def hook(self) -> Hook:
        """Who judges by it."""
        return Hook(
            self.auth.auth(),
            self.batch_id_field,
            self.status_field,
            self.batch_id_prefix,
            frozenset(self.running_statuses),
            self.alarm_rejected,
            self.alarm_quiet_s,
        )

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it, secrets included."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "auth": self.auth.plain()}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Self:
        """What ``plain`` gave."""
        made: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        made["auth"] = AuthPlan.of_plain(plain["auth"])
        return cls(**made)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the webhook process."""

    max_asks: int = 512
    """Batches that the service is being asked about at one time; beyond, deliveries are sent away with 503."""
    max_concurrent: int = 256
    """Deliveries being answered at one time: with their bodies, 16 MiB at most."""
    max_per_s: float = MAX_PER_S
    max_remembered_ids: int = MAX_REMEMBERED_IDS
    ask_pause_s: float = 0.05
    """The service is disturbed by asks no more often than this,"""
    sheet_pause_s: float = 1.0
    """and by mere counts no more often than this."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A clock that runs faster, see ``batchferry.clock.ScaledClock``."""

    speed: float
    origin: datetime
    started: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the process must know."""

    hooks: Mapping[str, HookPlan]
    bounds: Bounds
    rehearsal: Rehearsal | None

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it, secrets included."""
        return {
            "hooks": {name: plan.plain() for name, plan in self.hooks.items()},
            "bounds": asdict(self.bounds),
            "rehearsal": None if self.rehearsal is None else asdict(self.rehearsal),
        }

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Self:
        """What ``plain`` gave."""
        told = plain["rehearsal"]
        instants = {} if told is None else {name: datetime.fromisoformat(told[name]) for name in ("origin", "started")}
        return cls(
            {name: HookPlan.of_plain(hook) for name, hook in plain["hooks"].items()},
            Bounds(**plain["bounds"]),
            None if told is None else Rehearsal(told["speed"], **instants),
        )


class Sheet:
    """What became of deliveries since the last one was sent. Keeps the ``Tally`` and the ``Report`` of a receiver."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str | None, Outcome]] = Counter()
        self.believed: set[str] = set()
        """Accounts of which a delivery was taken."""
        self.refused_since: Counter[tuple[str, Outcome]] = Counter()
        """Refusals of an account since one of its deliveries was last taken."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.failures: list[tuple[str, str, str]] = []
        """Bugs: route, kind and place."""
        self.library: dict[tuple[str, int, str], None] = {}
        """What libraries told: logger, level, and the text where it is fixed."""

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.answers or self.failures or self.library)

    def taken(self, account: str, outcome: Outcome) -> None:
        """A delivery was believed."""
        self.outcomes[account, outcome] += 1
        if account not in self.believed or self.refused_since:
            self.believed.add(account)
            for key in [key for key in self.refused_since if key[0] == account]:
                del self.refused_since[key]

    def refused(self, account: str | None, outcome: Outcome) -> None:
        """A delivery was not believed."""
        self.outcomes[account, outcome] += 1
        if account is not None:
            self.refused_since[account, outcome] += 1

    def answered(self, route: str, status_code: int) -> None:
        """A request was answered."""
        self.answers[route, status_code] += 1

    def failed(self, route: str, error: Exception) -> None:
        """A bug was met."""
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((route, type(error).__name__, place_of(error)))

    def told(self, logger: str, level: int, text: str) -> None:
        """A library warned of something."""
        if len(self.library) < MAX_FAILURES:
            self.library[logger, level, text] = None

    def clear(self) -> None:
        """Begin anew."""
        for one in (self.outcomes, self.believed, self.refused_since, self.answers, self.failures, self.library):
            one.clear()

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it."""
        return {
            "outcomes": [[account, outcome, times] for (account, outcome), times in self.outcomes.items()],
            "believed": sorted(self.believed),
            "refused_since": [[account, outcome, times] for (account, outcome), times in self.refused_since.items()],
            "answers": [[route, status, times] for (route, status), times in self.answers.items()],
            "failures": self.failures,
            "library": list(self.library),
        }

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Self:
        """What ``plain`` gave."""
        sheet = cls()
        for account, outcome, times in plain["outcomes"]:
            sheet.outcomes[account, Outcome(outcome)] = times
        for account, outcome, times in plain["refused_since"]:
            sheet.refused_since[account, Outcome(outcome)] = times
        for route, status, times in plain["answers"]:
            sheet.answers[route, status] = times
        sheet.believed.update(plain["believed"])
        sheet.failures = [(route, error, where) for route, error, where in plain["failures"]]
        sheet.library = dict.fromkeys((logger, level, text) for logger, level, text in plain["library"])
        return sheet


def place_of(error: BaseException) -> str:
    """Where a bug was met; not its text, which may quote what was sent."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""


class Link(asyncio.Protocol):
    """One end of the socket pair.

    Args:
        on_message: called with each message; after ``BadMessage``, or any bug in it, nothing more is heard.
    """

    def __init__(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._on_message = on_message
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        """Done when the other side will say nothing more: with what went wrong, or None."""
        self.is_held_up = False
        """The other side does not read as fast as this one writes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self._received += data
        try:
            while (message := self._next()) is not None:
                self._on_message(message)
        except Exception as error:  # noqa: BLE001 - whoever waits for the end tells it
            self._end(error)

    def eof_received(self) -> bool:
        self._end(None)
        return True  # this side may still have something to say

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - a peer that is killed is no news here
        self._end(None)

    def pause_writing(self) -> None:
        self.is_held_up = True

    def resume_writing(self) -> None:
        self.is_held_up = False

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; nothing happens when the link is closed."""
        if self._transport is None or self._transport.is_closing():
            return
        text = orjson.dumps(message)
        self._transport.write(len(text).to_bytes(_LENGTH_BYTES, "big") + text)

    def finish(self) -> None:
        """Say that nothing more will be sent; the other side may still speak."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close, once what was sent is gone."""
        if self._transport is not None:
            self._transport.close()

    def _next(self) -> dict[str, Any] | None:
        if len(self._received) < _LENGTH_BYTES:
            return None
        until = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if until > MAX_MESSAGE_BYTES:
            raise BadMessage("longer than any message may be")
        if len(self._received) < until:
            return None
        message = orjson.loads(self._received[_LENGTH_BYTES:until])
        del self._received[:until]
        if not isinstance(message, dict):
            raise BadMessage("no object")
        return message

    def _end(self, error: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)
