"""The fifteen behaviour cases, each a fault that people who run batch jobs have reported, against the whole service.

``test_bNN_`` is case NN. One service lives through most of them at once, each in batches of its own, is restarted in
the middle and once more at the end; the tests then look at what was published, what the provider was sent and what
an operator could see. Cases that break the transport follow one by one. What the bytes of a result file alone decide
is in ``test_behaviour_cases_lines``, a hand-over between two processes in ``test_behaviour_cases_handover``, the receiver of webhooks in the tests of the server.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import httpx
import pytest
import pytest_asyncio
from inprocess_kit import (
    HOUR_S,
    ROUTE,
    Files,
    Life,
    Line,
    Outcome,
    Pier,
    Script,
    Sent,
    answer_body,
    answer_line,
    joined,
    request,
    unrun_line,
)

from batchferry.domain import control
from batchferry.domain.control import Hold, Poke
from batchferry.domain.requests import REMEDIES, RecordRule
from batchferry.engine import holds
from batchferry.simulator import DEFAULT_KEY, CallName, Durations, FaultKind, FaultRule, JobError, RunCurve
from batchferry.simulator.errors import Refused
from batchferry.simulator.state import Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIRE_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What every provider takes for a ``custom_id``."""
POLL_LIMIT_S = 6
SUBMIT_S = 8
"""B15: a submission outlasts the time that a consumer may go without polling. Real seconds."""
HOOK_SECRET = "whsec_b25seS1mb3ItdGVzdHMtMDEyMzQ1Njc4OWFiY2RlZiE="
UNREADABLE_LINES = {
    "b04-cut": lambda line: line[:120],
    "b04-words": lambda _: b"upstream error, try again",
    "b04-half": lambda line: line[70:],
}


class Case(Script):
    """How a case's batches live, and the records that meet it. ``drive`` runs beside the wait for the outcomes."""

    rows: Sequence[str] = ("r1", "r2", "r3")

    def records(self, name: str) -> list[Sent]:
        return [request(name, custom_id) for custom_id in self.rows]

    async def drive(self, name: str, pier: Pier) -> None:
        """What somebody does meanwhile."""


def wires(lines: Sequence[Line]) -> dict[str, str]:
    """Wire ids by the words of the row."""
    return {line.text: line.wire_id for line in lines}


class Answers(Case):
    """An output file whose answers hold exactly these bytes between the quotation marks."""

    def __init__(self, **answers: bytes) -> None:
        self.answers = answers
        self.rows = tuple(answers)

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        known = wires(lines)
        return Files(joined(answer_line(known[text], answer_body(inner)) for text, inner in self.answers.items()), None)


class OddIds(Case):
    """B01: ids that no provider takes; each row's words are its number."""

    ids = (
        "a" * 64 + "1", "a" * 64 + "2", "b" * 1000, "with spaces  in it", " ", "🦓 крем-брюле 東京", "\u202eright to left",
        'quotes " and \\', "line\nfeed", "nul\x00", "#part1", "../../etc", "0123456789-0-0-1", "a" * 64, "é" * 64,
    )  # fmt: skip

    def records(self, name: str) -> list[Sent]:
        return [request(name, one, text=f"t{number}") for number, one in enumerate(self.ids)]

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        return Files(joined(answer_line(line.wire_id, answer_body(f"answer to {line.text}")) for line in lines), None)


class SameId(Case):
    """B02: one id for two requests, and one of them again."""

    texts = ("Capital of France?", "Capital of Norway?", "Capital of France?", "Capital of Peru?")
    ids = ("req-5", "req-5", "req-5", "req-6")

    def records(self, name: str) -> list[Sent]:
        return [request(name, one, text=text) for one, text in zip(self.ids, self.texts, strict=True)]

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        return Files(joined(answer_line(line.wire_id, answer_body(f"answer to {line.text}")) for line in lines), None)


class OneBadLine(Case):
    """B04: the middle line of three cannot be read, once."""

    def __init__(self, spoil: Callable[[bytes], bytes]) -> None:
        self.spoil = spoil

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        made = [answer_line(line.wire_id, answer_body(f"answer to {line.text}")) for line in lines]
        return Files(joined(self.spoil(line) if b"to r2" in line and life == 1 else line for line in made), None)


