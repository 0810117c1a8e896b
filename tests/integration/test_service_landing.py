"""Landing through the whole service: what a provider's files say becomes exactly one outcome for every record.

One service lives through all the cases at once, each in batches of its own; the tests then look at what it published.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from inprocess_kit import (
    HOUR_S,
    ROUTE,
    Files,
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
from batchferry.domain.control import CancelWish, Hold
from batchferry.domain.ids import BatchId
from batchferry.engine import holds
from batchferry.ports import OutRecord
from batchferry.simulator import CallName, Durations, FaultKind, FaultRule, JobError, RunCurve
from batchferry.simulator.state import Status

RESULT_LIMIT_BYTES = 60_000
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Case(Script):
    """A script with the records that meet it. ``drive`` runs beside the wait for the outcomes."""

    rows: Sequence[str] = ("r1", "r2", "r3")

    def records(self, name: str) -> list[Sent]:
        return [request(name, custom_id) for custom_id in self.rows]

    async def drive(self, name: str, pier: Pier) -> None:
        """What somebody does meanwhile."""


CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[type[Case]], type[Case]]:
    """Give a case its name."""

    def register(kind: type[Case]) -> type[Case]:
        CASES[name] = kind()
        return kind

    return register


def by_text(lines: Sequence[Line]) -> dict[str, str]:
    """Wire ids by the words of the row."""
    return {line.text: line.wire_id for line in lines}


def error_answer(code: str, message: str = "no", status: int = 400, kind: str = "invalid_request_error") -> bytes:
    """The body of a refused row."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class Exact(Case):
    """Output files with exactly these bytes in the place of the answers' text."""

    answers: ClassVar[dict[str, bytes]] = {}

    @property
    def rows(self) -> Sequence[str]:  # type: ignore[override]  # here it follows from the answers
        return tuple(self.answers)

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        wires = by_text(lines)
        return Files(joined(answer_line(wires[text], body) for text, body in self.answers.items()), None)


@case("b03")
class Separators(Exact):
    """Raw line and paragraph separators in the answers."""

    answers: ClassVar = {
        "r1": answer_body("first\u2028second".encode()),
        "r2": answer_body("para\u2029next".encode()),
        "r3": answer_body(b"plain"),
    }


@case("b12")
class Nul(Exact):
    """Escaped NULs in an answer and an id, a raw one in a header."""

    answers: ClassVar = {
        "r1": answer_body(b"before"),
        "r2": answer_body(b"nov\\u0000mber"),
        "r3": answer_body(b"after"),
    }

    def records(self, name: str) -> list[Sent]:
        return [
            request(name, custom_id, text=text, headers=[("note", b"a\x00b")])
            for text, custom_id in (("r1", "id\x00one"), ("r2", "r2"), ("r3", "r3"))
        ]


ODD_BODY = (
    b'{"zebra": 1, "choices": [{"finish_reason": "stop", "index": 0, "message": {"content": "\\u00e9\\u0000 \xf0\x9f\xa6\x93",'
    b' "role": "assistant"}}], "object": "chat.completion", "a": 1e999, "b": 0.10000000000000000001, "c": -0,'
    b' "d": 123456789012345678901234567890, "e": 1E+2, "alpha": [ 1,2 , 3 ], "model": "gpt-4o-mini"}'
)


@case("exact-answers")
class ExactAnswers(Exact):
    """JSON that no reader of ours may touch."""

    answers: ClassVar = {"r1": ODD_BODY, "r2": answer_body(b"plain")}


@case("b04")
class CutInTheMiddle(Case):
    """The middle line of three is cut."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        if life > 1:
            return files
        wires = by_text(lines)
        return Files(
            joined(
                [
                    answer_line(wires["r1"], answer_body("one")),
                    answer_line(wires["r2"], answer_body("two"))[:120],
                    answer_line(wires["r3"], answer_body("three")),
                ]
            ),
            None,
        )


@case("unreadable")
class NeverReadable(Case):
    """r2's line is never readable; r3's names nobody, so that r3 is absent."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        made = []
        for line in lines:
            whole = answer_line(line.wire_id, answer_body(line.text))
            made.append({"r2": whole[:150], "r3": b"%%% no json %%%"}.get(line.text, whole))
        return Files(joined(made), None)


