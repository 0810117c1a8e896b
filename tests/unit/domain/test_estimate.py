"""Estimates are learned from what ran, stay within bounds, and become money only where a price is known."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.estimate import (
    MAX_FACTOR,
    MEMORY_TOKENS,
    MIN_FACTOR,
    UNLEARNED_OUTPUT_TOKENS,
    TokenEstimates,
    estimated_price,
)
from batchferry.domain.money import price_row
from batchferry.domain.provider import Usage
from batchferry.domain.requests import estimate_tokens

WHEN = datetime(2026, 11, 15, tzinfo=UTC)
WHO = ("acme", "gpt-4o-mini")


def test_estimate_chinese_is_learned():
    """Chinese is counted safely high before anything ran, and as the provider counts it afterwards."""
    text = "渡船满员或者到点就开。" * 200
    body = orjson.dumps({"messages": [{"role": "user", "content": text}]})
    first = estimate_tokens(body)
    real = round(len(text) * 0.8)
    estimates = TokenEstimates()
    assert estimates.estimate(*WHO, first) == first > 1.2 * len(text)
    estimates.learn(*WHO, first * 50, real * 50)
    assert estimates.estimate(*WHO, first) == pytest.approx(real, abs=1)
    assert estimates.factor("acme", "another-model") == 1.0
    assert estimates.factor("another-account", WHO[1]) == 1.0


def test_estimate_one_odd_row_teaches_nothing():
    """Below a thousand compared tokens, and for a lot whose rows mostly have no count, the estimate stands."""
    estimates = TokenEstimates()
    estimates.learn(*WHO, 999, 10)
    assert estimates.factor(*WHO) == 1.0
    estimates.learn(*WHO, 1_000_000, 10_000, share=0.4)
    estimates.learn(*WHO, 0, 10_000)
    estimates.learn(*WHO, 10_000, 0)
    assert estimates.factor(*WHO) == 1.0


def test_estimate_refused_rows_do_not_lower_it():
    """A lot of which a fifth was refused, and so not counted, teaches the ratio of the rows that ran."""
    estimates = TokenEstimates()
    estimates.learn(*WHO, 100_000, 80_000, share=0.8)
    assert estimates.factor(*WHO) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(-10, 10**9), st.integers(-10, 10**9)), max_size=30), st.integers(0, 10**9))
def test_estimate_stays_within_bounds(lots: list[tuple[int, int]], tokens: int):
    """Whatever lots say, the factor stays within its range and an estimate is a whole count, rounded up."""
    estimates = TokenEstimates()
    for estimated, real in lots:
        estimates.learn(*WHO, estimated, real)
    factor = estimates.factor(*WHO)
    assert MIN_FACTOR <= factor <= MAX_FACTOR
    assert 0 <= estimates.estimate(*WHO, tokens) - tokens * factor < 1


def test_estimate_forgets_slowly():
    """When a model's prompts change, what was learned long ago counts ever less."""
    estimates = TokenEstimates()
    estimates.learn(*WHO, MEMORY_TOKENS, MEMORY_TOKENS // 2)
    assert estimates.factor(*WHO) == pytest.approx(0.5)
    for _ in range(60):
        estimates.learn(*WHO, MEMORY_TOKENS // 10, MEMORY_TOKENS // 5)
    assert estimates.factor(*WHO) > 1.9


def test_estimate_remembers_so_many_models():
    """The model's name is the caller's: the pair not heard of for longest is forgotten."""
    estimates = TokenEstimates(max_models=2)
    for model in ("a", "b"):
        estimates.learn("acme", model, 10_000, 20_000)
    estimates.learn("acme", "a", 10_000, 20_000)
    estimates.learn("acme", "c", 10_000, 20_000)
    assert [estimates.factor("acme", model) for model in "abc"] == [2.0, 1.0, 2.0]


def test_estimate_of_answers():
    """Answers are taken as long as they may be, then as long as they are, and never longer than they may be."""
    estimates = TokenEstimates()
    assert estimates.output_tokens(*WHO) == UNLEARNED_OUTPUT_TOKENS
    assert estimates.output_tokens(*WHO, 4_000, rows=3) == 12_000
    estimates.learn_output(*WHO, 300, 30_100)
    estimates.learn_output(*WHO, 0, 99)
    assert estimates.output_tokens(*WHO, 4_000) == 101
    assert estimates.output_tokens(*WHO, 64, rows=10) == 640
    assert estimates.output_tokens(*WHO, rows=3) == 301
    for _ in range(2_000):
        estimates.learn_output(*WHO, 1_000, 0)
    assert estimates.output_tokens(*WHO) == 1


def test_estimate_price_is_the_rows_price():
    """Rows estimated together cost what they cost one by one, whether or not the tokens divide evenly."""
    for batch in (True, False):
        rows = [Usage(100, 7)] * 2 + [Usage(101, 7)]
        single = [price_row("openai", "gpt-4o-mini", row, WHEN, batch=batch) for row in rows]
        assert estimated_price("openai", "gpt-4o-mini", 301, 21, 3, WHEN, batch=batch) == sum(
            price.picodollars for price in single if price is not None
        )
    assert estimated_price("openai", "gpt-4o-mini", 0, 0, 0, WHEN, batch=True) == 0


def test_estimate_price_knows_tiers_of_a_row():
    """A hundred short rows are not priced as one long one."""
    short = estimated_price("openai", "gpt-6-luna", 400_000, 0, 100, WHEN, batch=True)
    long = estimated_price("openai", "gpt-6-luna", 400_000, 0, 1, WHEN, batch=True)
    assert short is not None
    assert long is not None
    assert long > 1.5 * short


def test_estimate_price_unknown():
    """An unknown model has no estimated price, in a batch or outside."""
    assert estimated_price("openai", "nobody-knows-it", 10, 10, 1, WHEN, batch=True) is None
    assert estimated_price("openai", "nobody-knows-it", 10, 10, 1, WHEN, batch=False) is None
