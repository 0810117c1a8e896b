"""How files, batches and pages look on the wire. Other dialects of the same API would differ here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchferry.simulator.answers import snapshot
from batchferry.simulator.errors import Refused
from batchferry.simulator.scenario import Scenario
from batchferry.simulator.state import SimBatch, SimFile, Status


def render_file(file: SimFile) -> dict[str, Any]:
    """A file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": _seconds(file.expires_at),
    }


def _seconds(at: float | None) -> int | None:
    return None if at is None else int(at)


def render_batch(batch: SimBatch, scenario: Scenario, now: float) -> dict[str, Any]:
    """A batch object as it looks at ``now`` (virtual seconds since the epoch)."""
    ended = batch.ended_at if batch.status.is_terminal else None
    shown: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": int(batch.expires_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "completed_at": _seconds(ended) if batch.status is Status.COMPLETED else None,
        "failed_at": _seconds(ended) if batch.status is Status.FAILED else None,
        "expired_at": _seconds(ended) if batch.status is Status.EXPIRED else None,
        "cancelling_at": _seconds(batch.cancelling_at),
        "cancelled_at": _seconds(ended) if batch.status is Status.CANCELLED else None,
        "request_counts": counts_at(batch, now),
        "metadata": batch.metadata,
    }
    if batch.model is not None:
        shown["model"] = snapshot(batch.model)
    if scenario.show_usage and ended is not None and batch.in_progress_at is not None:
        shown["usage"] = {
            "input_tokens": batch.used_input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": batch.used_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.used_input_tokens + batch.used_output_tokens,
        }
    if batch.status is Status.COMPLETED and ended is not None:
        if now < ended + scenario.late_file_ids_s:
            shown["output_file_id"] = shown["error_file_id"] = None
        elif batch.error_file_id is None and scenario.error_file_when_clean == "absent":
            del shown["error_file_id"]
        elif batch.error_file_id is None and scenario.error_file_when_clean == "empty":
            shown["error_file_id"] = ""
    return shown


def counts_at(batch: SimBatch, now: float) -> dict[str, int]:
    """``total``, ``completed`` and ``failed`` rows as they look at this time."""
    if batch.in_progress_at is None:
        return {"total": 0, "completed": 0, "failed": 0}
    if batch.status.is_terminal:
        return {"total": batch.rows, "completed": batch.completed, "failed": batch.failed}
    # Under way the share of failures among the finished rows is taken to be that of all rows.
    reached = batch.reached_rows(batch.cancelling_at if batch.cancelling_at is not None else now)
    failed = reached * batch.failing_rows // batch.rows if batch.rows else 0
    return {"total": batch.rows, "completed": reached - failed, "failed": failed}


def page_limit(text: str | None, default: int, maximum: int) -> int:
    """The ``limit`` of a list call.

    Raises:
        Refused: not a number from 1 to ``maximum``.
    """
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= maximum:
        raise Refused(400, f"'limit' must be an integer from 1 to {maximum}.", param="limit", code="invalid_value")
    return int(text)


def page_after(ids: Sequence[str], after: str | None) -> int:
    """Where the page behind the cursor begins.

    Raises:
        Refused: the cursor names nothing in the list.
    """
    if after is None:
        return 0
    try:
        return ids.index(after) + 1
    except ValueError as error:
        raise Refused(400, f"No such object: {after}", param="after", code="invalid_value") from error


def render_page(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A list page; the ids are strings even when the page is empty, as the schema of files demands."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }
