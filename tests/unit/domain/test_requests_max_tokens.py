"""A request that does not bound its answer is told from one that does."""

from __future__ import annotations

import orjson
import pytest

from batchferry.domain.requests import (
    BadRecord,
    RecordRule,
    Request,
    check_max_tokens,
    has_answer_tokens,
    parse_request,
)


def _request(url: str, **body: object) -> Request:
    found = parse_request(orjson.dumps({"custom_id": "c", "url": url, "body": {"model": "m", **body}}))
    assert not isinstance(found, BadRecord)
    return found


MESSAGES = [{"role": "user", "content": "x"}]
BOUNDED = [
    ("/v1/chat/completions", {"messages": MESSAGES}, "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    ("/v1/responses", {"input": "x"}, "max_output_tokens"),
    ("/v1/completions", {"prompt": "x"}, "max_tokens"),
]


@pytest.mark.parametrize(("url", "body", "member"), BOUNDED)
def test_max_tokens_missing_is_told(url: str, body: dict[str, object], member: str):
    """Without a bound the request is named with rule and remedy; with one nothing is said."""
    refused = check_max_tokens(_request(url, **body))
    assert refused is not None
    assert (refused.rule, refused.custom_id) == (RecordRule.MISSING_MAX_TOKENS, "c")
    assert member in refused.remedy
    assert check_max_tokens(_request(url, **body, **{member: 5})) is None


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/moderations"])
def test_max_tokens_where_answers_have_none(url: str):
    """Embeddings and moderations have nothing to bound."""
    assert check_max_tokens(_request(url, input="x")) is None
    assert not has_answer_tokens(url)
