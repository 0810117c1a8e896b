"""Each compatible profile against a server that keeps OpenAI's contract: departures that it allows change nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from random import Random

import pytest

from batchferry.config.profiles import load_profile, profile_names
from batchferry.domain.provider import BatchPage, BatchSnapshot, DownloadedFile, ProviderStatus, UploadedFile
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.providers.openai import OpenAIProvider
from batchferry.simulator import DEFAULT_KEY, ManualSimClock, Simulator, SimulatorSettings
from profile_kit import account_of

CHAT = "/v1/chat/completions"
OTHER_ROADS = {"together", "azure", "azure-legacy", "zhipu", "dashscope-dry-run", "volcengine", "novita", "voyage"}
"""Another form of upload, another header, other endpoint names, no batches, or windows that OpenAI does not sell."""
PLAIN = [name for name in profile_names() if name not in OTHER_ROADS and load_profile(name).family == "openai"]


class Time:
    """The service's clock on the simulator's time."""

    def __init__(self, clock: ManualSimClock) -> None:
        self.clock = clock
        self.now = clock.now
        self.monotonic = clock.timestamp

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


class Lines:
    """An upload source in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.data


@pytest.mark.parametrize("name", PLAIN)
async def test_a_batch_of_a_profile_goes_all_the_way(name, tmp_path):
    """Upload, create by the profile's window, list, fetch and delete; every row has its answer."""
    clock = ManualSimClock()
    async with Simulator(SimulatorSettings(clock=clock)) as simulator:
        given = {"base_url": simulator.base_url, "api_key": DEFAULT_KEY, "completion_window": "24h"}
        made = OpenAIProvider(account_of(name, settings=given), Time(clock), rng=Random(1))
        body = json.dumps({"model": "gpt-5-mini", "messages": [{"role": "user", "content": "hi"}]}).encode()
        data = b"".join(made.line_head(f"0123456789-0-{row}-1") + made.render_line(CHAT, body) for row in range(3))
        file = await made.upload(Lines(data), "batchferry-test.jsonl", 1_209_600)
        assert isinstance(file, UploadedFile), file
        batch = await made.create(file.file_id, CHAT, "", {"batch_id": "b-1"})
        assert isinstance(batch, BatchSnapshot), batch
        clock.advance(4 * 3600)
        await simulator.settle()
        page = await made.list_batches()
        assert isinstance(page, BatchPage), page
        done = page.batches[0]
        assert (done.provider_batch_id, done.status) == (batch.provider_batch_id, ProviderStatus.COMPLETED)
        assert done.input_file_id == file.file_id
        assert bool(done.metadata) is load_profile(name).supports.metadata
        saved = await made.download(done.output_file_id, tmp_path / "o")
        assert isinstance(saved, DownloadedFile), saved
        lines = [made.parse_line(raw, CHAT) for raw in (tmp_path / "o").read_bytes().splitlines()]
        assert {line.row_class for line in lines if isinstance(line, ResultLine)} == {RowClass.SUCCEEDED}
        assert len(lines) == 3
        assert await made.delete_file(file.file_id) is None
        await made.close()
