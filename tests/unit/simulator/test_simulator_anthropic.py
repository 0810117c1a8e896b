"""The simulator's Message Batches by plain HTTP: what a create refuses, lives, quirks by script, bill and restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sim_kit import Bench, bench

from batchferry.simulator import (
    DEFAULT_KEY,
    BatchRule,
    Durations,
    JobError,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    Simulator,
    SimulatorSettings,
    SyncScript,
)
from batchferry.simulator.anthropic_script import AnthropicScript

BATCHES = "/v1/messages/batches"
HEADERS = {"x-api-key": DEFAULT_KEY, "anthropic-version": "2026-10-21"}
DAY_S = 86_400.0


def params(text: str, **members: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "claude-haiku-4-5", "max_tokens": 64, "messages": [{"role": "user", "content": text}]} | members


def row(wire_id: str, **members: Any) -> dict[str, Any]:
    """A row of a batch."""
    return {"custom_id": wire_id, "params": params(f"Question {wire_id}", **members)}


async def post(made: Bench, requests: Any, **headers: str) -> httpx.Response:
    """Create."""
    content = requests if isinstance(requests, bytes) else json.dumps({"requests": requests}).encode()
    return await made.http.post(BATCHES, content=content, headers=HEADERS | headers)


async def started(made: Bench, requests: Any) -> str:
    """A create that must succeed."""
    answer = await post(made, requests)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def get(made: Bench, path: str) -> httpx.Response:
    """A GET below the batches."""
    return await made.http.get(f"{BATCHES}{path}", headers=HEADERS)


async def results(made: Bench, batch_id: str) -> list[bytes]:
    """The result lines, raw."""
    answer = await get(made, f"/{batch_id}/results")
    assert answer.status_code == 200, answer.text
    return answer.content.split(b"\n")[:-1]


# ------------------------------------------------------------------------------------------------- create


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "requests"),
        (b"{}", "requests"),
        (b'{"requests":{}}', "requests"),
        ([], "at least 1 item"),
        ([row("a"), 5], "requests.1"),
        ([row("a"), {"params": {}}], "requests.1.custom_id: Field required"),
        ([{"custom_id": 5, "params": {}}], "requests.0.custom_id"),
        ([row("a"), row("")], "requests.1.custom_id: String should match"),
        ([row("a b")], "requests.0.custom_id: String should match"),
        ([row("\u00e9")], "requests.0.custom_id: String should match"),
        ([row("x" * 65)], "requests.0.custom_id: String should have at most 64"),
        ([row("a"), row("b"), row("a")], "requests.2.custom_id"),
        ([{"custom_id": "a"}], "requests.0.params"),
        ([{"custom_id": "a", "params": 7}], "requests.0.params"),
        ([row("a") | {"method": "POST"}], "requests.0.method: Extra inputs"),
    ],
)
async def test_a_create_is_refused_whole(requests, words):
    """What is wrong with the body or a row's id refuses the whole create and names the row; nothing is made."""
    async with bench() as made:
        answer = await post(made, requests)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert (await get(made, "")).json()["data"] == []


async def test_a_create_has_limits():
    """Too many rows, or too many bytes, are 413; exactly as many pass, and so does a body with line breaks in it."""
    script = Scenario(anthropic=AnthropicScript(rows_per_batch=3, body_bytes=2_000))
    async with bench(script) as made:
        for requests in ([row(f"r{n}") for n in range(4)], [row("a", padding="x" * 2_000)]):
            answer = await post(made, requests)
            assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
        spread = json.dumps({"requests": [row(f"r{n}") for n in range(3)]}, indent=1).encode()
        batch_id = await started(made, spread)
        made.clock.advance(DAY_S)
        assert len(await results(made, batch_id)) == 3


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "sk-other"}, 401),
        ({"anthropic-version": "2020-01-01"}, 400),
        ({"content-encoding": "br"}, 400),
        ({"anthropic-version": "2023-06-01"}, 200),
    ],
)
async def test_a_create_needs_its_headers(headers, status):
    """Key and version are asked for; the older version is taken as well."""
    async with bench() as made:
        made.http.headers.pop("authorization")
        assert (await post(made, [row("a")], **headers)).status_code == status


async def test_a_key_may_come_as_a_bearer_token():
    """The documented header and the official client's both open the account; a wrong token does not."""
    async with bench() as made:
        version = {"anthropic-version": "2026-10-21"}
        assert (await made.http.get(BATCHES, headers=version)).status_code == 200
        assert (await made.http.get(BATCHES, headers=version | {"authorization": "Bearer no"})).status_code == 401


