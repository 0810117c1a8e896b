"""Admission: what the fleet has enqueued, what refusals teach, rates, and the money of a day."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ACCOUNT, KEY, NOW, Harbour, lot

from batchferry.domain.control import Hold, TokenLimit
from batchferry.domain.ids import BatchId, LotId
from batchferry.domain.ledger import Lane, Lot, LotState, LotTally
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import Usage
from batchferry.engine import admission as admission_module
from batchferry.engine.admission import RECOVERY_HOURS, SAFETY, Admission, Held, TooLarge, Wait

MODEL = KEY.model
LIMITS = f"accounts.{ACCOUNT}.limits"
LIMIT = 10_000
USABLE = int(LIMIT * SAFETY)
LIMITED = {f"{LIMITS}.enqueued_tokens": {MODEL: LIMIT}}


def name(number: int) -> BatchId:
    """Batch ids in their order."""
    return BatchId(f"01J{number:023}")


def fleet(harbour: Harbour, *lots: Lot, partition: int = 7) -> None:
    """Lots in the ledger of another replica's partition."""
    ledger = harbour.fleet.others.setdefault(partition, PartitionLedger(partition))
    for one in lots:
        ledger.apply(one)


def at_provider(number: int, tokens: int, state: LotState = LotState.SUBMITTED, **changes: Any) -> Lot:
    """A lot of so many estimated tokens."""
    return lot(
        state, [number], 7, lot_id=LotId(name(number)), tokens=tokens, own_tokens=tokens, submitted_at=NOW, **changes
    )


async def ask(harbour: Harbour, number: int, tokens: int, rows: int = 10) -> Any:
    """The verdict on a batch."""
    return await harbour.admission.verdict(name(number), KEY, rows, tokens)


# -------------------------------------------------------------------------------------------------- tokens


async def test_without_a_limit_everything_may_go(tmp_path: Path) -> None:
    """A model that nobody configured and that was never refused is not bounded."""
    harbour = Harbour(tmp_path)
    fleet(harbour, at_provider(1, 50_000_000))
    assert await ask(harbour, 2, 50_000_000) is None
    assert harbour.admission.token_limit(ACCOUNT, MODEL) is None


async def test_what_the_fleet_has_enqueued_counts_and_what_has_ended_does_not(tmp_path: Path) -> None:
    """Lots of all replicas that are at the provider or on their way there, of this account and model, in batches."""
    harbour = Harbour(tmp_path, **LIMITED)
    done = LotTally(classes={"succeeded": 1})
    fleet(
        harbour,
        at_provider(1, 2_000),
        at_provider(2, 3_000, LotState.SUBMITTING),
        at_provider(3, 4_000, LotState.WAITING),
        at_provider(4, 4_000, LotState.DONE, tally=done),
        at_provider(5, 4_000, lane=Lane.SYNC),
        at_provider(6, 4_000, key=KEY._replace(model="gpt-4o")),
        at_provider(8, 4_000, key=KEY._replace(account="other")),
    )
    assert harbour.admission.enqueued(ACCOUNT, MODEL) == 5_000
    assert await ask(harbour, 10, USABLE - 5_000 + 1) == Wait("tokens")
    assert await ask(harbour, 11, USABLE - 5_000) is None


async def test_a_batch_that_was_admitted_counts_before_its_lots_are_seen(tmp_path: Path) -> None:
    """Between admission and the ledger lies an upload; once its lots are there it counts once, and gone it is free."""
    harbour = Harbour(tmp_path, **LIMITED)
    assert await ask(harbour, 1, 5_000) is None
    assert await ask(harbour, 2, 5_000) == Wait("tokens")
    fleet(harbour, at_provider(1, 5_000, LotState.SUBMITTING))
    assert harbour.admission.enqueued(ACCOUNT, MODEL) == 5_000
    assert await ask(harbour, 2, 4_000) is None
    harbour.admission.forget(name(2))
    assert harbour.admission.enqueued(ACCOUNT, MODEL) == 5_000


