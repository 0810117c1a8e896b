"""What only commands can find wrong."""

from __future__ import annotations

from batchferry.domain.errors import BatchferryError


class TopicMissing(BatchferryError):
    """A topic that a command reads or writes does not exist."""
