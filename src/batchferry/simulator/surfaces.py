"""Which members of a scenario have an effect on which API: what a provider does not have, it cannot play.

The five APIs live in one world, so most of a scenario holds for all of them. What is named here is what one of them
has no counterpart for: a Message Batch has no input file that could be missing, a job of Gemini's that has expired has
no rows to list, one of Azure's runs on past its window. A scenario that says ``surfaces`` is refused when it scripts
what one of them does not play; of any other it is told at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

SurfaceName = Literal["openai", "azure", "anthropic", "gemini", "mistral"]
SURFACES: tuple[SurfaceName, ...] = ("openai", "azure", "anthropic", "gemini", "mistral")
"""``openai`` stands for whatever speaks like it, gateways included."""

_FILES: frozenset[str] = frozenset({"openai", "azure", "gemini", "mistral"})
_OPENAI: frozenset[str] = frozenset({"openai", "azure"})
_LISTING: frozenset[str] = _OPENAI | {"mistral"}

PLAYED_BY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "anthropic": frozenset({"anthropic"}),
        "batches.expire_with_share": frozenset(SURFACES) - {"azure"},
        "batches.fail_with.line": _OPENAI,
        "batches.fail_with.param": _OPENAI,
        "batches.metadata_contains": _FILES,
        "cancel_while_finalizing": _FILES,
        "create_gap": _FILES,
        "error_file_when_clean": frozenset({"openai", "mistral"}),
        "faults.call=file_list": _FILES,
        "faults.call=file_retrieve": _FILES,
        "faults.call=models": frozenset({"openai", "gemini", "mistral"}),
        "faults.call=upload": _FILES,
        "file_processing_s": frozenset({"gemini"}),
        "late_file_ids_s": _FILES,
        "limits.any_file_bytes": _FILES,
        "limits.batches_per_hour": _FILES,
        "limits.embedding_inputs": _LISTING,
        "limits.enqueued_release_s": _FILES,
        "limits.enqueued_tokens": _FILES,
        "limits.errors_listed": _LISTING,
        "limits.input_file_bytes": _FILES,
        "limits.line_bytes": _FILES,
        "limits.rows_per_batch": _FILES,
        "list_unfinished_rows": _LISTING,
        "rows.outcome=paused": frozenset({"anthropic"}),
        "rows.outcome=window_full": frozenset({"anthropic"}),
        "shares.outcome=paused": frozenset({"anthropic"}),
        "shares.outcome=window_full": frozenset({"anthropic"}),
        "show_usage": _OPENAI,
        "unknown_file": _LISTING,
        "webhooks": _OPENAI | {"gemini"},
        "webhooks.form=generic": _OPENAI,
        "windows": _OPENAI,
    }
)
"""Members by their path, with ``=value`` where only that value is meant; what is not named, every API plays."""


def not_played(scenario: BaseModel) -> dict[SurfaceName, list[str]]:
    """Members that the scenario sets and an API has nothing for, by API; an API that plays all is left out."""
    scripted = set(_scripted(scenario, ""))
    found: dict[SurfaceName, list[str]] = {
        surface: sorted(member for member in scripted & PLAYED_BY.keys() if surface not in PLAYED_BY[member])
        for surface in SURFACES
    }
    return {surface: members for surface, members in found.items() if members}


def _scripted(part: BaseModel, above: str) -> Iterator[str]:
    """Paths of all that is not as it is by default."""
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if not field.is_required() and value == field.get_default(call_default_factory=True):
            continue
        path = f"{above}{name}"
        yield path
        yield f"{path}={value}"
        for one in _parts(value):
            yield from _scripted(one, f"{path}.")


def _parts(value: Any) -> list[BaseModel]:
    found = value if isinstance(value, tuple | list) else (value,)
    return [one for one in found if isinstance(one, BaseModel)]
