"""An answer's body comes out of the envelope with the bytes it went in with."""

from __future__ import annotations

import json

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.envelope import OutcomeContext, quote_original, render_failure, render_result
from batchferry.domain.rows import ResultLine, RowClass

text = st.text(st.characters(exclude_categories=["Cs"]))
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
MARK = b'"response":{"status_code":200,"request_id":null,"body":'


@given(body=json_value, indent=st.sampled_from([None, 1]), ascii_only=st.booleans(), custom_id=text)
@settings(max_examples=150, deadline=None)
def test_answers_body_bytes_identical(body, indent, ascii_only, custom_id):
    """In results and failures alike the native body stands byte for byte, and the whole is one JSON object."""
    raw = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode()
    ctx = OutcomeContext(ledger_id="abcdefghjk", topic="t", partition=0, offset=1, custom_id=custom_id)
    line = ResultLine("w", RowClass.SUCCEEDED, 200, body=raw)
    for value in (render_result(ctx, line, None), render_failure(ctx, RowClass.TRANSIENT, "c", "m", line=line)):
        at = value.index(MARK) + len(MARK)
        assert value[at : at + len(raw)] == raw
        found = json.loads(value)
        assert found["response"]["body"] == body
        assert found["custom_id"] == custom_id


@given(raw=st.binary(max_size=300) | text.map(str.encode), limit=st.integers(1, 310))
@settings(max_examples=150, deadline=None)
def test_answers_original_is_bounded(raw, limit):
    """A quoted original never exceeds its bound, always renders, and is a beginning of the value."""
    quoted = quote_original(raw, limit)
    assert quoted is not None
    ctx = OutcomeContext(ledger_id="abcdefghjk", topic="t", partition=0, offset=1)
    found = orjson.loads(render_failure(ctx, RowClass.BAD_RECORD, "c", "m", original=quoted))["original"]
    assert found["bytes"] == len(raw)
    if found["encoding"] == "utf8":
        assert len(found["value"].encode()) <= limit
        assert raw.startswith(found["value"].encode())
