"""The generated parts of the README: what the code says, in the words of the page.

``python -m acceptance.readme_blocks`` (from ``tests``) writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

from batchferry.config import explain_settings
from batchferry.domain.machine import diagram
from batchferry.domain.retry import DEFAULT_RETRIES, KEPT
from batchferry.domain.rows import RowClass
from batchferry.engine.bounds import table as bounds

README = Path(__file__).resolve().parents[2] / "README.md"
SOURCE = Path(__file__).resolve().parents[2] / "src" / "batchferry" / "domain" / "rows.py"


def class_texts() -> dict[str, str]:
    """What ``rows.py`` says beside each class."""
    found = re.findall(r'^    [A-Z_]+ = "(\w+)"\n    """(.+?)"""', SOURCE.read_text(), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def classes() -> str:
    """The table of row classes and what is done about them."""
    texts = class_texts()
    lines = ["| class | what it means | what is done |", "|---|---|---|"]
    for row_class in RowClass:
        if row_class is RowClass.SUCCEEDED:
            action = "`results`"
        elif row_class in KEPT:
            action = "the row stays and goes again after the hold; no attempt is used up"
        elif row_class in DEFAULT_RETRIES:
            action = f"sent again {DEFAULT_RETRIES[row_class]} time(s) in a small batch, then `failures`"
        else:
            action = "`failures`" + (" (or `review`)" if row_class is RowClass.CONTENT_FILTERED else "")
        lines.append(f"| `{row_class.value}` | {texts[row_class.value]} | {action} |")
    return "\n".join(lines)


def settings() -> str:
    """The table of all settings."""
    lines = ["| setting | type | default | why |", "|---|---|---|---|"]
    for row in explain_settings():
        cells = (f"`{row.name}`", str(row.type), f"`{row.default}`" if row.default else "", row.why)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def blocks() -> dict[str, str]:
    """Every generated part by its name."""
    return {
        "bounds": bounds(),
        "machine": f"```mermaid\n{diagram()}\n```",
        "classes": classes(),
        "settings": settings(),
    }


def with_blocks(text: str) -> str:
    """The page with its generated parts made anew."""
    for name, content in blocks().items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
        assert count == 1, f"README has no place for {name}"
    return text


if __name__ == "__main__":
    README.write_text(with_blocks(README.read_text()))
