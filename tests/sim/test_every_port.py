"""The five faults that everybody meets, and a thousand questions, at the port of every provider."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim.families import FAMILIES
from sim.ports import FAULTS, QUESTIONS, ROWS, WORDS, faults_of, questions

TESTS = Path(__file__).resolve().parents[1]
LIVES = """
import json, sys
from sim.life import ready
from sim.ports import asked, faults_of, port
ready()
provider, *also = sys.argv[1:]
lives = {name: port(provider, name) for name in faults_of(provider)} | {what: asked(provider) for what in also}
print(json.dumps({name: one.report | {"fault": one.fault, "end": one.history[-40:]} for name, one in lives.items()}))
"""
HALF = ROWS // 2
"""Rows of one batch: each of the two replicas makes one."""
MISSING = 2 * (HALF // 10)
ADAPTERS = ("openai", "anthropic", "mistral", "gemini")
"""Families with an adapter of their own; the others differ from OpenAI's by their profile."""
LONG = ("azure-legacy",)


def _case(provider: str, *more: str) -> Any:
    return pytest.param(provider, *more, marks=[pytest.mark.long] if provider in LONG else [])


PORTS = [_case(provider) for provider in FAMILIES]
CASES = [_case(provider, fault) for provider in FAMILIES for fault in faults_of(provider)]
KILLED = ("killed_after_create", "killed_while_answered", "answer_lost")


