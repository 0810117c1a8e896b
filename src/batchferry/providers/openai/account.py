"""One account at an OpenAI-shaped server: where it is, what opens it, and how patient we are with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchferry.domain.dialect import OPENAI_DIALECT, Dialect
from batchferry.domain.errors import ConfigError
from batchferry.providers.connection import DEFAULT_TIMEOUTS, CallTimeouts, connection_faults
from batchferry.providers.retries import DEFAULT_RETRIES, CallRetries

OPENAI_BASE_URL = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True)
class OpenAIAccount:
    """Settings of one account.

    Raises:
        ConfigError: something cannot work; every fault is listed.
    """

    name: str
    base_url: str = OPENAI_BASE_URL
    """Root of the API, the version included."""
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token, or in the dialect's own header; empty sends none (servers without a key, or one that is
    in ``headers``)."""
    organization: str | None = None
    project: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of every call (an ``api-key`` of Azure, a gateway's token): taken for secrets."""
    query: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further query parameters of every call (Azure's ``api-version``)."""
    completion_window: str = "24h"
    """Window of a create that names none."""
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS
    retries: CallRetries = DEFAULT_RETRIES
    max_connections: int = 8
    """Calls at one time; a further one waits ``pool_s``."""
    max_sync_connections: int = 16
    """Calls of the sync lane at one time; they have connections of their own, so that polls never wait for them."""
    max_upload_bytes: int = 200_000_000
    """Largest input file (OpenAI: 200 MB for a batch)."""
    max_download_bytes: int = 8_000_000_000
    """Largest result file that is taken."""
    max_answer_bytes: int = 64_000_000
    """Largest JSON answer: the error list of a batch whose every line was refused is long."""
    list_page_size: int = 100
    """Batches on one list page (OpenAI: at most 100)."""
    file_page_size: int = 1_000
    """Files on one list page (OpenAI: at most 10,000)."""
    file_purpose: str = "batch"
    """``purpose`` of an uploaded file."""
    output_purpose: str = "batch_output"
    """``purpose`` under which result files are listed."""
    send_metadata: bool = True
    """Whether a create may carry ``metadata``; without it our batches are known by their input file."""
    send_file_expiry: bool = True
    """Whether an upload may carry ``expires_after``."""
    output_expires_after_s: int | None = None
    """Life of result files, 3,600 to 2,592,000 s from their creation; None leaves it to the server."""
    dialect: Dialect = OPENAI_DIALECT
    """The server's departures from OpenAI's ways."""

    def __post_init__(self) -> None:
        faults = [f"account {self.name}: {fault}" for fault in self._faults()]
        if faults:
            raise ConfigError(faults)

    def _faults(self) -> list[str]:
        faults = connection_faults(
            self, {"OpenAI-Organization": self.organization or "", "OpenAI-Project": self.project or ""}
        )
        if not 1 <= self.list_page_size <= 100:
            faults.append("list_page_size must be 1 to 100")
        if not 1 <= self.file_page_size <= 10_000:
            faults.append("file_page_size must be 1 to 10000")
        if self.output_expires_after_s is not None and not 3600 <= self.output_expires_after_s <= 2_592_000:
            faults.append("output_expires_after_s must be 3600 to 2592000")
        return faults + self.dialect.faults()
