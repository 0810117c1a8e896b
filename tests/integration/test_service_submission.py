"""Submission through the whole service: whatever the provider answers, every row is run once and blamed for nothing.

The calm cases live side by side; after them come those in which the provider's transport breaks, one by one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from inprocess_kit import HOUR_S, MODEL, ROUTE, Outcome, Pier, Script, Sent, request

from batchferry.domain import control
from batchferry.domain.control import Hold
from batchferry.domain.ids import BatchId
from batchferry.engine import holds
from batchferry.ports import OutRecord
from batchferry.simulator import CallName, Durations, FaultKind, FaultRule, RunCurve
from batchferry.simulator.errors import Refused
from batchferry.simulator.state import Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = ("r1", "r2", "r3")


class Calm(Script):
    """A case of which only the provider's script is unusual."""

    rows: Sequence[str] = ROWS

    def records(self, name: str) -> list[Sent]:
        return [request(name, custom_id) for custom_id in self.rows]


class NotYetThere(Calm):
    """B07: the file has just been uploaded, and create says that it does not exist."""

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        if attempt == 1:
            return Refused(400, "no such file", param="file_id")
        return Refused(404, "no such input file") if attempt == 2 else None


class RefusedForLong(Calm):
    """A definite no for longer than a file is offered."""

    is_open = False

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        return None if self.is_open else Refused(400, "we do not like it", param="endpoint", code="invalid_value")


class Throttled(Calm):
    """429 about the rate, three times."""

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        if attempt > 3:
            return None
        return Refused(
            429, "slow down", error_type="requests", code="rate_limit_exceeded", headers={"retry-after": "30"}
        )


class OutOfMoney(Calm):
    """429 that speaks about money: the account is held."""

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        code = "insufficient_quota"
        return Refused(429, "you exceeded your quota", error_type=code, code=code) if attempt == 1 else None


EMBEDDINGS = "/v1/embeddings"


class Mixed(Calm):
    """Two models, two endpoints and two slices at one time."""

    def records(self, name: str) -> list[Sent]:
        made = []
        for number in range(4):
            made.append(request(name, f"a{number}"))
            made.append(request(name, f"b{number}", model="gpt-4o"))
            words = json.dumps({"model": MODEL, "input": f"case/{name}/ e{number}"}).encode()
            made.append(request(name, f"e{number}", body=words, url=EMBEDDINGS))
            made.append(request(name, f"s{number}", slice_="other"))
        return made


PRETTY = (
    '{\r\n  "zeta": 1.50,\n  "model": "gpt-4o-mini",\n  "big": 12345678901234567890123,\n  "e": 1e999,\n'
    '  "messages": [\n    {\n      "role": "user",\r      "content": "case/pretty/ \\u00e9\\n\u2028 é 🦓 \\u0000"\n    }\n  ]\n}'
)


class Pretty(Calm):
    """Bodies over several lines, with all that a JSON text may hold."""

    def records(self, name: str) -> list[Sent]:
        return [
            request(name, "pretty", body=PRETTY.encode()),
            Sent(
                b'\n {\n"body":\t{"model":"gpt-4o-mini","messages":[{"role":"user","content":"case/pretty/ two"}]}\n,'
                b' "note": "mine", "method": "POST", "custom_id": "caf\\u00e9"}\n',
                b"pretty",
                (("slice", b"pretty"),),
            ),
        ]


class ByRows(Calm):
    """A route whose batches leave with five rows."""

    rows = tuple(f"r{number:02}" for number in range(12))

    def records(self, name: str) -> list[Sent]:
        return [request(name, one, model="five-rows") for one in self.rows]


class ByBytes(Calm):
    """A route whose batches leave with 20,000 bytes."""

    rows = tuple(f"r{number:03}" for number in range(120))

    def records(self, name: str) -> list[Sent]:
        return [request(name, one, model="few-bytes", text=one + "x" * 200) for one in self.rows]


class CancelEarly(Calm):
    """Rows that take twenty hours."""

    def durations(self, life: int) -> Durations:
        return Durations(in_progress=RunCurve(minimum_s=20 * HOUR_S, factor_s=0), cancelling_s=60)


