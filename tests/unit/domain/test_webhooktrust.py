"""When webhooks are trusted to stretch polling, when not, and when their refusal is an alarm."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from batchferry.domain import webhooktrust as w

T0 = datetime(2026, 3, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """An instant."""
    return T0 + timedelta(seconds=seconds)


def end(trust: w.WebhookTrust, name: str, start_s: float, *, was_told: bool = True) -> None:
    """One batch that ends at ``start_s``; its webhook comes two seconds later or never; the poll, at ten or long after."""
    if was_told:
        trust.told(name, at(start_s + 2))
    trust.found_ended(name, at(start_s + (10 if was_told else 600)), at(start_s))


def proven(ends: int = w.FULL_STREAK) -> w.WebhookTrust:
    """An account whose webhooks all came, one batch a quarter of an hour."""
    trust = w.WebhookTrust()
    for number in range(ends):
        end(trust, f"b{number}", 900.0 * number)
    return trust


def test_trust_grows_with_each_end_that_was_told():
    """Nothing before three, then more with each, the whole with ten."""
    seen = [round(proven(ends).stretch(at(900 * ends)), 2) for ends in range(12)]
    assert seen == [1.0, 1.0, 1.0, 1.38, 1.75, 2.12, 2.5, 2.88, 3.25, 3.62, 4.0, 4.0]


def test_a_webhook_that_did_not_come_ends_the_stretch_at_once():
    """The poll that finds the end long after it makes the factor 1; ten more ends are needed for the whole again."""
    trust = proven()
    end(trust, "lost", 9000, was_told=False)
    assert trust.stretch(at(9600)) == 1.0
    for number in range(2):
        end(trust, f"c{number}", 10_000 + 900 * number)
        assert trust.stretch(at(10_900 + 900 * number)) == 1.0
    end(trust, "c2", 12_000)
    assert 1.0 < trust.stretch(at(12_100)) < 1.5


def test_a_poll_that_is_quicker_than_the_webhook_proves_nothing_yet():
    """For a minute after the end the webhook may come and counts; after that it is missing, and coming late helps not."""
    in_time, late = proven(), proven()
    for trust in (in_time, late):
        trust.found_ended("quick", at(9001), at(9000))
        assert trust.stretch(at(9059)) == 4.0
    in_time.told("quick", at(9059))
    assert in_time.stretch(at(9100)) == 4.0
    assert late.stretch(at(9060)) == 1.0
    late.told("quick", at(9061))
    assert late.stretch(at(9061)) == 1.0


def test_without_the_providers_instant_the_finding_counts_for_the_end():
    """As it does when the provider's clock is ahead of ours."""
    for ended_at in (None, at(99_000)):
        trust = proven()
        trust.found_ended("quick", at(9001), ended_at)
        assert trust.stretch(at(9060)) == 4.0
        assert trust.stretch(at(9061)) == 1.0


def test_news_of_a_batch_that_still_runs_is_not_its_end():
    """A gateway that tells progress only is not trusted with ends."""
    trust = w.WebhookTrust()
    for number in range(20):
        trust.told(f"b{number}", at(100 * number))
        trust.found_running(f"b{number}", at(100 * number + 10))
        trust.found_ended(f"b{number}", at(100 * number + 90), at(100 * number + 20))
    assert trust.told_share(at(2100)) == 0.0
    assert trust.stretch(at(2100)) == 1.0


def test_a_poll_that_was_under_way_when_the_webhook_came_does_not_deny_it():
    """Its answer tells of the time it was asked at."""
    trust = w.WebhookTrust()
    trust.told("b", at(100))
    trust.found_running("b", at(99))
    trust.found_ended("b", at(110), at(98))
    assert trust.told_share(at(110)) == 1.0


def test_what_is_long_ago_proves_nothing():
    """Two days without an end: back to 1."""
    trust = proven()
    last = 900.0 * (w.FULL_STREAK - 1) + 10
    assert trust.stretch(at(last + w.LATELY_S - 9000)) > 1.0
    assert trust.stretch(at(last + w.LATELY_S)) == 1.0
    assert trust.told_share(at(last + w.LATELY_S)) is None


