"""What makes two requests the same kind of prompt."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from batchferry.domain import shapes
from batchferry.domain.shapes import Reservoir, fingerprint, prefix

LONG = "Answer as a careful clerk. " * 200  # about 1,350 tokens
VERY_LONG = LONG * 4
TOOL = {"type": "function", "function": {"name": "file", "parameters": {"type": "object", "properties": {}}}}


def chat(words: object = "hello", system: object = "Be brief.", **members: object) -> bytes:
    """A chat completion request."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": words}]
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


def body(**members: object) -> bytes:
    """Any request."""
    return json.dumps(members).encode()


def test_a_fingerprint_is_sixteen_hexadecimal_digits_and_the_same_in_every_process():
    """Replicas compare fingerprints, so the value must never depend on a process or a version by accident."""
    found = fingerprint(chat(), "m")
    assert len(found) == 16
    assert set(found) <= set("0123456789abcdef")
    assert found == "9d2c52a7f9bc9c97"


def test_the_words_of_the_user_do_not_matter():
    """Rows that differ only in what the user says, in sampling settings or in limits are one kind."""
    first = fingerprint(chat("one"), "m")
    assert fingerprint(chat([{"type": "text", "text": "two"}], temperature=0.5, max_tokens=7, user="u"), "m") == first
    longer = {"model": "m", "messages": json.loads(chat("x"))["messages"] + [{"role": "system", "content": "late"}]}
    assert fingerprint(json.dumps(longer).encode(), "m") == first  # an instruction behind a user's words is not shared


@pytest.mark.parametrize(
    "other",
    [
        chat(system="Be long."),
        chat(tools=[TOOL]),
        chat(response_format={"type": "json_object"}),
        chat(functions=[{"name": "f"}]),
        body(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello"}]),
        body(messages=[{"role": "user", "content": "hello"}]),
        body(messages=[{"role": "system", "content": "Be brief."}] * 2),
    ],
)
def test_instructions_tools_and_wanted_form_matter(other: bytes):
    """Each of these changes what the model is told, so it is another kind."""
    assert fingerprint(other, "m") != fingerprint(chat(), "m")


def test_the_model_that_runs_it_matters():
    """The model comes from the caller: what the body says about it is not read."""
    assert fingerprint(chat(), "m") != fingerprint(chat(), "m2")
    assert fingerprint(chat(model="x"), "m") == fingerprint(chat(), "m")


def test_two_writings_of_the_same_json_are_one_kind():
    """White space, the order of members and escapes are the producer's habits, and null says nothing."""
    tidy = b'{"model":"m","messages":[{"role":"system","content":"caf\xc3\xa9"}],"tools":[{"a":1,"b":{"c":2,"d":3}}]}'
    loose = (
        b'{ "tools" : [ {"b": {"d":3, "c" : 2}, "a":1} ], "instructions": null,\n "messages": '
        b'[ {"content": "caf\\u00e9" , "role": "system"} ] , "model": "m"}'
    )
    assert fingerprint(tidy, "m") == fingerprint(loose, "m")


def test_each_endpoint_keeps_its_instructions_elsewhere():
    """Responses have them in instructions, leading items of input or a stored prompt; Anthropic in system."""
    same = [
        body(instructions="A", input="one"),
        body(instructions="A", input=[{"role": "user", "content": "two"}]),
    ]
    assert len({fingerprint(one, "m") for one in same}) == 1
    kinds = [
        *same[:1],
        body(instructions="B", input="one"),
        body(input=[{"role": "developer", "content": "A"}, {"role": "user", "content": "two"}]),
        body(input="one"),
        body(input="one", text={"format": {"type": "json_object"}, "verbosity": "low"}),
        body(input="one", prompt={"id": "p", "version": "1", "variables": {"name": "Ann"}}),
        body(input="one", prompt={"id": "p", "version": "2"}),
        body(system="A", messages=[{"role": "user", "content": "one"}]),
        body(system=[{"type": "text", "text": "A"}], messages=[{"role": "user", "content": "one"}]),
        body(system="A", messages=[], output_config={"format": {"type": "json_schema", "schema": {}}}),
    ]
    assert len({fingerprint(one, "m") for one in kinds}) == len(kinds)
    variables = body(input="two", prompt={"id": "p", "version": "1", "variables": {"name": "Bob"}})
    assert fingerprint(variables, "m") == fingerprint(kinds[5], "m")
    verbosity = body(input="two", text={"format": {"type": "json_object"}, "verbosity": "high"})
    assert fingerprint(verbosity, "m") == fingerprint(kinds[4], "m")


@pytest.mark.parametrize("input_", ["text", ["a", "b"], [1, 2], [[1], [2]], [{"text": "a"}], None])
def test_embeddings_are_one_kind_for_each_model(input_: object):
    """Where there are no instructions the model is the whole shape."""
    assert fingerprint(body(model="e", input=input_), "e") == fingerprint(body(input="x"), "e")


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"[]", b"null", b'"text"', b'{"messages":{"role":"system"}}', b'{"messages":["system"]}']
)
def test_what_cannot_be_read_is_a_kind_of_its_own(broken: bytes):
    """It must not pass for the shape of a request without instructions, nor stop anybody."""
    assert fingerprint(broken, "m") == fingerprint(b"\xff", "m")
    assert fingerprint(broken, "m") != fingerprint(b"{}", "m")
    assert fingerprint(broken, "m") != fingerprint(broken, "m2")
    assert prefix(broken) is None