class BySla(Calm):
    """A route that could wait for days, and one request in a hurry."""

    def records(self, name: str) -> list[Sent]:
        hurry = [("sla", b"PT28H")]
        return [request(name, one, model="patient", headers=hurry if one == "r2" else ()) for one in self.rows]


CALM: dict[str, Calm] = {
    "b07": NotYetThere(),
    "refused": RefusedForLong(),
    "throttled": Throttled(),
    "money": OutOfMoney(),
    "mixed": Mixed(),
    "pretty": Pretty(),
    "by-rows": ByRows(),
    "by-bytes": ByBytes(),
    "by-sla": BySla(),
}
LATER: dict[str, Script] = {"cancel-early": CancelEarly()}

ROUTES = {
    "five": {**ROUTE, "models": ["five-rows"], "max_rows": 5},
    "bytes": {**ROUTE, "models": ["few-bytes"], "max_bytes": 20_000},
    "patient": {**ROUTE, "models": ["patient"], "sla_s": 140 * HOUR_S},
    "default": ROUTE,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pier(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pier]:
    """The service, once the calm cases have landed."""
    with pytest.MonkeyPatch.context() as patch:
        # Hours pass here between two submissions: a hold's reason must be remembered for longer than in real life.
        patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)
        folder = tmp_path_factory.mktemp("submission")
        limits = {"max_record_bytes": 16_000}
        async with Pier(broker.bootstrap, folder, patch, {**CALM, **LATER}, routes=ROUTES, limits=limits) as made:
            late: list[str] = []

            async def play(name: str, one: Calm) -> None:
                await made.send(name, one.records(name))
                try:
                    await made.landed(name)
                except AssertionError as error:
                    late.append(f"{error}; {await made.jobs(name)}")

            async def give_in() -> None:
                await made.until(lambda: holds_of(made, "refused"), "a hold on the refused key")
                CALM["refused"].is_open = True  # type: ignore[attr-defined]

            await asyncio.gather(give_in(), *(play(name, one) for name, one in CALM.items()))
            assert late == []
            yield made


def holds_of(pier: Pier, label: str) -> list[Hold]:
    """The holds that the control topic has heard of, oldest first, whose label names this."""
    read = [control.decode(one.key or b"", one.value) for one in pier.heard.control]
    return [one for one in read if isinstance(one, Hold) and label in one.label]


async def tell(pier: Pier, entry: control.ControlEntry) -> None:
    """Write a control record as the command line would."""
    assert pier.service is not None
    producer = pier.kafka.plain_producer()
    await producer.start()
    await producer.send([OutRecord(pier.service.settings.topics.control_topic, *control.encode(entry), partition=0)])
    await producer.stop()


def texts(pier: Pier, case: str) -> list[list[str]]:
    """The rows of each of the case's batches, by their words."""
    return [life.texts for life in pier.provider.lives[case]]


def events_of(pier: Pier, case: str, name: str) -> list[Any]:
    """Our events of this name about those of the case's batches that came into being at the provider."""
    known = [(life.batch.metadata or {}).get("batch_id") for life in pier.provider.lives[case]]
    return [one for one in pier.events(name) if one.get("batch_id") in known]


def all_fine(outcomes: Sequence[Outcome]) -> None:
    """Every row succeeded, and none was blamed for anything on the way."""
    assert [one.row_class for one in outcomes] == ["succeeded"] * len(outcomes)
    assert [one.said["attempts"] for one in outcomes] == [{}] * len(outcomes)


# ------------------------------------------------------------------------------------------- calm cases


async def test_b07_not_yet_there_is_no_refusal(pier: Pier) -> None:
    """Two refusals right after the upload: the file is uploaded once and one batch exists at the end."""
    all_fine(pier.outcomes("b07"))
    assert texts(pier, "b07") == [list(ROWS)]
    assert pier.provider.refused["b07"] == 2
    assert len(events_of(pier, "b07", "batch_uploaded")) == 1


async def test_a_lasting_refusal_dissolves_the_batch(pier: Pier) -> None:
    """After the file's time the rows wait under a hold on their key; then they run, with no attempt used up."""
    all_fine(pier.outcomes("refused"))
    assert texts(pier, "refused") == [list(ROWS)]
    assert pier.provider.refused["refused"] >= 2
    assert {hold.reason for hold in holds_of(pier, "[refused]")} == {"create_rejected"}
    assert [one["reason"] for one in pier.events("batch_dissolved")].count("create_rejected") >= 1
    assert {one.said["submission"] > 1 for one in pier.outcomes("refused")} == {True}


