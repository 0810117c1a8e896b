"""YAML that people write, read so that no text of theirs can do harm: it is taken, or there is one clear fault.

Only plain values are made (``yaml.SafeLoader``). The library itself checks neither how deep a text is nested, nor what
its aliases grow to when they are followed, and it meets values that do not fit their form (a thirteenth month, ``!!int
x``) with whatever exception comes to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

MAX_DEPTH = 64
MAX_VALUES = 200_000
"""Values, every use of an alias counted anew: so many has whoever goes through them."""

_NOT_THE_FORM = (ValueError, LookupError, AttributeError, TypeError, OverflowError)
_QUOTED_NAME = re.compile(r" '[^']*'")


class YamlFault(Exception):
    """The text cannot be taken. ``problem`` quotes no value of it; ``line`` and ``column`` begin with 1."""

    def __init__(self, problem: str, mark: yaml.error.Mark | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = None if mark is None else mark.line + 1
        self.column = None if mark is None else mark.column + 1


def parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The text as the library's nodes, which know their lines, and as plain values; None and None when it is empty.

    Raises:
        YamlFault: no YAML, or more than one document, or a form or size that nobody needs.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check(node)
        return node, loader.construct_document(node)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "unreadable"
        if any(word in problem for word in ("alias", "anchor", "tag")):
            problem = _QUOTED_NAME.sub("", problem)  # a secret that begins with * or ! is taken for one of these
        raise YamlFault(problem, getattr(error, "problem_mark", None)) from None
    except RecursionError:
        raise YamlFault(f"nested more than {MAX_DEPTH} deep") from None
    except _NOT_THE_FORM:
        raise YamlFault("a date, number or other value that does not fit its form; put quotes around it") from None
    finally:
        if loader is not None:
            loader.dispose()


def _check(root: yaml.Node) -> None:
    """Refuse what whoever goes through it would never come to the end of.

    Raises:
        YamlFault: too deep, too large, or in itself.
    """
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    is_open: set[int] = set()
    stack: list[tuple[yaml.Node, bool]] = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        place = id(node)
        if is_done:
            is_open.discard(place)
            parts = [id(part) for part in _parts(node)]
            sizes[place] = 1 + sum(sizes[part] for part in parts)
            depths[place] = 1 + max((depths[part] for part in parts), default=0)
            if depths[place] > MAX_DEPTH:
                raise YamlFault(f"nested more than {MAX_DEPTH} deep", node.start_mark)
            if sizes[place] > MAX_VALUES:
                raise YamlFault(f"more than {MAX_VALUES} values, aliases followed", node.start_mark)
        elif place in is_open:
            raise YamlFault("an alias of something that it is a part of", node.start_mark)
        elif place not in sizes:
            is_open.add(place)
            stack.append((node, True))
            stack.extend((part, False) for part in _parts(node))


def _parts(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()
