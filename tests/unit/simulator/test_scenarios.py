"""The scenario library: complete, documented, and what each does to the client that a user writes from the guide.

``HARM`` is that client's tally after two starts of its script: what it has lost, passed on twice or taken from
strangers, and how many rows its user pays twice. What batchferry makes of the same scenarios is in the integration
tests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import NamedTuple, Self

import jsonschema
import pytest
import yaml
from naive_kit import OTHERS, NaiveClient, Tally, paid_twice, run_other
from sim_kit import bench, jsonl, rows
from standardwebhooks import Webhook

from batchferry.domain.errors import ConfigError
from batchferry.simulator import DEFAULT_KEY, Durations, Outcome, Scenario, SyncScript, load_scenario, scenarios
from batchferry.simulator.scenario import WebhookScript
from batchferry.simulator.surfaces import PLAYED_BY, SURFACES

SCHEMA = Path(__file__).parents[3] / "schemas" / "simulator" / "scenario.v1.json"
ROWS = 40
STARTS = 2
AFTER_ALL_S = 2 * 86_400
HURRIED = {"create_late": 0.3}
"""Real seconds of patience that stand for the library's ten minutes."""


class Harm(NamedTuple):
    """What becomes of 40 rows."""

    lost: int = 0
    passed_on_twice: int = 0
    strangers: int = 0
    paid_twice: int = 0
    died_of: tuple[str, ...] = ()


NONE_ID = "ValueError"
"""The library's word for a file id that is null."""
HARM: dict[str, Harm] = {
    "calm": Harm(),
    "cancelling_ten_minutes": Harm(paid_twice=26, died_of=(NONE_ID,)),
    "create_error_but_done": Harm(paid_twice=ROWS),
    "create_late": Harm(paid_twice=ROWS),
    "create_lost": Harm(paid_twice=ROWS),
    "create_twice": Harm(paid_twice=ROWS),
    "download_cut": Harm(),
    "download_short": Harm(lost=20),
    "empty_error_file": Harm(),
    "every_status": Harm(),
    "expired_without_results": Harm(died_of=(NONE_ID,)),
    "file_not_ready": Harm(lost=ROWS, died_of=("BadRequestError",) * 2),
    "finalizing_for_hours": Harm(),
    "half_expired": Harm(lost=20),
    "last_line_cut": Harm(passed_on_twice=39, paid_twice=ROWS, died_of=("JSONDecodeError",)),
    "line_separators": Harm(lost=35, paid_twice=ROWS, died_of=("JSONDecodeError",) * 2),
    "model_not_found_rows": Harm(lost=ROWS, died_of=(NONE_ID,) * 2),
    "not_found_after_create": Harm(lost=ROWS, paid_twice=ROWS, died_of=("NotFoundError",) * 2),
    "nul": Harm(),
    "null_file_ids": Harm(lost=ROWS, paid_twice=ROWS, died_of=(NONE_ID,) * 2),
    "provider_down": Harm(lost=ROWS, died_of=("InternalServerError",) * 2),
    "refused_lines": Harm(died_of=(NONE_ID,)),
    "refused_model": Harm(lost=ROWS, died_of=(NONE_ID,) * 2),
    "refused_token_limit": Harm(lost=ROWS, died_of=(NONE_ID,) * 2),
    "refused_without_details": Harm(died_of=(NONE_ID,)),
    "row_errors": Harm(lost=4, passed_on_twice=17, paid_twice=21, died_of=("KeyError",)),
    "rows_duplicated": Harm(passed_on_twice=13),
    "rows_foreign": Harm(strangers=10),
    "rows_invalid_utf8": Harm(),
    "rows_missing": Harm(lost=4),
    "rows_reordered": Harm(),
    "rows_unreadable": Harm(passed_on_twice=3, paid_twice=ROWS, died_of=("JSONDecodeError",)),
    "sync_outage": Harm(),
    "throttled": Harm(lost=ROWS, died_of=("RateLimitError",) * 2),
    "webhook_doubled": Harm(),
    "webhook_gateway": Harm(),
    "webhook_late": Harm(),
    "webhook_lost": Harm(),
    "webhook_reordered": Harm(),
}


FIVE_FAULTS = ("half_expired", "line_separators", "rows_missing", "model_not_found_rows")
"""With ``create_held``, which has a test of its own: what anybody who relies on batches has met."""


