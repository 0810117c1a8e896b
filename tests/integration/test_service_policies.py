"""What a route may ask for its rows, through the whole service: alarms, canaries, splits, duplicates, review, money.

One service lives through all the cases at once, each with a route of its own; a second life then meets what the first
has learned about prompts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import inprocess_kit
import pytest
import pytest_asyncio
from inprocess_kit import (
    HOUR_S,
    Files,
    Line,
    Outcome,
    Pier,
    Sent,
    SyncCall,
    answer_body,
    answer_line,
    joined,
    request,
)
from lane_kit import TIMES, Case, Harbour, at, holds_of, lane_of, operator_hold, registry, scenario, settings_of

from batchferry.domain import control
from batchferry.domain.control import CanaryVerdict, Flush, hold_key, key_scope
from batchferry.domain.money import price_row
from batchferry.domain.provider import Usage
from batchferry.domain.splitting import source_of
from batchferry.engine import holds
from batchferry.simulator.errors import Refused

CASES, case = registry()


def refusal(code: str) -> bytes:
    """An error body of the provider."""
    return json.dumps(
        {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": code}}
    ).encode()


SERVER_ERROR = b'{"error":{"message":"The server had an error.","type":"server_error","param":null,"code":null}}'


class Answered(Case):
    """Every row of a batch is answered by ``line_of``."""

    def line_of(self, life: int, line: Line) -> bytes:
        return answer_line(line.wire_id, answer_body(f"life {life}"))

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        return Files(joined(self.line_of(life, line) for line in lines), None)


async def hours_pass(pier: Pier, hours: float) -> None:
    """Wait for the service's clock."""
    later = pier.now + timedelta(hours=hours)
    await pier.until(lambda: pier.now >= later, f"{hours:g} hours")


# --------------------------------------------------------------------------------------------------- alarms


@case("alarm-input")
class AlarmInput(Answered):
    """Ten rows: six refused for what they say, two met a 500, two are fine."""

    rows = tuple(f"r{number}" for number in range(10))
    route: ClassVar = {"max_rows": 10, "alarm_min_rows": 5, "alarm_ratio": 0.2}

    def line_of(self, life: int, line: Line) -> bytes:
        number = int(line.text[1:])
        if number < 4:
            return answer_line(line.wire_id, refusal("invalid_value"), 400)
        if number < 6:
            return answer_line(line.wire_id, refusal("content_policy_violation"), 400)
        if number < 8 and life == 1:
            return answer_line(line.wire_id, SERVER_ERROR, 500)
        return super().line_of(life, line)

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: holds_of(pier, name, "input_failures"), "the hold")
        await pier.until(lambda: len(pier.missing(name)) == 2, "the final outcomes")
        await hours_pass(pier, 4)
        assert len(pier.missing(name)) == 2
        assert len(pier.provider.lives[name]) == 1
        self.released_at = pier.now
        (hold,) = holds_of(pier, name, "input_failures")
        await pier.tell(control.Lifted(hold_key(hold)))


@case("alarm-provider")
class AlarmProvider(Answered):
    """Twenty rows that all met a 500 once."""

    rows = tuple(f"r{number:02}" for number in range(20))
    route: ClassVar = {"max_rows": 20}

    def line_of(self, life: int, line: Line) -> bytes:
        return answer_line(line.wire_id, SERVER_ERROR, 500) if life == 1 else super().line_of(life, line)


# -------------------------------------------------------------------------------------------------- canaries