@case("cut-end")
class CutAtTheEnd(Case):
    """The file ends in the middle of its last line; the next batch's file is whole."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        whole = joined(answer_line(line.wire_id, answer_body(line.text)) for line in lines)
        return Files(whole[:-60] if life == 1 else whole, None)


@case("not-utf8")
class NotUtf8(Exact):
    """An answer with a byte that is not UTF-8."""

    answers: ClassVar = {"r1": answer_body(b"broken \xff byte"), "r2": answer_body(b"fine")}


@case("b05")
class RefusedRow(Case):
    """Refused rows, in the error file and in the output file."""

    rows = ("r-5", "r-6", "r-7")

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        wires = by_text(lines)
        body = (
            b'{"error": {"message": "input is longer than the model\'s context", "type": "invalid_request_error",'
            b' "param": "messages", "code": "context_length_exceeded"}}'
        )
        # The second stands, as at some gateways, in the output file.
        output = [answer_line(wires["r-7"], answer_body("fine")), answer_line(wires["r-6"], body, 400)]
        return Files(joined(output), joined([answer_line(wires["r-5"], body, 400)]))


@case("b06")
class AllFailed(Case):
    """Completed without an output file."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        error = error_answer("invalid_value", "unknown\x00parameter")
        return Files(None, joined(answer_line(line.wire_id, error, 400) for line in lines))

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "completed":
            shown["request_counts"] = {"total": 3, "completed": 0, "failed": 3}
        return shown


class Expires(Case):
    """One row was done when the window closed."""

    rows = ("r1", "r2", "r3", "r4")
    is_listed = True

    def ends(self, life: int) -> tuple[Status, int] | None:
        return (Status.EXPIRED, 1) if life == 1 else None

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        if life > 1:
            return files
        wires = by_text(lines)
        unrun = joined(unrun_line(wires[text], "batch_expired") for text in ("r2", "r3", "r4"))
        return Files(joined([answer_line(wires["r1"], answer_body("done in time"))]), unrun if self.is_listed else None)


@case("b08")
class ExpiresOnce(Expires):
    """The rows that were not run stand in the error file."""


@case("expired-unlisted")
class ExpiresUnlisted(Expires):
    """The rows that were not run stand in no file."""

    is_listed = False


@case("expired-twice")
class ExpiresTwice(Case):
    """The window closes on both batches."""

    def ends(self, life: int) -> tuple[Status, int] | None:
        return Status.EXPIRED, 1 if life == 1 else 0


@case("b09")
class Lingers(Case):
    """Six hours in finalizing with full counts."""

    def durations(self, life: int) -> Durations:
        return Durations(
            validating_s=0.5 * HOUR_S, in_progress=RunCurve(minimum_s=1.5 * HOUR_S, factor_s=0), finalizing_s=6 * HOUR_S
        )

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] in {"in_progress", "finalizing"}:
            shown["request_counts"] = {"total": 3, "completed": 3, "failed": 0}
        return shown


@case("b10")
class TokenLimit(Case):
    """Refused for its tokens three times."""

    refusals = 3

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        message = "queue limit of 30K tokens reached, try again when running jobs are done"
        return [JobError(code="token_limit_exceeded", message=message)] if life <= self.refusals else None


class Cancelled(Case):
    """An operator cancels while rows run: two were done."""

    rows = ("r1", "r2", "r3", "r4")
    wanted = "requeue"

    def durations(self, life: int) -> Durations | None:
        return (
            Durations(in_progress=RunCurve(minimum_s=20 * HOUR_S, factor_s=0), cancelling_s=60) if life == 1 else None
        )

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        if life > 1:
            return files
        wires = by_text(lines)
        return Files(
            joined(answer_line(wires[text], answer_body("in time")) for text in ("r1", "r2")),
            joined([unrun_line(wires["r3"], "batch_cancelled")]),
        )

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "cancelled":
            shown["request_counts"] = {"total": 4, "completed": 2, "failed": 0}
        return shown

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: "in_progress" in pier.provider.shown[name], "a running batch to cancel")
        (job,) = await pier.jobs(name)
        await tell(pier, CancelWish(BatchId(str(job["batch_id"])), self.wanted, pier.now))


@case("cancel-requeue")
class CancelledToRequeue(Cancelled):
    """The rows that were not run go again."""


@case("cancel-fail")
class CancelledToFail(Cancelled):
    """The rows that were not run are given up."""

    wanted = "fail"


@case("cancel-hold")
class CancelledToHold(Cancelled):
    """The rows wait until somebody lifts the hold."""

    wanted = "hold"

    async def drive(self, name: str, pier: Pier) -> None:
        await super().drive(name, pier)
        await pier.until(lambda: holds_of(pier, name, "cancelled"), "a hold that waits for an operator")
        (hold,) = holds_of(pier, name, "cancelled")
        assert hold.until is None
        assert len(pier.provider.lives[name]) == 1
        await tell(pier, control.Lifted(control.hold_key(hold)))


def holds_of(pier: Pier, name: str, reason: str) -> list[Hold]:
    """The holds on a case's key as the control topic has them, oldest first."""
    read = [control.decode(one.key or b"", one.value) for one in pier.heard.control]
    return [one for one in read if isinstance(one, Hold) and one.reason == reason and f"[{name}]" in one.label]


async def tell(pier: Pier, entry: control.ControlEntry) -> None:
    """Write a control record as the command line would."""
    assert pier.service is not None
    producer = pier.kafka.plain_producer()
    await producer.start()
    await producer.send([OutRecord(pier.service.settings.topics.control_topic, *control.encode(entry), partition=0)])
    await producer.stop()


