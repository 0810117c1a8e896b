"""The Gemini surface of the simulator: uploads in pieces, rows both ways, and its life beside the other APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sim_kit import Bench, bench, jsonl, rows

from batchferry.simulator import (
    DEFAULT_KEY,
    FaultRule,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    body_digest,
)
from batchferry.simulator.answers import body_fault
from batchferry.simulator.faults import CallName
from batchferry.simulator.gemini_rows import chat_of, end_of, google_of, identity_of

KEY = {"x-goog-api-key": DEFAULT_KEY}
MODEL = "gemini-2.5-flash"
DAY_S = 86_400


def request_of(text: str) -> dict[str, Any]:
    """A GenerateContentRequest."""
    return {"contents": [{"role": "user", "parts": [{"text": text}]}]}


def lines(*texts: str) -> bytes:
    """A batch file with keys r1, r2, ..."""
    return jsonl({"key": f"r{number}", "request": request_of(text)} for number, text in enumerate(texts, start=1))


async def start(it: Bench, size: int | None) -> httpx.Response:
    """Begin an upload."""
    headers = KEY | {"x-goog-upload-protocol": "resumable", "x-goog-upload-command": "start"}
    if size is not None:
        headers["x-goog-upload-header-content-length"] = str(size)
    return await it.http.post("/upload/v1beta/files", headers=headers, json={"file": {"displayName": "in.jsonl"}})


async def send(it: Bench, url: str, content: bytes, offset: int, command: str) -> httpx.Response:
    """Send a piece."""
    headers = {"x-goog-upload-command": command, "x-goog-upload-offset": str(offset)}
    return await it.http.post(url, content=content, headers=headers)


async def upload(it: Bench, content: bytes) -> str:
    """A file's name."""
    url = (await start(it, len(content))).headers["x-goog-upload-url"]
    answer = await send(it, url, content, 0, "upload, finalize")
    assert answer.status_code == 200, answer.text
    return str(answer.json()["file"]["name"])


async def create(it: Bench, name: str, model: str = MODEL) -> httpx.Response:
    """Make a job."""
    batch = {"displayName": "job", "inputConfig": {"fileName": name}}
    return await it.http.post(f"/v1beta/models/{model}:batchGenerateContent", headers=KEY, json={"batch": batch})


async def end(it: Bench, content: bytes) -> dict[str, Any]:
    """A job after a day."""
    made = (await create(it, await upload(it, content))).json()
    it.clock.advance(DAY_S)
    return dict((await it.http.get(f"/v1beta/{made['name']}", headers=KEY)).json())


async def results(it: Bench, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a job's file."""
    answer = await it.http.get(f"/download/v1beta/{job['response']['responsesFile']}:download?alt=media", headers=KEY)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.content.split(b"\n") if line]


async def test_an_upload_goes_on_where_it_stopped() -> None:
    """Pieces are put together by their offsets; a wrong offset, size or id is refused, and ``query`` tells how far it is."""
    content = lines("one", "two")
    async with bench() as it:
        url = (await start(it, len(content))).headers["x-goog-upload-url"]
        first = await send(it, url, content[:20], 0, "upload")
        assert first.headers["x-goog-upload-status"] == "active"
        assert (await send(it, url, content[20:], 7, "upload, finalize")).status_code == 400
        asked = await send(it, url, b"", 0, "query")
        assert asked.headers["x-goog-upload-size-received"] == "20"
        last = await send(it, url, content[20:], 20, "upload, finalize")
        assert last.headers["x-goog-upload-status"] == "final"
        assert last.json()["file"]["sizeBytes"] == str(len(content))
        assert (await send(it, url, b"", 0, "query")).status_code == 403
        short = (await start(it, 100)).headers["x-goog-upload-url"]
        assert (await send(it, short, b"{}", 0, "upload, finalize")).status_code == 400


