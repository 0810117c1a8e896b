"""Parameters that a batch refuses are found before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.providers.anthropic import check_params

OLD, NEW = "2023-06-01", "2026-10-21"


def check(version: str = NEW, **members: Any) -> str | None:
    """The member refused."""
    body = {"model": "claude-sonnet-4-5", "max_tokens": 10, "messages": []} | members
    found = check_params(json.dumps(body).encode(), version)
    assert found is None or ":" in found[1]
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("stream", True),
        ("stream", 1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", True),
        ("max_tokens", None),
        ("speed", "fast"),
        ("store", False),
        ("previous_thread_event_id", "e"),
        ("cache_hint", {}),
        ("context_hint", {}),
        ("research_preview_2026_02", "active"),
    ],
)
def test_refused_whatever_the_version(member, value):
    """What the guide on batches excludes is named with its remedy."""
    assert check(OLD, **{member: value}) == member
    assert check(NEW, **{member: value}) == member


@pytest.mark.parametrize("member", ["temperature", "top_p", "top_k"])
def test_sampling_depends_on_the_version(member):
    """The sampling parameters are refused from 2026-10-21 on and were taken before."""
    assert check(NEW, **{member: 1}) == member
    assert check(OLD, **{member: 1}) is None
    assert check(NEW, **{member: None}) is None


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
CITED = {"type": "text", "text": "x", "citations": [{"type": "char_location"}]}


@pytest.mark.parametrize(
    ("role", "content", "refused"),
    [
        ("assistant", [{"type": "text", "text": "x"}, DOCUMENT], "messages"),
        ("user", [CITED], "messages"),
        ("user", [DOCUMENT | {"citations": {"enabled": True}}], None),
        ("assistant", [CITED], None),
        ("assistant", [{"type": "web_fetch_tool_result", "content": {"content": DOCUMENT}}], None),
        ("user", [{"type": "text", "text": "document", "citations": None}], None),
        ("user", [{"type": "text", "text": "document", "citations": []}], None),
        ("user", "a document with citations", None),
        ("assistant", [["document"]], None),
        ("narrator", [DOCUMENT, CITED], None),
    ],
)
def test_blocks_that_the_version_refuses(role, content, refused):
    """A document in an assistant's message and citations in a user's text are refused from 2026-10-21 on."""
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": content}]
    assert check(NEW, messages=messages) == refused
    assert check(OLD, messages=messages) is None


def test_a_block_in_other_letters_is_seen():
    """A type written with escapes is the same type."""
    body = b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"d\\u006fcument"}]}]}'
    assert check_params(body, NEW) is not None


def test_what_a_batch_takes():
    """Absent, null and false refuse nothing; tools, thinking, system and caching are taken."""
    assert check(stream=False, speed=None, store=None, research_preview_2026_02="inactive") is None
    cached = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    assert check(tools=[{}], thinking={"type": "enabled"}, system=cached, max_tokens=300_000) is None
    assert check_params(b'{"max_tokens":1}') is None


@given(st.binary(max_size=40))
def test_nonsense_is_no_object(raw):
    """Bytes either can be read or are refused as no JSON object; nothing else happens."""
    try:
        check_params(raw)
    except ValueError:
        return
    assert isinstance(json.loads(raw), dict)
