"""What every account says of its connection: where the server is, what opens it, how patient we are with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol
from urllib.parse import urlsplit

from batchferry.providers.retries import CallRetries

_BOUNDS = ("max_connections", "max_sync_connections", "max_upload_bytes", "max_download_bytes", "max_answer_bytes")


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """Deadlines of calls, in seconds of the wall clock."""

    connect_s: float = 5.0
    """Until a connection stands."""
    pool_s: float = 30.0
    """Until one of the account's connections is free."""
    read_s: float = 60.0
    """Between two pieces of an answer."""
    write_s: float = 60.0
    """Between two pieces of a request."""
    download_read_s: float = 120.0
    """Between two pieces of a file: some servers assemble it while we wait."""
    call_s: float = 120.0
    """A whole small call (retrieve, list, cancel, delete)."""
    create_s: float = 60.0
    """The whole create call; without an answer by then the batch is looked up, never created blindly again."""
    upload_s: float = 900.0
    """One whole try of an upload: 200 MB at about 2 Mbit/s."""
    download_s: float = 900.0
    """One whole try of a download."""


DEFAULT_TIMEOUTS = CallTimeouts()


class Connection(Protocol):
    """The part of an account that its calls need."""

    @property
    def name(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def query(self) -> Mapping[str, str]: ...

    @property
    def timeouts(self) -> CallTimeouts: ...

    @property
    def retries(self) -> CallRetries: ...

    @property
    def max_connections(self) -> int: ...

    @property
    def max_sync_connections(self) -> int: ...

    @property
    def max_upload_bytes(self) -> int: ...

    @property
    def max_download_bytes(self) -> int: ...

    @property
    def max_answer_bytes(self) -> int: ...


def connection_faults(account: Connection, own_headers: Mapping[str, str] | None = None) -> list[str]:
    """What cannot work, each with its remedy; ``own_headers`` are made of the account's further members."""
    faults: list[str] = []
    url = urlsplit(account.base_url)
    if url.scheme not in {"http", "https"} or not url.hostname:
        faults.append("base_url is no address: write one like https://host/v1")
    if url.username or url.password:
        faults.append("base_url holds a password: give it as api_key or in headers")
    if url.query or url.fragment:
        faults.append("base_url holds a query or a fragment: give parameters in query")
    if not _fits_header(account.api_key):
        faults.append("api_key holds blanks, line breaks or non-ASCII characters: check how it was pasted")
    for name, value in {**account.headers, **(own_headers or {})}.items():
        if not name.isascii() or not name.isprintable() or not value.isascii() or not value.isprintable():
            faults.append(f"header {name!r} holds line breaks or non-ASCII characters: remove them")
    faults.extend(f"{bound} must be at least 1" for bound in _BOUNDS if getattr(account, bound) < 1)
    faults.extend(
        f"{timeout.name} must be above 0"
        for timeout in fields(account.timeouts)
        if getattr(account.timeouts, timeout.name) <= 0
    )
    return faults


def _fits_header(text: str) -> bool:
    return text.isascii() and all("!" <= character <= "~" for character in text)
