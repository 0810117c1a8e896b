"""The bounds of one process: what fills up, how far it may, and what happens then.

Everything that holds what comes from outside (queues, buffers, files, calls in flight) stands here once. The supervisor
measures all of it every second (``bound_used`` and ``bound_limit``, by ``bound``), and the table in the README is made
of ``BOUNDS``, so that what is documented is what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound. The unit ends its name."""

    name: str
    limit: str
    """The setting that sets it, or the constant, with its value."""
    at_the_limit: str
    """What happens there; recovery is always automatic."""


BOUNDS: Final = (
    Bound("spool_bytes", "limits.spool_high_bytes", "the largest open batches are sealed early, consumption pauses"
          " until spool_low_bytes; at twice the limit a write is refused as by a full disk"),
    Bound("spool_buffer_bytes", "limits.spool_buffer_bytes", "buffered lines are written to the disk first"),
    Bound("disk_used_bytes", "the state folder's file system less 64 MiB (an eighth of a small one)", "as spool_bytes;"
          " a write that meets a full disk ends the partitions' lives, and their rows are read again"),
    Bound("index_rows", "limits.max_index_rows", "as spool_bytes, until three quarters of the limit"),
    Bound("index_bytes", "4 GiB (store.MAX_INDEX_BYTES)", "a write is refused as by a full disk"),
    Bound("batch_jobs_rows", "10,000 (store.MAX_BATCHES)", "the oldest leave the local read model"),
    Bound("open_keys", "limits.max_open_keys", "the open batch that is due first leaves early (reason: pressure)"),
    Bound("batches_in_flight", "limits.max_batches_in_flight", "sealed batches wait, first come, first served"),
    Bound("uploads", "limits.max_uploads", "further uploads wait"),
    Bound("downloads", "limits.max_downloads", "further downloads wait"),
    Bound("poll_calls", "accounts.*.max_concurrent_calls (the fullest account)", "further polls wait"),
    Bound("sync_calls", "accounts.*.sync.max_concurrency (all accounts)", "further rows of the sync lane wait"),
    Bound("mailbox_events", "limits.mailbox_events (the fullest batch)", "the oldest news is dropped and told; a poll"
          " brings it again"),
    Bound("settle_queue_rows", "limits.settle_queue_rows (the fullest partition)", "landing and intake wait"),
    Bound("settle_queue_bytes", "4 x limits.settle_chunk_bytes (the fullest partition)", "landing and intake wait"),
    Bound("settle_transactions", "limits.max_settle_transactions", "further transactions wait"),
    Bound("event_outbox_records", "5,000 (engine.fleet.OUTBOX_RECORDS)", "the oldest batch events are dropped and"
          " counted (events_dropped)"),
    Bound("admin_connections", "200 (server.MAX_CONNECTIONS)", "further requests get 503"),
)  # fmt: skip

Fullness = Mapping[str, tuple[float, float]]
"""By bound: how much is used, and the limit."""


def table() -> str:
    """The bounds as a Markdown table."""
    lines = ["| bound | limit | at the limit |", "|---|---|---|"]
    lines += [f"| `{one.name}` | {one.limit} | {one.at_the_limit} |" for one in BOUNDS]
    return "\n".join(lines)
