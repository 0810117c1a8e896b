"""Results that the provider will delete: those that go first are fetched first, and late ones raise an alarm."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_kit import ACCOUNT, BATCH, NOW, Harbour, batch, shown

from batchferry.domain.ledger import Lane, LotState
from batchferry.domain.machine import BatchState
from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.engine.landing import results_gone_at
from batchferry.engine.supervisor import Supervisor

DAY = timedelta(days=1)


async def test_an_alarm_tells_of_results_that_may_not_be_fetched_in_time(tmp_path: Path) -> None:
    """Once for a batch, in the last tenth of the time for which its results are kept."""
    async with Harbour(tmp_path, **{"accounts.default.results_kept_s": "29d"}) as harbour:
        told: list[tuple[str, str]] = []

        async def alarm(what: str, event_of: str, _key: Any, **_facts: Any) -> None:
            told.append((what, event_of))

        snapshot = shown(created_at=NOW - 27 * DAY)
        landing = batch(BatchState.LANDING, snapshot=snapshot)
        clock = SimpleNamespace(now=lambda: NOW - DAY)
        rooms: Any = SimpleNamespace(
            settings=harbour.settings,
            _clock=clock,
            _actors={BATCH: SimpleNamespace(batch=landing)},
            _expiring=set(),
            _holds=SimpleNamespace(alarm=alarm),
        )
        await Supervisor._mind_retention(rooms)
        assert told == []
        clock.now = lambda: NOW
        await Supervisor._mind_retention(rooms)
        await Supervisor._mind_retention(rooms)
        assert told == [("results_expiring", BATCH)]
        assert results_gone_at(snapshot, harbour.settings.accounts[ACCOUNT]) == NOW + 2 * DAY
        assert results_gone_at(shown(created_at=None), harbour.settings.accounts[ACCOUNT]) is None


async def test_batch_chat_costs_what_a_batch_costs(tmp_path: Path) -> None:
    """A row of such a lane is priced like a row of a batch; any other single call in full."""
    line = ResultLine("w", RowClass.SUCCEEDED, usage=Usage(1_000, 500), model="gpt-5-mini")
    for batch_chat, paid in ((False, 1_250_000_000), (True, 625_000_000)):
        async with Harbour(tmp_path / str(batch_chat)) as harbour:
            account = harbour.settings.accounts[ACCOUNT]
            sync = account.sync.model_copy(update={"batch_chat": batch_chat})
            harbour.settings.accounts[ACCOUNT] = account.model_copy(update={"sync": sync})
            wave: Any = SimpleNamespace(
                lane=Lane.SYNC,
                state=LotState.SUBMITTING,
                key=SimpleNamespace(account=ACCOUNT, model="gpt-5-mini"),
                submitted_at=NOW,
                created_at=NOW,
            )
            price = harbour.outcomes.price(wave, line)
            assert price.batch == paid
            assert price.sync == 1_250_000_000
