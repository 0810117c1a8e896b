"""Which records are accepted, what becomes of their parts, and which rule each bad one is told."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import orjson
import pytest

from batchferry.domain.requests import (
    IMAGE_TOKENS,
    REMEDIES,
    BadRecord,
    RecordRule,
    Request,
    RequestRules,
    check_deadline,
    check_timestamp,
    estimate_tokens,
    parse_request,
)

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "m-small", "messages": [{"role": "user", "content": "hi"}]}


def record(**members: object) -> bytes:
    """A good record with these members changed; ... leaves one out."""
    line = {"custom_id": "a", "body": BODY} | members
    return json.dumps({name: value for name, value in line.items() if value is not ...}, ensure_ascii=False).encode()


def accepted(value: bytes | None, headers=(), rules: RequestRules | None = None) -> Request:
    """The request read from a record that must be good."""
    found = parse_request(value, headers, rules or RequestRules())
    assert isinstance(found, Request), found
    return found


def refused(value: bytes | None, headers=(), rules: RequestRules | None = None) -> BadRecord:
    """The refusal of a record that must be bad."""
    found = parse_request(value, headers, rules or RequestRules())
    assert isinstance(found, BadRecord), found
    assert found.remedy == REMEDIES[found.rule]
    return found


def with_body(**members: object) -> bytes:
    """A good record with these members of its body changed; ... leaves one out."""
    body = BODY | members
    return record(body={name: value for name, value in body.items() if value is not ...})


def test_rules_all_have_a_remedy():
    """Every rule has a remedy, and no remedy is left without its rule."""
    assert set(REMEDIES) == set(RecordRule)


def test_request_full_line():
    """A whole provider line is accepted with its parts as they were."""
    body = b'{"model":"m-small","max_tokens":16,"n":2,"messages":[{"role":"user","content":"\\u00e9 1.50"}]}'
    value = b'{"custom_id":"order-1","method":"POST","url":"/v1/chat/completions","body":' + body + b"}"
    found = accepted(value)
    assert (found.custom_id, found.url, found.body, found.model) == ("order-1", "/v1/chat/completions", body, "m-small")
    assert (found.max_output_tokens, found.inputs, found.priority_now) == (32, 1, False)
    assert (found.sla_s, found.deadline, found.account, found.passed_headers) == (None, None, None, ())


@pytest.mark.parametrize(
    "value",
    [
        b'{"custom_id":"a","body":{"model":"m","messages":[]}}',
        b'{"custom_id": "a", "body": {"model":"m","messages":[]}}',
        b'{"body":{"model":"m","messages":[]},"custom_id":"a"}',
        b'{"method":"POST","custom_id":"a","body":{"model":"m","messages":[]}}',
        b'{"custom_id":"a","method":null,"url":null,"body":{"model":"m","messages":[]}}',
        b'{"custom_id":"a","method":"post","body":{"model":"m","messages":[]}}',
        b'{"custom_id":"a","note":{"body":1},"body":{"model":"m","messages":[]}}',
        b'{"custom_id":"a","note":"x","body":{"model":"m","messages":[]}}',
        b'{"custom_id":"a","body":{"model":"m","messages":[]},"url":"/v1/chat/completions"}',
        b'\n {"custom_id":"a","body":{"model":"m","messages":[]}}\r\n',
        b'{\n  "custom_id" : "a",\n  "body" : {"model":"m","messages":[]}\n}',
        b'{"custom_id":"\\u0061","body":{"model":"m","messages":[]}}',
        b'{"custom_id":"a","params":{},"body":{"model":"m","messages":[]}}',
    ],
)
def test_request_same_record_any_look(value: bytes):
    """Order of members, spaces, defaults and unknown members make no difference to what is read."""
    found = accepted(value)
    assert (found.custom_id, found.url, found.model) == ("a", "/v1/chat/completions", "m")
    assert found.body == b'{"model":"m","messages":[]}'


@pytest.mark.parametrize(
    "custom_id",
    ["a b", "ключ", "订单-1", 'quote " and \\ slash', "nul \x00", "line\nbreak", "x" * 1024, "\u2028", "a🙂" * 150],
)
def test_request_custom_id_any_text(custom_id: str):
    """A custom_id may hold any characters, 300 of them with emoji as well."""
    for ascii_only in (True, False):
        value = json.dumps({"custom_id": custom_id, "body": BODY}, ensure_ascii=ascii_only).encode()
        assert accepted(value).custom_id == custom_id


def test_request_pretty_printed_body_is_one_line():
    """Line breaks between tokens become spaces and every token stays as it was."""
    body = b'{\r\n  "model": "m",\n  "temperature": 1.00,\n  "messages": [\n\t{"role":"user","content":"a\\nb \xe2\x80\xa8"}]\n}'
    found = accepted(b'{"custom_id":"a","body":' + body + b"\n}")
    assert found.body == body.replace(b"\r", b" ").replace(b"\n", b" ")
    assert b"1.00" in found.body
    assert b"\xe2\x80\xa8" in found.body


def test_request_numbers_any_size():
    """Numbers beyond a double are passed on as written."""
    body = b'{"model":"m","messages":[],"seed":12345678901234567890123,"x":1e999,"y":-0.0,"z":5e-400}'
    assert accepted(b'{"custom_id":"a","body":' + body + b"}").body == body


SURROGATE = b'{"custom_id":"a","body":{"model":"m","messages":["\\ud800"]}}'
ABSOLUTE = "https://api.openai.com/v1/chat/completions"
DEEP = b'{"custom_id":"a","body":{"model":"m","messages":[' + b"[" * 300 + b"]" * 300 + b"]}}"
ABYSS = b'{"custom_id":"a","body":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("value", "rule", "custom_id"),
    [
        (None, RecordRule.TOMBSTONE, None),
        (b"", RecordRule.EMPTY, None),
        (b" \r\n", RecordRule.EMPTY, None),
        (b"\xef\xbb\xbf" + record(), RecordRule.BOM, None),
        (b'{"custom_id":"a\xff","body":{"model":"m","messages":[]}}', RecordRule.NOT_UTF8, None),
        (b'{"custom_id":"a","body":{"model":"m","messages":["\xed\xa0\x80"]}}', RecordRule.NOT_UTF8, None),
        (record().decode().encode("utf-16"), RecordRule.NOT_UTF8, None),
        (b"not json at all", RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","body":{"model":"m","messages":[],}}', RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","body":{"model":"m","messages":[NaN]}}', RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","body":{"model":"m","messages":["\\x"]}}', RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","body":{"model":"m","messages":["\x01"]}}', RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","body":{"model":"m","messages":[01]}}', RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","body":{"model":"m"', RecordRule.NOT_JSON, None),
        (b'{"custom_id":"a","bo', RecordRule.NOT_JSON, None),
        (record() + record(), RecordRule.TRAILING_DATA, None),
        (record() + b"\n" + record(), RecordRule.TRAILING_DATA, None),
        (record() + b"\x00", RecordRule.TRAILING_DATA, None),
        (SURROGATE, RecordRule.LONE_SURROGATE, None),
        (SURROGATE.replace(b"d800", b"dc00"), RecordRule.LONE_SURROGATE, None),
        (DEEP, RecordRule.TOO_DEEP, "a"),
        (ABYSS, RecordRule.TOO_DEEP, None),
        (b"[]", RecordRule.NOT_OBJECT, None),
        (b'"text"', RecordRule.NOT_OBJECT, None),
        (b"7", RecordRule.NOT_OBJECT, None),
        (b'{"custom_id":"a","custom_id":"b","body":{"model":"m","messages":[]}}', RecordRule.DUPLICATE_MEMBER, None),
        (b'{"custom_id":"a","body":1,"body":{"model":"m","messages":[]}}', RecordRule.DUPLICATE_MEMBER, "a"),
        (b'{"custom_id":"a","body":{"model":"m","messages":[]},"body":{}}', RecordRule.DUPLICATE_MEMBER, "a"),
        (b'{"custom_id":"a","b\\u006fdy":{},"body":{"model":"m","messages":[]}}', RecordRule.DUPLICATE_MEMBER, "a"),
        (b'{"custom_id":"a","params":{"model":"m","max_tokens":1}}', RecordRule.SHAPE_NOT_SUPPORTED, "a"),
        (record(custom_id=...), RecordRule.MISSING_CUSTOM_ID, None),
        (record(custom_id=None), RecordRule.MISSING_CUSTOM_ID, None),
        (record(custom_id=42), RecordRule.CUSTOM_ID_TYPE, None),
        (record(custom_id=["a"]), RecordRule.CUSTOM_ID_TYPE, None),
        (record(custom_id=""), RecordRule.CUSTOM_ID_EMPTY, None),
        (record(custom_id="x" * 1025), RecordRule.CUSTOM_ID_TOO_LONG, "x" * 1024),
        (record(method="GET"), RecordRule.METHOD_NOT_POST, "a"),
        (record(method=1), RecordRule.METHOD_NOT_POST, "a"),
        (record(url=ABSOLUTE), RecordRule.URL_IS_ABSOLUTE, "a"),
        (record(url="//api.openai.com/v1"), RecordRule.URL_IS_ABSOLUTE, "a"),
        (record(url="/v1/images"), RecordRule.UNKNOWN_ENDPOINT, "a"),
        (record(url="v1/chat/completions"), RecordRule.UNKNOWN_ENDPOINT, "a"),
        (record(url=""), RecordRule.UNKNOWN_ENDPOINT, "a"),
        (record(url=["/v1/chat/completions"]), RecordRule.WRONG_TYPE, "a"),
        (record(body=...), RecordRule.MISSING_BODY, "a"),
        (record(body=None), RecordRule.MISSING_BODY, "a"),
        (record(body="{}"), RecordRule.BODY_NOT_OBJECT, "a"),
        (record(body=[1]), RecordRule.BODY_NOT_OBJECT, "a"),
        (with_body(model=...), RecordRule.MISSING_MODEL, "a"),
        (with_body(model=None), RecordRule.MISSING_MODEL, "a"),
        (with_body(model=""), RecordRule.MISSING_MODEL, "a"),
        (with_body(model=4), RecordRule.WRONG_TYPE, "a"),
        (with_body(model="m" * 257), RecordRule.WRONG_TYPE, "a"),
        (with_body(model="m\n"), RecordRule.WRONG_TYPE, "a"),
        (with_body(messages=...), RecordRule.MISSING_INPUT, "a"),
        (with_body(messages=None), RecordRule.MISSING_INPUT, "a"),
        (with_body(messages="hi"), RecordRule.WRONG_TYPE, "a"),
        (with_body(stream=True), RecordRule.STREAMING, "a"),
        (with_body(stream="no"), RecordRule.WRONG_TYPE, "a"),
        (with_body(stream=0), RecordRule.WRONG_TYPE, "a"),
        (with_body(n="2"), RecordRule.WRONG_TYPE, "a"),
        (with_body(n=True), RecordRule.WRONG_TYPE, "a"),
        (with_body(max_tokens=-1), RecordRule.WRONG_TYPE, "a"),
        (with_body(max_completion_tokens=1.5), RecordRule.WRONG_TYPE, "a"),
        (record(url="/v1/embeddings", body={"model": "m"}), RecordRule.MISSING_INPUT, "a"),
        (record(url="/v1/embeddings", body={"model": "m", "input": []}), RecordRule.MISSING_INPUT, "a"),
        (record(url="/v1/embeddings", body={"model": "m", "input": {}}), RecordRule.WRONG_TYPE, "a"),
        (record(url="/v1/completions", body={"model": "m"}), RecordRule.MISSING_INPUT, "a"),
    ],
)
def test_request_refusals(value: bytes | None, rule: RecordRule, custom_id: str | None):
    """Each bad record is told its own rule, with its custom_id where one could be read."""
    found = refused(value)
    assert (found.rule, found.custom_id) == (rule, custom_id)


def test_request_refusal_same_after_headers_and_any_order():
    """A fault is found as well when the record takes the careful way because its members stand in another order."""
    value = b'{"body":{"stream":true,"model":"m","messages":[]},"custom_id":"a"}'
    assert refused(value, [("tenant", b"t")]).rule is RecordRule.STREAMING


def test_request_refusal_quotes_nothing():
    """No message or remedy quotes what the record holds."""
    secret = "sekret-prompt"
    for value in (
        record(url=f"https://{secret}"),
        record(url=f"/{secret}"),
        record(method=secret),
        with_body(model=[secret]),
        with_body(stream=secret),
        with_body(messages=secret),
        record(custom_id={secret: 1}),
        f'{{"custom_id":"a","body":{{"model":"{secret}",}}}}'.encode(),
        f'{{"{secret}": \ud800}}'.encode(errors="surrogatepass"),
    ):
        found = refused(value)
        assert secret not in found.message + found.remedy


def test_request_too_large():
    """A body of 40 MB is refused unread, and so is a line that fits in no file of the provider."""
    big = b'{"custom_id":"a","body":{"model":"m","messages":["' + b"x" * 40_000_000 + b'"]}}'
    found = refused(big)
    assert found.rule is RecordRule.TOO_LARGE
    assert "16777216 bytes" in found.message
    for value in (with_body(pad="x" * 1000), b" " + with_body(pad="x" * 1000, stream=None)[:-1] + b"}"):
        assert refused(value, rules=RequestRules(max_line_bytes=1000)).rule is RecordRule.TOO_LARGE


def test_request_depth_exactly():
    """A body of exactly the allowed depth passes, one level more does not; brackets in texts do not count."""

    def nested(levels: int) -> bytes:
        return b'{"custom_id":"a","body":{"model":"m","messages":[' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"]}}"

    accepted(nested(200))
    assert refused(nested(201)).rule is RecordRule.TOO_DEEP
    accepted(with_body(messages=["[" * 5000 + "{" * 5000]))
    accepted(with_body(messages=[{"role": "user"}] * 500))


def test_request_endpoints():
    """Each endpoint is read by its own members; responses may leave the input out."""
    assert accepted(record(url="/v1/responses", body={"model": "m", "max_output_tokens": 7})).max_output_tokens == 7
    assert accepted(record(url="/v1/completions", body={"model": "m", "prompt": ["a"]})).inputs == 1
    assert accepted(record(url="/v1/moderations", body={"model": "m", "input": ["a", "b"]})).inputs == 1
    rules = RequestRules(default_url="/v1/embeddings")
    for given, inputs in (("text", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1], [2, 3]], 2)):
        assert accepted(record(body={"model": "m", "input": given}), rules=rules).inputs == inputs


def test_request_rules_not_mixed():
    """Two sets of rules do not share what they learned of a producer's records."""
    value = b'{"custom_id":"a","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}'
    accepted(value)
    narrow = RequestRules(endpoints=frozenset({"/v1/embeddings"}), default_url="/v1/embeddings")
    assert refused(value, rules=narrow).rule is RecordRule.UNKNOWN_ENDPOINT