def test_a_batch_ends_once_and_one_that_is_forgotten_expects_nothing():
    """A second finding, and the end of a batch that we cancelled, are no missing webhooks."""
    trust = proven()
    trust.found_ended("b0", at(9000), at(0))
    trust.forget("ours", at(9000))
    trust.found_ended("ours", at(9000), at(8000))
    trust.found_ended("gone", at(9000), at(9000))
    trust.forget("gone", at(9001))
    assert trust.stretch(at(9900)) == 4.0


def test_a_share_of_four_fifths_is_too_little():
    """An account of whose webhooks every fifth is lost is polled as if there were none."""
    trust = w.WebhookTrust()
    for number in range(20):
        end(trust, f"b{number}", 900.0 * number, was_told=number % 5 != 0)
    assert trust.told_share(at(18_000)) == 0.8
    assert trust.stretch(at(18_000)) == 1.0


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """The oldest is given up first; an end that is given up counts as not told."""
    monkeypatch.setattr(w, "MAX_BATCHES", 3)
    trust = proven()
    for number in range(4):
        trust.found_ended(f"c{number}", at(9000), at(9000))
    assert trust.stretch(at(9000)) == 1.0
    for number in range(1000):
        trust.told(f"d{number}", at(9000))
    assert len(trust._told) == len(trust._ended) == 3


@pytest.mark.parametrize("given", [{"ceiling": 0.5}, {"ceiling": 4.1}, {"grace_s": -1}, {"lately_s": 0}])
def test_bounds_of_trust_are_checked(given: dict[str, float]):
    """A stretch below 1 or above 4 does not exist."""
    with pytest.raises(ValueError, match="ceiling"):
        w.WebhookTrust(**given)


def test_the_alarm_needs_refusals_in_a_row_and_quiet():
    """The fifth in a row is one if nothing was taken for a quarter of an hour, and none before."""
    alarm = w.RefusalAlarm(0.0)
    assert [alarm.refused(100.0, "x") for _ in range(20)] == [None] * 20
    assert alarm.refused(899.0, "x") is None
    assert alarm.refused(900.0, "x") == "x"
    assert alarm.is_raised
    few = w.RefusalAlarm(0.0)
    assert [few.refused(5000.0, "x") for _ in range(5)] == [None, None, None, None, "x"]


def test_an_alarm_names_the_commonest_reason_and_comes_again_each_hour():
    """Not with every refusal, and not any more once a delivery is taken."""
    alarm = w.RefusalAlarm(0.0, rejected=3)
    assert [alarm.refused(1000.0 + n, why) for n, why in enumerate("abb")] == [None, None, "b"]
    assert alarm.refused(4601.0, "b") is None
    assert alarm.refused(4602.0, "b") == "b"
    assert alarm.taken(4700.0)
    assert (alarm.is_raised, alarm.in_a_row) == (False, 0)
    assert not alarm.taken(4701.0)
    assert [alarm.refused(4702.0, "b") for _ in range(9)] == [None] * 9
    assert alarm.quiet_s(4711.0) == 10.0


def test_refusals_far_apart_are_no_alarm():
    """A stranger once a day is noise."""
    alarm = w.RefusalAlarm(0.0, rejected=3)
    assert [alarm.refused(50_000.0 * day, "x") for day in range(1, 9)] == [None] * 8
    again = w.RefusalAlarm(0.0, rejected=3)
    assert [again.refused(40_000.0 * day, "x") for day in range(1, 4)] == [None, None, "x"]


@pytest.mark.parametrize("given", [{"rejected": 0}, {"quiet_s": -1.0}])
def test_bounds_of_the_alarm_are_checked(given: dict[str, float]):
    """None at all in a row is no rule."""
    with pytest.raises(ValueError, match="rejected"):
        w.RefusalAlarm(0.0, **given)  # type: ignore[arg-type]
