"""Faults of the transport, gates, and the simulator's own API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from sim_kit import CHAT, LONG_S, Bench, bench, body, jsonl, line, rows

from batchferry.simulator import FaultPlan, FaultRule, Outcome, RowMatch, RowRule, Scenario, body_digest
from batchferry.simulator.faults import CallName

LOST = (httpx.RemoteProtocolError, httpx.ReadError)


def fault(call: str, **members: Any) -> FaultRule:
    """A rule."""
    return FaultRule.model_validate({"call": call} | members)


async def batches_of(it: Bench) -> list[dict[str, Any]]:
    """What the list says."""
    return list((await it.http.get("/v1/batches")).json()["data"])


async def test_a_lost_reply_leaves_the_work_done() -> None:
    """The connection closes without an answer, and the batch exists."""
    async with bench(faults=(fault("create", kind="lose_reply", nth=1),)) as it:
        file_id = await it.file_id(jsonl(rows(1)))
        with pytest.raises(LOST):
            await it.create(file_id, metadata={"batch": "b1"})
        (found,) = await batches_of(it)
        assert (found["input_file_id"], found["metadata"]) == (file_id, {"batch": "b1"})
        assert (await it.create(file_id)).status_code == 200


async def test_a_dropped_call_does_nothing() -> None:
    """The connection closes before any work; uploads of any size included."""
    async with bench(faults=(fault("create", kind="drop", nth=1), fault("upload", kind="drop", nth=2))) as it:
        file_id = await it.file_id(jsonl(rows(1)))
        with pytest.raises(LOST):
            await it.create(file_id)
        assert await batches_of(it) == []
        with pytest.raises((*LOST, httpx.WriteError)):
            await it.upload(b"{}\n" * 200_000)
        assert len((await it.http.get("/v1/files")).json()["data"]) == 1


async def test_an_error_can_come_although_the_work_was_done() -> None:
    """A gateway answers 502 to a create that succeeded."""
    async with bench(
        faults=(fault("create", status=502, after_work=True, body="<html>bad gateway</html>", nth=1),)
    ) as it:
        answer = await it.create(await it.file_id(jsonl(rows(1))))
        assert (answer.status_code, answer.headers["content-type"]) == (502, "text/html; charset=utf-8")
        assert len(await batches_of(it)) == 1


@pytest.mark.parametrize(
    ("members", "headers"),
    [
        ({"retry_after_s": 2.5}, {"retry-after": "2.5"}),
        ({"retry_after_ms": 150}, {"retry-after-ms": "150"}),
        ({"should_retry": False}, {"x-should-retry": "false"}),
        ({}, {}),
    ],
)
async def test_throttling_with_and_without_a_hint(members: dict[str, Any], headers: dict[str, str]) -> None:
    """429 can carry either form of the hint, an order not to retry, or nothing."""
    hints = {"retry-after", "retry-after-ms", "x-should-retry"}
    async with bench(faults=(fault("retrieve", status=429, until_count=1, **members),)) as it:
        batch_id = await it.start(jsonl(rows(1)))
        answer = await it.http.get(f"/v1/batches/{batch_id}")
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert {name: value for name, value in answer.headers.items() if name in hints} == headers
        assert (await it.get(batch_id))["id"] == batch_id


async def test_server_errors_with_and_without_a_body() -> None:
    """5xx comes with an envelope, or with nothing at all."""
    async with bench(faults=(fault("list", status=503, nth=1), fault("list", status=500, body="", nth=2))) as it:
        first, second = await it.http.get("/v1/batches"), await it.http.get("/v1/batches")
        assert (first.status_code, first.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert (second.status_code, second.content) == (500, b"")


async def test_uploads_are_refused_after_they_were_read() -> None:
    """A client that writes a large body gets the refusal, not a broken pipe."""
    async with bench(faults=(fault("upload", status=429, retry_after_s=1, until_count=1),)) as it:
        assert (await it.upload(b"{}\n" * 300_000)).status_code == 429
        assert (await it.upload(b"{}\n" * 300_000)).status_code == 200


async def test_downloads_can_break_or_end_early() -> None:
    """A cut download breaks off against its length; a shortened one looks whole and is not; then it works."""
    rules = (
        fault("content", kind="cut", nth=1, share=0.5),
        fault("content", kind="shorten", nth=2, share=0.5),
        fault("content", status=502, nth=3),
    )
    async with bench(faults=rules) as it:
        batch = await it.end(jsonl(rows(50)))
        path = f"/v1/files/{batch['output_file_id']}/content"
        with pytest.raises(httpx.RemoteProtocolError):
            await it.http.get(path)
        short = await it.http.get(path)
        assert (await it.http.get(path)).status_code == 502
        whole = await it.http.get(path)
        assert short.status_code == whole.status_code == 200
        assert whole.content.startswith(short.content)
        assert len(short.content) == len(whole.content) // 2


async def test_gates_hold_a_call_before_or_behind_its_work() -> None:
    """A held call waits until released; a call held behind its work has already done it."""
    rules = (
        fault("create", kind="gate", gate="before", nth=1),
        fault("create", kind="gate", gate="behind", after_work=True, nth=2),
    )
    async with bench(faults=rules) as it:
        file_id = await it.file_id(jsonl(rows(1)))
        first = asyncio.create_task(it.create(file_id))
        await it.simulator.faults.gate("before").reached()
        assert await batches_of(it) == []
        await it.simulator.faults.gate("before").release()
        assert (await first).status_code == 200
        second = asyncio.create_task(it.create(file_id))
        await it.simulator.faults.gate("behind").reached()
        assert len(await batches_of(it)) == 2
        await it.simulator.faults.gate("behind").release()
        assert (await second).status_code == 200


async def test_a_held_call_outlives_its_caller() -> None:
    """A create whose caller gave up is carried out when it is released: a late create."""
    async with bench(faults=(fault("create", kind="gate", nth=1),)) as it:
        file_id = await it.file_id(jsonl(rows(1)))
        gate = it.simulator.faults.gate("gate")
        async with httpx.AsyncClient(base_url=it.http.base_url, headers=it.http.headers, verify=False) as impatient:
            held = asyncio.create_task(
                impatient.post(
                    "/v1/batches",
                    json={"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"},
                )
            )
            await gate.reached()
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
        await gate.release(1)
        async with asyncio.timeout(5):
            while not await batches_of(it):
                pass


async def test_the_admin_api_does_it_all_from_another_process() -> None:
    """Faults, gates, bill, state and clock work over HTTP."""
    async with bench(Scenario(rows=(RowRule(match=RowMatch(wire_id="r2"), outcome=Outcome.HTTP_ERROR),))) as it:
        await it.start(jsonl(rows(3)))
        assert (await it.http.post("/_sim/clock", json={"advance_s": LONG_S})).status_code == 200
        state = (await it.http.get("/_sim/state")).json()
        assert state["batches_by_status"] == {"completed": 1}
        assert state["files"] == 3
        summary = (await it.http.get("/_sim/bill")).json()
        assert (summary["batch_runs"], summary["batch_paid_runs"]) == (3, 2)
        page = (await it.http.get("/_sim/bill/rows?limit=2")).json()
        rest = (await it.http.get(f"/_sim/bill/rows?start={page['next']}&limit=2")).json()
        counted = {row["wire_id"]: row["paid_runs"] for row in page["rows"] + rest["rows"]}
        assert counted == {"r1": 1, "r2": 0, "r3": 1}
        assert rest["next"] is None
        streamed = (await it.http.get("/_sim/bill/rows.jsonl")).text.splitlines()
        assert {(row := json.loads(text))["wire_id"]: row["paid_runs"] for text in streamed} == counted
        digest = body_digest(rows(3)[0]["body"])
        assert (await it.http.get(f"/_sim/bill/bodies/{digest}")).json()["batch_runs"] == 1

        put = await it.http.post(
            "/_sim/faults", json=[{"call": "list", "kind": "gate", "gate": "g"}, {"call": "cancel"}]
        )
        assert put.json()["numbers"] == [1, 2]
        held = asyncio.create_task(it.http.get("/v1/batches"))
        assert (await it.http.get("/_sim/gate/g?wait_s=10")).json()["reached"]
        await it.http.post("/_sim/gate/g/release", json={"count": 1})
        assert (await held).status_code == 200
        assert (await it.http.delete("/_sim/faults/2")).json() == {"found": True}
        assert (await it.http.get("/_sim/faults")).json()["calls"]["list"] == 1
        assert (await it.http.delete("/_sim/faults")).json()["rules"] == []


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/_sim/faults", b'{"call":"cats"}'),
        ("POST", "/_sim/faults", b"{"),
        ("POST", "/_sim/clock", b'{"advance_s":-1}'),
        ("POST", "/_sim/gate/g/release", b'{"count":0}'),
        ("GET", "/_sim/bill/bodies/xyz", b""),
        ("GET", "/_sim/bill/rows?limit=0", b""),
        ("GET", "/_sim/bill/rows?start=x", b""),
    ],
)
async def test_wrong_admin_calls_say_what_is_wrong(method: str, path: str, content: bytes) -> None:
    """A wrong admin call is a 400 with a sentence."""
    async with bench() as it:
        answer = await it.http.request(method, path, content=content)
        assert answer.status_code == 400
        assert answer.json()["error"]


async def test_the_admin_api_can_be_left_out() -> None:
    """Without it the addresses do not exist."""
    async with bench(admin=False) as it:
        assert (await it.http.get("/_sim/state")).status_code == 404


async def test_a_synchronous_call_ends_as_scripted() -> None:
    """Errors come with their hint, a timeout closes the connection, an empty and a broken body come as such."""
    rules = [
        RowRule(match=RowMatch(body_contains=name), outcome=outcome, status=429, retry_after_s=3)
        for name, outcome in (
            ("busy", Outcome.HTTP_ERROR),
            ("slow", Outcome.TIMEOUT),
            ("empty", Outcome.EMPTY_BODY),
            ("cut", Outcome.UNREADABLE),
            ("bytes", Outcome.INVALID_UTF8),
        )
    ]
    async with bench(Scenario(rows=tuple(rules))) as it:
        busy = await it.http.post(CHAT, json=body("busy"))
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
        with pytest.raises(LOST):
            await it.http.post(CHAT, json=body("slow"))
        assert (await it.http.post(CHAT, json=body("empty"))).content == b""
        with pytest.raises(json.JSONDecodeError):
            (await it.http.post(CHAT, json=body("cut"))).json()
        assert b"\xff" in (await it.http.post(CHAT, json=body("bytes"))).content
        assert it.simulator.bill.body(body("slow")) == (0, 1, 0)
        assert it.simulator.bill.summary()["sync_runs"] == 5


async def test_rules_for_one_lane_leave_the_other_alone() -> None:
    """A rule can be about batches only."""
    rule = RowRule(outcome=Outcome.HTTP_ERROR, lane="batch")
    async with bench(Scenario(rows=(rule,))) as it:
        assert (await it.end(jsonl([line("a")])))["request_counts"]["failed"] == 1
        assert (await it.http.post(CHAT, json=body("Question a"))).status_code == 200


async def test_vectors_are_repeatable_and_come_in_two_encodings() -> None:
    """Equal inputs have equal vectors; base64 holds the same numbers; dimensions are honoured."""
    request = {"model": "text-embedding-3-small", "input": ["one", "two", "one"], "dimensions": 4}
    async with bench() as it:
        plain = (await it.http.post("/v1/embeddings", json=request)).json()["data"]
        packed = (await it.http.post("/v1/embeddings", json=request | {"encoding_format": "base64"})).json()["data"]
        assert plain[0]["embedding"] == plain[2]["embedding"] != plain[1]["embedding"]
        assert len(plain[0]["embedding"]) == 4
        assert isinstance(packed[0]["embedding"], str)


async def test_a_question_of_intent_gets_one_of_the_labels() -> None:
    """A prompt that lists labels is answered with the most fitting one, also in a wanted JSON shape."""
    labels = "card_arrival, lost_or_stolen_card, exchange_rate, top_up_failed"
    messages = [
        {"role": "system", "content": f"Answer with one of: {labels}"},
        {"role": "user", "content": "What is your rate of exchange today?"},
    ]
    schema = {"type": "object", "properties": {"intent": {"type": "string", "enum": labels.split(", ")}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "i", "schema": schema}}
    async with bench() as it:

        async def ask(**members: Any) -> str:
            answer = await it.http.post(CHAT, json={"model": "gpt-5-mini", "messages": messages} | members)
            return str(answer.json()["choices"][0]["message"]["content"])

        assert await ask() == "exchange_rate"
        assert json.loads(await ask(response_format=wanted)) == {"intent": "exchange_rate"}


async def test_a_token_limit_cuts_the_answer() -> None:
    """max_completion_tokens ends the answer with finish_reason length; n gives so many choices."""
    request = body("one two three four five six") | {"max_completion_tokens": 2, "n": 3}
    async with bench() as it:
        choices = (await it.http.post(CHAT, json=request)).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
        assert len(choices[0]["message"]["content"]) <= 8


def test_rules_count_the_calls_they_are_about() -> None:
    """nth, every and until_count choose among the calls seen since the rule was put."""

    def fired(**members: Any) -> list[int]:
        plan = FaultPlan()
        plan.put(fault("create", **members))
        return [number for number in range(1, 8) if plan.draw(CallName.CREATE)]

    assert fired(nth=3) == [3]
    assert fired(every=3) == [3, 6]
    assert fired(until_count=2) == [1, 2]
    assert fired(every=2, until_count=2) == [2, 4]
    assert FaultPlan().draw(CallName.CREATE) == []


def test_chance_is_repeatable_by_seed() -> None:
    """The same seed hits the same calls."""

    def hits(seed: int) -> list[bool]:
        plan = FaultPlan(seed)
        plan.put(fault("*", probability=0.5))
        return [bool(plan.draw(CallName.RETRIEVE)) for _ in range(64)]

    assert hits(1) == hits(1) != hits(2)
    assert 16 < sum(hits(1)) < 48
