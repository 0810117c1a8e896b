"""Errors of libraries as the metrics show them."""

from __future__ import annotations

import logging

import pytest

from batchferry.telemetry import build_telemetry


def test_library_errors_are_counted_by_library(capsys: pytest.CaptureFixture[str]) -> None:
    """Every error counts under its library's name, also those the log leaves out; warnings do not."""
    telemetry = build_telemetry(version="1", incarnation="one", log_format="json", otel_enabled=False, env={})
    for _ in range(3):
        logging.getLogger("somelibrary.part").error("the same again")
    logging.getLogger("somelibrary.part").warning("odd")
    told = capsys.readouterr().err
    assert told.count('"library_error"') == 1
    assert 'batchferry_library_errors_total{logger="somelibrary"} 3.0' in telemetry.metrics_text().decode()


def test_start_is_in_the_metrics() -> None:
    """The start of the process is there from the beginning, in seconds since the epoch."""
    telemetry = build_telemetry(version="1", incarnation="one", log_format="json", otel_enabled=False, env={})
    assert "batchferry_started_timestamp_seconds 1." in telemetry.metrics_text().decode()
