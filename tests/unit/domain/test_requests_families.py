"""Records of Anthropic's, Gemini's and Mistral's kind: what is taken, what is read of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from batchferry.domain.requests import (
    DEFAULT_ENDPOINTS,
    GENERATE_ENDPOINT,
    IMAGE_TOKENS,
    MESSAGES_ENDPOINT,
    REMEDIES,
    BadRecord,
    RecordRule,
    Request,
    RequestRules,
    check_max_tokens,
    estimate_tokens,
    has_answer_tokens,
    parse_request,
)

ALL = RequestRules(endpoints=DEFAULT_ENDPOINTS | {MESSAGES_ENDPOINT, GENERATE_ENDPOINT})
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]
GEMINI = {"model": "gemini-2.5-flash", "contents": CONTENTS}
CLAUDE = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def value(members: dict) -> bytes:
    """A record's value."""
    return json.dumps(members, separators=(",", ":")).encode()


def gemini(**changes: object) -> bytes:
    """A record for Gemini with these members of its body changed; ... leaves one out."""
    body = {name: held for name, held in (GEMINI | changes).items() if held is not ...}
    return value({"custom_id": "a", "url": GENERATE_ENDPOINT, "body": body})


def claude(**changes: object) -> bytes:
    """The same for Anthropic."""
    body = {name: held for name, held in (CLAUDE | changes).items() if held is not ...}
    return value({"custom_id": "a", "url": MESSAGES_ENDPOINT, "body": body})


def accepted(record: bytes, rules: RequestRules = ALL) -> Request:
    """The request of a record that must be good."""
    found = parse_request(record, (), rules)
    assert isinstance(found, Request), found
    return found


def refused(record: bytes, rules: RequestRules = ALL) -> BadRecord:
    """The refusal of a record that must be bad."""
    found = parse_request(record, (), rules)
    assert isinstance(found, BadRecord), found
    assert found.remedy == REMEDIES[found.rule]
    return found


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, None),
        ({"generationConfig": None}, None),
        ({"generationConfig": {"temperature": 1}}, None),
        ({"generationConfig": {"maxOutputTokens": 16}}, 16),
        ({"generationConfig": {"maxOutputTokens": "16"}}, 16),
        ({"generationConfig": {"maxOutputTokens": 16.0, "candidateCount": 3}}, 48),
        ({"generation_config": {"max_output_tokens": 16, "candidate_count": "2"}}, 32),
        ({"generationConfig": {"max_output_tokens": 16}}, 16),
        ({"generationConfig": {"maxOutputTokens": 0}}, None),
        ({"generationConfig": {"maxOutputTokens": 16, "candidateCount": 0}}, 16),
        ({"generationConfig": {"candidateCount": 4}}, None),
        ({"max_tokens": 5}, None),
    ],
)
def test_gemini_bounds_its_answer_in_the_generation_config(config: dict, most: int | None):
    """Either spelling and every way to write the number, all candidates together; zero is as good as absent."""
    found = accepted(gemini(**config))
    assert (found.url, found.model, found.max_output_tokens) == (GENERATE_ENDPOINT, "gemini-2.5-flash", most)
    missing = check_max_tokens(found)
    assert (missing is None) is (most is not None)
    assert missing is None or "maxOutputTokens" in missing.remedy
    assert has_answer_tokens(found.url)


def test_anthropic_bounds_its_answer_with_max_tokens():
    """Without a bound the request is told from one that has it; the account's own check refuses it later."""
    assert accepted(claude()).max_output_tokens == 9
    missing = check_max_tokens(accepted(claude(max_tokens=...)))
    assert missing is not None
    assert "messages" in missing.remedy
    assert has_answer_tokens(MESSAGES_ENDPOINT)