def test_each_of_the_five_faults_costs_the_naive_client_rows() -> None:
    """What is lost is lost in spite of a second start of the script; two of them show in no exception at all."""
    assert {name: HARM[name].lost for name in FIVE_FAULTS} == {
        "half_expired": 20,
        "line_separators": 35,
        "rows_missing": 4,
        "model_not_found_rows": ROWS,
    }
    assert [name for name in FIVE_FAULTS if not HARM[name].died_of] == ["half_expired", "rows_missing"]


def test_harm_is_told_of_each_scenario_that_openai_plays() -> None:
    """But the one that needs a process to kill, which has a test of its own."""
    played = {name for name in scenarios.names() if "openai" in scenarios.load(name).surfaces}
    assert HARM.keys() == played - {"create_held"}


def test_each_scenario_says_what_happens_and_what_to_do() -> None:
    """A title that fits a line, a paragraph, what a client must do; and it does something."""
    for name in scenarios.names():
        scenario = scenarios.load(name)
        assert 10 < len(scenario.title) <= 75, name
        assert len(scenario.about) > 60, name
        assert scenario.client_must, name
        words = {"title", "about", "client_must", "surfaces"}
        assert name in {"calm", "rows_reordered"} or scenario.model_dump(exclude=words) != Scenario().model_dump(
            exclude=words
        )


def test_the_files_keep_the_published_schema() -> None:
    """What is in the library is valid by the very JSON Schema that editors and other tools are given."""
    published = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    assert Scenario.model_json_schema().items() <= published.items()
    validator = jsonschema.Draft202012Validator(published)
    faulty = {
        name: [error.message for error in validator.iter_errors(yaml.safe_load(scenarios.path_of(name).read_text()))]
        for name in scenarios.names()
    }
    assert {name: errors for name, errors in faulty.items() if errors} == {}
    assert list(validator.iter_errors({"durations": {"validating_s": -1}}))