async def test_a_batch_that_asks_again_does_not_count_against_itself(tmp_path: Path) -> None:
    """It came back after it was admitted."""
    harbour = Harbour(tmp_path, **LIMITED)
    assert await ask(harbour, 1, 8_000) is None
    assert await ask(harbour, 1, 8_000) is None


async def test_a_batch_beyond_the_limit_is_cut_and_a_single_row_goes_alone(tmp_path: Path) -> None:
    """It is told what a batch of its rows may hold. A row that is larger by itself goes when nothing else is there."""
    harbour = Harbour(tmp_path, **LIMITED)
    assert await ask(harbour, 1, 30_000) == TooLarge(USABLE)
    assert await ask(harbour, 2, 30_000, rows=1) is None
    assert await ask(harbour, 3, 1) == Wait("tokens")


async def test_estimates_learn_from_lots_that_have_ended(tmp_path: Path) -> None:
    """The provider counted half of what we estimated: twice as much of our counting fits, and a cut says so too."""
    harbour = Harbour(tmp_path, **LIMITED)
    tally = LotTally(classes={"succeeded": 10}, usage=Usage(50_000, 100))
    fleet(harbour, at_provider(1, 100_000, LotState.DONE, rows=10, own_rows=10, tally=tally))
    assert await ask(harbour, 2, 2 * USABLE) is None
    assert await ask(harbour, 3, 4 * USABLE) == TooLarge(2 * USABLE)


async def test_a_lot_teaches_once(tmp_path: Path) -> None:
    """However often it is looked at; a lot without answers teaches nothing."""
    harbour = Harbour(tmp_path, **LIMITED)
    tally = LotTally(classes={"succeeded": 1}, usage=Usage(3_000, 100))
    fleet(harbour, at_provider(1, 1_000, LotState.DONE, tally=tally))
    failed = LotTally(classes={"invalid_request": 1})
    fleet(harbour, at_provider(2, 1_000_000, LotState.DONE, tally=failed))
    for number in range(3, 6):
        harbour.admission._learn_at_s = float("-inf")
        await ask(harbour, number, 1)
    assert harbour.admission.estimates.factor(ACCOUNT, MODEL) == 3
    fleet(harbour, at_provider(3, 1_000, LotState.DONE, tally=LotTally({"succeeded": 1}, Usage(1_000, 100))))
    harbour.admission._learn_at_s = float("-inf")
    await ask(harbour, 6, 1)
    assert harbour.admission.estimates.factor(ACCOUNT, MODEL) == 2


# ------------------------------------------------------------------------------------------ after the record


async def confirmed(harbour: Harbour, numbers: Sequence[int]) -> list[int]:
    """Which of these batches may stay."""
    return [number for number in numbers if await harbour.admission.confirm(name(number), KEY)]


async def test_of_too_many_the_larger_batch_ids_step_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that admitted at one time see each other's SUBMITTING lots: the smaller ids stay as far as they fit."""
    monkeypatch.setattr(admission_module, "STEP_BACK_S", 0.0, raising=False)
    harbour = Harbour(tmp_path, **LIMITED)
    lots = [at_provider(number, 4_000, LotState.SUBMITTING) for number in (1, 2, 3)]
    fleet(harbour, *lots[:2])
    assert await confirmed(harbour, [1, 2]) == [1, 2]
    fleet(harbour, lots[2])
    assert await confirmed(harbour, [3]) == []
    assert harbour.fleet.catches_up >= 3, "it is counted from what everybody can see"


