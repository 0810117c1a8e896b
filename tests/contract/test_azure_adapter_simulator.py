"""What only Azure has: paths and key, oddities of the dated versions, jobs without an end, its content filter."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from adapter_kit import HOUR_S, KEY, PORTS, Books, Lines, Port, moored

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, ProviderStatus
from batchferry.domain.rows import RowClass
from batchferry.simulator import BatchRule, Outcome, RowMatch, RowRule, Scenario

CURRENT, DATED = (port for port in PORTS if port.name in {"azure", "azure-legacy"})
both = pytest.mark.parametrize("port", [CURRENT, DATED], ids=lambda port: port.name)


async def shown(port: Port, root: str, path: str, **query: str) -> httpx.Response:
    """What the server says to a plain client."""
    headers = {"api-key": KEY}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        return await client.get(f"{root}{path}", params=dict(port.profile.query) | query)


@both
async def test_an_error_file_of_no_bytes_is_no_fault(port: Port, tmp_path: Path) -> None:
    """A job without a failed row names an error file all the same; it is fetched, is empty, and is deleted."""
    async with moored(port, tmp_path) as berth:
        cargo, batch = await berth.sent(["one", "two"])
        done = await berth.ended(batch)
        assert done.error_file_id is not None
        file = await berth.fetched(done.error_file_id)
        assert file.stat().st_size == 0
        books = Books(cargo, await berth.lines(done))
        assert books.classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)
        assert await berth.provider.delete_file(done.error_file_id) is None


async def test_the_dated_versions_have_their_oddities(tmp_path: Path) -> None:
    """A capital in the status, an ISO instant and counters that are null are read for what they mean."""
    async with moored(DATED, tmp_path) as berth:
        _, batch = await berth.sent(["one"])
        root = DATED.address(berth.simulator)
        raw = (await shown(DATED, root, f"/batches/{batch.provider_batch_id}")).json()
        assert (raw["status"], raw["endpoint"]) == ("Validating", "/chat/completions")
        assert raw["created_at"].startswith("20")
        assert raw["request_counts"] == {"total": None, "completed": None, "failed": None}
        assert (batch.status, batch.raw_status, batch.counts.total) == (ProviderStatus.VALIDATING, "Validating", 0)
        assert batch.created_at == berth.clock.now()
        wrong = await shown(DATED, root, "/batches", **{"api-version": "1999-01-01"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "404")


@both
async def test_a_job_runs_on_past_its_window(port: Port, tmp_path: Path) -> None:
    """After twice its window it still runs, half done; it completes by itself in the end, with every row answered."""
    script = Scenario(batches=(BatchRule(expire_with_share=0.25),))
    async with moored(port, tmp_path, script) as berth:
        cargo, batch = await berth.sent([f"row {row}" for row in range(8)])
        late = await berth.after(batch, 48 * HOUR_S)
        assert (late.status, late.counts.completed) == (ProviderStatus.IN_PROGRESS, 4)
        assert late.expires_at is not None
        assert late.expires_at < berth.clock.now()
        done = await berth.after(batch, 49 * HOUR_S)
        assert done.status is ProviderStatus.COMPLETED
        assert Books(cargo, await berth.lines(done)).classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)


@both
async def test_the_content_filter_names_itself(port: Port, tmp_path: Path) -> None:
    """A prompt that it stopped is a row with status 400 and its findings; answers carry theirs and stay successes."""
    rows = (RowRule(match=RowMatch(body_contains="bad"), outcome=Outcome.CONTENT_FILTER),)
    async with moored(port, tmp_path, Scenario(rows=rows)) as berth:
        cargo, batch = await berth.sent(["good", "bad"])
        books = Books(cargo, await berth.lines(await berth.ended(batch)))
        good, bad = (books.by_id[wire_id] for wire_id in cargo.ids)
        assert (good.row_class, bad.row_class) == (RowClass.SUCCEEDED, RowClass.CONTENT_FILTERED)
        assert "prompt_filter_results" in json.loads(good.body or b"")
        error = json.loads(bad.body or b"")["error"]
        assert (error["code"], error["innererror"]["code"]) == ("content_filter", "ResponsibleAIPolicyViolation")
        answered = await berth.provider.answer(port.endpoint, port.body("bad"), 20.0)
        assert answered.line.row_class is RowClass.CONTENT_FILTERED


@both
async def test_refused_lines_in_azures_words(port: Port, tmp_path: Path) -> None:
    """A line for another endpoint and a line for another deployment stop the job, and blame their rows."""
    async with moored(port, tmp_path) as berth:
        good = berth.cargo(["one"])
        foreign = berth.provider.line_head("a-2") + berth.provider.render_line("/v1/responses", port.body("two"))
        other = berth.provider.line_head("a-3") + berth.provider.render_line(
            port.endpoint, port.body("three").replace(port.model.encode(), b"another-deployment")
        )
        file = await berth.provider.upload(Lines(good.data + foreign + other), "abcdefghjk-odd.jsonl", 1_209_600)
        assert not isinstance(file, CallFailed), file
        made = await berth.provider.create(file.file_id, port.endpoint, "24h", {}, port.model)
        assert isinstance(made, BatchSnapshot), made
        failed = await berth.ended(made)
        assert failed.status is ProviderStatus.FAILED
        assert failed.ended_at is not None
        assert [(error.code, error.line) for error in failed.errors] == [("url_mismatch", 2), ("model_mismatch", 3)]
        assert {berth.provider.classify_batch_error(error) for error in failed.errors} == {BatchErrorKind.ROW}


async def test_a_file_lives_for_two_weeks_at_least(tmp_path: Path) -> None:
    """A shorter life is raised by the profile; a server that is asked for one refuses it as our fault."""
    async with moored(CURRENT, tmp_path) as berth:
        cargo = berth.cargo(["one"])
        name = f"abcdefghjk-{cargo.batch_id}.jsonl"
        assert not isinstance(await berth.provider.upload(Lines(cargo.data), name, 3600), CallFailed)
        hasty = berth.account(dialect={"min_file_expiry_s": 3600})
        got = await hasty.upload(Lines(cargo.data), name, 3600)
        await hasty.close()
        assert isinstance(got, CallFailed)
        assert (got.kind, got.code, got.is_definite) == (CallFailure.REJECTED, "invalidPayload", True)


async def test_a_bearer_token_is_taken_too(tmp_path: Path) -> None:
    """The directory's token goes as a bearer token in place of the key."""
    async with moored(CURRENT, tmp_path) as berth:
        bearer = berth.account(dialect={"key_header": "authorization"})
        page = await bearer.list_batches()
        await bearer.close()
        assert not isinstance(page, CallFailed)


async def test_the_deployment_in_the_address_is_the_model(tmp_path: Path) -> None:
    """Single calls of the dated versions name the deployment in their address, and that is what answers."""
    async with moored(DATED, tmp_path) as berth:
        got = await berth.provider.answer(DATED.endpoint, DATED.body("hello"), 20.0)
        assert got.failure is None
        root = DATED.address(berth.simulator)
        async with httpx.AsyncClient(headers={"api-key": KEY}, trust_env=False) as client:
            body = {"model": "something else", "messages": [{"role": "user", "content": "x"}]}
            address = f"{root}/deployments/gpt-4o-mini/chat/completions"
            answer = await client.post(address, params=dict(DATED.profile.query), json=body)
        assert answer.json()["model"].startswith("gpt-4o-mini")