async def test_a_throttled_create_is_repeated(pier: Pier) -> None:
    """429 with Retry-After: the same file is offered again, no hold, no attempt."""
    all_fine(pier.outcomes("throttled"))
    assert texts(pier, "throttled") == [list(ROWS)]
    assert pier.provider.refused["throttled"] == 3
    assert len(events_of(pier, "throttled", "batch_uploaded")) == 1


async def test_lack_of_money_holds_the_account(pier: Pier) -> None:
    """``insufficient_quota`` is no throttling: the account is held, the rows wait and then run."""
    all_fine(pier.outcomes("money"))
    assert texts(pier, "money") == [list(ROWS)]
    assert any(hold.scope == "account:default" for hold in holds_of(pier, "default"))


async def test_what_differs_never_shares_a_file(pier: Pier) -> None:
    """One model, one endpoint and one slice a file; each record still comes back under its own id."""
    all_fine(pier.outcomes("mixed"))
    lives = pier.provider.lives["mixed"]
    kinds = [(life.batch.endpoint, life.lines[0].body["model"]) for life in lives]
    assert sorted(kinds) == sorted(
        [("/v1/chat/completions", MODEL)] * 2 + [("/v1/chat/completions", "gpt-4o"), (EMBEDDINGS, MODEL)]
    )
    assert sorted("".join(text[0] for text in life) for life in texts(pier, "mixed")) == [
        "aaaa",
        "bbbb",
        "eeee",
        "ssss",
    ]


async def test_a_pretty_printed_body_is_one_line(pier: Pier) -> None:
    """Line breaks between tokens become spaces; every token reaches the provider as it was written."""
    all_fine(pier.outcomes("pretty"))
    (life,) = pier.provider.lives["pretty"]
    assert life.file.endswith(b"\n")
    assert life.file.count(b"\n") == 2
    assert PRETTY.replace("\r", " ").replace("\n", " ").encode() in life.file
    assert [one.said["custom_id"] for one in pier.outcomes("pretty")] == ["pretty", "café"]


async def test_rows_and_bytes_seal(pier: Pier) -> None:
    """A batch leaves with its route's number of rows, or before its file is larger than its route's bytes."""
    all_fine(pier.outcomes("by-rows"))
    assert [len(one) for one in texts(pier, "by-rows")] == [5, 5, 2]
    assert [one["reason"] for one in events_of(pier, "by-rows", "batch_sealed")] == ["count", "count", "time"]
    all_fine(pier.outcomes("by-bytes"))
    assert sum(len(one) for one in texts(pier, "by-bytes")) == 120
    assert all(len(life.file) <= 20_000 for life in pier.provider.lives["by-bytes"])
    assert "bytes" in [one["reason"] for one in events_of(pier, "by-bytes", "batch_sealed")]


async def test_one_hurried_row_takes_the_batch_along(pier: Pier) -> None:
    """The smallest ship-by in an open batch decides: an SLA header seals it days earlier."""
    outcomes = pier.outcomes("by-sla")
    all_fine(outcomes)
    assert texts(pier, "by-sla") == [list(ROWS)]
    (sealed,) = events_of(pier, "by-sla", "batch_sealed")
    assert HOUR_S <= int(str(sealed["waited_s"])) < 5 * HOUR_S
    assert [one.said["deadline_met"] for one in outcomes] == [True] * 3


# ------------------------------------------------------------------------------------------- broken transport


async def send(pier: Pier, case: str) -> None:
    """Produce three records of a case."""
    await pier.send(case, [request(case, custom_id) for custom_id in ROWS])


async def test_b11_a_lost_reply_to_create_is_adopted(pier: Pier) -> None:
    """The create worked and its answer was lost, and the list cannot be had at first: the rows wait, visibly
    unclear; then the existing batch is found and adopted, and there is exactly one.
    """
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.LOSE_REPLY, until_count=1))
    number = faults.put(FaultRule(call=CallName.LIST, status=503))
    await send(pier, "lost-reply")
    await pier.until(
        lambda: "submission_unknown" in pier.supervisor.status()["batches"].values(), "a batch of unclear fate"
    )
    await pier.until(lambda: faults.describe()["rules"][-1]["fired"] >= 3, "some look-ups without an answer")
    assert "submission_unknown" in pier.supervisor.status()["batches"].values()
    faults.take_away(number)
    all_fine(await pier.landed("lost-reply"))
    assert texts(pier, "lost-reply") == [list(ROWS)]
    assert [one["found_by"] for one in events_of(pier, "lost-reply", "batch_adopted")] == ["list"]
    faults.clear()


