"""Holds, flushes and cancel wishes: states with a time, so that twice is once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import (
    CanaryVerdict,
    CancelWish,
    ControlEntry,
    ControlState,
    Flush,
    Hold,
    Lifted,
    Poke,
    RescueWish,
    SweepWish,
    TokenLimit,
    account_scope,
    decode,
    encode,
    hold_key,
    key_scope,
    shape_scope,
)
from batchferry.domain.ids import BatchId, ProviderBatchId

NOW = datetime(2026, 1, 31, 18, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
KEY = BatchKey("openai-main", "/v1/chat/completions", "gpt-4o-mini", "24h")
OTHER = KEY._replace(model="gpt-4.1")
ELSEWHERE = KEY._replace(account="openai-second")

instants = st.integers(0, 4_000_000_000_000).map(
    lambda ms: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
)

RELAXED = settings(deadline=None)
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=12)
entries: st.SearchStrategy[ControlEntry] = st.one_of(
    st.builds(
        Hold,
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).map(account_scope),
            st.just(key_scope(KEY)),
        ),
        plain,
        instants,
        st.none() | instants,
        st.integers(1, 99),
        plain | st.just(""),
    ),
    st.builds(Flush, plain, instants),
    st.builds(SweepWish, plain, instants),
    st.builds(CancelWish, plain.map(BatchId), st.sampled_from(["fail", "requeue", "hold"]), instants),
    st.builds(RescueWish, plain.map(BatchId), instants),
    st.builds(
        TokenLimit,
        plain,
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.integers(1, 2**53),
        instants,
    ),
    st.builds(CanaryVerdict, plain, st.booleans(), st.integers(0, 999), st.integers(0, 999), instants),
    st.builds(Poke, plain.map(ProviderBatchId), instants),
)


def state_of(*entries: ControlEntry) -> ControlState:
    """The state after these records."""
    state = ControlState()
    for entry in entries:
        state.apply(entry)
    return state


@RELAXED
@given(entries)
def test_what_is_written_is_read(entry: ControlEntry):
    """Every control record comes back equal, also for accounts with a slash in their name."""
    assert decode(*encode(entry)) == entry


@RELAXED
@given(entries)
def test_every_record_ends_by_its_own_key(entry: ControlEntry):
    """A tombstone under the record's key lifts it, and nothing stays."""
    key, _ = encode(entry)
    lifted = decode(key, None)
    assert lifted == Lifted(key.decode())
    assert encode(lifted) == (key, None)
    assert state_of(entry, lifted) == ControlState()


@RELAXED
@given(st.lists(entries, max_size=6))
def test_every_record_twice_is_once(several: list[ControlEntry]):
    """Records are states: each of them applied twice in a row leads to the same."""
    assert state_of(*several) == state_of(*(entry for entry in several for _ in range(2)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"hold/account:a/why", b"{"),
        (b"hold/account:a/why", b"[]"),
        (b"hold/account:a/why", b"{}"),
        (b"hold/account:a/why", b'{"since":"soon"}'),
        (b"hold/account:a/why", b'{"since":1e400}'),
        (b"hold/account:a/why", b'{"since":99999999999999999999}'),
        (b"hold/account:a/why", b'{"since":0,"until":1e300}'),
        (b"hold/account:a/why", b'{"since":0,"times":"often"}'),
        (b"flush/x", b"{}"),
        (b"cancel/x", b'{"at":0}'),
        (b"sweep/all", b"{}"),
        (b"limit/a/m", b"{}"),
        (b"limit/a/m", b'{"tokens":"many","at":0}'),
        (b"canary/s", b'{"good":true,"rows":1,"at":0}'),
        (b"rescue/b", b"{}"),
        (b"poke/b", b'{"at":"now"}'),
        (b"\xff", b"{}"),
        (b"\xff", None),
        (b"", b"{}"),
    ],
)
def test_what_cannot_be_read_is_passed_over(key: bytes, value: bytes | None):
    """A damaged or newer wish is ignored: it holds no fact about a row, and must stop nobody."""
    assert decode(key, value) is None


@RELAXED
@given(st.binary(max_size=20), st.none() | st.binary(max_size=30))
def test_nothing_in_the_topic_stops_a_reader(key: bytes, value: bytes | None):
    """Whatever bytes are in the control topic, reading them never raises, nor does applying what was read."""
    entry = decode(key, value)
    if entry is not None:
        ControlState().apply(entry)


def test_a_scope_is_held_while_any_reason_stands():
    """Lifting one reason does not lift another: a quota release cannot undo an operator's hold."""
    quota = Hold(account_scope("openai-main"), "quota", NOW)
    operator = Hold(account_scope("openai-main"), "operator", NOW)
    state = state_of(quota, operator)
    assert state.standing(KEY, NOW) == [quota, operator]
    state.apply(Lifted(hold_key(quota)))
    assert state.standing(KEY, NOW) == [operator]
    state.apply(Lifted(hold_key(operator)))
    assert state.standing(KEY, NOW) == []


