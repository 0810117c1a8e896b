"""The one place where what is told is compared with the catalogue, for the real telemetry and the recording one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum

from batchferry.telemetry.catalogue import EVENTS, MAX_LABEL_VALUES, METRICS, OTHER, SPANS, EventSpec, Kind, MetricSpec

MAX_TEXT_CHARS = 300
MAX_ITEMS = 50
MASK = "***"

# The shapes in which keys travel. Nothing in the catalogue should ever hold one; this is the net below the net.
_SECRET = re.compile(
    r"\b(?:sk|pk|rk|xox[abp]|ghp|gsk|hf|AKIA)[-_A-Za-z0-9]{12,}"
    r"|\bBearer\s+\S+"
    r"|://[^/\s:@]+:[^/\s@]+@"
    r"|\bwhsec_[A-Za-z0-9+/=]+",
    re.IGNORECASE,
)

Plain = str | int | float | bool | None | list["Plain"]


def event_spec(name: str, fields: Iterable[str]) -> EventSpec:
    """The event's entry.

    Raises:
        KeyError: the event, or one of the fields, is not in the catalogue.
    """
    spec = EVENTS.get(name)
    if spec is None:
        raise KeyError(f"no event {name!r} in the catalogue")
    unknown = sorted(set(fields) - spec.fields)
    if unknown:
        raise KeyError(f"event {name!r} has no field {', '.join(unknown)} in the catalogue")
    return spec


def metric_spec(name: str, kind: Kind, labels: Iterable[str]) -> MetricSpec:
    """The metric's entry.

    Raises:
        KeyError: the metric is not in the catalogue, is of another kind, or has other labels.
    """
    spec = METRICS.get(name)
    if spec is None or spec.kind is not kind:
        raise KeyError(f"no {kind} {name!r} in the catalogue")
    given = set(labels)
    if given != set(spec.labels):
        raise KeyError(f"{kind} {name!r} has the labels {sorted(spec.labels)}, not {sorted(given)}")
    return spec


def span_attributes(name: str, attributes: Mapping[str, object]) -> None:
    """Check a span.

    Raises:
        KeyError: the span, or one of its attributes, is not in the catalogue.
    """
    spec = SPANS.get(name)
    if spec is None:
        raise KeyError(f"no span {name!r} in the catalogue")
    unknown = sorted(set(attributes) - spec.attributes)
    if unknown:
        raise KeyError(f"span {name!r} has no attribute {', '.join(unknown)} in the catalogue")


class LabelGuard:
    """Keeps the number of time series bounded, whatever model or account names come in."""

    def __init__(self, max_values: int = MAX_LABEL_VALUES) -> None:
        self._max_values = max_values
        self._seen: dict[tuple[str, str], set[str]] = {}

    def bounded(self, spec: MetricSpec, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels, unforeseen values replaced by ``other``."""
        return {key: self._value(spec, key, text(value)) for key, value in labels.items()}

    def _value(self, spec: MetricSpec, key: str, value: str) -> str:
        if allowed := spec.labels[key]:
            return value if value in allowed else OTHER
        seen = self._seen.setdefault((spec.name, key), set())
        if value not in seen:
            if len(seen) >= self._max_values:
                return OTHER
            seen.add(value)
        return value


def text(value: object) -> str:
    """Short, on one line, with anything that looks like a key masked."""
    flat = "".join(character if character.isprintable() else " " for character in str(value)[: MAX_TEXT_CHARS + 1])
    masked = _SECRET.sub(MASK, flat)
    return masked if len(masked) <= MAX_TEXT_CHARS else masked[:MAX_TEXT_CHARS] + "…"


def plain(value: object) -> Plain:
    """A value as logs show it: numbers, short text, instants as ISO 8601 UTC, short lists of those.

    Bytes and anything else only show their type: they could be payload.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
        rest: list[Plain] = [f"… {len(items) - MAX_ITEMS} more"] if len(items) > MAX_ITEMS else []
        return [plain(item) for item in items[:MAX_ITEMS]] + rest
    return f"<{type(value).__name__}>"
