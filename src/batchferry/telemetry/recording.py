"""Telemetry that keeps what it is told, for tests; as strict about the catalogue as the real one can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batchferry.telemetry.catalogue import Kind
from batchferry.telemetry.check import event_spec, metric_spec, span_attributes

Series = tuple[str, tuple[tuple[str, str], ...]]


class ToldSpan(NamedTuple):
    """A span as it was told."""

    name: str
    attributes: Mapping[str, object]
    parents: tuple[bytes, ...]


class RecordingTelemetry:
    """Keeps the ``Telemetry`` port in memory.

    Raises (all methods of the port):
        KeyError: a name, field or label is not in the catalogue.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self.counters: Counter[Series] = Counter()
        self.gauges: dict[Series, float] = {}
        self.observations: dict[Series, list[float]] = {}
        self.spans: list[ToldSpan] = []

    def event(self, name: str, **fields: object) -> None:
        event_spec(name, fields)
        self.events.append((name, dict(fields)))

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        metric_spec(name, Kind.COUNTER, labels)
        self.counters[_series(name, labels)] += value  # type: ignore[assignment]  # counters may count in fractions

    def gauge(self, name: str, value: float, **labels: str) -> None:
        metric_spec(name, Kind.GAUGE, labels)
        self.gauges[_series(name, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        metric_spec(name, Kind.HISTOGRAM, labels)
        self.observations.setdefault(_series(name, labels), []).append(value)

    def batch_span(self, name: str, attributes: Mapping[str, object], parents: Sequence[bytes] = ()) -> None:
        span_attributes(name, attributes)
        self.spans.append(ToldSpan(name, dict(attributes), tuple(parents)))

    def named(self, name: str) -> list[dict[str, object]]:
        """The fields of every event of this name, in order."""
        return [fields for told, fields in self.events if told == name]

    def total(self, name: str, **labels: str) -> float:
        """Sum of a counter over every series that carries these labels."""
        wanted = set(labels.items())
        return sum(value for (told, given), value in self.counters.items() if told == name and wanted <= set(given))


def _series(name: str, labels: Mapping[str, str]) -> Series:
    return name, tuple(sorted((key, str(value)) for key, value in labels.items()))
