"""Cutting a request that is too long into parts that are requests of their own.

A *splitter* knows how to cut a body. One is built in (``plain_text``); others come from installed packages, by an
entry point of the group ``batchferry.splitters`` that names a ``Splitter`` (or a class whose instances are ones)::

    [project.entry-points."batchferry.splitters"]
    contracts = "our_package.splitting:ContractSplitter"

Putting the answers of the parts together is the consumer's: only it knows what the question was. Each part says whose
part it is in its ``custom_id`` and headers, and every outcome carries these headers on.

Loading is the one place in this room that looks outside (at the metadata of installed packages); it is meant for
start-up. Cutting itself is pure.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from batchferry.domain.plugins import load_plugin
from batchferry.domain.requests import DEFAULT_RULES, BadRecord, Request, RequestRules, estimate_tokens, parse_request

Headers = tuple[tuple[str, bytes | None], ...]

GROUP = "batchferry.splitters"
MAX_PARTS = 100
"""Each part pays again for everything that is not cut, so a request that needs more parts than this is not cut."""
MIN_ROOM_SHARE = 0.1
"""At least this share of a part must be the text that is cut; the rest is what every part repeats."""

PARENT = "parent"
"""``<topic>-<partition>@<offset>`` of the record that was cut."""
PARENT_ID = "parent-id"
"""Its ``custom_id``."""
PART = "part"
"""Number of the part, from 1."""
PARTS = "parts"
"""How many parts there are."""
SPLIT_DEPTH = "split-depth"
"""1 for the parts of a request, 2 for the parts of a part."""
DEADLINE = "deadline"
"""The parent's deadline, an ISO 8601 instant."""

_REPLACED = frozenset({PARENT, PARENT_ID, PART, PARTS, SPLIT_DEPTH, DEADLINE, "sla"})
"""``sla`` would count from the part's own timestamp, and a record may not have both."""


@runtime_checkable
class Splitter(Protocol):
    """Knows how to cut requests of some kind."""

    def split(self, body: bytes, endpoint: str, max_tokens: int) -> Sequence[bytes] | None:
        """Two or more bodies that together ask what ``body`` asks; None when it cannot be cut so.

        Called in the event loop's thread: it must not wait for anything, and gives the same parts every time.

        Args:
            body: the request body, one JSON object. Payload: never to be logged.
            endpoint: path of its endpoint, such as ``/v1/chat/completions``.
            max_tokens: estimated input tokens (``estimate_tokens``) that each part may have.
        """
        ...


class NotSplit(StrEnum):
    """Why a request was not cut."""

    NOT_CUTTABLE = "not_cuttable"
    """The splitter does not cut requests of this kind, or not so small."""
    SPLIT_DEPTH = "split_depth"
    """It is a part already, cut as often as the route allows."""
    CUSTOM_ID_TOO_LONG = "custom_id_too_long"
    """With ``#part<k>`` its ``custom_id`` would be longer than a record's may be."""
    TOO_MANY_PARTS = "too_many_parts"
    """The splitter gave more parts than ``MAX_PARTS``."""
    SPLITTER_FAILED = "splitter_failed"
    """The splitter raised, or gave something that is no list of bodies."""
    UNLAWFUL_PART = "unlawful_part"
    """A part would be refused as an input record: too many headers, or a body that is no request."""


@dataclass(frozen=True, slots=True)
class Part:
    """One new input record. ``value`` is payload."""

    custom_id: str
    value: bytes = field(repr=False)
    headers: Headers


