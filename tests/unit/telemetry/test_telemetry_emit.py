"""The real telemetry: Prometheus text, spans, and behaviour when something is misused."""

from __future__ import annotations

import asyncio
import io
import json
import threading

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from batchferry.ports import Telemetry
from batchferry.telemetry import METRICS, Kind, ServiceTelemetry, build_telemetry, setup_logging
from batchferry.telemetry.emit import meter_provider
from batchferry.telemetry.tracing import parse_traceparent

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Bench:
    """A telemetry with a stream and spans one can look at."""

    def __init__(self, *, strict: bool = False, traced: bool = False) -> None:
        self.stream = io.StringIO()
        self.spans = InMemorySpanExporter()
        registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
        tracers = TracerProvider(shutdown_on_exit=False) if traced else None
        if tracers is not None:
            tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.telemetry = ServiceTelemetry(
            setup_logging("json", "debug", self.stream),
            meter_provider(Resource.get_empty(), [reader]),
            registry,
            tracers,
            strict=strict,
        )

    def lines(self) -> list[dict]:
        """Log lines so far."""
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def samples(self) -> dict[str, float]:
        """Prometheus samples so far, by name and labels."""
        return {
            sample.name
            + (
                "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}" if sample.labels else ""
            ): sample.value
            for family in text_string_to_metric_families(self.telemetry.metrics_text().decode())
            for sample in family.samples
        }


def test_it_keeps_the_port():
    """The engine can be given this telemetry."""
    telemetry: Telemetry = Bench().telemetry
    telemetry.event("service_ready", partitions=3)


def test_metrics_come_out_under_their_declared_names():
    """Whatever the exporter does to names, Prometheus shows the catalogue's."""
    bench = Bench(strict=True)
    for spec in METRICS.values():
        labels = {key: (min(values) if values else "x") for key, values in spec.labels.items()}
        tell = {
            Kind.COUNTER: bench.telemetry.count,
            Kind.GAUGE: bench.telemetry.gauge,
            Kind.HISTOGRAM: bench.telemetry.observe,
        }
        tell[spec.kind](spec.name, 1, **labels)
    shown = {name.partition("{")[0] for name in bench.samples()}
    for spec in METRICS.values():
        wanted = f"{spec.full_name}_count" if spec.kind is Kind.HISTOGRAM else spec.full_name
        assert wanted in shown, wanted


def test_values_and_labels():
    """Counters add, gauges keep the last value, histograms fall into the catalogue's buckets."""
    bench = Bench(strict=True)
    bench.telemetry.count("records", 2, outcome="succeeded")
    bench.telemetry.count("records", 3, outcome="succeeded")
    bench.telemetry.gauge("spool_bytes", 5)
    bench.telemetry.gauge("spool_bytes", 4)
    bench.telemetry.observe("record_wait_seconds", 4 * 3600)
    samples = bench.samples()
    assert samples["batchferry_records_total{outcome=succeeded}"] == 5
    assert samples["batchferry_spool_bytes"] == 4
    assert samples["batchferry_record_wait_seconds_bucket{le=14400.0}"] == 1
    assert samples["batchferry_record_wait_seconds_bucket{le=7200.0}"] == 0


def test_strict_refuses_and_lax_goes_on():
    """In tests a slip is a KeyError; in service it is told once and the rest of the event is kept."""
    strict = Bench(strict=True).telemetry
    with pytest.raises(KeyError):
        strict.event("batch_sealed", prompt="x")
    with pytest.raises(KeyError):
        strict.count("records", outcme="succeeded")
    lax = Bench()
    for _ in range(3):
        lax.telemetry.event("batch_sealed", batch_id="b", prompt="tell me a story")
        lax.telemetry.event("made_up", prompt="tell me a story")
        lax.telemetry.count("made_up", prompt="x")
        lax.telemetry.batch_span("batch", {"prompt": "tell me a story"})
    lines = lax.lines()
    assert "story" not in lax.stream.getvalue()
    assert [line["batch_id"] for line in lines if line["event"] == "batch_sealed"] == ["b"] * 3
    assert sum(line["event"] == "telemetry_misused" for line in lines) == 4


def test_a_batch_span_links_to_its_requests():
    """A batch's span carries its ids and at most 128 links, bad headers left out."""
    bench = Bench(traced=True, strict=True)
    bench.telemetry.batch_span("batch", {"batch_id": "b1", "rows": 2, "status": None}, [b"junk", *[PARENT] * 200])
    (span,) = bench.spans.get_finished_spans()
    assert span.attributes == {"batchferry.batch_id": "b1", "batchferry.rows": 2}
    assert len(span.links) == 128
    assert span.links[0].context.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736
    assert span.parent is None


def test_a_results_header_names_a_span_that_exists():
    """Where traces are exported, the result's header names the send span in the request's trace."""
    bench = Bench(traced=True)
    header = bench.telemetry.result_traceparent(PARENT, "results")
    (span,) = bench.spans.get_finished_spans()
    parsed = parse_traceparent(header)
    assert parsed is not None
    assert span.name == "send results"
    assert span.parent is not None
    assert (parsed.trace_id, parsed.span_id) == (span.context.trace_id, span.context.span_id)
    assert span.parent.span_id == 0x00F067AA0BA902B7
    assert Bench().telemetry.result_traceparent(None, "results") is None
    assert parse_traceparent(Bench().telemetry.result_traceparent(PARENT, "results")) is not None


async def test_build_and_close_without_an_endpoint():
    """Without OTLP variables there is no exporter, /metrics works, and closing twice is harmless."""
    telemetry = build_telemetry(version="1", incarnation="i", log_format="json", env={})
    assert b'batchferry_build{version="1"} 1.0' in telemetry.metrics_text()
    await telemetry.close()
    await telemetry.close()


async def test_an_endpoint_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    """Closing is bounded although nothing listens where traces should go."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRICS_EXPORTER": "none"}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", env["OTEL_EXPORTER_OTLP_ENDPOINT"])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    before = set(threading.enumerate())
    telemetry = build_telemetry(version="1", incarnation="i", env=env)
    telemetry.batch_span("batch", {"batch_id": "b"})
    await telemetry.close(1.0)
    # The exporter's thread outlives the bounded close; left alone it would draw random numbers in other tests.
    for thread in set(threading.enumerate()) - before:
        await asyncio.to_thread(thread.join, 15)
