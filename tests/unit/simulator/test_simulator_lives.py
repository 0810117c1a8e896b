"""What becomes of a batch: its statuses, files, counts and bill."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sim_kit import CHAT, LONG_S, bench, body, jsonl, line, rows

from batchferry.simulator import (
    BatchRule,
    Durations,
    FaultRule,
    JobError,
    Limits,
    Outcome,
    RowMatch,
    RowRule,
    RunCurve,
    Scenario,
    WeightedOutcome,
)

SLOW = Durations(in_progress=RunCurve(factor_s=0, minimum_s=100))


def rule(wire_id: str, outcome: Outcome, **members: Any) -> RowRule:
    """A rule for one row."""
    return RowRule(match=RowMatch(wire_id=wire_id), outcome=outcome, **members)


async def test_a_new_batch_shows_nothing_it_cannot_know() -> None:
    """Create answers at once: validating, counts 0/0/0, no model, no usage, expiry a window away."""
    async with bench() as it:
        answer = (await it.create(await it.file_id(jsonl(rows(3))))).json()
        assert answer["status"] == "validating"
        assert answer["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert "model" not in answer
        assert "usage" not in answer
        assert answer["expires_at"] == answer["created_at"] + 86_400


async def test_times_follow_the_rows_less_than_linearly() -> None:
    """10,000 rows take about 8 minutes and 50,000 about 26."""
    curve = RunCurve()
    assert curve.duration_s(10_000) == pytest.approx(480, rel=0.02)
    assert curve.duration_s(50_000) == pytest.approx(1560, rel=0.02)
    assert curve.duration_s(1) == curve.minimum_s


async def test_states_can_be_skipped_between_two_looks() -> None:
    """A poller that comes late sees the end at once, with the times at which each state began."""
    async with bench() as it:
        batch = await it.end(jsonl(rows(2)))
        assert batch["status"] == "completed"
        times = [batch[f"{name}_at"] - batch["created_at"] for name in ("in_progress", "finalizing", "completed")]
        assert times == [5, 9, 12]
        assert batch["model"] == "gpt-5-mini-2025-08-07"


async def test_counts_rise_under_way_and_say_nothing_of_the_files() -> None:
    """In progress the counts follow the clock; finalizing shows all rows done and no file yet."""
    async with bench(Scenario(durations=SLOW)) as it:
        batch_id = await it.start(jsonl(rows(10)))
        it.clock.advance(5 + 50)
        assert (await it.get(batch_id))["request_counts"] == {"total": 10, "completed": 5, "failed": 0}
        it.clock.advance(51)
        finalizing = await it.get(batch_id)
        assert finalizing["status"] == "finalizing"
        assert finalizing["request_counts"]["completed"] == 10
        assert finalizing["output_file_id"] is None
        assert it.simulator.bill.summary()["batch_runs"] == 0


async def test_finalizing_may_last_for_hours() -> None:
    """A scripted batch lingers in finalizing while another one is finished."""
    slow_end = BatchRule(nth=1, durations=Durations(finalizing_s=5 * 3600))
    async with bench(Scenario(batches=(slow_end,))) as it:
        lingering = await it.start(jsonl(rows(1)))
        quick = await it.start(jsonl(rows(1)))
        it.clock.advance(4 * 3600)
        assert (await it.get(lingering))["status"] == "finalizing"
        assert (await it.get(quick))["status"] == "completed"
        it.clock.advance(2 * 3600)
        assert (await it.get(lingering))["status"] == "completed"


async def test_output_is_shuffled_and_complete() -> None:
    """Output order is not input order unless the script says so, and every row is there once."""
    wanted = [f"r{number}" for number in range(1, 31)]
    async with bench() as it:
        output, _ = await it.lines_of(await it.end(jsonl(rows(30))))
        ids = [json.loads(raw)["custom_id"] for raw in output]
        assert ids != wanted
        assert sorted(ids) == sorted(wanted)
    async with bench(Scenario(shuffle_output=False)) as it:
        output, _ = await it.lines_of(await it.end(jsonl(rows(30))))
        assert [json.loads(raw)["custom_id"] for raw in output] == wanted


async def test_failed_rows_stand_in_the_error_file_with_the_error_inside() -> None:
    """An HTTP failure has error null and its error object inside the body; a timeout has only the outer error."""
    scenario = Scenario(
        rows=(
            rule("r1", Outcome.HTTP_ERROR, status=503),
            rule("r2", Outcome.CONTENT_FILTER),
            rule("r3", Outcome.CONTEXT_LENGTH),
            rule("r4", Outcome.TIMEOUT),
            rule("r5", Outcome.STATUS_ZERO),
            rule("r6", Outcome.HTTP_ERROR, status=429, type="insufficient_quota", code="insufficient_quota"),
        )
    )
    async with bench(scenario) as it:
        batch = await it.end(jsonl(rows(7)))
        output, error = await it.parsed(batch)
        assert list(output) == ["r7"]
        assert batch["request_counts"] == {"total": 7, "completed": 1, "failed": 6}
        seen = {
            name: (part["response"]["status_code"], part["response"]["body"].get("error", {}).get("code"))
            for name, part in error.items()
            if part["response"] is not None
        }
        assert seen == {
            "r1": (503, "server_is_overloaded"),
            "r2": (400, "content_policy_violation"),
            "r3": (400, "context_length_exceeded"),
            "r5": (0, None),
            "r6": (429, "insufficient_quota"),
        }
        assert all(part["error"] is None for name, part in error.items() if name != "r4")
        assert error["r4"]["response"] is None
        assert error["r4"]["error"]["code"] == "request_timeout"


async def test_all_rows_failed_means_completed_without_an_output_file() -> None:
    """When every row fails the batch is completed all the same, with an error file only."""
    scenario = Scenario(rows=(RowRule(outcome=Outcome.HTTP_ERROR, status=400, code="invalid_value"),))
    async with bench(scenario) as it:
        batch = await it.end(jsonl(rows(3)))
        assert (batch["status"], batch["output_file_id"]) == ("completed", None)
        assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
        assert len((await it.lines_of(batch))[1]) == 3


@pytest.mark.parametrize(
    ("way", "shown"), [("null", {"error_file_id": None}), ("absent", {}), ("empty", {"error_file_id": ""})]
)
async def test_a_clean_job_shows_no_error_file_in_three_ways(way: str, shown: dict[str, Any]) -> None:
    """A clean job's error file id is null, absent or an empty string."""
    async with bench(Scenario.model_validate({"error_file_when_clean": way})) as it:
        batch = await it.end(jsonl(rows(1)))
        assert {name: value for name, value in batch.items() if name == "error_file_id"} == shown


