"""When a record must leave, when its answer is due, and whether a route's promise can be kept at all.

The whole arithmetic of deadlines is here::

    t0       = min(record timestamp, first reading)
    deadline = t0 + SLA
    ship_by  = min(deadline - completion window - margin, t0 + max wait)

so a record waits at most ``SLA - window - margin`` (30 h - 24 h - 2 h = 4 h) for its batch to leave, and its
answer is there after ``wait + window`` (28 h) at worst; the margin is what is left for noticing, cancelling,
fetching and rescuing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import isodate

HOUR_S = 3600.0

CANCEL_S = 600.0
"""How long a provider may take to cancel a batch: OpenAI documents up to ten minutes."""
DOWNLOAD_S = 600.0
"""Two result files of 200 MB over a line of about 5 Mbit/s."""
RESCUE_LEAD_S = 1800.0
"""Time kept for sending the rows of one batch again without a batch."""

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "w": 168 * HOUR_S}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d|w)\s*")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)
_LAST = datetime.max.replace(microsecond=999_000, tzinfo=UTC)


def parse_duration_s(text: str) -> float:
    """Seconds of ``30h``, ``1h 30m``, ``1.5d``, ISO 8601 ``PT30H`` or a plain number of seconds.

    Raises:
        ValueError: not a duration, negative, or of no fixed length (ISO months and years).
    """
    stripped = text.strip()
    try:
        seconds = float(stripped)
    except ValueError:
        seconds = _duration_with_units_s(stripped)
    if not 0 <= seconds < float("inf"):
        raise ValueError("a duration is a finite number of seconds, 0 or more")
    return seconds


def _duration_with_units_s(text: str) -> float:
    if _DURATION.fullmatch(text.lower()):
        return sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text.lower()))
    if text[:1] in {"P", "p"} and text[-1:] not in {"T", "t"}:  # the library takes "PT" for no time at all
        try:
            duration = isodate.parse_duration(text.upper())
        except (isodate.ISO8601Error, ValueError, OverflowError):
            duration = None
        if isinstance(duration, timedelta):
            return duration.total_seconds()
    raise ValueError("not a duration: write a number with its unit, like '90s', '30m', '24h' or '7d', or ISO 'PT24H'")


def parse_window_s(text: str) -> float:
    """Seconds of a completion window as providers write it: ``24h``, ``1h``, ``168h``, ``7d``.

    Raises:
        ValueError: not a window, or shorter than a minute.
    """
    seconds = parse_duration_s(text)
    if seconds < _UNIT_S["m"]:
        raise ValueError("a completion window lasts a minute at least; write it with its unit, like '24h'")
    return seconds


def from_ms(milliseconds: int) -> datetime:
    """The instant of a Kafka timestamp (milliseconds since the epoch); what no calendar year holds is cut to 1 or 9999.

    A timestamp is whatever the producer wrote, and no outcome may fail to be rendered for it.
    """
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return _LAST if milliseconds > 0 else _FIRST


def to_ms(instant: datetime) -> int:
    """Milliseconds since the epoch, rounded down."""
    return (instant - _EPOCH) // timedelta(milliseconds=1)


def hours(seconds: float) -> str:
    """A length of time for people: ``4 h``, ``1 h 30 min``, ``55 min``, ``-2 h``, ``45 s``."""
    sign = "-" if seconds < 0 else ""
    whole_s = round(abs(seconds))
    if whole_s < _UNIT_S["m"]:
        return f"{sign}{whole_s} s"
    whole_minutes, rest_s = divmod(whole_s, 60)
    whole_hours, minutes = divmod(whole_minutes, 60)
    parts = [(whole_hours, "h"), (minutes, "min"), (rest_s, "s")]
    return sign + " ".join(f"{number} {unit}" for number, unit in parts if number)


class RecordTimes(NamedTuple):
    """The instants of one record, milliseconds since the epoch."""

    t0_ms: int
    ship_by_ms: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class WaitPlan:
    """What a route promises and how it divides that time. All lengths in seconds."""

    sla_s: float
    window_s: float
    margin_s: float
    max_wait_s: float
    """Longest wait of a record for its batch to leave: the formula's, or the operator's shorter one."""

    @property
    def formula_wait_s(self) -> float:
        """``SLA - window - margin``; zero or less when the promise cannot be kept."""
        return self.sla_s - self.window_s - self.margin_s

    @property
    def worst_case_s(self) -> float:
        """When the provider ends its batch at the latest, counted from ``t0``."""
        return self.max_wait_s + self.window_s

    @property
    def sum_text(self) -> str:
        """The formula with its numbers, for people."""
        return wait_sum(self.sla_s, self.window_s, self.margin_s)

    def times(self, t0_ms: int, *, sla_s: float | None = None, deadline_ms: int | None = None) -> RecordTimes:
        """The instants of a record that began waiting at ``t0_ms``.

        A record's own ``sla_s`` or ``deadline_ms`` (the instant wins) takes the place of the route's SLA.
        ``ship_by`` may lie before ``t0``: such a record leaves at once, and may be late (``is_late``).
        """
        if deadline_ms is None:
            deadline_ms = t0_ms + _ms(self.sla_s if sla_s is None else sla_s)
        ship_by_ms = min(deadline_ms - _ms(self.window_s + self.margin_s), t0_ms + _ms(self.max_wait_s))
        return RecordTimes(t0_ms, ship_by_ms, deadline_ms)

    def is_late(self, now_ms: int, deadline_ms: int, rescue_lead_s: float = RESCUE_LEAD_S) -> bool:
        """Whether a batch created now could end too late for the deadline, the time for a rescue included.

        ``ship_by`` says nothing about lateness: after a crash at the threshold the head of a batch is past
        its ``ship_by`` and still in time, by what the margin holds beyond the rescue lead.
        """
        return now_ms + _ms(self.window_s + rescue_lead_s) > deadline_ms


def plan_waits(sla_s: float, window_s: float, margin_s: float, max_wait_s: float | None = None) -> WaitPlan:
    """The plan of a route; an operator's ``max_wait_s`` only ever shortens the wait.

    Whether the plan can be kept is for ``check_route`` to say: this never refuses.
    """
    formula_s = sla_s - window_s - margin_s
    return WaitPlan(sla_s, window_s, margin_s, formula_s if max_wait_s is None else min(max_wait_s, formula_s))


def first_seen_ms(record_ms: int, first_read_ms: int) -> int:
    """``t0``: when the record began to wait, the smaller of its timestamp and our first reading of it.

    A negative timestamp means that the record has none.
    """
    return first_read_ms if record_ms < 0 else min(record_ms, first_read_ms)


def wait_sum(sla_s: float, window_s: float, margin_s: float) -> str:
    """``SLA 30 h - completion window 24 h - margin 2 h = 4 h``."""
    return (
        f"SLA {hours(sla_s)} - completion window {hours(window_s)} - margin {hours(margin_s)}"
        f" = {hours(sla_s - window_s - margin_s)}"
    )


def check_route(
    *,
    sla_s: float,
    window_s: float,
    margin_s: float,
    max_wait_s: float | None,
    poll_cap_s: float,
    cancel_s: float = CANCEL_S,
    download_s: float = DOWNLOAD_S,
    rescue_lead_s: float = RESCUE_LEAD_S,
) -> list[str]:
    """Everything that makes this route's promise impossible, each with the sum written out and the remedy.

    The margin must hold what can still happen after the completion window: noticing it (``poll_cap_s``, the
    longest pause between two polls), cancelling, downloading, and running what is missing another way. An
    empty list means that the promise can be kept.
    """
    faults: list[str] = []
    wait_s = sla_s - window_s - margin_s
    sum_text = wait_sum(sla_s, window_s, margin_s)
    if wait_s <= 0:
        faults.append(
            f"no time is left to gather a batch: {sum_text}; "
            f"make the SLA longer than {hours(window_s + margin_s)}, or take an account with a shorter window"
        )
    elif max_wait_s is not None and max_wait_s > wait_s:
        faults.append(
            f"max_wait_s of {hours(max_wait_s)} is longer than the SLA allows: {sum_text}; "
            f"set max_wait_s to {hours(wait_s)} or less, or leave it out"
        )
    needed_s = poll_cap_s + cancel_s + download_s + rescue_lead_s
    if margin_s < needed_s:
        faults.append(
            f"the margin of {hours(margin_s)} does not hold what it must: poll cap {hours(poll_cap_s)}"
            f" + cancel {hours(cancel_s)} + download {hours(download_s)} + rescue lead {hours(rescue_lead_s)}"
            f" = {hours(needed_s)}; set margin_s to {hours(needed_s)} or more"
        )
    return faults


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
