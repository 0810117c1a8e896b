"""Prompts and answers of Anthropic, Gemini and Mistral: their kind, their text, and how they are cut."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from batchferry.domain.answercheck import AnswerFault, check_answer, compile_schema
from batchferry.domain.requests import (
    GENERATE_ENDPOINT,
    MESSAGES_ENDPOINT,
    Request,
    RequestRules,
    estimate_tokens,
    parse_request,
)
from batchferry.domain.shapes import fingerprint, prefix
from batchferry.domain.splitting import make_parts, plain_text

LONG = "Answer as a careful clerk. " * 700  # about 4,700 tokens
WORDS = "word " * 400
BRIEF = {"parts": [{"text": "Be brief."}]}
USER = {"role": "user", "parts": [{"text": "one"}]}
SCHEMA = {"type": "object", "required": ["a"]}


def body(**members: object) -> bytes:
    """Any JSON object."""
    return json.dumps(members).encode()


def gemini(**members: object) -> bytes:
    """A request for Gemini."""
    return body(**{"model": "gemini-2.5-flash", "contents": [USER], **members})


# ------------------------------------------------------------------------------------------ the kind of a prompt


def test_what_a_gemini_user_says_does_not_matter():
    """Words, sampling, limits and safety settings are one kind, and so are the two spellings."""
    first = fingerprint(gemini(systemInstruction=BRIEF, generationConfig={"temperature": 0}), "m")
    other = [{"role": "user", "parts": [{"text": "two"}]}, {"role": "model", "parts": [{"text": "three"}]}]
    same = gemini(system_instruction=BRIEF, contents=other, generation_config={"maxOutputTokens": 9}, safetySettings=[])
    assert fingerprint(same, "m") == first


@pytest.mark.parametrize(
    ("camel", "snake"),
    [
        ({"responseMimeType": "application/json"}, {"response_mime_type": "application/json"}),
        ({"responseSchema": SCHEMA}, {"response_schema": SCHEMA}),
        ({"responseJsonSchema": SCHEMA}, {"response_json_schema": SCHEMA}),
        ({"responseModalities": ["TEXT"]}, {"response_modalities": ["TEXT"]}),
    ],
)
def test_the_form_gemini_is_to_answer_in_matters(camel: dict, snake: dict):
    """It stands in the generation config, in either spelling."""
    found = fingerprint(gemini(generationConfig=camel), "m")
    assert found == fingerprint(gemini(generation_config=snake), "m")
    assert found != fingerprint(gemini(), "m")


def test_gemini_instructions_tools_and_cached_contents_matter():
    """Each is another kind, and none is taken for another."""
    kinds = [
        gemini(),
        gemini(systemInstruction=BRIEF),
        gemini(systemInstruction={"parts": [{"text": "Be long."}]}),
        gemini(tools=[{"googleSearch": {}}]),
        gemini(cachedContent="cachedContents/1"),
        gemini(generationConfig={"responseSchema": SCHEMA}),
        gemini(generationConfig={"responseJsonSchema": SCHEMA}),
    ]
    assert len({fingerprint(one, "m") for one in kinds}) == len(kinds)
    assert fingerprint(gemini(cached_content="cachedContents/1"), "m") == fingerprint(kinds[4], "m")


@pytest.mark.parametrize(
    ("model", "characters", "is_shared"),
    [
        ("gemini-2.5-flash", 2_048 * 4, True),
        ("gemini-2.5-pro", 2_048 * 3, False),
        ("gemini-3.5-flash", 2_048 * 4, False),
        ("gemini-3.5-flash", 4_096 * 4, True),
    ],
)
def test_a_gemini_prefix_is_shared_from_its_models_minimum_on(model: str, characters: int, *, is_shared: bool):
    """What is too short for the provider's cache is not worth a batch of its own."""
    text = {"parts": [{"text": "x" * characters}]}
    found = prefix(gemini(model=model, systemInstruction=text))
    assert (found is not None) is is_shared
    assert prefix(gemini(model=model, system_instruction=text, contents=[])) == found


def test_anthropic_tools_and_system_are_its_prefix():
    """Both count, the messages do not, and a long tool alone is enough."""
    tool = {"name": "t", "description": LONG, "input_schema": {}}
    first = prefix(
        body(model="claude-haiku-4-5", tools=[tool], system="a", messages=[{"role": "user", "content": "x"}])
    )
    assert first is not None
    assert prefix(body(model="claude-haiku-4-5", tools=[tool], system="a", messages=[], max_tokens=7)) == first
    assert prefix(body(model="claude-haiku-4-5", tools=[tool], system="b", messages=[])) != first
    assert prefix(body(model="claude-haiku-4-5", system=[{"type": "text", "text": LONG}], messages=[])) is not None


