"""Masking personal data in a request before anything of it is written to disk or sent.

A *masker* changes a body. One is built in (``stock``, on the rules of ``personaldata``); others come from installed
packages, by an entry point of the group ``batchferry.maskers`` that names a ``Masker`` (or a class whose instances are
ones)::

    [project.entry-points."batchferry.maskers"]
    clinic = "our_package.masking:ClinicMasker"

A masker must be deterministic, as a row that travels again is read again from the input topic, and idempotent. What it
raises, or gives that is no request of the same model, is a ``MaskFault``: such a request is to be refused, never sent
as it was.

Loading is the one place here that looks outside (at the metadata of installed packages); it is meant for start-up.
Masking itself is pure.
"""

from __future__ import annotations

import hmac
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from batchferry.domain.errors import ConfigError
from batchferry.domain.personaldata import DEFAULT_RULES, Found, Rule, find
from batchferry.domain.plugins import load_plugin

GROUP = "batchferry.maskers"
STOCK = "stock"
UNCOUNTED = "other"
"""Under this name one is counted for a body that a masker changed without saying how often."""
MIN_KEY_BYTES = 16
"""A shorter key could be guessed, and with it every number of ten digits be tried."""
MAX_ROUNDS = 3
"""A large request is looked through so often, since what was masked may uncover more. Prose needs two; only numbers
that are strung together without anything between them need one for each: the time would grow with their square."""
MAX_AGAIN_CHARS = 200_000
"""Further rounds are made while all of them together look at no more than this: some two seconds of work."""
HASH_CHARS = 12
"""Of a keyed placeholder: 48 bits, so that among a million people two share one with a chance of 1 in 500."""


