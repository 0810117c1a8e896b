"""The catalogue and the code say the same: what the code tells is in it, and all that is in it is told."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import batchferry
from batchferry.telemetry import EVENTS, METRICS, SPANS
from batchferry.telemetry.catalogue import Kind

SOURCE = Path(batchferry.__file__).parent
KINDS: Mapping[str, Mapping[str, Any]] = {
    "event": EVENTS,
    "count": {name: spec for name, spec in METRICS.items() if spec.kind is Kind.COUNTER},
    "gauge": {name: spec for name, spec in METRICS.items() if spec.kind is Kind.GAUGE},
    "observe": {name: spec for name, spec in METRICS.items() if spec.kind is Kind.HISTOGRAM},
    "batch_span": SPANS,
}
"""The methods that tell something, with the part of the catalogue that each takes its names from."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Told(NamedTuple):
    """One place where something is told."""

    where: str
    method: str
    name: str
    keywords: frozenset[str]


def is_telemetry(node: ast.expr) -> bool:
    """Whether an expression names the telemetry: ``telemetry``, ``self._telemetry``, ``service.telemetry``."""
    return ast.unparse(node).rpartition(".")[2].lstrip("_") == "telemetry"


def literals(node: ast.expr, assigned: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    """The texts an expression can be: a literal, a choice between two, or a name that was given one before."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body, assigned)
        yield from literals(node.orelse, assigned)
    elif isinstance(node, ast.Name):
        for value in assigned.get(node.id, []):
            yield from literals(value, {})


def words_of(keyword: ast.keyword) -> Iterator[str]:
    """The names a keyword argument gives; ``**{"class": x}`` gives a word that cannot be written as one."""
    if keyword.arg is not None:
        yield keyword.arg
    elif isinstance(keyword.value, ast.Dict):
        for key in keyword.value.keys:
            if isinstance(key, ast.Constant):
                yield str(key.value)


def calls(function: ast.AST, path: Path) -> Iterator[Told]:
    """What one function, or a module outside its functions, tells."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    aliases = {
        name: value.attr
        for name, values in assigned.items()
        for value in values
        if isinstance(value, ast.Attribute) and value.attr in KINDS and is_telemetry(value.value)
    }
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in KINDS and is_telemetry(node.func.value):
            method = node.func.attr
        elif isinstance(node.func, ast.Name) and node.func.id in aliases:
            method = aliases[node.func.id]
        else:
            continue
        keywords = frozenset(keyword for one in node.keywords for keyword in words_of(one))
        for name in literals(node.args[0], assigned):
            yield Told(f"{path.relative_to(SOURCE)}:{node.lineno}", method, name, keywords)


def entries(tree: ast.AST, path: Path) -> Iterator[Told]:
    """What is told without a call of its own: counted a row and flushed later, or taken out of the catalogue."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript):
            continue
        where = f"{path.relative_to(SOURCE)}:{node.lineno}"
        owner = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
        if owner == "counts" and isinstance(node.slice, ast.Tuple):
            name, label = (next(literals(one, {}), "") for one in node.slice.elts[:2])
            if name:
                yield Told(where, "count", name, frozenset({label}))
        elif owner == "EVENTS":
            for name in literals(node.slice, {}):
                yield Told(where, "event", name, frozenset())


@cache
def told() -> frozenset[Told]:
    """Everything that the product tells under a literal name."""
    found: set[Told] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        for function in functions:
            found.update(calls(function, path))
        found.update(entries(tree, path))
    return frozenset(found)


def test_every_name_told_is_in_the_catalogue() -> None:
    """No event, metric or span is told under a name or with a field that the catalogue lacks."""
    faults = []
    for where, method, name, keywords in sorted(told()):
        spec = KINDS[method].get(name)
        if spec is None:
            faults.append(f"{where}: {method} {name} is not in the catalogue ({sorted(keywords)})")
            continue
        allowed = set(spec.fields) if method == "event" else set(getattr(spec, "labels", ()))
        if method != "batch_span" and (extra := keywords - allowed):
            faults.append(f"{where}: {name} has no {sorted(extra)}; it has {sorted(allowed)}")
        if method in {"count", "gauge", "observe"} and (lacking := allowed - keywords):
            faults.append(f"{where}: {name} is told without its {sorted(lacking)}")
    assert told()
    assert faults == []


def test_every_name_in_the_catalogue_is_told() -> None:
    """Each event, metric and span of the catalogue is told somewhere; a dashboard built on it stays empty nowhere."""
    names = {(method, name) for _, method, name, _ in told()}
    untold = [f"{method} {name}" for method, specs in KINDS.items() for name in specs if (method, name) not in names]
    assert untold == []