async def test_an_expired_batch_keeps_what_it_finished() -> None:
    """The window closes half way: finished rows are in the output, the others expired, counts do not add up."""
    slow = Durations(validating_s=0, in_progress=RunCurve(factor_s=0, minimum_s=2 * 86_400))
    async with bench(Scenario(durations=slow)) as it:
        batch_id = await it.start(jsonl(rows(10)))
        it.clock.advance(86_400 - 1)
        assert (await it.get(batch_id))["status"] == "in_progress"
        it.clock.advance(1)
        batch = await it.get(batch_id)
        assert (batch["status"], batch["expired_at"]) == ("expired", batch["expires_at"])
        assert batch["request_counts"] == {"total": 10, "completed": 5, "failed": 0}
        output, error = await it.parsed(batch)
        assert sorted(output) == ["r1", "r2", "r3", "r4", "r5"]
        assert {part["error"]["code"] for part in error.values()} == {"batch_expired"}
        assert len(error) == 5
        assert it.simulator.bill.summary()["batch_runs"] == 5
        assert it.simulator.bill.wire("r5").batch_runs == 1
        assert it.simulator.bill.wire("r6").batch_runs == 0


async def test_a_cancelled_batch_keeps_what_it_finished() -> None:
    """Cancelling takes its time, rows in flight still finish, the rest is cancelled and not on the bill."""
    async with bench(Scenario(durations=SLOW, in_flight_rows=1)) as it:
        batch_id = await it.start(jsonl(rows(10)))
        it.clock.advance(5 + 40)
        answer = await it.http.post(f"/v1/batches/{batch_id}/cancel")
        assert answer.json()["status"] == "cancelling"
        it.clock.advance(119)
        assert (await it.get(batch_id))["status"] == "cancelling"
        it.clock.advance(2)
        batch = await it.get(batch_id)
        assert batch["status"] == "cancelled"
        output, error = await it.parsed(batch)
        assert (len(output), len(error)) == (5, 5)
        assert {part["error"]["code"] for part in error.values()} == {"batch_cancelled"}
        assert it.simulator.bill.summary()["batch_runs"] == 5