@case("lines-named")
class LinesNamed(Case):
    """Lines 2 and 4 of the file are refused, so that nothing runs."""

    rows = ("r1", "r2", "r3", "r4", "r5")

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        if life > 1:
            return None
        return [
            JobError(code="invalid_json_line", message="bad line", line=2),
            JobError(code="missing_required_parameter", message="no model", line=4),
        ]


@case("error-list")
class LongErrorList(Case):
    """The provider lists 100 errors of 130 and stops counting; the next batch is refused for the other thirty."""

    rows = tuple(f"r{number}" for number in range(150))

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        bad = [number for number, line in enumerate(lines, 1) if int(line.text[1:]) < 130]
        errors = [JobError(code="invalid_json_line", message="x" * 500, line=number) for number in bad[:100]]
        return errors or None


@case("line-beyond")
class LineBeyond(Case):
    """The error list names a line that the file does not have."""

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        return [JobError(code="invalid_json_line", message="bad line", line=99)] if life == 1 else None


@case("no-details")
class NoDetails(Case):
    """Failed, and the list is empty."""

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        return [] if life == 1 else None


@case("file-missing")
class FileMissing(Case):
    """Failed, since the file had vanished."""

    def fail_with(self, life: int, lines: Sequence[Line]) -> Sequence[JobError] | None:
        missing = JobError(code="invalid_request", message="Cannot find file.", param="file_id")
        return [missing] if life == 1 else None


@case("transient")
class Transient(Case):
    """r1 fails once, r2 twice with a 500; r3 is fine."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        output, error = [], []
        for line in lines:
            if line.text == "r3" or (line.text == "r1" and life > 1):
                output.append(answer_line(line.wire_id, answer_body(f"life {life}")))
            else:
                body = error_answer("internal_error", "boom", kind="server_error")
                error.append(answer_line(line.wire_id, body, 500))
        return Files(joined(output) or None, joined(error) or None)


@case("missing")
class Missing(Case):
    """r1 is in neither file of the first batch, r2 in neither of two."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        absent = {"r1", "r2"} if life == 1 else {"r2"}
        there = [answer_line(line.wire_id, answer_body("there")) for line in lines if line.text not in absent]
        return Files(joined(there), None)

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        """The counts agree with the files: only the join of rows and lines tells what is missing."""
        if shown["status"] == "completed":
            shown["request_counts"] = {"total": 1, "completed": 1, "failed": 0}
        return shown


@case("miscounted")
class Miscounted(Case):
    """The counts promise a line that no file has; the second batch is whole."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        return Files(
            joined(answer_line(line.wire_id, answer_body("there")) for line in lines if line.text != "r1" or life > 1),
            None,
        )


@case("late-line")
class LateLine(Case):
    """r2's line comes only with a later reading of the same file: it was never missing."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        self.whole = joined(answer_line(line.wire_id, answer_body("there")) for line in lines)
        return Files(self.whole.split(b"\n")[0] + b"\n", None)

    async def drive(self, name: str, pier: Pier) -> None:
        def is_read() -> bool:
            done = [one for one in pier.heard.outcomes if one in pier.placed[name]]
            return bool(done)

        await pier.until(is_read, "the first reading")
        (life,) = pier.provider.lives[name]
        pier.provider.world.state.file_path(str(life.batch.output_file_id)).write_bytes(self.whole)


@case("twice")
class TwiceAndForeign(Case):
    """Each line stands twice, once with another answer, between lines of somebody else's."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        output = []
        for line in lines:
            output.append(answer_line(line.wire_id, answer_body("first")))
            output.append(answer_line(f"aaaaaaaaaa-0-{len(output)}-1", answer_body("theirs")))
            output.append(answer_line("r1", answer_body("theirs too")))
            output.append(answer_line(line.wire_id, answer_body("second")))
        # A failure beside a success of the same row means nothing, and neither does one of a foreign row.
        body = error_answer("invalid_value")
        error = [answer_line(lines[0].wire_id, body, 400), answer_line("zzzzzzzzzz-1-5-1", body, 400)]
        return Files(joined(output), joined(error))


@case("swapped")
class Swapped(Case):
    """Successes stand in the error file, failures in the output file, a failure before the same row's success."""

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        wires = by_text(lines)
        body = error_answer("invalid_value")
        output = [answer_line(wires["r1"], body, 400), answer_line(wires["r2"], body, 400)]
        error = [answer_line(wires["r2"], answer_body("in the end")), answer_line(wires["r3"], answer_body("fine"))]
        return Files(joined(output), joined(error))


@case("too-large")
class TooLarge(Exact):
    """An answer larger than its topic takes."""

    answers: ClassVar = {
        "r1": answer_body(b"small"),
        "r2": answer_body(b"x" * 3 * RESULT_LIMIT_BYTES),
        "r3": answer_body(b"s"),
    }


