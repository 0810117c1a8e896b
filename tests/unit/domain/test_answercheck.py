"""Whether an answer is JSON, or JSON of the wanted shape; and why not, without a word of it."""

from __future__ import annotations

import json

import pytest

from batchferry.domain.answercheck import AnswerFault, CheckKind, check_answer, compile_schema
from batchferry.domain.errors import ConfigError

CHAT = "/v1/chat/completions"
SCHEMA = compile_schema(
    b'{"type":"object","required":["name","parts"],"properties":{"name":{"type":"string"},'
    b'"parts":{"type":"array","items":{"$ref":"#/$defs/part"}}},"$defs":{"part":{"type":"integer"}}}'
)
GOOD = '{"name":"a","parts":[1,2]}'


def chat(*texts: object, **message: object) -> bytes:
    """A chat completion with one choice for each text."""
    choices = [{"index": 0, "message": {"role": "assistant", "content": text, **message}} for text in texts]
    return json.dumps({"object": "chat.completion", "choices": choices, "usage": {"total_tokens": 1}}).encode()


def response(*items: object) -> bytes:
    """A response with these output items."""
    return json.dumps({"object": "response", "status": "completed", "output": items}).encode()


def said(*texts: str) -> dict:
    """A message item of a response."""
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text} for text in texts],
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD, None),
        (f" \n{GOOD}\n", None),
        ('"just a text"', None),
        ("12345678901234567890123", None),
        ("", AnswerFault.NO_TEXT),
        (" \n", AnswerFault.NO_TEXT),
        (None, AnswerFault.NO_TEXT),
        ("Here you are: {}", AnswerFault.NOT_JSON),
        (f"```json\n{GOOD}\n```", AnswerFault.NOT_JSON),
        (GOOD + GOOD, AnswerFault.NOT_JSON),
        (GOOD[:-1], AnswerFault.NOT_JSON),
        ("{'name': 1}", AnswerFault.NOT_JSON),
        ('{"a":NaN}', AnswerFault.NOT_JSON),
        ('{"a":1,}', AnswerFault.NOT_JSON),
        ("[" * 100_000, AnswerFault.TOO_DEEP),
    ],
)
def test_json_means_one_json_value_and_nothing_else(text: str | None, fault: AnswerFault | None):
    """Strict as the consumer's parser will be: no fences, no comments, no second value."""
    assert check_answer(chat(text), CHAT, "json") is fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD, None),
        ('{"name":"a","parts":[],"more":null}', None),
        ('{"name":"a"}', AnswerFault.SCHEMA),
        ('{"name":"a","parts":["one"]}', AnswerFault.SCHEMA),
        ("[]", AnswerFault.SCHEMA),
        ("not json", AnswerFault.NOT_JSON),
    ],
)
def test_a_schema_is_held_against_the_decoded_text(text: str, fault: AnswerFault | None):
    """References inside the schema are followed, and what is no JSON never reaches it."""
    assert check_answer(chat(text), CHAT, "json_schema", SCHEMA) is fault


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat(GOOD)),
        (CHAT, chat([{"type": "text", "text": GOOD[:5]}, {"type": "text", "text": GOOD[5:]}])),
        (CHAT, chat(None, tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": GOOD}}])),
        (CHAT, chat([{"type": "reasoning_text", "text": "Well, "}, {"type": "text", "text": GOOD}])),
        (CHAT, chat(None, function_call={"name": "f", "arguments": GOOD})),
        ("/v1/completions", json.dumps({"choices": [{"text": GOOD, "finish_reason": "stop"}]}).encode()),
        ("/v1/responses", response({"type": "reasoning", "summary": []}, said(GOOD[:5], GOOD[5:]))),
        ("/v1/responses", response({"type": "function_call", "name": "f", "arguments": GOOD})),
        ("/v1/messages", json.dumps({"content": [{"type": "text", "text": GOOD}]}).encode()),
        (
            "/v1/messages",
            json.dumps({"content": [{"type": "thinking"}, {"type": "tool_use", "input": json.loads(GOOD)}]}).encode(),
        ),
    ],
)
def test_the_text_is_found_where_each_endpoint_puts_it(endpoint: str, body: bytes):
    """Texts in pieces are put together, reasoning is passed over, and a forced tool's arguments are its answer."""
    assert check_answer(body, endpoint, "json_schema", SCHEMA) is None
    assert check_answer(body.replace(b"1", b"null"), endpoint, "json_schema", SCHEMA) is AnswerFault.SCHEMA