async def test_the_version_header_is_required():
    """A call that names no version is refused."""
    async with bench() as made:
        answer = await made.http.get(BATCHES, headers={"x-api-key": DEFAULT_KEY})
        assert (answer.status_code, answer.json()["error"]["message"][:17]) == (400, "anthropic-version")


# -------------------------------------------------------------------------------------------------- lives


async def test_bad_parameters_fail_their_row_at_the_end():
    """A create looks at ids only: parameters that a batch refuses become errored rows when it ends."""
    bad = {
        "stream": {"stream": True},
        "zero": {"max_tokens": 0},
        "warm": {"temperature": 1},
        "speedy": {"speed": "fast"},
        "mute": {"messages": []},
    }
    async with bench() as made:
        batch_id = await started(made, [row("good"), *(row(name, **members) for name, members in bad.items())])
        made.clock.advance(DAY_S)
        lines = {(p := json.loads(raw))["custom_id"]: p["result"] for raw in await results(made, batch_id)}
        assert {name for name, result in lines.items() if result["type"] == "errored"} == set(bad)
        assert {lines[name]["error"]["error"]["type"] for name in bad} == {"invalid_request_error"}
        old = await post(made, [row("warm", temperature=1)], **{"anthropic-version": "2023-06-01"})
        made.clock.advance(DAY_S)
        (line,) = await results(made, old.json()["id"])
        assert json.loads(line)["result"]["type"] == "succeeded"


async def test_what_is_left_after_a_day_expires():
    """At the end of the window the batch ends; rows that were not reached have expired and were not run."""
    script = Scenario(batches=(BatchRule(nth=1, expire_with_share=0.25),))
    async with bench(script) as made:
        batch_id = await started(made, [row(f"r{n}") for n in range(40)])
        made.clock.advance(DAY_S - 1)
        assert (await get(made, f"/{batch_id}")).json()["processing_status"] == "in_progress"
        made.clock.advance(1)
        ended = (await get(made, f"/{batch_id}")).json()
        assert (ended["processing_status"], ended["cancel_initiated_at"]) == ("ended", None)
        assert ended["ended_at"] == ended["expires_at"]
        counts = ended["request_counts"]
        assert (counts["succeeded"], counts["expired"]) == (10, 30)
        assert made.simulator.bill.summary()["batch_paid_runs"] == 10


async def test_results_are_archived_after_29_days():
    """The results are gone 29 days after the creation; the batch's record stays."""
    async with bench() as made:
        batch_id = await started(made, [row("a")])
        made.clock.advance(29 * DAY_S - 1)
        assert len(await results(made, batch_id)) == 1
        made.clock.advance(1)
        kept = (await get(made, f"/{batch_id}")).json()
        assert (kept["processing_status"], kept["results_url"]) == ("ended", None)
        assert kept["archived_at"] is not None
        assert (await get(made, f"/{batch_id}/results")).status_code == 404


async def test_quirks_by_script():
    """404 after a create and on results, and a host of its own choice in the results' address, all by script."""
    quirks = AnthropicScript(unseen_retrieves=2, unseen_results=1, results_origin="https://evil.example")
    async with bench(Scenario(anthropic=quirks)) as made:
        batch_id = await started(made, [row("a")])
        answers = [(await get(made, f"/{batch_id}")).status_code for _ in range(3)]
        assert answers == [404, 404, 200]
        assert len((await get(made, "")).json()["data"]) == 1
        assert (await get(made, f"/{batch_id}/results")).status_code == 404
        made.clock.advance(DAY_S)
        assert (await get(made, f"/{batch_id}")).json()["results_url"].startswith("https://evil.example/v1/")
        assert [(await get(made, f"/{batch_id}/results")).status_code for _ in range(2)] == [404, 200]
    async with bench(Scenario(anthropic=AnthropicScript(unseen_every=3))) as made:
        batch_id = await started(made, [row("a")])
        assert [(await get(made, f"/{batch_id}")).status_code for _ in range(6)] == [200, 200, 404] * 2


async def test_a_batch_that_would_fail_elsewhere_fails_its_rows():
    """There is no failed batch here: a scripted fault of the whole batch ends every row."""
    script = Scenario(
        batches=(BatchRule(nth=1, fail_with=(JobError(code="model_not_found"),)), BatchRule(nth=2, fail_with=()))
    )
    async with bench(script) as made:
        for kind in ("not_found_error", "api_error"):
            batch_id = await started(made, [row("a"), row("b")])
            made.clock.advance(DAY_S)
            found = [json.loads(raw)["result"]["error"]["error"]["type"] for raw in await results(made, batch_id)]
            assert found == [kind, kind]