async def test_what_is_submitted_goes_before_what_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that the provider has is there, whatever its id; the part of one in another partition is counted too."""
    monkeypatch.setattr(admission_module, "STEP_BACK_S", 0.0, raising=False)
    harbour = Harbour(tmp_path, **LIMITED)
    fleet(harbour, at_provider(9, 7_000))
    fleet(harbour, at_provider(1, 2_000, LotState.SUBMITTING))
    fleet(harbour, replace(at_provider(1, 2_000, LotState.SUBMITTING), partitions=(7, 8)), partition=8)
    assert await confirmed(harbour, [1]) == []
    harbour.fleet.others[8].lots.clear()
    assert await confirmed(harbour, [1]) == [1]


async def test_a_batch_alone_stays_however_large(tmp_path: Path) -> None:
    """One row larger than the limit would otherwise step back for ever."""
    harbour = Harbour(tmp_path, **LIMITED)
    fleet(harbour, at_provider(1, 30_000, LotState.SUBMITTING))
    assert await confirmed(harbour, [1]) == [1]


async def test_without_a_limit_nobody_counts_again(tmp_path: Path) -> None:
    """The fleet view need not be read to its end for a model that is not bounded."""
    harbour = Harbour(tmp_path)
    fleet(harbour, at_provider(1, 30_000_000, LotState.SUBMITTING), at_provider(2, 30_000_000, LotState.SUBMITTING))
    assert await confirmed(harbour, [1, 2]) == [1, 2]
    assert harbour.fleet.catches_up == 0


# ---------------------------------------------------------------------------------------------- refusals


async def test_a_refusal_teaches_a_limit_where_none_was_known(tmp_path: Path) -> None:
    """Four fifths of what we had there; the rows of the refused batch come back by halves."""
    harbour = Harbour(tmp_path)
    fleet(harbour, at_provider(1, 10_000))
    assert await harbour.admission.refused(name(1), KEY, 10_000) == 5_000
    assert harbour.fleet.published == [TokenLimit(ACCOUNT, MODEL, 8_000, NOW)]
    assert harbour.admission.token_limit(ACCOUNT, MODEL) == 8_000
    (told,) = harbour.telemetry.named("token_limit_learned")
    assert told["tokens"] == 8_000


async def test_a_refusal_beyond_our_belief_teaches_nothing(tmp_path: Path) -> None:
    """We knew that it was too much: a single row larger than the limit, or two replicas at one time."""
    harbour = Harbour(tmp_path, **LIMITED)
    fleet(harbour, at_provider(1, 10_001))
    await harbour.admission.refused(name(1), KEY, 10_001)
    assert harbour.fleet.published == []
    assert harbour.admission.token_limit(ACCOUNT, MODEL) == LIMIT


async def test_a_refusal_inside_the_limit_lowers_it(tmp_path: Path) -> None:
    """Others use the account as well: what was believed is too much, each time a little less is."""
    harbour = Harbour(tmp_path, **LIMITED)
    believed = []
    for number in range(1, 4):
        tokens = int((harbour.admission.token_limit(ACCOUNT, MODEL) or 0) * SAFETY)
        await harbour.admission.refused(name(number), KEY, tokens)
        believed.append(harbour.admission.token_limit(ACCOUNT, MODEL))
    assert believed == [7_200, 5_184, 3_732]


async def test_rows_are_not_cut_to_crumbs(tmp_path: Path) -> None:
    """Refused again and again because others fill the queue, a batch is halved only as far as the limit gives reason."""
    harbour = Harbour(tmp_path, **LIMITED)
    tokens, sizes = 8_000, []
    for number in range(1, 9):
        await harbour.fleet.publish(
            TokenLimit(ACCOUNT, MODEL, LIMIT, NOW)
        )  # the others have gone, it is believed again
        tokens = await harbour.admission.refused(name(number), KEY, tokens)
        sizes.append(tokens)
    assert sizes[0] == 4_000
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == sizes[-2] > 0, "it ends somewhere"


async def test_what_was_learned_recovers_slowly_and_is_forgotten(tmp_path: Path) -> None:
    """A twentieth more an hour, never above what is configured, and after two days the configured limit stands."""
    harbour = Harbour(tmp_path, **LIMITED)
    limit = harbour.admission.token_limit
    await harbour.fleet.publish(TokenLimit(ACCOUNT, MODEL, 6_000, NOW))
    seen = []
    for hours in (0, 1, 2, 10, RECOVERY_HOURS, RECOVERY_HOURS + 1):
        harbour.clock.at = NOW + timedelta(hours=hours)
        seen.append(limit(ACCOUNT, MODEL))
    assert seen == [6_000, 6_300, 6_615, 9_773, LIMIT, LIMIT]
    unbounded = Harbour(tmp_path / "unbounded")
    await unbounded.fleet.publish(TokenLimit(ACCOUNT, MODEL, 6_000, NOW))
    unbounded.clock.at = NOW + timedelta(hours=RECOVERY_HOURS + 1)
    assert unbounded.admission.token_limit(ACCOUNT, MODEL) is None


async def test_a_limit_of_one_model_is_none_of_another(tmp_path: Path) -> None:
    """Quotas are by model, and what was learned of one account says nothing of another's."""
    harbour = Harbour(tmp_path)
    await harbour.fleet.publish(TokenLimit(ACCOUNT, "gpt-4o", 6_000, NOW))
    await harbour.fleet.publish(TokenLimit("other", MODEL, 6_000, NOW))
    assert await ask(harbour, 1, 1_000_000) is None