class Refusals(Case):
    """B05: rows refused inside ``response.body``, among rows that were answered."""

    errors: ClassVar = {
        "r-5": (400, "context_length_exceeded", "too_long"),
        "r-6": (400, "invalid_value", "invalid_request"),
        "r-7": (400, "content_policy_violation", "content_filtered"),
        "r-8": (404, "model_not_found", "model_unavailable"),
        "r-9": (200, "unsupported_parameter", "invalid_request"),
    }
    rows = (*errors, "fine")

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        known = wires(lines)
        failed = []
        for text, (status, code, _) in self.errors.items():
            error = {
                "message": f"because of {code}",
                "type": "invalid_request_error",
                "param": "messages",
                "code": code,
            }
            failed.append(answer_line(known[text], json.dumps({"error": error}).encode(), status))
        # One of the failures stands, as at some gateways, in the output file.
        return Files(
            joined([failed[1], answer_line(known["fine"], answer_body("fine"))]), joined(failed[:1] + failed[2:])
        )


class NoOutput(Case):
    """B06 and B12: completed, every row refused, no output file; the message holds a NUL."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        error = {"type": "invalid_request_error", "code": "invalid_value", "message": "unknown\x00parameter"}
        body = json.dumps({"error": error}).encode()
        return Files(None, joined(answer_line(line.wire_id, body, 400) for line in lines))

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "completed":
            shown["request_counts"] = {"total": 3, "completed": 0, "failed": 3}
        return shown


class NotYet(Case):
    """B07: the file has just been uploaded, and create says that it does not exist."""

    refusals = (
        Refused(400, "no such file", param="file_id"),
        Refused(404, "no such input file"),
        Refused(404, "no such file", code="file_not_found"),
    )

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        return self.refusals[attempt - 1] if attempt <= len(self.refusals) else None


class NotForLong(Case):
    """B07: the same, for longer than a file is offered."""

    is_open = False
    kept_back = False

    def refuse_create(self, life: int, attempt: int) -> Refused | None:
        return None if self.is_open else Refused(404, "no such input file", param="file_id")

    async def drive(self, name: str, pier: Pier) -> None:
        def given_up() -> set[object]:
            made = {one["batch_id"] for one in pier.events("batch_sealed") if f"[{name}]" in str(one["key"])}
            return made & {one["batch_id"] for one in pier.events("batch_dissolved")}

        await pier.until(given_up, "the batch given up")
        partition, offset = min(pier.placed[name])
        self.kept_back = (await pier.settled_offsets()).get(partition, 0) <= offset
        self.is_open = True


class Expires(Case):
    """B08: some rows were done when the window closed; the others stand in the error file, or nowhere."""

    rows = ("r1", "r2", "r3", "r4")

    def __init__(self, done: int = 1, times: int = 1, *, is_listed: bool = True) -> None:
        self.done, self.times, self.is_listed = done, times, is_listed

    def ends(self, life: int) -> tuple[Status, int] | None:
        return (Status.EXPIRED, self.done if life == 1 else 0) if life <= self.times else None

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        if life > self.times:
            return files
        done = self.done if life == 1 else 0
        output = joined(answer_line(line.wire_id, answer_body("done in time")) for line in lines[:done])
        unrun = joined(unrun_line(line.wire_id, "batch_expired") for line in lines[done:])
        return Files(output or None, unrun if self.is_listed else None)


class Lingers(Case):
    """B09: six hours in finalizing with full counts; no row is counted while it is validated."""

    def durations(self, life: int) -> Durations:
        running = RunCurve(minimum_s=1.5 * HOUR_S, factor_s=0)
        return Durations(validating_s=0.5 * HOUR_S, in_progress=running, finalizing_s=6 * HOUR_S)

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "validating":
            shown["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
        elif shown["status"] in {"in_progress", "finalizing"}:
            shown["request_counts"] = {"total": 3, "completed": 3, "failed": 0}
        return shown


class TokenLimit(Case):
    """B10: created, then failed, since too many tokens are in the queue; meanwhile the service is restarted."""

    refusals = 2
    shown: ClassVar[list[dict[str, Any]]] = []
    waiting_rows = 0.0
    kept: Sequence[Hold] = ()

    def records(self, name: str) -> list[Sent]:
        # Large enough that fewer of them in a batch make a difference.
        return [request(name, one, text=f"{one} " + "many words " * 500) for one in self.rows]

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        message = "queue limit of 30K tokens reached, try again when running jobs are done"
        return [JobError(code="token_limit_exceeded", message=message)] if life <= self.refusals else None

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: holds_of(pier, name), "a hold")
        self.shown.extend(one for one in pier.supervisor.status()["holds"] if f"[{name}]" in one["label"])
        await pier.until(lambda: pier.telemetry.gauges.get(("waiting_rows", ()), 0) >= 3, "the rows to be counted")
        await pier.stop()
        await pier.start()
        known = pier.supervisor.fleet.control.holds.values()
        self.kept = [one for one in known if f"[{name}]" in one.label]


class SlowCreate(Case):
    """B15: the provider takes the create and answers it later than a consumer may go without polling."""

    rows = ("k30",)
    sealed_meanwhile = 0
    generations: tuple[int, int] = (0, 0)


class Hooked(Case):
    """B13: batches of an account that would be polled only once in twenty-five hours."""

    def records(self, name: str) -> list[Sent]:
        return [request(name, custom_id, model="hooked") for custom_id in self.rows]


class Tombstones(Case):
    """B14: unusual records between good ones, all in one partition."""

    good = ("k10", "k13", "k16")
    bad: ClassVar = {
        "tombstone": (None, RecordRule.TOMBSTONE),
        "words": (b"not json at all", RecordRule.NOT_JSON),
        "nothing": (b"", RecordRule.EMPTY),
        "binary": (bytes(range(256)), RecordRule.NOT_JSON),
    }

    def records(self, name: str) -> list[Sent]:
        good = [request(name, one, text=one) for one in self.good]
        bad = [Sent(value, None if value else b"a") for value, _ in self.bad.values()]
        mixed = [good[0], *bad[:2], good[1], *bad[2:], good[2]]
        return [Sent(one.value, one.key, one.headers, 2) for one in mixed]


CASES: dict[str, Case] = {
    "b01": OddIds(),
    "b02": SameId(),
    "b03": Answers(r1="first\u2028second".encode(), r2="para\u2029next".encode(), r3=b"plain", r4="\u0085".encode()),
    **{name: OneBadLine(spoil) for name, spoil in UNREADABLE_LINES.items()},
    "b05": Refusals(),
    "b06": NoOutput(),
    "b07": NotYet(),
    "b07-lasting": NotForLong(),
    "b08": Expires(),
    "b08-most": Expires(3, is_listed=False),
    "b08-twice": Expires(2, times=2),
    "b09": Lingers(),
    "b12": Answers(r1=b"before", r2=b"nov\\u0000mber", r3=b"after", r4=b"\\u0000"),
    "b14": Tombstones(),
}
FIRST: dict[str, Case] = {"b15": SlowCreate()}
SECOND: dict[str, Case] = {"b10": TokenLimit()}
LATER: dict[str, Case] = {"b13": Hooked()}


class HookedPier(Pier):
    """With a second account, which is told of news by webhooks and hardly polled."""

    def settings(self, **overrides: Any) -> Any:
        # The margin has to hold the longest pause four times over: what webhooks that arrive may stretch it to.
        rare = {"first_s": 25 * HOUR_S, "max_s": 25 * HOUR_S}
        hooked = {
            "base_url": self.simulator.base_url,
            "api_key": DEFAULT_KEY,
            "poll": rare,
            "webhook_secret": HOOK_SECRET,
        }
        return super().settings(accounts={"hooked": hooked}, **overrides)


ROUTES = {
    "hooked": {"models": ["hooked"], "account": "hooked", "sla_s": 135.5 * HOUR_S, "margin_s": 110 * HOUR_S},
    # Time enough that no row ever has to hurry; a batch leaves an hour and a half after its first record.
    "default": {**ROUTE, "sla_s": 120 * HOUR_S, "max_wait_s": 1.5 * HOUR_S},
}


def holds_of(pier: Pier, name: str) -> list[Hold]:
    """The holds on a case's key that the control topic has heard of, oldest first."""
    read = [control.decode(one.key or b"", one.value) for one in pier.heard.control]
    return [one for one in read if isinstance(one, Hold) and f"[{name}]" in one.label]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pier(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pier]:
    """The service once the cases that live side by side are over, in its third life."""
    late: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        # Hours pass here between two submissions: a hold's reason must be remembered for longer than in real life.
        patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)
        patch.setattr(holds, "FIRST_PAUSE_S", 2 * HOUR_S)
        patch.setattr(holds, "MAX_PAUSE_S", 24 * HOUR_S)
        async with HookedPier(
            broker.bootstrap,
            tmp_path_factory.mktemp("cases"),
            patch,
            {**CASES, **FIRST, **SECOND, **LATER},
            routes=ROUTES,
            kafka={"max_poll_interval_s": POLL_LIMIT_S, "session_timeout_s": POLL_LIMIT_S},
            server={"enabled": True, "host": "127.0.0.1", "port": 0, "webhooks": "in_process"},
        ) as made:

            async def play(name: str, one: Case) -> None:
                await made.send(name, one.records(name))
                try:
                    await asyncio.gather(one.drive(name, made), made.landed(name, 70))
                except AssertionError as error:
                    lives = [f"{life.batch.status} {life.texts}" for life in made.provider.lives[name]][:6]
                    late[name] = f"{error}; batches {lives}"

            slow = FIRST["b15"]
            made.simulator.faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.GATE, gate="slow", until_count=1))
            await made.send("b15", slow.records("b15"))
            await asyncio.wait_for(made.simulator.faults.gate("slow").reached(), 30)
            playing = asyncio.gather(*(play(name, one) for name, one in CASES.items()))
            await hold_the_create(made, slow)
            await made.landed("b15")
            await asyncio.gather(playing, *(play(name, one) for name, one in SECOND.items()))
            await made.until(lambda: not made.supervisor.status()["batches"], "every batch at its end", 60)
            assert late == {}
            # One more life: whoever has an outcome must not be met again; a later record shows that it has read on.
            await made.stop()
            await made.start()
            after = [request("after", f"a{partition}") for partition in range(made.partitions)]
            placed = [Sent(one.value, one.key, one.headers, number) for number, one in enumerate(after)]
            await made.send("after", placed)
            await made.landed("after")
            made.simulator.faults.clear()
            yield made