@case("many-large")
class ManyLarge(Exact):
    """Answers that fit one by one, and together are far more than the topic takes at a time."""

    answers: ClassVar = {f"r{number:02}": answer_body(secrets.token_hex(10_000)) for number in range(20)}


@case("large-key")
class LargeKey(Case):
    """A key that the output topic does not take."""

    def records(self, name: str) -> list[Sent]:
        return [request(name, one, key=b"k" * (2 * RESULT_LIMIT_BYTES if one == "r2" else 10)) for one in self.rows]


class CleanJob(Case):
    """A job without failures shows its absent error file in one of three ways."""

    mode = ""

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if self.mode == "absent":
            del shown["error_file_id"]
        elif self.mode == "empty":
            shown["error_file_id"] = ""
        return shown


@case("clean-null")
class CleanNull(CleanJob):
    """null."""


@case("clean-absent")
class CleanAbsent(CleanJob):
    """Not there at all."""

    mode = "absent"


@case("clean-empty")
class CleanEmpty(CleanJob):
    """An empty string."""

    mode = "empty"


@case("late-ids")
class LateIds(Case):
    """A completed job hides its file ids for a while, though its counts say that there are answers."""

    asked = 0

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "completed":
            self.asked += 1
            if self.asked <= 3:
                shown["output_file_id"] = shown["error_file_id"] = None
        return shown


@case("file-gone")
class FileGone(Case):
    """The output file of the first batch is not found, ever."""

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "completed" and life == 1:
            shown["output_file_id"] = "file-vanished"
        return shown


@case("unknown-status")
class UnknownStatus(Case):
    """The provider invents a status; it is no end."""

    asked = 0

    def shows(self, life: int, shown: dict[str, Any]) -> dict[str, Any]:
        if shown["status"] == "completed":
            self.asked += 1
            if self.asked <= 2:
                shown["status"] = "reticulating"
        return shown


LONG_IDS = ("a" * 64 + "1", "a" * 64 + "2", "🦓 крем-брюле 東京 " * 20)


@case("long-ids")
class LongIds(Case):
    """Ids that no provider takes."""

    rows = LONG_IDS

    def records(self, name: str) -> list[Sent]:
        headers = [("traceparent", TRACE), ("tenant", "blå".encode()), ("ce_id", b"e-1")]
        return [request(name, one, text=f"t{number}", headers=headers) for number, one in enumerate(self.rows)]


@case("spread")
class Spread(Case):
    """One batch over all partitions."""

    rows = tuple(f"r{number}" for number in range(40))

    def records(self, name: str) -> list[Sent]:
        return [request(name, one, key=one.encode()) for one in self.rows]


class Harbour:
    """The pier after everything has landed."""

    def __init__(self, pier: Pier, keep: Path, late: dict[str, str]) -> None:
        self.pier = pier
        self.keep = keep
        self._late = late

    def outcomes(self, name: str) -> list[Outcome]:
        assert name not in self._late, self._late[name]
        return self.pier.outcomes(name)

    def classes(self, name: str) -> list[str]:
        return [one.row_class for one in self.outcomes(name)]

    def sent(self, name: str) -> list[list[str]]:
        """The rows of each of the case's batches, by their words."""
        return [life.texts for life in self.pier.provider.lives[name]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harbour(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harbour]:
    """All cases, played."""
    folder = tmp_path_factory.mktemp("landing")
    keep = folder / "kept"
    late: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        # Hours pass here between two submissions: a hold's reason must be remembered for longer than in real life.
        patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)
        async with Pier(
            broker.bootstrap,
            folder,
            patch,
            CASES,
            topic_configs={"results": {"max.message.bytes": str(RESULT_LIMIT_BYTES)}},
            kafka={"produce_batch_bytes": RESULT_LIMIT_BYTES},
            routes={"default": {**ROUTE, "keep_oversize_answers_dir": str(keep)}},
        ) as pier:
            faults = pier.simulator.faults
            faults.put(FaultRule(call=CallName.CONTENT, status=502, every=3, until_count=8))
            faults.put(FaultRule(call=CallName.CONTENT, kind=FaultKind.CUT, every=4, until_count=5))
            faults.put(FaultRule(call=CallName.RETRIEVE, status=503, every=9, until_count=8))

            async def play(name: str, one: Case) -> None:
                await pier.send(name, one.records(name))
                try:
                    driving: list[Awaitable[Any]] = [one.drive(name, pier), pier.landed(name, 70)]
                    await asyncio.gather(*driving)
                except AssertionError as error:
                    lives = [f"{life.batch.status} {life.texts}" for life in pier.provider.lives[name]][:6]
                    late[name] = f"{error}; batches {lives}; jobs {await pier.jobs(name)}"

            await asyncio.gather(*(play(name, one) for name, one in CASES.items()))
            # What was landed is also cleaned up: nothing goes on when the tests look.
            await pier.until(lambda: not pier.supervisor.status()["batches"], "every batch at its end")
            made = Harbour(pier, keep, late)
            yield made