@pytest.mark.parametrize(
    "changes",
    [
        {"contents": {"parts": {"text": "hi"}}},
        {"systemInstruction": {"parts": [{"text": "Be brief."}]}},
        {"system_instruction": {"parts": {"text": "Be brief."}}, "tools": [{"googleSearch": {}}]},
        {"tools": {"functionDeclarations": []}, "safetySettings": [], "stream": False},
    ],
)
def test_gemini_bodies_as_google_writes_them(changes: dict):
    """Both spellings, and arrays of one without their brackets; the body goes on as it came."""
    record = gemini(**changes)
    found = accepted(record)
    assert json.loads(found.body) == GEMINI | changes
    assert found.body in record


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief."}], "tools": [{"name": "t", "input_schema": {}}]},
        {"system": None, "tools": None, "stream": False, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ],
)
def test_anthropic_bodies_as_documented(changes: dict):
    """The system prompt is a text or blocks."""
    assert json.loads(accepted(claude(**changes)).body) == CLAUDE | changes


def test_a_folder_before_a_gemini_model_is_no_part_of_its_name():
    """Google writes models/x where we say x: both are one batch key, one price and one context."""
    assert accepted(gemini(model="models/gemini-2.5-flash")).model == "gemini-2.5-flash"
    assert accepted(gemini(model="tunedModels/mine")).model == "tunedModels/mine"
    chat = value({"custom_id": "a", "body": {"model": "models/x", "messages": []}})
    assert accepted(chat).model == "models/x"
    assert refused(gemini(model="models/")).rule is RecordRule.MISSING_MODEL


@pytest.mark.parametrize(
    ("members", "custom_id", "url"),
    [
        ({"custom_id": "a", "params": CLAUDE}, "a", MESSAGES_ENDPOINT),
        ({"custom_id": "a", "url": None, "params": CLAUDE}, "a", MESSAGES_ENDPOINT),
        ({"key": "k-1", "request": GEMINI}, "k-1", GENERATE_ENDPOINT),
        ({"request": GEMINI, "key": "\u00e9 \u2028"}, "\u00e9 \u2028", GENERATE_ENDPOINT),
        ({"custom_id": "a", "request": GEMINI}, "a", GENERATE_ENDPOINT),
        ({"custom_id": "a", "key": 5, "request": {}, "body": CLAUDE, "url": MESSAGES_ENDPOINT}, "a", MESSAGES_ENDPOINT),
    ],
)
def test_lines_of_the_families_own_batches_are_taken(members: dict, custom_id: str, url: str):
    """A file that was made for the provider needs no rewriting, beyond naming the model."""
    found = accepted(value(members))
    assert (found.custom_id, found.url) == (custom_id, url)
    assert json.loads(found.body) == (GEMINI if url == GENERATE_ENDPOINT else CLAUDE)


