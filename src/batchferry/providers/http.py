"""What every HTTP adapter needs: bounded reading, server hints, the provider's clock, saving a download."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import threading
from collections import deque
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.provider import DownloadedFile, PaceHints

MAX_HINT_S = 86_400.0
"""A longer ``Retry-After`` is taken for a mistake and cut to a day."""
SKEW_SAMPLES = 5
DOWNLOAD_CHUNK_BYTES = 1 << 20
MAX_REDIRECTS = 5


class AnswerTooLarge(Exception):
    """The answer has more bytes than this call may have."""


class AnswerCut(Exception):
    """The answer has fewer bytes than its Content-Length promised."""


class BadRedirect(Exception):
    """A redirect that leads nowhere, in circles, or away from TLS."""


class Fault(NamedTuple):
    """A call that broke before a whole answer was there."""

    code: str
    """A word of ours for logs and events."""
    never_sent: bool
    """Whether the request cannot have reached the provider."""
    makes_no_sense: bool = False
    """Whether there was an answer, but not one that HTTP allows or that we asked for."""


_FAULTS: tuple[tuple[type[Exception], Fault], ...] = (
    (httpx.ConnectTimeout, Fault("connect_timeout", never_sent=True)),
    (httpx.ConnectError, Fault("connect_error", never_sent=True)),
    (httpx.PoolTimeout, Fault("pool_timeout", never_sent=True)),
    (httpx.ProxyError, Fault("proxy_error", never_sent=True)),
    (httpx.ReadTimeout, Fault("read_timeout", never_sent=False)),
    (httpx.WriteTimeout, Fault("write_timeout", never_sent=False)),
    (httpx.TransportError, Fault("connection_broken", never_sent=False)),
    (TimeoutError, Fault("call_timeout", never_sent=False)),
    (AnswerCut, Fault("answer_cut", never_sent=False)),
    (AnswerTooLarge, Fault("answer_too_large", never_sent=False, makes_no_sense=True)),
    (BadRedirect, Fault("bad_redirect", never_sent=False, makes_no_sense=True)),
    (httpx.DecodingError, Fault("answer_not_decodable", never_sent=False, makes_no_sense=True)),
)
BREAKS = tuple(kind for kind, _ in _FAULTS)
"""The exceptions that ``fault_of`` understands."""


def fault_of(error: Exception) -> Fault:
    """What a broken call's exception means; the exception's own text is payload and is left behind."""
    return next(fault for kind, fault in _FAULTS if isinstance(error, kind))


async def read_whole(response: httpx.Response, max_bytes: int) -> bytes:
    """The body of a streamed answer.

    Raises:
        AnswerTooLarge: there are more than ``max_bytes``.
    """
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > max_bytes:
            raise AnswerTooLarge
        parts.append(part)
    return b"".join(parts)


def _http_date(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        instant = parsedate_to_datetime(text)
    except ValueError:
        return None
    return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)


def _seconds(text: str | None, unit_s: float) -> float | None:
    try:
        value = float(text) * unit_s if text else None
    except ValueError:
        return None
    return value if value is not None and value == value else None  # noqa: PLR0124 (only a NaN differs from itself)


def retry_after_s(headers: httpx.Headers, now: datetime) -> float | None:
    """Seconds the server asks us to stay away, 0 to a day, or None.

    ``retry-after-ms`` goes before ``retry-after``, which may be seconds or a date; a date is read against the
    answer's own ``Date``, so that a difference of clocks does not matter. (Order and forms: the official client.)
    """
    wish = _seconds(headers.get("retry-after-ms"), 0.001)
    if wish is None:
        text = headers.get("retry-after")
        wish = _seconds(text, 1.0)
        if wish is None and (until := _http_date(text)) is not None:
            wish = (until - (_http_date(headers.get("date")) or now)).total_seconds()
    return None if wish is None else min(max(wish, 0.0), MAX_HINT_S)


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:h|ms|m|s|us|\u00b5s|\u03bcs|ns))+", re.ASCII)
_DURATION_PART = re.compile(r"([0-9.]+)([a-z\u00b5\u03bc]+)", re.ASCII)
_MAX_HINT_CHARS = 64


def duration_s(text: str | None) -> float | None:
    """Seconds of a duration such as ``6m0s``, ``20ms`` or ``1h2m3.5s``, 0 to a day; a bare number is in seconds.

    The notation is Go's (https://pkg.go.dev/time#ParseDuration); some servers send bare seconds instead.
    """
    text = (text or "").strip()[:_MAX_HINT_CHARS]
    if _DURATION.fullmatch(text):
        seconds: float | None = sum(float(number) * _UNITS_S[unit] for number, unit in _DURATION_PART.findall(text))
    else:
        seconds = _seconds(text, 1.0)
    return None if seconds is None or seconds < 0 else min(seconds, MAX_HINT_S)


def _left(text: str | None) -> int | None:
    """What is left of a limit; servers without one send a negative number, which says nothing."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_HINT_CHARS else None