def test_request_output_tokens():
    """Of several limits the largest counts, times the number of answers."""
    assert accepted(with_body(max_tokens=5, max_completion_tokens=9, n=3)).max_output_tokens == 27
    assert accepted(with_body(n=3)).max_output_tokens is None
    assert accepted(with_body(max_tokens=5, n=0)).max_output_tokens == 5


def test_headers_all_read():
    """The routing headers are read and end here; every other header is passed on in its order."""
    headers = [
        ("tenant", b"t1"),
        ("SLA", b"PT30H"),
        ("provider", b"main"),
        ("slice", "ведомство".encode()),
        ("priority", b"now"),
        ("traceparent", TRACE),
        ("ce_id", b"e1"),
        ("tenant", b"t2"),
    ]
    found = accepted(record(), headers)
    assert (found.sla_s, found.account, found.slice, found.priority_now) == (108000, "main", "ведомство", True)
    assert found.traceparent == TRACE
    assert found.passed_headers == (("tenant", b"t1"), ("traceparent", TRACE), ("ce_id", b"e1"), ("tenant", b"t2"))


def test_headers_deadline_in_utc():
    """A deadline with any zone is kept as the same instant in UTC."""
    found = accepted(record(), [("deadline", b"2026-11-16T02:00:00+02:00")])
    assert found.deadline == datetime(2026, 11, 16, tzinfo=UTC)


