"""The adapter by its profile ``litellm`` through a gateway that nobody here wrote: see ``independent_kit``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from independent_kit import CHAT, LITELLM_KEY, Lines, ended, lines_of, rows_of, running_aibrix, running_litellm

from batchferry.clock import SystemClock
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    FilePage,
    FileRole,
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import RowClass
from batchferry.providers.openai import OpenAIProvider
from profile_kit import account_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of the gateway, with AIBrix behind it."""
    with (
        running_aibrix(tmp_path_factory.mktemp("aibrix")) as upstream,
        running_litellm(tmp_path_factory.mktemp("litellm"), upstream) as address,
    ):
        yield address


@pytest.fixture
async def provider(gateway: str) -> AsyncIterator[OpenAIProvider]:
    """The adapter by its profile."""
    given = {"base_url": gateway, "api_key": LITELLM_KEY}
    made = OpenAIProvider(account_of("litellm", settings=given), SystemClock())
    yield made
    await made.close()


async def test_a_create_answered_by_500_is_found_in_the_list(provider, tmp_path):
    """A status that the gateway does not know breaks its answer: the batch is there, and is found by its file."""
    texts = [f"row {row}" for row in range(20)]
    file = await provider.upload(Lines(rows_of(provider, texts)), "batchferry-test.jsonl", None)
    assert isinstance(file, UploadedFile), file
    made = await provider.create(file.file_id, CHAT, "24h", {"batch_id": "b-1"})
    assert isinstance(made, CallFailed), made
    assert (made.kind, made.is_definite) == (CallFailure.UNANSWERED, False)
    page = await provider.list_batches()
    assert isinstance(page, BatchPage), page
    ours = [one for one in page.batches if one.metadata.get("batch_id") == "b-1"]
    assert len(ours) == 1
    assert isinstance(ours[0], BatchSnapshot)
    done = await ended(provider, ours[0])
    assert (done.status, done.counts.completed) == (ProviderStatus.COMPLETED, 20)
    good = await lines_of(provider, done.output_file_id, tmp_path / "o")
    assert good.keys() == set(range(20))
    assert {line.row_class for line in good.values()} == {RowClass.SUCCEEDED}
    assert all(f'"echo row {row}"'.encode() in (line.body or b"") for row, line in good.items())


async def test_its_list_of_files_has_an_end(gateway, provider):
    """It does not pass the cursor on: our listing stops all the same."""
    given = {"base_url": gateway, "api_key": LITELLM_KEY, "dialect": {"file_page_size": 2}}
    small = OpenAIProvider(account_of("litellm", settings=given), SystemClock())
    for _ in range(3):
        assert isinstance(
            await provider.upload(Lines(rows_of(provider, ["x"])), "batchferry-test.jsonl", None), UploadedFile
        )
    cursor = None
    for _ in range(10):
        page = await small.list_files(FileRole.INPUT, cursor)
        assert isinstance(page, FilePage), page
        cursor = page.next_cursor
        if cursor is None:
            break
    await small.close()
    assert cursor is None


async def test_lines_are_read_at_the_upload(provider):
    """A line without an id is refused at once, as a refusal that would come again."""
    got = await provider.upload(Lines(b"{}\n"), "batchferry-test.jsonl", None)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.param) == (CallFailure.REJECTED, "custom_id")


async def test_a_wrong_key_is_the_accounts(gateway):
    """A key that the gateway does not know holds the account, and certainly made nothing."""
    given = {"base_url": gateway, "api_key": "sk-wrong"}
    stranger = OpenAIProvider(account_of("litellm", settings=given), SystemClock())
    got = await stranger.create("file-1", CHAT, "24h", {})
    await stranger.close()
    assert isinstance(got, CallFailed)
    assert got.kind is CallFailure.ACCOUNT, got.summary
