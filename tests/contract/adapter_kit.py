"""Every adapter at the same quay: one way to hand a batch in, to see it end and to read its rows, as the engine has it.

A ``Port`` is a provider as its profile describes it, with what a request looks like there. A ``Berth`` is an account of
it, made from settings as the service makes it, in front of a server: our simulator on a clock that stands, or a server
of somebody else's in true time. Tests know ``ports.BatchProvider`` only.
"""

from __future__ import annotations

import asyncio
import json
import string
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from batchferry.app import build_providers
from batchferry.clock import SystemClock
from batchferry.config import load_settings
from batchferry.config.profiles import Profile, load_profile
from batchferry.domain.ids import BatchId, FileId, LedgerId, batch_file_name, new_batch_id
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
)
from batchferry.domain.rows import ResultLine, RowClass, UnreadableLine
from batchferry.ports import BatchProvider, Clock
from batchferry.simulator import ManualSimClock, Scenario, Simulator, SimulatorSettings

HOUR_S = 3600.0
KEY = "sk-contract-0123456789-secret"
LEDGER = LedgerId("abcdefghjk")
FILE_LIFE_S = 1_209_600
WINDOWS = ("24h", "1h", "48h")
ALPHABET = string.ascii_letters + string.digits + "-"
MAX_PAGES = 60
LOOKUP_SLACK_S = 300.0
TRUE_END_S = 120.0


@dataclass(frozen=True)
class Port:
    """A provider, by its profile."""

    name: str
    profile_name: str
    model: str
    endpoint: str = "/v1/chat/completions"
    address: Callable[[Simulator], str] = field(default=lambda simulator: simulator.base_url, repr=False)
    """Base address of its API at our simulator."""

    @property
    def profile(self) -> Profile:
        """What is known of the provider."""
        return load_profile(self.profile_name)

    @property
    def family(self) -> str:
        """Whose adapter it is."""
        return self.profile.family

    def body(self, text: str) -> bytes:
        """A request that asks this."""
        asked: dict[str, Any] = {"model": self.model}
        if self.family == "gemini":
            asked["contents"] = [{"role": "user", "parts": [{"text": text}]}]
        else:
            asked["messages"] = [{"role": "user", "content": text}]
        if self.family == "anthropic":
            asked["max_tokens"] = 256
        return json.dumps(asked, ensure_ascii=False).encode()


PORTS = (
    Port("openai", "openai", "gpt-5-mini"),
    Port("azure", "azure", "gpt-5-mini-global-batch", address=lambda simulator: simulator.azure_url),
    Port(
        "azure-legacy",
        "azure-legacy",
        "gpt-5-mini-global-batch",
        address=lambda simulator: simulator.azure_url.removesuffix("/v1"),
    ),
    Port("anthropic", "anthropic", "claude-haiku-4-5", "/v1/messages", address=lambda simulator: simulator.origin_url),
    Port("mistral", "mistral", "mistral-small-latest", address=lambda simulator: simulator.mistral_url),
    Port(
        "gemini",
        "gemini",
        "gemini-2.5-flash",
        "/v1beta/models:generateContent",
        address=lambda simulator: f"{simulator.origin_url}/v1beta",
    ),
    Port("groq", "groq", "llama-3.1-8b-instant"),
    Port("doubleword", "doubleword", "Qwen/Qwen3-30B-A3B"),
    Port("litellm", "litellm", "gpt-5-mini"),
    Port("dashscope", "dashscope", "qwen-plus"),
    Port("self-hosted", "self-hosted", "my-model"),
)
"""What our simulator can play."""
AIBRIX = Port("aibrix-server", "aibrix", "stub")
LITELLM = Port("litellm-gateway", "litellm", "stub")
"""Servers of somebody else's; see ``independent_kit``."""


def make_provider(port: Port, address: str, clock: Clock, **given: Any) -> BatchProvider:
    """An account of this provider, made through the settings; ``given`` are settings of its own."""
    account = {"profile": port.profile_name, "base_url": address, "api_key": KEY, **given}
    route = {"account": "a", "sla_s": "400h", "max_rows": 1, "max_bytes": 4096, "max_inputs": 1}
    if port.family != "openai":
        route["endpoint"] = port.endpoint
    made = {"accounts": {"a": account}, "routes": {"default": route}, "limits": {"max_record_bytes": 4096}}
    return build_providers(load_settings(None, {}, made, dotenv_path=None), clock)["a"]


class SimTime:
    """The service's clock on the simulator's time: a pause moves it, so nothing waits in truth."""

    def __init__(self, clock: ManualSimClock) -> None:
        self.clock = clock
        self.sleeps: list[float] = []

    def now(self) -> datetime:
        """See ``Clock``."""
        return self.clock.now()

    def monotonic(self) -> float:
        """See ``Clock``."""
        return self.clock.timestamp()

    async def sleep(self, seconds: float) -> None:
        """See ``Clock``."""
        self.sleeps.append(seconds)
        self.clock.advance(seconds)


