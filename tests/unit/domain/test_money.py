"""Prices agree with worked figures, and a price that is not known is never a number."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

import pytest
from genai_prices import Usage as TheirUsage
from genai_prices import calc_price
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.money import (
    HALF_PRICE,
    PICODOLLARS,
    Price,
    PriceBasis,
    PriceList,
    UnitPrices,
    format_usd,
    parse_usd,
    price_row,
    warm_up,
)
from batchferry.domain.provider import Usage

WHEN = datetime(2026, 11, 15, tzinfo=UTC)
ROW = Usage(input_tokens=1000, output_tokens=500)


def _usd(price: Price) -> tuple[str, str]:
    return format_usd(price.picodollars), format_usd(price.list_picodollars)


@pytest.mark.parametrize(
    ("provider", "model", "standard", "batch", "basis"),
    [
        ("openai", "gpt-5-mini", "0.00125", "0.000625", "published"),
        ("openai", "gpt-4o-mini", "0.00045", "0.000225", "published"),
        ("openai", "gpt-4o-mini-2024-07-18", "0.00045", "0.000225", "published"),
        ("anthropic", "claude-sonnet-4-5", "0.0105", "0.00525", "published"),
        ("anthropic", "claude-haiku-4-5", "0.0035", "0.00175", "published"),
        ("google", "gemini-2.5-flash", "0.00155", "0.000775", "published"),
        ("gemini", "gemini-2.5-flash", "0.00155", "0.000775", "published"),
        ("mistral", "mistral-small-latest", "0.00045", "0.000225", "published"),
        ("openai", "text-embedding-3-small", "0.00002", "0.00001", "assumed_discount"),
        ("azure", "gpt-4o-mini", "0.00045", "0.000225", "assumed_discount"),
        ("openai", "gpt-3.5-turbo-1106", "0.002", "0.002", "published"),
        ("openai", "omni-moderation-latest", "0", "0", "published"),
    ],
)
def test_money_worked_figures(provider: str, model: str, standard: str, batch: str, basis: str):
    """1,000 input and 500 output tokens cost what they should, in a batch and outside."""
    price = price_row(provider, model, ROW, WHEN, batch=True)
    assert price is not None
    assert (*_usd(price), price.basis.value) == (batch, standard, basis)
    outside = price_row(provider, model, ROW, WHEN, batch=False)
    assert outside is not None
    assert (*_usd(outside), outside.basis) == (standard, standard, PriceBasis.LIST)


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("openai", "no-such-model"),
        ("openai", ""),
        ("", "gpt-4o-mini"),
        ("vllm", "gpt-4o-mini"),
        ("openai", "my-gpt-4o"),
    ],
)
def test_money_unknown_is_none(provider: str, model: str):
    """A model or provider that the data does not know has no price, in a batch or outside."""
    assert price_row(provider, model, ROW, WHEN, batch=True) is None
    assert price_row(provider, model, ROW, WHEN, batch=False) is None


def test_money_no_batch_price_no_assumption():
    """Where half price may not be assumed, a model without a batch price is unknown in a batch only."""
    assert price_row("openai", "text-embedding-3-small", ROW, WHEN, batch=True, assume_discount=False) is None
    assert price_row("openai", "text-embedding-3-small", ROW, WHEN, batch=False) is not None
    assert price_row("deepseek", "deepseek-chat", ROW, WHEN, batch=True) is None


def test_money_before_the_batch_price_starts():
    """Before the data's batch prices begin the price is half the list price and says so, never silently full."""
    price = price_row("openai", "gpt-4o-mini", ROW, datetime(2026, 6, 1, tzinfo=UTC), batch=True)
    assert price is not None
    assert (_usd(price)[0], price.basis) == ("0.000225", PriceBasis.ASSUMED_DISCOUNT)


def test_money_discounts_that_do_not_add_up():
    """Gemini sells cached tokens at one price, in a batch or outside; everything else of the row is halved."""
    fresh, cached = (
        price_row("gemini", "gemini-2.0-flash", Usage(1_000_000, 0, found), WHEN, batch=True)
        for found in (0, 1_000_000)
    )
    assert fresh is not None
    assert cached is not None
    assert fresh.picodollars * 2 == fresh.list_picodollars
    assert cached.picodollars == cached.list_picodollars
    assert cached.basis is PriceBasis.ASSUMED_DISCOUNT


