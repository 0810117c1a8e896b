"""Logging set-up: JSON lines for machines, aligned lines for people, the same events in both.

Our own events come through ``write``. What libraries tell through the standard ``logging`` is let through from
warning upwards, but only as "this logger told something": their texts and tracebacks may quote what was being
sent, which is payload.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal, TextIO

import orjson
import structlog

from batchferry.telemetry.catalogue import EVENTS, EventSpec, Level
from batchferry.telemetry.check import text

LogFormat = Literal["auto", "json", "human"]
_LEVELS = {Level.DEBUG: 10, Level.INFO: 20, Level.WARNING: 30, Level.ERROR: 40}
_OWN_KEYS = frozenset({"event", "level", "timestamp"})
_TEMPLATE_CHARS = 120
# Libraries whose messages are fixed text with %-places; of all others only the logger's name is shown.
_TEMPLATE_LOGGERS = ("aiokafka", "uvicorn", "opentelemetry", "asyncio")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|<.*>|\{.*\}|\(.*\)|\[.*\]|b'.*|=.*")


def setup_logging(
    log_format: LogFormat = "auto", level: str = "info", stream: TextIO | None = None
) -> structlog.typing.FilteringBoundLogger:
    """Send our events, and the libraries' warnings, to ``stream`` (default: standard error).

    ``auto`` is human on a terminal and JSON elsewhere. May be called again; the last call counts.
    """
    target = stream or sys.stderr
    human = log_format == "human" or (log_format == "auto" and target.isatty())
    least = _LEVELS[Level(level)]
    if human:
        render: Any = structlog.dev.ConsoleRenderer(colors=target.isatty(), pad_event_to=24)
    else:
        render = structlog.processors.JSONRenderer(serializer=_json)
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(target),
        processors=[
            only_catalogued,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, LibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(LibraryHandler(logger))
    root.setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    return logger


def write(logger: structlog.typing.FilteringBoundLogger, spec: EventSpec, fields: Mapping[str, Any]) -> None:
    """Write one event at its level."""
    logger.log(_LEVELS[spec.level], spec.name, **fields)


def only_catalogued(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop whatever the catalogue does not name. A safety net: callers are checked before they get here."""
    spec = EVENTS.get(str(event.get("event")))
    if spec is None:
        raise structlog.DropEvent
    for key in [key for key in event if key not in spec.fields and key not in _OWN_KEYS]:
        del event[key]
    return event


LIBRARY_PAUSE_S = 10.0
"""The same message of a library is written once in so long: clients of an absent broker repeat themselves."""
LIBRARY_TEMPLATES = 500
"""Different messages remembered for that."""


class LibraryHandler(logging.Handler):
    """Turns the standard library's log records into events without their texts."""

    def __init__(self, logger: structlog.typing.FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger
        self._told: dict[tuple[str, str], tuple[float, int]] = {}
        """By logger and template: when it was last written (monotonic seconds), and how often it was left out."""
        self.count_error: Callable[[str], None] = lambda _logger: None
        """Called for every error, those left out of the log too, with the first part of its logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; never raises."""
        is_error = record.levelno >= logging.ERROR
        spec = EVENTS["library_error" if is_error else "library_warning"]
        if is_error:
            self.count_error(record.name.partition(".")[0])
        fields: dict[str, Any] = {"logger": text(record.name)}
        if record.name.partition(".")[0] in _TEMPLATE_LOGGERS:
            fields["template"] = _template(record.msg)
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__
        now_s = time.monotonic()
        same = (record.name, str(fields.get("template", "")))
        last_s, left_out = self._told.get(same, (-LIBRARY_PAUSE_S, 0))
        if now_s - last_s < LIBRARY_PAUSE_S:
            self._told[same] = (last_s, left_out + 1)
            return
        if len(self._told) >= LIBRARY_TEMPLATES:
            self._told.clear()
        self._told[same] = (now_s, 0)
        if left_out:
            fields["left_out"] = left_out
        try:
            write(self._logger, spec, fields)
        except Exception:  # noqa: BLE001 - a full disk behind the log must not stop the work
            self.handleError(record)


def count_library_errors(count: Callable[[str], None]) -> None:
    """Have ``count`` called with the library's name for every error that a library tells from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LibraryHandler):
            handler.count_error = count


def _template(message: object) -> str:
    """The fixed words of a message: the first line, its arguments not filled in, what is quoted left out."""
    first_line = str(message).partition("\n")[0] if isinstance(message, str) else ""
    return text(_QUOTED.sub("…", first_line)[:_TEMPLATE_CHARS])


def _json(event: Mapping[str, Any], **_options: Any) -> str:
    ordered = {key: event[key] for key in ("timestamp", "level", "event") if key in event}
    return orjson.dumps({**ordered, **event}, default=str).decode()