@pytest.mark.parametrize(
    ("record", "rule", "says"),
    [
        (value({"key": "k", "request": {"contents": CONTENTS}}), RecordRule.MISSING_MODEL, "request has no model"),
        (value({"key": 7, "request": GEMINI}), RecordRule.CUSTOM_ID_TYPE, "key is an integer"),
        (value({"key": "", "request": GEMINI}), RecordRule.CUSTOM_ID_EMPTY, "key is an empty"),
        (value({"key": "k" * 1025, "request": GEMINI}), RecordRule.CUSTOM_ID_TOO_LONG, "key has 1025"),
        (value({"key": None, "request": GEMINI}), RecordRule.MISSING_CUSTOM_ID, "no key"),
        (value({"request": GEMINI}), RecordRule.MISSING_CUSTOM_ID, "no custom_id"),
        (value({"key": "k", "request": [GEMINI]}), RecordRule.BODY_NOT_OBJECT, "request is an array"),
        (b'{"key":"k","key":"l","request":{}}', RecordRule.DUPLICATE_MEMBER, "key is given"),
        (b'{"key":1e999,"request":{}}', RecordRule.NOT_JSON, "not JSON"),
        (b'{"key":"\\ud800","request":{}}', RecordRule.LONE_SURROGATE, "surrogate"),
        (value({"custom_id": "a", "params": {"messages": []}}), RecordRule.MISSING_MODEL, "params has no model"),
        (gemini(model=...), RecordRule.MISSING_MODEL, "body has no model"),
        (gemini(model=5), RecordRule.WRONG_TYPE, "body.model"),
        (gemini(contents=...), RecordRule.MISSING_INPUT, "no contents"),
        (gemini(contents=[]), RecordRule.MISSING_INPUT, "no contents"),
        (gemini(contents="hi"), RecordRule.WRONG_TYPE, "body.contents is a string"),
        (gemini(contents=..., messages=[{"role": "user", "content": "x"}]), RecordRule.MISSING_INPUT, "no contents"),
        (gemini(stream=True), RecordRule.STREAMING, "body.stream"),
        (gemini(systemInstruction="Be brief."), RecordRule.WRONG_TYPE, "body.systemInstruction is a string"),
        (gemini(system_instruction=[]), RecordRule.WRONG_TYPE, "body.system_instruction is an array"),
        (gemini(tools="search"), RecordRule.WRONG_TYPE, "body.tools"),
        (gemini(generationConfig=[]), RecordRule.WRONG_TYPE, "body.generationConfig is an array"),
        (gemini(generationConfig={"maxOutputTokens": -1}), RecordRule.WRONG_TYPE, "generationConfig.maxOutputTokens"),
        (gemini(generationConfig={"maxOutputTokens": "many"}), RecordRule.WRONG_TYPE, "maxOutputTokens is a string"),
        (gemini(generation_config={"candidate_count": 1.5}), RecordRule.WRONG_TYPE, "candidate_count is a number"),
        (gemini(generation_config={"candidate_count": True}), RecordRule.WRONG_TYPE, "candidate_count is a boolean"),
        (claude(messages=...), RecordRule.MISSING_INPUT, "no messages"),
        (claude(messages=[]), RecordRule.MISSING_INPUT, "no messages"),
        (claude(messages="hi"), RecordRule.WRONG_TYPE, "body.messages is a string"),
        (claude(system={"type": "text", "text": "a"}), RecordRule.WRONG_TYPE, "body.system is an object"),
        (claude(tools={}), RecordRule.WRONG_TYPE, "body.tools is an object"),
        (claude(max_tokens="9"), RecordRule.WRONG_TYPE, "body.max_tokens is a string"),
        (claude(stream=True), RecordRule.STREAMING, "body.stream"),
    ],
)
def test_what_would_come_back_refused_is_refused_at_once(record: bytes, rule: RecordRule, says: str):
    """The member is named as the record names it, and no value of it is quoted."""
    found = refused(record)
    assert (found.rule, says in found.message) == (rule, True), found.message
    assert "many" not in found.message
    assert "brief" not in found.message


def test_a_url_that_holds_the_model_is_told_where_it_belongs():
    """The address of Gemini's ordinary calls is what a producer may have at hand."""
    url = "/v1beta/models/gemini-2.5-flash:generateContent"
    found = refused(value({"custom_id": "a", "url": url, "body": GEMINI}))
    assert found.rule is RecordRule.UNKNOWN_ENDPOINT
    assert GENERATE_ENDPOINT in found.message
    assert "body.model" in found.message


@pytest.mark.parametrize("members", [{"key": "k", "request": GEMINI}, {"custom_id": "a", "params": CLAUDE}])
def test_without_an_account_of_the_family_its_lines_are_refused(members: dict):
    """The refusal says which shapes there are; the key is the caller's own id."""
    found = refused(value(members), RequestRules())
    assert found.rule is RecordRule.SHAPE_NOT_SUPPORTED
    assert found.custom_id == members.get("key", members.get("custom_id"))
    assert "{key, request}" in found.remedy


