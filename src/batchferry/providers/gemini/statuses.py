"""State words of Gemini's batches and files, and what they are to us: one table.

The wire says ``BATCH_STATE_*``; the official SDK, and gateways built on it, say ``JOB_STATE_*`` (words of Vertex, some
of which the Developer API has not been seen to use). Both are read. A word that is not here is ``UNKNOWN``: it is kept
as it came and polled on, since guessing an end would abandon rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.provider import ProviderStatus

PREFIXES = ("BATCH_STATE_", "JOB_STATE_")

STATES: Mapping[str, ProviderStatus] = MappingProxyType(
    {
        "PENDING": ProviderStatus.VALIDATING,
        "RUNNING": ProviderStatus.IN_PROGRESS,
        # Rows may have failed all the same.
        "SUCCEEDED": ProviderStatus.COMPLETED,
        "FAILED": ProviderStatus.FAILED,
        "CANCELLED": ProviderStatus.CANCELLED,
        # Nothing of it can be fetched any more, whatever had been run.
        "EXPIRED": ProviderStatus.EXPIRED,
        # The SDK's further words.
        "QUEUED": ProviderStatus.VALIDATING,
        "PAUSED": ProviderStatus.IN_PROGRESS,
        "UPDATING": ProviderStatus.IN_PROGRESS,
        "CANCELLING": ProviderStatus.CANCELLING,
        "PARTIALLY_SUCCEEDED": ProviderStatus.COMPLETED,
    }
)

FILE_READY = "ACTIVE"
FILE_BROKEN = "FAILED"
"""States of a file; ``PROCESSING`` and unknown ones are waited for."""


def read_state(raw: str) -> ProviderStatus:
    """What a batch's state word is to us, whatever its case and with either prefix, or none."""
    word = raw.strip().upper()
    for prefix in PREFIXES:
        word = word.removeprefix(prefix)
    return STATES.get(word, ProviderStatus.UNKNOWN)
