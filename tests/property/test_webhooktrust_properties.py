"""Whatever comes in whatever order: the stretch stays in its bounds, and only evidence moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain import webhooktrust as w

T0 = datetime(2026, 3, 1, tzinfo=UTC)
names = st.integers(0, 8).map("b{}".format)
steps = st.lists(
    st.tuples(
        st.sampled_from(["told", "running", "ended", "ended_untimed", "forget"]),
        names,
        st.integers(0, 90),
        st.integers(0, 400),
    ),
    max_size=50,
)


def apply(trust: w.WebhookTrust, act: str, name: str, now: datetime, before_s: int) -> None:
    """One piece of news."""
    match act:
        case "told":
            trust.told(name, now)
        case "running":
            trust.found_running(name, now - timedelta(seconds=before_s))
        case "ended":
            trust.found_ended(name, now, now - timedelta(seconds=before_s))
        case "ended_untimed":
            trust.found_ended(name, now, None)
        case _:
            trust.forget(name, now)


class Model:
    """The rule in the plainest words: a list of all ends, with what became of each."""

    def __init__(self) -> None:
        self.told: dict[str, datetime] = {}
        self.ended: set[str] = set()
        self.awaited: dict[str, datetime] = {}
        self.ends: list[bool] = []

    def apply(self, act: str, name: str, now: datetime, before_s: int) -> None:
        """The same news."""
        self.settle(now)
        if act == "told":
            if name in self.awaited:
                del self.awaited[name]
                self.ends.append(True)
            elif name not in self.ended:
                self.told[name] = now
        elif act == "running":
            if name in self.told and self.told[name] < now - timedelta(seconds=before_s):
                del self.told[name]
        elif act == "forget":
            self.told.pop(name, None)
            self.awaited.pop(name, None)
            self.ended.add(name)
        elif name not in self.ended:
            self.ended.add(name)
            if self.told.pop(name, None) is not None:
                self.ends.append(True)
            else:
                since = timedelta(seconds=before_s if act == "ended" else 0)
                self.awaited[name] = now - since + timedelta(seconds=w.GRACE_S)
        self.settle(now)

    def settle(self, now: datetime) -> None:
        """Judge what is overdue."""
        for name in [name for name, until in self.awaited.items() if until <= now]:
            del self.awaited[name]
            self.ends.append(False)


@given(steps, st.floats(1.0, 4.0))
@settings(max_examples=150, deadline=None)
def test_the_stretch_follows_the_evidence(news: list[tuple[str, str, int, int]], ceiling: float):
    """It agrees with the model on every end, lies between 1 and the ceiling, is above 1 only after three told ends in a
    row, and is 1 from the instant on at which a webhook is missing.
    """
    trust, model, now = w.WebhookTrust(ceiling), Model(), T0
    for act, name, pause_s, before_s in news:
        now += timedelta(seconds=pause_s)
        apply(trust, act, name, now, before_s)
        model.apply(act, name, now, before_s)
        factor, share = trust.stretch(now), trust.told_share(now)
        last = model.ends[-w.MAX_ENDS :]
        assert share == (sum(last) / len(last) if last else None)
        assert 1.0 <= factor <= ceiling
        if factor > 1.0:
            assert len(model.ends) >= w.FIRST_STREAK
            assert all(model.ends[-w.FIRST_STREAK :])
        if model.ends and not model.ends[-1]:
            assert factor == 1.0


@given(steps)
@settings(max_examples=200, deadline=None)
def test_asking_changes_nothing(news: list[tuple[str, str, int, int]]):
    """How often the factor is asked for has no part in it."""
    asked, unasked, now = w.WebhookTrust(), w.WebhookTrust(), T0
    for act, name, pause_s, before_s in news:
        now += timedelta(seconds=pause_s)
        asked.stretch(now)
        for trust in (asked, unasked):
            apply(trust, act, name, now, before_s)
        asked.stretch(now)
    assert asked.stretch(now) == unasked.stretch(now)


@given(st.lists(st.booleans(), max_size=30))
@settings(max_examples=200, deadline=None)
def test_a_told_end_never_lowers_and_a_missing_one_never_raises(ends: list[bool]):
    """Each end moves the factor its own way or not at all."""
    trust, now, before = w.WebhookTrust(), T0, 1.0
    for number, was_told in enumerate(ends):
        now += timedelta(seconds=1000)
        if was_told:
            trust.told(f"b{number}", now)
        trust.found_ended(f"b{number}", now, now - timedelta(seconds=500))
        factor = trust.stretch(now)
        assert factor >= before if was_told else factor == 1.0
        before = factor


@given(st.lists(st.tuples(st.sampled_from(["taken", "refused"]), st.integers(0, 600)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_an_alarm_means_that_none_was_taken(news: list[tuple[str, int]]):
    """When it is raised the last refusals were in a row, and the quiet was long enough; two are an hour apart."""
    alarm, now_s, taken_s, row, raised_s = w.RefusalAlarm(0.0, 3, 900.0), 0.0, 0.0, 0, None
    for what, pause_s in news:
        now_s += pause_s
        if what == "taken":
            assert alarm.taken(now_s) == (raised_s is not None)
            taken_s, row, raised_s = now_s, 0, None
            continue
        row += 1
        is_due = row >= 3 and now_s - taken_s >= 900 and (raised_s is None or now_s - raised_s >= w.ALARM_AGAIN_S)
        assert (alarm.refused(now_s, "x") is not None) == is_due
        raised_s = now_s if is_due else raised_s
        assert alarm.in_a_row == row


lots = st.tuples(
    st.integers(0, 2), st.sampled_from(["l1", "l2"]), st.sampled_from(["a", "b"]), st.lists(names, max_size=3)
)


@given(st.lists(lots, max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_index_of_live_batches_agrees_with_a_search(changes: list[tuple[int, str, str, list[str]]]):
    """After any changes of lots it knows the same batches as a look at every lot would, and holds nothing else."""
    index, held = w.LiveBatches(), dict[tuple[int, str], tuple[str, list[str]]]()
    for partition, lot_id, account, named in changes:
        index.put(partition, lot_id, account, named)
        held[partition, lot_id] = (account, named)
        for batch in (f"b{number}" for number in range(9)):
            for one in ("a", "b"):
                assert index.has(one, batch) == any(owner == one and batch in ids for owner, ids in held.values())
    assert len(index) == len({batch for _, ids in held.values() for batch in ids})
    index.clear()
    assert len(index) == 0
