"""What a row cost, and what the same row would have cost at list price. Exact, offline, and None where unknown.

Prices come from the data that ships with genai-prices; nothing is downloaded. Money is counted in whole picodollars
(10**-12 USD), so that a token at 0.02 USD a million is 20,000 of them and sums never round.

Three traps of the data are closed here:

- A model without a batch price, or an instant before its batch price starts, silently gets the *full* price from the
  library. So a batch price counts as ``published`` only if the model carries a batch entry that is in force; it may
  then equal the list price (gpt-3.5-turbo-1106 does). Otherwise, at providers that sell every batch at half the price,
  half the list price is taken and said to be ``assumed_discount``; at others the price is unknown.
- A model with a price tier is dearer above so many tokens *of one call*: rows are priced one by one, never summed
  first.
- A model without any price in the data would cost nothing: it is unknown, save where it is known to be free.

Unit prices are learned once per model and day by asking the library, and a row is then a few multiplications.
"""

from __future__ import annotations

import fnmatch
import functools
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from batchferry.domain.provider import Usage

if TYPE_CHECKING:
    from genai_prices.types import PriceCalculation

PICODOLLARS = 10**12
_BATCH = {"processing": "batch"}
PROVIDER_IDS = {"gemini": "google", "vertex": "google", "xai": "x-ai", "azure_openai": "azure"}
"""Names in use for a provider beside those of the price data."""

HALF_PRICE_PROVIDERS = frozenset({"openai", "azure", "anthropic", "google", "mistral", "groq"})
"""Providers whose documentation gives half price for every model in a batch. xAI's discount differs by model."""
HALF_PRICE = Fraction(1, 2)
CACHE_AT_LIST_PROVIDERS = frozenset({"google"})
"""Where the two discounts do not add up: cached tokens cost the same in a batch and outside (ai.google.dev, Batch)."""
_FREE_MODELS = frozenset({"moderation"})
"""Models without a price because they are free: OpenAI's moderation models."""


class PriceBasis(StrEnum):
    """Where a price comes from."""

    LIST = "list"
    """The list price: the row ran outside a batch."""
    PUBLISHED = "published"
    """The model's own batch price."""
    ASSUMED_DISCOUNT = "assumed_discount"
    """A share of the list price, as the provider gives on every batch; the data names no batch price of this model."""
    NAMED = "named"
    """The account's own prices, as its settings name them."""


class Price(msgspec.Struct, frozen=True, gc=False):
    """A row's price, and the same row's list price, in whole picodollars."""

    picodollars: int
    list_picodollars: int
    basis: PriceBasis


class _Rates(NamedTuple):
    """Picodollars a token, for calls of more than ``above`` input tokens; a fraction where a token costs less."""

    above: int
    fresh: int | Fraction
    cached: int | Fraction
    written: int | Fraction
    written_1h: int | Fraction
    output: int | Fraction
    call: int | Fraction


class _Tariff(NamedTuple):
    paid: tuple[_Rates, ...]
    listed: tuple[_Rates, ...]
    basis: PriceBasis


class UnitPrices(NamedTuple):
    """Prices that a person names: picodollars a token outside a batch, and what a batch costs of that."""

    input_picodollars: int | Fraction
    output_picodollars: int | Fraction
    batch_share: Fraction = HALF_PRICE

    @classmethod
    def per_million(cls, input_usd: str, output_usd: str, batch_share: Fraction = HALF_PRICE) -> UnitPrices:
        """From USD for a million tokens, each a plain decimal.

        Raises:
            ValueError: not plain decimals.
        """
        return cls(Fraction(parse_usd(input_usd), 10**6), Fraction(parse_usd(output_usd), 10**6), batch_share)

    def cost(self, input_tokens: int | Fraction, output_tokens: int | Fraction) -> tuple[int, int]:
        """Picodollars of these tokens in a batch, and outside; rounded once, so hand sums over, not rows."""
        listed = Fraction(input_tokens * self.input_picodollars + output_tokens * self.output_picodollars)
        return round(listed * self.batch_share), round(listed)


class PriceList(NamedTuple):
    """An account's own prices before anybody's published ones."""

    provider: str
    """Whose published prices apply to models that are not named here; empty: nobody's."""
    named: tuple[tuple[str, UnitPrices], ...] = ()
    """By pattern of the model (``*`` and ``?`` as in file names); the first match."""
    batch_share: Fraction | None = None
    """What a batch costs of a list price where no batch price is known; None: as the provider is known to give."""

    def unit_prices(self, model: str) -> UnitPrices | None:
        """The named prices of a model."""
        return next((prices for pattern, prices in self.named if fnmatch.fnmatchcase(model, pattern)), None)


