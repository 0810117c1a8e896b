"""Bodies keep every token, whatever they hold; and what is accepted is strict JSON whatever was thrown at it."""

from __future__ import annotations

import json
import re

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.requests import RecordRule, Request, RequestRules, parse_request

RULES = RequestRules()

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.from_regex(
        r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,3})?", fullmatch=True, alphabet="0123456789.eE+-"
    ),
)
space = st.text(" \t\r\n", max_size=3)


@st.composite
def string_token(draw) -> str:
    """A JSON string in one of the ways it can be written."""
    return json.dumps(draw(text), ensure_ascii=draw(st.booleans()))


@st.composite
def json_text(draw, depth: int = 3) -> str:
    """JSON with odd spacing, written by hand so that its tokens are not a library's."""
    kind = draw(st.sampled_from(["string", "number", "word"] + (["array", "object"] if depth else [])))
    pad = draw(space)
    if kind == "string":
        return pad + draw(string_token()) + draw(space)
    if kind == "number":
        return pad + draw(number) + draw(space)
    if kind == "word":
        return pad + draw(st.sampled_from(["true", "false", "null"])) + draw(space)
    if kind == "array":
        return pad + "[" + ",".join(draw(st.lists(json_text(depth - 1), max_size=3))) + draw(space) + "]"
    members = draw(st.lists(st.tuples(string_token(), json_text(depth - 1)), max_size=3))
    return pad + "{" + ",".join(f"{draw(space)}{name}{draw(space)}:{value}" for name, value in members) + "}"


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s"]', re.DOTALL)


def tokens(raw: bytes) -> list[bytes]:
    """Every token of JSON text: strings whole, everything else character by character."""
    return _TOKEN.findall(raw)


@given(
    extra=st.lists(
        st.tuples(
            text.filter(lambda name: name not in {"model", "messages", "stream", "n"} and "max_" not in name),
            json_text(),
        ),
        max_size=4,
    ),
    custom_id=text.filter(bool),
    pad=space,
    body_first=st.booleans(),
    ascii_only=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_requests_body_tokens_identical(extra, custom_id, pad, body_first, ascii_only):
    """A request's body differs from what was sent in line breaks between tokens and in nothing else."""
    members = ['"model":"m"', '"messages":[]', *(f"{json.dumps(name)}{pad}:{value}" for name, value in extra)]
    body = ("{" + f"{pad},".join(members) + pad + "}").encode()
    name = json.dumps(custom_id, ensure_ascii=ascii_only).encode()
    if body_first:
        value = b'{"body":' + body + b',"custom_id":' + name + b"}"
    else:
        value = b'{"custom_id":' + name + b',"method":"POST","body":' + body + b"}"
    found = parse_request(value, (), RULES)
    assert isinstance(found, Request), found
    assert found.custom_id == custom_id
    assert found.body == body.replace(b"\n", b" ").replace(b"\r", b" ")
    assert tokens(found.body) == tokens(body)


SEEDS = [
    b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[{"role":"user","content":"h\\u00e9\xc3\xa9"}]}}',
    b'{"custom_id": "a", "body": {"model": "m", "messages": [1.5e3, true, null, {"a": []}], "stream": false}}',
    b'{"body":{"model":"m","messages":[]},"custom_id":"a"}',
]
SCRAPS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\ud800",
    b"\xff",
    b"\xed\xa0\x80",
    b"\x00",
    b"\n",
    b"0",
    b"-",
    b".",
    b"e",
    b"\\u12",
    b"NaN",
    b'"body":',
    b'"custom_id":"b",',
    b"\xef\xbb\xbf",
    b" ",
    b"\x0b",
    b"1e999",
    b"tru",
]


@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from(SCRAPS)), min_size=1, max_size=3),
)
@settings(max_examples=600, deadline=None)
def test_requests_strictness_matches_another_parser(seed, edits):
    """Whatever is damaged: a record is accepted only if a second, strict parser reads the same from it."""
    value = seed
    for place, cut, scrap in edits:
        at = place % (len(value) + 1)
        value = value[:at] + scrap + value[at + cut :]
    found = parse_request(value, (), RULES)
    try:
        other = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        reason = error.msg
        other = None
    if other is None:
        # The only lawful JSON which that parser refuses: a number beyond a double.
        assert not isinstance(found, Request) or "infinity" in reason
        return
    if isinstance(found, Request):
        assert found.custom_id == other["custom_id"]
        assert orjson.loads(found.body) == other["body"]
    else:
        assert found.rule not in {
            RecordRule.NOT_UTF8,
            RecordRule.BOM,
            RecordRule.LONE_SURROGATE,
            RecordRule.TRAILING_DATA,
        }


@given(value=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_requests_never_raise(value):
    """Any bytes at all give a request or a refusal."""
    assert parse_request(value, (), RULES) is not None
