"""What is kept out of files and topics, and what is kept for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ACCOUNT, BATCH, Harbour, shown
from test_engine_landing import Dock, at_provider

from batchferry.app import request_rules
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.ledger import UNCERTAIN
from batchferry.domain.machine import LandResults, ResultsNotOurs, ResultsRead
from batchferry.domain.masking import load_masker
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.requests import BadRecord, RecordRule
from batchferry.domain.rows import RowClass
from batchferry.engine.rowsource import Accepted, Masking, RowSource
from batchferry.store.archive import Archive

PERSONAL = "write to jane.doe@example.org or pay 4111 1111 1111 1111"


def masking_source(harbour: Harbour, masker: Any = None, max_body_bytes: int = 10_000) -> RowSource:
    """A row source with the built-in masker, or another."""
    masking = Masking(masker or load_masker("stock"), max_body_bytes)
    return RowSource(
        harbour.log, harbour.store, harbour.clock, "requests", request_rules(harbour.settings), harbour.router,
        {ACCOUNT: harbour.provider}, harbour.telemetry, masking,
    )  # fmt: skip


def question(text: str) -> bytes:
    """A record that asks this."""
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": "a", "body": body}).encode()


async def test_personal_data_is_in_no_line_no_quote_and_is_counted(tmp_path: Path) -> None:
    """What goes on is the masked request, also where a failure quotes it; the index says in how many places."""
    async with Harbour(tmp_path) as harbour:
        source = masking_source(harbour)
        record = harbour.log.put(0, value=question(PERSONAL))
        accepted = source.accept(record, 0)
        assert isinstance(accepted, Accepted)
        assert b"jane.doe" not in accepted.request.body
        assert b"4111" not in accepted.request.body
        assert accepted.row.masked == 2
        async for lines in source.lines(0, OffsetSet([0]), ACCOUNT):
            assert b"jane.doe" not in lines.lines[0].line
        quote = source.quote(record)
        assert quote is not None
        assert "jane.doe" not in quote.value
        assert json.loads(quote.value)["custom_id"] == "a"
        assert harbour.telemetry.total("masked_places", rule="email") >= 1


async def test_a_route_may_be_left_out(tmp_path: Path) -> None:
    """``mask: false`` on a route lets its requests be as they are."""
    async with Harbour(tmp_path, **{"routes.default.mask": False}) as harbour:
        accepted = masking_source(harbour).accept(harbour.log.put(0, value=question(PERSONAL)), 0)
        assert isinstance(accepted, Accepted)
        assert b"jane.doe" in accepted.request.body
        assert accepted.row.masked == 0


async def test_what_cannot_be_masked_is_refused_and_not_quoted(tmp_path: Path) -> None:
    """A masker that fails, or a body beyond the bound, sends the row to nobody; a broken record is not quoted."""

    class Failing:
        def mask(self, _body: bytes, _endpoint: str) -> bytes | None:
            raise RuntimeError(PERSONAL)

    async with Harbour(tmp_path) as harbour:
        record = harbour.log.put(0, value=question(PERSONAL))
        for source in (masking_source(harbour, Failing()), masking_source(harbour, max_body_bytes=20)):
            refused = source.accept(record, 0)
            assert isinstance(refused, BadRecord)
            assert (refused.rule, refused.custom_id) == (RecordRule.NOT_MASKABLE, "a")
            assert "jane" not in refused.message + refused.remedy
            assert source.quote(record) is None
        assert masking_source(harbour).quote(harbour.log.put(1, value=PERSONAL.encode())) is None


async def test_a_result_file_is_kept_before_it_is_read(tmp_path: Path) -> None:
    """The archive has the file under its batch, whole; reading it a second time adds nothing."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        harbour.log.put(0)
        await harbour.hold(at_provider([0]))
        dock = Dock(harbour)
        archive = Archive(tmp_path / "archive")
        assert await archive.open() is None
        dock.landing._archive = archive
        dock.answer(task, 0, RowClass.SUCCEEDED, '{"a":1}')
        assert await dock.land(LandResults(shown())) == ResultsRead()
        kept = await archive.files()
        assert not isinstance(kept, StoreUnavailable)
        assert [(one.batch_id, one.kind) for one in kept] == [(BATCH, "output")]
        assert kept[0].path.read_bytes() == b"".join(dock.lines)
        assert kept[0].path.stat().st_mode & 0o777 == 0o600
        assert [one["bytes"] for one in harbour.telemetry.named("result_archived")] == [kept[0].size_bytes]


async def test_a_result_file_of_others_is_not_kept(tmp_path: Path) -> None:
    """A batch that was only taken for ours goes into the archive once a line of it is ours, and not before."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        harbour.log.put(0)
        await harbour.hold(at_provider([0], extra={UNCERTAIN: True}))
        dock = Dock(harbour)
        archive = Archive(tmp_path / "archive")
        assert await archive.open() is None
        dock.landing._archive = archive
        dock.answer(task, 5, RowClass.SUCCEEDED)
        assert await dock.land(LandResults(shown())) == ResultsNotOurs()
        assert await archive.files() == ()
        dock.answer(task, 0, RowClass.SUCCEEDED)
        assert await dock.land(LandResults(shown())) == ResultsRead()
        kept = await archive.files()
        assert not isinstance(kept, StoreUnavailable)
        assert len(kept) == 1


@pytest.mark.parametrize("when_full", ["wait", "skip"])
async def test_a_full_archive_holds_up_its_batch_or_is_told(tmp_path: Path, when_full: str) -> None:
    """With ``wait`` nothing of the file is settled until it can be kept; with ``skip`` it is landed without."""
    async with Harbour(tmp_path, **{"archive.when_full": when_full}) as harbour:
        task = await harbour.task()
        harbour.log.put(0)
        await harbour.hold(at_provider([0]))
        dock = Dock(harbour)
        archive = Archive(tmp_path / "archive", max_bytes=1)
        assert await archive.open() is None
        dock.landing._archive = archive
        dock.answer(task, 0, RowClass.SUCCEEDED)
        if when_full == "wait":
            with pytest.raises(StoreUnavailable):
                await dock.land(LandResults(shown()))
            assert not task.ledger.is_settled(0)
        else:
            assert await dock.land(LandResults(shown())) == ResultsRead()
            assert task.ledger.is_settled(0)
        assert [one["waits"] for one in harbour.telemetry.named("archive_failed")] == [when_full == "wait"]