def load_splitter(name: str) -> Splitter:
    """The splitter of this name: built in, or from an installed package.

    Raises:
        ConfigError: nobody offers it, two packages do, or what is offered cannot be used.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found: Splitter = load_plugin("splitter", GROUP, name, _BUILT_IN, Splitter, "split(body, endpoint, max_tokens)")
    return found


def make_parts(
    request: Request,
    *,
    source: str,
    deadline: datetime,
    splitter: Splitter,
    max_tokens: int,
    max_depth: int,
    rules: RequestRules = DEFAULT_RULES,
) -> tuple[Part, ...] | NotSplit:
    """The records that take the place of a request that is too long, or why there are none.

    Args:
        request: the request that is too long, as it was accepted.
        source: where its record stands, see ``source_of``.
        deadline: when its answer is due, aware UTC; the parts' answers are due then too.
        splitter: what cuts the body.
        max_tokens: estimated input tokens that a part may have.
        max_depth: how often a request and its parts may be cut.
        rules: what the parts will be held against when they are read.
    """
    depth = depth_of(request.passed_headers) + 1
    if depth > max_depth:
        return NotSplit.SPLIT_DEPTH
    try:
        found = splitter.split(request.body, request.url, max_tokens)
        bodies = None if found is None else [bytes(memoryview(body)) for body in found]
    except Exception:  # noqa: BLE001 - foreign code: one request it cannot cut must not stop the others
        return NotSplit.SPLITTER_FAILED
    if bodies is None or len(bodies) < 2:
        return NotSplit.NOT_CUTTABLE
    if len(bodies) > MAX_PARTS:
        return NotSplit.TOO_MANY_PARTS
    routed = request.passed_headers + _routing(request)
    parts: list[Part] = []
    for number, body in enumerate(bodies, 1):
        custom_id = part_custom_id(request.custom_id, number, rules.max_custom_id_chars)
        if custom_id is None:
            return NotSplit.CUSTOM_ID_TOO_LONG
        headers = part_headers(routed, source, request.custom_id, number, len(bodies), depth, deadline)
        try:
            value = msgspec.json.encode({"custom_id": custom_id, "url": request.url, "body": msgspec.Raw(body)})
        except ValueError:  # half a surrogate pair in the custom_id
            return NotSplit.UNLAWFUL_PART
        if isinstance(parse_request(value, headers, rules), BadRecord):
            return NotSplit.UNLAWFUL_PART
        parts.append(Part(custom_id, value, headers))
    return tuple(parts)


def source_of(topic: str, partition: int, offset: int) -> str:
    """Where a record stands, for the header ``parent``."""
    return f"{topic}-{partition}@{offset}"


def part_custom_id(custom_id: str, number: int, max_chars: int = DEFAULT_RULES.max_custom_id_chars) -> str | None:
    """``<custom_id>#part<k>``; None (``NotSplit.CUSTOM_ID_TOO_LONG``) when that is longer than a custom_id may be.

    It is not shortened: two requests could then have the same parts. It never reaches a provider, of whom some take
    no ``#``: there the wire id stands in its place.
    """
    named = f"{custom_id}#part{number}"
    return named if len(named) <= max_chars else None


def part_headers(
    headers: Sequence[tuple[str, bytes | None]],
    source: str,
    parent_id: str,
    part: int,
    parts: int,
    depth: int,
    deadline: datetime,
) -> Headers:
    """The headers of a part: the parent's (``traceparent`` and CloudEvents ones too), and what makes it a part.

    Args:
        headers: those of the parent's record that are to be carried on.
        source: where the parent stands, see ``source_of``.
        parent_id: the parent's ``custom_id``.
        part: number of this part, from 1.
        parts: how many there are.
        depth: 1 for the parts of a request that is no part itself.
        deadline: the parent's, aware.
    """
    due = deadline.astimezone(UTC).isoformat().replace("+00:00", "Z")
    ours = {
        PARENT: source,
        PARENT_ID: parent_id,
        PART: str(part),
        PARTS: str(parts),
        SPLIT_DEPTH: str(depth),
        DEADLINE: due,
    }
    carried = [(name, value) for name, value in headers if name.lower() not in _REPLACED]
    return (*carried, *((name, text.encode("utf-8", "surrogatepass")) for name, text in ours.items()))


def depth_of(headers: Sequence[tuple[str, bytes | None]]) -> int:
    """How often the request was cut already; 0 when the header is absent or no count. The last one counts."""
    depth = 0
    for name, value in headers:
        if name.lower() == SPLIT_DEPTH:
            text = value or b""
            depth = int(text) if _COUNT.fullmatch(text) else 0
    return depth


_COUNT = re.compile(rb"[0-9]{1,9}")


def _routing(request: Request) -> Headers:
    """The headers that were read from the parent's record and decide where its parts go."""
    found: list[tuple[str, bytes | None]] = []
    if request.account is not None:
        found.append(("provider", request.account.encode()))
    if request.slice:
        found.append(("slice", request.slice.encode()))
    if request.priority_now:
        found.append(("priority", b"now"))
    return tuple(found)


# -------------------------------------------------------------------------------------- the built-in splitter

_Members = dict[str, msgspec.Raw]
_decode_members = msgspec.json.Decoder(_Members).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_NO_RAW = msgspec.Raw()
_NOTHING = frozenset({b"", b"null"})

_NOT_PLAIN = ("tool_calls", "function_call", "tool_call_id", "audio")
"""Members of a message that a text cut elsewhere would contradict."""
_STATEFUL = ("previous_response_id", "conversation", "container", "cachedContent", "cached_content")
"""What they stand for is kept at the provider: its length is not known, and the parts would get into each other."""
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_GEMINI_ROLES = frozenset({"user", "model"})
_BLOCK_MEMBERS = frozenset({"type", "text"})