async def test_a_create_that_never_arrived_is_proven_absent_first(pier: Pier) -> None:
    """The connection broke before the provider did anything: the file is deleted before the rows go again."""
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.DROP, until_count=1))
    await send(pier, "dropped")
    outcomes = await pier.landed("dropped")
    all_fine(outcomes)
    assert texts(pier, "dropped") == [list(ROWS)]
    assert {one.said["submission"] > 1 for one in outcomes} == {True}
    assert "never_created" in [one["reason"] for one in pier.events("batch_dissolved")]
    faults.clear()


@pytest.mark.parametrize("after_work", [False, True])
async def test_a_500_to_create_says_nothing(pier: Pier, after_work: bool) -> None:
    """Whether the batch was made behind a 500 or not, it is run once."""
    case = f"create-500-{'made' if after_work else 'not-made'}"
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.CREATE, status=500, until_count=1, after_work=after_work))
    await send(pier, case)
    all_fine(await pier.landed(case))
    assert texts(pier, case) == [list(ROWS)]
    faults.clear()


async def test_uploads_that_fail_are_repeated(pier: Pier) -> None:
    """5xx, a lost reply and a broken connection: the file starts from zero until it is there, and is used once."""
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.UPLOAD, status=500, until_count=7))
    faults.put(FaultRule(call=CallName.UPLOAD, kind=FaultKind.LOSE_REPLY, until_count=1))
    faults.put(FaultRule(call=CallName.UPLOAD, kind=FaultKind.DROP, until_count=1))
    await send(pier, "uploads")
    all_fine(await pier.landed("uploads"))
    assert texts(pier, "uploads") == [list(ROWS)]
    assert [rule["fired"] for rule in faults.describe()["rules"]] == [7, 1, 1]
    faults.clear()


async def test_a_provider_that_is_down_for_hours(pier: Pier) -> None:
    """One batch on the water and one on the quay when it goes down: both land once when it is back."""
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.CONTENT, kind=FaultKind.GATE, gate="reading", until_count=1))
    await send(pier, "down-water")
    await asyncio.wait_for(faults.gate("reading").reached(), 20)
    number = faults.put(FaultRule(call=CallName.ANY, kind=FaultKind.DROP))
    await send(pier, "down-quay")
    await pier.until(lambda: len(pier.events("batch_sealed")) and pier.placed["down-quay"], "records on their way")
    began = pier.now
    await pier.until(lambda: (pier.now - began).total_seconds() > 5 * HOUR_S, "five hours without the provider")
    assert pier.service is not None
    assert list(pier.service.not_ready()) == []
    assert list(pier.service.not_live()) == []
    assert pier.missing("down-quay")
    faults.take_away(number)
    await faults.release_all()
    for case in ("down-water", "down-quay"):
        all_fine(await pier.landed(case))
        assert texts(pier, case) == [list(ROWS)]
    faults.clear()


async def test_a_refused_key_holds_the_account_across_a_restart(pier: Pier, monkeypatch: pytest.MonkeyPatch) -> None:
    """401: the account is held in the control topic; a new start on an empty folder still keeps it; after an
    operator's release the rows run, none blamed.
    """
    monkeypatch.setattr(holds, "FIRST_PAUSE_S", 400 * HOUR_S)
    monkeypatch.setattr(holds, "MAX_PAUSE_S", 400 * HOUR_S)
    faults = pier.simulator.faults
    for call in (CallName.UPLOAD, CallName.CREATE):
        faults.put(FaultRule(call=call, status=401, error_code="invalid_api_key"))
    before = len(holds_of(pier, "default"))
    await send(pier, "key")
    await pier.until(lambda: len(holds_of(pier, "default")) > before, "a hold on the account")
    hold = holds_of(pier, "default")[-1]
    assert (hold.scope, hold.reason) == ("account:default", "account")
    faults.clear()
    uploads = faults.calls["upload"]
    await pier.stop()
    await pier.start()
    assert [one["scope"] for one in pier.supervisor.status()["holds"]] == ["account:default"]
    began = pier.now
    await pier.until(lambda: (pier.now - began).total_seconds() > 3 * HOUR_S, "three hours under the hold")
    assert faults.calls["upload"] == uploads
    assert pier.missing("key") == pier.placed["key"]
    await tell(pier, control.Lifted(control.hold_key(hold)))
    all_fine(await pier.landed("key"))
    assert texts(pier, "key") == [list(ROWS)]