def test_an_account_hold_holds_all_its_keys_and_a_key_hold_only_one():
    """Scopes reach exactly as far as they say."""
    account, key = Hold(account_scope("openai-main"), "quota", NOW), Hold(key_scope(KEY), "alarm", NOW)
    assert state_of(account).standing(OTHER, NOW) == [account]
    assert state_of(account).standing(ELSEWHERE, NOW) == []
    assert state_of(key).standing(KEY, NOW) == [key]
    assert state_of(key).standing(OTHER, NOW) == []
    assert state_of(key).standing(KEY._replace(slice="x"), NOW) == []


def test_a_hold_lifts_by_itself_when_its_time_is_over():
    """A hold stands before its time and not at it; the record is still there for its owner to end."""
    hold = Hold(account_scope("openai-main"), "quota", NOW, until=NOW + MINUTE)
    forever = Hold(key_scope(KEY), "operator", NOW)
    state = state_of(hold, forever)
    assert state.standing(KEY, NOW + MINUTE - timedelta(milliseconds=1)) == [hold, forever]
    assert state.standing(KEY, NOW + MINUTE) == [forever]
    assert state.expired(NOW) == []
    assert state.expired(NOW + MINUTE) == [hold]
    assert list(state.all_standing(NOW)) == [hold, forever]
    assert list(state.all_standing(NOW + MINUTE)) == [forever]


def test_the_same_reason_again_replaces_the_hold():
    """A reason that comes back carries its number of times and its new end."""
    first = Hold(account_scope("a"), "quota", NOW, NOW + MINUTE)
    again = Hold(account_scope("a"), "quota", NOW + MINUTE, NOW + 3 * MINUTE, times=2)
    state = state_of(first, again)
    assert list(state.all_standing(NOW + MINUTE)) == [again]
    assert state_of(first, again, first) == state_of(first)


def test_flushes_and_cancel_wishes_are_kept_by_what_they_concern():
    """The newest flush of a key and the newest wish of a batch count, until they are lifted."""
    state = state_of(
        Flush(KEY.digest, NOW),
        Flush(KEY.digest, NOW + MINUTE),
        CancelWish(BatchId("B1"), "requeue", NOW),
        CancelWish(BatchId("B2"), "fail", NOW),
        Lifted("cancel/B2"),
        Lifted("flush/unknown"),
        Lifted("something/else"),
    )
    assert state.flushes == {KEY.digest: Flush(KEY.digest, NOW + MINUTE)}
    assert state.cancels == {BatchId("B1"): CancelWish(BatchId("B1"), "requeue", NOW)}


def test_a_kind_of_prompt_is_held_without_its_key():
    """Other prompts of the key go on; whoever asks for the key alone does not see it."""
    shape, key = Hold(shape_scope("f00d"), "canary_bad", NOW), Hold(key_scope(KEY), "alarm", NOW)
    state = state_of(shape)
    assert state.standing(KEY, NOW) == state.standing(KEY, NOW, "beef") == []
    assert state.standing(KEY, NOW, "f00d") == [shape]
    assert state_of(shape, key).standing(KEY, NOW, "f00d") == [shape, key]


def test_a_bad_verdict_beats_a_good_one_until_it_is_lifted():
    """Two replicas may both sample: whichever record comes last, rows of a bad prompt do not go."""
    good, bad = CanaryVerdict("f00d", True, 50, 1, NOW), CanaryVerdict("f00d", False, 50, 40, NOW)
    assert state_of(good, bad).canaries == state_of(bad, good).canaries == {"f00d": bad}
    assert state_of(bad, Lifted("canary/f00d"), good).canaries == {"f00d": good}


def test_limits_wishes_and_pokes_are_kept_by_what_they_concern():
    """A model may have a slash in its name; the newest record of each counts."""
    limit = TokenLimit("a", "meta/llama-3", 5_000, NOW)
    newer = TokenLimit("a", "meta/llama-3", 4_000, NOW + MINUTE)
    state = state_of(
        limit,
        newer,
        TokenLimit("a", "other", 1, NOW),
        Lifted("limit/a/other"),
        RescueWish(BatchId("B1"), NOW),
        Poke(ProviderBatchId("p1"), NOW),
        Poke(ProviderBatchId("p1"), NOW + MINUTE),
    )
    assert state.limits == {("a", "meta/llama-3"): newer}
    assert state.rescues == {BatchId("B1"): RescueWish(BatchId("B1"), NOW)}
    assert state.pokes == {ProviderBatchId("p1"): Poke(ProviderBatchId("p1"), NOW + MINUTE)}