def test_a_bad_header_is_told_with_the_key():
    """A record that is refused for its headers is still known by its key."""
    found = parse_request(value({"key": "k", "request": GEMINI}), [("sla", b"soon")], ALL)
    assert isinstance(found, BadRecord)
    assert (found.rule, found.custom_id) == (RecordRule.BAD_HEADER, "k")


def test_members_of_another_family_mean_nothing_beside_a_body():
    """Where a body is given, key and request are unknown members, however often they stand there."""
    record = b'{"custom_id":"a","key":1,"key":2,"request":3,"request":4,"body":{"model":"m","messages":[]}}'
    assert accepted(record).custom_id == "a"


def test_the_route_of_a_gemini_record_without_url_is_found_by_the_bare_name():
    """Patterns of routes are written for the model's name, not for its resource."""
    asked: list[str] = []

    def url_of(model: str) -> str:
        asked.append(model)
        return GENERATE_ENDPOINT if model.startswith("gemini") else "/v1/chat/completions"

    rules = RequestRules(endpoints=ALL.endpoints, default_url_of=url_of)
    record = value({"custom_id": "a", "body": GEMINI | {"model": "models/gemini-2.5-pro"}})
    assert accepted(record, rules).url == GENERATE_ENDPOINT
    chat = value({"custom_id": "a", "body": {"model": "models/x", "messages": []}})
    assert accepted(chat, rules).url == "/v1/chat/completions"
    assert asked == ["gemini-2.5-pro", "models/x"]


def test_a_mistral_chat_is_an_ordinary_chat():
    """Content in chunks, a reasoning mode and Mistral's own settings are the provider's business."""
    body = {
        "model": "mistral-small-latest",
        "max_tokens": 7,
        "n": 2,
        "random_seed": 3,
        "safe_prompt": True,
        "prompt_mode": "reasoning",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    found = accepted(value({"custom_id": "a", "body": body}))
    assert (found.url, found.max_output_tokens) == ("/v1/chat/completions", 14)
    assert json.loads(found.body) == body


FILE = "iVBORw0KGgo" + "A" * 400_000
PICTURES = [
    {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": FILE}}]}]},
    {"contents": [{"parts": [{"inline_data": {"mime_type": "image/png", "data": FILE.replace("A", "_")}}]}]},
    {"messages": [{"content": [{"type": "image", "source": {"type": "base64", "data": FILE}}]}]},
    {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": FILE, "format": "wav"}}]}]},
    {"messages": [{"content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{FILE}"}}]}]},
]


@pytest.mark.parametrize("body", PICTURES)
@pytest.mark.parametrize("indent", [None, 2])
def test_inline_files_of_every_family_count_alike(body: dict, indent: int | None):
    """A picture is not billed by the length of its text, wherever a family puts it."""
    text = json.dumps(body, indent=indent).encode()
    assert IMAGE_TOKENS <= estimate_tokens(text) < IMAGE_TOKENS + 200
    twice = json.dumps([body, body], indent=indent).encode()
    assert 2 * IMAGE_TOKENS <= estimate_tokens(twice) < 2 * IMAGE_TOKENS + 400


def test_the_tokens_of_a_record_are_those_of_its_body():
    """The estimate made while reading is the estimate of the body, files or none."""
    for body in (GEMINI | PICTURES[0], GEMINI, GEMINI | {"contents": {"parts": {"text": "\u6c49" * 9_000}}}):
        found = accepted(gemini(**body))
        assert found.tokens == estimate_tokens(found.body)


@pytest.mark.parametrize("text", ["plain words of a document " * 2_000, "\u6c49\u5b57" * 9_000, "line\n" * 9_000])
def test_a_document_in_plain_text_counts_by_its_length(text: str):
    """Anthropic's text documents have their words in a member called data, too."""
    body = json.dumps({"source": {"type": "text", "media_type": "text/plain", "data": text}}).encode()
    assert estimate_tokens(body) >= len(text) // 4
