"""One account at Gemini: where it is, what opens it, and how patient we are with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchferry.domain.errors import ConfigError
from batchferry.providers.connection import DEFAULT_TIMEOUTS, CallTimeouts, connection_faults
from batchferry.providers.retries import DEFAULT_RETRIES, CallRetries

GEMINI_BASE_URL = "https://generativelanguage.googleapis.com/v1beta"
_VERSION = re.compile(r"v[0-9][0-9a-z]*")
MAX_PAGE_SIZES = {"list_page_size": 1_000, "file_page_size": 100}


@dataclass(frozen=True, slots=True)
class GeminiAccount:
    """Settings of one account.

    Raises:
        ConfigError: something cannot work; every fault is listed.
    """

    name: str
    base_url: str = GEMINI_BASE_URL
    """Root of the API, the version included; uploads and downloads stand beside it, under ``/upload/<version>`` and
    ``/download/<version>``."""
    api_key: str = field(default="", repr=False)
    """Sent as ``x-goog-api-key``; empty sends none (a gateway with a key of its own in ``headers``)."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of every call: taken for secrets."""
    query: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further query parameters of every call."""
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS
    retries: CallRetries = DEFAULT_RETRIES
    max_connections: int = 8
    """Calls at one time; a further one waits ``timeouts.pool_s``."""
    max_sync_connections: int = 16
    """Calls of the sync lane at one time, over connections of their own."""
    max_upload_bytes: int = 2_000_000_000
    """Largest input file (Gemini's batch guide: 2 GB)."""
    max_download_bytes: int = 8_000_000_000
    """Largest result file that is taken."""
    max_answer_bytes: int = 64_000_000
    """Largest JSON answer."""
    file_ready_s: float = 300.0
    """How long an upload waits, on the service's clock, until the file has left ``PROCESSING``. A file that has not by
    then is handed out all the same: a create that comes too early is refused, and comes again."""
    expires_after_s: int = 172_800
    """A job that is pending or running for so long expires, and all its rows are lost (Gemini's batch guide: 48 h)."""
    list_page_size: int = 100
    """Batches on one list page."""
    file_page_size: int = 100
    """Files on one list page (Gemini: at most 100)."""

    def __post_init__(self) -> None:
        faults = [f"account {self.name}: {fault}" for fault in self._faults()]
        if faults:
            raise ConfigError(faults)

    @property
    def version(self) -> str:
        """The API's version, such as ``v1beta``: the last part of the address."""
        return self.base_url.rstrip("/").rpartition("/")[2]

    @property
    def root(self) -> str:
        """The address without its version, and without a slash at its end."""
        return self.base_url.rstrip("/").rpartition("/")[0]

    def _faults(self) -> list[str]:
        faults = connection_faults(self)
        if not _VERSION.fullmatch(self.version):
            faults.append("base_url does not end with the API's version: write one like https://host/v1beta")
        if self.file_ready_s < 0:
            faults.append("file_ready_s must be at least 0")
        if self.expires_after_s < 1:
            faults.append("expires_after_s must be at least 1")
        for bound, most in MAX_PAGE_SIZES.items():
            if not 1 <= getattr(self, bound) <= most:
                faults.append(f"{bound} must be 1 to {most}")
        return faults