async def hold_the_create(pier: Pier, slow: Any) -> None:
    """Let the first create wait longer than the poll limit, and note what went on meanwhile."""
    began, before = pier.now, len(pier.events("partitions_assigned"))
    limit = timedelta(hours=SUBMIT_S)  # an hour is a second here
    await pier.until(lambda: pier.now - began > limit, "the time of a slow submission")
    slow.generations = (before, len(pier.events("partitions_assigned")))
    slow.sealed_meanwhile = len(pier.events("batch_sealed"))
    assert not pier.provider.lives["b15"]
    await pier.simulator.faults.gate("slow").release()


def sent(pier: Pier, name: str) -> list[list[str]]:
    """The rows of each of the case's batches, by their words."""
    return [life.texts for life in pier.provider.lives[name]]


def classes(pier: Pier, name: str) -> list[str]:
    """The class of each of the case's outcomes, in the order of its records."""
    return [one.row_class for one in pier.outcomes(name)]


def our_id(life: Life) -> str:
    """Our own id of a batch at the provider."""
    assert life.batch.metadata is not None
    return life.batch.metadata["batch_id"]


def all_fine(outcomes: Sequence[Outcome]) -> None:
    """Every row succeeded, and none was blamed for anything on the way."""
    assert [one.row_class for one in outcomes] == ["succeeded"] * len(outcomes)
    assert [one.said["attempts"] for one in outcomes] == [{}] * len(outcomes)