def shaped(name: str, custom_id: str, system: str, headers: Sequence[tuple[str, bytes | None]] = ()) -> Sent:
    """A request with a system prompt, which makes its shape."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"case/{name}/ {custom_id}"},
    ]
    body = json.dumps({"model": name, "messages": messages}).encode()
    return request(name, custom_id, model=name, body=body, headers=headers)


class Canary(Case):
    """Nine rows of one shape; three of them go ahead."""

    rows = tuple(f"r{number}" for number in range(9))
    system = "be good"
    canary: ClassVar[dict[str, Any]] = {}
    rule: ClassVar[dict[str, Any]] = {}

    @property
    def route(self) -> dict[str, Any]:  # type: ignore[override]
        canary = {"rows": 3, "gather_s": 0.4 * HOUR_S, **self.canary}
        return {"canary": canary, "sla_s": 60 * HOUR_S, "max_wait_s": 8 * HOUR_S, **self.rule}

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return [shaped(name, custom_id, self.system) for custom_id in self.rows]


@case("canary-good")
class CanaryGood(Canary):
    """The sample is answered."""


@case("canary-bad")
class CanaryBad(Canary):
    """Every call of the shape "be bad" is refused as invalid; another shape of the same key is fine."""

    others = tuple(f"other{number}" for number in range(4))
    hold_h = 3.0

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return [shaped(name, custom_id, "be bad") for custom_id in self.rows] + [
            shaped(name, custom_id, "be good") for custom_id in self.others
        ]

    def refuse_call(self, call: SyncCall) -> Refused | None:
        is_bad = call.body["messages"][0]["content"] == "be bad"
        return Refused(400, "Invalid value.", code="invalid_value") if is_bad else None

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: holds_of(pier, name, "canary_bad"), "the hold of the shape")
        await pier.until(lambda: len(pier.missing(name)) == 6, "the sample and the other shape")
        await hours_pass(pier, self.hold_h)
        assert len(pier.missing(name)) == 6, "a held shape was run"
        self.batches_before = [life.texts for life in pier.provider.lives[name]]
        (hold,) = holds_of(pier, name, "canary_bad")
        await pier.tell(control.Lifted(hold_key(hold)))


@case("canary-check")
class CanaryCheck(Canary):
    """The sample is answered, but not as the route's schema wants it."""

    canary: ClassVar = {"check": "json_schema"}

    def answer_call(self, call: SyncCall, body: dict[str, Any]) -> dict[str, Any]:
        text = '{"colour": "red"}' if call.text == "r0" else '{"color": 7}'
        message = {**body["choices"][0]["message"], "content": text}
        return {**body, "choices": [{**body["choices"][0], "message": message}]}

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: holds_of(pier, name, "canary_bad"), "the hold of the shape")
        (hold,) = holds_of(pier, name, "canary_bad")
        await pier.tell(control.Lifted(hold_key(hold)))


@case("canary-late")
class CanaryLate(CanaryBad):
    """Held for so long that no batch brings the others home in time."""

    rule: ClassVar = {"sla_s": 20 * HOUR_S, "max_wait_s": 4 * HOUR_S}
    hold_h = 10.5


class CanarySlow(Canary):
    """The sample's answers do not come before the others' time to leave."""

    rule: ClassVar = {"max_wait_s": 1.5 * HOUR_S}

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def hold_call(self, call: SyncCall) -> None:
        await self.let_go.wait()


@case("canary-ship")
class CanaryShip(CanarySlow):
    """Then they leave all the same."""

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: len(pier.missing(name)) == 3, "the rows that waited for the sample")
        self.answered_first = len(pier.provider.calls[name])
        self.let_go.set()


@case("canary-hold")
class CanaryHold(CanarySlow):
    """Then the shape is held."""

    canary: ClassVar = {"timeout": "hold"}

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: holds_of(pier, name, "canary_timeout"), "the hold of the shape")
        await hours_pass(pier, 2)
        assert len(pier.missing(name)) == 9
        assert pier.provider.lives[name] == []
        (hold,) = holds_of(pier, name, "canary_timeout")
        await pier.tell(control.Lifted(hold_key(hold)))
        await pier.until(lambda: len(pier.missing(name)) == 3, "the released rows")
        self.let_go.set()


# ---------------------------------------------------------------------------------------------------- splits

PARAGRAPHS = "\n\n".join(f"Paragraph {number}. " + "Some words about a matter. " * 12 for number in range(8))


