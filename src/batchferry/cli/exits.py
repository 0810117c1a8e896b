"""Exit codes: what a script may rely on. They are the same for every command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Why a command ended."""

    OK = 0
    """Done. For ``run``: drained and stopped as asked."""
    FAILED = 1
    """The work failed: no broker, a provider that cannot be used, a check that does not agree."""
    USAGE = 2
    """Flags or settings are wrong; every fault is listed, nothing was begun."""
    REFUSED = 3
    """A start-up check refuses; each with its remedy (``doctor`` shows them all)."""
    BUDGET_PASSED = 4
    """``run`` was told to stop and could not drain in time. Nothing is lost: the next start goes on from there."""
    LINES_REFUSED = 5
    """``produce`` or ``replay`` did not send everything, or ``validate`` found faults; what is wrong is named."""
    INTERRUPTED = 130
    """Ended by Ctrl-C, or by a second signal."""


_SHORT = {
    Exit.OK: "done; for run: drained and stopped as asked",
    Exit.FAILED: "the work failed (no broker, a check that does not agree, ...)",
    Exit.USAGE: "flags or settings are wrong, nothing was begun",
    Exit.REFUSED: "a start-up check refuses, see doctor",
    Exit.BUDGET_PASSED: "run could not drain within its stop budget; nothing is lost",
    Exit.LINES_REFUSED: "produce or replay did not send everything, or validate found faults; they name what",
    Exit.INTERRUPTED: "ended by Ctrl-C or a second signal",
}


def epilog() -> str:
    """The exit codes as the help shows them; blank lines keep them apart there."""
    return "\n\n".join(["Exit codes:", *(f"{code.value:>3}  {text}" for code, text in _SHORT.items())])