# ------------------------------------------------------------------------------------ what the caller sends


async def test_b01_no_id_of_the_callers_reaches_the_provider(pier: Pier) -> None:
    """Any id is taken and comes back unchanged with the answer to its own request; the provider sees lawful ids only."""
    case = OddIds()
    outcomes = pier.outcomes("b01")
    all_fine(outcomes)
    assert [one.said["custom_id"] for one in outcomes] == list(case.ids)
    assert [one.text for one in outcomes] == [f"answer to t{number}" for number in range(len(case.ids))]
    assert sent(pier, "b01") == [sorted(f"t{number}" for number in range(len(case.ids)))]
    for lives in pier.provider.lives.values():
        for life in lives:
            named = [json.loads(line)["custom_id"] for line in life.file.splitlines() if line.strip()]
            assert all(WIRE_ID.fullmatch(one) for one in named)
            assert len(set(named)) == len(named)


async def test_b02_one_id_for_two_requests(pier: Pier) -> None:
    """Both requests are answered, each by its own answer under its own offset; the exact repetition is no further line
    and points to the one it repeats; a neighbour goes on as normal.
    """
    france, norway, again, peru = pier.outcomes("b02")
    assert [one.text for one in (france, norway, peru)] == [
        f"answer to {t}" for t in (*SameId.texts[:2], SameId.texts[3])
    ]
    assert again.row_class == "duplicate"
    partition, offset = france.where
    assert again.said["duplicate_of"] == {
        "topic": pier.topics["requests"],
        "partition": partition,
        "offset": offset,
    }
    assert sent(pier, "b02") == [sorted(set(SameId.texts))]