@runtime_checkable
class Masker(Protocol):
    """Takes personal data out of requests."""

    def mask(self, body: bytes, endpoint: str) -> bytes | None:
        """The body to go on with, one JSON object on one line; None when there is nothing to mask.

        Called in the event loop's thread: it must not wait for anything, and gives the same every time.

        Args:
            body: the request body, one JSON object. Payload: never to be logged.
            endpoint: path of its endpoint, such as ``/v1/chat/completions``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Masked:
    """A body in which something was masked. ``body`` is payload; ``counts`` (places by rule) is not."""

    body: bytes = field(repr=False)
    counts: Mapping[str, int]


@runtime_checkable
class CountingMasker(Masker, Protocol):
    """A masker that also tells how often each of its rules was used."""

    def mask_counted(self, body: bytes, endpoint: str) -> Masked | None:
        """As ``mask``, with places by rule; names of rules are short, fixed words, never payload."""
        ...


class MaskFault(StrEnum):
    """Why a request could not be masked; it must not be sent."""

    MASKER_FAILED = "masker_failed"
    """The masker raised, or gave something that is no bytes."""
    UNLAWFUL_BODY = "unlawful_body"
    """What it gave is not one JSON object on one line in UTF-8."""
    TOO_TANGLED = "too_tangled"
    """Numbers so strung together that masking one uncovers the next, again and again."""
    OTHER_REQUEST = "other_request"
    """What it gave asks for another model, or for a stream."""


def load_masker(name: str, *, rules: frozenset[Rule] | None = None, hash_key: bytes | None = None) -> Masker:
    """The masker of this name: built in, or from an installed package.

    Args:
        name: ``stock``, or the name of an entry point.
        rules: what ``stock`` looks for; None: ``DEFAULT_RULES``.
        hash_key: see ``StockMasker``.

    Raises:
        ConfigError: nobody offers it, two packages do, what is offered cannot be used, or rules or a key are given
            that it does not take.
    """
    if name == STOCK:
        if hash_key is not None and len(hash_key) < MIN_KEY_BYTES:
            raise ConfigError([f"the key of masker {STOCK!r} is too short: use {MIN_KEY_BYTES} random bytes or more"])
        return StockMasker(DEFAULT_RULES if rules is None else rules, hash_key)
    if rules is not None or hash_key is not None:
        raise ConfigError([f"rules and key are for masker {STOCK!r}, and {name!r} is named: leave them out"])
    found: Masker = load_plugin("masker", GROUP, name, {STOCK}, Masker, "mask(body, endpoint)")
    return found


class _TooTangled(ValueError):
    """``MAX_ROUNDS`` were not enough, and the request is too large for more."""


class _Request(msgspec.Struct, gc=False):
    model: Any = None
    stream: Any = None


_read_request = msgspec.json.Decoder(_Request).decode


def mask_body(masker: Masker, body: bytes, endpoint: str) -> Masked | MaskFault | None:
    """Have a body masked, and check what comes back; None when nothing was to be masked. Never raises for a body.

    A masked body may be longer than it was: limits on a line's length are to be looked at again.

    Args:
        masker: what ``load_masker`` gave.
        body: the body of an accepted request, payload.
        endpoint: its endpoint.
    """
    try:
        if isinstance(masker, CountingMasker):
            masked = masker.mask_counted(body, endpoint)
        else:
            found = masker.mask(body, endpoint)
            masked = None if found is None else Masked(bytes(memoryview(found)), {UNCOUNTED: 1})
        if masked is None or masked.body == body:
            return None
    except _TooTangled:
        return MaskFault.TOO_TANGLED
    except Exception:  # noqa: BLE001 - foreign code: one request it cannot mask must not stop the others
        return MaskFault.MASKER_FAILED
    if type(masker) is StockMasker:
        return masked
    try:
        masked.body.decode()
        before, after = _read_request(body), _read_request(masked.body)
    except (ValueError, RecursionError):
        return MaskFault.UNLAWFUL_BODY
    if b"\n" in masked.body or b"\r" in masked.body:
        return MaskFault.UNLAWFUL_BODY
    return masked if before == after else MaskFault.OTHER_REQUEST


# ----------------------------------------------------------------------------------------- the built-in masker


class StockMasker:
    """Puts placeholders for what ``personaldata`` finds in the texts of a prompt; every other byte stays as it was.

    Looked at are the texts of messages, contents, input, prompt, system and instructions: text blocks, documents given
    as text, tool calls' arguments and tool results (inside their string values). Not looked at: names of models, tools
    and people, ids, tool definitions and schemas, metadata, URLs, base64 data, numbers outside strings, and reasoning
    that a provider has signed.

    A placeholder is ``<email-1>``: within a request the same value has the same number, and numbers that stand in the
    prompt already are not given again. With a key it is ``<email-k3f0c...>``, a keyed hash (HMAC-SHA256): the same
    value looks the same in every request, and without the key nobody can find the value by trying.

    Args:
        rules: what is looked for.
        hash_key: at least ``MIN_KEY_BYTES``; None: placeholders are numbered.
    """

    def __init__(self, rules: frozenset[Rule] = DEFAULT_RULES, hash_key: bytes | None = None) -> None:
        self._rules = rules
        self._hash_key = hash_key

    def __repr__(self) -> str:
        return f"StockMasker(rules={sorted(self._rules)}, is_keyed={self._hash_key is not None})"

    def mask(self, body: bytes, endpoint: str) -> bytes | None:
        """See ``Masker``."""
        masked = self.mask_counted(body, endpoint)
        return None if masked is None else masked.body

    def mask_counted(self, body: bytes, endpoint: str) -> Masked | None:  # noqa: ARG002 - members say enough
        """See ``CountingMasker``.

        Raises:
            ValueError: the body is no JSON, or needs too many rounds.
        """
        if Rule.IP not in self._rules and not _is_worth_a_walk(body):
            return None
        document = body.decode()
        names = _Names(self._hash_key)
        walk = _Walk(self._rules, names)
        rounds = looked_at_chars = 0
        while edits := walk.edits(document, _Mode.ROOT):
            document = _spliced(document, edits)
            if not walk.may_hold_more:
                break
            rounds += 1
            looked_at_chars += len(document)
            if rounds >= MAX_ROUNDS and looked_at_chars > MAX_AGAIN_CHARS:
                raise _TooTangled
        return Masked(document.encode(), dict(names.counts)) if names.counts else None


stock = StockMasker()

_NEAR_DIGITS = re.compile(rb"[0-9](?:[^0-9]{0,3}[0-9]){5}")


def _is_worth_a_walk(body: bytes) -> bool:
    """Whether there is an at sign or six digits near one another, or either may be hidden; never wrongly False."""
    return b"@" in body or b"\\" in body or not body.isascii() or _NEAR_DIGITS.search(body) is not None


# ------------------------------------------------------------------------------------------------ placeholders

_PLACEHOLDER = re.compile(rf"<(?P<rule>{'|'.join(Rule)})-(?:(?P<number>[0-9]{{1,7}})|k[0-9a-f]{{{HASH_CHARS}}})>")


class _Names:
    """Gives out placeholders for one request."""

    def __init__(self, hash_key: bytes | None) -> None:
        self._hash_key = hash_key
        self._given: dict[tuple[Rule, str], str] = {}
        self._last: Counter[str] = Counter()
        self._used: set[str] = set()
        self.counts: Counter[str] = Counter()

    def keep_off(self, placeholder: str) -> None:
        """Somebody's placeholder stands in the prompt: it means something else than ours would."""
        self._used.add(placeholder)

    def of(self, found: Found) -> str:
        """The placeholder of what was found; counts it."""
        self.counts[found.rule.value] += 1
        key = (found.rule, found.value)
        placeholder = self._given.get(key)
        if placeholder is None:
            placeholder = self._given[key] = self._new(found)
        return placeholder

    def _new(self, found: Found) -> str:
        rule = found.rule.value
        if self._hash_key is not None:
            written = hmac.digest(self._hash_key, f"{rule}:{found.value}".encode(), "sha256").hex()
            return f"<{rule}-k{written[:HASH_CHARS]}>"
        while True:
            self._last[rule] += 1
            placeholder = f"<{rule}-{self._last[rule]}>"
            if placeholder not in self._used:
                return placeholder


