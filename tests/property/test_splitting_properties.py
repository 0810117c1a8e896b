"""Whatever the text, its parts put together are the text, each fits, and nothing else has changed."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.requests import estimate_tokens
from batchferry.domain.splitting import MAX_PARTS, MIN_ROOM_SHARE, plain_text

CHAT = "/v1/chat/completions"

pieces = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "word ",
            "\n\n",
            "End. ",
            "完。",
            "\U0001f468\u200d\U0001f469",
            "\U0001f1e9\U0001f1ea",
            "e\u0301",
            '"',
            "\\",
            "\x00",
            "\r\n",
            ";base64,AAAA",
        ]
    ),
)
long_texts = st.lists(st.tuples(pieces, st.integers(1, 200)), max_size=12).map(
    lambda found: "".join(piece * times for piece, times in found)
)
others = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in {"messages", "input", "previous_response_id", "conversation"}),
    st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8), st.lists, max_leaves=5),
    max_size=4,
)
histories = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=40)}),
    max_size=3,
)


@settings(deadline=None)
@given(text=long_texts, members=others, history=histories, max_tokens=st.integers(1, 800), escaped=st.booleans())
def test_parts_are_the_text_and_fit(text: str, members: dict, history: list, max_tokens: int, escaped: bool):
    """Chat: the parts' texts in order are the text; each part fits and is the parent save for the text."""
    parent = {**members, "messages": [*history, {"role": "user", "content": text}], "last": 1}
    body = json.dumps(parent, ensure_ascii=escaped).encode()
    parts = plain_text.split(body, CHAT, max_tokens)
    if parts is None:
        frame = json.dumps({**parent, "messages": [*history, {"role": "user", "content": ""}]}, ensure_ascii=escaped)
        is_crowded = max_tokens - estimate_tokens(frame.encode()) < max(2, max_tokens * MIN_ROOM_SHARE)
        fits_already = estimate_tokens(msgspec.json.encode(text)) <= max_tokens + 1
        assert is_crowded or fits_already or len(text) > MAX_PARTS
        return
    assert 2 <= len(parts) <= MAX_PARTS
    said = []
    for part in parts:
        assert estimate_tokens(part) <= max_tokens
        found = json.loads(part)
        said.append(found["messages"][-1]["content"])
        assert said[-1]
        found["messages"][-1]["content"] = text
        assert found == parent
        assert list(found) == list(parent)
    assert "".join(said) == text


@settings(deadline=None)
@given(text=long_texts, max_tokens=st.integers(20, 800))
def test_the_text_of_a_response_is_cut_alike(text: str, max_tokens: int):
    """Responses with a text as input are held to the same promise."""
    parts = plain_text.split(msgspec.json.encode({"model": "m", "input": text}), "/v1/responses", max_tokens)
    if parts is not None:
        assert "".join(json.loads(part)["input"] for part in parts) == text
        assert all(estimate_tokens(part) <= max_tokens for part in parts)
