"""The demo's books find what they must find."""

from __future__ import annotations

from typing import Any

import pytest

from batchferry.cli.demo.books import Books, Place, _Asked, _book, _picodollars

LEDGER = "0123456789"


def _outcome(offset: int, *, succeeded: bool = True, submission: int = 1, custom_id: str = "c") -> dict[str, Any]:
    told: dict[str, Any] = {
        "status": "succeeded" if succeeded else "failed",
        "custom_id": custom_id,
        "source": {"partition": 0, "offset": offset},
        "t0": "2026-01-01T00:00:00Z",
        "deadline_met": True,
        "wire_id": f"{LEDGER}-0-{offset}-{submission}",
        "submission": submission,
        "attempts": {"missing": submission - 1} if submission > 1 else {},
        "batch": {
            "batch_id": "B",
            "lane": "batch",
            "sealed_at": "2026-01-01T04:00:00Z",
            "landed_at": "2026-01-01T05:00:00Z",
        },
    }
    if succeeded:
        told |= {"flags": [], "usage": {"input_tokens": 3, "output_tokens": 1}, "cost": {"usd": "0.5", "sync_usd": "1"}}
        told["response"] = {"body": {}}
    else:
        told["error"] = {"class": "missing", "code": "missing"}
    return told


def _books(*outcomes: dict[str, Any], records: int = 2, bill: dict[str, int] | None = None) -> Books:
    asked: dict[Place, _Asked] = {(0, offset): _Asked("c", ("succeeded", "failed"), None) for offset in range(records)}
    books = Books(bill=bill if bill is not None else {one["wire_id"]: 1 for one in outcomes})
    seen: set[Place] = set()
    for one in outcomes:
        _book(books, one, asked, seen)
    books.records = records
    books.without = sorted(asked.keys() - seen)
    return books


def _broken(books: Books) -> list[str]:
    return [check.promise for check in books.checks() if not check.holds]


def test_good_books_are_good() -> None:
    """One outcome each and a bill to match: nothing to complain of; times and money are added up."""
    books = _books(_outcome(0), _outcome(1, succeeded=False))
    assert _broken(books) == []
    assert (books.succeeded, books.all_failed, books.waits_s[0]) == (1, 1, 4 * 3600)
    assert (books.paid, books.listed) == (500_000_000_000, 1_000_000_000_000)


@pytest.mark.parametrize(
    ("outcomes", "promise"),
    [
        ([_outcome(0)], "every record has an outcome"),
        ([_outcome(0), _outcome(1), _outcome(1)], "no record has two"),
        ([_outcome(0), _outcome(1), _outcome(9)], "no outcome without a record"),
        ([_outcome(0), _outcome(1, custom_id="other")], "every custom_id came back as it was"),
    ],
)
def test_each_fault_is_found(outcomes: list[dict[str, Any]], promise: str) -> None:
    """A lost, doubled, strange or mixed-up outcome fails its check."""
    assert promise in _broken(_books(*outcomes))


def test_the_bill_is_compared() -> None:
    """Billed twice, not billed, and billed without a reason are told; an answer that was lost and asked for again is not."""
    good = {f"{LEDGER}-0-0-1": 1, f"{LEDGER}-0-1-1": 1, f"{LEDGER}-0-1-2": 1}
    outcomes = (_outcome(0), _outcome(1, submission=2))
    assert _broken(_books(*outcomes, bill=good)) == []
    assert "no submission was billed twice" in _broken(_books(*outcomes, bill={**good, f"{LEDGER}-0-0-1": 2}))
    assert "every published answer was billed once" in _broken(_books(*outcomes, bill={f"{LEDGER}-0-0-1": 1}))
    stray = {**good, f"{LEDGER}-0-0-2": 1}
    assert "every other bill is for an answer that never came" in _broken(_books(*outcomes, bill=stray))


def test_amounts_are_exact() -> None:
    """Decimals become whole picodollars."""
    assert (_picodollars("0.000000000001"), _picodollars("12"), _picodollars("0.0119451")) == (
        1,
        12 * 10**12,
        11_945_100_000,
    )
