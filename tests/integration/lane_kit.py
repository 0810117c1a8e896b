"""Many cases of row policies in one life of the service: each is a model name with a route of its own.

The completion window is six hours here, so that whole lives of a batch, a rescue included, pass in a few seconds:
a row is late when its deadline is nearer than 10 h (window + lead), and due for a rescue 9 h before it (lead + cancel).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from inprocess_kit import HOUR_S, QUICK, Outcome, Pier, Script, Sent, SyncCall, request

from batchferry.domain import control
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import Hold, key_scope
from batchferry.domain.offsets import OffsetSet
from batchferry.simulator import Durations, RunCurve, Scenario

WINDOW = "6h"
CHAT = "/v1/chat/completions"
ROUTE: dict[str, Any] = {"sla_s": 20 * HOUR_S, "margin_s": 10 * HOUR_S, "max_wait_s": 1.5 * HOUR_S}
TIMES: dict[str, Any] = {"rescue_lead_s": 4 * HOUR_S, "cancel_s": 5 * HOUR_S}
ENDLESS = QUICK.model_copy(update={"in_progress": RunCurve(minimum_s=400 * HOUR_S, factor_s=0.0)})


def lasting(hours: float, cancelling_h: float = 0.1) -> Durations:
    """A batch that runs so long, and takes so long to cancel."""
    return QUICK.model_copy(
        update={
            "in_progress": RunCurve(minimum_s=hours * HOUR_S, factor_s=0.0),
            "cancelling_s": cancelling_h * HOUR_S,
        }
    )


def due_in(pier: Pier, hours: float) -> tuple[str, bytes]:
    """The header of a deadline so many hours from now."""
    return ("deadline", (pier.now + timedelta(hours=hours)).isoformat().encode())


NOW = ("priority", b"now")


class Case(Script):
    """A script with the records that meet it. ``drive`` runs beside the wait for the outcomes."""

    rows: Sequence[str] = ("r1", "r2", "r3")
    model = ""
    """The name of the case, where it is empty: then ``route`` is its own."""
    account = "default"
    account_settings: ClassVar[Mapping[str, Any] | None] = None
    """Of an account of its own, named like the case; None: it is the default one's."""
    route: ClassVar[Mapping[str, Any]] = {}
    headers: tuple[tuple[str, bytes | None], ...] = ()
    deadline_h: float | None = None
    """Hours to the deadline that every row names."""

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return [self.record(name, pier, custom_id) for custom_id in self.rows]

    def record(self, name: str, pier: Pier, custom_id: str, **otherwise: Any) -> Sent:
        headers = [*self.headers, *([] if self.deadline_h is None else [due_in(pier, self.deadline_h)])]
        return request(name, custom_id, **{"model": self.model or name, "headers": headers, **otherwise})

    async def drive(self, name: str, pier: Pier) -> None:
        """What somebody does meanwhile."""

    def key(self, name: str, endpoint: str = CHAT) -> BatchKey:
        """The batch key of its rows."""
        account = self.account if self.account_settings is None else name
        return BatchKey(account, endpoint, self.model or name, WINDOW, name)


def settings_of(cases: Mapping[str, Case]) -> dict[str, Any]:
    """Routes and accounts of the cases, for ``Pier``; a case that names a model has the default route."""
    account = {
        "poll": {"first_s": 300, "floor_s": 120, "max_s": 900},
        "max_concurrent_calls": 64,
        "completion_window": WINDOW,
    }
    sync = {"enabled": True, "call_timeout_s": 60}
    accounts = {"default": {**account, "sync": sync}}
    routes: dict[str, Any] = {}
    for name, one in cases.items():
        pays = one.account
        if one.account_settings is not None:
            own = dict(one.account_settings)
            accounts[name] = {**account, **own, "sync": {**sync, **own.get("sync", {})}}
            pays = name
        if not one.model:
            routes[name] = {**ROUTE, **one.route, "models": [name], "account": pays}
    routes["default"] = ROUTE
    return {"accounts": accounts, "routes": routes}


