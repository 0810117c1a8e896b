"""Identifiers: the wire id must be lawful everywhere, and be read back or refused, never guessed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.ids import (
    LEDGER_ID_ALPHABET,
    LEDGER_ID_LENGTH,
    MAX_WIRE_ID_CHARS,
    LedgerId,
    WireId,
    new_batch_id,
    new_ledger_id,
    parse_wire_id,
)

LEDGER = LedgerId("0123456789")

wire_ids = st.builds(
    WireId,
    st.text(LEDGER_ID_ALPHABET, min_size=LEDGER_ID_LENGTH, max_size=LEDGER_ID_LENGTH).map(LedgerId),
    st.integers(0, 99_999),
    st.integers(0, (1 << 53) - 1),
    st.integers(1, 9_999),
)

RELAXED = settings(deadline=None)


@RELAXED
@given(wire_ids)
def test_a_wire_id_is_read_back_as_it_was_made(wire: WireId):
    """Every wire id is read back part for part."""
    assert parse_wire_id(str(wire)) == wire


@RELAXED
@given(wire_ids)
def test_a_wire_id_is_lawful_at_every_provider(wire: WireId):
    """At most 40 characters of ``[A-Za-z0-9-]``, up to partition 99,999, offset 2^53 and submission 9,999."""
    assert len(str(wire)) <= MAX_WIRE_ID_CHARS
    assert re.fullmatch(r"[A-Za-z0-9-]+", str(wire))


@RELAXED
@given(wire_ids, wire_ids)
def test_two_wire_ids_never_collide(one: WireId, other: WireId):
    """Two rows share a wire id only if they are the same submission of the same row of the same ledger."""
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r1",
        "0123456789-0-0-0",  # submissions begin at 1
        "0123456789-0-0",
        "0123456789-0-0-1-1",
        "0123456789-00-0-1",  # one row, one spelling
        "0123456789-0-07-1",
        "0123456789-0-0-01",
        "0123456789--1-0-1",
        "012345678-0-0-1",
        "01234567890-0-0-1",
        "012345678O-0-0-1",
        "0123456789-0-0-1\n",
        " 0123456789-0-0-1",
        "0123456789-٣-0-1",  # a digit, though not an ASCII one
        "0123456789-0-" + "9" * 20 + "-1",
    ],
)
def test_what_is_not_ours_is_not_read(text: str):
    """A text that is not exactly a wire id is nobody's, however close it comes."""
    assert parse_wire_id(text) is None


@RELAXED
@given(st.text(max_size=60))
def test_any_text_can_be_asked_about(text: str):
    """Parsing never raises, and what it accepts is spelled the way we spell it."""
    wire = parse_wire_id(text)
    assert wire is None or str(wire) == text


def test_ledger_ids_are_drawn_anew():
    """Ledger ids differ from one another and can stand in a wire id."""
    drawn = {new_ledger_id() for _ in range(200)}
    assert len(drawn) == 200
    assert all(parse_wire_id(str(WireId(one, 0, 0, 1))) for one in drawn)


def test_batch_ids_sort_by_their_time():
    """A later batch has the greater id, from one millisecond to the next."""
    ids = [new_batch_id(1_750_000_000.0 + step / 1000) for step in range(50)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 50
    assert all(len(one) == 26 for one in ids)


def test_whole_seconds_are_seconds():
    """A batch id made from an int names the same time as one made from the float of the same value."""
    assert new_batch_id(1_750_000_000)[:10] == new_batch_id(1_750_000_000.0)[:10]
