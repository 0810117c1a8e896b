"""Status words of OpenAI-shaped servers, and what they are to us: one table.

OpenAI's own eight come first; then spellings and words of servers that keep its shapes (Together and Novita write
capitals and ``PROGRESS``, AIBrix ``scheduling``, gateways pass on what stands behind them). A word that is not here is
``UNKNOWN``: it is kept as it came and polled on, since guessing an end would abandon rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.provider import ProviderStatus

STATUSES: Mapping[str, ProviderStatus] = MappingProxyType(
    {
        "validating": ProviderStatus.VALIDATING,
        "in_progress": ProviderStatus.IN_PROGRESS,
        "finalizing": ProviderStatus.FINALIZING,
        "cancelling": ProviderStatus.CANCELLING,
        "completed": ProviderStatus.COMPLETED,
        "failed": ProviderStatus.FAILED,
        "expired": ProviderStatus.EXPIRED,
        "cancelled": ProviderStatus.CANCELLED,
        # dialects
        "queued": ProviderStatus.VALIDATING,
        "pending": ProviderStatus.VALIDATING,
        "created": ProviderStatus.VALIDATING,
        "scheduling": ProviderStatus.VALIDATING,
        "running": ProviderStatus.IN_PROGRESS,
        "progress": ProviderStatus.IN_PROGRESS,
        "processing": ProviderStatus.IN_PROGRESS,
        "finalising": ProviderStatus.FINALIZING,
        "canceling": ProviderStatus.CANCELLING,
        "cancellation_requested": ProviderStatus.CANCELLING,
        "canceled": ProviderStatus.CANCELLED,
        "success": ProviderStatus.COMPLETED,
        "succeeded": ProviderStatus.COMPLETED,
        "timeout_exceeded": ProviderStatus.EXPIRED,
    }
)


def read_status(raw: str) -> ProviderStatus:
    """What a status word is to us, whatever its case and with ``-`` or a space for ``_``."""
    return STATUSES.get(raw.strip().lower().replace("-", "_").replace(" ", "_"), ProviderStatus.UNKNOWN)