def test_headers_null_value_and_last_wins():
    """A null header passes; of two of ours the last one counts."""
    found = accepted(record(), [("odd", None), ("priority", b"batch"), ("priority", b"now")])
    assert found.priority_now
    assert found.passed_headers == (("odd", None),)


@pytest.mark.parametrize(
    "headers",
    [
        [("sla", b"30h")],
        [("sla", b"P1M")],
        [("sla", b"P1Y")],
        [("sla", b"-PT1H")],
        [("sla", b"PT0S")],
        [("sla", b"")],
        [("sla", b"\xff")],
        [("sla", b"P9999999999999W")],
        [("sla", b"PT101H")],
        [("deadline", b"tomorrow")],
        [("deadline", b"2026-11-16T02:00:00")],
        [("deadline", b"0001-01-01T00:00:00+10:00")],
        [("sla", b"PT1H"), ("deadline", b"2026-11-16T02:00:00Z")],
        [("provider", b"")],
        [("provider", b"nobody")],
        [("slice", b"a\x1fb")],
        [("slice", b"s" * 257)],
        [("priority", b"soon")],
        [("h", b"x")] * 65,
        [("h", b"x" * 20_000)],
    ],
)
def test_headers_refusals(headers):
    """A header of ours that cannot be understood is a bad record and names its custom_id."""
    rules = RequestRules(max_sla_s=360_000, accounts=frozenset({"main"}))
    found = refused(record(), headers, rules)
    assert (found.rule, found.custom_id) == (RecordRule.BAD_HEADER, "a")


