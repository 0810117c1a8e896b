"""The real telemetry: structlog for events, OpenTelemetry for metrics and traces, Prometheus text for ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from batchferry.domain.errors import BatchferryError
from batchferry.telemetry.catalogue import EVENTS, METRIC_PREFIX, METRICS, Kind
from batchferry.telemetry.check import LabelGuard, event_spec, metric_spec, plain, span_attributes, text
from batchferry.telemetry.logs import LogFormat, count_library_errors, setup_logging, write
from batchferry.telemetry.tracing import child_traceparent, parse_traceparent, render_traceparent

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of what ``metrics_text`` returns."""

_MAX_LINKS = 128
_TIMES = frozenset({"started_at", "ended_at"})
_NAME = "batchferry"


class ServiceTelemetry:
    """Keeps the ``Telemetry`` port.

    ``strict`` makes a name, field or label outside the catalogue a ``KeyError`` (tests); otherwise what is
    unknown is dropped and ``telemetry_misused`` is told, since a log line must never stop the work.
    """

    def __init__(
        self,
        logger: structlog.typing.FilteringBoundLogger,
        meters: MeterProvider,
        registry: CollectorRegistry,
        tracers: TracerProvider | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._logger = logger
        self._meters = meters
        self._registry = registry
        self._tracers = tracers
        self._tracer = tracers.get_tracer(_NAME) if tracers is not None else None
        self._strict = strict
        self._guard = LabelGuard()
        self._told: set[tuple[str, str]] = set()
        meter = meters.get_meter(_NAME)
        self._tell: dict[str, Callable[[float, dict[str, str]], None]] = {}
        for spec in METRICS.values():
            # The Prometheus exporter puts _total behind a counter, so it must not be there yet.
            name = METRIC_PREFIX + spec.name
            if spec.kind is Kind.COUNTER:
                self._tell[spec.name] = meter.create_counter(name, spec.unit, spec.help).add
            elif spec.kind is Kind.GAUGE:
                self._tell[spec.name] = meter.create_gauge(name, spec.unit, spec.help).set
            else:
                self._tell[spec.name] = meter.create_histogram(
                    name, spec.unit, spec.help, explicit_bucket_boundaries_advisory=spec.buckets
                ).record

    def event(self, name: str, **fields: object) -> None:
        """Write one catalogued log event."""
        known = fields
        try:
            event_spec(name, fields)
        except KeyError:
            if self._strict:
                raise
            if name not in EVENTS:
                self._misused(name, "")
                return
            known = {key: value for key, value in fields.items() if key in EVENTS[name].fields}
            self._misused(name, ", ".join(sorted(fields.keys() - known.keys())))
        write(self._logger, EVENTS[name], {key: plain(value) for key, value in known.items() if value is not None})

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter; ``value`` is 0 or more."""
        self._metric(name, Kind.COUNTER, value, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. A label set that is no longer true must be set to 0: gauges do not forget."""
        self._metric(name, Kind.GAUGE, value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value into a histogram."""
        self._metric(name, Kind.HISTOGRAM, value, labels)

    def batch_span(self, name: str, attributes: Mapping[str, object], parents: Sequence[bytes] = ()) -> None:
        """Tell a finished span, linked to at most 128 requests' ``traceparent`` values.

        The attributes ``started_at`` and ``ended_at`` (instants) give its times; without them it is a point.
        """
        try:
            span_attributes(name, attributes)
        except KeyError:
            if self._strict:
                raise
            self._misused(name, "span")
            return
        if self._tracer is None:
            return
        contexts = (parsed.context for value in parents if (parsed := parse_traceparent(value)) is not None)
        links = [Link(context) for context, _ in zip(contexts, range(_MAX_LINKS), strict=False)]
        span = self._tracer.start_span(
            name,
            context=otel_context.Context(),
            kind=SpanKind.CONSUMER,
            attributes=_attributes(attributes),
            links=links,
            start_time=_nanoseconds(attributes.get("started_at")),
        )
        span.end(_nanoseconds(attributes.get("ended_at")))

    def result_traceparent(self, parent: bytes | None, topic: str) -> bytes | None:
        """The ``traceparent`` of a result message, and its send span in the request's trace where traces are exported.

        None when the request had no usable one.
        """
        known = parse_traceparent(parent)
        if known is None:
            return None
        if self._tracer is None:
            return child_traceparent(parent)
        span = self._tracer.start_span(
            f"send {topic}",
            context=trace.set_span_in_context(NonRecordingSpan(known.context), otel_context.Context()),
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": "kafka",
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "messaging.destination.name": topic,
            },
        )
        span.end()
        own = span.get_span_context()
        return render_traceparent(own.trace_id, own.span_id, known.flags)

    def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Export what is left; bounded, never raises. Nothing may be told afterwards."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut_down() -> None:
            with contextlib.suppress(Exception):
                self._shut_down(timeout_s)
            with contextlib.suppress(RuntimeError):  # the loop may be gone by then
                loop.call_soon_threadsafe(done.set)

        # A thread of its own: one of the loop's pool would be waited for when the loop closes, however long.
        threading.Thread(target=shut_down, name="telemetry-close", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), timeout_s)

    def _shut_down(self, timeout_s: float) -> None:
        if self._tracers is not None:
            self._tracers.force_flush(round(timeout_s * 500))
            self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=timeout_s * 500)

    def _metric(self, name: str, kind: Kind, value: float, labels: Mapping[str, str]) -> None:
        try:
            spec = metric_spec(name, kind, labels)
        except KeyError:
            if self._strict:
                raise
            self._misused(name, ", ".join(sorted(labels)))
            return
        self._tell[spec.name](value, self._guard.bounded(spec, labels))

    def _misused(self, name: str, field: str) -> None:
        if (name, field) not in self._told:  # once each: a slip on a hot path must not fill the log
            self._told.add((name, field))
            write(self._logger, EVENTS["telemetry_misused"], {"name": text(name), "field": text(field)})


def build_telemetry(
    *,
    version: str,
    incarnation: str,
    log_format: LogFormat = "auto",
    log_level: str = "info",
    otel_enabled: bool = True,
    service_name: str = _NAME,
    env: Mapping[str, str] | None = None,
    strict: bool = False,
) -> ServiceTelemetry:
    """Set up logging, metrics and traces of a process.

    ``/metrics`` always works. Metrics and traces are exported over OTLP/HTTP too when ``otel_enabled`` and the
    standard variables name an endpoint (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``..._METRICS_ENDPOINT``,
    ``..._TRACES_ENDPOINT``); ``OTEL_SDK_DISABLED``, ``OTEL_METRICS_EXPORTER=none`` and
    ``OTEL_TRACES_EXPORTER=none`` are obeyed. Nothing global is set: two of these can live in one process.
    """
    variables = os.environ if env is None else env
    logger = setup_logging(log_format, log_level)
    resource = Resource.create(
        {
            SERVICE_NAME: variables.get("OTEL_SERVICE_NAME") or service_name,
            SERVICE_VERSION: version,
            SERVICE_INSTANCE_ID: incarnation,
        }
    )
    registry = CollectorRegistry()
    readers: list[MetricReader] = [
        PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    ]
    exports = otel_enabled and variables.get("OTEL_SDK_DISABLED", "").lower() != "true"
    if exports and _endpoint(variables, "METRICS"):
        # Imported here: the exporters bring an HTTP client that a service without them need not load.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    tracers: TracerProvider | None = None
    if exports and _endpoint(variables, "TRACES"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        tracers = _tracers(resource, OTLPSpanExporter())
    telemetry = ServiceTelemetry(logger, meter_provider(resource, readers), registry, tracers, strict=strict)
    count_library_errors(lambda name: telemetry.count("library_errors", logger=name))
    telemetry.gauge("build", 1, version=version)
    telemetry.gauge("started_timestamp_seconds", time.time())
    return telemetry


def meter_provider(resource: Resource, readers: Sequence[MetricReader]) -> MeterProvider:
    """A provider without a hook at exit: the application ends it, within its stop budget."""
    return MeterProvider(readers, resource, shutdown_on_exit=False)


def error_fields(error: BaseException) -> dict[str, str]:
    """What may be logged of an exception: type and place, and the text only of our own errors.

    Other exceptions' texts may quote a prompt or an answer, so they are left out.
    """
    fields = {"error": type(error).__name__}
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}{_NAME}{os.sep}" in frame.filename]
    if frames:
        frame = (own or frames)[-1]
        fields["where"] = f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"  # noqa: PTH119
    if isinstance(error, BatchferryError):
        fields["error_text"] = text(error)
    return fields


def _endpoint(variables: Mapping[str, str], signal: str) -> bool:
    if variables.get(f"OTEL_{signal}_EXPORTER", "").lower() == "none":
        return False
    return bool(variables.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or variables.get("OTEL_EXPORTER_OTLP_ENDPOINT"))


def _tracers(resource: Resource, exporter: SpanExporter) -> TracerProvider:
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=SpanLimits(max_links=_MAX_LINKS))
    tracers.add_span_processor(BatchSpanProcessor(exporter))
    return tracers


def _attributes(attributes: Mapping[str, object]) -> dict[str, Any]:
    shown = {}
    for key, value in attributes.items():
        if key in _TIMES or value is None:
            continue
        name = key if "." in key else f"{_NAME}.{key}"
        shown[name] = plain(value)
    return shown


def _nanoseconds(instant: object) -> int | None:
    return round(instant.timestamp() * 1e9) if isinstance(instant, datetime) else None