# ------------------------------------------------------------------------------------------------- rates


async def test_creates_of_an_hour_are_a_budget_and_are_spread(tmp_path: Path) -> None:
    """When it is used up a batch is told how long to wait; after that one goes, not all."""
    harbour = Harbour(tmp_path, **{f"{LIMITS}.batches_per_hour": 4})
    assert [await ask(harbour, number, 1) for number in range(4)] == [None] * 4
    refused = await ask(harbour, 4, 1)
    assert refused == Wait("rate", 900.0)
    harbour.clock.at += timedelta(seconds=901)
    assert await ask(harbour, 4, 1) is None
    assert isinstance(await ask(harbour, 5, 1), Wait)


async def test_calls_of_a_minute_are_a_budget_too(tmp_path: Path) -> None:
    """A batch is an upload and a create."""
    harbour = Harbour(tmp_path, **{f"{LIMITS}.calls_per_minute": 6})
    assert [await ask(harbour, number, 1) for number in range(3)] == [None] * 3
    assert await ask(harbour, 3, 1) == Wait("rate", 20.0)


async def test_a_replica_uses_its_share_of_the_rates(tmp_path: Path) -> None:
    """With a quarter of the partitions it makes a quarter of the batches; what must wait costs nothing."""
    harbour = Harbour(tmp_path, **{f"{LIMITS}.batches_per_hour": 8})
    harbour.admission = Admission(
        harbour.settings, harbour.fleet, harbour.holds, harbour.clock, harbour.telemetry, harbour.router, lambda: 0.25
    )
    assert [await ask(harbour, number, 1) for number in range(2)] == [None, None]
    for _ in range(50):
        assert await ask(harbour, 2, 1) == Wait("rate", 1800.0)


# ------------------------------------------------------------------------------------------------- money

DAY = {"routes.default.max_usd_per_day": 1.0}
PRICED = 1_000_000
"""Input tokens of ``MODEL`` cost 0.075 USD in a batch and twice as much outside one, output tokens 0.30 and 0.60."""