class PlainTextSplitter:
    """Cuts the last user message where all messages are plain text; everything else stays in every part.

    Chat completions, Anthropic's messages (with a text or one block of text each), responses whose ``input`` is a text
    or a list of plain messages, and Gemini's contents with one part of text each. The text is cut behind a paragraph,
    else behind a sentence or line, else between words, else between characters; the texts of the parts one after
    another are the text. Not cut: messages with images, files or several pieces of content, conversations with tool
    calls, state kept at the provider, and whatever fits already.
    """

    def split(self, body: bytes, endpoint: str, max_tokens: int) -> Sequence[bytes] | None:
        """See ``Splitter``."""
        try:
            return _split(body, endpoint, max_tokens)
        except (ValueError, RecursionError):  # not the shape this endpoint documents
            return None


plain_text = PlainTextSplitter()
_BUILT_IN: Mapping[str, Splitter] = {"plain_text": plain_text}
"""Found without metadata too, so that running from a source tree works."""


_Path = tuple[str | int, ...]
"""Names of members and places in arrays, from the outside in."""


class _Frame:
    """A body with a place for a text in it."""

    def __init__(self, body: bytes, path: _Path) -> None:
        self._body = body
        self._path = path

    @property
    def text(self) -> str:
        """The text that stands there."""
        found = self._body
        for step in self._path:
            found = bytes(_inside(found, step)[1])
        return _decode_text(found)

    def with_text(self, text: str) -> bytes:
        """The body with another text."""
        return _with_inner(self._body, self._path, msgspec.json.encode(text))


def _inside(outer: bytes, step: str | int) -> tuple[_Members | list[msgspec.Raw], msgspec.Raw]:
    """An object or array taken apart, and what stands at one place in it."""
    if isinstance(step, str):
        members = _decode_members(outer)
        return members, members[step]
    items = _decode_list(outer)
    return items, items[step]


def _with_inner(outer: bytes, path: _Path, inner: bytes) -> bytes:
    if not path:
        return inner
    held, before = _inside(outer, path[0])
    held[path[0]] = msgspec.Raw(_with_inner(bytes(before), path[1:], inner))  # type: ignore[index]  # as ``_inside`` says
    return msgspec.json.encode(held)


def _split(body: bytes, endpoint: str, max_tokens: int) -> list[bytes] | None:
    frame = _frame(body, endpoint)
    if frame is None:
        return None
    room_tokens = max_tokens - estimate_tokens(frame.with_text(""))
    if room_tokens < max(1, max_tokens * MIN_ROOM_SHARE):
        return None
    texts = _cut(frame.text, room_tokens * 4)
    return None if texts is None or len(texts) < 2 else [frame.with_text(text) for text in texts]


def _frame(body: bytes, endpoint: str) -> _Frame | None:
    members = _decode_members(body)
    if any(bytes(members.get(member, _NO_RAW)) not in _NOTHING for member in _STATEFUL):
        return None
    if endpoint.endswith(":generateContent"):
        path = _in_contents(bytes(members.get("contents", _NO_RAW)))
    elif endpoint.endswith(("/chat/completions", "/messages")):
        path = _in_messages(members, "messages", with_blocks=endpoint.endswith("/messages"))
    elif endpoint.endswith("/responses"):
        is_text = bytes(members.get("input", _NO_RAW))[:1] == b'"'
        path = ("input",) if is_text else _in_messages(members, "input", with_blocks=False)
    else:
        return None
    return None if path is None else _Frame(body, path)


def _in_messages(members: _Members, name: str, *, with_blocks: bool) -> _Path | None:
    """Where the text of the last user message stands; None unless all messages are plain text."""
    found: _Path | None = None
    for at, item in enumerate(_decode_list(members.get(name, _NO_RAW))):
        message = _decode_members(item)
        role = _decode_text(message.get("role", _NO_RAW))
        kind = bytes(message.get("type", _NO_RAW))
        content = bytes(message.get("content", _NO_RAW))
        inner: _Path | None = () if content[:1] == b'"' else _in_one_block(content) if with_blocks else None
        if (
            role not in _ROLES
            or kind not in {b"", b'"message"'}
            or inner is None
            or any(bytes(message.get(member, _NO_RAW)) not in _NOTHING for member in _NOT_PLAIN)
        ):
            return None
        if role == "user":
            found = (name, at, "content", *inner)
    return found


def _in_one_block(content: bytes) -> _Path | None:
    """Where the text of the only block stands; None for several blocks, or one that is more than text."""
    blocks = _decode_list(content)
    if len(blocks) != 1:
        return None
    block = _decode_members(blocks[0])
    said = {member for member, raw in block.items() if bytes(raw) not in _NOTHING}
    if said != _BLOCK_MEMBERS or bytes(block["type"]) != b'"text"' or bytes(block["text"])[:1] != b'"':
        return None
    return (0, "text")


