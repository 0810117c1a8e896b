"""How long a request may be, and which ones are certainly longer."""

from __future__ import annotations

import base64
import json
import random

import pytest

from batchferry.domain.context import context_tokens, is_surely_too_long, least_tokens
from batchferry.domain.requests import estimate_tokens


@pytest.mark.parametrize(
    ("provider", "model", "tokens"),
    [
        ("openai", "gpt-4o-mini", 128_000),
        ("openai", "gpt-4o-mini-2024-07-18", 128_000),
        ("openai", "text-embedding-3-small", 8_192),
        ("anthropic", "claude-sonnet-4-5", 200_000),
        ("gemini", "gemini-2.5-flash", 1_048_576),
        ("google", "gemini-2.5-flash", 1_048_576),
        # Known, but not how long; not known; nobody's; a deployment's name.
        ("openai", "omni-moderation-latest", None),
        ("openai", "no-such-model", None),
        ("openai", "", None),
        ("self-hosted", "gpt-4o-mini", None),
        ("", "gpt-4o-mini", None),
        ("azure", "gpt-4", None),
        ("azure_openai", "gpt-4", None),
    ],
)
def test_the_context_of_a_model(provider, model, tokens):
    """What the price data knows, under each name of a provider; nothing is guessed for what it does not know."""
    assert context_tokens(provider, model) == tokens


def chat(text: str, *, ascii_only: bool = False) -> bytes:
    """A chat request around a text."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=ascii_only).encode()


def judge(body: bytes, context: int, inputs: int = 1) -> bool:
    """The verdict with everything that is known."""
    return is_surely_too_long(estimate_tokens(body), len(body), context, body=body, inputs=inputs)


ENGLISH = "It was raining when the harbour master came home, and nobody had waited for him. "
RUSSIAN = "Съешь ещё этих мягких французских булок, да выпей же чаю. "
CHINESE = "我们在昨天的会议上讨论了这个问题并且决定继续推进。"
TOKENS = {ENGLISH: 17, RUSSIAN: 12, CHINESE: 15}
"""Words and marks of each: the tokens it would have for a tokenizer that knows every word whole."""
TEXTS = pytest.mark.parametrize("text", [ENGLISH, RUSSIAN, CHINESE], ids=["english", "russian", "chinese"])


@TEXTS
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_fits_is_sent(text, ascii_only):
    """A text that just fits its model is never held back, in whatever script and spelling."""
    body = chat(text * 1_000, ascii_only=ascii_only)
    assert least_tokens(body) <= TOKENS[text] * 1_000
    assert not judge(body, TOKENS[text] * 1_000)


@TEXTS
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_cannot_fit_is_not_sent(text, ascii_only):
    """A text of three times its model's context is held back, in whatever script and spelling."""
    assert judge(chat(text * 3_000, ascii_only=ascii_only), TOKENS[text] * 1_000)


def test_prose_is_caught_early():
    """English of one and a half times the context does not travel."""
    assert judge(chat(ENGLISH * 1_500), TOKENS[ENGLISH] * 1_000)


@pytest.mark.parametrize(
    "text",
    [
        " " * 400_000,
        "a           b            c           \n" * 8_000,
        "------------------------------------\n" * 8_000,
        "\n\n\n" * 100_000,
        "data:image/png;base64," + base64.b64encode(random.Random(1).randbytes(400_000)).decode(),
    ],
    ids=["blanks", "table", "rules", "empty lines", "picture"],
)
def test_bytes_that_are_no_tokens(text):
    """Padding and pictures are long without being many tokens."""
    assert not judge(chat(text), 40_000)


@pytest.mark.parametrize("slash", [b"/", b"\\/"])
def test_a_recording_is_no_text(slash):
    """Half a minute of sound in base64 (some writers escape its slashes) fits a model of 16,000 tokens.

    Even in a member that the estimate does not know for files.
    """
    sound = base64.b64encode(random.Random(1).randbytes(30 * 48_000)).replace(b"/", slash).decode()
    body = b'{"messages":[{"content":[{"input_audio":{"wave":"' + sound.encode() + b'"}}]}]}'
    assert estimate_tokens(body) > 400_000
    assert not judge(body, 16_000)
    known = body.replace(b'"wave"', b'"data"')
    assert estimate_tokens(known) < 2_000
    assert not judge(known, 16_000)


def test_without_the_body_only_the_impossible_is_held_back():
    """By its length alone a request counts as too long only where even escapes of six bytes cannot make it fit."""
    assert not is_surely_too_long(300_000, 1_200_000, 128_000)
    assert not is_surely_too_long(1_000_000, 36 * 128_000, 128_000)
    assert is_surely_too_long(1_152_001, 36 * 128_000 + 1, 128_000)
    # A file of any length is not counted by the estimate.
    assert not is_surely_too_long(900, 36 * 128_000 + 1, 128_000)


def test_embeddings_are_measured_by_their_inputs():
    """The context is that of one input: many short ones are lawful, and an average above it is not."""
    many = json.dumps({"model": "m", "input": [ENGLISH] * 4_000}).encode()
    assert not judge(many, 8_192, inputs=4_000)
    assert judge(many, 8_192)
    long = json.dumps({"model": "m", "input": [ENGLISH * 1_000] * 4}).encode()
    assert judge(long, 8_192, inputs=4)