def pace_hints(headers: httpx.Headers, now: datetime) -> PaceHints:
    """What an answer says of how fast calls may follow; every header may be missing, and nonsense counts as missing.

    Names and forms: https://platform.openai.com/docs/guides/rate-limits (headers), and ``retry_after_s``.
    """
    return PaceHints(
        calls_left=_left(headers.get("x-ratelimit-remaining-requests")),
        calls_reset_s=duration_s(headers.get("x-ratelimit-reset-requests")),
        tokens_left=_left(headers.get("x-ratelimit-remaining-tokens")),
        tokens_reset_s=duration_s(headers.get("x-ratelimit-reset-tokens")),
        retry_after_s=retry_after_s(headers, now),
    )


class SendWatch:
    """Sees whether a request's first byte went out; its ``note`` is a ``trace`` extension of httpx.

    https://www.encode.io/httpcore/extensions/#trace: every event of a connection is named before it happens.
    """

    def __init__(self) -> None:
        self.has_sent = False

    async def note(self, event: str, _info: dict[str, Any]) -> None:
        """Take one event, such as ``http11.send_request_headers.started``."""
        if event.endswith("send_request_headers.started"):
            self.has_sent = True


def should_retry(headers: httpx.Headers) -> bool | None:
    """The server's ``x-should-retry``, or None when it says nothing."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", "").strip().lower())


class SkewMeter:
    """How far the provider's clock is ahead of ours: the median of the last few ``Date`` headers.

    ``Date`` is cut to whole seconds, so half a second is added; travel time makes the figure a little too small.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SKEW_SAMPLES)

    def note(self, headers: httpx.Headers, now: datetime) -> None:
        """Take an answer's ``Date``, read at ``now``; answers out of a cache are left out."""
        date = _http_date(headers.get("date"))
        if date is not None and "age" not in headers:
            self._samples.append((date + timedelta(seconds=0.5) - now).total_seconds())

    @property
    def skew_s(self) -> float | None:
        """Provider's clock minus ours; None before the first answer."""
        return median(self._samples) if self._samples else None


def same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    """Whether both addresses are the same scheme, host and port, so that a key for one is safe with the other."""
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def redirect_target(response: httpx.Response) -> httpx.URL:
    """Where a redirect leads.

    Raises:
        BadRedirect: no address, not HTTP, or from TLS to plain text.
    """
    try:
        target = response.url.join(response.headers["location"])
    except (KeyError, httpx.InvalidURL):
        raise BadRedirect from None
    if target.scheme not in {"http", "https"} or not target.host:
        raise BadRedirect
    if response.url.scheme == "https" and target.scheme == "http":
        raise BadRedirect
    return target


async def save_body(response: httpx.Response, to: Path, max_bytes: int) -> DownloadedFile:
    """Stream a body to ``to``: first to a hidden file beside it (0600), renamed when it is whole.

    Raises:
        AnswerCut: the connection ended before ``Content-Length`` bytes had come.
        AnswerTooLarge: there are more than ``max_bytes``.
        StoreUnavailable: the disk does not take it.
    """
    sink = await asyncio.to_thread(_Sink, to)
    try:
        async for chunk in response.aiter_bytes(DOWNLOAD_CHUNK_BYTES):
            if sink.size_bytes + len(chunk) > max_bytes:
                raise AnswerTooLarge
            await asyncio.to_thread(sink.write, chunk)
        promised = response.headers.get("content-length", "")
        is_plain = response.headers.get("content-encoding", "identity").lower() == "identity"
        if is_plain and promised.isdigit() and int(promised) != sink.size_bytes:
            raise AnswerCut
        return await asyncio.to_thread(sink.keep)
    finally:
        sink.drop()


class _Sink:
    """The file under construction. Its methods run in worker threads, one at a time but for ``drop``."""

    def __init__(self, to: Path) -> None:
        self._to = to
        self._part = to.with_name(f".{to.name}.{secrets.token_hex(4)}.part")
        self._lock = threading.Lock()  # a cancelled download may drop the file while a thread still writes
        self._sha = hashlib.sha256()
        self.size_bytes = 0
        try:
            self._file: int | None = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"cannot create a download file: {error.strerror}") from error

    def write(self, chunk: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            rest = memoryview(chunk)
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                raise StoreUnavailable(f"cannot write a download file: {error.strerror}") from error
            self._sha.update(chunk)
            self.size_bytes += len(chunk)

    def keep(self) -> DownloadedFile:
        with self._lock:
            assert self._file is not None
            try:
                os.close(self._file)
                self._file = None
                self._part.replace(self._to)
            except OSError as error:
                raise StoreUnavailable(f"cannot finish a download file: {error.strerror}") from error
        return DownloadedFile(self.size_bytes, self._sha.hexdigest())

    def drop(self) -> None:
        """Remove what was not kept; nothing to do after ``keep``."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._part.unlink(missing_ok=True)
