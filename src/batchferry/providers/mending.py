r"""Text that is not quite JSON, and members that are not quite what they should be: read all the same.

Nothing that carries meaning is lost or re-rendered: numbers, keys, order and valid strings stay as they were. What is
changed is exactly what JSON does not allow: bytes that are no UTF-8 become U+FFFD, raw control characters inside
strings become their ``\u00XX`` escape, ``NaN`` and ``Infinity`` become ``null``, a byte order mark and NUL padding
around the text are dropped. An escaped half of a surrogate pair is allowed by the JSON grammar (though many parsers
refuse it) and stays.
"""

from __future__ import annotations

import re
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Raw, Struct

from batchferry.domain.ids import parse_wire_id

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-?\b(?:NaN|Infinity)\b', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_NO_NUMBER = ("NaN", "Infinity")
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|u[dD][c-fC-F][0-9a-fA-F]{2}|.)", re.DOTALL
)
_HALF_PAIR_CHARS = 6
_any_json = msgspec.json.Decoder(Raw)


def _mend_token(match: re.Match[str]) -> str:
    token = match.group()
    if token[0] != '"':
        return "null"
    return _CONTROL.sub(lambda control: f"\\u{ord(control.group()):04x}", token)


def _hide_half_pair(match: re.Match[str]) -> str:
    """The escape of half a surrogate pair becomes that of U+FFFD, which is as long."""
    escape = match.group()
    return r"\ufffd" if len(escape) == _HALF_PAIR_CHARS else escape


def whole_json(body: bytes) -> tuple[bytes, bytes] | None:
    """A whole answer: as it came but for blanks around it, or mended, and as the strict decoder takes it.

    Two empty texts where it says nothing; None where it says something that is no JSON.
    """
    stripped = body.strip(b" \t\r\n")
    try:
        if not body.isascii():
            body.decode()
        if stripped:
            _any_json.decode(stripped)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        mended, readable = mend(body)
        try:
            _any_json.decode(readable)
        except (msgspec.DecodeError, RecursionError):
            return None if readable else (b"", b"")
        return mended, readable
    return stripped, stripped


def mend(raw: bytes) -> tuple[bytes, bytes]:
    """The text with what JSON does not allow mended, and the same as the strict decoder takes it: equally long."""
    text = raw.decode(errors="replace").strip("\ufeff\x00 \t\r\n")
    if _CONTROL.search(text) or any(word in text for word in _NO_NUMBER):
        text = _TOKEN.sub(_mend_token, text)
    mended = text.encode()
    return mended, _ESCAPE.sub(_hide_half_pair, text).encode() if _HALF_PAIR.search(text) else mended


@lru_cache(maxsize=8)
def _id_member(member: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%s"\s*:\s*"([^"\\\x00-\x1f]{1,128})"' % re.escape(member).encode())


def visible_id(line: bytes, member: str = "custom_id") -> str | None:
    """The id in a line that cannot be read: the first of this member that is one of ours, else the first at all."""
    found = [match.decode(errors="replace") for match in _id_member(member).findall(line)]
    return next((text for text in found if parse_wire_id(text) is not None), found[0] if found else None)


_S = TypeVar("_S", bound=Struct)


@lru_cache(maxsize=64)
def _members_of(kind: type[Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Attributes of a struct, their names in JSON, and the types they have when they are there."""
    found: list[tuple[str, str, Any]] = []
    for member in msgspec.structs.fields(kind):
        options = get_args(member.type) if get_origin(member.type) is UnionType else (member.type,)
        wanted = next(option for option in options if option is not NoneType)
        found.append((member.name, member.encode_name, wanted))
    return tuple(found)


def loosely(kind: type[_S], value: Any) -> _S:
    """Build ``kind`` from whatever fits: a member of the wrong type counts as absent, numbers may be texts."""
    members: dict[str, Any] = {}
    for name, wire_name, wanted in _members_of(kind) if isinstance(value, dict) else ():
        given = value.get(wire_name)
        if given is None:
            continue
        if wanted is Raw:
            members[name] = Raw(msgspec.json.encode(given))
        elif get_origin(wanted) is dict:
            if isinstance(given, dict):
                members[name] = {str(key): Raw(msgspec.json.encode(each)) for key, each in given.items()}
        elif get_origin(wanted) is list:
            if isinstance(given, list):
                (inner,) = get_args(wanted)
                members[name] = [
                    Raw(msgspec.json.encode(each)) if inner is Raw else loosely(inner, each) for each in given
                ]
        elif isinstance(wanted, type) and issubclass(wanted, Struct):
            members[name] = loosely(wanted, given)
        else:
            try:
                members[name] = msgspec.convert(given, wanted, strict=False)
            except msgspec.ValidationError:
                continue
    return kind(**members)