def test_with_several_choices_every_one_must_be_good():
    """The consumer may take any of them."""
    assert check_answer(chat(GOOD, GOOD), CHAT, "json") is None
    assert check_answer(chat(GOOD, "no"), CHAT, "json") is AnswerFault.NOT_JSON
    assert check_answer(chat(GOOD, None), CHAT, "json") is AnswerFault.NO_TEXT


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, b""),
        (CHAT, b"{"),
        (CHAT, b"[]"),
        (CHAT, b'{"choices":null}'),
        (CHAT, b'{"error":{"message":"no"}}'),
        (CHAT, b'{"choices":[{"message":{"content":5}}]}'),
        ("/v1/responses", b'{"output":"text"}'),
        ("/v1/messages", b'{"type":"message"}'),
    ],
)
def test_another_shape_is_unreadable(endpoint: str, body: bytes):
    """What the endpoint does not document has no text that could be judged."""
    assert check_answer(body, endpoint, "json") is AnswerFault.UNREADABLE


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, b'{"choices":[]}'),
        ("/v1/responses", response()),
        ("/v1/responses", response({"type": "message", "content": [{"type": "refusal", "refusal": "no"}]})),
        ("/v1/messages", b'{"content":[]}'),
        ("/v1/embeddings", b'{"data":[{"embedding":[1.0]}]}'),
    ],
)
def test_an_answer_without_text_is_bad_where_json_is_wanted(endpoint: str, body: bytes):
    """A refusal or an embedding is no JSON."""
    assert check_answer(body, endpoint, "json") is AnswerFault.NO_TEXT


@pytest.mark.parametrize("body", [b"", b"{", chat("text"), chat(None)])
def test_without_a_check_everything_is_good(body: bytes):
    """The canary then counts failures only."""
    assert check_answer(body, CHAT, "none") is None


def test_a_schema_that_is_asked_for_must_be_given():
    """Forgetting it is our fault, not the answer's."""
    with pytest.raises(ValueError, match="needs a schema"):
        check_answer(chat(GOOD), CHAT, "json_schema")


@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_no_fault_quotes_the_answer(kind: CheckKind):
    """A reason is one of a few words, whatever the answer says."""
    found = check_answer(chat("secret words"), CHAT, kind, SCHEMA)
    assert found in set(AnswerFault)
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no JSON object"),
        (b"true", "no JSON object"),
        (b'{"$schema":5}', "\\$schema"),
        (b'{"type":"nope"}', "its own rules at \\$.type"),
        (b'{"properties":{"a":5}}', "its own rules at \\$.properties.a"),
        (b'{"pattern":"["}', "its own rules at \\$.pattern"),
        (b'{"$ref":"#/$defs/b","$defs":{}}', "refers to #/\\$defs/b"),
        (b'{"properties":{"a":{"items":{"$ref":"#lost"}}}}', "refers to #lost"),
        (b'{"$ref":"https://example.com/schema.json"}', "nothing is fetched"),
        (b'{"$ref":"http://[bad"}', "refers to http://\\[bad"),
        (b'{"$ref":"#"}', "without an end"),
    ],
)
def test_a_schema_that_cannot_work_is_a_fault_of_the_settings(text: bytes, says: str):
    """Told at start-up with the place and the remedy, not as a bad answer hours later."""
    with pytest.raises(ConfigError, match=says):
        compile_schema(text)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"n": {"type": "integer"}},
            "items": {"$ref": "#/definitions/n"},
        },
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "http://example.com/root",
            "items": {"type": "integer"},
        },
        {
            "$id": "https://example.com/root",
            "items": {"$ref": "inner#/$defs/n"},
            "$defs": {"x": {"$id": "inner", "$defs": {"n": {"type": "integer"}}}},
        },
        {"items": {"anyOf": [{"type": "integer"}, {"$ref": "#"}]}, "type": "array"},
    ],
)
def test_every_draft_and_lawful_reference_works(schema: dict):
    """Older drafts, schemas with addresses of their own, and schemas that refer to themselves."""
    compiled = compile_schema(json.dumps(schema).encode())
    assert compiled.fits([1, 2])
    assert not compiled.fits(["one"])


def test_an_answer_deeper_than_a_recursive_schema_can_follow_is_a_fault_and_no_crash():
    """The depth of an answer is the model's, so it must not stop the service."""
    schema = compile_schema(b'{"type":"array","items":{"$ref":"#"}}')
    assert check_answer(chat("[[[]]]"), CHAT, "json_schema", schema) is None
    assert check_answer(chat("[" * 900 + "]" * 900), CHAT, "json_schema", schema) is AnswerFault.TOO_DEEP