def test_every_record_has_exactly_one_outcome(harbour: Harbour) -> None:
    """Whatever the provider did: one outcome for each record, each with the caller's own id, key and headers."""
    for name, one in CASES.items():
        for sent, outcome in zip(one.records(name), harbour.outcomes(name), strict=True):
            assert outcome.said["custom_id"] == json.loads(sent.value or b"")["custom_id"]
            assert outcome.record.key == sent.key
            assert outcome.header("ce_id") == outcome.said["outcome_id"].encode()
            for header, value in sent.headers:
                if header not in {"slice", "traceparent", "ce_id"}:
                    assert outcome.header(header) == value


def test_nothing_is_run_twice_without_a_reason(harbour: Harbour) -> None:
    """No row went to the provider again after an answer to it had been published."""
    for name in CASES:
        runs: dict[str, int] = {}
        for life in harbour.pier.provider.lives[name]:
            for text in life.texts:
                runs[text] = runs.get(text, 0) + 1
        answered_at_once = [one for one in harbour.outcomes(name) if one.is_result and one.said["submission"] == 1]
        for outcome in answered_at_once:
            custom_id = outcome.said["custom_id"]
            text = custom_id if custom_id in runs else None
            assert text is None or runs[text] == 1, (name, text)


def test_faults_of_reading_cost_nothing(harbour: Harbour) -> None:
    """Downloads answered with 502 or cut short, and polls with 503, are repeated until they are whole."""
    rules = harbour.pier.simulator.faults.describe()["rules"]
    assert all(rule["fired"] > 0 for rule in rules)


def test_provider_files_are_deleted_after_landing(harbour: Harbour) -> None:
    """Input and result files are gone once their rows are settled; only an unpublished answer keeps its batch's."""
    kept = [life.batch for name in ("too-large", "large-key") for life in harbour.pier.provider.lives[name]]
    (vanished, _) = harbour.pier.provider.lives["file-gone"]
    left = set(harbour.pier.provider.files_left()) - {vanished.batch.output_file_id}
    assert left == {file for batch in kept for file in (batch.input_file_id, batch.output_file_id)}


def test_b03_separators_stay_in_the_text(harbour: Harbour) -> None:
    """Raw U+2028 and U+2029 do not end a line: three rows, three texts as they were, nothing sent again."""
    outcomes = harbour.outcomes("b03")
    assert [one.text for one in outcomes] == ["first\u2028second", "para\u2029next", "plain"]
    assert [(one.record.value or b"").count(b"\n") for one in outcomes] == [0, 0, 0]
    assert harbour.sent("b03") == [["r1", "r2", "r3"]]


def test_b04_an_unreadable_line_spoils_nothing(harbour: Harbour) -> None:
    """The row with the broken line is sent again alone; an operator is told batch, line and reason."""
    assert harbour.classes("b04") == ["succeeded"] * 3
    assert harbour.sent("b04") == [["r1", "r2", "r3"], ["r2"]]
    batch_id = harbour.outcomes("b04")[0].said["batch"]["batch_id"]
    told = [one for one in harbour.pier.events("line_unreadable") if one["batch_id"] == batch_id]
    assert [one["line"] for one in told][:1] == [2]
    assert "two" not in str(told)


def test_a_row_that_is_never_readable_fails(harbour: Harbour) -> None:
    """After its retry it is a classified failure; a line that names nobody makes its row missing."""
    assert harbour.classes("unreadable") == ["succeeded", "unreadable", "missing"]


def test_a_file_cut_at_its_end_loses_no_row(harbour: Harbour) -> None:
    """The row of the cut line is sent again; the others are not."""
    assert harbour.classes("cut-end") == ["succeeded"] * 3
    assert harbour.sent("cut-end") == [["r1", "r2", "r3"], ["r3"]]


def test_a_byte_that_is_no_utf8_gets_a_tolerant_reading(harbour: Harbour) -> None:
    """The answer is published with U+FFFD in the byte's place, and its neighbour as it was."""
    assert [one.text for one in harbour.outcomes("not-utf8")] == ["broken \ufffd byte", "fine"]
    assert harbour.sent("not-utf8") == [["r1", "r2"]]


def test_b05_a_refused_row_is_a_failure_wherever_it_stands(harbour: Harbour) -> None:
    """``error`` null and the real error in the body: a permanent failure with the provider's code and status."""
    first, second, third = harbour.outcomes("b05")
    for one in (first, second):
        assert one.row_class == "too_long"
        assert one.code == "context_length_exceeded"
        assert one.said["error"]["http_status"] == 400
        assert one.said["error"]["message"] == "input is longer than the model's context"
    assert third.is_result
    assert harbour.sent("b05") == [["r-5", "r-6", "r-7"]]


