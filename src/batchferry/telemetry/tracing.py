"""W3C trace context: a request's ``traceparent`` goes on in its result, and spans link to it.

Format: https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from opentelemetry.trace import SpanContext, TraceFlags

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 0x01


class TraceParent(NamedTuple):
    """A caller's place in its trace."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def context(self) -> SpanContext:
        """As OpenTelemetry wants it."""
        return SpanContext(self.trace_id, self.span_id, is_remote=True, trace_flags=TraceFlags(self.flags))


def parse_traceparent(value: bytes | None) -> TraceParent | None:
    """Read a ``traceparent`` header; None for anything that is not one."""
    match = _TRACEPARENT.fullmatch(value.strip()) if value is not None and len(value) <= 256 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    parsed = TraceParent(int(trace_id, 16), int(span_id, 16), int(flags, 16) & _SAMPLED)
    return parsed if parsed.trace_id and parsed.span_id else None


def render_traceparent(trace_id: int, span_id: int, flags: int) -> bytes:
    """A version 00 header."""
    return b"00-%032x-%016x-%02x" % (trace_id, span_id, flags)


def child_traceparent(parent: bytes | None) -> bytes | None:
    """The header of a result: same trace and sampling, a new span; None when the request had no usable one."""
    known = parse_traceparent(parent)
    if known is None:
        return None
    return render_traceparent(known.trace_id, secrets.randbits(64) or 1, known.flags)
