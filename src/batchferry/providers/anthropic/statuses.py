"""What ``processing_status`` of a batch is to us: one table.

There is no failed, expired or cancelled batch here: each ends as ``ended``, and how its rows ended stands in their
lines. A batch that somebody cancelled is told apart by ``cancel_initiated_at``, since rows of it that have no line
were then not run. A word that is not here is ``UNKNOWN`` and polled on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.provider import ProviderStatus

STATUSES: Mapping[str, ProviderStatus] = MappingProxyType(
    {
        "in_progress": ProviderStatus.IN_PROGRESS,
        "canceling": ProviderStatus.CANCELLING,
        "cancelling": ProviderStatus.CANCELLING,  # the spelling of gateways
        "ended": ProviderStatus.COMPLETED,
    }
)


def read_status(raw: str, *, is_cancelled: bool) -> ProviderStatus:
    """What a status word is to us; ``is_cancelled`` says that a cancel was begun."""
    status = STATUSES.get(raw.strip().lower(), ProviderStatus.UNKNOWN)
    return ProviderStatus.CANCELLED if status is ProviderStatus.COMPLETED and is_cancelled else status