# -------------------------------------------------------------------------------------------- the text of an answer

GOOD = '{"name":"a","parts":[1,2]}'
ANSWER = compile_schema(b'{"type":"object","properties":{"parts":{"items":{"type":"integer"}}},"required":["parts"]}')


def answer(*candidates: object) -> bytes:
    """Gemini's answer, with the parts of each candidate."""
    return body(
        candidates=[{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"} for parts in candidates],
        usageMetadata={"promptTokenCount": 1},
    )


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        (GENERATE_ENDPOINT, answer([{"text": GOOD}])),
        (GENERATE_ENDPOINT, answer([{"text": "Well, ", "thought": True}, {"text": GOOD[:5]}, {"text": GOOD[5:]}])),
        (GENERATE_ENDPOINT, answer([{"functionCall": {"name": "f", "args": json.loads(GOOD)}}])),
        (GENERATE_ENDPOINT, answer([{"text": GOOD, "thoughtSignature": "x"}], [{"text": GOOD}])),
        (MESSAGES_ENDPOINT, body(content=[{"type": "text", "text": GOOD, "citations": None}], stop_reason="end_turn")),
        (
            MESSAGES_ENDPOINT,
            body(content=[{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": GOOD}]),
        ),
        (
            "/v1/chat/completions",  # Mistral's thinking models answer in chunks
            body(
                choices=[
                    {
                        "message": {
                            "content": [
                                {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
                                {"type": "text", "text": GOOD},
                            ],
                            "tool_calls": None,
                        }
                    }
                ]
            ),
        ),
        (
            "/v1/chat/completions",  # its API allows the arguments of a call as an object
            body(
                choices=[
                    {
                        "message": {
                            "content": "",
                            "tool_calls": [{"function": {"name": "f", "arguments": json.loads(GOOD)}}],
                        }
                    }
                ]
            ),
        ),
    ],
)
def test_the_text_is_found_where_each_family_puts_it(endpoint: str, found: bytes):
    """Thoughts are passed over, pieces put together, and the arguments of a forced tool are its answer."""
    assert check_answer(found, endpoint, "json") is None
    assert check_answer(found, endpoint, "json_schema", ANSWER) is None
    assert check_answer(found.replace(b"1", b"null"), endpoint, "json_schema", ANSWER) is AnswerFault.SCHEMA


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (answer([{"text": "Here you are: {}"}]), AnswerFault.NOT_JSON),
        (answer([{"text": GOOD}], [{"text": "no"}]), AnswerFault.NOT_JSON),
        (answer([{"text": GOOD}], []), AnswerFault.NO_TEXT),
        (answer([{"text": "thinking", "thought": True}]), AnswerFault.NO_TEXT),
        (answer([{"functionCall": {"name": "f"}}]), None),
        (answer(), AnswerFault.NO_TEXT),
        (body(candidates=[{"finishReason": "MAX_TOKENS"}]), AnswerFault.NO_TEXT),
        (body(candidates=[{"content": {"role": "model"}}]), AnswerFault.NO_TEXT),
        (body(promptFeedback={"blockReason": "SAFETY"}), AnswerFault.NO_TEXT),
        (body(error={"code": 400}), AnswerFault.UNREADABLE),
        (body(candidates="text"), AnswerFault.UNREADABLE),
        (b"{", AnswerFault.UNREADABLE),
    ],
)
def test_what_of_gemini_is_no_good_answer(found: bytes, fault: AnswerFault | None):
    """Each fault has its word; arguments that are left out are none, which is an object."""
    assert check_answer(found, GENERATE_ENDPOINT, "json") is fault


# -------------------------------------------------------------------------------------------------------- the cut


def said(part: bytes) -> str:
    """The text of a part's last user message, of either family."""
    read = json.loads(part)
    if "messages" in read:
        content = [one["content"] for one in read["messages"] if one["role"] == "user"][-1]
        return content if isinstance(content, str) else content[0]["text"]
    contents = read["contents"] if isinstance(read["contents"], list) else [read["contents"]]
    parts = [one["parts"] for one in contents if one.get("role", "user") == "user"][-1]
    return parts[0]["text"] if isinstance(parts, list) else parts["text"]


MODEL = {"role": "model", "parts": [{"text": "yes"}]}
CUTTABLE = [
    (MESSAGES_ENDPOINT, {"messages": [{"role": "user", "content": WORDS}], "system": "Be brief."}),
    (
        MESSAGES_ENDPOINT,
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": [{"type": "text", "text": WORDS, "cache_control": None}]},
            ],
        },
    ),
    (GENERATE_ENDPOINT, {"contents": [{"role": "user", "parts": [{"text": WORDS}]}], "systemInstruction": BRIEF}),
    (GENERATE_ENDPOINT, {"contents": [USER, MODEL, {"parts": {"text": WORDS}}], "generationConfig": {"topK": 1}}),
    (GENERATE_ENDPOINT, {"contents": {"parts": [{"text": WORDS}]}, "cachedContent": None}),
    (GENERATE_ENDPOINT, {"contents": {"parts": {"text": WORDS}}}),
]


