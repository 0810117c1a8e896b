"""Which parameters of a row a batch refuses: told before anything is sent.

The create call looks at the rows' ids only. A parameter that may not be in a batch is found hours later, as a row that
ends in an error. Sources: Anthropic's guide on batch processing, and its notes on API version 2026-10-21.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from batchferry.providers.anthropic.account import API_VERSION

FIRST_VERSION_WITHOUT_SAMPLING = "2026-10-21"
SAMPLING = ("temperature", "top_p", "top_k")
"""Refused from that version on."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "speed": "a batch has no speed to choose: remove it",
        "store": "nothing is stored in a batch: remove it",
        "previous_thread_event_id": "a row of a batch cannot continue a thread: remove it",
        "cache_hint": "a batch takes no cache hints: remove it, and use cache_control",
        "context_hint": "a batch takes no context hints: remove it",
    }
)
"""Refused whatever their value; null counts as absent."""
PREVIEW = "research_preview_2026_02"
_ASSISTANT_DOCUMENT = "an assistant's message may hold no document: move it into a message of the user"
_USER_CITATIONS = "a user's text may carry no citations: send the text alone"
_TELLTALES = (b"document", b"citations", b"\\u")
"""A body without any of these holds neither of the blocks that are looked for: most bodies are not read twice."""


_ABSENT = msgspec.Raw()
_NOTHING = frozenset({b"", b"null"})
_NO_CITATIONS = frozenset({b"", b"null", b"[]"})


class _Params(msgspec.Struct, gc=False):
    stream: Any = None
    max_tokens: Any = None
    speed: msgspec.Raw = _ABSENT
    store: msgspec.Raw = _ABSENT
    previous_thread_event_id: msgspec.Raw = _ABSENT
    cache_hint: msgspec.Raw = _ABSENT
    context_hint: msgspec.Raw = _ABSENT
    research_preview_2026_02: Any = None
    temperature: msgspec.Raw = _ABSENT
    top_p: msgspec.Raw = _ABSENT
    top_k: msgspec.Raw = _ABSENT


class _Block(msgspec.Struct, gc=False):
    type: Any = None
    citations: msgspec.Raw = _ABSENT


class _Message(msgspec.Struct, gc=False):
    role: Any = None
    content: msgspec.Raw = _ABSENT


class _Messages(msgspec.Struct, gc=False):
    messages: list[_Message] = []


_decode = msgspec.json.Decoder(_Params).decode
_decode_messages = msgspec.json.Decoder(_Messages).decode
_decode_blocks = msgspec.json.Decoder(list[_Block]).decode


def check_params(body: bytes, version: str = API_VERSION) -> tuple[str, str] | None:
    """The first parameter of a row that a batch of this API version refuses, and why with the remedy; None: none.

    Args:
        body: the row's parameters, a JSON object.
        version: the account's ``anthropic-version``.

    Raises:
        ValueError: not a JSON object.
    """
    try:
        params = _decode(body)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if params.stream not in (None, False):
        return "stream", "a batch cannot stream: remove it"
    most = params.max_tokens
    if most is None:
        return "max_tokens", "it is required: add the most tokens that the answer may have"
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        return "max_tokens", "a batch wants a whole number of 1 or more: write one"
    for member, why in REFUSED.items():
        if _is_there(getattr(params, member)):
            return member, why
    if params.research_preview_2026_02 == "active":
        return PREVIEW, "it may not be active in a batch: remove it"
    if version >= FIRST_VERSION_WITHOUT_SAMPLING:
        for member in SAMPLING:
            if _is_there(getattr(params, member)):
                return member, f"API version {version} does not take it: remove it, or set an older version"
        refusal = _refused_block(body)
        if refusal is not None:
            return "messages", f"API version {version}: {refusal}, or set an older version"
    return None


def _refused_block(body: bytes) -> str | None:
    """Why a message's block is refused from 2026-10-21 on; None also where the messages have another form.

    Only a message's own blocks are looked at: what a server tool has fetched stands deeper, as a document too, and has
    to be sent back as it came.
    """
    if not any(sign in body for sign in _TELLTALES):
        return None
    try:
        messages = _decode_messages(body).messages
        for message in messages:
            if bytes(message.content)[:1] != b"[" or message.role not in {"user", "assistant"}:
                continue
            for block in _decode_blocks(message.content):
                if message.role == "assistant" and block.type == "document":
                    return _ASSISTANT_DOCUMENT
                if message.role == "user" and block.type == "text" and bytes(block.citations) not in _NO_CITATIONS:
                    return _USER_CITATIONS
    except (msgspec.DecodeError, RecursionError):
        return None
    return None


def _is_there(value: msgspec.Raw) -> bool:
    return bytes(value) not in _NOTHING