LINES = {
    "missing": Outcome.MISSING,
    "double": Outcome.DUPLICATE,
    "foreign": Outcome.FOREIGN,
    "torn": Outcome.UNREADABLE,
    "latin": Outcome.INVALID_UTF8,
    "wide": Outcome.LINE_SEPARATOR,
    "nul": Outcome.NUL,
    "huge": Outcome.HUGE,
    "zero": Outcome.STATUS_ZERO,
}


async def test_lines_by_script():
    """Missing, doubled, foreign, torn and odd lines appear as in the other APIs' files, in any order."""
    script = Scenario(
        rows=tuple(
            RowRule(match=RowMatch(wire_id=name), outcome=outcome, size_bytes=50_000) for name, outcome in LINES.items()
        )
    )
    async with bench(script) as made:
        plain = [f"r{n}" for n in range(20)]
        batch_id = await started(made, [row(name) for name in (*plain, *LINES)])
        made.clock.advance(DAY_S)
        lines = await results(made, batch_id)
        named = {name: [one for one in lines if f'"{name}"'.encode() in one[:40]] for name in LINES}
        assert {name: len(found) for name, found in named.items()} == dict.fromkeys(LINES, 1) | {
            "missing": 0,
            "double": 2,
        }
        assert sum(b'"somebody-else-' in one for one in lines) == 1
        with pytest.raises(ValueError, match=r"."):
            json.loads(named["torn"][0])
        with pytest.raises(UnicodeDecodeError):
            named["latin"][0].decode()
        assert "\u2028".encode() in named["wide"][0]
        assert b"\\u0000" in named["nul"][0]
        assert len(named["huge"][0]) > 50_000
        order = [json.loads(one)["custom_id"] for one in lines if b'"r' in one[:20]]
        assert sorted(order) == sorted(plain)
        assert order != plain


# ------------------------------------------------------------------------------------------- bill and disk


async def test_one_bill_and_one_script_for_all():
    """A row counts by custom_id and by body, over batches and single calls, and its attempts go on between them."""
    script = Scenario(rows=(RowRule(outcome=Outcome.HTTP_ERROR, status=529, first_attempts=1),))
    async with bench(script) as made:
        batch_id = await started(made, [row("a")])
        made.clock.advance(DAY_S)
        (line,) = await results(made, batch_id)
        assert json.loads(line)["result"]["error"]["error"]["type"] == "overloaded_error"
        answer = await made.http.post("/v1/messages", json=params("Question a"), headers=HEADERS)
        assert answer.status_code == 200
        assert made.simulator.bill.body(params("Question a")) == (1, 1, 1)
        assert made.simulator.bill.wire("a").batch_runs == 1
        assert made.simulator.bill.summary()["tokens"]["sync"]["claude-haiku-4-5"]["input_tokens"] > 0
        # The other API's lists do not know these batches.
        assert (await made.http.get("/v1/batches")).json()["data"] == []


async def test_a_killed_simulator_comes_back(tmp_path: Path):
    """Batches, their results and the bill are there again; what had not ended goes on."""
    clock = ManualSimClock()
    script = Scenario(durations=Durations(validating_s=3_600))
    settings = SimulatorSettings(clock=clock, scenario=script, data_dir=tmp_path)
    first, second = "", ""
    async with (
        Simulator(settings) as simulator,
        httpx.AsyncClient(base_url=simulator.origin_url, headers=HEADERS) as http,
    ):
        first = (await http.post(BATCHES, json={"requests": [row("a")]})).json()["id"]
        clock.advance(2 * 3_600)
        await simulator.settle()
        second = (await http.post(BATCHES, json={"requests": [row("b")]})).json()["id"]
    async with (
        Simulator(settings) as simulator,
        httpx.AsyncClient(base_url=simulator.origin_url, headers=HEADERS) as http,
    ):
        shown = {one["id"]: one["processing_status"] for one in (await http.get(BATCHES)).json()["data"]}
        assert shown == {second: "in_progress", first: "ended"}
        assert simulator.bill.wire("a").paid_runs == 1
        clock.advance(2 * 3_600)
        assert b'"succeeded"' in (await http.get(f"{BATCHES}/{second}/results")).content
        assert simulator.bill.summary()["batch_paid_runs"] == 2


async def test_single_calls_are_paced():
    """Limits a minute come with Anthropic's headers, their resets as instants; above them it is 429."""
    script = Scenario(sync=SyncScript(calls_per_minute=1))
    async with bench(script) as made:
        first = await made.http.post("/v1/messages", json=params("x"), headers=HEADERS)
        assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert first.headers["anthropic-ratelimit-requests-reset"] == "2026-11-16T08:01:00Z"
        second = await made.http.post("/v1/messages", json=params("x"), headers=HEADERS)
        assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
        assert second.headers["retry-after"] == "60"
        assert "details" not in second.json()["error"]
