"""What happens to which rows when a deadline comes near: one written table, and the sums behind its moments.

Three moments matter to a row. At ``ship_by`` its batch must leave for the completion window to fit. At the *rescue*
moment (``rescue_at_s``) the time that is left is only just enough to run it another way. At the *deadline* its answer
is due. What is done then depends on what the row is in the middle of (its *kind*) and on whether the sync lane is on.

``TABLE`` has a rule for every combination; nothing else decides. A rule names one act and, where a setting or a
measured number may call for another, those with their conditions: ``lawful`` has them all.

Nothing here ends a row for being late, but for the setting ``late: fail``: a row whose deadline has passed goes on
until ``max_age_s``. Whether a deadline was met is judged when the outcome is committed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from batchferry.domain.times import HOUR_S

MAX_RESCUE_LEAD_S = 6 * HOUR_S
"""A lead worked out from a slow minute must not cancel batches that would have ended by themselves."""


class RowKind(StrEnum):
    """What a row is in the middle of. A held row is ``held`` whatever else it is."""

    FRESH = "fresh"
    """Waits for its first batch, or is in it."""
    RETRIED = "retried"
    """Did not succeed and goes again: waits for its back-off to end, or is in a later batch."""
    CANARY = "canary"
    """Waits for the verdict on its kind of prompt. The sample itself is on its way already and counts as fresh."""
    HELD = "held"
    """Its key, account, kind of prompt or route is held."""
    OVERDUE = "overdue"
    """No batch could have brought it home in time when it was read, or read again."""
    SPLIT = "split"
    """A part of a request that was too long; it has its parent's deadline."""


class Moment(StrEnum):
    """When the table is asked."""

    SHIP_BY = "ship_by"
    """Its time to leave has come. For overdue rows, whose time to leave is long over: when they are read."""
    RESCUE = "rescue"
    """The deadline less the rescue lead and the time a cancel takes."""
    DEADLINE = "deadline"
    """The deadline has passed."""


class Act(StrEnum):
    """What is done with the rows."""

    SEAL = "seal"
    """The open batch they are in is closed and submitted."""
    WAIT = "wait"
    """Nothing now; what they wait for has been announced and will move them."""
    RETRY = "retry"
    """They leave in a small batch of their own as soon as their back-off is over."""
    SYNC = "sync"
    """They go through the sync lane at once."""
    CANCEL_AND_SYNC = "cancel_and_sync"
    """Their batch is cancelled, what it finished is landed, and the rest goes through the sync lane."""
    RACE = "race"
    """They go through the sync lane beside their live batch; the first outcome wins, the other is counted as waste."""
    BATCH_ANYWAY = "batch_anyway"
    """They go by batch although it ends too late, and the miss is announced beforehand."""
    ANNOUNCE_RISK = "announce_risk"
    """An event and a metric say that the deadline is at risk; the rows go on as they are."""
    ANNOUNCE_MISS = "announce_miss"
    """An event and a metric say that the deadline was missed; the rows go on until ``max_age_s``."""
    FAIL = "fail"
    """They end as failures of the class ``late``."""


class Instead(NamedTuple):
    """Another act, and when it takes the place of the usual one."""

    act: Act
    when: str


class Rule(NamedTuple):
    """One cell of the table."""

    act: Act
    reason: str
    instead: tuple[Instead, ...] = ()


_MISSED = "too late for any lane to help; an answer may still be wanted, so the row goes on until max_age_s"

_RACES = Instead(Act.RACE, "fewer than cancel_share of the batch's rows are due, or its cancelling outlasts the lead")
_NOT_YET_SENT = Instead(Act.SYNC, "the row is in no batch yet")
_NO_BUDGET = Instead(Act.ANNOUNCE_RISK, "the sync budget of the hour is used up")
_RESCUES = (_RACES, _NOT_YET_SENT, _NO_BUDGET)