def test_headers_trace_of_cloudevent():
    """ce_traceparent stands in for traceparent; a broken one is ignored, not refused."""
    assert accepted(record(), [("ce_traceparent", TRACE)]).traceparent == TRACE
    for broken in (b"00-00000000000000000000000000000000-b7ad6b7169203331-01", b"nonsense", b""):
        assert accepted(record(), [("traceparent", broken)]).traceparent is None


def test_cloudevent_structured_is_unwrapped():
    """The data of a structured CloudEvent is read as if it had been the value, base64 included."""
    structured = [("content-type", b"application/cloudevents+json; charset=utf-8"), ("tenant", b"t")]
    event = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "traceparent": TRACE.decode()}
    plain = event | {"data": orjson.Fragment(record(custom_id="inner"))}
    coded = event | {"data_base64": base64.b64encode(record(custom_id="inner")).decode()}
    for value in (orjson.dumps(plain), orjson.dumps(coded)):
        found = accepted(value, structured)
        assert (found.custom_id, found.traceparent) == ("inner", TRACE)
        assert found.passed_headers == (("tenant", b"t"), ("traceparent", TRACE))


@pytest.mark.parametrize(
    ("content_type", "value"),
    [
        (b"application/cloudevents-batch+json", b"[]"),
        (b"application/cloudevents+json", b"{}"),
        (b"application/cloudevents+json", b'{"data_base64":"%%%"}'),
        (b"application/cloudevents+json", b"\xff"),
        (b"application/cloudevents+json", b"nope"),
    ],
)
def test_cloudevent_refusals(content_type: bytes, value: bytes):
    """A batch of events, or an event without usable data, is refused by a rule of its own."""
    assert refused(value, [("content-type", content_type)]).rule is RecordRule.CLOUDEVENT_SHAPE


