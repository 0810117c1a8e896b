"""Kinds of prompt: which requests say the same to the model and differ only in the user's words.

A *shape* is the model, the instructions (system prompt), the tools and the wanted form of the answer. A canary tries
each new shape on a few rows, and rows of one shape may travel together so that a provider's prompt cache helps them.

Where the instructions stand: chat completions have them in the leading ``system`` or ``developer`` items of
``messages``, responses in ``instructions``, in such items of ``input`` or in a stored ``prompt``, Anthropic's messages
in ``system``, Gemini in ``systemInstruction`` or in what ``cachedContent`` names; what form Gemini is to answer in
stands in its ``generationConfig``, beside settings that are none of the shape. Either spelling of Gemini's members is
the same. Two texts of JSON that differ only in white space, in the order of members or in how a character is
escaped are the same shape.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Protocol

import msgspec
import orjson

from batchferry.domain.requests import estimate_tokens

OPENAI_CACHE_TOKENS = 1_024
"""Shorter prompts are never cached; tools and answer schema count. Source: OpenAI's guide on prompt caching."""
ANTHROPIC_CACHE_TOKENS = 4_096
"""The longest of Anthropic's minimums (Opus 4.5 and 4.6, Haiku 4.5), for Claude models that are not listed below."""
ANTHROPIC_CACHE_TOKENS_BY_MODEL: tuple[tuple[str, int], ...] = (
    ("haiku-4", 4_096),
    ("haiku", 2_048),
    ("opus-4-5", 4_096),
    ("opus-4-6", 4_096),
    ("sonnet-4-6", 2_048),  # the page says 1,024; measured by users: nothing is cached below twice that
    ("3-5-sonnet", 1_024),
    ("3-7-sonnet", 1_024),
    ("sonnet-4", 1_024),
    ("3-opus", 1_024),
    ("opus-4", 1_024),
)
"""By a part of the model's name, the first that fits.

Source: Anthropic's page on prompt caching, as quoted in anthropics/anthropic-sdk-python#1194.
"""

GEMINI_CACHE_TOKENS = 4_096
"""Gemini 3 and later; prefixes are cached without being asked for."""
GEMINI_CACHE_TOKENS_BY_MODEL: tuple[tuple[str, int], ...] = (("2.5", 2_048),)
"""By a part of the model's name. Source: https://ai.google.dev/gemini-api/docs/caching, October 2026."""

_MAX_KNOWN = 4_096
"""Pieces of prompts whose canonical digest is remembered: about 200 bytes each, and never the text."""

_NOTHING = frozenset({b"", b"null"})
_NO_RAW = msgspec.Raw()
_LEADING = frozenset({"system", "developer"})


class _Item(msgspec.Struct, gc=False):
    role: Any = None
    content: msgspec.Raw = _NO_RAW


class _Body(msgspec.Struct, gc=False):
    model: Any = None
    messages: list[_Item] | None = None
    input: msgspec.Raw = _NO_RAW
    instructions: msgspec.Raw = _NO_RAW
    prompt: msgspec.Raw = _NO_RAW
    system: msgspec.Raw = _NO_RAW
    tools: msgspec.Raw = _NO_RAW
    functions: msgspec.Raw = _NO_RAW
    response_format: msgspec.Raw = _NO_RAW
    text: msgspec.Raw = _NO_RAW
    output_format: msgspec.Raw = _NO_RAW
    output_config: msgspec.Raw = _NO_RAW
    contents: msgspec.Raw = _NO_RAW
    systemInstruction: msgspec.Raw = _NO_RAW  # noqa: N815 (as on the wire)
    system_instruction: msgspec.Raw = _NO_RAW
    generationConfig: msgspec.Raw = _NO_RAW  # noqa: N815
    generation_config: msgspec.Raw = _NO_RAW
    cachedContent: msgspec.Raw = _NO_RAW  # noqa: N815
    cached_content: msgspec.Raw = _NO_RAW


class _Formatted(msgspec.Struct, gc=False):
    format: msgspec.Raw = _NO_RAW


class _StoredPrompt(msgspec.Struct, gc=False):
    id: msgspec.Raw = _NO_RAW
    version: msgspec.Raw = _NO_RAW


class _GenerationConfig(msgspec.Struct, gc=False):
    """What says in which form Gemini is to answer."""

    responseMimeType: msgspec.Raw = _NO_RAW  # noqa: N815 (as on the wire)
    response_mime_type: msgspec.Raw = _NO_RAW
    responseSchema: msgspec.Raw = _NO_RAW  # noqa: N815
    response_schema: msgspec.Raw = _NO_RAW
    responseJsonSchema: msgspec.Raw = _NO_RAW  # noqa: N815
    response_json_schema: msgspec.Raw = _NO_RAW
    responseModalities: msgspec.Raw = _NO_RAW  # noqa: N815
    response_modalities: msgspec.Raw = _NO_RAW


_CONFIG_TAGS = tuple(
    zip(_GenerationConfig.__struct_fields__, (b"1", b"1", b"2", b"2", b"3", b"3", b"4", b"4"), strict=True)
)

_decode_config = msgspec.json.Decoder(_GenerationConfig).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_items = msgspec.json.Decoder(list[_Item]).decode
_decode_formatted = msgspec.json.Decoder(_Formatted).decode
_decode_stored = msgspec.json.Decoder(_StoredPrompt).decode

_Piece = tuple[bytes, msgspec.Raw]
"""A tag of one byte, and the JSON of that piece of the prompt."""