async def test_b14_unusual_records_harm_no_neighbour(pier: Pier) -> None:
    """The good records are answered; each bad one is a single failure that names topic, partition and offset and keeps
    the value in a bounded form; the committed offset passes them all, and a restart does not meet them again.
    """
    outcomes = pier.outcomes("b14")
    good = [one for one in outcomes if one.is_result]
    bad = [one for one in outcomes if not one.is_result]
    assert [one.said["custom_id"] for one in good] == list(Tombstones.good)
    assert sent(pier, "b14") == [list(Tombstones.good)]
    for outcome, (value, rule) in zip(bad, Tombstones.bad.values(), strict=True):
        partition, offset = outcome.where
        error = outcome.said["error"]
        assert (error["class"], error["remedy"]) == ("bad_record", REMEDIES[RecordRule(error["code"])])
        assert error["code"] == rule or (value and not value.isascii())
        assert f"{pier.topics['requests']}-{partition}@{offset}" in error["message"]
        assert partition == 2
        original = outcome.said.get("original")
        assert (original is None) == (value is None)
        if value is not None:
            assert original["bytes"] == len(value)
    (words,) = [one for one in bad if one.code == "not_json" and one.said["original"].get("value")]
    assert words.said["original"]["value"] == "not json at all"
    assert len(pier.events("record_refused")) == len(Tombstones.bad)
    ends: dict[int, int] = {}
    for partition, offset in [where for placed in pier.placed.values() for where in placed]:
        ends[partition] = max(ends.get(partition, 0), offset + 1)
    assert await pier.settled_offsets() == ends


# ------------------------------------------------------------------------------------ what result files say


async def test_b03_separators_stay_in_the_text(pier: Pier) -> None:
    """Raw line and paragraph separators in an answer end no line, neither here nor for who reads what we publish."""
    outcomes = pier.outcomes("b03")
    all_fine(outcomes)
    assert [one.text for one in outcomes] == ["first\u2028second", "para\u2029next", "plain", "\u0085"]
    assert sent(pier, "b03") == [["r1", "r2", "r3", "r4"]]
    for one in outcomes:
        assert (one.record.value or b"").count(b"\n") == 0


@pytest.mark.parametrize("name", UNREADABLE_LINES)
async def test_b04_one_unusable_line(pier: Pier, name: str) -> None:
    """The rows around it are published and never sent again; its own row goes again alone; an operator is told batch,
    line and reason without the content.
    """
    outcomes = pier.outcomes(name)
    assert [one.text for one in outcomes[:1] + outcomes[2:]] == ["answer to r1", "answer to r3"]
    assert outcomes[1].text == "answer to r2"
    assert sent(pier, name) == [["r1", "r2", "r3"], ["r2"]]
    first = our_id(pier.provider.lives[name][0])
    told = [one for one in pier.events("line_unreadable") if one["batch_id"] == first]
    assert told[0]["line"] == 2
    assert told[0]["reason"]
    assert "answer" not in repr(told)
    assert "upstream" not in repr(told)


async def test_b05_a_refusal_inside_the_body_is_a_failure(pier: Pier) -> None:
    """Class, code, message and status come from the error where the completion should be; refused rows are never sent
    again, and the answered row beside them is published.
    """
    *failed, fine = pier.outcomes("b05")
    for one, (status, code, row_class) in zip(failed, Refusals.errors.values(), strict=True):
        error = one.said["error"]
        assert (error["class"], error["code"], error["http_status"]) == (row_class, code, status)
        assert error["message"] == f"because of {code}"
        assert one.record.topic == pier.topics["failures"]
    assert fine.text == "fine"
    assert sent(pier, "b05") == [sorted(Refusals.rows)]