async def test_b06_all_failed_without_an_output_file(harbour: Harbour) -> None:
    """Three failures with the provider's code, no second batch, and the books show no success."""
    outcomes = harbour.outcomes("b06")
    assert [one.row_class for one in outcomes] == ["invalid_request"] * 3
    assert [one.code for one in outcomes] == ["invalid_value"] * 3
    assert [one.said["error"]["message"] for one in outcomes] == ["unknown\x00parameter"] * 3
    assert harbour.sent("b06") == [["r1", "r2", "r3"]]
    (job,) = await harbour.pier.jobs("b06")
    assert (job["state"], job["succeeded"], job["failed"], job["missing"]) == ("landed", 0, 3, 0)


def test_b08_expired_with_finished_rows(harbour: Harbour) -> None:
    """The finished row is published and never sent again; exactly the others go into one new batch."""
    outcomes = harbour.outcomes("b08")
    assert outcomes[0].text == "done in time"
    assert [one.row_class for one in outcomes] == ["succeeded"] * 4
    assert harbour.sent("b08") == [["r1", "r2", "r3", "r4"], ["r2", "r3", "r4"]]
    assert [one.said["attempts"] for one in outcomes] == [{}, *[{"expired": 1}] * 3]


def test_expired_rows_that_no_file_lists_go_again_too(harbour: Harbour) -> None:
    """After an expiry an absent row was not run: it goes again at once, from one complete reading."""
    assert harbour.classes("expired-unlisted") == ["succeeded"] * 4
    assert harbour.sent("expired-unlisted") == [["r1", "r2", "r3", "r4"], ["r2", "r3", "r4"]]


def test_expiring_twice_is_a_failure(harbour: Harbour) -> None:
    """At the retry limit each row gets its own ``expired`` failure."""
    assert sorted(harbour.classes("expired-twice")) == ["expired", "expired", "succeeded"]
    first, *rest = harbour.sent("expired-twice")
    assert first == ["r1", "r2", "r3"]
    assert [len(one) for one in rest] == [2]


def test_b09_finalizing_for_hours(harbour: Harbour) -> None:
    """Nothing is concluded from full counts: the rows land once, after one warning with the batch's age."""
    assert harbour.classes("b09") == ["succeeded"] * 3
    assert harbour.sent("b09") == [["r1", "r2", "r3"]]
    shown = harbour.pier.provider.shown["b09"]
    assert "cancelling" not in shown
    assert shown.count("finalizing") >= 2
    batch_id = harbour.outcomes("b09")[0].said["batch"]["batch_id"]
    warned = [one for one in harbour.pier.events("batch_waiting_long") if one["batch_id"] == batch_id]
    assert [one["state"] for one in warned if one["state"] != "validating"] == ["finalizing"]
    assert 3600 < int(str(warned[-1]["age_s"])) < 5 * 3600


def test_b10_token_limit_holds_the_key_alone(harbour: Harbour) -> None:
    """No row fails and no attempt is used; the pauses grow; other batches land meanwhile. So few rows are not cut up."""
    outcomes = harbour.outcomes("b10")
    assert [one.row_class for one in outcomes] == ["succeeded"] * 3
    assert [one.said["attempts"] for one in outcomes] == [{}] * 3
    lives = harbour.pier.provider.lives["b10"]
    assert lives[0].texts == ["r1", "r2", "r3"]
    assert {len(life.texts) for life in lives[1:]} == {3}
    placed = holds_of(harbour.pier, "b10", "token_limit_exceeded")
    assert [hold.times for hold in placed] == list(range(1, len(placed) + 1))
    pauses = [(hold.until - hold.since).total_seconds() for hold in placed if hold.until is not None]
    assert pauses == sorted(set(pauses))
    assert placed[0].until is not None
    assert all(life.batch.created_at >= placed[0].until.timestamp() - 1 for life in lives[1:])


def test_b12_nul_in_an_answer_an_id_and_a_header(harbour: Harbour) -> None:
    """The escaped NUL is kept, nothing is cut off, and the neighbours land with it."""
    assert [one.text for one in harbour.outcomes("b12")] == ["before", "nov\x00mber", "after"]
    assert b"nov\\u0000mber" in (harbour.outcomes("b12")[1].record.value or b"")
    assert harbour.sent("b12") == [["r1", "r2", "r3"]]


def test_answers_are_published_byte_for_byte(harbour: Harbour) -> None:
    """Numbers beyond any float, escapes, key order and white space are as the provider wrote them."""
    assert ODD_BODY in (harbour.outcomes("exact-answers")[0].record.value or b"")


