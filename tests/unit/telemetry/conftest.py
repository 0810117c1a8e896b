"""Logging set up by one test is taken down after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from batchferry.telemetry.logs import LibraryHandler


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [handler for handler in root.handlers if isinstance(handler, LibraryHandler)]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=False)