async def test_b06_every_row_failed_and_there_is_no_output_file(pier: Pier) -> None:
    """One classified failure a row with the provider's code and message; no file without a name is asked for; the
    batch is closed once with no success, and two restarts publish nothing more.
    """
    outcomes = pier.outcomes("b06")
    assert [one.row_class for one in outcomes] == ["invalid_request"] * 3
    assert [(one.code, one.said["error"]["message"]) for one in outcomes] == [
        ("invalid_value", "unknown\x00parameter")
    ] * 3
    (life,) = pier.provider.lives["b06"]
    for name in ("result_file_gone", "batch_results_unavailable", "provider_call_failed"):
        assert [one for one in pier.events(name) if one.get("batch_id") == our_id(life)] == []
    (told,) = [one for one in pier.events("batch_landed") if one["batch_id"] == our_id(life)]
    assert (told["rows"], told["succeeded"], told["failed"], told["missing"]) == (3, 0, 3, 0)
    landed = [one for one in pier.heard.events if one["kind"] == "landed" and our_id(life) in json.dumps(one)]
    assert len(landed) == 1


async def test_b08_an_expired_batch_with_finished_rows(pier: Pier) -> None:
    """What was done is published and never sent again; exactly the rest goes into a new batch, whether or not a file
    lists it; at the limit each row left gets its own ``expired`` failure.
    """
    assert sent(pier, "b08") == [["r1", "r2", "r3", "r4"], ["r2", "r3", "r4"]]
    assert sent(pier, "b08-most") == [["r1", "r2", "r3", "r4"], ["r4"]]
    assert sent(pier, "b08-twice") == [["r1", "r2", "r3", "r4"], ["r3", "r4"]]
    assert classes(pier, "b08") == ["succeeded"] * 4
    assert classes(pier, "b08-most") == ["succeeded"] * 4
    assert classes(pier, "b08-twice") == ["succeeded", "succeeded", "expired", "expired"]
    assert pier.outcomes("b08")[0].text == "done in time"
    assert [one.said["attempts"] for one in pier.outcomes("b08")] == [{}, *[{"expired": 1}] * 3]


async def test_b12_a_nul_anywhere_harms_nobody(pier: Pier) -> None:
    """In an answer, an id, a failure's message: kept as it is, its neighbours land, and the batch stays closed."""
    outcomes = pier.outcomes("b12")
    all_fine(outcomes)
    assert [one.text for one in outcomes] == ["before", "nov\x00mber", "after", "\x00"]
    assert sent(pier, "b12") == [["r1", "r2", "r3", "r4"]]
    assert "nul\x00" in [one.said["custom_id"] for one in pier.outcomes("b01")]
    assert {one.said["error"]["message"] for one in pier.outcomes("b06")} == {"unknown\x00parameter"}
    batch_id = our_id(pier.provider.lives["b12"][0])
    assert len([one for one in pier.events("batch_landed") if one["batch_id"] == batch_id]) == 1


# ------------------------------------------------------------------------------------ what batches do


async def test_b07_not_yet_is_no_refusal(pier: Pier) -> None:
    """Create is tried again with growing pauses: one upload, one batch, no row blamed. A refusal that lasts leaves the
    rows where they can be had again, uncommitted, while other rows of their partition go on.
    """
    for name in ("b07", "b07-lasting"):
        all_fine(pier.outcomes(name))
        assert sent(pier, name) == [["r1", "r2", "r3"]]
    assert pier.provider.refused["b07"] == len(NotYet.refusals)
    (life,) = pier.provider.lives["b07"]
    assert len([one for one in pier.events("batch_uploaded") if one["batch_id"] == our_id(life)]) == 1
    lasting: Any = CASES["b07-lasting"]
    assert lasting.kept_back
    assert {one.said["submission"] > 1 for one in pier.outcomes("b07-lasting")} == {True}


async def test_b09_finalizing_for_hours(pier: Pier) -> None:
    """Nothing is concluded from counts, full or zero: one batch, not cancelled, its age and state told in a warning;
    other batches land meanwhile, and its rows when it is completed.
    """
    outcomes = pier.outcomes("b09")
    all_fine(outcomes)
    assert sent(pier, "b09") == [["r1", "r2", "r3"]]
    shown = pier.provider.shown["b09"]
    assert {"cancelling", "cancelled"}.isdisjoint(shown)
    assert shown.count("finalizing") >= 2
    batch_id = our_id(pier.provider.lives["b09"][0])
    warned = [one for one in pier.events("batch_waiting_long") if one["batch_id"] == batch_id]
    assert "finalizing" in [one["state"] for one in warned]
    assert all(int(str(one["age_s"])) > 0 for one in warned)
    ended = min(one.record.timestamp for one in outcomes)
    for other in ("b01", "b03", "b05", "b12"):
        assert max(one.record.timestamp for one in pier.outcomes(other)) < ended


