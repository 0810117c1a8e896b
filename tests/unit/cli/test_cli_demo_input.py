"""The demo's input: real questions, and odd records that break exactly the rule they name."""

from __future__ import annotations

from batchferry.cli.demo.questions import EXPECT, INTENT, bad_records, edge_cases, items, questions
from batchferry.domain.requests import BadRecord, Request, RequestRules, parse_request

RULES = RequestRules(accounts=frozenset({"default"}))


def test_about_two_thousand_real_questions() -> None:
    """2,002 questions with their label, all of them lawful, ids unique, two batch keys."""
    asked = list(questions())
    assert len(asked) == 2_002
    requests = [parse_request(one.value, one.headers, RULES) for one in asked]
    assert all(isinstance(one, Request) for one in requests)
    assert len({one.custom_id for one in requests if isinstance(one, Request)}) == 2_002
    assert {(one.model, one.slice) for one in requests if isinstance(one, Request)} == {
        ("gpt-4o-mini", ""),
        ("gpt-4.1-mini", "second-opinion"),
    }
    assert len({dict(one.headers)[INTENT] for one in asked}) == 77


def test_edge_cases_are_lawful() -> None:
    """Every edge case is accepted as a request."""
    for one in edge_cases():
        assert isinstance(parse_request(one.value, one.headers, RULES), Request), one.key


def test_each_bad_record_breaks_the_rule_it_names() -> None:
    """Every bad record is refused for exactly the rule in its header, except the one whose timestamp is wrong."""
    for one in bad_records():
        rule = dict(one.headers)[EXPECT].decode().split("|")[0].removeprefix("bad_record/")
        found = parse_request(one.value, one.headers, RULES)
        if one.ahead_s:
            assert rule == "timestamp_future"
            continue
        assert isinstance(found, BadRecord), rule
        assert found.rule == rule


def test_everything_is_produced_once_and_fits_a_topic() -> None:
    """The input is all questions, edge cases and bad records, each within Kafka's default record size."""
    every = items()
    assert len(every) == 2_002 + len(list(edge_cases())) + len(list(bad_records()))
    assert max(len(one.value or b"") for one in every) < 1_000_000