def test_money_tiers_by_row():
    """A long call is dearer from its first token on; two short calls are not one long call."""
    short = price_row("openai", "gpt-6-luna", Usage(200_000, 10), WHEN, batch=True)
    long = price_row("openai", "gpt-6-luna", Usage(400_000, 20), WHEN, batch=True)
    assert short is not None
    assert long is not None
    assert long.picodollars > 1.5 * 2 * short.picodollars


def test_money_time_of_day():
    """A model whose price depends on the hour is priced by the hour."""
    day = price_row("deepseek", "deepseek-chat", ROW, datetime(2025, 6, 1, 12, tzinfo=UTC), batch=False)
    night = price_row("deepseek", "deepseek-chat", ROW, datetime(2025, 6, 1, 20, tzinfo=UTC), batch=False)
    assert day is not None
    assert night is not None
    assert day.picodollars != night.picodollars


@pytest.mark.parametrize(
    "usage",
    [
        Usage(10, 1, 11),
        Usage(10, -1),
        Usage(-1, 0),
        Usage(10, 1, 6, 5),
        Usage(10, 1, 0, -1),
        Usage(10, 1, -1, 2),
        Usage(10, 1, 0, 2, 3),
        Usage(10, 1, 0, 2, -1),
    ],
)
def test_money_impossible_usage(usage: Usage):
    """Usage that cannot be is not priced."""
    assert price_row("openai", "gpt-4o-mini", usage, WHEN, batch=True) is None


@given(
    model=st.sampled_from(["gpt-4o-mini", "gpt-5-mini", "gpt-6-luna", "o4-mini"]),
    total=st.integers(0, 600_000),
    part=st.floats(0, 1),
    output=st.integers(0, 100_000),
)
@settings(max_examples=60, deadline=None)
def test_money_same_as_the_library(model: str, total: int, part: float, output: int):
    """What is learned once and multiplied equals the library's own answer for the row, to the last digit."""
    cached = int(total * part)
    price = price_row("openai", model, Usage(total, output, cached), WHEN, batch=True)
    theirs = calc_price(
        TheirUsage(input_tokens=total, cache_read_tokens=cached, output_tokens=output),
        model,
        provider_id="openai",
        genai_request_timestamp=WHEN,
        price_context={"processing": "batch"},
    )
    assert price is not None
    assert Decimal(price.picodollars) == theirs.total_price * PICODOLLARS
    assert Decimal(_usd(price)[0]) == theirs.total_price


@pytest.mark.parametrize(
    ("model", "standard", "batch"),
    [
        # 700 fresh, 100 read and 200 written of 1,000, and 500 out, at Anthropic's list prices for a million tokens:
        # 3, 0.30, 3.75, 15 (Sonnet 4.5); 1, 0.10, 1.25, 5 (Haiku 4.5); 4, 0.20, 5, 20 (Opus 5.5).
        ("claude-sonnet-4-5", "0.01038", "0.00519"),
        ("claude-haiku-4-5", "0.00346", "0.00173"),
        ("claude-opus-5-5", "0.01382", "0.00691"),
    ],
)
def test_money_cache_writes(model: str, standard: str, batch: str):
    """Tokens written into the cache have a price of their own, dearer than fresh ones, and half of it in a batch."""
    usage = Usage(1000, 500, 100, 200)
    price = price_row("anthropic", model, usage, WHEN, batch=True)
    assert price is not None
    assert _usd(price) == (batch, standard)
    alone = price_row("anthropic", model, usage, WHEN, batch=False)
    assert alone is not None
    assert _usd(alone) == (standard, standard)


@pytest.mark.parametrize(
    ("model", "standard", "batch"),
    [
        # As above, but of the 200 written tokens 150 are kept for an hour, at twice the price of fresh ones.
        ("claude-sonnet-4-5", "0.0107175", "0.00535875"),
        ("claude-haiku-4-5", "0.0035725", "0.00178625"),
        ("claude-opus-5-5", "0.01427", "0.007135"),
    ],
)
def test_money_cache_writes_for_an_hour(model: str, standard: str, batch: str):
    """Tokens that are kept for an hour are dearer than those that are kept for minutes."""
    price = price_row("anthropic", model, Usage(1000, 500, 100, 200, 150), WHEN, batch=True)
    assert price is not None
    assert _usd(price) == (batch, standard)


def test_money_cache_writes_for_an_hour_where_nobody_sells_them():
    """Without a price of their own they cost what all written tokens do."""
    for provider, model in (
        ("openai", "gpt-6-luna"),
        ("google", "gemini-2.5-flash"),
        ("mistral", "mistral-small-latest"),
    ):
        plain = price_row(provider, model, Usage(1000, 500, 100, 200), WHEN, batch=True)
        assert plain is not None
        assert price_row(provider, model, Usage(1000, 500, 100, 200, 150), WHEN, batch=True) == plain


