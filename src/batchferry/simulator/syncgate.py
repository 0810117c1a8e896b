"""What the synchronous endpoints take: calls and tokens a minute, calls at one time, outages; all by script.

Limits are buckets that fill evenly and hold a minute's worth, one for each project and model, full at the start of
the simulator. Headers, texts and codes are those of https://platform.openai.com/docs/guides/rate-limits; a refused
call is not run, not billed, and takes nothing from a bucket.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from typing import Literal

from batchferry.simulator.clock import VirtualClock
from batchferry.simulator.errors import Refused, envelope
from batchferry.simulator.scenario import Scenario

_MINUTE_S = 60.0
_ORGANIZATION = "org-simulated"
Kind = Literal["requests", "tokens"]
_SHORT: dict[Kind, str] = {"requests": "RPM", "tokens": "TPM"}


@dataclass(slots=True)
class _Bucket:
    """A limit a minute, with what is left of it."""

    limit: int
    left: float
    at: float

    def fill(self, now: float) -> None:
        self.left = min(self.left + (now - self.at) * self.limit / _MINUTE_S, float(self.limit))
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until ``amount`` is there; infinite when it never will be."""
        if amount > self.limit:
            return math.inf
        # A level that was filled bit by bit may be a billionth short.
        return max(amount - self.left - 1e-9, 0.0) * _MINUTE_S / self.limit

    @property
    def reset_s(self) -> float:
        """Seconds until it is full again."""
        return (self.limit - self.left) * _MINUTE_S / self.limit


class SyncGate:
    """Lets calls in or refuses them. Its outages count from the moment it was made."""

    def __init__(self, scenario: Scenario, clock: VirtualClock) -> None:
        self._script = scenario.sync
        self._ahead_s = scenario.clock_ahead_s
        self._clock = clock
        self._started = clock.timestamp()
        self._buckets: dict[tuple[str, str, Kind], _Bucket] = {}
        self.under_way = 0
        self.most_under_way = 0
        self.throttled = 0
        """Calls refused with 429."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A call is under way.

        Raises:
            Refused: an outage, or too many at one time.
        """
        elapsed_s = self._clock.timestamp() - self._started
        for outage in self._script.outages:
            if outage.start_s <= elapsed_s < outage.start_s + outage.for_s:
                hint = {} if outage.retry_after_s is None else self._retry_after(outage.retry_after_s)
                raise _refused(outage.status, "The server is currently unable to answer.", hint)
        most = self._script.concurrent_calls
        if most is not None and self.under_way >= most:
            raise _refused(503, "The server is overloaded or not ready yet.", {})
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            yield
        finally:
            self.under_way -= 1

    def admit(self, project: str, model: str, tokens: int) -> dict[str, str]:
        """Take a call and its tokens from their limits; the headers of its answer.

        Raises:
            Refused: 429.
        """
        now = self._clock.timestamp()
        wanted: dict[Kind, int] = {"requests": 1, "tokens": tokens}
        limits: dict[Kind, int | None] = {
            "requests": self._script.calls_per_minute,
            "tokens": self._script.tokens_per_minute,
        }
        buckets: dict[Kind, _Bucket] = {}
        for kind, limit in limits.items():
            if limit is not None:
                bucket = self._buckets.setdefault((project, model, kind), _Bucket(limit, float(limit), now))
                bucket.fill(now)
                buckets[kind] = bucket
        for kind, bucket in buckets.items():
            wait_s = bucket.wait_s(wanted[kind])
            if wait_s > 0:
                self.throttled += 1
                raise self._too_fast(kind, model, bucket, wanted[kind], wait_s, _headers(buckets))
        for kind, bucket in buckets.items():
            bucket.left -= wanted[kind]
        return _headers(buckets)

    def _too_fast(
        self, kind: Kind, model: str, bucket: _Bucket, wanted: int, wait_s: float, headers: dict[str, str]
    ) -> Refused:
        about = f"{model} in organization {_ORGANIZATION} on {kind} per min ({_SHORT[kind]}): Limit {bucket.limit}, "
        if wait_s == math.inf:
            message = f"Request too large for {about}Requested {wanted}. The input or output tokens must be reduced."
        else:
            used = bucket.limit - math.floor(bucket.left)
            message = f"Rate limit reached for {about}Used {used}, Requested {wanted}. "
            message += f"Please try again in {_duration(wait_s)}."
            headers = headers | self._retry_after(wait_s)
        return Refused(429, message, error_type=kind, code="rate_limit_exceeded", headers=headers)

    def _retry_after(self, wait_s: float) -> dict[str, str]:
        match self._script.retry_after:
            case "seconds":
                return {"retry-after": str(math.ceil(wait_s))}
            case "milliseconds":
                return {"retry-after-ms": str(math.ceil(wait_s * 1000)), "retry-after": str(math.ceil(wait_s))}
            case "date":
                until = math.ceil(self._clock.timestamp() + self._ahead_s + wait_s)
                return {"retry-after": formatdate(until, usegmt=True)}
            case "none":
                return {}


def _refused(status: int, message: str, headers: dict[str, str]) -> Refused:
    error = envelope(status, message)["error"]
    return Refused(status, message, error_type=error["type"], code=error["code"], headers=headers)


def _headers(buckets: dict[Kind, _Bucket]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for kind, bucket in buckets.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(math.floor(bucket.left))
        headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.reset_s)
    return headers


def _duration(seconds: float) -> str:
    """A duration in Go's notation, to a millisecond: ``6m0s``, ``1.5s``, ``20ms``."""
    millis = math.ceil(seconds * 1000 - 1e-6)
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    shown = f"{rest / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + shown