class Harbour:
    """The pier after everything has landed."""

    def __init__(self, pier: Pier, cases: Mapping[str, Case]) -> None:
        self.pier = pier
        self.cases = cases
        self.late: dict[str, str] = {}

    async def play(self, first: Iterable[str] = (), limit_s: float = 60.0) -> None:
        """All cases at once; one that does not come to its end is told by its own tests.

        The others begin once each case of ``first`` has a batch at the provider: those have no time to lose.
        """
        first = list(first)
        async with asyncio.TaskGroup() as playing:
            for name in first:
                playing.create_task(self._play(name, self.cases[name], limit_s))
            await self.pier.until(lambda: all(self.pier.provider.lives[name] for name in first), "the first batches")
            for name in self.cases.keys() - set(first):
                playing.create_task(self._play(name, self.cases[name], limit_s))
        await self.pier.until(lambda: not self.pier.supervisor.status()["batches"], "every batch at its end")

    async def _play(self, name: str, one: Case, limit_s: float) -> None:
        pier = self.pier
        await pier.send(name, one.records(name, pier))
        try:
            driving: list[Awaitable[Any]] = [one.drive(name, pier), pier.landed(name, limit_s)]
            await asyncio.gather(*driving)
        except AssertionError as error:
            lives = [f"{life.batch.status} {life.texts}" for life in pier.provider.lives[name]][:6]
            calls = [f"{call.text}/{call.attempt}" for call in pier.provider.calls[name]][:20]
            self.late[name] = f"{error}; batches {lives}; calls {calls}; jobs {await pier.jobs(name)}"

    def outcomes(self, name: str) -> list[Outcome]:
        assert name not in self.late, self.late[name]
        return self.pier.outcomes(name)

    def classes(self, name: str) -> list[str]:
        return [one.row_class for one in self.outcomes(name)]

    def lanes(self, name: str) -> list[str | None]:
        """The lane that brought each row's outcome; None: it was never sent."""
        return [lane_of(one) for one in self.outcomes(name)]

    def sent(self, name: str) -> list[list[str]]:
        """The rows of each of the case's batches, by their words."""
        assert name not in self.late, self.late[name]
        return [life.texts for life in self.pier.provider.lives[name]]

    def calls(self, name: str) -> list[SyncCall]:
        """The calls of the ordinary endpoints for rows of the case."""
        assert name not in self.late, self.late[name]
        return self.pier.provider.calls[name]

    def events(self, kind: str, **fields: object) -> list[dict[str, Any]]:
        """Published events of a kind with these fields."""
        return [
            one
            for one in self.pier.heard.events
            if one["kind"] == kind and all(one.get(field) == value for field, value in fields.items())
        ]

    def named_by(self, kind: str, name: str) -> set[tuple[int, int]]:
        """Rows of the case that events of this kind name by partition and offset."""
        found = set()
        for event in self.events(kind):
            for offset in OffsetSet.loads(event["offsets"]):
                found.add((int(event["partition"]), offset))
        return found & set(self.pier.placed[name])


def lane_of(outcome: Outcome) -> str | None:
    """The lane that brought an outcome."""
    batch = outcome.said["batch"]
    return None if batch is None else str(batch["lane"])


def holds_of(pier: Pier, name: str, reason: str, scope: str = "") -> list[Hold]:
    """The holds that name the case (or the scope) as the control topic has them, oldest first."""
    read = [control.decode(one.key or b"", one.value) for one in pier.heard.control]
    return [
        one
        for one in read
        if isinstance(one, Hold)
        and one.reason == reason
        and (one.scope == scope if scope else f"[{name}]" in one.label)
    ]


def operator_hold(case: Case, name: str, pier: Pier) -> Hold:
    """A hold of the case's key as the command line places it."""
    key = case.key(name)
    return Hold(key_scope(key), "operator", pier.now, None, 1, key.label)


def at(text: str) -> datetime:
    """An instant of an outcome or event."""
    return datetime.fromisoformat(text)


def scenario(**otherwise: Any) -> Scenario:
    """The provider of these tests."""
    return Scenario.model_validate({"durations": QUICK.model_dump(), "windows": [WINDOW, "24h"], **otherwise})


Cases = dict[str, Case]


def registry() -> tuple[Cases, Callable[[str], Callable[[type[Case]], type[Case]]]]:
    """A table of cases, and the decorator that fills it."""
    cases: Cases = {}

    def case(name: str) -> Callable[[type[Case]], type[Case]]:
        def put(kind: type[Case]) -> type[Case]:
            assert name not in cases, f"two cases called {name}"
            cases[name] = kind()
            return kind

        return put

    return cases, case