_known: dict[bytes, bytes] = {}


def fingerprint(body: bytes, model: str) -> str:
    """The shape of a request as 16 hexadecimal digits; a body that cannot be read is a shape of its own per model.

    Args:
        body: the request body, JSON.
        model: the model that runs it, whatever the body says.
    """
    try:
        read = _decode_body(body)
    except (ValueError, RecursionError):
        return _combine(b"?", [], model)
    return _combine(b"s", _pieces(read), model)


def prefix(body: bytes) -> str | None:
    """The fingerprint of what stands before the user's words, when it is long enough for the provider's prompt cache.

    None: too short for a cache to help, by our own estimate of tokens, or unreadable. The model is no part of it.
    """
    try:
        read = _decode_body(body)
        pieces = _pieces(read)
        least_tokens = _least_tokens(read)
        sizes = [len(memoryview(raw)) for _, raw in pieces]
        if sum(sizes) < least_tokens:  # no estimate comes to a token a byte
            return None
        if sum(estimate_tokens(bytes(raw)) for _, raw in pieces) < least_tokens:
            return None
    except (ValueError, RecursionError):
        return None
    return _combine(b"p", pieces, "")


class Draws(Protocol):
    """What is asked of a source of randomness; ``random.Random`` has it."""

    def randrange(self, stop: int, /) -> int: ...


class Reservoir:
    """A fair random sample of at most ``size`` of a stream of offsets whose length nobody knows beforehand.

    Algorithm R (Vitter, "Random Sampling with a Reservoir", 1985): every offset offered so far is in the sample with
    the same chance.
    """

    def __init__(self, size: int, draws: Draws) -> None:
        if size < 1:
            raise ValueError("a sample has at least one row")
        self._size = size
        self._draws = draws
        self._kept: list[int] = []
        self._seen = 0

    def offer(self, offset: int) -> None:
        """Tell of one more offset; each is to be offered once."""
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append(offset)
            return
        at = self._draws.randrange(self._seen)
        if at < self._size:
            self._kept[at] = offset

    @property
    def seen(self) -> int:
        """Offsets offered so far."""
        return self._seen

    @property
    def sample(self) -> tuple[int, ...]:
        """The sample as it stands, ascending."""
        return tuple(sorted(self._kept))


def _pieces(body: _Body) -> list[_Piece]:
    found: list[_Piece] = []
    _add(found, b"t", body.tools)
    _add(found, b"u", body.functions)
    _add(found, b"f", body.response_format)
    _add(found, b"f", body.output_format)
    for wrapped in (body.text, body.output_config):
        if _opens_with(wrapped, b"{"):
            _add(found, b"f", _decode_formatted(wrapped).format)
    if _opens_with(body.prompt, b"{"):  # a stored prompt of the responses endpoint; its variables are the user's words
        stored = _decode_stored(body.prompt)
        _add(found, b"i", stored.id)
        _add(found, b"v", stored.version)
    for config in (body.generationConfig, body.generation_config):
        if _opens_with(config, b"{"):
            read = _decode_config(config)
            for name, tag in _CONFIG_TAGS:
                _add(found, tag, getattr(read, name))
    _add(found, b"c", body.cachedContent)
    _add(found, b"c", body.cached_content)
    _add(found, b"y", body.system)
    _add(found, b"g", body.systemInstruction)
    _add(found, b"g", body.system_instruction)
    _add(found, b"n", body.instructions)
    items = body.messages or ()
    if not items and _opens_with(body.input, b"["):
        try:
            items = _decode_items(body.input)
        except ValueError:
            items = ()  # texts or token numbers of an embeddings request
    for item in items:
        if not isinstance(item.role, str) or item.role not in _LEADING:
            break
        _add(found, b"d" if item.role == "developer" else b"m", item.content)
    return found


def _add(found: list[_Piece], tag: bytes, raw: msgspec.Raw) -> None:
    view = memoryview(raw)
    if len(view) > 4 or bytes(view) not in _NOTHING:
        found.append((tag, raw))


def _opens_with(raw: msgspec.Raw, bracket: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == bracket


def _combine(kind: bytes, pieces: list[_Piece], model: str) -> str:
    parts = [kind]
    for tag, raw in pieces:
        parts += (tag, _digest(memoryview(raw)))
    parts += (b"=", model.encode("utf-8", "surrogatepass"))
    return blake2b(b"".join(parts), digest_size=8).hexdigest()


def _digest(text: memoryview) -> bytes:
    """Of the canonical form; thousands of rows share one text, so it is only worked out once for the same bytes."""
    as_written = blake2b(text, digest_size=16).digest()
    found = _known.get(as_written)
    if found is None:
        try:
            canonical = orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)
        except (ValueError, TypeError):  # half a surrogate pair, or nested too deep for the library
            canonical = bytes(text)
        found = blake2b(canonical, digest_size=16).digest()
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[as_written] = found
    return found


def _least_tokens(body: _Body) -> int:
    name = body.model if isinstance(body.model, str) else ""
    if memoryview(body.contents):
        return next((least for part, least in GEMINI_CACHE_TOKENS_BY_MODEL if part in name), GEMINI_CACHE_TOKENS)
    if "claude" not in name and not memoryview(body.system):
        return OPENAI_CACHE_TOKENS
    return next((least for part, least in ANTHROPIC_CACHE_TOKENS_BY_MODEL if part in name), ANTHROPIC_CACHE_TOKENS)