@pytest.mark.parametrize(("way", "status"), [("cancels", "cancelled"), ("completes", "completed")])
async def test_a_cancel_while_finalizing_leaves_every_row(way: str, status: str) -> None:
    """All rows are done by then, so all of them are in the output whichever way it ends."""
    async with bench(Scenario.model_validate({"cancel_while_finalizing": way})) as it:
        batch_id = await it.start(jsonl(rows(3)))
        it.clock.advance(10)
        assert (await it.http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
        it.clock.advance(LONG_S)
        batch = await it.get(batch_id)
        assert batch["status"] == status
        assert len((await it.lines_of(batch))[0]) == 3


async def test_a_cancel_while_validating_runs_nothing() -> None:
    """A batch cancelled before its file was read has no files and costs nothing."""
    async with bench() as it:
        batch_id = await it.start(jsonl(rows(3)))
        await it.http.post(f"/v1/batches/{batch_id}/cancel")
        it.clock.advance(LONG_S)
        batch = await it.get(batch_id)
        assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("cancelled", None, None)
        assert it.simulator.bill.summary()["batch_runs"] == 0


async def test_every_odd_row_the_field_has_reported() -> None:
    """Missing, doubled, foreign, cut, not UTF-8, empty, U+2028, NUL, long, refused, filtered: each as scripted."""
    kinds = [
        Outcome.MISSING,
        Outcome.DUPLICATE,
        Outcome.FOREIGN,
        Outcome.UNREADABLE,
        Outcome.INVALID_UTF8,
        Outcome.EMPTY_BODY,
        Outcome.LINE_SEPARATOR,
        Outcome.NUL,
        Outcome.REFUSAL,
        Outcome.FILTERED,
        Outcome.TRUNCATED,
        Outcome.TOOL_CALL,
        Outcome.EXPIRED,
    ]
    rules = [rule(kind.value, kind) for kind in kinds] + [rule("huge", Outcome.HUGE, size_bytes=300_000)]
    content = jsonl([line(one.match.wire_id or "") for one in rules])
    async with bench(Scenario(rows=tuple(rules), shuffle_output=False)) as it:
        batch = await it.end(content)
        output, error = await it.lines_of(batch)
        assert batch["request_counts"] == {"total": 14, "completed": 13, "failed": 0}
        assert [json.loads(raw)["error"]["code"] for raw in error] == ["batch_expired"]
        doubled, again, origin, foreign, cut, broken, empty, separated, nul, refused, filtered, short, tool, huge = (
            output
        )
        assert json.loads(doubled)["custom_id"] == "duplicate"
        assert doubled == again
        assert json.loads(origin)["custom_id"] == "foreign"
        assert json.loads(foreign)["custom_id"].startswith("somebody-else-")
        assert b'"custom_id":"unreadable"' in cut
        with pytest.raises(json.JSONDecodeError):
            json.loads(cut)
        with pytest.raises(UnicodeDecodeError):
            broken.decode()
        assert json.loads(empty)["response"]["body"] == {}
        assert "\u2028".encode() in separated
        assert "\u2029".encode() in separated
        assert b"\\u0000" in nul

        def choice(raw: bytes) -> dict[str, Any]:
            return dict(json.loads(raw)["response"]["body"]["choices"][0])

        assert choice(refused)["message"]["refusal"]
        assert choice(filtered)["finish_reason"] == "content_filter"
        assert choice(short)["finish_reason"] == "length"
        assert choice(tool)["message"]["tool_calls"][0]["type"] == "function"
        assert len(choice(huge)["message"]["content"]) == 300_000
        assert it.simulator.bill.wire("missing").paid_runs == 1
        assert it.simulator.bill.wire("expired").batch_runs == 0


async def test_the_last_line_can_be_cut() -> None:
    """An output file may end in the middle of its last line, without a line break."""
    async with bench(Scenario(cut_last_line=True)) as it:
        content = await it.content((await it.end(jsonl(rows(2))))["output_file_id"])
        assert not content.endswith(b"\n")
        assert content.count(b"\n") == 1


async def test_file_ids_may_come_late() -> None:
    """A completed batch can hide its file ids for a while although its counts are above 0."""
    async with bench(Scenario(late_file_ids_s=60)) as it:
        batch_id = await it.start(jsonl(rows(1)))
        it.clock.advance(5 + 4 + 3)
        early = await it.get(batch_id)
        assert (early["status"], early["output_file_id"]) == ("completed", None)
        assert early["request_counts"]["completed"] == 1
        it.clock.advance(60)
        assert (await it.get(batch_id))["output_file_id"]


async def test_a_retry_can_end_better_than_the_first_run() -> None:
    """A rule for the first attempt lets the same body succeed later, under another custom_id and in the sync lane."""
    flaky = RowRule(outcome=Outcome.HTTP_ERROR, status=503, first_attempts=1)
    async with bench(Scenario(rows=(flaky,))) as it:
        first = await it.end(jsonl([line("a-1", "one"), line("b-1", "two")]))
        assert first["request_counts"]["failed"] == 2
        second = await it.end(jsonl([line("a-2", "one")]))
        assert second["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert (await it.http.post(CHAT, json=body("two"))).status_code == 200
        bill = it.simulator.bill
        assert bill.body(body("one")) == (2, 0, 1)
        assert bill.body(body("two")) == (1, 1, 1)
        assert bill.runs_of_body(json.dumps(body("one"), indent=2)) == 2
        assert bill.paid_runs_of_body(body("one")) == 1
        assert bill.wire("a-1") == (1, 0, 0)


async def test_equal_bodies_in_one_batch_are_one_attempt() -> None:
    """Two rows of the same batch with the same body end alike."""
    flaky = RowRule(outcome=Outcome.HTTP_ERROR, status=503, first_attempts=1)
    async with bench(Scenario(rows=(flaky,))) as it:
        batch = await it.end(jsonl([line("a", "same"), line("b", "same")]))
        assert batch["request_counts"]["failed"] == 2


async def test_shares_are_repeatable_and_depend_on_the_seed() -> None:
    """The same seed draws the same outcomes whatever the custom_ids and the order; another seed draws others."""
    scenario = Scenario(shares=(WeightedOutcome(share=0.4, outcome=Outcome.HTTP_ERROR, status=500),))

    async def failed(seed: int, prefix: str) -> set[str]:
        content = jsonl([line(f"{prefix}{number}", f"text {number}") for number in range(60)])
        async with bench(scenario, seed=seed) as it:
            _, error = await it.parsed(await it.end(content))
            return {name.removeprefix(prefix) for name in error}

    one = await failed(1, "a")
    assert one == await failed(1, "other-")
    assert one != await failed(2, "a")
    assert 10 < len(one) < 40


async def test_rules_match_by_body_and_by_number() -> None:
    """A rule can take rows by a piece of their text or every n-th row."""
    scenario = Scenario(
        rows=(
            RowRule(match=RowMatch(body_contains="poison"), outcome=Outcome.CONTENT_FILTER),
            RowRule(match=RowMatch(every=3), outcome=Outcome.TIMEOUT),
        )
    )
    async with bench(scenario) as it:
        content = jsonl([*rows(6), line("p", "this is poison")])
        _, error = await it.parsed(await it.end(content))
        assert sorted(error) == ["p", "r3", "r6"]


async def test_a_scripted_batch_fails_with_and_without_details() -> None:
    """A batch can fail with given entries, or with no entry at all; neither runs a row."""
    entry = JobError(code="invalid_json_line", line=2)
    scenario = Scenario(batches=(BatchRule(nth=1, fail_with=(entry,)), BatchRule(nth=2, fail_with=())))
    async with bench(scenario) as it:
        first, second = await it.end(jsonl(rows(2))), await it.end(jsonl(rows(2)))
        assert (first["status"], second["status"]) == ("failed", "failed")
        assert first["errors"]["data"][0]["line"] == 2
        assert second["errors"] is None
        assert (await it.end(jsonl(rows(2))))["status"] == "completed"
        assert it.simulator.bill.summary()["batch_runs"] == 2


async def test_the_enqueued_token_limit_is_freed_late() -> None:
    """A batch over the model's queue limit fails whole; the queue empties only some time after an end."""
    limits = Limits(enqueued_tokens={"gpt-5-mini": 60}, enqueued_release_s=600)
    async with bench(Scenario(limits=limits)) as it:
        content = jsonl([line("a", "x" * 160)])
        first = await it.start(content)
        it.clock.advance(6)
        assert (await it.get(first))["status"] == "in_progress"
        refused = await it.end(content)
        assert refused["status"] == "failed"
        (entry,) = refused["errors"]["data"]
        assert (entry["code"], entry["line"], entry["param"]) == ("token_limit_exceeded", None, None)
        assert "60" in entry["message"]
        assert refused["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        again = await it.end(content)
        assert again["status"] == "completed"
        other_model = jsonl([line("b", body=body("x" * 160, model="gpt-4o-mini"))])
        assert (await it.end(other_model))["status"] == "completed"


async def test_the_queue_is_still_full_right_after_an_end() -> None:
    """Within the release delay an ended batch still counts."""
    limits = Limits(enqueued_tokens={"gpt-5-mini": 60}, enqueued_release_s=600)
    async with bench(Scenario(limits=limits)) as it:
        content = jsonl([line("a", "x" * 160)])
        first = await it.start(content)
        it.clock.advance(60)
        assert (await it.get(first))["status"] == "completed"
        second = await it.start(content)
        it.clock.advance(60)
        assert (await it.get(second))["errors"]["data"][0]["code"] == "token_limit_exceeded"


async def test_a_file_deleted_before_its_validation_fails_the_batch() -> None:
    """Deleting the input fences the batch while it is validating, and changes nothing afterwards."""
    async with bench() as it:
        file_id = await it.file_id(jsonl(rows(2)))
        fenced = (await it.create(file_id)).json()["id"]
        it.clock.advance(2)
        assert (await it.http.delete(f"/v1/files/{file_id}")).json()["deleted"]
        it.clock.advance(LONG_S)
        batch = await it.get(fenced)
        assert batch["status"] == "failed"
        assert (batch["errors"]["data"][0]["code"], batch["errors"]["data"][0]["param"]) == (
            "invalid_request",
            "file_id",
        )
        other_id = await it.file_id(jsonl(rows(2)))
        running = (await it.create(other_id)).json()["id"]
        it.clock.advance(6)
        await it.http.delete(f"/v1/files/{other_id}")
        it.clock.advance(LONG_S)
        assert (await it.get(running))["status"] == "completed"
        assert (await it.create(other_id)).status_code == 400


async def test_only_failing_rows_that_ran_are_unpaid() -> None:
    """A failed row was run and is not paid; the histogram tells rows paid twice apart."""
    async with bench(Scenario(rows=(rule("r1", Outcome.HTTP_ERROR),))) as it:
        await it.end(jsonl(rows(3)))
        await it.end(jsonl(rows(3)[2:]))
        summary = it.simulator.bill.summary()
        assert (summary["batch_runs"], summary["batch_paid_runs"]) == (4, 3)
        assert summary["bodies_by_paid_runs"] == {"0": 1, "1": 1, "2": 1}
        assert summary["tokens"]["batch"]["gpt-5-mini"]["input_tokens"] > 0


async def test_a_batch_is_worked_off_in_order_of_virtual_time() -> None:
    """Attempts count in the order batches ended on the clock, though both are looked at afterwards."""
    flaky = RowRule(outcome=Outcome.HTTP_ERROR, status=503, first_attempts=1)
    slow = BatchRule(nth=1, durations=Durations(in_progress=RunCurve(factor_s=0, minimum_s=500)))
    async with bench(Scenario(rows=(flaky,), batches=(slow,))) as it:
        late = await it.start(jsonl([line("a", "same")]))
        early = await it.start(jsonl([line("b", "same")]))
        it.clock.advance(LONG_S)
        assert (await it.get(late))["request_counts"]["completed"] == 1
        assert (await it.get(early))["request_counts"]["failed"] == 1


async def test_a_held_create_that_comes_late_meets_the_deleted_file() -> None:
    """A create held on its way is refused when its file was deleted meanwhile: nothing runs."""
    async with bench(faults=(FaultRule.model_validate({"call": "create", "kind": "gate", "gate": "late"}),)) as it:
        file_id = await it.file_id(jsonl(rows(1)))
        held = asyncio.create_task(it.create(file_id))
        await it.simulator.faults.gate("late").reached()
        await it.http.delete(f"/v1/files/{file_id}")
        await it.simulator.faults.gate("late").release()
        assert (await held).status_code == 400
        assert (await it.http.get("/v1/batches")).json()["data"] == []
