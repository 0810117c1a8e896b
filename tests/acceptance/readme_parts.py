"""The marked pieces of the README: what a reader copies, for the tests that run it."""

from __future__ import annotations

import re

from acceptance.readme_blocks import README


def parts(mark: str) -> list[str]:
    """The code below every comment that begins with this word, in the order of the page."""
    return re.findall(rf"<!-- {mark}\b[^\n]*-->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL)


def snippet(mark: str) -> str:
    """The one such piece."""
    (found,) = parts(mark)
    return found