async def test_a_job_on_the_wire() -> None:
    """Counters are texts, zeros are left out, instants have nine digits, and the file's name is longer than files.get takes."""
    scenario = Scenario(rows=(RowRule(match=RowMatch(body_contains="two"), outcome=Outcome.HTTP_ERROR, status=503),))
    async with bench(scenario) as it:
        job = await end(it, lines("one", "two"))
        about = job["metadata"]
        assert about["batchStats"] == {"requestCount": "2", "successfulRequestCount": "1", "failedRequestCount": "1"}
        assert (about["state"], job["done"], about["displayName"]) == ("BATCH_STATE_SUCCEEDED", True, "job")
        assert len(about["createTime"].partition(".")[2]) == len("123456789Z")
        name = job["response"]["responsesFile"]
        assert about["output"]["responsesFile"] == name
        assert len(name.removeprefix("files/")) > 40
        looked = await it.http.get(f"/v1beta/{name}", headers=KEY)
        assert (looked.status_code, looked.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
        good, bad = await results(it, job)
        assert (good["key"], set(good)) == ("r1", {"key", "response"})
        assert (bad["key"], set(bad)) == ("r2", {"key", "error"})
        assert bad["error"]["code"] in {14, 503}


async def test_both_kinds_of_numbers_are_met() -> None:
    """Of many failed rows some have gRPC numbers and some HTTP statuses; each row keeps its kind."""
    scenario = Scenario(rows=(RowRule(outcome=Outcome.HTTP_ERROR, status=503),))
    async with bench(scenario) as it:
        made = [await results(it, await end(it, lines(*(f"q{n}" for n in range(20))))) for _ in range(2)]
        assert {line["error"]["code"] for line in made[0]} == {14, 503}
        assert made[0] == made[1]


async def test_a_blocked_prompt_counts_as_a_success() -> None:
    """As Gemini counts it."""
    scenario = Scenario(rows=(RowRule(match=RowMatch(body_contains="two"), outcome=Outcome.CONTENT_FILTER),))
    async with bench(scenario) as it:
        job = await end(it, lines("one", "two"))
        assert job["metadata"]["batchStats"] == {"requestCount": "2", "successfulRequestCount": "2"}
        assert (await results(it, job))[1]["response"]["promptFeedback"]["blockReason"] == "PROHIBITED_CONTENT"


@pytest.mark.parametrize("bad", [b"no json", b'{"key":"a"}', b'{"request":{}}', b'{"key":7,"request":{}}', b"[]"])
async def test_a_bad_line_fails_the_job(bad: bytes) -> None:
    """Nothing runs; the operation has one error and no file."""
    async with bench() as it:
        job = await end(it, lines("one") + bad + b"\n")
        assert (job["metadata"]["state"], job["error"]["code"]) == ("BATCH_STATE_FAILED", 3)
        assert "response" not in job
        assert it.simulator.bill.summary()["batch_runs"] == 0


async def test_the_apis_do_not_see_each_others_things() -> None:
    """Files, copies and jobs of one API are not in the other's lists, and both are on one bill."""
    async with bench() as it:
        job = await end(it, lines("one"))
        other = await it.end(jsonl(rows(1)))
        assert other["status"] == "completed"
        assert [one["id"] for one in (await it.http.get("/v1/batches")).json()["data"]] == [other["id"]]
        listed = (await it.http.get("/v1beta/batches", headers=KEY)).json()
        assert [one["name"] for one in listed["operations"]] == [job["name"]]
        files = (await it.http.get("/v1beta/files", headers=KEY)).json()["files"]
        assert sorted(file["source"] for file in files) == ["GENERATED", "UPLOADED"]
        assert it.simulator.bill.summary()["batch_paid_runs"] == 2


async def test_a_killed_simulator_comes_back_with_its_jobs(tmp_path: Path) -> None:
    """A job made before goes on afterwards, and its results are in Gemini's shape."""
    clock = ManualSimClock()
    async with bench(clock=clock, data_dir=tmp_path) as it:
        made = (await create(it, await upload(it, lines("one", "two")))).json()
    async with bench(clock=clock, data_dir=tmp_path) as it:
        clock.advance(DAY_S)
        job = (await it.http.get(f"/v1beta/{made['name']}", headers=KEY)).json()
        assert [line["key"] for line in await results(it, job)] == ["r1", "r2"]
    async with bench(clock=clock, data_dir=tmp_path) as it:
        assert it.simulator.bill.body(identity_of(request_of("one"), MODEL)) == (1, 0, 1)


async def test_faults_speak_googles_words() -> None:
    """Scripted answers have Google's envelope, whatever call they hit; what a rule quotes stays as it is."""
    async with bench() as it:
        it.simulator.faults.put(FaultRule(call=CallName.LIST, status=429, until_count=1))
        error = (await it.http.get("/v1beta/batches", headers=KEY)).json()["error"]
        assert (error["code"], error["status"]) == (429, "RESOURCE_EXHAUSTED")
        it.simulator.faults.put(FaultRule(call=CallName.LIST, status=502, body="<html>"))
        assert (await it.http.get("/v1beta/batches", headers=KEY)).text == "<html>"


async def test_lists_refuse_nonsense() -> None:
    """A size that is no number and a token of nobody's are invalid arguments."""
    async with bench() as it:
        for query in ("pageSize=x", "pageToken=x", "pageToken=%FF", "pageToken=YWJj"):
            assert (await it.http.get(f"/v1beta/batches?{query}", headers=KEY)).status_code == 400
        assert (await it.http.get("/v1beta/batches", headers=KEY)).json() == {}


async def test_creates_that_are_refused() -> None:
    """No name, no file, rows in the call itself, and somebody else's file."""
    async with bench() as it:
        url = f"/v1beta/models/{MODEL}:batchGenerateContent"
        for batch in ({}, {"displayName": "x"}, {"displayName": "x", "inputConfig": {"requests": {}}}):
            assert (await it.http.post(url, headers=KEY, json={"batch": batch})).status_code == 400
        assert (await create(it, "files/none")).status_code == 403


# ------------------------------------------------------------------------------------------------- rows


def test_a_request_in_the_simulators_form() -> None:
    """Instructions, turns, limits, tools and the wanted schema are carried over; it is answered as it stands."""
    chat = chat_of(
        {
            "systemInstruction": {"parts": [{"text": "be short"}]},
            "contents": [
                {"role": "user", "parts": [{"text": "a"}, {"inlineData": {}}, {"text": "b"}]},
                {"role": "model", "parts": [{"text": "c"}]},
            ],
            "generationConfig": {
                "maxOutputTokens": 9,
                "candidateCount": 2,
                "temperature": 0.5,
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT", "properties": {"type": {"type": "STRING"}}},
            },
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
        },
        MODEL,
    )
    assert [(one["role"], one["content"]) for one in chat["messages"]] == [
        ("system", "be short"),
        ("user", "a\nb"),
        ("assistant", "c"),
    ]
    assert (chat["max_tokens"], chat["n"], chat["temperature"], chat["tools"][0]["function"]["name"]) == (
        9,
        2,
        0.5,
        "f",
    )
    schema = chat["response_format"]["json_schema"]["schema"]
    assert schema == {"type": "object", "properties": {"type": {"type": "string"}}}
    assert body_fault("/v1/chat/completions", chat) is None
    assert body_fault("/v1/chat/completions", chat_of({}, MODEL)) is not None


def test_a_row_is_known_by_its_callers_body() -> None:
    """The request with its model, wherever the members stand."""
    assert body_digest(identity_of(request_of("a"), MODEL)) == body_digest({"model": MODEL} | request_of("a"))


@pytest.mark.parametrize(("status", "word"), [(400, "INVALID_ARGUMENT"), (418, "INVALID_ARGUMENT"), (402, "PERMISSION_DENIED"),
                                              (429, "RESOURCE_EXHAUSTED"), (500, "INTERNAL"), (529, "UNAVAILABLE")])  # fmt: skip
def test_words_of_statuses(status: int, word: str) -> None:
    """Every HTTP status has a word, and an error of it carries the number that belongs to the word."""
    assert google_of(status).word == word
    shown = end_of(status, {"error": {"message": "m"}}, MODEL)
    assert shown.error == {"code": google_of(status).number, "message": "m", "status": word}
