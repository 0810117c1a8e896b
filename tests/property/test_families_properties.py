"""Requests of Anthropic's and Gemini's kind, however they are written: read the same, cut whole, marked once."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.answercheck import AnswerFault, check_answer
from batchferry.domain.caching import add_cache_marker
from batchferry.domain.requests import (
    GENERATE_ENDPOINT,
    MESSAGES_ENDPOINT,
    BadRecord,
    Request,
    RequestRules,
    estimate_tokens,
    parse_request,
)
from batchferry.domain.shapes import fingerprint, prefix
from batchferry.domain.splitting import plain_text

RULES = RequestRules(endpoints=frozenset({MESSAGES_ENDPOINT, GENERATE_ENDPOINT}), default_url=GENERATE_ENDPOINT)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
parts = st.fixed_dictionaries({"text": words})
contents = st.lists(
    st.fixed_dictionaries({"parts": st.lists(parts, min_size=1, max_size=2)}, optional={"role": st.just("user")}),
    min_size=1,
    max_size=3,
)
configs = st.fixed_dictionaries(
    {}, optional={"maxOutputTokens": st.integers(0, 99), "candidateCount": st.integers(0, 4), "responseSchema": values}
)
geminis = st.fixed_dictionaries(
    {"model": words.filter(lambda name: bool(name) and name.isprintable()), "contents": contents},
    optional={
        "systemInstruction": st.fixed_dictionaries({"parts": st.lists(parts, max_size=2)}),
        "tools": st.lists(values, max_size=2),
        "generationConfig": configs,
        "safetySettings": values,
    },
)
SNAKES = {
    "systemInstruction": "system_instruction",
    "generationConfig": "generation_config",
    "maxOutputTokens": "max_output_tokens",
    "candidateCount": "candidate_count",
    "responseSchema": "response_schema",
}


def respelt(request: dict, draws: random.Random) -> dict:
    """The same request, some of its members in the other spelling and all of them in another order."""
    names = list(request)
    draws.shuffle(names)
    return {
        SNAKES.get(name, name) if draws.random() < 0.5 else name: respelt(request[name], draws)
        if name == "generationConfig"
        else request[name]
        for name in names
    }


@settings(deadline=None)
@given(request=geminis, key=words.filter(bool), seed=st.integers(0, 2**32), indent=st.none() | st.just(1))
def test_a_gemini_request_is_the_same_in_every_spelling_and_shape(
    request: dict, key: str, seed: int, indent: int | None
):
    """As a line of Gemini's own or as a record of ours, tidy or not: one model, one bound, one kind."""
    own = parse_request(json.dumps({"key": key, "request": request}).encode(), (), RULES)
    other = respelt(request, random.Random(seed))
    ours = parse_request(json.dumps({"custom_id": key, "body": other}, indent=indent).encode(), (), RULES)
    assert isinstance(own, Request), own
    assert isinstance(ours, Request), ours
    assert (
        (own.custom_id, own.url, own.model)
        == (ours.custom_id, ours.url, ours.model)
        == (
            key,
            GENERATE_ENDPOINT,
            request["model"],
        )
    )
    config = request.get("generationConfig", {})
    most = config.get("maxOutputTokens", 0) * max(config.get("candidateCount", 1), 1)
    assert own.max_output_tokens == ours.max_output_tokens == (most or None)
    assert own.tokens == estimate_tokens(own.body)
    assert json.loads(own.body) == request
    assert fingerprint(own.body, "m") == fingerprint(ours.body, "m")
    assert prefix(own.body) == prefix(ours.body)


@settings(deadline=None)
@given(
    members=st.dictionaries(
        st.sampled_from(
            ["model", "contents", "messages", "system", "tools", "generationConfig", "systemInstruction", "max_tokens"]
        ),
        values,
    ),
    url=st.sampled_from([MESSAGES_ENDPOINT, GENERATE_ENDPOINT]),
)
def test_any_body_is_taken_or_refused_with_a_reason(members: dict, url: str):
    """Nothing is raised by any of the readers, and a body that is taken has a model and an input."""
    body = json.dumps(members).encode()
    found = parse_request(json.dumps({"custom_id": "a", "url": url, "body": members}).encode(), (), RULES)
    if isinstance(found, BadRecord):
        assert found.message
        assert found.custom_id == "a"
    else:
        assert members["model"]
        assert members["contents" if url == GENERATE_ENDPOINT else "messages"] != []
    assert len(fingerprint(body, "m")) == 16
    assert plain_text.split(body, url, 50) is None or members
    assert check_answer(body, url, "json") in set(AnswerFault) | {None}


texts = st.lists(
    st.tuples(st.sampled_from(["word ", "\n\n", "End. ", "\u5b8c\u3002", "e\u0301", '"', "\x00"]), st.integers(1, 150)),
    max_size=8,
).map(lambda found: "".join(piece * times for piece, times in found))


@settings(deadline=None)
@given(text=texts, history=contents, is_bare=st.booleans(), max_tokens=st.integers(20, 800))
def test_a_cut_gemini_text_is_whole_again(text: str, history: list, *, is_bare: bool, max_tokens: int):
    """The parts' texts in order are the text; each part fits and is the parent save for the text."""
    last = {"parts": {"text": text} if is_bare else [{"text": text}]}
    parent = {"model": "m", "contents": [*history, last], "generationConfig": {"topK": 1}}
    found = plain_text.split(json.dumps(parent).encode(), GENERATE_ENDPOINT, max_tokens)
    if found is None:
        return
    assert all(len(content["parts"]) == 1 for content in history)
    said = []
    for part in found:
        assert estimate_tokens(part) <= max_tokens
        read = json.loads(part)
        place = read["contents"][-1]["parts"] if is_bare else read["contents"][-1]["parts"][0]
        said.append(place["text"])
        place["text"] = text
        assert read == parent
    assert "".join(said) == text


marks = st.sampled_from([None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
blocks = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": words}, optional={"cache_control": marks}), max_size=3
)


def marks_of(params: bytes) -> int:
    """Marks in a request, counted by another way than the code's."""
    count = 0

    def look(members: dict) -> dict:
        nonlocal count
        count += bool(members.get("cache_control"))
        return members

    json.loads(params, object_hook=look)
    return count


@settings(deadline=None)
@given(system=words | blocks, tools=blocks, said=blocks, top=marks)
def test_a_row_has_one_mark_of_ours_or_its_own(system: object, tools: list, said: list, top: object):
    """Rows that set marks themselves keep them byte for byte; the others get one or none, and never a second."""
    request = {"system": system, "tools": tools, "messages": [{"role": "user", "content": said}], "cache_control": top}
    params = json.dumps(request).encode()
    found = add_cache_marker(params)
    if marks_of(params):
        assert found is params
    else:
        assert marks_of(found) <= 1
        assert (marks_of(found) == 1) is (found is not params)
    assert add_cache_marker(found) is found
