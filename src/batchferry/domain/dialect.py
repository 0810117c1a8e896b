"""Where a server departs from OpenAI's ways so far that it must be told: the settings a profile fills in.

What can be recognised in an answer (other status words, a wrapped batch, absent members, a bare list) is none of
these: the readers take it silently, whichever server sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_BEARER_HEADER = "authorization"


class UploadWay(StrEnum):
    """How a file gets to the server."""

    FORM = "form"
    """One multipart form, as at OpenAI."""
    SIGNED_ADDRESS = "signed_address"
    """A form that announces it, answered by 302 with a signed address; the bytes are put there, without our key; a
    last call has the file read (Together: https://github.com/togethercomputer/together-py, lib/resources/files)."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One server's departures; the defaults are OpenAI's own ways."""

    key_header: str = _BEARER_HEADER
    """Header that carries the key: a bearer token in ``authorization``, in any other the bare key (Azure: api-key)."""
    files_path: str = "/files"
    """What follows the base address for files."""
    batches_path: str = "/batches"
    """What follows it for batches."""
    endpoint_names: Mapping[str, str] = field(default_factory=dict)
    """The server's names of endpoints, by those of the requests; they stand in the lines and in the create."""
    upload_way: UploadWay = UploadWay.FORM
    upload_fields: Mapping[str, str] = field(default_factory=dict)
    """Further fields of an upload's form."""
    min_file_expiry_s: int = 3600
    """Shortest life that an upload may ask for; a shorter wish is raised to it."""
    create_members: Mapping[str, Any] = field(default_factory=dict)
    """Further members of a create."""
    cursor_param: str = "after"
    """Query parameter that carries a list's cursor."""
    unsure_throttles: bool = False
    """Whether a create refused with 429 may have been carried out all the same: a gateway that repeats creates by
    itself answers with its last try, and an earlier one may have gone through."""
    cancel_conflicts: frozenset[int] = frozenset()
    """Statuses beside 409 by which a cancel says that the batch has ended already."""
    sync_base_url: str | None = None
    """Root of the sync lane where it is another address."""
    sync_models: Mapping[str, str] = field(default_factory=dict)
    """Models of the sync lane, by those of the rows: what runs batches may not answer single calls."""
    deployment_paths: bool = False
    """Whether the sync lane's address names the model: ``/deployments/<model>`` before the endpoint (Azure)."""

    @property
    def is_bearer(self) -> bool:
        """Whether the key goes as a bearer token."""
        return self.key_header.lower() == _BEARER_HEADER

    def endpoint(self, endpoint: str) -> str:
        """The server's name of an endpoint."""
        return self.endpoint_names.get(endpoint, endpoint)

    def faults(self) -> list[str]:
        """What cannot work, each with its remedy."""
        faults: list[str] = []
        if not self.key_header or not self.key_header.isascii() or set(self.key_header) & set(" :\r\n\t"):
            faults.append("dialect.key_header is no header name: write one like api-key")
        for name in ("files_path", "batches_path"):
            path = getattr(self, name)
            if not path.startswith("/") or path.endswith("/") or set(path) & set("?# "):
                faults.append(f"dialect.{name} is no path: write one like /{name.removesuffix('_path')}")
        if not 3600 <= self.min_file_expiry_s <= 2_592_000:
            faults.append("dialect.min_file_expiry_s must be 3600 to 2592000")
        if any(set(name) & set('"\r\n') or set(value) & set("\r\n") for name, value in self.upload_fields.items()):
            faults.append("dialect.upload_fields hold quotes or line breaks: remove them")
        if self.sync_base_url is not None and not self.sync_base_url.startswith(("https://", "http://")):
            faults.append("dialect.sync_base_url is no address: write one like https://host/v1")
        return faults


OPENAI_DIALECT = Dialect()