# ----------------------------------------------------------------------------------- walking through a request


class _Mode(IntEnum):
    """What the strings of a value are."""

    SKIP = 0
    ROOT = 1
    """The body itself."""
    CONTENT = 2
    """Texts, or blocks of which some members are texts."""
    ARGUMENTS = 3
    """A string of JSON, of which all string values are texts."""
    VALUES = 4
    """All string values are texts, at any depth."""
    VARIABLES = 5
    """Texts or blocks under names of the caller's."""
    SOURCE = 6
    """A document: its ``data`` is a text when its ``type`` says so, else base64."""


_ROOT: Mapping[str, _Mode] = dict.fromkeys(
    (
        "messages", "input", "prompt", "system", "instructions", "suffix", "prediction", "documents",
        "contents", "content", "systemInstruction", "system_instruction",
    ),
    _Mode.CONTENT,
)  # fmt: skip
_CONTENT: Mapping[str, _Mode] = {
    **dict.fromkeys(
        (
            "content", "text", "parts", "messages", "prompt", "refusal", "output", "summary", "title", "context",
            "citations", "cited_text", "reasoning_content", "tool_calls", "function", "custom", "function_call",
            "functionCall", "functionResponse", "function_response", "stdout", "stderr", "code", "logs", "outputs",
            "results", "executableCode", "executable_code", "codeExecutionResult", "code_execution_result",
        ),
        _Mode.CONTENT,
    ),
    **dict.fromkeys(("input", "args", "response"), _Mode.VALUES),
    "arguments": _Mode.ARGUMENTS,
    "variables": _Mode.VARIABLES,
    "source": _Mode.SOURCE,
}  # fmt: skip
_MEMBERS: Mapping[_Mode, Mapping[str, _Mode]] = {
    _Mode.SKIP: {},
    _Mode.ROOT: _ROOT,
    _Mode.CONTENT: _CONTENT,
    _Mode.SOURCE: {"content": _Mode.CONTENT},
}
"""Members of an object that stands where texts or blocks may stand, in the APIs of OpenAI, Anthropic, Gemini, Mistral
and those who copy them. A member that is not named is skipped."""
_TEXTS = frozenset({_Mode.CONTENT, _Mode.VALUES, _Mode.VARIABLES})

_TOKEN = re.compile(r'[{}\[\]]|"(?P<inner>[^"\\]*+(?:\\.[^"\\]*+)*+)"(?P<colon>\s*+:)?+', re.DOTALL)
_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


class _Frame:
    """An object or array that is open."""

    __slots__ = ("held", "is_object", "key", "kind", "mode")

    def __init__(self, mode: _Mode, is_object: bool) -> None:
        self.mode = mode
        self.is_object = is_object
        self.key = ""
        self.kind = ""
        self.held: list[tuple[int, str]] = []

    def mode_of_next(self) -> _Mode:
        """What the next value in it is."""
        if not self.is_object or self.mode is _Mode.VALUES:
            return self.mode
        if self.mode is _Mode.VARIABLES:
            return _Mode.CONTENT
        return _MEMBERS[self.mode].get(self.key, _Mode.SKIP)


