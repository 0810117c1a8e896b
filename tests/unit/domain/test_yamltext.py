"""YAML that people write: taken, or one clear fault."""

from __future__ import annotations

import pytest

from batchferry.domain.yamltext import MAX_DEPTH, MAX_VALUES, YamlFault, parse_yaml

_GROWING = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{{', '.join(f'k{number}: *{below}' for number in range(9))}}}\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_plain_values_and_their_nodes_are_given() -> None:
    """A mapping comes with its nodes; aliases are taken; an empty text is nothing."""
    node, value = parse_yaml("a: &x [1, b]\nc: *x\n")
    assert node is not None
    assert node.start_mark.line == 0
    assert value == {"a": [1, "b"], "c": [1, "b"]}
    assert parse_yaml("# nothing\n") == (None, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 20_000, "nested more than"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than"),
        ("a: &a [*a]\n", "a part of"),
        (_GROWING, f"more than {MAX_VALUES} values"),
        ("a: 2026-99-99\n", "does not fit its form"),
        (f"a: {'9' * 5000}\n", "does not fit its form"),
        ("a: !!int x\n", "does not fit its form"),
        ("a: !!int ''\n", "does not fit its form"),
        ("a: !!bool x\n", "does not fit its form"),
        ("a: !!timestamp x\n", "does not fit its form"),
        ("a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: \x01\n", "unreadable"),
    ],
)
def test_whatever_cannot_be_taken_is_a_fault(text: str, problem: str) -> None:
    """Depth, growth by aliases, loops, values that do not fit their form, foreign tags: each is named, none escapes."""
    with pytest.raises(YamlFault, match=problem):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["password: *hunter2\n", "password: !hunter2 x\n"])
def test_a_fault_quotes_no_secret(text: str) -> None:
    """A secret that begins with YAML's own signs is taken for an alias or a tag, and is not told."""
    with pytest.raises(YamlFault) as caught:
        parse_yaml(text)
    assert "hunter2" not in caught.value.problem
    assert caught.value.line == 1


def test_the_bounds_leave_room() -> None:
    """As deep as is allowed, and many values without aliases, are taken."""
    depth = MAX_DEPTH - 1
    assert parse_yaml("[" * depth + "]" * depth)[1] is not None
    assert len(parse_yaml("[" + "1, " * 2_000 + "]")[1]) == 2_000