TABLE: Mapping[tuple[RowKind, Moment, bool], Rule] = {
    # ------------------------------------------------------------------------------------------ fresh
    (RowKind.FRESH, Moment.SHIP_BY, True): Rule(
        Act.SEAL,
        "the first row whose time has come closes its batch",
        (Instead(Act.SYNC, "the batch is below min_rows and the route says small: sync"),),
    ),
    (RowKind.FRESH, Moment.SHIP_BY, False): Rule(Act.SEAL, "the first row whose time has come closes its batch"),
    (RowKind.FRESH, Moment.RESCUE, True): Rule(
        Act.CANCEL_AND_SYNC, "the batch is still out and its last finished rows are worth landing first", _RESCUES
    ),
    (RowKind.FRESH, Moment.RESCUE, False): Rule(
        Act.ANNOUNCE_RISK, "nothing is faster than the batch that is out, so it goes on"
    ),
    (RowKind.FRESH, Moment.DEADLINE, True): Rule(Act.ANNOUNCE_MISS, _MISSED),
    (RowKind.FRESH, Moment.DEADLINE, False): Rule(Act.ANNOUNCE_MISS, _MISSED),
    # ---------------------------------------------------------------------------------------- retried
    (RowKind.RETRIED, Moment.SHIP_BY, True): Rule(
        Act.RETRY,
        "it waits for its back-off only, never for a full batch",
        (Instead(Act.SYNC, "another completion window does not fit before the deadline"),),
    ),
    (RowKind.RETRIED, Moment.SHIP_BY, False): Rule(
        Act.RETRY, "it waits for its back-off only, never for a full batch, and a late answer beats none"
    ),
    (RowKind.RETRIED, Moment.RESCUE, True): Rule(
        Act.CANCEL_AND_SYNC, "what is left of the time is enough for the sync lane and for nothing else", _RESCUES
    ),
    (RowKind.RETRIED, Moment.RESCUE, False): Rule(
        Act.ANNOUNCE_RISK, "it is in a batch or waits for one, and nothing is faster"
    ),
    (RowKind.RETRIED, Moment.DEADLINE, True): Rule(Act.ANNOUNCE_MISS, _MISSED),
    (RowKind.RETRIED, Moment.DEADLINE, False): Rule(Act.ANNOUNCE_MISS, _MISSED),
    # ----------------------------------------------------------------------------------------- canary
    (RowKind.CANARY, Moment.SHIP_BY, True): Rule(
        Act.SEAL,
        "without a verdict the promise goes first",
        (Instead(Act.WAIT, "the canary says timeout: hold"),),
    ),
    (RowKind.CANARY, Moment.SHIP_BY, False): Rule(
        Act.SEAL,
        "without a verdict the promise goes first",
        (Instead(Act.WAIT, "the canary says timeout: hold"),),
    ),
    (RowKind.CANARY, Moment.RESCUE, True): Rule(
        Act.ANNOUNCE_RISK, "the route would rather be late than run an untried prompt, at the full price least of all"
    ),
    (RowKind.CANARY, Moment.RESCUE, False): Rule(
        Act.ANNOUNCE_RISK, "the route would rather be late than run an untried prompt"
    ),
    (RowKind.CANARY, Moment.DEADLINE, True): Rule(Act.ANNOUNCE_MISS, _MISSED),
    (RowKind.CANARY, Moment.DEADLINE, False): Rule(Act.ANNOUNCE_MISS, _MISSED),
    # ------------------------------------------------------------------------------------------- held
    (RowKind.HELD, Moment.SHIP_BY, True): Rule(
        Act.WAIT, "the hold was announced, and the clock of max_age_s stands still until it is lifted"
    ),
    (RowKind.HELD, Moment.SHIP_BY, False): Rule(
        Act.WAIT, "the hold was announced, and the clock of max_age_s stands still until it is lifted"
    ),
    (RowKind.HELD, Moment.RESCUE, True): Rule(
        Act.ANNOUNCE_RISK, "what is held may not be sent by any lane; whoever can lift the hold must know"
    ),
    (RowKind.HELD, Moment.RESCUE, False): Rule(
        Act.ANNOUNCE_RISK, "what is held may not be sent by any lane; whoever can lift the hold must know"
    ),
    (RowKind.HELD, Moment.DEADLINE, True): Rule(
        Act.ANNOUNCE_MISS, "the row goes on waiting for the end of the hold, which costs it none of its max_age_s"
    ),
    (RowKind.HELD, Moment.DEADLINE, False): Rule(
        Act.ANNOUNCE_MISS, "the row goes on waiting for the end of the hold, which costs it none of its max_age_s"
    ),
    # ---------------------------------------------------------------------------------------- overdue
    (RowKind.OVERDUE, Moment.SHIP_BY, True): Rule(
        Act.SYNC,
        "only the sync lane can still be in time, or nearly so",
        (
            Instead(Act.BATCH_ANYWAY, "the sync budget of the hour is used up, or the route says late: batch"),
            Instead(Act.FAIL, "the route says late: fail"),
        ),
    ),
    (RowKind.OVERDUE, Moment.SHIP_BY, False): Rule(
        Act.BATCH_ANYWAY,
        "a late answer beats none",
        (Instead(Act.FAIL, "the route says late: fail"),),
    ),
    (RowKind.OVERDUE, Moment.RESCUE, True): Rule(
        Act.CANCEL_AND_SYNC,
        "it went by batch for want of budget, and a new hour may have brought some",
        (*_RESCUES, Instead(Act.WAIT, "the route says late: batch, and the miss was announced")),
    ),
    (RowKind.OVERDUE, Moment.RESCUE, False): Rule(
        Act.WAIT, "it is on its way by batch, and the miss was announced when it left"
    ),
    (RowKind.OVERDUE, Moment.DEADLINE, True): Rule(Act.ANNOUNCE_MISS, _MISSED),
    (RowKind.OVERDUE, Moment.DEADLINE, False): Rule(Act.ANNOUNCE_MISS, _MISSED),
    # ------------------------------------------------------------------------------------------ split
    (RowKind.SPLIT, Moment.SHIP_BY, True): Rule(
        Act.SEAL,
        "a part is a request like any other, with its parent's deadline",
        (Instead(Act.SYNC, "the batch is below min_rows and the route says small: sync"),),
    ),
    (RowKind.SPLIT, Moment.SHIP_BY, False): Rule(
        Act.SEAL, "a part is a request like any other, with its parent's deadline"
    ),
    (RowKind.SPLIT, Moment.RESCUE, True): Rule(
        Act.CANCEL_AND_SYNC, "the parts of a request are worth nothing until the last one is there", _RESCUES
    ),
    (RowKind.SPLIT, Moment.RESCUE, False): Rule(
        Act.ANNOUNCE_RISK, "nothing is faster than the batch that is out, so it goes on"
    ),
    (RowKind.SPLIT, Moment.DEADLINE, True): Rule(Act.ANNOUNCE_MISS, _MISSED),
    (RowKind.SPLIT, Moment.DEADLINE, False): Rule(Act.ANNOUNCE_MISS, _MISSED),
}
"""By kind of row, moment, and whether the sync lane is on."""


