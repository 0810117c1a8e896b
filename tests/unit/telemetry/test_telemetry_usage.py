"""Every name the code tells is in the catalogue, with the fields and labels it may have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import batchferry
from batchferry.telemetry import EVENTS, METRICS, SPANS

SOURCE = Path(batchferry.__file__).parent
KINDS = {"event": EVENTS, "count": METRICS, "gauge": METRICS, "observe": METRICS, "batch_span": SPANS}


def calls() -> Iterator[tuple[str, str, str, set[str]]]:
    """(where, method, name, keywords) of every call of a telemetry method with a literal name."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS):
                continue
            owner = ast.unparse(node.func.value)
            if "telemetry" not in owner:
                continue
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                keywords = {one.arg for one in node.keywords if one.arg is not None}
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node.func.attr, node.args[0].value, keywords


def test_every_name_told_is_in_the_catalogue() -> None:
    """No event, metric or span is told under a name or with a field that the catalogue lacks."""
    found = list(calls())
    faults = []
    for where, method, name, keywords in found:
        spec = KINDS[method].get(name)
        if spec is None:
            faults.append(f"{where}: {method} {name} is not in the catalogue ({sorted(keywords)})")
            continue
        allowed = set(spec.fields) if method == "event" else set(getattr(spec, "labels", ()))
        if method != "batch_span" and (extra := keywords - allowed):
            faults.append(f"{where}: {name} has no {sorted(extra)}; it has {sorted(allowed)}")
    assert found
    assert faults == []
