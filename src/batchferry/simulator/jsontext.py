"""JSON as the provider reads it, and the identity of a request body."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson

MAX_DEPTH = 200
"""Nesting that is still read; deeper text counts as not JSON."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: bytes) -> Any:
    """Read JSON text.

    The fast parser refuses lone surrogates, which JSON allows; the slower one gets a second look at those.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deep.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text.decode("utf-8"), parse_constant=_no_constant)
        except RecursionError as error:
            raise ValueError("nested too deep") from error


def dump_json(value: Any) -> bytes:
    """Compact JSON text as UTF-8; lone surrogates come out as escapes."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def canonical_json(value: Any) -> bytes:
    """JSON text that is the same for every spelling of the same value: members sorted, no spaces."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode("ascii")


def body_digest(body: bytes | str | dict[str, Any]) -> str:
    """The identity of a request body: hex SHA-256 of its canonical JSON.

    White space and the order of members make no difference, so a caller's body and the same body in a batch
    file have one identity.

    Raises:
        ValueError: ``body`` is text that is not JSON.
    """
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    value = parse_json(body) if isinstance(body, bytes) else body
    return hashlib.sha256(canonical_json(value)).hexdigest()
