"""A cache marker for requests in the shape of Anthropic's Messages, where the caller has set none.

A marked prefix (tools, then system) is kept for five minutes or an hour and read back at a tenth of its price; rows of
a batch run in any order over hours, so the hour is the length that helps. Writing for an hour costs twice the price of
plain input and reading a tenth, so marking pays from the third row on where every later row finds the prefix; rows that
run at the same time do not. Source: Anthropic's pages on prompt caching and on message batches.

How it is to be called: on the body of an accepted request, by whoever renders the row for an Anthropic account (in a
batch line and in the sync lane alike, so that both ask for the same), and only for rows whose ``shapes.prefix`` is not
None and is known to be shared by many: a prefix below the provider's minimum is never cached, and one that nobody
reads back costs double. ``shapes.fingerprint`` is taken of the body before, since the marker is no instruction.
"""

from __future__ import annotations

from typing import Literal

import msgspec

CacheTtl = Literal["5m", "1h"]

_NO_RAW = msgspec.Raw()
_NOTHING = frozenset({b"", b"null"})
_Members = dict[str, msgspec.Raw]


class _Block(msgspec.Struct, gc=False):
    """A content block, tool or system block; ``content`` and ``source`` may hold further blocks."""

    cache_control: msgspec.Raw = _NO_RAW
    content: msgspec.Raw = _NO_RAW
    source: msgspec.Raw = _NO_RAW


_decode_members = msgspec.json.Decoder(_Members).decode
_decode_blocks = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_block = msgspec.json.Decoder(_Block).decode
_decode_text = msgspec.json.Decoder(str).decode


def add_cache_marker(params: bytes, ttl: CacheTtl = "1h") -> bytes:
    """Mark the end of the system prompt as worth caching; every other token stays as it was.

    Args:
        params: the body of a Messages request, JSON.
        ttl: how long the provider keeps what is marked.

    Returns:
        ``params`` itself where the caller has marked anything, where there is no system text to mark, and where the
        shape is not the documented one. So it sets one mark or none: the provider takes four at most, and marking
        twice is marking once.
    """
    try:
        members = _decode_members(params)
        if any(_is_marked(name, members) for name in ("cache_control", "system", "tools", "messages")):
            return params
        system = _mark_last(bytes(members.get("system", _NO_RAW)), ttl)
    except (ValueError, RecursionError):
        return params
    if system is None:
        return params
    members["system"] = msgspec.Raw(system)
    return msgspec.json.encode(members)


def _is_marked(name: str, members: _Members) -> bool:
    raw = members.get(name, _NO_RAW)
    if name == "cache_control":  # at the top level it asks the provider to choose the place
        return bytes(raw) not in _NOTHING
    return _holds_marker(raw)


def _holds_marker(raw: msgspec.Raw) -> bool:
    """Whether any block says ``cache_control``. Arguments of tools and schemas may use the word for anything."""
    text = bytes(raw)
    if text[:1] == b"[":
        return any(_holds_marker(block) for block in _decode_blocks(text))
    if text[:1] != b"{":
        return False
    block = _decode_block(text)
    return bytes(block.cache_control) not in _NOTHING or _holds_marker(block.content) or _holds_marker(block.source)


def _mark_last(system: bytes, ttl: CacheTtl) -> bytes | None:
    marker = msgspec.Raw(msgspec.json.encode({"type": "ephemeral", "ttl": ttl}))
    if system[:1] == b'"':
        if not _decode_text(system).strip():
            return None
        return msgspec.json.encode(
            [{"type": msgspec.Raw(b'"text"'), "text": msgspec.Raw(system), "cache_control": marker}]
        )
    if system[:1] != b"[":
        return None
    blocks = _decode_blocks(system)
    if not blocks:
        return None
    last = _decode_members(blocks[-1])
    if not _decode_text(last.get("text", msgspec.Raw(b'""'))).strip():
        return None  # the provider refuses a marker on an empty block
    last["cache_control"] = marker
    blocks[-1] = msgspec.Raw(msgspec.json.encode(last))
    return msgspec.json.encode(blocks)