async def test_the_money_of_a_day_cuts_and_then_holds(tmp_path: Path) -> None:
    """A batch that is too dear for what is left is cut to fit; once nearly all is spent the key waits for tomorrow."""
    harbour = Harbour(tmp_path, **DAY)
    spent = LotTally(classes={"succeeded": 1}, cost_picodollars=600_000_000_000)
    fleet(harbour, at_provider(1, 1_000, LotState.DONE, tally=spent))
    verdict = await ask(harbour, 2, 8 * PRICED, rows=1_000)  # 0.60 for what is asked and 0.30 for the answers
    assert isinstance(verdict, TooLarge)
    assert await ask(harbour, 3, verdict.max_tokens, rows=400) is None
    fleet(harbour, at_provider(4, 1_000, LotState.CLEAN, tally=replace(spent, cost_picodollars=250_000_000_000)))
    assert await ask(harbour, 5, 8 * PRICED, rows=1_000) == Held()
    (hold,) = harbour.fleet.control.all_standing(NOW)
    tomorrow = datetime(2026, 3, 2, tzinfo=UTC)
    assert (hold.reason, hold.until) == ("spending_limit", tomorrow)
    assert harbour.holds.standing(KEY)
    harbour.clock.at = tomorrow
    assert not harbour.holds.standing(KEY)
    assert await ask(harbour, 5, 8 * PRICED, rows=1_000) is None
    assert harbour.holds.may_probe(KEY, name(6)), "a day that is over needs no trial"


async def test_batches_that_are_on_their_way_and_sync_calls_are_money_too(tmp_path: Path) -> None:
    """What is at the provider counts by its estimate, what the lane has paid by its price, each on its own day."""
    harbour = Harbour(tmp_path, **DAY)
    fleet(harbour, at_provider(1, 8 * PRICED))  # 0.60 and one answer
    yesterday = at_provider(2, 8 * PRICED)
    fleet(harbour, replace(yesterday, submitted_at=NOW - timedelta(days=1)))
    fleet(harbour, at_provider(3, 8 * PRICED, LotState.WAITING))
    assert await ask(harbour, 4, 4 * PRICED, rows=1) is None  # 0.30
    harbour.admission.forget(name(4))
    harbour.admission.spent_by_sync(KEY, 150_000_000_000)
    assert await ask(harbour, 4, 4 * PRICED, rows=1) == Held()


async def test_money_of_other_routes_is_not_ours(tmp_path: Path) -> None:
    """A limit is a route's: another one's lots and calls do not count."""
    routes = [
        {"name": "small", "models": [MODEL], "max_usd_per_day": 1.0},
        {"name": "large", "models": ["*"]},
    ]
    harbour = Harbour(tmp_path, routes=routes)
    other = KEY._replace(model="gpt-4o")
    fleet(harbour, at_provider(1, 80 * PRICED, key=other))
    harbour.admission.spent_by_sync(other, 10**13)
    assert await ask(harbour, 2, 4 * PRICED, rows=1) is None


async def test_two_batches_in_one_moment_do_not_pass_the_money_of_a_day(tmp_path: Path) -> None:
    """The first is on its way and in no ledger yet when the second asks: it counts all the same."""
    harbour = Harbour(tmp_path, **DAY)
    verdicts = [await ask(harbour, number, 8 * PRICED, rows=1) for number in (1, 2)]  # 0.60 each
    assert verdicts[0] is None
    assert verdicts[1] is not None


async def test_a_price_that_nobody_knows_is_no_reason_to_stop(tmp_path: Path) -> None:
    """Unknown is said to be unknown: such rows count once their cost is known, and not by a guess."""
    harbour = Harbour(tmp_path, **DAY)
    odd = KEY._replace(model="in-house")
    assert harbour.admission.price(odd, 10, PRICED, batch=True) is None
    assert await harbour.admission.verdict(name(1), odd, 10, 1_000 * PRICED) is None


async def test_a_hold_of_the_day_is_not_placed_again_and_again(tmp_path: Path) -> None:
    """Every batch of a spent route asks: one hold is written."""
    harbour = Harbour(tmp_path, **DAY)
    harbour.admission.spent_by_sync(KEY, 2 * 10**12)
    for number in range(5):
        assert await ask(harbour, number, 1_000) == Held()
    assert len([one for one in harbour.fleet.published if isinstance(one, Hold)]) == 1
    await asyncio.sleep(0)