class _Walk:
    """Goes through JSON and collects what is to be changed, in characters of the JSON."""

    def __init__(self, rules: frozenset[Rule], names: _Names) -> None:
        self._rules = rules
        self._names = names
        self._has_seen_placeholders = False
        self.may_hold_more = False
        """Whether a text, with its placeholders in, holds something that stood too close to something else before."""

    def edits(self, document: str, mode: _Mode) -> list[_Edit]:
        """What is to be changed, by place."""
        self.may_hold_more = False
        texts = list(_texts(document, mode))
        if not self._has_seen_placeholders:  # ours are not there yet
            self._has_seen_placeholders = True
            for _, _, inner in texts:
                for match in _PLACEHOLDER.finditer(_decoded(inner) if "<" in inner or "\\" in inner else ""):
                    self._names.keep_off(match.group())
        return self._edits(texts)

    def _edits(self, texts: Sequence[tuple[_Mode, int, str]]) -> list[_Edit]:
        edits: list[_Edit] = []
        for mode, start, inner in texts:
            text = _decoded(inner)
            found = self._in_arguments(text) if mode is _Mode.ARGUMENTS else None
            if found is None:
                found = self._in_text(text)
            if found:
                edits += (_Edit(start + one.start, start + one.end, one.text) for one in _raw_edits(inner, found))
        return edits

    def _in_arguments(self, text: str) -> list[_Edit] | None:
        """None when it is a text after all."""
        try:
            msgspec.json.decode(text, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return None
        return self._edits(sorted(_texts(text, _Mode.VALUES), key=lambda one: one[1]))

    def _in_text(self, text: str) -> list[_Edit]:
        taken = [match.span() for match in _PLACEHOLDER.finditer(text)] if "<" in text else []
        edits = [_Edit(one.start, one.end, self._names.of(one)) for one in find(text, self._rules, taken)]
        if edits and not self.may_hold_more:
            masked = _spliced(text, edits)
            self.may_hold_more = bool(
                find(masked, self._rules, [match.span() for match in _PLACEHOLDER.finditer(masked)])
            )
        return edits


def _texts(document: str, mode: _Mode) -> Iterator[tuple[_Mode, int, str]]:
    """(how to read it, where it begins, what stands between its quotes) of each text; documents may come late.

    Raises:
        ValueError: the document is no JSON.
    """
    stack: list[_Frame] = []
    for token in _TOKEN.finditer(document):
        sign = document[token.start()]
        if sign == '"':
            if not stack:
                raise ValueError("a request is an object")
            frame = stack[-1]
            if token["colon"] is not None:
                if frame.mode is not _Mode.SKIP:
                    frame.key = _decoded(token["inner"])
                continue
            if frame.mode is _Mode.SOURCE and frame.is_object and frame.key in {"data", "type"}:
                if frame.key == "type":
                    frame.kind = _decoded(token["inner"])
                else:
                    frame.held.append((token.start() + 1, token["inner"]))
                continue
            given = frame.mode_of_next()
            if given in _TEXTS or given is _Mode.ARGUMENTS:
                yield given, token.start() + 1, token["inner"]
        elif sign in "{[":
            given = stack[-1].mode_of_next() if stack else mode
            # Arguments may also be given as the object itself, not as a string of it.
            stack.append(_Frame(_Mode.VALUES if given is _Mode.ARGUMENTS else given, sign == "{"))
        else:
            if not stack:
                raise ValueError("a bracket closes nothing")
            frame = stack.pop()
            if frame.kind == "text":
                for start, inner in frame.held:
                    yield _Mode.CONTENT, start, inner
    if stack:
        raise ValueError("a bracket is not closed")


def _decoded(inner: str) -> str:
    """A string of JSON without its escapes.

    Raises:
        ValueError: it is none.
    """
    return inner if "\\" not in inner else msgspec.json.decode(f'"{inner}"', type=str)


def _raw_edits(inner: str, edits: Collection[_Edit]) -> Iterator[_Edit]:
    """The same edits in characters of the string as JSON writes it, what is put in escaped."""
    shift = 0
    escapes = _ESCAPE.finditer(inner) if "\\" in inner else iter(())
    ahead = next(escapes, None)
    for edit in sorted(edits):
        bounds = []
        for place in (edit.start, edit.end):
            while ahead is not None and ahead.start() - shift < place:
                shift += ahead.end() - ahead.start() - 1
                ahead = next(escapes, None)
            bounds.append(place + shift)
        yield _Edit(bounds[0], bounds[1], msgspec.json.encode(edit.text).decode()[1:-1])


def _spliced(text: str, edits: Collection[_Edit]) -> str:
    """The text with its edits made."""
    pieces: list[str] = []
    at = 0
    for edit in sorted(edits):
        pieces += (text[at : edit.start], edit.text)
        at = edit.end
    return "".join((*pieces, text[at:]))
