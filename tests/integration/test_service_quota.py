"""Enqueued tokens: the provider's queue holds less than what comes in.

Providers refuse a batch as a whole, after it was created, when the tokens that wait and run for its model would become
too many. The streams and the submitter that does not count stand in ``bench.quota``, which prints them as a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.quota import (
    CHINESE,
    GROUPS,
    LIMIT_TOKENS,
    OTHER_MODEL,
    ROWS,
    Voyage,
    bodies,
    ferry,
    naive,
    pictures,
    stream,
)

pytestmark = [pytest.mark.broker, pytest.mark.asyncio(loop_scope="module")]

Voyages = Mapping[str, Voyage]


@pytest.fixture(scope="module")
def _voyages() -> dict[str, Voyage]:
    return {}


@pytest.fixture
async def voyages(broker: Any, tmp_path: Path, _voyages: dict[str, Voyage]) -> Voyages:
    """All streams, each with a provider of its own, several at the same time: they mostly wait. Run once for this file."""
    if not _voyages:
        groups = stream()
        chinese = [bodies(group, words=CHINESE) for group in range(4)]
        pictured = [pictures(group, rows=6) for group in range(5)]
        large = [bodies(group, rows=4 * ROWS) for group in range(2)]
        mixed = [bodies(group, rows=48) for group in range(5)] + [bodies(5, rows=48, model=OTHER_MODEL)]

        def run(name: str, groups: list[Any], limit: int | None = LIMIT_TOKENS, **more: Any) -> Any:
            return ferry(broker.bootstrap, groups, tmp_path / name, limit=limit, name=name, **more)

        made = [await naive(groups)]
        made += await asyncio.gather(run("told", groups), run("untold", groups, None))
        made += await asyncio.gather(
            run("high", chinese),
            run("low", pictured, rows=6),
            run("cut", large, rows=4 * ROWS),
            run("two replicas", mixed, rows=24, every_s=5.0, replicas=2),
        )
        _voyages.update({voyage.name: voyage for voyage in made})
    return _voyages


def _no_row_suffered(voyage: Voyage) -> None:
    """Every row has its answer, and none lost an attempt to the queue."""
    assert (voyage.name, voyage.answered, voyage.failed_rows) == (voyage.name, voyage.rows, 0)
    assert (voyage.name, voyage.attempts) == (voyage.name, 0)
    assert voyage.runs_paid == {"1": voyage.rows}
    assert 0 < voyage.largest_tokens <= voyage.peak_tokens <= LIMIT_TOKENS


async def test_who_counts_fails_no_batch(voyages: Voyages) -> None:
    """Of twenty batches that come faster than the queue empties, a submitter that does not count loses ten or more;
    told of the limit the service loses none. Not told of it, it learns it from the few refusals it meets, if it meets any
    at this pace, and no row hears of them.
    """
    careless, told, untold = voyages["naive"], voyages["told"], voyages["untold"]
    assert careless.batches == GROUPS
    assert careless.refused >= 10
    assert careless.failed_rows == careless.refused * ROWS
    _no_row_suffered(told)
    assert (told.refused, told.learned_tokens) == (0, [])
    _no_row_suffered(untold)
    assert untold.refused <= careless.refused // 2
    assert bool(untold.learned_tokens) == bool(untold.refused)
    assert all(LIMIT_TOKENS / 2 < tokens < LIMIT_TOKENS * 2 for tokens in untold.learned_tokens)


async def test_estimates_may_be_wrong(voyages: Voyages) -> None:
    """Chinese text comes out five times too high in our estimate and a picture at a third: nothing is stuck, nothing is
    lost or run twice. A batch that was sealed larger than the queue is cut to fit before anybody refuses it.
    """
    for name in ("high", "low", "cut"):
        _no_row_suffered(voyages[name])
    assert voyages["high"].refused == voyages["cut"].refused == 0
    assert voyages["low"].refused <= 4
    assert voyages["cut"].batches > 2


async def test_replicas_share_the_limit_and_other_models_go_on(voyages: Voyages) -> None:
    """Two replicas that seal batches at the same moments stay under one limit together. A model without a limit does
    not wait behind the one that has its queue full.
    """
    voyage = voyages["two replicas"]
    _no_row_suffered(voyage)
    assert voyage.refused == 0
    *limited, other = voyage.group_hours
    assert sum(hours > other for hours in limited) >= 2
