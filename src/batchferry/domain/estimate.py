"""What rows will cost before anybody has run them: tokens learned from what ran, and their price.

``requests.estimate_tokens`` knows a request only by its bytes and counts rather high than low. How far off it is
depends on the texts: English comes out nearly right, Chinese up to twice too high, pictures either way. So the ratio
of the provider's count to ours is learned for each account and model from the lots that have ended, and so is how
long the answers are. What was learned is a cache: a process that knows nothing yet estimates high.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import datetime

import msgspec

from batchferry.domain.money import Prices, price_row
from batchferry.domain.provider import Usage

MIN_FACTOR = 0.25
"""No script and no tokenizer counts a text at less than a quarter of our estimate; below it the data is odd."""
MAX_FACTOR = 4.0
"""Nor at more than four times: a page of pictures does, and it must not stop all the others of its model."""
MIN_LEARNED_TOKENS = 1_000
"""Before so many estimated tokens have been compared the estimate stands as it is: one odd row teaches nothing."""
MEMORY_TOKENS = 20_000_000
"""Beyond so many the past counts half, so that a model whose prompts change is learned anew."""
MIN_SHARE = 0.5
"""A lot in which fewer of the rows were counted by the provider says too little about the others."""
MAX_MODELS = 1_000
"""Pairs of account and model that are remembered, the latest; the model's name is the caller's."""
UNLEARNED_OUTPUT_TOKENS = 1_000
"""An answer of a model that none is known of, where the request sets no bound: longer than most."""
MEMORY_ROWS = 100_000
"""As ``MEMORY_TOKENS``, for answers."""


class _Learned(msgspec.Struct, gc=False):
    estimated: float = 0.0
    real: float = 0.0
    rows: float = 0.0
    output: float = 0.0


class TokenEstimates:
    """Token counts learned from what ran, by account and model. Not thread-safe; knows no clock."""

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._learned: OrderedDict[tuple[str, str], _Learned] = OrderedDict()

    def learn(self, account: str, model: str, estimated: int, real: int, *, share: float = 1.0) -> None:
        """Input tokens of rows that ran: our estimate of them, and the provider's count.

        Args:
            account: who ran them.
            model: that was asked for.
            estimated: sum of the estimates as they were made, before any factor.
            real: sum of the provider's counts, cached tokens included.
            share: rows with a count out of the rows that were estimated. A refused row has none, so the estimate is
                taken in this share; below ``MIN_SHARE`` nothing is learned.
        """
        if estimated <= 0 or real <= 0 or not MIN_SHARE <= share <= 1:
            return
        known = self._of(account, model)
        known.estimated += estimated * share
        known.real += real
        while known.estimated > MEMORY_TOKENS:
            known.estimated /= 2
            known.real /= 2

    def learn_output(self, account: str, model: str, rows: int, output_tokens: int) -> None:
        """Output tokens of so many answered rows, together."""
        if rows <= 0 or output_tokens < 0:
            return
        known = self._of(account, model)
        known.rows += rows
        known.output += output_tokens
        while known.rows > MEMORY_ROWS:
            known.rows /= 2
            known.output /= 2

    def factor(self, account: str, model: str) -> float:
        """Real input tokens for one estimated; 1 while too little is known, never outside 0.25 to 4."""
        known = self._learned.get((account, model))
        if known is None or known.estimated < MIN_LEARNED_TOKENS:
            return 1.0
        return min(max(known.real / known.estimated, MIN_FACTOR), MAX_FACTOR)

    def estimate(self, account: str, model: str, tokens: int) -> int:
        """The input tokens to expect of rows whose estimate is ``tokens``, rounded up."""
        return _up(tokens * self.factor(account, model))

    def output_tokens(self, account: str, model: str, max_output_tokens: int | None = None, rows: int = 1) -> int:
        """Output tokens to expect of so many rows, rounded up.

        The learned average, but never more than what the request allows (``max_output_tokens`` of one row). While no
        answer of the model is known: what the request allows, else ``UNLEARNED_OUTPUT_TOKENS``.
        """
        known = self._learned.get((account, model))
        if known is None or not known.rows:
            return rows * (UNLEARNED_OUTPUT_TOKENS if max_output_tokens is None else max_output_tokens)
        average = known.output / known.rows
        return _up(rows * (average if max_output_tokens is None else min(average, max_output_tokens)))

    def _of(self, account: str, model: str) -> _Learned:
        pair = (account, model)
        known = self._learned.get(pair)
        if known is None:
            if len(self._learned) >= self._max_models:
                self._learned.popitem(last=False)
            known = self._learned[pair] = _Learned()
        self._learned.move_to_end(pair)
        return known


def estimated_price(
    prices: Prices,
    model: str,
    input_tokens: int,
    output_tokens: int,
    rows: int,
    when: datetime,
    *,
    batch: bool,
) -> int | None:
    """Picodollars that so many rows will cost; None where the price is not known.

    Args:
        prices: whose prices apply.
        model: as asked for.
        input_tokens: of all rows together.
        output_tokens: of all rows together.
        rows: they are taken to be equally long, because a model may be dearer above so many tokens *of one row*.
        when: aware UTC.
        batch: whether they travel in a batch or through the sync lane.
    """
    if rows <= 0:
        return 0
    inputs, more_inputs = divmod(input_tokens, rows)
    outputs, more_outputs = divmod(output_tokens, rows)

    def one(input_tokens: int, output_tokens: int) -> int | None:
        price = price_row(prices, model, Usage(input_tokens, output_tokens), when, batch=batch)
        return None if price is None else price.picodollars

    # What does not divide evenly is one token more in some of the rows; input and output are priced independently.
    base, longer, wordier = one(inputs, outputs), one(inputs + 1, outputs), one(inputs, outputs + 1)
    if base is None or longer is None or wordier is None:
        return None
    return rows * base + more_inputs * (longer - base) + more_outputs * (wordier - base)


def _up(amount: float) -> int:
    return -int(-amount // 1)
