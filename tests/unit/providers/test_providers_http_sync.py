from datetime import UTC, datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.provider import PaceHints
from batchferry.providers import http

NOW = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("20ms", 0.02),
        ("1m12.5s", 72.5),
        ("1h2m3s", 3723.0),
        ("59.56s", 59.56),
        ("7m12.000s", 432.0),
        ("1.5h", 5400.0),
        ("250us", 0.00025),
        ("250\u00b5s", 0.00025),
        ("10ns", 1e-8),
        (" 3s ", 3.0),
        ("30", 30.0),
        ("0", 0.0),
        ("0s", 0.0),
        ("48h", http.MAX_HINT_S),
        ("1e30", http.MAX_HINT_S),
        ("-1s", None),
        ("-1", None),
        ("1.2.3s", None),
        ("s", None),
        ("soon", None),
        ("5 m", None),
        ("\u0661s", None),
        ("nan", None),
        ("", None),
        (None, None),
    ],
)
def test_durations_are_read_in_every_form(text: str | None, seconds: float | None) -> None:
    """Go's notation and bare seconds are understood, everything else says nothing, and a day is the most."""
    read = http.duration_s(text)
    assert read == (None if seconds is None else pytest.approx(seconds))


@given(st.text(max_size=80))
def test_no_text_breaks_the_reading(text: str) -> None:
    """Any header gives a bounded duration, or none."""
    read = http.duration_s(text)
    assert read is None or 0.0 <= read <= http.MAX_HINT_S


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "", "\u0663", "9" * 65])
def test_what_is_left_is_a_number_or_nothing(text: str) -> None:
    """Servers that know no limit say -1, and that is no limit of none."""
    assert http.pace_hints(httpx.Headers([(b"x-ratelimit-remaining-requests", text.encode())]), NOW) == PaceHints()


def test_hints_without_headers_say_nothing() -> None:
    """A server that sends none of them gets no pace from us."""
    assert http.pace_hints(httpx.Headers(), NOW) == PaceHints()