class Split(Case):
    """r2 is longer than its model takes; its system prompt says whose it is, so that its parts say so too."""

    route: ClassVar = {"policies": {"too_long": "split"}, "max_wait_s": 0.5 * HOUR_S}
    most_chars = 1500

    def records(self, name: str, pier: Pier) -> list[Sent]:
        texts = {"r1": "short", "r2": self.words(), "r3": "short too"}
        return [self.one(name, custom_id, text) for custom_id, text in texts.items()]

    def one(self, name: str, custom_id: str, content: Any) -> Sent:
        messages = [{"role": "system", "content": f"case/{name}/ sum up"}, {"role": "user", "content": content}]
        body = json.dumps({"model": name, "messages": messages}).encode()
        return request(name, custom_id, model=name, body=body, headers=[("tenant", b"blue")])

    def words(self) -> Any:
        return PARAGRAPHS

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        output, error = [], []
        for line in lines:
            content = line.body["messages"][-1]["content"]
            if len(str(content)) > self.most_chars:
                error.append(answer_line(line.wire_id, refusal("context_length_exceeded"), 400))
            else:
                output.append(answer_line(line.wire_id, answer_body(str(content)[:40])))
        return Files(joined(output) if output else None, joined(error) if error else None)

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.landed(name)
        await pier.until(lambda: self.all_parts_ended(name, pier), "an outcome of every part")

    def all_parts_ended(self, name: str, pier: Pier) -> bool:
        """Whether every split outcome of the case has as many part outcomes as it says."""
        parents = [one for one in everything(name, pier) if one.said["kind"] == "split"]
        parts = parts_of(name, pier)
        return all(
            sum(1 for part in parts if part.header("parent") == source(parent)) == parent.said["parts"]
            for parent in parents
        )


def everything(name: str, pier: Pier) -> list[Outcome]:
    """Outcomes of a case's rows and of the parts they became."""
    mine = [one[0] for where, one in pier.heard.outcomes.items() if where in set(pier.placed[name])]
    return mine + parts_of(name, pier)


def parts_of(name: str, pier: Pier) -> list[Outcome]:
    """Outcomes of parts of a case's rows, in the order of their ids."""
    found = []
    for outcomes in pier.heard.outcomes.values():
        one = outcomes[0]
        if one.header("parent") is not None and one.record.key == name.encode():
            assert len(outcomes) == 1
            found.append(one)
    return sorted(found, key=lambda one: str(one.said["custom_id"]))


def source(outcome: Outcome) -> bytes:
    """Where an outcome's request stands, as its parts' header says it."""
    said = outcome.said["source"]
    return source_of(said["topic"], said["partition"], said["offset"]).encode()


@case("split")
class SplitOnce(Split):
    """Halves are short enough."""


@case("split-deep")
class SplitDeep(Split):
    """Nothing is ever short enough, and parts may be cut no more."""

    route: ClassVar = {**Split.route, "max_split_depth": 1}
    most_chars = 20


