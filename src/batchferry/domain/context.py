"""How long a request may be for its model, and whether one is certainly longer.

The context of a model comes from the data that ships with genai-prices; nothing is downloaded. A row that is too
long costs nothing at the provider, it only comes back a window later. A row that we hold back wrongly has no answer
at all. So a request counts as too long here only where no tokenizer could make it fit.
"""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime

from batchferry.domain.money import PROVIDER_IDS

_NAMES_ARE_FREE = frozenset({"azure"})
"""Here ``model`` is the name of a deployment, which the customer chose: ``gpt-4`` may stand for anything."""
_ANY_DAY = datetime(2026, 1, 1, tzinfo=UTC)
"""The library prices for an instant; a context has none."""


def context_tokens(provider: str, model: str) -> int | None:
    """Tokens that fit into the model, input and output together; None where the price data does not say.

    Args:
        provider: ``openai``, ``anthropic``, ``google`` ..., as in ``money.price_row``. Anything else is unknown, so
            that a compatible server's model is never taken for another's of the same name; so is every Azure
            deployment, whose name says nothing.
        model: as asked for; dated snapshots are found.

    For embeddings it is the length of *one* input.
    """
    provider_id = PROVIDER_IDS.get(provider, provider)
    if not provider_id or not model or provider_id in _NAMES_ARE_FREE:
        return None
    return _known_context(provider_id, model)


@functools.lru_cache(maxsize=4_096)
def _known_context(provider_id: str, model: str) -> int | None:
    import genai_prices  # noqa: PLC0415 (its data takes most of a second to load: only who asks for it pays)

    try:
        found = genai_prices.calc_price(
            genai_prices.Usage(), model, provider_id=provider_id, genai_request_timestamp=_ANY_DAY
        )
    except LookupError:
        return None
    return found.model.context_window or None


CHARS_A_TOKEN = 6
"""No prose of any script gets more characters into a token on average: English has 4 to 5, code 3 to 4, Cyrillic 3
to 4 with GPT's tokenizers."""
IDEOGRAPHS_A_TOKEN = 2.5
"""The same for Chinese characters and the Japanese ones taken from them: 1 to 1.7 with GPT's tokenizers."""
_LEAST_BINARY = 400
"""So many characters of the base64 alphabet without a blank are no text: sound, pictures and files are not billed by
the length of their text."""
_ESCAPE_CHARS = 6
_ESCAPED_IDEOGRAPH = re.compile(rb"\\u[4-9][0-9a-fA-F]{3}")
_ESCAPED = re.compile(rb"\\u[0-9a-fA-F]{4}")
_BINARY = re.compile(rb"[A-Za-z0-9+/\\_=-]{%d,}" % _LEAST_BINARY)
_RUNS = re.compile(rb"([-=._*# ])\1{2,}")
_EMPTY_LINES = re.compile(rb"(?:\\[nrt] *){2,}")
"""Indents, rules and empty lines: a tokenizer has one token for dozens of signs."""
_IDEOGRAPH_LEADS = bytes(range(0xE4, 0xEA))
_CONTINUATIONS = bytes(range(0x80, 0xC0))


def least_tokens(body: bytes) -> int:
    r"""A number of input tokens below which no tokenizer comes for this request body, which must be valid JSON.

    Characters are counted, not bytes: ``\uXXXX`` is one, whatever it stands for. Long runs of the same sign count as
    one, inline files as none.
    """
    text = _ESCAPED.sub(b"\xc2", _ESCAPED_IDEOGRAPH.sub(b"\xe4", body)) if b"\\u" in body else body
    text = _EMPTY_LINES.sub(b" ", _RUNS.sub(b" ", text))
    text = b" ".join(_BINARY.sub(b"", word) if len(word) >= _LEAST_BINARY else word for word in text.split(b" "))
    characters = len(text.translate(None, _CONTINUATIONS))
    ideographs = characters - len(text.translate(None, _CONTINUATIONS + _IDEOGRAPH_LEADS))
    return int((characters - ideographs) / CHARS_A_TOKEN + ideographs / IDEOGRAPHS_A_TOKEN)


def is_surely_too_long(
    estimated_tokens: int, body_bytes: int, context: int, *, body: bytes | None = None, inputs: int = 1
) -> bool:
    r"""Whether the request cannot fit into the model, so that sending it only wastes a window.

    The estimate alone cannot say: it is made from bytes and rather high. English comes out right, but plain Russian
    three times too high, Russian written in ``\uXXXX`` escapes (as Python's ``json.dumps`` does by default) six times,
    a table padded with blanks more, and base64 in a member that is not known for files a thousand times. So the
    estimate only sorts out what needs no look, which is nearly everything; the rest is measured by ``least_tokens``.
    English is caught from about 1.4 times the context on, Chinese from about 2. Room for the answer is not asked for:
    some servers cut the answer short instead of refusing.

    Args:
        estimated_tokens: as ``requests.estimate_tokens`` says.
        body_bytes: length of the request body.
        context: from the route's setting or ``context_tokens``.
        body: the request body. Without it every byte is taken for part of an escape, so only requests of more than
            36 bytes for each token of the context count as too long; a recording cannot be told from text then, so
            give it wherever it is at hand.
        inputs: texts of an embeddings request. The context is that of one of them; on average more than that means
            that one is too long.
    """
    limit = context * max(inputs, 1)
    if estimated_tokens <= limit or body_bytes <= limit:
        return False
    if body is None:
        return body_bytes > limit * CHARS_A_TOKEN * _ESCAPE_CHARS
    return least_tokens(body) > limit