@pytest.mark.parametrize("name", ["cancel-requeue", "cancel-hold"])
def test_a_cancelled_batch_lands_what_was_done(harbour: Harbour, name: str) -> None:
    """Finished rows are published; the others, listed or not, go into one new batch, at once or after a hold."""
    assert harbour.classes(name) == ["succeeded"] * 4
    assert harbour.sent(name) == [["r1", "r2", "r3", "r4"], ["r3", "r4"]]
    outcomes = harbour.outcomes(name)
    assert [one.text for one in outcomes[:2]] == ["in time"] * 2
    assert [one.said["attempts"] for one in outcomes] == [{}] * 4


def test_rows_of_a_cancelled_batch_may_be_given_up(harbour: Harbour) -> None:
    """With ``rows: fail`` what was not run becomes a failure, and nothing is sent again."""
    assert harbour.classes("cancel-fail") == ["succeeded", "succeeded", "cancelled", "cancelled"]
    assert len(harbour.sent("cancel-fail")) == 1


def test_a_failed_batch_drops_the_lines_it_names(harbour: Harbour) -> None:
    """Named rows fail with the provider's code, the rest goes again at once and keeps its attempts."""
    outcomes = harbour.outcomes("lines-named")
    assert [one.row_class for one in outcomes] == [
        "succeeded", "invalid_request", "succeeded", "invalid_request", "succeeded",
    ]  # fmt: skip
    assert [outcomes[1].code, outcomes[3].code] == ["invalid_json_line", "missing_required_parameter"]
    assert harbour.sent("lines-named") == [["r1", "r2", "r3", "r4", "r5"], ["r1", "r3", "r5"]]
    assert [one.said["attempts"] for one in outcomes] == [{}] * 5


def test_a_long_error_list_is_worked_off_in_turns(harbour: Harbour) -> None:
    """A list that stops at its hundredth entry: the rest is refused by the next batch, and no good row fails."""
    outcomes = harbour.outcomes("error-list")
    assert [one.row_class for one in outcomes] == ["invalid_request"] * 130 + ["succeeded"] * 20
    assert [len(one) for one in harbour.sent("error-list")] == [150, 50, 20]


@pytest.mark.parametrize("name", ["no-details", "line-beyond"])
def test_a_batch_that_failed_without_details_fails_no_row(harbour: Harbour, name: str) -> None:
    """No list, or one that names no row of ours: the key is held, an alarm is raised, then the rows succeed."""
    assert harbour.classes(name) == ["succeeded"] * 3
    (hold,) = holds_of(harbour.pier, name, "batch_failed_without_details")
    first, second = harbour.pier.provider.lives[name]
    assert hold.until is not None
    assert second.batch.created_at >= hold.until.timestamp() - 1
    alarms = [one["batch_id"] for one in harbour.pier.events("alarm") if one["what"] == "batch_failed_without_details"]
    assert first.batch.metadata is not None
    assert first.batch.metadata["batch_id"] in alarms
    assert [one.said["attempts"] for one in harbour.outcomes(name)] == [{}] * 3


def test_a_vanished_input_file_is_uploaded_again(harbour: Harbour) -> None:
    """The batch is resubmitted without a hold."""
    assert harbour.classes("file-missing") == ["succeeded"] * 3
    assert len(harbour.sent("file-missing")) == 2
    assert holds_of(harbour.pier, "file-missing", "batch_failed_without_details") == []


def test_transient_rows_are_sent_again_once(harbour: Harbour) -> None:
    """A 500 is worth one more batch; the second 500 is the row's failure."""
    first, second, third = harbour.outcomes("transient")
    assert (first.text, third.text) == ("life 2", "life 1")
    assert (second.row_class, second.said["error"]["http_status"]) == ("transient", 500)
    assert second.said["attempts"] == {"transient": 1}
    assert harbour.sent("transient") == [["r1", "r2", "r3"], ["r1", "r2"]]


def test_missing_rows_are_read_twice_and_sent_again_once(harbour: Harbour) -> None:
    """In neither file of a completed batch: one more batch, then a failure of class ``missing``."""
    assert harbour.classes("missing") == ["succeeded", "missing", "succeeded"]
    assert harbour.sent("missing") == [["r1", "r2", "r3"], ["r1", "r2"]]
    assert harbour.outcomes("missing")[1].said["attempts"] == {"missing": 1}
    assert harbour.pier.provider.shown["missing"].count("completed") >= 4


def test_counts_that_promise_more_lines_are_waited_for(harbour: Harbour) -> None:
    """Fewer lines than the counts: read again for the grace, then the row is missing and sent again."""
    assert harbour.classes("miscounted") == ["succeeded"] * 3
    assert harbour.sent("miscounted") == [["r1", "r2", "r3"], ["r1"]]
    assert harbour.pier.provider.shown["miscounted"].count("completed") >= 4


def test_a_row_is_not_missing_after_one_reading(harbour: Harbour) -> None:
    """Two complete readings some time apart must agree; what the second one shows was never missing."""
    assert harbour.classes("late-line") == ["succeeded"] * 3
    assert harbour.sent("late-line") == [["r1", "r2", "r3"]]


