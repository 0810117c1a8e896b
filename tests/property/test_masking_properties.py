"""Whatever a request says: masking twice is masking once, and only texts of the prompt change."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.masking import StockMasker, stock
from batchferry.domain.personaldata import Rule

CHAT = "/v1/chat/completions"
EVERYTHING = StockMasker(frozenset(Rule))
KEYED = StockMasker(frozenset(Rule), b"k" * 16)

PIECES = [
    "a@b.co", "x.y+z@d.e-f.org", "4111 1111 1111 1111", "378282246310005", "DE89370400440532013000", "+49 89 1234567",
    "0049 89 1234567", "(415) 555-2671", "089 1234567", "01 42 68 53 00", "078-05-1120", "12345678Z", "8001015009087",
    "<email-1>", "<phone-k00000000000a>", "tel ", "order no. ", "PESEL 44051401359", "2001:db8::1", "10.0.0.1",
    "2024-01-15", "12", "0", "-", "/", ".", " ", "+", "(", ")", "@", "<", ">", '"', "\\", "\n", "\u00a0", "\u5361",
    "\uff14", "\U0001f600", "e", "Z",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=14).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "text", "id", "content"]), inner, max_size=3)
    ),
    max_leaves=4,
)
names = ["messages", "input", "prompt", "system", "model", "tools", "contents", "arguments"]
bodies = st.dictionaries(st.sampled_from(names), values, max_size=4)


@settings(deadline=None, max_examples=150)
@given(text=texts, nested=st.booleans(), escaped=st.booleans(), masker=st.sampled_from([stock, EVERYTHING, KEYED]))
def test_masking_twice_is_masking_once(text: str, nested: bool, escaped: bool, masker: StockMasker):
    """Of texts, and of texts in the JSON of a tool call's arguments."""
    message = {"tool_calls": [{"function": {"arguments": json.dumps({"x": text})}}]} if nested else {"content": text}
    body = json.dumps({"messages": [message]}, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    once = masker.mask(body, CHAT)
    if once is None:
        return
    assert masker.mask(once, CHAT) is None
    json.loads(once)


@settings(deadline=None, max_examples=100)
@given(body=bodies, escaped=st.booleans())
def test_only_strings_change_and_only_in_the_prompt(body: dict, escaped: bool):
    """Shapes, names, numbers, and members that are no prompt stay what they were."""
    written = json.dumps(body, ensure_ascii=escaped).encode()
    found = stock.mask(written, CHAT)
    after = body if found is None else json.loads(found)
    assert after.keys() == body.keys()
    for name in {"model", "tools", "arguments"} & body.keys():
        assert after[name] == body[name]
    assert _shape(after) == _shape(body)


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return {name: value[name] if name == "id" else _shape(value[name]) for name in value}
    if isinstance(value, list):
        return [_shape(inner) for inner in value]
    return "text" if isinstance(value, str) else value