def decide_act(kind: RowKind, moment: Moment, lane_on: bool) -> Act:
    """The usual act; ``TABLE`` says what may take its place, and when."""
    return TABLE[kind, moment, lane_on].act


def lawful(kind: RowKind, moment: Moment, lane_on: bool) -> frozenset[Act]:
    """Every act that the table allows."""
    rule = TABLE[kind, moment, lane_on]
    return frozenset({rule.act, *(other.act for other in rule.instead)})


def table() -> str:
    """The table in Markdown: a line for each kind of row and moment, without a line end behind the last."""
    lines = ["| rows | moment | sync lane on | sync lane off |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {moment} | {_cell(TABLE[kind, moment, True])} | {_cell(TABLE[kind, moment, False])} |"
        for kind in RowKind
        for moment in Moment
    ]
    return "\n".join(lines)


def _cell(rule: Rule) -> str:
    others = "".join(f"; `{other.act}` when {other.when}" for other in rule.instead)
    return f"`{rule.act}`: {rule.reason}{others}"


# ---------------------------------------------------------------------------------------- the sums behind it


def rescue_at_s(deadline_s: float, lead_s: float, cancel_s: float) -> float:
    """The rescue moment, on the clock of ``deadline_s``.

    Args:
        deadline_s: when the answer is due, in seconds of any one clock.
        lead_s: time for running the rows another way, see ``rescue_lead_s``.
        cancel_s: how long the provider may take to cancel a batch.
    """
    return deadline_s - lead_s - cancel_s


def is_due(now_s: float, deadline_s: float, lead_s: float, cancel_s: float) -> bool:
    """Whether the rescue moment has come, all times on one clock."""
    return now_s >= rescue_at_s(deadline_s, lead_s, cancel_s)


def rescue_lead_s(
    base_s: float, rows_waiting: int, rows_per_s: float | None, max_s: float = MAX_RESCUE_LEAD_S
) -> float:
    """How long before the deadline a rescue must begin for its last row to be in time.

    Args:
        base_s: the configured lead, and the least.
        rows_waiting: rows that want the sync lane, those of the rescue included.
        rows_per_s: what the lane was measured to do; None or nothing at all: not measured, and the base must do.
        max_s: the most, unless the base is longer still.
    """
    if rows_per_s is None or not rows_per_s > 0 or math.isinf(rows_per_s):
        return base_s
    return max(base_s, min(rows_waiting / rows_per_s, max_s))


def should_cancel(due_rows: int, rows: int, cancel_share: float) -> bool:
    """Whether so many rows of a batch are due that it is cancelled; else they run beside it.

    Args:
        due_rows: unfinished rows whose rescue moment has come.
        rows: all rows of the batch.
        cancel_share: the least share, above 0 and at most 1.
    """
    return 0 < due_rows >= rows * cancel_share