def test_deep_and_odd_instructions_still_have_a_shape():
    """What the JSON library does not take apart is told apart by its bytes."""
    deep = b'{"tools":' + b"[" * 300 + b"]" * 300 + b"}"
    deeper = b'{"tools":' + b"[" * 301 + b"]" * 301 + b"}"
    half = b'{"instructions":"\\ud83d"}'
    assert len({fingerprint(one, "m") for one in (deep, deeper, half, b"{}")}) == 4


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A producer whose every prompt is new must not fill the memory, and forgetting changes no fingerprint."""
    monkeypatch.setattr(shapes, "_MAX_KNOWN", 8)
    monkeypatch.setattr(shapes, "_known", {})
    first = [fingerprint(chat(system=f"prompt {number}"), "m") for number in range(50)]
    assert len(shapes._known) <= 8
    assert not any(b"prompt" in key or b"prompt" in value for key, value in shapes._known.items())
    assert [fingerprint(chat(system=f"prompt {number}"), "m") for number in range(50)] == first


def test_a_long_shared_prefix_has_a_name_and_a_short_one_has_none():
    """Below the least length that a provider caches, grouping would only make small batches."""
    assert prefix(chat("one", "Be brief.")) is None
    assert prefix(chat("one", LONG)) == prefix(chat("two", LONG)) is not None
    assert prefix(chat("one", LONG)) != prefix(chat("one", LONG + "!"))
    assert prefix(chat(LONG, "Be brief.")) is None  # the user's words are no shared prefix, however long
    assert prefix(chat("one", "Be brief.", tools=[{"description": LONG}])) is not None
    assert prefix(body(input="one", instructions=LONG)) is not None


@pytest.mark.parametrize(
    ("model", "helps"),
    [
        ("claude-sonnet-4-5-20250929", True),
        ("claude-opus-4-1", True),
        ("claude-opus-4-5", False),
        ("claude-haiku-4-5", False),
        ("claude-3-5-haiku-latest", False),
        ("claude-of-tomorrow-9", False),
    ],
)
def test_the_least_length_is_the_models(model: str, helps: bool):
    """1,350 tokens are enough for some of Anthropic's models and not for others; 5,400 are for all."""
    request = {"model": model, "system": LONG, "messages": [{"role": "user", "content": "one"}]}
    assert (prefix(body(**request)) is not None) is helps
    assert prefix(body(**{**request, "system": VERY_LONG})) is not None


def test_a_reservoir_keeps_everything_while_it_fits():
    """A stream shorter than the sample is the sample."""
    kept = Reservoir(5, random.Random(1))
    for offset in (30, 10, 20):
        kept.offer(offset)
    assert kept.sample == (10, 20, 30)
    assert kept.seen == 3


def test_a_reservoir_is_fair_and_repeatable():
    """Over many streams each offset is sampled about equally often, and one seed gives one sample."""
    counts: Counter[int] = Counter()
    for seed in range(2_000):
        kept = Reservoir(5, random.Random(seed))
        for offset in range(20):
            kept.offer(offset)
        assert len(set(kept.sample)) == 5
        counts.update(kept.sample)
    assert set(counts) == set(range(20))
    assert all(420 <= times <= 580 for times in counts.values()), counts  # 500 each, four standard deviations
    samples = []
    for _ in range(2):
        kept = Reservoir(3, random.Random(7))
        for offset in range(1_000):
            kept.offer(offset)
        samples.append(kept.sample)
    assert samples[0] == samples[1]


def test_a_reservoir_has_room_for_one_at_least():
    """A sample of nothing would never have a verdict."""
    with pytest.raises(ValueError, match="at least one row"):
        Reservoir(0, random.Random(1))
