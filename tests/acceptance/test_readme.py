"""The README is true: its generated parts are fresh, its snippet runs, the files it names exist."""

from __future__ import annotations

import re

from acceptance.readme_blocks import README, with_blocks


def test_generated_parts_are_fresh() -> None:
    """State diagram, class table and settings table say what the code says (``make docs`` writes them)."""
    text = README.read_text()
    assert with_blocks(text) == text


def test_named_files_exist() -> None:
    """Every source file the page points at is there."""
    text = README.read_text()
    root = README.parent
    named = set(re.findall(r"\]\((src/[^)]+|schemas[^)]*)\)", text))
    named |= {f"src/batchferry/{path}" for path in re.findall(r"`((?:domain|engine|providers)/[\w/]+\.py)`", text)}
    assert named
    assert [path for path in sorted(named) if not (root / path).exists()] == []