Prices = str | PriceList
"""Whose prices apply: a provider (``openai``, ``anthropic``, ``azure``, ``google`` ...), or an account's own list."""

_BY_THE_MINUTE = object()
"""Stands for a model whose price depends on the time of day."""


def price_row(
    prices: Prices, model: str, usage: Usage, when: datetime, *, batch: bool, assume_discount: bool = True
) -> Price | None:
    """The price of one call, or None when it is not known.

    Args:
        prices: whose prices apply. A provider that is not known has none, so that a compatible server is never
            billed at another's prices.
        model: as asked for or as answered; dated snapshots are found.
        usage: of this one row; ``input_tokens`` includes ``cached_tokens`` and ``cache_write_tokens``. The latter
            cost what the provider takes for its shortest-lived cache, save for the ``cache_write_1h_tokens`` among
            them.
        when: aware UTC; prices change on days.
        batch: whether the row ran in a batch.
        assume_discount: take half the list price where the data has no batch price (see the module's text).
    """
    tariff = _tariff(prices, model, batch, assume_discount, when.toordinal(), None)
    if tariff is _BY_THE_MINUTE:
        tariff = _tariff(prices, model, batch, assume_discount, when.toordinal(), when.hour * 60 + when.minute)
    if tariff is None:
        return None
    if usage.cached_tokens < 0 or usage.output_tokens < 0:
        return None
    if not 0 <= usage.cache_write_1h_tokens <= usage.cache_write_tokens:
        return None
    if usage.cached_tokens + usage.cache_write_tokens > usage.input_tokens:
        return None
    paid, listed, basis = tariff
    list_price = _sum(listed, usage)
    return Price(list_price if paid is listed else _sum(paid, usage), list_price, basis)


def format_usd(picodollars: int) -> str:
    """An amount of 0 or more in USD as a plain decimal, exact, without trailing zeros."""
    digits = str(picodollars).rjust(13, "0")
    return (digits[:-12] + "." + digits[-12:]).rstrip("0").rstrip(".")


def parse_usd(text: str) -> int:
    """Picodollars of an amount in USD written as a plain decimal: what ``format_usd`` gives, read back.

    Raises:
        ValueError: not a plain decimal of 0 or more, or finer than a picodollar.
    """
    whole, dot, part = text.partition(".")
    if not (whole.isascii() and whole.isdigit()) or (dot and not (part.isascii() and part.isdigit())) or len(part) > 12:
        raise ValueError("an amount in USD is a plain decimal such as 12.5")
    return int(whole) * PICODOLLARS + int(part.ljust(12, "0"))


def warm_up() -> None:
    """Load the price data now (about a second) rather than in the middle of the first landing."""
    _calculate("openai", "gpt-4o-mini", datetime(2026, 1, 1, tzinfo=UTC), None)


def _sum(rates: tuple[_Rates, ...], usage: Usage) -> int:
    row, total, cached, written = rates[0], usage.input_tokens, usage.cached_tokens, usage.cache_write_tokens
    if len(rates) > 1:
        for other in rates:
            if total > other.above:
                row = other
    amount = (total - cached - written) * row.fresh + cached * row.cached + usage.output_tokens * row.output + row.call
    if written:
        for_1h = usage.cache_write_1h_tokens
        amount += (written - for_1h) * row.written + for_1h * row.written_1h
    return amount if type(amount) is int else round(amount)