async def test_a_flush_seals_what_was_there_before_it(pier: Pier) -> None:
    """``flush`` is a state with an instant: rows from before it leave now, rows that come later wait."""
    await pier.send("flushed", [request("flushed", one, model="patient") for one in ROWS])
    await pier.until(lambda: pier.supervisor.status()["waiting"], "rows that wait")
    at = pier.now
    await pier.until(lambda: (pier.now - at).total_seconds() > 60, "a minute")
    await tell(pier, control.Flush("all", at))
    all_fine(await pier.landed("flushed"))
    (sealed,) = events_of(pier, "flushed", "batch_sealed")
    assert sealed["reason"] == "flush"
    await pier.send("unflushed", [request("unflushed", "u", model="patient")])
    await pier.until(lambda: pier.supervisor.status()["waiting"], "rows that wait")
    sent = pier.now
    await pier.until(lambda: (pier.now - sent).total_seconds() > 3 * HOUR_S, "some looks at the standing record")
    assert pier.supervisor.status()["waiting"]
    await tell(pier, control.Flush("all", pier.now))
    all_fine(await pier.landed("unflushed"))


async def test_a_wish_to_cancel_outlives_the_submission(pier: Pier) -> None:
    """It came while the file was on its way: the batch is cancelled once it is on the water."""
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.UPLOAD, kind=FaultKind.GATE, gate="upload", until_count=1))
    await send(pier, "cancel-early")
    await asyncio.wait_for(faults.gate("upload").reached(), 20)
    (job,) = await pier.jobs("cancel-early")
    await tell(pier, control.CancelWish(BatchId(str(job["batch_id"])), "fail", pier.now))
    await pier.until(lambda: pier.supervisor.fleet.control.cancels, "the wish to be known")
    await faults.gate("upload").release()
    await pier.landed("cancel-early")
    (life,) = pier.provider.lives["cancel-early"]
    assert life.batch.status is Status.CANCELLED
    faults.clear()


async def test_a_restart_lands_every_partition_of_a_batch(pier: Pier) -> None:
    """A finished batch over three partitions is taken up piece by piece: no piece is forgotten."""
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.CONTENT, kind=FaultKind.GATE, gate="landing", until_count=1))
    records = [request("pieces", f"p{number}") for number in range(30)]
    await pier.send("pieces", [Sent(one.value, one.key, one.headers, n % 3) for n, one in enumerate(records)])
    await asyncio.wait_for(faults.gate("landing").reached(), 20)
    assert pier.missing("pieces") == pier.placed["pieces"]
    await pier.stop()
    await faults.gate("landing").release()
    faults.clear()
    await pier.start()
    all_fine(await pier.landed("pieces"))
    assert len(pier.provider.lives["pieces"]) == 1


async def test_every_row_was_run_once_and_nothing_is_left(pier: Pier) -> None:
    """After all of it: one outcome a record, one paid run a row, no file of ours at the provider."""
    for case in pier.placed:
        pier.outcomes(case)
    await pier.until(lambda: not pier.supervisor.status()["batches"], "every batch at its end")
    await pier.simulator.settle()
    summary = pier.simulator.bill.summary()
    assert summary["bodies_by_paid_runs"] == {"1": sum(len(one) for one in pier.placed.values())}
    ends = await pier.settled_offsets()
    for partition, offset in {where for one in pier.placed.values() for where in one}:
        assert ends[partition] > offset
    # Files whose upload's reply was lost delete themselves by their expiry; all others are gone.
    known = {life.batch.input_file_id for lives in pier.provider.lives.values() for life in lives}
    assert known.isdisjoint(pier.provider.files_left())
    assert len(pier.provider.files_left()) <= 1