@functools.cache
def lives(provider: str, *also: str) -> dict[str, Any]:
    """All the written lives of a port, one after the other in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", LIVES, provider, *also],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def lived(provider: str, name: str) -> dict[str, Any]:
    """What one life came to, once no promise was broken in it."""
    also = ("asked",) if provider in ADAPTERS or name == "asked" else ()
    life: dict[str, Any] = lives(provider, *also)[name]
    assert life["fault"] == "", "\n".join([*life["end"], life["fault"]])
    return life


@pytest.mark.parametrize(("provider", "fault"), CASES)
def test_no_row_is_lost_and_none_delivered_twice(provider: str, fault: str) -> None:
    """Every record has exactly one outcome, under its own key, custom_id and headers, and in the end an answer."""
    life = lived(provider, fault)
    again = ROWS if FAULTS[fault].rejected else 0
    assert life["outcomes"] == {"succeeded": ROWS} | ({"model_unavailable": again} if again else {})
    assert life["told"].get("batch_quarantined", 0) == 0


@pytest.mark.parametrize(("provider", "fault"), CASES)
def test_no_row_is_paid_twice(provider: str, fault: str) -> None:
    """A row is paid a second time in one case: the provider ran it and never delivered its answer."""
    life = lived(provider, fault)
    twice = MISSING if fault == "rows_missing" else 0
    assert life["paid"] == {"1": ROWS - twice} | ({"2": twice} if twice else {})
    counted = sum(life["possibly_paid_twice"].values())
    assert counted == 0 or not FAMILIES[provider].is_fenced


@pytest.mark.parametrize("provider", PORTS)
def test_half_a_batch_expires(provider: str) -> None:
    """The first batch ends at its window: what it ran is kept and not asked again, and only the rest goes once more."""
    life = lived(provider, "half_expired")
    first, second, *later = [batch["rows"] for batch in life["batches"]]
    assert (first, second) == (HALF, HALF)
    family = FAMILIES[provider]
    if family.runs_on:  # we have cancelled it, a little after its window
        assert life["batches"][0]["status"] == "cancelled"
        assert 0 < sum(later) <= HALF // 2
    else:
        assert life["batches"][0]["status"] == "expired"
        assert sum(later) == (HALF if family.loses_rows else HALF // 2)


@pytest.mark.parametrize("provider", PORTS)
def test_answers_with_line_separators_arrive_whole(provider: str) -> None:
    """Every second answer holds U+2028: it is delivered with it, and no line is taken for two."""
    life = lived(provider, "line_separators")
    assert life["separators"] == HALF
    assert [batch["rows"] for batch in life["batches"]] == [HALF, HALF]


@pytest.mark.parametrize("provider", PORTS)
def test_missing_rows_are_told_and_go_again(provider: str) -> None:
    """A tenth of the rows stands in no file: an alarm for each batch, and these rows alone travel once more."""
    life = lived(provider, "rows_missing")
    assert life["told"]["rows_missing"] == 2
    assert sum(batch["rows"] for batch in life["batches"]) == ROWS + MISSING


@pytest.mark.parametrize("provider", PORTS)
def test_rejected_rows_hold_the_key(provider: str) -> None:
    """Every row is rejected as model_not_found: a failure each, unpaid; the key is held, and sent again they succeed."""
    life = lived(provider, "model_not_found_rows")
    assert life["held"]["model_unavailable"] >= 1
    assert life["told"]["key_released"] >= 1
    assert sum(batch["rows"] for batch in life["batches"]) == 2 * ROWS


@pytest.mark.parametrize("provider", [_case(name) for name, family in FAMILIES.items() if family.fails_whole])
def test_a_model_that_comes_back(provider: str) -> None:
    """Batches are refused for their model: the rows wait under a hold, unpaid, and all succeed once it is there."""
    life = lived(provider, "model_away")
    assert sum(life["held"].values()) >= 2
    assert sum(batch["rows"] for batch in life["batches"] if batch["status"] == "completed") == ROWS


@pytest.mark.parametrize("fault", KILLED)
@pytest.mark.parametrize("provider", PORTS)
def test_a_batch_whose_creator_died_is_adopted(provider: str, fault: str) -> None:
    """Killed with the answer in hand, or on its way, or the answer lost: the one batch is found, and no other made."""
    life = lived(provider, fault)
    assert life["told"]["batch_adopted"] >= 1
    assert life["told"].get("batch_dissolved", 0) == 0
    assert [(batch["rows"], batch["is_ours"]) for batch in life["batches"]] == [(HALF, True), (HALF, True)]
    assert bool(life["uncertain"]) == (not FAMILIES[provider].is_fenced)


@pytest.mark.parametrize("provider", PORTS)
def test_a_create_that_never_left_comes_again(provider: str) -> None:
    """Killed just before the call: nothing is found, the rows travel in another batch, and only that one is paid."""
    life = lived(provider, "killed_before_create")
    assert life["told"]["batch_dissolved"] == 1
    assert [batch["rows"] for batch in life["batches"]] == [HALF, HALF]
    counted = life["possibly_paid_twice"]
    assert counted == ({} if FAMILIES[provider].is_fenced else {"input_file_not_deleted": HALF})


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.stranger])
def test_a_strangers_batch_is_left_alone(fault: str) -> None:
    """A batch of somebody else that looks like ours is neither cancelled nor deleted, and its lines are not delivered.

    Its lines tell whose it is. If ours is there as well, it is found then, and nothing goes again.
    """
    life = lived("anthropic", fault)
    assert life["stranger"]
    assert life["told"]["batch_not_ours"] == 1
    was_made = FAULTS[fault].stranger == "before"
    assert life["told"].get("batch_dissolved", 0) == (0 if was_made else 1)
    assert life["possibly_paid_twice"] == ({} if was_made else {"input_file_not_deleted": HALF})


def _expected(text: str) -> tuple[str, str]:
    """Class and topic that a question must end with."""
    terms = next((terms for word, terms in WORDS if word in text), {})
    ends = {"content_filter": "content_filtered", "context_length_exceeded": "too_long"}
    row_class = ends.get(str(terms.get("outcome")), "succeeded")
    if terms.get("status") == 503:
        row_class = "transient"
    return row_class, "results" if row_class == "succeeded" else "failures"


@pytest.mark.parametrize(
    "provider", [*ADAPTERS, *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in ADAPTERS)]
)
def test_the_same_thousand_questions_end_alike(provider: str) -> None:
    """Through every adapter each of the banking77 questions ends in the same class, on the same topic."""
    life = lived(provider, "asked")
    asked = questions()
    assert len(asked) == QUESTIONS
    assert life["ended"] == {f"q-{number:05}": list(_expected(text)) for number, text in enumerate(asked)}
    kinds = Counter(row_class for row_class, _ in life["ended"].values())
    assert kinds.keys() == {"succeeded", "content_filtered", "too_long", "transient"}
    assert life["told"]["rows_missing"] >= 1
