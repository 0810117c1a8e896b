"""The types of setting values: lengths of time, sizes, lists and names, as people write them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from batchferry.domain.times import parse_duration_s, parse_window_s

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
# Helm writes large whole numbers as 8e+09, which YAML then takes for text.
_SCIENTIFIC = re.compile(r"\d+(\.\d+)?e\+?\d{1,2}", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_WEBHOOK_PREFIX = "whsec_"
_WEBHOOK_KEY_MIN_BYTES = 16
MAX_WEBHOOK_SECRETS = 8
"""Of one account at one time: each costs a signature of every delivery."""
_PLAIN_SECRET = re.compile(r"[A-Za-z0-9._~+/=-]+")
_PATH_SECRET = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_FIELD = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9_-]{1,64}){0,7}")


def _seconds(value: object) -> object:
    return parse_duration_s(value) if isinstance(value, str) else _no_flag(value)


def _size(value: object) -> object:
    if not isinstance(value, str):
        return _no_flag(value)
    if _SCIENTIFIC.fullmatch(value.strip()):
        return _count(value)
    match = _SIZE.fullmatch(value.strip().lower().replace("_", ""))
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("not a size: write a number of bytes, or one with kB, MB, GB, KiB, MiB or GiB behind it")
    return round(float(match[1]) * _SIZE_UNITS[match[2]])


def _count(value: object) -> object:
    if not isinstance(value, str):
        return _no_flag(value)
    plain = value.replace("_", "").strip()
    return int(Decimal(plain)) if _SCIENTIFIC.fullmatch(plain) else plain


def _no_flag(value: object) -> object:
    # YAML's `yes` and `on` are booleans, and a boolean would pass as 1 wherever a number is wanted.
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")  # noqa: TRY004 - pydantic gathers ValueError
    return value


def as_list(value: object) -> object:
    """Take a list, JSON text of a list, or words with commas between them."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)


def _window(value: str) -> str:
    parse_window_s(value)
    return value


def _topic(value: str) -> str:
    if not _TOPIC.fullmatch(value) or value in {".", ".."}:
        raise ValueError("not a Kafka topic name: up to 249 of letters, digits, '.', '_' and '-'")
    return value


def _names(value: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in value:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a name: small letters and digits, single '-' or '_' between them,"
                " so that it can stand in an environment variable, a label and an address"
            )
    return value


def webhook_key(secret: str) -> bytes:
    """The key that a webhook secret stands for: base64 behind ``whsec_``, else the text's own bytes (OpenAI's client).

    Raises:
        ValueError: not base64, or too short to sign anything with; the text never says what it was.
    """
    encoded = secret.removeprefix(_WEBHOOK_PREFIX)
    if encoded == secret:
        key = secret.encode()
    else:
        try:
            key = base64.b64decode(encoded.rstrip("=") + "=" * (-len(encoded.rstrip("=")) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"after {_WEBHOOK_PREFIX} comes base64: copy the whole secret of the endpoint") from None
    if len(key) < _WEBHOOK_KEY_MIN_BYTES:
        raise ValueError(f"a secret of at least {_WEBHOOK_KEY_MIN_BYTES} bytes is wanted: copy that of the endpoint")
    return key


def webhook_secrets(text: str) -> tuple[str, ...]:
    """The secrets of one account, one a line; several while one is being replaced.

    Raises:
        ValueError: none, too many, or one twice.
    """
    found = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not found:
        raise ValueError(f"a secret of at least {_WEBHOOK_KEY_MIN_BYTES} bytes is wanted: copy that of the endpoint")
    if len(found) > MAX_WEBHOOK_SECRETS:
        raise ValueError(f"at most {MAX_WEBHOOK_SECRETS} secrets, one a line: leave out those no longer in use")
    if len(set(found)) < len(found):
        raise ValueError("one secret stands here twice: leave one out")
    return found


def check_webhook_secret(secret: str, use: Literal["hmac", "header", "path"]) -> None:
    """Whether a secret can key a MAC, or stand as it is in a header or an address.

    Raises:
        ValueError: too short, or a character that would not arrive as it left; the text never says what it was.
    """
    if len(secret.encode()) < _WEBHOOK_KEY_MIN_BYTES:
        raise ValueError(f"a secret of at least {_WEBHOOK_KEY_MIN_BYTES} bytes is wanted: make a random one")
    if use != "hmac" and not (_PATH_SECRET if use == "path" else _PLAIN_SECRET).fullmatch(secret):
        allowed = "._~-" if use == "path" else "._~+/=-"
        raise ValueError(f"a secret of letters, digits and any of {allowed} is wanted: make a random one")


def _lines(value: object) -> object:
    """A list of secrets as one text, one a line: so a file, a variable and a list are read alike."""
    return "\n".join(value) if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value) else value


def _header(value: str) -> str:
    if not _HEADER.fullmatch(value):
        raise ValueError("not the name of a header: letters, digits and '-'")
    return value.lower()


def _field(value: str) -> str:
    if not _FIELD.fullmatch(value):
        raise ValueError("not a field: names of letters, digits, '_' and '-', with a full stop between the levels")
    return value


def routes_by_name(value: Any) -> Any:
    """A list of things with a ``name`` as a mapping, order kept; anything else as it is.

    Lists keep their order everywhere; a mapping loses it in tools that sort keys, as Helm does.

    Raises:
        ValueError: an item without a name, or two with the same.
    """
    if not isinstance(value, list | tuple):
        return value
    by_name: dict[str, Any] = {}
    for number, item in enumerate(value, 1):
        name = item.get("name") if isinstance(item, dict) else getattr(item, "name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"item {number} of the list has no name")
        if name in by_name:
            raise ValueError(f"two items of the list have the name {name!r}")
        by_name[name] = item
    return by_name


Seconds = Annotated[float, BeforeValidator(_seconds, json_schema_input_type=float | str), Field(ge=0)]
"""A length of time: seconds, or text like ``30h``, ``1h 30m``, ``PT30H``."""
Bytes = Annotated[int, BeforeValidator(_size, json_schema_input_type=int | str), Field(gt=0)]
"""A size: bytes, or text like ``100MB`` (1000s) and ``4MiB`` (1024s)."""
Count = Annotated[int, BeforeValidator(_count, json_schema_input_type=int | str), Field(ge=0)]
"""A whole number, 0 or more; ``50_000`` may be written so."""
Window = Annotated[str, AfterValidator(_window)]
"""A completion window in the provider's own words (``24h``); it is sent as it stands."""
Topic = Annotated[str, AfterValidator(_topic)]
TextList = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=list[str] | str)]
"""A list of texts; in an environment variable JSON, or words with commas between them."""
Secrets = Annotated[SecretStr, BeforeValidator(_lines, json_schema_input_type=str | list[str])]
"""Secrets of one purpose, one a line, or a list."""
HeaderName = Annotated[str, AfterValidator(_header)]
FieldPath = Annotated[str, AfterValidator(_field)]
"""Where a value stands in a JSON object: ``batch_id``, ``data.id``."""

named = AfterValidator(_names)
"""For mappings whose keys are names that we show and take from environment variables."""
