"""A cache marker is set only where the caller has set none, and changes nothing else."""

from __future__ import annotations

import json

import msgspec
import pytest

from batchferry.domain.caching import add_cache_marker

MARK = {"type": "ephemeral", "ttl": "1h"}
MESSAGES = b'[{"role":"user","content":"say \\u00e9 1.0 1e400"}]'


def marked(system: object, **members: object) -> dict:
    """What becomes of a request with this system prompt."""
    request = {"model": "claude-sonnet-4-5", "max_tokens": 9, "system": system, "messages": [], **members}
    return json.loads(add_cache_marker(json.dumps(request).encode()))


def test_a_text_becomes_a_block_with_a_marker():
    """The system prompt keeps its words; the hour is the default."""
    assert marked("Be brief.")["system"] == [{"type": "text", "text": "Be brief.", "cache_control": MARK}]
    short = json.loads(add_cache_marker(b'{"system":"a"}', ttl="5m"))
    assert short["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


def test_of_several_blocks_the_last_is_marked():
    """A marker covers everything before it, so one at the end is enough; a null marker is none."""
    blocks = [{"type": "text", "text": "a", "citations": None}, {"type": "text", "text": "b", "cache_control": None}]
    assert marked(blocks)["system"] == [blocks[0], {"type": "text", "text": "b", "cache_control": MARK}]


def test_every_other_token_stays_as_it_was():
    """Numbers, escapes and the order of members are the caller's: they are part of what is cached and answered."""
    text = b'"caf\\u00e9 \\/ \xe2\x82\xac"'
    params = (
        b'{"temperature":1.0,"model":"m","big":123456789012345678901234567890,"system":%b,"messages":%b,"odd":1e400}'
    )
    found = add_cache_marker(params % (text, MESSAGES))
    block = b'[{"type":"text","text":%b,"cache_control":{"type":"ephemeral","ttl":"1h"}}]' % text
    assert found == params % (block, MESSAGES)


@pytest.mark.parametrize(
    "members",
    [
        {"cache_control": {"type": "ephemeral"}},
        {
            "system": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
            ]
        },
        {"tools": [{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                        }
                    ],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {
                                "type": "content",
                                "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                            },
                        }
                    ],
                }
            ]
        },
    ],
)
def test_a_caller_who_has_marked_anything_knows_best(members: dict):
    """A second marker could break the caller's own plan, or the limit of four."""
    params = json.dumps({"model": "m", "system": "Be brief.", "messages": [], **members}).encode()
    assert add_cache_marker(params) is params


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": '"cache_control": {"type": "ephemeral"}'}]},
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "input": {"cache_control": "no-store"}}]}
            ]
        },
        {"tools": [{"name": "t", "input_schema": {"properties": {"cache_control": {"type": "string"}}}}]},
        {"cache_control": None},
    ],
)
def test_the_word_alone_is_no_marker(members: dict):
    """Texts, arguments and schemas may speak of cache_control without asking for anything."""
    assert marked("Be brief.", **members)["system"][-1]["cache_control"] == MARK


@pytest.mark.parametrize(
    "params",
    [
        b'{"messages":[]}',
        b'{"system":null,"messages":[]}',
        b'{"system":"","messages":[]}',
        b'{"system":" \\n","messages":[]}',
        b'{"system":[],"messages":[]}',
        b'{"system":[{"type":"text","text":""}]}',
        b'{"system":[{"type":"text","text":5}]}',
        b'{"system":["a"]}',
        b'{"system":{"type":"text","text":"a"}}',
        b'{"system":"a","messages":[{"content":[[1]]}]' + b"[" * 3000,
        b"[]",
        b"",
        b"\xff",
    ],
)
def test_where_nothing_can_be_marked_nothing_changes(params: bytes):
    """An empty block may not carry a marker, and a shape that nobody knows is left to the provider's judgement."""
    assert add_cache_marker(params) is params


def test_marking_twice_is_marking_once():
    """Our own marker counts as one."""
    once = add_cache_marker(b'{"system":"a","messages":[]}')
    assert msgspec.json.decode(once)["system"][0]["cache_control"] == MARK
    assert add_cache_marker(once) is once


def test_a_batch_of_rows_never_holds_more_marks_than_were_meant():
    """One mark where the caller set none, the caller's own (four at most) everywhere else."""
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    for marks in range(5):
        system = [{"type": "text", "text": "a"}]
        messages = [{"role": "user", "content": [block]}] * marks
        params = json.dumps({"system": system, "messages": messages}).encode()
        found = add_cache_marker(add_cache_marker(params))
        assert found.count(b'"cache_control"') == max(marks, 1)
        assert (found == params) is (marks > 0)