async def test_b10_a_token_limit_holds_the_rows(pier: Pier) -> None:
    """No row fails and no attempt is used: the rows wait under a hold that is visible, says why and until when, and
    survives a restart; submissions come with growing pauses, in smaller batches, and other work goes on.
    """
    outcomes = pier.outcomes("b10")
    all_fine(outcomes)
    lives = pier.provider.lives["b10"]
    sizes = [len(life.lines) for life in lives]
    assert sizes[0] == 3
    assert max(sizes[1:]) < 3
    assert len(lives) <= TokenLimit.refusals + 3
    placed = holds_of(pier, "b10")
    assert {hold.reason for hold in placed} == {"token_limit_exceeded"}
    pauses = [(hold.until - hold.since).total_seconds() for hold in placed if hold.until is not None]
    assert len(pauses) > 1
    assert pauses == sorted(set(pauses))
    assert placed[0].until is not None
    assert all(life.batch.created_at >= placed[0].until.timestamp() - 1 for life in lives[1:])
    limit: Any = SECOND["b10"]
    assert [(one["reason"], bool(one["until"])) for one in limit.shown] == [("token_limit_exceeded", True)]
    assert limit.kept == placed[:1]
    assert max(one.record.timestamp for one in pier.outcomes("b03")) < min(one.record.timestamp for one in outcomes)


async def test_b15_a_slow_submission_stops_no_polling(pier: Pier) -> None:
    """The create takes longer than a consumer may go without polling: no rebalance, records are read and batches leave
    meanwhile, one line and one result for the row, and the committed offset goes past it.
    """
    slow: Any = FIRST["b15"]
    before, after = slow.generations
    assert before == after > 0
    assert slow.sealed_meanwhile > 1
    all_fine(pier.outcomes("b15"))
    assert sent(pier, "b15") == [["k30"]]
    ((partition, offset),) = pier.placed["b15"]
    assert (await pier.settled_offsets())[partition] > offset


# ------------------------------------------------------------------------------------ webhooks


def delivery(body: dict[str, Any], delivery_id: str, timestamp: int) -> tuple[dict[str, str], bytes]:
    """A signed delivery."""
    raw = json.dumps(body).encode()
    key = base64.b64decode(HOOK_SECRET.removeprefix("whsec_"))
    mac = hmac.digest(key, f"{delivery_id}.{timestamp}.".encode() + raw, "sha256")
    signature = "v1," + base64.b64encode(mac).decode()
    headers = {"webhook-id": delivery_id, "webhook-timestamp": str(timestamp), "webhook-signature": signature}
    return headers, raw


HOOK_OUTCOMES = {"bad_signature": 1, "poked": 1, "duplicate": 1, "unknown_batch": 1, "no_effect": 0}