@case("split-not")
class SplitNot(Split):
    """A picture cannot be cut."""

    def words(self) -> Any:
        url = {"url": "data:image/png;base64," + "A" * 2000}
        return [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": url}]


# ------------------------------------------------------------------------------------------------ duplicates


class Again(Case):
    """One id four times: the same words twice, other words, and the same in another partition."""

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return [
            self.record(name, pier, "same", text="first"),
            self.record(name, pier, "same", text="first"),
            self.record(name, pier, "same", text="other"),
            self.elsewhere(self.record(name, pier, "same", text="first"), pier),
        ]

    def elsewhere(self, sent: Sent, pier: Pier) -> Sent:
        return Sent(sent.value, b"another key", sent.headers, self.partition_of(sent, pier))

    def partition_of(self, sent: Sent, pier: Pier) -> int:
        """A partition that the others' key does not lead to."""
        from aiokafka.partitioner import DefaultPartitioner  # noqa: PLC0415 (what our producer uses)

        every = list(range(pier.partitions))
        mine = DefaultPartitioner()(sent.key, every, every)
        return (int(mine) + 1) % pier.partitions


@case("again-coalesce")
class AgainCoalesce(Again):
    """The default."""


@case("again-allow")
class AgainAllow(Again):
    """All run."""

    route: ClassVar = {"duplicates": "allow"}


@case("again-reject")
class AgainReject(Again):
    """An id that waits is not taken again."""

    route: ClassVar = {"duplicates": "reject"}


# ---------------------------------------------------------------------------------------------------- review


class Looked(Answered):
    """r1 is fine, r2 was cut by a token limit, r3 was refused by the content filter."""

    def line_of(self, life: int, line: Line) -> bytes:
        if line.text == "r2":
            cut = answer_body("half a sen").replace(b'"finish_reason":"stop"', b'"finish_reason":"length"')
            return answer_line(line.wire_id, cut)
        if line.text == "r3":
            return answer_line(line.wire_id, refusal("content_policy_violation"), 400)
        return super().line_of(life, line)


@case("review")
class Review(Looked):
    """The route wants flagged answers looked at."""

    route: ClassVar = {"review": True}


@case("review-default")
class ReviewDefault(Looked):
    """The route says nothing."""


@case("review-fail")
class ReviewFail(Looked):
    """The route wants filtered rows as failures."""

    route: ClassVar = {"policies": {"content_filtered": "fail"}}


# -------------------------------------------------------------------------------------- age, bounds and money


@case("old")
class Old(Case):
    """Made seven hours before they are sent, and worth an answer for six."""

    route: ClassVar = {"max_age_s": 6 * HOUR_S}

    def records(self, name: str, pier: Pier) -> list[Sent]:
        fresh = super().records(name, pier)
        return [Sent(one.value, one.key, one.headers, age_s=7 * HOUR_S) for one in fresh[:2]] + fresh[2:]


@case("old-held")
class OldHeld(Case):
    """Worth an answer for four hours, and held for six."""

    route: ClassVar = {"max_age_s": 4 * HOUR_S, "max_wait_s": 0.5 * HOUR_S}

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return []

    async def drive(self, name: str, pier: Pier) -> None:
        hold = operator_hold(self, name, pier)
        await pier.tell(hold)
        await pier.until(lambda: hold_key(hold) in pier.supervisor.fleet.control.holds, "the hold to stand")
        await pier.send(name, [self.record(name, pier, custom_id) for custom_id in self.rows])
        await hours_pass(pier, 6)
        assert len(pier.missing(name)) == 3
        await pier.tell(control.Lifted(hold_key(hold)))
        await pier.landed(name)


@case("bounded")
class Bounded(Case):
    """r2 bounds its answer, the others do not."""

    route: ClassVar = {"missing_max_tokens": "fail"}

    def record(self, name: str, pier: Pier, custom_id: str, **otherwise: Any) -> Sent:
        body = {"model": name, "messages": [{"role": "user", "content": f"case/{name}/ {custom_id}"}]}
        body |= {"max_tokens": 10} if custom_id == "r2" else {}
        return super().record(name, pier, custom_id, body=json.dumps(body).encode())


SPENT_USAGE = Usage(1_000, 1_000)
SPENT_MODEL = "gpt-4.1-nano"


def spent_usd(pier_now: Any) -> float:
    """What a batch of one row of the spending case costs."""
    price = price_row("openai", SPENT_MODEL, SPENT_USAGE, pier_now, batch=True)
    assert price is not None
    return price.picodollars / 10**12


@case("spending")
class Spending(Answered):
    """The day's money is worth one batch and a half."""

    model = SPENT_MODEL
    rows = ("r1",)

    def line_of(self, life: int, line: Line) -> bytes:
        usage = b'"usage":{"prompt_tokens":1000,"completion_tokens":1000}'
        return answer_line(
            line.wire_id, answer_body("dear").replace(b'"usage":{"prompt_tokens":5,"completion_tokens":5}', usage)
        )

    def record(self, name: str, pier: Pier, custom_id: str, **otherwise: Any) -> Sent:
        return super().record(name, pier, custom_id, text=custom_id + " word" * 800)

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.landed(name)
        self.second_at = pier.now
        await pier.send(name, [self.record(name, pier, "r2")])
        await pier.landed(name, 60)


# ------------------------------------------------------------------------------------------------- the tests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harbour(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harbour]:
    """All cases, played; then a second life that meets the shapes of the first."""
    folder = tmp_path_factory.mktemp("policies")
    schema = folder / "answers.json"
    wanted = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    await asyncio.to_thread(schema.write_text, json.dumps(wanted))
    made = settings_of(CASES)
    made["routes"]["canary-check"]["canary"]["schema_file"] = str(schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)
        # It begins at nine in the morning: a day's money is spent and has to last until midnight, 15 s from then.
        now = datetime.now(UTC)
        since_nine = (now - now.replace(hour=9, minute=0, second=0, microsecond=0)) / timedelta(hours=1)
        patch.setattr(inprocess_kit, "AHEAD_H", 6 * 24 + since_nine % 24)
        pier = Pier(
            broker.bootstrap,
            folder,
            patch,
            CASES,
            scenario(sync={"latency_s": 30}),
            limits={"max_clock_skew_s": 0.5 * HOUR_S},
            has_review=True,
            **made,
            **TIMES,
        )
        default = made["routes"].pop("default")
        dear = {**default, "models": [SPENT_MODEL], "max_rows": 1, "late": "batch"}
        dear["max_usd_per_day"] = 1.5 * spent_usd(pier.now)
        made["routes"] |= {"spending": dear, "default": default}
        async with pier:
            played = Harbour(pier, CASES)
            await played.play()
            yield played


def test_refusals_of_what_was_asked_hold_the_key(harbour: Harbour) -> None:
    """Above ``alarm_ratio`` the key is held with the top codes in the alarm; the rows that met a fault wait for an
    operator, and then succeed.
    """
    classes = harbour.classes("alarm-input")
    assert classes == ["invalid_request"] * 4 + ["content_filtered"] * 2 + ["succeeded"] * 4
    first, second = harbour.pier.provider.lives["alarm-input"]
    assert second.texts == ["r6", "r7"]
    released_at = CASES["alarm-input"].released_at  # type: ignore[attr-defined]
    assert second.batch.created_at >= released_at.timestamp()
    (hold,) = holds_of(harbour.pier, "alarm-input", "input_failures")
    assert hold.until is None
    assert hold.scope == key_scope(CASES["alarm-input"].key("alarm-input"))
    (alarm,) = harbour.events("alarm", alarm="input_failures")
    assert "[alarm-input]" in alarm["scope"]
    assert (alarm["rows"], alarm["codes"]) == (6, {"invalid_value": 4, "content_policy_violation": 2})
    assert first.batch.metadata is not None
    assert alarm["event_id"].startswith(first.batch.metadata["batch_id"])


def test_faults_of_the_provider_only_alarm(harbour: Harbour) -> None:
    """Twenty 500s: an alarm of their own kind, no hold, and the rows succeed in a second batch."""
    assert harbour.classes("alarm-provider") == ["succeeded"] * 20
    assert [len(texts) for texts in harbour.sent("alarm-provider")] == [20, 20]
    (alarm,) = harbour.events("alarm", alarm="provider_failures")
    assert "[alarm-provider]" in alarm["scope"]
    assert alarm["codes"] == {"transient": 20}
    held = [hold for hold in harbour.pier.events("key_held") if "[alarm-provider]" in str(hold["label"])]
    assert held == []


def verdict_of(harbour: Harbour, name: str) -> list[CanaryVerdict]:
    """Verdicts that the events of this case name, as control has them."""
    shapes = {event["shape"] for event in harbour.events("canary") if f"[{name}]" in event["scope"]}
    return [harbour.pier.supervisor.fleet.control.canaries[shape] for shape in sorted(shapes)]


def test_a_good_canary_lets_the_others_go(harbour: Harbour) -> None:
    """Three rows of nine are called first; the others leave in one batch, after the last of their answers."""
    assert harbour.classes("canary-good") == ["succeeded"] * 9
    assert sorted(map(str, harbour.lanes("canary-good"))) == ["batch"] * 6 + ["sync"] * 3
    (life,) = harbour.pier.provider.lives["canary-good"]
    assert all(call.at.timestamp() <= life.batch.created_at for call in harbour.calls("canary-good"))
    (verdict,) = verdict_of(harbour, "canary-good")
    assert (verdict.is_good, verdict.rows, verdict.bad_rows) == (True, 3, 0)


def test_a_bad_canary_holds_its_shape_alone(harbour: Harbour) -> None:
    """Three refusals of three: the shape's other rows wait for an operator; another shape of the key goes on."""
    classes = harbour.classes("canary-bad")
    assert sorted(classes[:9]) == ["invalid_request"] * 3 + ["succeeded"] * 6
    assert classes[9:] == ["succeeded"] * 4
    before: list[list[str]] = CASES["canary-bad"].batches_before  # type: ignore[attr-defined]
    assert all(text.startswith("other") for texts in before for text in texts)
    assert before
    bad, good = sorted(verdict_of(harbour, "canary-bad"), key=lambda one: one.is_good)
    assert (bad.is_good, bad.rows, bad.bad_rows) == (False, 3, 3)
    assert (good.is_good, good.bad_rows) == (True, 0)
    (hold,) = holds_of(harbour.pier, "canary-bad", "canary_bad")
    assert hold.scope == f"shape:{bad.shape}"


def test_a_held_shape_does_not_slip_into_the_lane(harbour: Harbour) -> None:
    """Rows of a held shape that come to be late are announced as at risk, and are not called before the release."""
    harbour.outcomes("canary-late")  # what was waited for says that nothing ran while the hold stood
    held = {
        one.where for one in harbour.outcomes("canary-late")[:9] if one.row_class == "succeeded" or one.said["attempts"]
    }
    assert held <= harbour.named_by("deadline_at_risk", "canary-late")


def test_answers_that_do_not_fit_the_schema_are_bad(harbour: Harbour) -> None:
    """200s all of them, and published as results; as a sample they speak against their prompt."""
    assert harbour.classes("canary-check") == ["succeeded"] * 9
    (verdict,) = verdict_of(harbour, "canary-check")
    assert not verdict.is_good
    called = {call.text for call in harbour.calls("canary-check")}
    assert verdict.bad_rows == len(called - {"r0"})


def test_a_canary_that_takes_too_long(harbour: Harbour) -> None:
    """At their time to leave, rows without a verdict ship, or with ``timeout: hold`` wait for an operator."""
    for name in ("canary-ship", "canary-hold"):
        assert harbour.classes(name) == ["succeeded"] * 9
        assert sorted(map(str, harbour.lanes(name))) == ["batch"] * 6 + ["sync"] * 3
    (shipped,) = harbour.pier.provider.lives["canary-ship"]
    waited_s = shipped.batch.created_at - at(harbour.outcomes("canary-ship")[0].said["t0"]).timestamp()
    assert waited_s >= 1.4 * HOUR_S
    assert holds_of(harbour.pier, "canary-ship", "canary_timeout") == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_later_life_knows_the_verdicts(harbour: Harbour) -> None:
    """After a restart rows of a judged shape wait for no second sample: good ones leave, and bad ones stay held."""
    pier = harbour.pier
    for name in ("canary-good", "canary-bad"):
        harbour.outcomes(name)
    await pier.stop()
    await pier.start()
    (bad,) = [one for one in verdict_of(harbour, "canary-bad") if not one.is_good]
    again = control.Hold(f"shape:{bad.shape}", "canary_bad", pier.now, None, 1, "a shape [canary-bad]")
    await pier.tell(again)
    await pier.until(lambda: hold_key(again) in pier.supervisor.fleet.control.holds, "the hold to stand")
    calls = {name: len(pier.provider.calls[name]) for name in ("canary-good", "canary-bad")}
    first = {name: len(pier.placed[name]) for name in calls}
    await pier.send("canary-good", [shaped("canary-good", f"late{number}", "be good") for number in range(5)])
    await pier.send("canary-bad", [shaped("canary-bad", f"late{number}", "be bad") for number in range(5)])
    await pier.tell(Flush(CASES["canary-good"].key("canary-good").digest, pier.now))
    good = (await pier.landed("canary-good"))[first["canary-good"] :]
    assert [lane_of(one) for one in good] == ["batch"] * 5
    assert len(pier.missing("canary-bad")) == 5
    await pier.tell(control.Lifted(hold_key(again)))
    ended = (await pier.landed("canary-bad"))[first["canary-bad"] :]
    assert [lane_of(one) for one in ended] == ["batch"] * 5
    assert {name: len(pier.provider.calls[name]) for name in calls} == calls


def test_a_too_long_row_becomes_parts(harbour: Harbour) -> None:
    """Its outcome says ``split``; the parts are requests of their own with its key, headers and deadline, and their
    texts one after another are its text.
    """
    pier = harbour.pier
    first, parent, third = harbour.outcomes("split")
    assert first.is_result
    assert third.is_result
    assert (parent.said["kind"], parent.said["status"]) == ("split", "split")
    assert parent.record.topic == pier.topics["results"]
    parts = parts_of("split", pier)
    assert len(parts) == parent.said["parts"] >= 2
    for number, part in enumerate(parts, 1):
        assert part.said["custom_id"] == f"r2#part{number}"
        assert part.is_result
        assert part.header("parent") == source(parent)
        assert part.header("part") == str(number).encode()
        assert part.header("parts") == str(len(parts)).encode()
        assert part.header("tenant") == b"blue"
        assert at(part.said["deadline"]) == at(parent.said["deadline"])
        assert part.said["source"]["partition"] == parent.said["source"]["partition"]
        assert part.said["deadline_met"] is True
        assert "#" not in part.said["wire_id"]
    run = [line.body["messages"][-1]["content"] for life in pier.provider.lives["split"][1:] for line in life.lines]
    placed = sorted(run, key=PARAGRAPHS.index)
    assert "".join(placed) == PARAGRAPHS


def test_parts_are_not_cut_without_end(harbour: Harbour) -> None:
    """At ``max_split_depth`` a part that is still too long is a failure."""
    parents = harbour.outcomes("split-deep")
    assert [one.said["kind"] for one in parents] == ["result", "split", "result"]
    parts = parts_of("split-deep", harbour.pier)
    assert len(parts) == parents[1].said["parts"]
    assert {part.row_class for part in parts} == {"too_long"}


def test_what_cannot_be_cut_fails(harbour: Harbour) -> None:
    """A message with a picture ends as ``too_long``."""
    assert harbour.classes("split-not") == ["succeeded", "too_long", "succeeded"]
    assert parts_of("split-not", harbour.pier) == []


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("again-coalesce", ["succeeded", "duplicate", "succeeded", "succeeded"]),
        ("again-allow", ["succeeded"] * 4),
        ("again-reject", ["succeeded", "duplicate", "duplicate", "succeeded"]),
    ],
)
def test_the_same_id_again(harbour: Harbour, name: str, classes: list[str]) -> None:
    """In one partition as the route's ``duplicates`` says; in another one both run, each with its own outcome."""
    assert harbour.classes(name) == classes
    outcomes = harbour.outcomes(name)
    assert outcomes[3].where[0] != outcomes[0].where[0]
    for one in outcomes:
        if one.row_class == "duplicate":
            first = one.said["duplicate_of"]
            assert (first["partition"], first["offset"]) == outcomes[0].where
    assert sum(len(texts) for texts in harbour.sent(name)) == classes.count("succeeded")


