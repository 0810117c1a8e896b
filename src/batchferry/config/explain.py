"""The settings told to people (rows for a table) and to tools (a JSON Schema)."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AwareDatetime, BaseModel, SecretStr
from pydantic.fields import FieldInfo

from batchferry.config import values
from batchferry.config.models import ENV_DELIMITER, ENV_PREFIX, Settings
from batchferry.domain.times import hours

_BY_VALIDATOR = {
    values._seconds: "duration",  # noqa: SLF001 - same room: the validator is what marks the type
    values._size: "size",  # noqa: SLF001
    values._count: "count",  # noqa: SLF001
    values.as_list: "list",
    values._window: "window",  # noqa: SLF001
    values._topic: "topic",  # noqa: SLF001
}
_BY_TYPE: dict[Any, str] = {
    str: "text", int: "count", float: "number", bool: "yes/no", Path: "path", SecretStr: "secret",
    Decimal: "number", datetime: "instant", AwareDatetime: "instant", Any: "any JSON",
}  # fmt: skip


class SettingRow(NamedTuple):
    """One setting as a table shows it."""

    name: str
    type: str
    default: str
    why: str

    @property
    def env(self) -> str:
        """Its environment variable; ``<name>`` is to be replaced."""
        return ENV_PREFIX + self.name.upper().replace("<NAME>", "<name>").replace(".", ENV_DELIMITER)


def explain_settings() -> list[SettingRow]:
    """Every setting with its type, default and reason, in the order of the tree."""
    return list(_rows(Settings, ""))


def settings_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the settings file, as people may write it."""
    schema = Settings.model_json_schema(mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "batchferry settings",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _rows(model: type[BaseModel], at: str) -> Iterator[SettingRow]:
    for name, info in model.model_fields.items():
        if model.__name__ == "RouteSettings" and name == "name":
            continue  # the key above it, not a setting
        below = _section(info.annotation)
        path = f"{at}{name}"
        if below is None:
            yield SettingRow(path, _type(info.annotation, info.metadata), _default(info, path), _why(info))
            for optional in filter(None, map(_section, get_args(info.annotation))):
                if type(None) in get_args(info.annotation):
                    yield from _rows(optional, f"{path}.")
        elif get_origin(info.annotation) is dict:
            yield from _rows(below, f"{path}.<name>.")
        else:
            yield from _rows(below, f"{path}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is dict:
        return _section(get_args(annotation)[1])
    return None


def _why(info: FieldInfo) -> str:
    return " ".join((info.description or "").split())


def _type(annotation: Any, metadata: list[Any]) -> str:
    for item in metadata:
        marked = _BY_VALIDATOR.get(getattr(item, "func", None))  # type: ignore[arg-type]  # None is no key
        if marked is not None:
            return marked
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {Union, types.UnionType}:
        return " or ".join("null" if part is type(None) else _type(part, []) for part in arguments)
    if origin is Literal:
        return ", ".join(str(choice) for choice in arguments)
    if origin is dict:
        return f"mapping to {_type(arguments[1], [])}"
    if origin is frozenset:
        return "list"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(str(choice.value) for choice in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__, list(annotation.__metadata__))
    return _BY_TYPE[annotation]


def _default(info: FieldInfo, path: str) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if path.endswith("_s") and isinstance(value, float):
        return hours(value)
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, dict | frozenset):
        return json.dumps(value if isinstance(value, dict) else sorted(value)) if value else "none"
    return str(value) or "none"
