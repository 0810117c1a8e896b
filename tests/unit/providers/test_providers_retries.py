from random import Random

import pytest

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.providers.retries import _PAUSES_S, DEFAULT_RETRIES, Call, CallRetries

STEADY = CallRetries(jitter=0.0)


def pause(call, kind, tries=1, elapsed_s=0.0, should_retry=None, retry_after_s=None, retries=STEADY):
    """The pause after a failure."""
    failed = CallFailed(call, kind, retry_after_s=retry_after_s)
    return retries.pause_before_next(failed, tries, elapsed_s, should_retry, Random(1))


@pytest.mark.parametrize("kind", list(CallFailure))
@pytest.mark.parametrize("should_retry", [None, True, False])
def test_create_is_never_repeated(kind, should_retry):
    """No failure and no server hint makes a create go out twice."""
    assert pause(Call.CREATE, kind, should_retry=should_retry) is None


def test_pauses_grow_to_a_limit_of_tries():
    """An upload that keeps breaking pauses 1, 2, 4, 8, 16 s and then gives up."""
    pauses = [pause(Call.UPLOAD, CallFailure.UNAVAILABLE, tries) for tries in range(1, 8)]
    assert pauses == [1, 2, 4, 8, 16, None, None]


@pytest.mark.parametrize(
    "kind", [CallFailure.ACCOUNT, CallFailure.REJECTED, CallFailure.NOT_FOUND, CallFailure.CONFLICT]
)
@pytest.mark.parametrize("call", list(Call))
def test_refusals_are_final(call, kind):
    """What will be refused again is not asked again."""
    assert pause(call, kind) is None


def test_a_throttled_poll_is_handed_up_at_once():
    """The account's shared back-off decides about polls, not the call."""
    assert pause(Call.RETRIEVE, CallFailure.THROTTLED, retry_after_s=1) is None


def test_the_servers_hint_is_a_lower_bound():
    """A Retry-After above the table's pause is obeyed, one below does not shorten it."""
    assert pause(Call.UPLOAD, CallFailure.THROTTLED, retry_after_s=30) == 30
    assert pause(Call.UPLOAD, CallFailure.THROTTLED, retry_after_s=0.1) == 2


def test_a_hint_of_more_than_two_minutes_ends_the_tries():
    """A call does not sit out a long pause: the caller learns the server's wish instead."""
    assert pause(Call.UPLOAD, CallFailure.THROTTLED, retry_after_s=120) == 120
    assert pause(Call.UPLOAD, CallFailure.THROTTLED, retry_after_s=121) is None


def test_x_should_retry_overrules_the_table():
    """A "false" stops a retry of the table; a "true" allows a few where the table has none."""
    assert pause(Call.UPLOAD, CallFailure.UNAVAILABLE, should_retry=False) is None
    assert pause(Call.RETRIEVE, CallFailure.CONFLICT, should_retry=True) == 1
    assert pause(Call.RETRIEVE, CallFailure.CONFLICT, tries=3, should_retry=True) is None


def test_the_budget_ends_the_tries():
    """No try begins after the call's budget, whatever the table says."""
    assert pause(Call.LIST, CallFailure.UNAVAILABLE, elapsed_s=58.9) == 1
    assert pause(Call.LIST, CallFailure.UNAVAILABLE, elapsed_s=59.1) is None


def test_jitter_only_ever_lengthens():
    """A pause with jitter lies between the table's and a quarter more."""
    got = pause(Call.UPLOAD, CallFailure.UNAVAILABLE, tries=3, retries=DEFAULT_RETRIES)
    assert 4 < got <= 5


def test_every_line_of_the_table_has_a_budget():
    """A line without a budget would never be used."""
    assert {call for call, _ in _PAUSES_S} <= set(DEFAULT_RETRIES.budget_s)
    assert Call.CREATE not in DEFAULT_RETRIES.budget_s
