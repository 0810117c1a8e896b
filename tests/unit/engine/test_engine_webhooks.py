"""Webhooks and polling together: polls grow rarer on evidence and come back at once without it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pydantic import SecretStr

from batchferry.config import AccountSettings
from batchferry.domain.ids import BatchId, ProviderBatchId
from batchferry.domain.machine import Event
from batchferry.domain.provider import BatchSnapshot, ProviderStatus, RequestCounts
from batchferry.engine.scheduler import Due, PollScheduler
from batchferry.telemetry import RecordingTelemetry

T0 = datetime(2026, 3, 1, tzinfo=UTC)


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = T0

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


class Provider:
    """Shows whatever it is asked for in one status."""

    def __init__(self, clock: SetClock) -> None:
        self.clock = clock
        self.status = ProviderStatus.COMPLETED
        self.ended_ago = timedelta(seconds=5)

    async def retrieve(self, name: ProviderBatchId) -> BatchSnapshot:
        return BatchSnapshot(
            provider_batch_id=name,
            status=self.status,
            raw_status=self.status.value,
            counts=RequestCounts(),
            ended_at=self.clock.now() - self.ended_ago,
        )


async def test_polls_stretch_only_while_webhooks_come() -> None:
    """Ten told ends give the whole factor; one end found without a webhook takes it, and all are looked at again."""
    clock, missing = SetClock(), []
    provider = Provider(clock)
    accounts = {"told": AccountSettings(webhook_secret=SecretStr("a secret of sixteen")), "deaf": AccountSettings()}
    posted: list[Event] = []
    scheduler = PollScheduler(
        dict.fromkeys(accounts, provider),  # type: ignore[arg-type]
        accounts,
        clock,
        RecordingTelemetry(),
        lambda _batch, event: posted.append(event),
    )
    scheduler.on_webhook_missing = missing.append
    for number in range(10):
        name = ProviderBatchId(f"batch_{number}")
        for account in accounts:
            scheduler.told(account, name)
            await scheduler._ask_one(account, Due(BatchId(f"b{number}"), account, name))
        clock.at += timedelta(seconds=900)
    assert (scheduler.stretch("told"), scheduler.stretch("deaf")) == (4.0, 1.0)
    scheduler._look_for_missing()
    assert missing == []
    await scheduler._ask_one("told", Due(BatchId("b"), "told", ProviderBatchId("batch_lost")))
    clock.at += timedelta(seconds=60)
    scheduler._look_for_missing()
    scheduler._look_for_missing()
    assert missing == ["told"]
    assert scheduler.stretch("told") == 1.0
    assert len(posted) == 21


async def test_batches_that_were_cancelled_expect_no_webhook() -> None:
    """Not every sender tells of what we did ourselves."""
    clock = SetClock()
    provider = Provider(clock)
    account = AccountSettings(webhook_secret=SecretStr("a secret of sixteen"))
    scheduler = PollScheduler(
        {"told": provider},  # type: ignore[dict-item]
        {"told": account},
        clock,
        RecordingTelemetry(),
        lambda _batch, _event: None,
    )
    for number in range(10):
        scheduler.told("told", ProviderBatchId(f"batch_{number}"))
        await scheduler._ask_one("told", Due(BatchId(f"b{number}"), "told", ProviderBatchId(f"batch_{number}")))
    provider.status, provider.ended_ago = ProviderStatus.CANCELLED, timedelta(hours=1)
    await scheduler._ask_one("told", Due(BatchId("b"), "told", ProviderBatchId("batch_x")))
    assert scheduler.stretch("told") == 4.0
