"""Status words of Mistral's jobs, and what they are to us: one table.

The seven words are those of ``BatchJobStatus`` in the official client (https://github.com/mistralai/client-python). A
word that is not here is ``UNKNOWN``: kept as it came and polled on. (The client's own helper takes unknown words for
ends; guessing an end would abandon rows.)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.provider import ProviderStatus

STATUSES: Mapping[str, ProviderStatus] = MappingProxyType(
    {
        "queued": ProviderStatus.VALIDATING,
        "running": ProviderStatus.IN_PROGRESS,
        "success": ProviderStatus.COMPLETED,
        "failed": ProviderStatus.FAILED,
        "timeout_exceeded": ProviderStatus.EXPIRED,
        "cancellation_requested": ProviderStatus.CANCELLING,
        "cancelled": ProviderStatus.CANCELLED,
    }
)


def read_status(raw: str) -> ProviderStatus:
    """What a status word is to us, whatever its case and with ``-`` or a space for ``_``."""
    return STATUSES.get(raw.strip().lower().replace("-", "_").replace(" ", "_"), ProviderStatus.UNKNOWN)
