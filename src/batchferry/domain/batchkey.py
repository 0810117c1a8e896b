"""The batch key: what records must share to be allowed into one batch."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class BatchKey(NamedTuple):
    """Provider account, endpoint, model, completion window and (optional) business slice.

    Records of one batch share all five: providers demand one model and one endpoint a file, an account
    pays for the batch, the window decides the deadline, and a slice keeps a business dimension apart.
    """

    account: str
    endpoint: str
    model: str
    completion_window: str
    slice: str = ""

    @property
    def label(self) -> str:
        """A short text for people; never parsed back."""
        tail = f" [{self.slice}]" if self.slice else ""
        return f"{self.account} {self.endpoint} {self.model} {self.completion_window}{tail}"

    @property
    def digest(self) -> str:
        """Sixteen hex characters that name this key in files and control records."""
        return hashlib.sha256("\x1f".join(self).encode()).hexdigest()[:16]