async def test_b13_webhooks_are_believed_only_so_far(pier: Pier) -> None:
    """Old and changed deliveries are refused and change nothing. A current one makes us look at the batch by its name,
    a day before its next poll; delivered twice it gets 2xx twice, one look and one outcome a row.
    """
    await pier.send("b13", LATER["b13"].records("b13"))
    await pier.until(lambda: pier.provider.lives["b13"], "a batch of the account that is hardly polled")
    (life,) = pier.provider.lives["b13"]
    came = pier.now
    await pier.until(lambda: pier.now - came > timedelta(minutes=5), "its end at the provider")
    looks = len(pier.provider.shown["b13"])
    assert pier.service is not None
    event = {"id": "evt_1", "object": "event", "type": "batch.completed", "data": {"id": life.batch.id}}

    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:

        async def deliver(headers: dict[str, str], raw: bytes) -> int:
            assert pier.service is not None
            answer = await client.post(f"{pier.service.webhook_address}/webhooks/hooked", headers=headers, content=raw)
            return answer.status_code

        async def deliver_in_time(delivery_id: str) -> int:
            """An hour passes in a second here: it is signed ahead, within the tolerance, and anew if it came too late."""
            for _ in range(50):
                status = await deliver(*delivery(event, delivery_id, round(pier.now.timestamp()) + 290))
                if status != 400:
                    return status
            return 400

        now = round(pier.now.timestamp())
        assert await deliver(*delivery(event, "wh_test_1", now - 760_000_000)) == 400
        for _ in range(50):
            headers, raw = delivery(event, "wh_test_2", round(pier.now.timestamp()) + 290)
            status = await deliver(headers, raw.replace(b"batch.completed", b"batch.cancelled"))
            if status != 400:
                break
        assert status == 401
        assert len(pier.provider.shown["b13"]) == looks
        assert pier.missing("b13") == pier.placed["b13"]
        assert [await deliver_in_time("wh_test_2") for _ in range(2)] == [200, 200]
        # Without the delivery it would be looked at when its window is over, a day later, which is 24 seconds here.
        all_fine(await pier.landed("b13", 15))
        await pier.until(lambda: not pier.supervisor.status()["batches"], "the batch at its end")
        looks = len(pier.provider.shown["b13"])
        # A new delivery about a batch that is over is no reason for anything.
        assert await deliver_in_time("wh_test_3") == 200
    read = [control.decode(one.key or b"", one.value) for one in pier.heard.control]
    assert [one.provider_batch_id for one in read if isinstance(one, Poke)] == [life.batch.id]
    assert [one["outcome"] for one in pier.events("webhook_received")] == ["poked"]
    counted = {
        name: pier.telemetry.total("webhooks_received", outcome=name) for name in (*HOOK_OUTCOMES, "out_of_time")
    }
    assert counted.pop("out_of_time") >= 1
    assert counted == HOOK_OUTCOMES
    assert len(pier.provider.shown["b13"]) == looks
    assert sent(pier, "b13") == [["r1", "r2", "r3"]]
    pier.outcomes("b13")


# ------------------------------------------------------------------------------------ unclear submissions


LOST_ANSWERS = {
    "lost": FaultRule(call=CallName.CREATE, kind=FaultKind.LOSE_REPLY, until_count=1),
    "gateway": FaultRule(call=CallName.CREATE, status=504, after_work=True, until_count=1),
}


@pytest.mark.parametrize("how", LOST_ANSWERS)
async def test_b11_a_create_whose_answer_is_lost(pier: Pier, how: str) -> None:
    """While the list cannot be had the rows wait visibly unclear, and nothing is sent again; then the one batch that
    exists is adopted.
    """
    case = f"b11-{how}"
    faults = pier.simulator.faults
    creates = faults.calls["create"]
    faults.put(LOST_ANSWERS[how])
    number = faults.put(FaultRule(call=CallName.LIST, status=503))
    await pier.send(case, [request(case, custom_id) for custom_id in ("r1", "r2", "r3")])
    await pier.until(
        lambda: "submission_unknown" in pier.supervisor.status()["batches"].values(), "a batch of unclear fate"
    )
    await pier.until(lambda: faults.describe()["rules"][-1]["fired"] >= 2, "look-ups without an answer")
    assert "submission_unknown" in pier.supervisor.status()["batches"].values()
    assert pier.missing(case) == pier.placed[case]
    faults.take_away(number)
    all_fine(await pier.landed(case))
    assert sent(pier, case) == [["r1", "r2", "r3"]]
    assert faults.calls["create"] == creates + 1
    assert our_id(pier.provider.lives[case][0]) in [one["batch_id"] for one in pier.events("batch_adopted")]
    faults.clear()


async def test_b11_a_double_batch_is_published_once(pier: Pier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody between us and the provider sent the create twice: each row still has one outcome, and the second
    batch is not left to run.
    """
    case = "b11-double"
    world, create = pier.provider.world, pier.provider.world.create

    def create_twice(project: str, wanted: Any) -> Any:
        create(project, wanted)
        return create(project, wanted)

    monkeypatch.setattr(world, "create", create_twice)
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.LOSE_REPLY, until_count=1))
    await pier.send(case, [request(case, custom_id) for custom_id in ("r1", "r2", "r3")])
    outcomes = await pier.landed(case)
    assert [one.row_class for one in outcomes] == ["succeeded"] * 3
    assert sent(pier, case) == [["r1", "r2", "r3"]] * 2
    ours = {life.batch.id for life in pier.provider.lives[case]}
    told = [one for one in pier.events("batch_twin_cancelled") if one["provider_batch_id"] in ours]
    assert len(told) == 1
    faults.clear()


async def test_no_case_left_a_second_outcome(pier: Pier) -> None:
    """After all of it, over three lives of the service: one outcome for each record."""
    for name in pier.placed:
        pier.outcomes(name)
