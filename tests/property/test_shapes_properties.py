"""However a request is written down, its kind is the same; a cache marker adds itself and nothing else."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.caching import add_cache_marker
from batchferry.domain.shapes import fingerprint, prefix

RELAXED = settings(deadline=None)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": values}),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"model": words, "messages": messages},
    optional={"tools": values, "response_format": values, "temperature": values, "system": values},
)


def shuffled(value: object, draws: random.Random) -> object:
    """The same JSON value with the members of every object in another order."""
    if isinstance(value, dict):
        names = list(value)
        draws.shuffle(names)
        return {name: shuffled(value[name], draws) for name in names}
    return [shuffled(item, draws) for item in value] if isinstance(value, list) else value


@RELAXED
@given(body=bodies, seed=st.integers(0, 2**32), indent=st.none() | st.integers(0, 3), escaped=st.booleans())
def test_the_way_it_is_written_changes_no_kind(body: dict, seed: int, indent: int | None, escaped: bool):
    """Order of members, white space and escapes are nobody's instructions."""
    tidy = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    loose = json.dumps(shuffled(body, random.Random(seed)), indent=indent, ensure_ascii=escaped).encode()
    assert fingerprint(loose, "m") == fingerprint(tidy, "m")


@RELAXED
@given(body=bodies, other=words, settings_=st.dictionaries(st.sampled_from(["temperature", "n", "user"]), values))
def test_only_words_behind_the_instructions_may_change(body: dict, other: str, settings_: dict):
    """Appending what a user says keeps the kind; putting an instruction in front of everything makes another."""
    spoken = {**body, **settings_, "messages": [*body["messages"], {"role": "user", "content": other}]}
    assert fingerprint(json.dumps(spoken).encode(), "m") == fingerprint(json.dumps(body).encode(), "m")
    told = {**body, "messages": [{"role": "system", "content": "x" + other}, *body["messages"]]}
    assert fingerprint(json.dumps(told).encode(), "m") != fingerprint(json.dumps(body).encode(), "m")


@RELAXED
@given(st.binary(max_size=60) | st.builds(lambda body: json.dumps(body).encode()[:-1], bodies))
def test_bytes_of_any_kind_raise_nothing(body: bytes):
    """Whatever a record holds, there is an answer."""
    assert len(fingerprint(body, "m")) == 16
    assert prefix(body) is None
    assert add_cache_marker(body) is body or json.loads(body)["system"]


@RELAXED
@given(body=bodies)
def test_a_marker_adds_itself_and_nothing_else(body: dict):
    """Without the marker the request is what it was, with its members in their order."""
    params = json.dumps(body).encode()
    found = add_cache_marker(params)
    if found is params:
        return
    marked = json.loads(found)
    assert list(marked) == list(body)
    assert marked["system"][-1].pop("cache_control") == {"type": "ephemeral", "ttl": "1h"}
    if isinstance(body["system"], str):
        marked["system"] = marked["system"][0]["text"]
    assert marked == body
