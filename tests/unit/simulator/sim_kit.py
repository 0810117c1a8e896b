"""A simulator on a hand-moved clock and a plain HTTP client to talk to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx

from batchferry.simulator import DEFAULT_KEY, ManualSimClock, Scenario, Simulator, SimulatorSettings

CHAT = "/v1/chat/completions"
LONG_S = 6 * 3600


def body(text: str = "Where is my card?", model: str = "gpt-5-mini") -> dict[str, Any]:
    """A chat request."""
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def line(wire_id: str, text: str | None = None, **members: Any) -> dict[str, Any]:
    """A batch line; its text is by default different for each id."""
    request = body(text if text is not None else f"Question {wire_id}")
    return {"custom_id": wire_id, "method": "POST", "url": CHAT, "body": request} | members


def jsonl(lines: Iterable[dict[str, Any] | bytes]) -> bytes:
    """The lines as a file; bytes go in as they are."""
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def rows(count: int) -> list[dict[str, Any]]:
    """Lines r1, r2, ..."""
    return [line(f"r{number}") for number in range(1, count + 1)]


class Bench:
    """The simulator, its clock and a client."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock, http: httpx.AsyncClient) -> None:
        self.simulator = simulator
        self.clock = clock
        self.http = http

    async def upload(self, content: bytes, name: str = "in.jsonl", **fields: str) -> httpx.Response:
        """POST /files."""
        files = {"file": (name, content)}
        return await self.http.post("/v1/files", files=files, data={"purpose": "batch"} | fields)

    async def file_id(self, content: bytes) -> str:
        """The id of an upload that must succeed."""
        answer = await self.upload(content)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, file_id: str, **members: Any) -> httpx.Response:
        """POST /batches."""
        wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | members
        return await self.http.post("/v1/batches", json=wanted)

    async def start(self, content: bytes, **members: Any) -> str:
        """Upload and create; the batch id."""
        answer = await self.create(await self.file_id(content), **members)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def get(self, batch_id: str) -> dict[str, Any]:
        """GET /batches/{id}."""
        answer = await self.http.get(f"/v1/batches/{batch_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def end(self, content: bytes, **members: Any) -> dict[str, Any]:
        """A batch after six hours."""
        batch_id = await self.start(content, **members)
        self.clock.advance(LONG_S)
        return await self.get(batch_id)

    async def content(self, file_id: str | None) -> bytes:
        """GET /files/{id}/content; nothing for no file."""
        if not file_id:
            return b""
        answer = await self.http.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return answer.content

    async def lines_of(self, batch: dict[str, Any]) -> tuple[list[bytes], list[bytes]]:
        """Output and error lines, raw."""
        output, error = [await self.content(batch.get(name)) for name in ("output_file_id", "error_file_id")]
        return output.split(b"\n")[:-1], error.split(b"\n")[:-1]

    async def parsed(self, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Output and error lines by custom_id."""
        output, error = await self.lines_of(batch)
        one, other = ({(p := json.loads(raw))["custom_id"]: p for raw in part} for part in (output, error))
        return one, other


@contextlib.asynccontextmanager
async def bench(scenario: Scenario | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """A running simulator, by default on a clock that stands."""
    clock = settings.pop("clock", None) or ManualSimClock()
    made = SimulatorSettings(clock=clock, scenario=scenario or Scenario(), **settings)
    async with (
        Simulator(made) as simulator,
        httpx.AsyncClient(
            base_url=simulator.origin_url, headers={"authorization": f"Bearer {DEFAULT_KEY}"}, timeout=20, verify=False
        ) as http,
    ):
        yield Bench(simulator, clock, http)
