"""The books themselves: what must be blamed is blamed, and what is allowed is not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from .books import Books, Row, Run, _judge_rows
from .history import Act, Told, quantile, spans

STAGE: Any = SimpleNamespace(tag="t", results="results")
WHERE = (3, 7)


def books(outcomes: int = 1, runs: tuple[Run, ...] = (), answers: int = 7, **said: Any) -> Books:
    """Books of one record, number 7, judged."""
    value = {
        "custom_id": "row-7",
        "attempts": {},
        "flags": [],
        "response": {"text": f"question {answers} of t"},
        **said,
    }
    row = Row("row-7", 7, [("results", value, json.dumps(value).encode())] * outcomes, list(runs))
    made = Books(rows={WHERE: row}, allowed_batches={"allowed"})
    _judge_rows(STAGE, made)
    return made


def paid(batch_id: str = "b1", submission: int = 1) -> Run:
    """A paid run of the record."""
    return Run(f"provider-{batch_id}", batch_id, f"ledger-3-7-{submission}", is_paid=True)


def test_an_answer_paid_once_is_as_promised() -> None:
    """One outcome, one paid run, its own question."""
    made = books(runs=(paid(),))
    assert not made.offenders
    assert made.classes == {"succeeded": 1}


@pytest.mark.parametrize(
    ("made", "blame"),
    [
        (books(outcomes=0), "0 outcomes"),
        (books(outcomes=2, runs=(paid(),)), "2 outcomes"),
        (books(runs=(paid(),), answers=8), "speaks of the questions [8]"),
        (books(runs=(paid(),), custom_id="row-8"), "the outcome is for row-8"),
        (books(), "no paid run"),
        (books(runs=(paid(), paid("b2", 2))), "paid 2 times"),
        (books(runs=(paid(), paid("b2"))), "one submission was paid twice"),
        (books(runs=(paid(), paid("b2", 2), paid("b3", 3)), attempts={"missing": 1}), "nothing allows 1 of them"),
    ],
)
def test_what_breaks_a_promise_is_blamed(made: Books, blame: str) -> None:
    """Lost, doubled, mixed up, or paid without a reason."""
    assert blame in "; ".join(made.offenders[WHERE])


def test_retries_and_counted_allowances_are_not_blamed() -> None:
    """A second paid run has a class for its reason, or a replica has counted it."""
    classified = books(runs=(paid(), paid("b2", 2)), attempts={"missing": 1})
    counted = books(runs=(paid(), paid("allowed", 2)))
    assert not classified.offenders
    assert not counted.offenders
    assert classified.paid_again["classified retry"] == counted.paid_again["counted allowance"] == 1


def test_spans_are_read_off_the_logs() -> None:
    """A restore counts from its assignment over all attempts; a gap is from the last owner's end to the next one."""

    def told(at_s: float, replica: str, event: str, **fields: Any) -> Told:
        return Told(at_s, replica, 1, event, {"partition": 0, **fields})

    lines = [
        told(1.0, "a", "partition_assigned"),
        told(3.0, "a", "partition_restored", took_s=0.5),
        told(9.0, "b", "partition_assigned"),
        told(10.0, "b", "partition_restored", took_s=1.0),
    ]
    seen = spans(lines, {("a", 1): 4.0}, {"b": [Act(9.5, "frozen", 9.7)]})
    assert seen.restores_s == [0.5, 1.0]
    assert seen.since_assigned_s == [2.0, 1.0]
    assert seen.calm_since_assigned_s == [2.0]
    assert seen.unowned == [(6.0, 0, 4.0)]
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([], 0.99) == 0.0
