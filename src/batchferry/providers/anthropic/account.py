"""One account at Anthropic, or at a server that speaks its API: where it is, what opens it, our patience with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchferry.domain.errors import ConfigError
from batchferry.providers.connection import CallTimeouts, connection_faults
from batchferry.providers.retries import DEFAULT_RETRIES, CallRetries

ANTHROPIC_BASE_URL = "https://api.anthropic.com"
API_VERSION = "2026-10-21"
"""The official client's default since its version 2.0.0; ``2023-06-01`` is still taken."""
MAX_LIST_PAGE = 1_000

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_BETA = re.compile(r"[A-Za-z0-9._-]{1,100}")


DEFAULT_TIMEOUTS = CallTimeouts(read_s=120.0, create_s=900.0)
"""A create carries its rows: 256 MB at about 2.5 Mbit/s, and then the server reads every id before it answers."""


@dataclass(frozen=True, slots=True)
class AnthropicAccount:
    """Settings of one account. Limits are those of Anthropic's guide on batch processing.

    Raises:
        ConfigError: something cannot work; every fault is listed.
    """

    name: str
    base_url: str = ANTHROPIC_BASE_URL
    """Root of the server; a ``/v1`` at its end is taken off."""
    api_key: str = field(default="", repr=False)
    """Sent in ``key_header``; empty sends none (a gateway's token stands in ``headers``)."""
    key_header: Literal["x-api-key", "authorization"] = "x-api-key"
    """Which header carries the key: Anthropic's documentation names ``x-api-key``; its Python client 2.14.0 sends the
    key as a bearer token in ``authorization``."""
    version: str = API_VERSION
    """Sent as ``anthropic-version``; it decides which parameters a row may have."""
    betas: tuple[str, ...] = ()
    """Sent as ``anthropic-beta``, such as ``output-300k-2026-03-24``."""
    workspace: str | None = None
    """Sent as ``anthropic-workspace-id``, for keys that are not bound to one workspace."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of every call: taken for secrets."""
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS
    retries: CallRetries = DEFAULT_RETRIES
    max_connections: int = 8
    """Calls at one time; a further one waits ``pool_s``."""
    max_sync_connections: int = 16
    """Calls of the sync lane at one time; they have connections of their own, so that polls never wait for them."""
    max_upload_bytes: int = 256_000_000
    """Largest body of a create, its frame included (Anthropic: 256 MB; not said whether of 10**6 or 2**20)."""
    max_download_bytes: int = 8_000_000_000
    """Largest results that are taken."""
    max_answer_bytes: int = 64_000_000
    """Largest JSON answer."""
    list_page_size: int = MAX_LIST_PAGE
    """Batches on one list page."""

    def __post_init__(self) -> None:
        faults = [f"account {self.name}: {fault}" for fault in self._faults()]
        if faults:
            raise ConfigError(faults)

    @property
    def root_url(self) -> str:
        """``base_url`` without a slash or a version at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def query(self) -> Mapping[str, str]:
        """Further query parameters of every call: none."""
        return {}

    def _faults(self) -> list[str]:
        faults = connection_faults(self, {"anthropic-workspace-id": self.workspace or ""})
        if not _VERSION.fullmatch(self.version):
            faults.append("version is no date: write one like 2026-10-21")
        faults.extend(f"beta {beta!r} is no name of a beta" for beta in self.betas if not _BETA.fullmatch(beta))
        if not 1 <= self.list_page_size <= MAX_LIST_PAGE:
            faults.append(f"list_page_size must be 1 to {MAX_LIST_PAGE}")
        return faults