def _in_contents(contents: bytes) -> _Path | None:
    """As ``_in_messages``, for Gemini's contents; an array of one may stand there without its brackets."""
    places: list[tuple[_Path, bytes | msgspec.Raw]] = [(("contents",), contents)]
    if contents[:1] == b"[":
        places = [(("contents", at), item) for at, item in enumerate(_decode_list(contents))]
    found: _Path | None = None
    for place, item in places:
        content = _decode_members(item)
        role = _decode_text(content.get("role", _USER))
        parts = bytes(content.get("parts", _NO_RAW))
        inner: _Path = ("parts",)
        if parts[:1] == b"[":
            items = _decode_list(parts)
            if len(items) != 1:
                return None
            parts, inner = bytes(items[0]), ("parts", 0)
        part = _decode_members(parts)
        said = {member for member, raw in part.items() if bytes(raw) not in _NOTHING}
        if role not in _GEMINI_ROLES or said != {"text"} or bytes(part["text"])[:1] != b'"':
            return None
        if role == "user":
            found = (*place, *inner, "text")
    return found


_USER = msgspec.Raw(b'"user"')


# ------------------------------------------------------------------------------------------ where a text is cut

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*|\u2029\s*")
_CLOSERS = r"[\"'\u201d\u2019\u00bb\u300d\u300f\uff09\u3011\u300b)\]]{0,3}"
_SENTENCE = re.compile(
    # Marks that need a space behind them (3.14 is no end),
    rf"[.!?\u2026]{_CLOSERS}\s+"
    # those of Chinese and Japanese, Hindi, Arabic and Urdu, Burmese and Amharic, which do not,
    rf"|[\u3002\uff01\uff1f\uff61\uff0e\uff1b\u0964\u0965\u061f\u06d4\u104b\u1362]{_CLOSERS}\s*"
    # and line ends.
    r"|[\n\u2028]\s*"
)
_WORD = re.compile(r"\s+")
_MARKS = (_PARAGRAPH, _SENTENCE, _WORD)

_MAX_BACK_CHARS = 64
"""A character drawn from more code points than this is cut all the same."""
_JOINER = "\u200d"


def _units(text: str) -> int:
    """What the text adds to four times a body's estimated tokens, as ``estimate_tokens`` counts."""
    written = msgspec.json.encode(text)
    return 2 * len(written) - len(written.decode()) - 2


def _cut(text: str, room_units: int) -> list[str] | None:
    pieces: list[str] = []
    start = 0
    while start < len(text):
        if len(pieces) == MAX_PARTS:
            return None
        end = start + _fitting_chars(text[start : start + room_units], room_units)
        if end < len(text):
            end = _good_place(text, start, end)
        if end == start:
            return None  # not even one character fits
        pieces.append(text[start:end])
        start = end
    return pieces


def _fitting_chars(window: str, room_units: int) -> int:
    """How many characters fit; each costs a unit at least, so a window of ``room_units`` characters is enough."""
    if _units(window) <= room_units:
        return len(window)
    fits, too_many = 0, len(window)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _units(window[:middle]) <= room_units:
            fits = middle
        else:
            too_many = middle
    return fits


def _good_place(text: str, start: int, end: int) -> int:
    """The best place for a cut at or before ``end``, in the second half of the room so that parts are not tiny."""
    half = start + (end - start) // 2
    for mark in _MARKS:
        place = None
        for match in mark.finditer(text, half, end):
            place = match.end()
        if place is not None and place > start and not _is_joined(text, place):
            return place
    for place in range(end, max(start, end - _MAX_BACK_CHARS), -1):
        if not _is_joined(text, place):
            return place
    return end


def _is_joined(text: str, at: int) -> bool:
    """Whether the code points on both sides of a place are obviously drawn as one character.

    Not the whole of Unicode's rules for grapheme clusters (UAX 29): combining marks, variation selectors, emoji with
    joiners, skin tones or tags, flags, Korean letters written in pieces, and a line end of two characters.
    """
    before, after = text[at - 1], text[at]
    if before == "\r" and after == "\n":
        return True
    if unicodedata.category(after) in {"Mn", "Mc", "Me"} or _JOINER in {before, after}:
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f":
        return True
    if _is_flag_letter(before) and _is_flag_letter(after):
        first = at - 1
        while first > 0 and _is_flag_letter(text[first - 1]):
            first -= 1
        return (at - first) % 2 == 1
    if "\u1100" <= before <= "\u115f":
        return "\u1100" <= after <= "\u11a7" or "\uac00" <= after <= "\ud7a3"
    # A vowel or a finished syllable, then a further vowel or a final consonant.
    return "\u1160" <= after <= "\u11ff" and ("\u1160" <= before <= "\u11ff" or "\uac00" <= before <= "\ud7a3")


def _is_flag_letter(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"