@pytest.mark.parametrize(("endpoint", "members"), CUTTABLE)
def test_plain_texts_of_both_families_are_cut(endpoint: str, members: dict):
    """The parts' texts one after another are the text, each part fits, and nothing else is changed."""
    whole = body(model="m", max_tokens=9, **members)
    parts = plain_text.split(whole, endpoint, 200)
    assert parts is not None
    assert len(parts) > 1
    assert "".join(said(part) for part in parts) == WORDS
    for part in parts:
        assert estimate_tokens(part) <= 200
        rest = json.dumps(json.loads(part)).replace(json.dumps(said(part)), json.dumps(WORDS))
        assert json.loads(rest) == json.loads(whole)


@pytest.mark.parametrize(("endpoint", "members"), CUTTABLE)
def test_the_parts_are_lawful_requests_of_the_family(endpoint: str, members: dict):
    """They name the model and the endpoint, so that they go where their parent went."""
    rules = RequestRules(endpoints=frozenset({endpoint}), default_url=endpoint)
    value = body(custom_id="r", body={"model": "models/m", "max_tokens": 9, **members})
    parent = parse_request(value, (), rules)
    assert isinstance(parent, Request)
    due = datetime(2026, 1, 31, tzinfo=UTC)
    parts = make_parts(
        parent, source="t-0@1", deadline=due, splitter=plain_text, max_tokens=200, max_depth=1, rules=rules
    )
    assert isinstance(parts, tuple)
    for part in parts:
        read = parse_request(part.value, part.headers, rules)
        assert isinstance(read, Request)
        assert (read.url, read.model) == (endpoint, parent.model)


IMAGE = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        (MESSAGES_ENDPOINT, {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}] * 2}]}),
        (MESSAGES_ENDPOINT, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (
            MESSAGES_ENDPOINT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": WORDS, "cache_control": {"type": "ephemeral"}}],
                    }
                ]
            },
        ),
        (
            MESSAGES_ENDPOINT,
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                    {"role": "user", "content": WORDS},
                ]
            },
        ),
        (MESSAGES_ENDPOINT, {"messages": [{"role": "user", "content": WORDS}], "container": "c_1"}),
        (GENERATE_ENDPOINT, {"contents": [{"parts": [{"text": WORDS}, {"text": "and"}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"parts": [IMAGE, {"text": WORDS}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"parts": [IMAGE]}, {"parts": [{"text": WORDS}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"parts": [{"text": WORDS, "thought": True}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"role": "function", "parts": [{"text": WORDS}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"role": "model", "parts": [{"text": WORDS}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"role": "user", "parts": []}, {"parts": [{"text": WORDS}]}]}),
        (GENERATE_ENDPOINT, {"contents": [{"parts": [{"text": WORDS}]}], "cachedContent": "cachedContents/1"}),
        (GENERATE_ENDPOINT, {"contents": [{"parts": [{"text": 5}]}]}),
        (GENERATE_ENDPOINT, {"contents": WORDS}),
        (GENERATE_ENDPOINT, {"messages": [{"role": "user", "content": WORDS}]}),
    ],
)
def test_what_is_more_than_plain_text_is_not_cut(endpoint: str, members: dict):
    """Files, calls, several pieces, marks of the caller's and state at the provider are left alone."""
    assert plain_text.split(body(model="m", **members), endpoint, 200) is None


def test_a_long_gemini_conversation_is_looked_through_once():
    """Two thousand turns before the text are no reason to give up."""
    turns = [USER, MODEL] * 1_000
    whole = body(contents=[*turns, {"role": "user", "parts": [{"text": WORDS * 600}]}])
    parts = plain_text.split(whole, GENERATE_ENDPOINT, estimate_tokens(body(contents=turns)) + 100_000)
    assert parts is not None
    assert "".join(said(part) for part in parts) == WORDS * 600