def test_flagged_answers_may_be_looked_at(harbour: Harbour) -> None:
    """``review: true``: an answer with a flag goes to the review topic, whole; a plain one to the results."""
    plain, cut, filtered = harbour.outcomes("review")
    topics = harbour.pier.topics
    assert [one.record.topic for one in (plain, cut, filtered)] == [
        topics["results"],
        topics["review"],
        topics["review"],
    ]
    assert cut.is_result
    assert cut.said["flags"] == ["truncated"]
    assert cut.text == "half a sen"


@pytest.mark.parametrize(("name", "filtered_to"), [("review-default", "review"), ("review-fail", "failures")])
def test_filtered_rows_go_where_the_route_says(harbour: Harbour, name: str, filtered_to: str) -> None:
    """To the review topic by default, to the failures by policy; a truncated answer is a result with its flag."""
    plain, cut, filtered = harbour.outcomes(name)
    topics = harbour.pier.topics
    assert [one.record.topic for one in (plain, cut)] == [topics["results"]] * 2
    assert cut.said["flags"] == ["truncated"]
    assert filtered.row_class == "content_filtered"
    assert filtered.record.topic == topics[filtered_to]
    assert len(harbour.sent(name)) == 1


def test_an_old_request_is_given_up(harbour: Harbour) -> None:
    """Above ``max_age_s`` at its first reading it is never sent; a fresh one is."""
    assert harbour.classes("old") == ["max_age", "max_age", "succeeded"]
    assert harbour.sent("old") == [["r3"]]


def test_the_clock_of_age_stops_in_a_hold(harbour: Harbour) -> None:
    """Held for longer than ``max_age_s``, and answered after the release."""
    assert harbour.classes("old-held") == ["succeeded"] * 3


def test_an_unbounded_answer_may_be_refused(harbour: Harbour) -> None:
    """``missing_max_tokens: fail``: the rule is named and the row is never sent."""
    assert harbour.classes("bounded") == ["bad_record", "succeeded", "bad_record"]
    assert harbour.outcomes("bounded")[0].code == "missing_max_tokens"
    assert harbour.sent("bounded") == [["r2"]]


def test_the_days_money_is_a_bound(harbour: Harbour) -> None:
    """``max_usd_per_day``: the batch that would exceed it waits for the next UTC day, and then goes."""
    assert harbour.classes("spending") == ["succeeded"] * 2
    (hold,) = holds_of(harbour.pier, "spending", "spending_limit")
    second_at = CASES["spending"].second_at  # type: ignore[attr-defined]
    assert hold.until is not None
    assert (hold.until.hour, hold.until.minute) == (0, 0)
    assert hold.until > second_at
    _, second = harbour.pier.provider.lives["spending"]
    assert second.batch.created_at >= hold.until.timestamp()
