"""One account at Mistral: where it is, what opens it, and how patient we are with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchferry.domain.errors import ConfigError
from batchferry.providers.connection import DEFAULT_TIMEOUTS, CallTimeouts, connection_faults
from batchferry.providers.retries import DEFAULT_RETRIES, CallRetries

MISTRAL_BASE_URL = "https://api.mistral.ai/v1"
MAX_TIMEOUT_HOURS = 168
"""Longest life of a job (API reference of the create call)."""


@dataclass(frozen=True, slots=True)
class MistralAccount:
    """Settings of one account.

    Raises:
        ConfigError: something cannot work; every fault is listed.
    """

    name: str
    base_url: str = MISTRAL_BASE_URL
    """Root of the API, the version included."""
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token; empty sends none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of every call: taken for secrets."""
    query: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further query parameters of every call."""
    timeout_hours: int = 24
    """``timeout_hours`` of a create that names no window, 1 to 168 h."""
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS
    retries: CallRetries = DEFAULT_RETRIES
    max_connections: int = 8
    """Calls at one time; a further one waits ``pool_s``."""
    max_sync_connections: int = 16
    """Calls of the sync lane at one time; they have connections of their own, so that polls never wait for them."""
    max_upload_bytes: int = 512_000_000
    """Largest input file. Mistral's documents disagree on its limits; this is the strict one."""
    max_download_bytes: int = 8_000_000_000
    """Largest result file that is taken."""
    max_answer_bytes: int = 64_000_000
    """Largest JSON answer."""
    list_page_size: int = 100
    """Jobs on one list page (the official client's default; a larger one is not documented)."""
    file_page_size: int = 100
    """Files on one list page."""
    send_metadata: bool = True
    """Whether a create may carry ``metadata``; without it our jobs are known by their input file."""
    file_expiry_unit_s: int | None = None
    """Seconds that one step of an upload's ``expiry`` stands for. The API takes a whole number there and documents no
    unit, so None (the default) sends none: files are deleted by us."""

    def __post_init__(self) -> None:
        faults = [f"account {self.name}: {fault}" for fault in self._faults()]
        if faults:
            raise ConfigError(faults)

    def _faults(self) -> list[str]:
        faults = connection_faults(self)
        if not 1 <= self.timeout_hours <= MAX_TIMEOUT_HOURS:
            faults.append(f"timeout_hours must be 1 to {MAX_TIMEOUT_HOURS}")
        faults.extend(
            f"{size} must be 1 to 100"
            for size in ("list_page_size", "file_page_size")
            if not 1 <= getattr(self, size) <= 100
        )
        if self.file_expiry_unit_s is not None and self.file_expiry_unit_s < 1:
            faults.append("file_expiry_unit_s must be at least 1, or absent")
        return faults
