"""What the service tells the outside: log events, metrics and spans, each declared once in ``catalogue.py``.

Logs go through structlog, metrics and traces through OpenTelemetry. A name, field or label that is not in the
catalogue is refused, which is what keeps prompts, answers and keys out. This room must not know who tells
something or why: it knows names and plain values.
"""

from batchferry.telemetry.catalogue import EVENTS, METRICS, SPANS, EventSpec, Kind, Level, MetricSpec, SpanSpec
from batchferry.telemetry.check import plain
from batchferry.telemetry.emit import METRICS_CONTENT_TYPE, ServiceTelemetry, build_telemetry, error_fields
from batchferry.telemetry.logs import setup_logging
from batchferry.telemetry.recording import RecordingTelemetry
from batchferry.telemetry.tracing import child_traceparent

__all__ = [
    "EVENTS",
    "METRICS",
    "METRICS_CONTENT_TYPE",
    "SPANS",
    "EventSpec",
    "Kind",
    "Level",
    "MetricSpec",
    "RecordingTelemetry",
    "ServiceTelemetry",
    "SpanSpec",
    "build_telemetry",
    "child_traceparent",
    "error_fields",
    "plain",
    "setup_logging",
]
