"""What a life must know of each family of providers: how to ask it, where its calls stand, what its bill can promise."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchferry.domain.requests import GENERATE_ENDPOINT, MESSAGES_ENDPOINT
from batchferry.simulator import DEFAULT_KEY
from batchferry.simulator.anthropic_world import MessageBatch
from batchferry.simulator.azure import PROJECT_PREFIX as AZURE_PREFIX
from batchferry.simulator.gemini import PROJECT_PREFIX as GEMINI_PREFIX
from batchferry.simulator.mistral import PROJECT_PREFIX as MISTRAL_PREFIX
from batchferry.simulator.mistralwire import own_file_id
from batchferry.simulator.settings import DEFAULT_PROJECT
from batchferry.simulator.state import SimBatch, Status

if TYPE_CHECKING:
    from sim.provider import SimProvider

HOST = "http://provider"
CHAT = "/v1/chat/completions"
Calls = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Family:
    """One family, as the simulated world has it."""

    name: str
    account: Mapping[str, Any]
    """Settings of the account beside its key."""
    calls: Calls
    """(method, pattern of the path, name) of every call that the adapter makes."""
    models: tuple[str, str]
    endpoint: str = CHAT
    project: str = DEFAULT_PROJECT
    """Whose files and batches these are at the simulator."""
    window_h: float = 24.0
    is_fenced: bool = True
    """Whether a create that has not come in yet can be made to fail, by deleting its file. Where it cannot, rows of a
    create without an answer may be run twice; each of them is counted when they go again."""
    loses_rows: bool = False
    """Whether a batch that expires or is cancelled has no results at all."""
    runs_on: bool = False
    """Whether a batch goes on beyond its window until somebody cancels it."""
    fails_whole: bool = True
    """Whether a batch can be refused as a whole after its create."""
    refusals: tuple[tuple[int, str], ...] = (
        (429, "insufficient_quota"),
        (400, "billing_hard_limit_reached"),
        (401, "invalid_api_key"),
    )
    """(status, code) of creates that are refused for the account's sake."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Members of every request body."""

    def body(self, text: str, model: str, system: str = "") -> dict[str, Any]:
        """A request body in the family's own form."""
        if self.endpoint == GENERATE_ENDPOINT:
            body: dict[str, Any] = {"model": model, "contents": [{"role": "user", "parts": [{"text": text}]}]}
            return body | ({"systemInstruction": {"parts": [{"text": system}]}} if system else {}) | self.extra
        messages = [{"role": "user", "content": text}]
        if self.endpoint == MESSAGES_ENDPOINT:
            return {"model": model, "messages": messages} | ({"system": system} if system else {}) | self.extra
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return {"model": model, "messages": messages} | self.extra

    def record(self, custom_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The value of an input record."""
        if self.endpoint == MESSAGES_ENDPOINT:
            return {"custom_id": custom_id, "params": body}
        return {"custom_id": custom_id, "body": body}

    def text_of(self, answer: Mapping[str, Any]) -> str:
        """The text of an answer's body."""
        if self.endpoint == GENERATE_ENDPOINT:
            return "".join(part.get("text", "") for part in answer["candidates"][0]["content"]["parts"])
        if self.endpoint == MESSAGES_ENDPOINT:
            return "".join(part.get("text", "") for part in answer["content"])
        return str(answer["choices"][0]["message"]["content"])


_FILE, _ID = r"/files/[^/]+", r"/[^/]+"


def _openai_calls(
    root: str, batches: str = "/batches", sync: str = r"/(chat/completions|responses|embeddings)"
) -> Calls:
    return (
        ("POST", f"{root}/files", "upload"),
        ("GET", f"{root}/files", "file_list"),
        ("GET", f"{root}{_FILE}/content", "content"),
        ("GET", f"{root}{_FILE}", "file_retrieve"),
        ("DELETE", f"{root}{_FILE}", "delete"),
        ("POST", f"{root}{batches}", "create"),
        ("GET", f"{root}{batches}", "list"),
        ("GET", f"{root}{batches}{_ID}", "retrieve"),
        ("POST", f"{root}{batches}{_ID}/cancel", "cancel"),
        ("POST", f"{root}{sync}", "sync"),
    )


OPENAI = Family(
    "openai",
    {"base_url": f"{HOST}/v1"},
    _openai_calls("/v1"),
    ("gpt-4o-mini", "gpt-4o"),
)
ANTHROPIC = Family(
    "anthropic",
    {"provider": "anthropic", "base_url": HOST},
    (
        ("POST", "/v1/messages/batches", "create"),
        ("GET", "/v1/messages/batches", "list"),
        ("GET", f"/v1/messages/batches{_ID}/results", "content"),
        ("GET", f"/v1/messages/batches{_ID}", "retrieve"),
        ("DELETE", f"/v1/messages/batches{_ID}", "delete"),
        ("POST", f"/v1/messages/batches{_ID}/cancel", "cancel"),
        ("POST", "/v1/messages", "sync"),
    ),
    ("claude-haiku-4-5", "claude-sonnet-4-5"),
    MESSAGES_ENDPOINT,
    is_fenced=False,
    fails_whole=False,
    refusals=((402, "insufficient_quota"), (429, "enforced_spend_limit_reached"), (401, "invalid_api_key")),
    extra={"max_tokens": 64},
)
MISTRAL = Family(
    "mistral",
    {"provider": "mistral", "base_url": f"{HOST}/mistral/v1"},
    _openai_calls("/mistral/v1", "/batch/jobs", r"/(chat/completions|embeddings)"),
    ("mistral-small-latest", "mistral-large-latest"),
    project=MISTRAL_PREFIX + DEFAULT_PROJECT,
)
GEMINI = Family(
    "gemini",
    {"provider": "gemini", "base_url": f"{HOST}/v1beta", "completion_window": "48h"},
    (
        ("POST", "/upload/v1beta/files", "upload"),
        ("GET", "/v1beta/files", "file_list"),
        ("GET", r"(/download)?/v1beta/files/[^/:]+:download", "content"),
        ("GET", "/v1beta/files/[^/:]+", "file_retrieve"),
        ("DELETE", "/v1beta/files/[^/:]+", "delete"),
        ("POST", "/v1beta/models/[^/:]+:batchGenerateContent", "create"),
        ("GET", "/v1beta/batches", "list"),
        ("GET", "/v1beta/batches/[^/:]+", "retrieve"),
        ("POST", "/v1beta/batches/[^/:]+:cancel", "cancel"),
        ("POST", "/v1beta/models/[^/:]+:generateContent", "sync"),
    ),
    ("gemini-2.5-flash", "gemini-2.5-flash-lite"),
    GENERATE_ENDPOINT,
    project=GEMINI_PREFIX + DEFAULT_PROJECT,
    window_h=48.0,
    loses_rows=True,
)
AZURE = Family(
    "azure",
    {"profile": "azure", "base_url": f"{HOST}/openai/v1"},
    _openai_calls("/openai/v1"),
    ("gpt-4o-mini", "gpt-4o"),
    project=AZURE_PREFIX + DEFAULT_PROJECT,
    runs_on=True,
)
AZURE_LEGACY = Family(
    "azure-legacy",
    {"profile": "azure-legacy", "base_url": f"{HOST}/openai"},
    _openai_calls("/openai", sync=r"(/deployments/[^/]+)?/(chat/completions|responses|embeddings)"),
    ("gpt-4o-mini", "gpt-4o"),
    project=AZURE_PREFIX + DEFAULT_PROJECT,
    runs_on=True,
)
FAMILIES: Mapping[str, Family] = {one.name: one for one in (OPENAI, AZURE, AZURE_LEGACY, ANTHROPIC, MISTRAL, GEMINI)}
WEIGHTS: Mapping[str, int] = {
    "openai": 6, "azure": 1, "azure-legacy": 1, "anthropic": 3, "mistral": 1, "gemini": 1
}  # fmt: skip
"""How often each is drawn where a life may have any of them."""


def call_of(family: Family, method: str, path: str) -> str:
    """The name of a call."""
    return next(name for verb, pattern, name in family.calls if verb == method and re.fullmatch(pattern, path))


# ----------------------------------------------------------------------------------------- what the provider holds


class InlineBatch:
    """A batch without files, as the books see batches."""

    def __init__(self, batch: MessageBatch) -> None:
        self._batch = batch
        self.id = batch.id
        self.metadata: dict[str, str] | None = None
        self.input_file_id = f"rows of {batch.id}"
        self.output_file_id = self.error_file_id = None

    @property
    def is_deleted(self) -> bool:
        return self._batch.deleted

    @property
    def rows(self) -> int:
        return self._batch.rows

    @property
    def status(self) -> Status:
        """Its rows end one by one; a batch is called expired or cancelled when one of its rows is."""
        batch = self._batch
        if batch.ended_at is None:
            return Status.IN_PROGRESS if batch.cancel_at is None else Status.CANCELLING
        if batch.counts.get("expired"):
            return Status.EXPIRED
        return Status.CANCELLED if batch.counts.get("canceled") else Status.COMPLETED


ProviderBatch = SimBatch | InlineBatch


def batches_of(family: Family, provider: SimProvider) -> list[Any]:
    """Every batch that was ever made, oldest first."""
    if family is ANTHROPIC:
        return [InlineBatch(batch) for batch in provider.messages._batches.values()]
    return list(provider.world.state.batches.values())


def our_batch_id(batch: Any) -> str | None:
    """The batch id of ours that the provider keeps with a batch."""
    metadata = batch.metadata or {}
    if "displayName" in metadata:
        return str(metadata["displayName"]).split(" ")[0]
    return metadata.get("batch_id")


def input_file_of(batch: Any) -> str:
    """The simulator's id of the file that we uploaded for a batch: some run on a translated copy of it."""
    extra = getattr(batch, "extra", {})
    if extra.get("input_files"):
        return own_file_id(extra["input_files"][0])
    return str(extra.get("file", batch.input_file_id))


def identity_of(content: bytes) -> str:
    """Names what a batch was made of."""
    return hashlib.sha256(content).hexdigest()


def files_left(family: Family, provider: SimProvider) -> list[str]:
    """Our files at the provider; copies that only the simulator sees are none."""
    return [
        file.id
        for file in provider.world.list_files(family.project)
        if not file.id.startswith(("lines-", "mistral-lines-"))
    ]


def rows_of(content: bytes) -> Iterator[dict[str, Any]]:
    """The request lines of a batch."""
    for line in content.split(b"\n"):
        if line:
            yield json.loads(line)


def inline_content(provider: SimProvider, batch: MessageBatch) -> bytes:
    """The rows that a create has brought."""
    path: Path = provider.messages._rows_path(batch.id)
    return path.read_bytes()


def refusal(family: Family, provider: SimProvider, status: int, code: str) -> bytes:
    """The provider's own error body."""
    if family is OPENAI:
        return json.dumps({"error": {"message": "no", "type": code, "code": code, "param": None}}).encode()
    error = {"message": "no", "type": code, "code": code, "param": None}
    return json.dumps(provider.surface_of(family).error_body(status, error)).encode()


KEY = DEFAULT_KEY
