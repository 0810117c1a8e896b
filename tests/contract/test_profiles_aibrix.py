"""The adapter by its profile ``aibrix`` against a batch server that nobody here wrote: see ``independent_kit``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from independent_kit import ended, lines_of, running_aibrix, submitted, until_true

from batchferry.clock import SystemClock
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    FilePage,
    FileRole,
    ProviderStatus,
)
from batchferry.domain.rows import RowClass
from batchferry.providers.openai import OpenAIProvider
from profile_kit import account_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def aibrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a running server."""
    with running_aibrix(tmp_path_factory.mktemp("aibrix")) as address:
        yield address


@pytest.fixture
async def provider(aibrix: str) -> AsyncIterator[OpenAIProvider]:
    """The adapter by its profile."""
    made = OpenAIProvider(account_of("aibrix", settings={"base_url": aibrix}), SystemClock())
    yield made
    await made.close()


async def test_a_batch_goes_all_the_way(provider, tmp_path):
    """Every row has its own answer, the refused row is judged by its status, and the batch is found by file and tag."""
    texts = ["please refuse" if row == 7 else f"row {row}" for row in range(40)]
    file, batch = await submitted(provider, texts, tag="b-whole")
    assert batch.input_file_id == file.file_id
    done = await ended(provider, batch)
    assert (done.status, done.counts.total) == (ProviderStatus.COMPLETED, 40)
    good = await lines_of(provider, done.output_file_id, tmp_path / "o")
    bad = await lines_of(provider, done.error_file_id, tmp_path / "e")
    assert good.keys() | bad.keys() == set(range(40))
    assert all(line.row_class is RowClass.SUCCEEDED for line in good.values())
    assert all(f'"echo row {row}"'.encode() in (line.body or b"") for row, line in good.items())
    assert bad.keys() == {7}
    assert bad[7].row_class is RowClass.INVALID_REQUEST
    page = await provider.list_batches()
    assert isinstance(page, BatchPage)
    ours = next(one for one in page.batches if one.provider_batch_id == batch.provider_batch_id)
    assert (ours.input_file_id, ours.metadata) == (file.file_id, {"batch_id": "b-whole"})


async def test_files_are_listed_and_deleted(provider):
    """An input file is in the list by its name and purpose until it is deleted; deleting it twice is harmless."""
    file, batch = await submitted(provider, ["x"])
    await ended(provider, batch)

    async def names() -> set[str]:
        found, cursor = set(), None
        for _ in range(20):
            page = await provider.list_files(FileRole.INPUT, cursor)
            assert isinstance(page, FilePage), page
            found |= {one.file_id for one in page.files}
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise AssertionError("the list has no end")

    assert file.file_id in await names()
    assert await provider.delete_file(file.file_id) is None
    assert file.file_id not in await names()
    assert await provider.delete_file(file.file_id) is None


async def test_the_list_of_batches_ends(aibrix, provider):
    """Pages of two chained by their cursor give every batch once, the newest first."""
    made = {(await submitted(provider, ["x"]))[1].provider_batch_id for _ in range(5)}
    given = {"base_url": aibrix, "dialect": {"list_page_size": 2}}
    small = OpenAIProvider(account_of("aibrix", settings=given), SystemClock())
    seen: list[BatchSnapshot] = []
    cursor = None
    try:
        for _ in range(50):
            page = await small.list_batches(cursor)
            assert isinstance(page, BatchPage), page
            seen += page.batches
            cursor = page.next_cursor
            if cursor is None:
                break
    finally:
        await small.close()
    assert cursor is None
    ids = [one.provider_batch_id for one in seen]
    assert made <= set(ids)
    assert len(ids) == len(set(ids))
    assert [one.created_at for one in seen] == sorted((one.created_at for one in seen), reverse=True)


async def test_cancelling(provider, tmp_path):
    """A running batch is cancelled and keeps what was answered; a second cancel, after its end, is a conflict."""
    _, batch = await submitted(provider, [f"wait 1 {row}" for row in range(200)])

    async def runs() -> BatchSnapshot | None:
        got = await provider.retrieve(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        return got if got.status is ProviderStatus.IN_PROGRESS else None

    await until_true(runs)
    assert isinstance(await provider.cancel(batch.provider_batch_id), BatchSnapshot)
    done = await ended(provider, batch)
    assert done.status is ProviderStatus.CANCELLED
    found = await lines_of(provider, done.output_file_id, tmp_path / "o")
    assert len(found) < 200
    assert {line.row_class for line in found.values()} <= {RowClass.SUCCEEDED}
    again = await provider.cancel(batch.provider_batch_id)
    assert isinstance(again, CallFailed)
    assert again.kind is CallFailure.CONFLICT


async def test_a_short_window_is_kept_to(provider, tmp_path):
    """A batch that its window does not hold expires; rows without a line are simply absent, and none is doubled."""
    _, batch = await submitted(provider, [f"wait 20 {row}" for row in range(60)], window="1m")
    done = await ended(provider, batch)
    assert done.status is ProviderStatus.EXPIRED
    good = await lines_of(provider, done.output_file_id, tmp_path / "o")
    bad = await lines_of(provider, done.error_file_id, tmp_path / "e")
    assert not good.keys() & bad.keys()
    assert len(good) + len(bad) < 60


async def test_what_is_not_there_is_told_apart(provider, tmp_path):
    """Unknown batches and files are not found, in the form in which this server refuses."""
    unknown = "00000000-0000-4000-8000-000000000000"
    for got in (
        await provider.retrieve(unknown),
        await provider.cancel(unknown),
        await provider.download(unknown, tmp_path / "x"),
    ):
        assert isinstance(got, CallFailed), got
        assert got.kind is CallFailure.NOT_FOUND, got.summary