@functools.lru_cache(maxsize=4_096)
def _tariff(
    prices: Prices, model: str, batch: bool, assume_discount: bool, day: int, minute: int | None
) -> Any:  # _Tariff | None | _BY_THE_MINUTE, which no type can tell apart cheaply
    provider, share = (prices, None) if isinstance(prices, str) else (prices.provider, prices.batch_share)
    if not isinstance(prices, str) and (named := prices.unit_prices(model)) is not None:
        return _named_tariff(named, batch)
    provider_id = PROVIDER_IDS.get(provider, provider)
    when = datetime.fromordinal(day).replace(tzinfo=UTC) + timedelta(minutes=minute or 0)
    if not provider_id or not model:
        return None
    try:
        sample = _calculate(provider_id, model, when, None)
    except LookupError:
        return None
    if minute is None and _depends_on_time_of_day(sample):
        return _BY_THE_MINUTE
    is_free = provider_id == "openai" and sample.model.id in _FREE_MODELS
    if not is_free and not any(value is not None for value in vars(sample.model_price).values()):
        return None
    listed = _learn(provider_id, model, when, None)
    if not batch:
        return _Tariff(listed, listed, PriceBasis.LIST)
    if is_free:
        return _Tariff(listed, listed, PriceBasis.PUBLISHED)
    if _has_batch_price(sample, when):
        return _Tariff(_learn(provider_id, model, when, _BATCH), listed, PriceBasis.PUBLISHED)
    if share is None and provider_id in HALF_PRICE_PROVIDERS:
        share = HALF_PRICE
    if assume_discount and share is not None:
        paid = [_shared(rates, share) for rates in listed]
        if provider_id in CACHE_AT_LIST_PROVIDERS:
            paid = [one._replace(cached=rates.cached) for one, rates in zip(paid, listed, strict=True)]
        return _Tariff(tuple(paid), listed, PriceBasis.ASSUMED_DISCOUNT)
    return None


def _named_tariff(named: UnitPrices, batch: bool) -> _Tariff:
    price, output = _whole(Fraction(named.input_picodollars)), _whole(Fraction(named.output_picodollars))
    listed = _Rates(0, price, price, price, price, output, 0)
    paid = _shared(listed, named.batch_share) if batch else listed
    return _Tariff((paid,), (listed,), PriceBasis.NAMED)


def _shared(rates: _Rates, share: Fraction) -> _Rates:
    return _Rates(rates.above, *(_whole(Fraction(rate) * share) for rate in rates[1:]))


def _calculate(
    provider_id: str,
    model: str,
    when: datetime,
    context: dict[str, str] | None,
    *,
    tokens: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> PriceCalculation:
    import genai_prices  # noqa: PLC0415 (its data takes most of a second to load: only who asks for a price pays)

    total, cached, written, written_1h, output = tokens
    return genai_prices.calc_price(
        genai_prices.Usage(
            input_tokens=total,
            cache_read_tokens=cached,
            cache_write_tokens=written,
            cache_write_1h_tokens=written_1h,  # where the data has no price for it, the library takes the other
            output_tokens=output,
        ),
        model,
        provider_id=provider_id,
        genai_request_timestamp=when,
        price_context=context,
    )


def _learn(provider_id: str, model: str, when: datetime, context: dict[str, str] | None) -> tuple[_Rates, ...]:
    """The unit prices of each tier, found by pricing calls of one token more than the tier's threshold."""
    from genai_prices.types import TieredPrices  # noqa: PLC0415 (as above)

    def cost(total: int, cached: int = 0, written: int = 0, written_1h: int = 0, output: int = 0) -> Fraction:
        found = _calculate(provider_id, model, when, context, tokens=(total, cached, written, written_1h, output))
        return Fraction(found.total_price) * PICODOLLARS

    prices = vars(_calculate(provider_id, model, when, context).model_price).values()
    starts = {0, *(tier.start for price in prices if isinstance(price, TieredPrices) for tier in price.tiers)}
    call = cost(0)
    learned = []
    for above in sorted(starts):
        total = above + 1
        fresh = cost(total)
        learned.append(
            _Rates(
                above,
                _whole((fresh - call) / total),
                _whole((cost(total, cached=total) - call) / total),
                _whole((cost(total, written=total) - call) / total),
                _whole((cost(total, written=total, written_1h=total) - call) / total),
                _whole(cost(total, output=1) - fresh),
                _whole(call),
            )
        )
    return tuple(learned)


def _whole(amount: Fraction) -> int | Fraction:
    return int(amount) if amount.denominator == 1 else amount


def _has_batch_price(sample: PriceCalculation, when: datetime) -> bool:
    # The library ignores the context where a provider only resells another's model, as Azure does OpenAI's.
    if not any(sample.model is model for model in sample.provider.models):
        return False
    return any(
        variant.when
        and all(_BATCH.get(name) == value for name, value in variant.when.items())
        and (variant.constraint is None or variant.constraint.active(when))
        for variant in sample.model.price_variants or ()
    )


def _depends_on_time_of_day(sample: PriceCalculation) -> bool:
    from genai_prices.types import TimeOfDateConstraint  # noqa: PLC0415 (as above)

    prices = sample.model.prices
    conditions = [price.constraint for price in prices] if isinstance(prices, list) else []
    conditions += [variant.constraint for variant in sample.model.price_variants or ()]
    return any(isinstance(condition, TimeOfDateConstraint) for condition in conditions)