def test_each_file_says_where_it_can_be_played() -> None:
    """In so many words, and nothing it scripts is without an effect there."""
    for name in scenarios.names():
        scenario = scenarios.load(name)
        assert "surfaces" in scenario.model_fields_set, name
        assert not scenario.not_played().keys() & set(scenario.surfaces), name
    assert {surface for name in scenarios.names() for surface in scenarios.load(name).surfaces} == set(SURFACES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("surfaces: [anthropic]\ncreate_gap: 3", "anthropic does not play create_gap"),
        ("surfaces: [azure]\nbatches: [{expire_with_share: 0.5}]", "azure does not play batches.expire_with_share"),
        ("surfaces: [mistral]\nrows: [{outcome: paused}]", "mistral does not play rows.outcome=paused"),
        ("surfaces: [gemini]\nfaults: [{call: upload}, {call: models}]\nshow_usage: false", "gemini .* show_usage"),
        ("surfaces: [anthropic]\nfaults: [{call: upload}]", "anthropic does not play faults.call=upload"),
        ("surfaces: []", "surfaces: "),
        ("surfaces: [bedrock]", "surfaces.0: "),
    ],
)
def test_a_member_without_an_effect_where_it_is_meant_for_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """Told with its name; without ``surfaces`` the same scenario is taken, and says what is played where."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_scenario(path)


def test_every_member_that_some_api_does_not_play_is_a_member() -> None:
    """The table of ``surfaces`` names nothing that a scenario has not."""
    schema = Scenario.model_json_schema()
    parts = {"faults": "FaultRule", "batches": "BatchRule", "limits": "Limits", "webhooks": "WebhookScript"}
    parts |= {"rows": "RowRule", "shares": "WeightedOutcome", "fail_with": "JobError"}
    for path in PLAYED_BY:
        found = schema
        *above, last = path.partition("=")[0].split(".")
        for name in above:
            assert name in found["properties"], path
            found = schema["$defs"][parts[name]]
        assert last in found["properties"], path


def test_the_table_names_every_scenario() -> None:
    """The Markdown table has a line each, four cells wide, short enough for a page, and names the APIs."""
    head, rule, *lines = scenarios.table().splitlines()
    assert head.count("|") == rule.count("|") == 5
    assert [line.split("`")[1] for line in lines] == scenarios.names()
    assert all(line.count("|") - line.count("\\|") == 5 and len(line) < 300 for line in lines)
    assert [line.rpartition("| ")[2] for line in lines if "`half_expired`" in line] == [
        "openai, anthropic, gemini, mistral |"
    ]


def test_names_and_files_are_told_apart(tmp_path: Path) -> None:
    """A bare word is a name of the library, everything else a path; an unknown name is refused with the remedy."""
    mine = tmp_path / "calm"
    assert scenarios.path_of(mine) == mine
    assert scenarios.path_of("calm.yaml") == Path("calm.yaml")
    assert scenarios.path_of("calm").parent.name == "scenarios"
    with pytest.raises(ConfigError, match="--list-scenarios"):
        scenarios.path_of("clam")


def test_time_grows_less_than_linearly() -> None:
    """By default 10,000 rows take about 8 minutes and 50,000 about 26, not 40."""
    curve = Durations().in_progress
    assert curve.duration_s(10_000) == pytest.approx(8 * 60, abs=15)
    assert curve.duration_s(50_000) == pytest.approx(26 * 60, abs=30)


def test_every_status_and_every_row_outcome_can_be_rehearsed() -> None:
    """The library leaves out no end of a row that OpenAI-shaped files have, but the largest answers."""
    scripted = {rule.outcome for name in scenarios.names() for rule in scenarios.load(name).rows}
    others = {Outcome.SUCCESS, Outcome.EXPIRED, Outcome.HUGE, Outcome.PAUSED, Outcome.WINDOW_FULL}
    assert set(Outcome) - scripted <= others


@pytest.mark.parametrize("name", [*HARM])
async def test_what_the_naive_client_loses_and_doubles(name: str) -> None:
    """The tally after its script has been started, and started again when it died."""
    async with bench(scenarios.load(name).model_copy(update={"webhooks": None})) as it:
        client = NaiveClient(it, HURRIED.get(name, 20.0))
        tally = await client.run(
            ROWS, starts=STARTS, cancels_after_s=3600 if name == "cancelling_ten_minutes" else None
        )
        it.clock.advance(AFTER_ALL_S)
        await it.simulator.settle()
        found = Harm(
            tally.lost(ROWS),
            tally.passed_on_twice(ROWS),
            tally.strangers(ROWS),
            paid_twice(it, ROWS),
            tuple(tally.died_of),
        )
        assert found == HARM[name]


KILLED = """
import sys, openai
client = openai.OpenAI(api_key=sys.argv[2], base_url=sys.argv[1])
file = client.files.create(file=("requests.jsonl", open(sys.argv[3], "rb")), purpose="batch")
client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
"""


async def test_the_naive_client_killed_inside_create_pays_everything_twice(tmp_path: Path) -> None:
    """``kill -9`` while the answer to create is on its way: started again, the script knows nothing of its batch."""
    path = tmp_path / "requests.jsonl"
    path.write_bytes(jsonl(rows(ROWS)))
    async with bench(scenarios.load("create_held")) as it:
        script = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, it.simulator.base_url, DEFAULT_KEY, str(path)
        )
        gate = it.simulator.faults.gate("create")
        await asyncio.wait_for(gate.reached(), 30)
        script.send_signal(signal.SIGKILL)
        await script.wait()
        await gate.release()
        tally = await NaiveClient(it).run(ROWS)
        it.clock.advance(AFTER_ALL_S)
        await it.simulator.settle()
        assert (tally.lost(ROWS), paid_twice(it, ROWS)) == (0, ROWS)


async def test_a_naive_caller_gives_up_in_a_sync_outage() -> None:
    """The library's two retries are over long before the outage is."""
    async with bench(scenarios.load("sync_outage")) as it:
        async with NaiveClient(it).library() as client:
            with pytest.raises(Exception, match="503"):
                await client.chat.completions.create(
                    model="gpt-4o-mini", messages=[{"role": "user", "content": "Where is my card?"}]
                )
        assert it.simulator.bill.summary()["sync_runs"] == 0


# ------------------------------------------------------------------------------------- the other providers

DECODE, HUNG_UP = "JSONDecodeError", "RemoteProtocolError"
OTHER_HARM: dict[tuple[str, str], Harm] = {
    ("anthropic", "half_expired"): Harm(lost=20),
    ("gemini", "half_expired"): Harm(lost=ROWS),
    ("mistral", "half_expired"): Harm(lost=20),
    ("anthropic", "line_separators"): Harm(),
    ("gemini", "line_separators"): Harm(lost=39, passed_on_twice=1, paid_twice=ROWS, died_of=(DECODE, DECODE)),
    ("mistral", "line_separators"): Harm(lost=35, paid_twice=ROWS, died_of=(DECODE, DECODE)),
    ("anthropic", "rows_missing"): Harm(lost=4),
    ("gemini", "rows_missing"): Harm(lost=4),
    ("mistral", "rows_missing"): Harm(lost=4),
    ("anthropic", "model_not_found_rows"): Harm(lost=ROWS),
    ("gemini", "model_not_found_rows"): Harm(lost=ROWS),
    ("mistral", "model_not_found_rows"): Harm(lost=ROWS, died_of=("ValidationError",) * 2),
    ("anthropic", "last_line_cut"): Harm(passed_on_twice=39, paid_twice=ROWS, died_of=(DECODE,)),
    ("gemini", "last_line_cut"): Harm(passed_on_twice=39, paid_twice=ROWS, died_of=(DECODE,)),
    ("mistral", "last_line_cut"): Harm(passed_on_twice=39, paid_twice=ROWS, died_of=(DECODE,)),
    ("anthropic", "create_lost"): Harm(paid_twice=ROWS),
    ("gemini", "create_lost"): Harm(paid_twice=ROWS, died_of=(HUNG_UP,)),
    ("mistral", "create_lost"): Harm(paid_twice=ROWS, died_of=(HUNG_UP,)),
}
"""The scripts from the other guides. Of all this one thing is prevented: Anthropic's library splits results as bytes, so
that U+2028 is no line break there. Its two retries make the second batch of a lost create by themselves."""