class Lines:
    """An upload source over rendered lines."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes in pieces."""
        for start in range(0, len(self.data), 1 << 16):
            yield self.data[start : start + (1 << 16)]


@dataclass(frozen=True)
class Cargo:
    """The rows of one batch, and what they are known by."""

    batch_id: BatchId
    ids: tuple[str, ...]
    data: bytes
    sealed_at: datetime
    file_id: FileId | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """What the engine gives a batch on its way."""
        return {"batch_id": self.batch_id, "ledger_id": LEDGER}


class Berth:
    """An account in front of a server; ``ended`` knows how time passes there."""

    def __init__(self, port: Port, provider: BatchProvider, clock: Clock, folder: Path) -> None:
        self.port = port
        self.provider = provider
        self.clock = clock
        self.folder = folder
        self._others: list[BatchProvider] = []
        self._downloads = 0

    # -------------------------------------------------------------------------------- accounts

    def with_small_pages(self, size: int = 2) -> BatchProvider:
        """The same account with lists of so few on a page."""
        own: Any = self.provider  # every adapter keeps its account; no port names it
        account = own.account
        sizes = {name: size for name in ("list_page_size", "file_page_size") if hasattr(account, name)}
        made: BatchProvider = type(own)(replace(account, **sizes), self.clock)
        self._others.append(made)
        return made

    async def close(self) -> None:
        """Close every account."""
        for provider in (self.provider, *self._others):
            await provider.close()

    # ------------------------------------------------------------------------------ the way out

    def cargo(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> Cargo:
        """Rows as the service renders them; without ids the row's number is the third part of its own."""
        made = tuple(ids or (f"{LEDGER}-0-{row}-1" for row in range(len(texts))))
        data = b"".join(
            self.provider.line_head(wire_id) + self.provider.render_line(self.port.endpoint, self.port.body(text))
            for wire_id, text in zip(made, texts, strict=True)
        )
        now = self.clock.now()
        return Cargo(new_batch_id(now.timestamp()), made, data, now)

    async def load(self, cargo: Cargo) -> Cargo | CallFailed:
        """What goes before the create: the upload, where there is one."""
        if self.provider.is_inline:
            return cargo
        name = batch_file_name(LEDGER, cargo.batch_id)
        got = await self.provider.upload(Lines(cargo.data), name, FILE_LIFE_S)
        return got if isinstance(got, CallFailed) else replace(cargo, file_id=got.file_id)

    async def loaded(self, cargo: Cargo) -> Cargo:
        """``load``, which must succeed."""
        got = await self.load(cargo)
        assert isinstance(got, Cargo), got
        return got

    async def ask(self, cargo: Cargo) -> BatchSnapshot | CallFailed:
        """The one create of a loaded cargo."""
        port = self.port
        if self.provider.is_inline:
            return await self.provider.create_inline(Lines(cargo.data), port.endpoint, port.model)
        assert cargo.file_id is not None
        window = port.profile.windows[0]
        return await self.provider.create(cargo.file_id, port.endpoint, window, cargo.metadata, port.model)

    async def sent(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> tuple[Cargo, BatchSnapshot]:
        """A batch of these texts. A create without a clear answer is looked up in the list, as the service does."""
        cargo = await self.loaded(self.cargo(texts, ids))
        got = await self.ask(cargo)
        if isinstance(got, CallFailed):
            assert got.kind is CallFailure.UNANSWERED, got.summary
            found = await self.recognised(cargo)
            assert len(found) == 1, got.summary
            got = found[0]
        return cargo, got

    # ------------------------------------------------------------------------------ the way back

    async def seen(self, batch: BatchSnapshot) -> BatchSnapshot:
        """The batch as it is now."""
        got = await self.provider.retrieve(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        return got

    async def ended(self, batch: BatchSnapshot) -> BatchSnapshot:
        """The batch at its end, which must come."""
        raise NotImplementedError

    async def listed(self, provider: BatchProvider | None = None) -> list[BatchSnapshot]:
        """Every batch of the list, page by page."""
        found: list[BatchSnapshot] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await (provider or self.provider).list_batches(cursor)
            assert isinstance(page, BatchPage), page
            found += page.batches
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise AssertionError("a list without an end")

    async def recognised(self, cargo: Cargo) -> list[BatchSnapshot]:
        """The listed batches that are this cargo's by the one means that the profile names."""
        by = self.port.profile.adoption
        since, until = cargo.sealed_at, self.clock.now() + timedelta(seconds=LOOKUP_SLACK_S)

        def is_ours(batch: BatchSnapshot) -> bool:
            if by in {"metadata", "display_name"}:
                return batch.metadata.get("batch_id") == cargo.batch_id
            if by == "input_file":
                return cargo.file_id is not None and batch.input_file_id == cargo.file_id
            assert by == "wire_ids"
            made = batch.created_at
            return made is not None and since <= made <= until and batch.counts.total == len(cargo.ids)

        return [batch for batch in await self.listed() if is_ours(batch)]

    async def fetched(self, file_id: FileId) -> Path:
        """A result file, which must come whole."""
        self._downloads += 1
        to = self.folder / f"part-{self._downloads}"
        got = await self.provider.download(file_id, to)
        assert isinstance(got, DownloadedFile), got
        return to

    async def lines(self, batch: BatchSnapshot) -> list[ResultLine | UnreadableLine]:
        """The judged lines of both result files."""
        found: list[ResultLine | UnreadableLine] = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                text = await asyncio.to_thread((await self.fetched(file_id)).read_bytes)
                found += [self.provider.parse_line(line, self.port.endpoint) for line in text.split(b"\n") if line]
        return found


class Books:
    """The lines of a batch held against the rows that were sent."""

    def __init__(self, cargo: Cargo, lines: Iterable[ResultLine | UnreadableLine]) -> None:
        self.by_id: dict[str, ResultLine] = {}
        self.unreadable: list[UnreadableLine] = []
        self.doubled: list[str] = []
        self.foreign: list[str] = []
        self.classes: dict[str, RowClass] = {}
        sent = set(cargo.ids)
        for line in lines:
            wire_id = line.wire_id
            if isinstance(line, UnreadableLine):
                self.unreadable.append(line)
            if wire_id is None:
                continue
            if wire_id not in sent:
                self.foreign.append(wire_id)
            elif wire_id in self.classes:
                self.doubled.append(wire_id)
            else:
                self.classes[wire_id] = line.row_class if isinstance(line, ResultLine) else RowClass.UNREADABLE
                if isinstance(line, ResultLine):
                    self.by_id[wire_id] = line
        self.classes |= dict.fromkeys(sent - self.classes.keys(), RowClass.MISSING)


class SimBerth(Berth):
    """In front of our simulator, on a clock that stands."""

    def __init__(self, port: Port, simulator: Simulator, clock: ManualSimClock, folder: Path) -> None:
        self.time = SimTime(clock)
        self.simulator = simulator
        self.hand = clock
        super().__init__(port, self.account(port), self.time, folder)

    def account(self, port: Port | None = None, **given: Any) -> BatchProvider:
        """An account here; ``given`` are settings of its own. The berth's own is closed with it, others by their test."""
        port = port or self.port
        return make_provider(port, port.address(self.simulator), self.time, **given)

    async def after(self, batch: BatchSnapshot, seconds: float) -> BatchSnapshot:
        """The batch that many virtual seconds later."""
        self.hand.advance(seconds)
        await self.simulator.settle()
        return await self.seen(batch)

    async def ended(self, batch: BatchSnapshot) -> BatchSnapshot:
        """The batch 54 virtual minutes later, which is inside the shortest window."""
        got = await self.after(batch, 0.9 * HOUR_S)
        assert got.status.is_terminal, got.raw_status
        return got


class TrueBerth(Berth):
    """In front of a server of somebody else's, in true time: only its answers tell how far it is."""

    def __init__(self, port: Port, address: str, folder: Path, **given: Any) -> None:
        clock = SystemClock()
        super().__init__(port, make_provider(port, address, clock, **given), clock, folder)

    async def ended(self, batch: BatchSnapshot) -> BatchSnapshot:
        """The batch at its end, polled for."""
        until = time.monotonic() + TRUE_END_S
        while time.monotonic() < until:
            got = await self.seen(batch)
            if got.status.is_terminal:
                return got
            await asyncio.sleep(0.2)
        raise AssertionError(f"no end within {TRUE_END_S} s")


@asynccontextmanager
async def moored(port: Port, folder: Path, scenario: Scenario | None = None) -> AsyncIterator[SimBerth]:
    """An account of this provider at a running simulator."""
    clock = ManualSimClock()
    script = (scenario or Scenario()).model_copy(update={"windows": WINDOWS})
    async with Simulator(SimulatorSettings(clock=clock, scenario=script, keys=[KEY])) as simulator:
        berth = SimBerth(port, simulator, clock, folder)
        try:
            yield berth
        finally:
            await berth.close()


def told(got: object) -> tuple[CallFailure, bool] | None:
    """Kind and certainty of a failed call, None for a success."""
    return (got.kind, got.is_definite) if isinstance(got, CallFailed) else None