def test_repeated_and_foreign_lines_change_nothing(harbour: Harbour) -> None:
    """The first success counts, a failure beside it does not, and other people's lines are told, not published."""
    assert [one.text for one in harbour.outcomes("twice")] == ["first"] * 3
    batch_id = harbour.outcomes("twice")[0].said["batch"]["batch_id"]
    foreign = [one for one in harbour.pier.events("line_foreign") if one["batch_id"] == batch_id]
    again = [one for one in harbour.pier.events("line_duplicate") if one["batch_id"] == batch_id]
    assert len(foreign) >= 6
    assert len(again) >= 3


def test_output_and_error_file_in_any_order(harbour: Harbour) -> None:
    """What a line says decides, not the file it stands in; a success beats an earlier failure of the same row."""
    assert harbour.classes("swapped") == ["invalid_request", "succeeded", "succeeded"]


def test_an_answer_too_large_to_publish_harms_nobody(harbour: Harbour) -> None:
    """It becomes a failure with size, hash and where the answer is kept; its neighbours land."""
    assert harbour.classes("too-large") == ["succeeded", "outcome_too_large", "succeeded"]
    answer = harbour.outcomes("too-large")[1].said["answer"]
    body = CASES["too-large"].answers["r2"]  # type: ignore[attr-defined]
    assert answer["bytes"] == len(body)
    assert Path(answer["kept_at"]).parent == harbour.keep
    assert Path(answer["kept_at"]).read_bytes() == body
    assert len(harbour.sent("too-large")) == 1


def test_many_large_answers_are_published(harbour: Harbour) -> None:
    """What a transaction holds may be more than the topic takes at a time: it goes in smaller pieces."""
    assert harbour.classes("many-large") == ["succeeded"] * 20
    assert len({one.said["submission"] for one in harbour.outcomes("many-large")}) == 1


def test_a_key_too_large_for_the_topic_harms_nobody(harbour: Harbour) -> None:
    """Key and headers count: the outcome goes where it fits and says why."""
    assert harbour.classes("large-key") == ["succeeded", "outcome_too_large", "succeeded"]


@pytest.mark.parametrize("name", ["clean-null", "clean-absent", "clean-empty", "late-ids", "unknown-status"])
def test_ids_and_statuses_that_are_late_or_odd(harbour: Harbour, name: str) -> None:
    """An error file that is null, ``""`` or absent, ids that come late, a status nobody knows: the rows land once."""
    assert harbour.classes(name) == ["succeeded"] * 3
    assert harbour.sent(name) == [["r1", "r2", "r3"]]


def test_a_result_file_that_is_gone_does_not_hold_its_rows_for_ever(harbour: Harbour) -> None:
    """After the grace its rows are missing, and run once more."""
    assert harbour.classes("file-gone") == ["succeeded"] * 3
    assert harbour.sent("file-gone") == [["r1", "r2", "r3"]] * 2
    assert [one.said["attempts"] for one in harbour.outcomes("file-gone")] == [{"missing": 1}] * 3


def test_any_custom_id_comes_back(harbour: Harbour) -> None:
    """Longer than providers allow, equal in the first 64 characters, emoji: answered under the caller's own id."""
    outcomes = harbour.outcomes("long-ids")
    assert [one.said["custom_id"] for one in outcomes] == list(LONG_IDS)
    assert len({one.text for one in outcomes}) == 3
    for life in harbour.pier.provider.lives["long-ids"]:
        for line in life.lines:
            assert len(line.wire_id) <= 40
            assert line.wire_id.replace("-", "").isalnum()


def test_a_result_is_in_the_trace_of_its_request(harbour: Harbour) -> None:
    """The traceparent goes on with the same trace id and a span of ours; the event id is in the outcome."""
    for one in harbour.outcomes("long-ids"):
        version, trace, span, flags = (one.header("traceparent") or b"").split(b"-")
        assert (version, trace, flags) == (b"00", TRACE.split(b"-")[1], b"01")
        assert span != TRACE.split(b"-")[2]
        assert one.said["source"]["event_id"] == "e-1"


def test_one_batch_over_all_partitions(harbour: Harbour) -> None:
    """Rows of every partition leave together and come back each under its own offset."""
    assert len({where for where, _ in harbour.pier.placed["spread"]}) == 3
    assert harbour.classes("spread") == ["succeeded"] * 40
    (life,) = harbour.pier.provider.lives["spread"]
    wires = {line.wire_id: line.text for line in life.lines}
    for one in harbour.outcomes("spread"):
        assert wires[one.said["wire_id"]] == one.said["custom_id"]


def test_no_words_of_anybody_are_in_our_events(harbour: Harbour) -> None:
    """Prompts and answers stand in no log event and no published batch event."""
    told = repr(harbour.pier.telemetry.events) + json.dumps(harbour.pier.heard.events)
    for words in ("done in time", "longer than the model", "Cannot find file", "case/"):
        assert words not in told