@pytest.mark.parametrize(("provider", "name"), OTHER_HARM)
async def test_what_the_other_naive_clients_lose_and_double(provider: str, name: str) -> None:
    """No provider's API takes it off its client: half of a batch, a lost row or a create without an answer."""
    scenario = scenarios.load(name)
    assert provider in scenario.surfaces
    async with bench(scenario) as it:
        script = OTHERS[provider](it, Tally())
        tally = await run_other(script, ROWS, STARTS)
        it.clock.advance(AFTER_ALL_S * 2)
        await it.simulator.settle()
        found = Harm(
            tally.lost(ROWS),
            tally.passed_on_twice(ROWS),
            tally.strangers(ROWS),
            script.paid_twice(ROWS),
            tuple(tally.died_of),
        )
        assert found == OTHER_HARM[provider, name]


@pytest.mark.parametrize("provider", OTHERS)
async def test_the_other_naive_clients_stopped_inside_create_pay_everything_twice(provider: str) -> None:
    """None of the three takes a key that would make a second create the first one again."""
    async with bench(scenarios.load("create_held")) as it:
        first = asyncio.create_task(OTHERS[provider](it, Tally()).run(ROWS))
        gate = it.simulator.faults.gate("create")
        await asyncio.wait_for(gate.reached(), 30)
        first.cancel()
        await asyncio.wait([first])
        await gate.release()
        script = OTHERS[provider](it, Tally())
        tally = await run_other(script, ROWS, 1)
        it.clock.advance(AFTER_ALL_S * 2)
        await it.simulator.settle()
        assert (tally.lost(ROWS), script.paid_twice(ROWS)) == (0, ROWS)


# ----------------------------------------------------------------------------------------------- webhooks


class Receiver:
    """Takes deliveries, and refuses the first ``refuses`` of them."""

    def __init__(self, refuses: int = 0) -> None:
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self._refuses = refuses
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/hook?from=sim"

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert head[0] == "POST /hook?from=sim HTTP/1.1"
        headers = dict(line.lower().split(": ", 1) if ": " in line else (line, "") for line in head[1:] if line)
        raw = dict(line.split(": ", 1) for line in head[1:] if line)
        self.taken.append((raw, await reader.readexactly(int(headers["content-length"]))))
        status = b"503 Busy" if len(self.taken) <= self._refuses else b"204 Taken"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()


async def heard(script: dict[str, object], batches: int, deliveries: int, refuses: int = 0) -> list[tuple[str, bool]]:
    """What a receiver gets of so many batches ended one after the other: ``(event id, signed by the secret)``."""
    secret = "whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0"
    found = []
    async with Receiver(refuses) as receiver:
        hook = WebhookScript.model_validate({"url": receiver.url, "secret": secret} | script)
        async with bench(Scenario(webhooks=hook)) as it:
            for _ in range(batches):
                await it.end(jsonl(rows(1)))
            async with asyncio.timeout(20):
                while len(it.simulator.deliveries) < deliveries:
                    it.clock.advance(10)
                    await asyncio.sleep(0.001)
            it.clock.advance(AFTER_ALL_S)
            await asyncio.sleep(0.05)
            assert len(it.simulator.deliveries) == deliveries, "more came than was asked for"
            for raw, content in receiver.taken:
                event = json.loads(content)
                assert (event["type"], event["object"]) == ("batch.completed", "event")
                assert event["id"] == raw["webhook-id"]
                assert (await it.get(event["data"]["id"]))["status"] == "completed"
                signed = _signed(secret, raw, content)
                found.append((event["id"], signed == raw["webhook-signature"]))
    return found


