"""Offset sets behave like Python's sets of ints, at Kafka's size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.offsets import OffsetSet

offsets = st.one_of(
    st.integers(0, 40),
    st.integers(65_500, 65_600),
    st.integers((1 << 32) - 20, (1 << 32) + 20),
    st.integers(0, (1 << 63) - 1),
)

RELAXED = settings(deadline=None)
sets = st.sets(offsets, max_size=40)


@RELAXED
@given(sets, sets, offsets)
def test_the_algebra_is_that_of_sets(one: set[int], other: set[int], single: int):
    """Union, difference, intersection, comparison and membership agree with a set of ints."""
    left, right = OffsetSet(one), OffsetSet(other)
    assert set(left | right) == one | other
    assert set(left - right) == one - other
    assert set(left & right) == one & other
    assert left.isdisjoint(right) == one.isdisjoint(other)
    assert left.issubset(right) == one.issubset(other)
    assert (left == right) == (one == other)
    assert (single in left) == (single in one)
    assert len(left) == len(one)
    assert bool(left) == bool(one)
    assert list(left) == sorted(one)
    assert left.first() == min(one, default=None)
    assert left.last() == max(one, default=None)


@RELAXED
@given(sets, sets)
def test_changing_in_place_changes_one_set_only(one: set[int], other: set[int]):
    """``|=``, ``-=`` and the copies leave the other operand and the original alone."""
    kept, right = OffsetSet(one), OffsetSet(other)
    changed = kept.copy()
    changed |= right
    changed -= OffsetSet(one)
    assert set(changed) == other - one
    assert set(kept) == one
    assert set(right) == other


@RELAXED
@given(sets, offsets, offsets)
def test_spans_are_half_open(one: set[int], start: int, stop: int):
    """``start`` is in, ``stop`` is not; an empty or reversed span holds nothing."""
    held = OffsetSet(one)
    wanted = {offset for offset in one if start <= offset < stop}
    assert set(held.within(start, stop)) == wanted
    assert held.count_within(start, stop) == len(wanted)
    assert held.rank_below(start) == len({offset for offset in one if offset < start})
    held.discard_below(start)
    assert set(held) == {offset for offset in one if offset >= start}


def test_a_span_holds_its_offsets():
    """A span crosses the borders of containers and of 32 bits."""
    assert list(OffsetSet.span(65_534, 65_538)) == [65_534, 65_535, 65_536, 65_537]
    assert list(OffsetSet.span((1 << 32) - 1, (1 << 32) + 1)) == [(1 << 32) - 1, 1 << 32]
    assert not OffsetSet.span(5, 5)
    assert not OffsetSet.span(6, 5)


@RELAXED
@given(sets)
def test_runs_tile_the_set(one: set[int]):
    """The runs cover exactly the set, ascending, and no two of them touch."""
    runs = list(OffsetSet(one).ranges())
    assert {offset for start, stop in runs for offset in range(start, stop)} == one
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs))


@RELAXED
@given(sets)
def test_line_numbers_and_offsets_answer_each_other(one: set[int]):
    """The n-th offset has n smaller ones: line numbers in a sorted file map both ways."""
    held = OffsetSet(one)
    assert [held.nth(index) for index in range(len(one))] == sorted(one)
    assert [held.rank_below(offset) for offset in sorted(one)] == list(range(len(one)))
    with pytest.raises(IndexError):
        held.nth(len(one))


@RELAXED
@given(sets)
def test_what_is_written_is_read(one: set[int]):
    """A serialised set comes back equal."""
    assert OffsetSet.loads(OffsetSet(one).dumps()) == OffsetSet(one)


@settings(max_examples=300, deadline=None)
@given(sets.filter(bool), st.data())
def test_a_damaged_set_is_a_value_error(one: set[int], data: st.DataObject):
    """A cut or changed text is refused with ValueError, or read as some well-formed set; never anything else."""
    text = OffsetSet(one).dumps()
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:at] if data.draw(st.booleans()) else text[:at] + data.draw(st.sampled_from("Az09+/=!é")) + text[at + 1 :]
    )
    try:
        read = OffsetSet.loads(damaged)
    except ValueError:
        return
    assert read.last() is None or 0 <= read.last() < 1 << 64


@pytest.mark.parametrize("text", ["", "AAAA", "not base64", "=", "////////////"])
def test_no_set_at_all_is_a_value_error(text: str):
    """A text that never was an offset set is refused."""
    with pytest.raises(ValueError, match="not a serialised offset set"):
        OffsetSet.loads(text)


def test_sets_are_no_dictionary_keys():
    """A mutable set cannot be hashed, and is unequal to other types."""
    with pytest.raises(TypeError):
        hash(OffsetSet())
    assert OffsetSet([1]) != {1}
    assert repr(OffsetSet([3, 9])) == "OffsetSet(2 offsets in 3..9)"
    assert repr(OffsetSet()) == "OffsetSet()"
