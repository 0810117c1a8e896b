"""The places where a crash could hurt: one name for the moment before and after everything that lasts.

A test installs a hook that kills, pauses or delays the process when a named place is reached; a service that nobody
tests has none, and reaching a place then costs one comparison. No setting and no variable installs a hook: nobody
can switch this on in production by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final


class Failpoint(StrEnum):
    """Every place. ``X.before`` and ``X.after`` stand around a durable step."""

    # Taking a partition over.
    RESTORE_BEGUN = "restore.begun"
    RESTORE_FENCED = "restore.fenced"
    """The predecessor's producer is fenced, nothing is claimed or read yet."""
    RESTORE_READ = "restore.read"
    RESTORE_ADOPTED = "restore.adopted"

    # Transactions of a partition, by purpose.
    CLAIM_BEFORE = "claim.before"
    CLAIM_AFTER = "claim.after"
    SUBMITTING_BEFORE = "submitting.before"
    SUBMITTING_AFTER = "submitting.after"
    SUBMITTED_BEFORE = "submitted.before"
    SUBMITTED_AFTER = "submitted.after"
    SETTLE_BEFORE = "settle.before"
    SETTLE_AFTER = "settle.after"
    LAND_BEFORE = "land.before"
    LAND_AFTER = "land.after"
    DISSOLVE_BEFORE = "dissolve.before"
    DISSOLVE_AFTER = "dissolve.after"
    DISOWN_BEFORE = "disown.before"
    DISOWN_AFTER = "disown.after"
    HOLD_BEFORE = "hold.before"
    HOLD_AFTER = "hold.after"
    CLEAN_BEFORE = "clean.before"
    CLEAN_AFTER = "clean.after"
    REFRESH_BEFORE = "refresh.before"
    REFRESH_AFTER = "refresh.after"
    TIDY_BEFORE = "tidy.before"
    TIDY_AFTER = "tidy.after"
    WAVE_BEFORE = "wave.before"
    WAVE_AFTER = "wave.after"
    RESCUE_BEFORE = "rescue.before"
    RESCUE_AFTER = "rescue.after"

    # Acts at the provider.
    UPLOAD_BEFORE = "upload.before"
    UPLOAD_AFTER = "upload.after"
    CREATE_BEFORE = "create.before"
    CREATE_AFTER = "create.after"
    DELETE_INPUT_BEFORE = "delete_input.before"
    DELETE_INPUT_AFTER = "delete_input.after"
    CANCEL_BEFORE = "cancel.before"
    CANCEL_AFTER = "cancel.after"
    DELETE_FILES_BEFORE = "delete_files.before"
    DELETE_FILES_AFTER = "delete_files.after"
    SYNC_CALL_BEFORE = "sync_call.before"
    SYNC_CALL_AFTER = "sync_call.after"

    # Other things that last, or that others see.
    ROWS_SPOOLED = "rows.spooled"
    BATCH_SEALED = "batch.sealed"
    CONTROL_BEFORE = "control.before"
    CONTROL_AFTER = "control.after"
    RESULTS_DOWNLOADED = "results.downloaded"
    RESULTS_READ = "results.read"

    # Giving up.
    PARTITION_LOST = "partition.lost"
    PARTITION_CLOSED = "partition.closed"
    STOP_BEGUN = "stop.begun"
    STOP_DRAINED = "stop.drained"
    STOP_CLOSED = "stop.closed"


Hook = Callable[[Failpoint], None]
"""Called in the step of the event loop that reached the place; what it raises comes out there."""

_hook: Hook | None = None
BEFORE: Final = "before"
AFTER: Final = "after"


def reach(point: Failpoint) -> None:
    """Say that this place has been reached."""
    if _hook is not None:
        _hook(point)


def reach_transaction(purpose: str, when: str) -> None:
    """Say that a transaction of this purpose is about to be written (``BEFORE``) or has been (``AFTER``).

    Raises:
        ValueError: a hook is installed and the purpose has no place in the list.
    """
    if _hook is not None:
        _hook(Failpoint(f"{purpose}.{when}"))


@contextmanager
def installed(hook: Hook) -> Iterator[None]:
    """Have the hook called at every place until the end of the block; for tests."""
    global _hook  # noqa: PLW0603 (one process, one hook: threading it through every call would cost what it must not)
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before