def _signed(secret: str, raw: dict[str, str], content: bytes) -> str:
    from datetime import UTC, datetime  # noqa: PLC0415 - only here

    at = datetime.fromtimestamp(int(raw["webhook-timestamp"]), UTC)
    return Webhook(secret).sign(raw["webhook-id"], at, content.decode())


async def test_a_webhook_is_signed_and_tried_until_it_is_taken() -> None:
    """A receiver that is busy twice gets the same event a third time, each try signed by its own time."""
    first, second, third = await heard({}, 1, 3, refuses=2)
    assert first == second == third
    assert first[1]


async def test_webhooks_are_lost_doubled_and_forged_by_plan() -> None:
    """Every second is never sent; every one comes twice; a forged one comes before the true one."""
    assert len(await heard({"lose_every": 2}, 4, 2)) == 2
    one, again = await heard({"double_every": 1}, 1, 2)
    assert one == again
    forged, true = await heard({"forge_every": 1, "attempts": 1}, 1, 2)
    assert (forged[0], forged[1], true[1]) == (true[0], False, True)


async def test_webhooks_come_out_of_order_by_plan() -> None:
    """A held one goes once the next is out, and a last one after a while."""
    async with Receiver() as receiver:
        hook = WebhookScript.model_validate(
            {
                "url": receiver.url,
                "secret": "whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0",
                "hold_every": 2,
                "hold_s": 9e5,
            }
        )
        async with bench(Scenario(webhooks=hook)) as it:
            ids = [(await it.end(jsonl(rows(1))))["id"] for _ in range(3)]
            async with asyncio.timeout(20):
                while len(it.simulator.deliveries) < 3:
                    it.clock.advance(1)
                    await asyncio.sleep(0.001)
            told = [one.batch_id for one in it.simulator.deliveries]
            assert told.index(ids[2]) < told.index(ids[1])
            assert sorted(told) == sorted(ids)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_c2hvcnQ=", "YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0", "whsec_!!"])
def test_a_webhook_secret_that_is_none_is_refused(secret: str) -> None:
    """Too short, without its prefix or no base64: told when the scenario is read, and never quoted."""
    with pytest.raises(ValueError, match="whsec_") as refused:
        WebhookScript.model_validate({"url": "http://localhost/x", "secret": secret})
    assert secret not in str(refused.value) or secret == "whsec_"


@pytest.mark.parametrize("text", ["[" * 5000, "rows: &a [*a]", "title: 2026-99-99", "title: !!int x", "# " * (1 << 20)])
def test_a_hostile_scenario_file_is_one_fault(tmp_path: Path, text: str) -> None:
    """Too deep, too large, in itself, or with values that do not fit their form: told with the file's name."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_scenario(path)
    (only,) = refused.value.faults
    assert only.startswith(f"scenario {path}: ")


# ------------------------------------------------------------------------------------------------- faults


async def test_a_fault_has_its_hour() -> None:
    """``start_s`` and ``for_s`` bound it by the simulator's clock."""
    scenario = Scenario.model_validate({"faults": [{"call": "list", "status": 503, "start_s": 60, "for_s": 120}]})
    async with bench(scenario) as it:
        seen = []
        for _ in range(4):
            seen.append((await it.http.get("/v1/batches")).status_code)
            it.clock.advance(60)
        assert seen == [200, 503, 503, 200]


async def test_a_repeated_create_makes_two_batches_of_one_file() -> None:
    """The second's id is answered; both carry the same file and metadata."""
    async with bench(scenarios.load("create_twice")) as it:
        batch_id = await it.start(jsonl(rows(1)), metadata={"mine": "1"})
        newest, oldest = (await it.http.get("/v1/batches")).json()["data"]
        assert newest["id"] == batch_id
        assert (newest["input_file_id"], newest["metadata"]) == (oldest["input_file_id"], oldest["metadata"])


async def test_a_share_of_the_rows_is_done_when_the_window_ends() -> None:
    """``expire_with_share`` holds for windows of any length, and 0 means that there are no files."""
    for window in ("1h", "24h"):
        for name, done in (("half_expired", 20), ("expired_without_results", 0)):
            scenario = scenarios.load(name).model_copy(update={"windows": ("1h", "24h"), "sync": SyncScript()})
            async with bench(scenario) as it:
                batch_id = await it.start(jsonl(rows(ROWS)), completion_window=window)
                it.clock.advance(25 * 3600)
                batch = await it.get(batch_id)
                assert (batch["status"], batch["request_counts"]["completed"]) == ("expired", done)
                assert (batch["output_file_id"] is None) == (done == 0)