@given(
    total=st.integers(0, 400_000),
    read=st.floats(0, 1),
    written=st.floats(0, 1),
    kept=st.floats(0, 1),
    output=st.integers(0, 50_000),
)
@settings(max_examples=40, deadline=None)
def test_money_cache_writes_same_as_the_library(total: int, read: float, written: float, kept: float, output: int):
    """With reads and writes of the cache, below a model's price tier and above, the library says the same."""
    cached = int(total * read)
    stored = int((total - cached) * written)
    for_1h = int(stored * kept)
    usage = Usage(total, output, cached, stored, for_1h)
    price = price_row("anthropic", "claude-sonnet-4-5", usage, WHEN, batch=True)
    theirs = calc_price(
        TheirUsage(
            input_tokens=total,
            cache_read_tokens=cached,
            cache_write_tokens=stored,
            cache_write_1h_tokens=for_1h,
            output_tokens=output,
        ),
        "claude-sonnet-4-5",
        provider_id="anthropic",
        genai_request_timestamp=WHEN,
        price_context={"processing": "batch"},
    )
    assert price is not None
    assert Decimal(price.picodollars) == theirs.total_price * PICODOLLARS


def test_money_of_an_accounts_own():
    """Named prices go before published ones, by the first pattern; others are the provider's, or nobody's."""
    own = UnitPrices.per_million("2", "8", Fraction(1, 4))
    prices = PriceList("openai", (("house-*", own), ("*-free", UnitPrices.per_million("0", "0"))))
    price = price_row(prices, "house-large", ROW, WHEN, batch=True)
    assert price is not None
    assert (*_usd(price), price.basis) == ("0.0015", "0.006", PriceBasis.NAMED)
    assert price_row(prices, "llama-free", ROW, WHEN, batch=False) == Price(0, 0, PriceBasis.NAMED)
    assert price_row(prices, "gpt-5-mini", ROW, WHEN, batch=True) == price_row(
        "openai", "gpt-5-mini", ROW, WHEN, batch=True
    )
    assert price_row(PriceList(""), "gpt-5-mini", ROW, WHEN, batch=True) is None
    shared = price_row(PriceList("openai", batch_share=Fraction(1, 5)), "text-embedding-3-small", ROW, WHEN, batch=True)
    assert shared is not None
    assert (*_usd(shared), shared.basis) == ("0.000004", "0.00002", PriceBasis.ASSUMED_DISCOUNT)


def test_money_formats():
    """Amounts are exact plain decimals, to the picodollar."""
    assert [format_usd(n) for n in (0, 1, 10**12, 1_500_000_000_000, 20_000)] == [
        "0",
        "0.000000000001",
        "1",
        "1.5",
        "0.00000002",
    ]
    warm_up()


@given(st.integers(0, 10**20))
def test_money_reads_back_what_it_writes(picodollars: int):
    """An amount as text and back is the same amount."""
    assert parse_usd(format_usd(picodollars)) == picodollars


@pytest.mark.parametrize("text", ["", "-1", "1e3", "1.", ".5", "1.0000000000001", "1,000", "nan", "\u0661"])
def test_money_refuses_other_texts(text: str):
    """What is no plain decimal of dollars is refused, never half read."""
    with pytest.raises(ValueError, match="plain decimal"):
        parse_usd(text)


def test_money_a_large_job_by_batch():
    """The textbook sum: 21,000 rows that cost 87 USD one by one are 43.50 USD by batch."""
    rows = 21_000
    tokens = rows * 1_000
    flat = UnitPrices(Fraction(parse_usd("87"), tokens), 0)
    paid, listed = flat.cost(tokens, 0)
    assert (format_usd(paid), format_usd(listed)) == ("43.5", "87")
    assert Fraction(paid, listed) == HALF_PRICE


def test_money_a_daily_job_by_batch():
    """The textbook sum: 50,000 rows of 150 and 50 tokens at 5 and 10 USD: 62.50, by batch 31.25, 937.50 saved."""
    rows = 50_000
    paid, listed = UnitPrices.per_million("5", "10").cost(rows * 150, rows * 50)
    assert (format_usd(listed), format_usd(paid)) == ("62.5", "31.25")
    assert format_usd(30 * (listed - paid)) == "937.5"