def test_cloudevent_data_is_held_to_the_rules():
    """What is inside an event obeys the same rules."""
    value = b'{"specversion":"1.0","data":{"custom_id":1}}'
    assert refused(value, [("content-type", b"application/cloudevents+json")]).rule is RecordRule.CUSTOM_ID_TYPE


def test_tokens_estimate():
    """English a quarter token a letter, Chinese more than one a character, an inline image a fixed number."""
    assert estimate_tokens(b"x" * 4000) == 1001
    assert 1000 < estimate_tokens(("我" * 1000).encode()) <= 1300
    assert 400 < estimate_tokens(("ж" * 1000).encode()) <= 800
    assert estimate_tokens(b'{"url":"data:image/png;base64,' + b"A" * 4_000_000 + b'"}') < 2 * IMAGE_TOKENS
    body = json.dumps(BODY | {"x": "我好" * 50}, ensure_ascii=False).encode()
    value = b'{"custom_id":"a","body":' + body + b"}"
    assert accepted(value).tokens == estimate_tokens(body)


def test_timestamp_rules():
    """A record needs a timestamp that is not further in the future than clocks differ; age is no fault."""
    now_ms = int(NOW.timestamp() * 1000)
    for fine in (0, now_ms, now_ms + 60_000):
        assert check_timestamp(fine, NOW, 60) is None
    for stamp, rule in ((None, "timestamp_missing"), (-1, "timestamp_missing"), (now_ms + 60_001, "timestamp_future")):
        found = check_timestamp(stamp, NOW, 60)
        assert found is not None
        assert found.rule.value == rule


def test_a_deadline_too_far_away_is_refused():
    """The deadline header is bound like an SLA; one in the past is no fault of the record."""
    rules = RequestRules(max_sla_s=3600)
    assert check_deadline(accepted(record()), NOW, rules) is None
    assert check_deadline(accepted(record(), [("deadline", b"2020-01-01T00:00:00Z")]), NOW, rules) is None
    far = check_deadline(accepted(record(), [("deadline", b"2027-01-01T00:00:00Z")]), NOW, rules)
    assert far is not None
    assert (far.rule, far.custom_id) == (RecordRule.BAD_HEADER, "a")


def test_a_record_without_url_takes_the_endpoint_of_its_model():
    """Where routes differ in their endpoint, the model decides which one a record without url is for."""
    rules = RequestRules(default_url_of=lambda model: "/v1/embeddings" if "embedding" in model else "/v1/responses")
    embedding = parse_request(b'{"custom_id":"a","body":{"model":"text-embedding-3-small","input":"x"}}', (), rules)
    response = parse_request(b'{"custom_id":"b","body":{"model":"gpt-5-mini","input":"x"}}', (), rules)
    named = parse_request(
        b'{"custom_id":"c","url":"/v1/chat/completions","body":{"model":"gpt-5-mini","messages":[{}]}}', (), rules
    )
    assert [one.url for one in (embedding, response, named)] == [
        "/v1/embeddings",
        "/v1/responses",
        "/v1/chat/completions",
    ]
