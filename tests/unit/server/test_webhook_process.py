"""The webhook process: real deliveries over HTTP to a real child, and what the service learns of them."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from batchferry.app import Service
from batchferry.clock import ScaledClock, SystemClock
from batchferry.config import load_settings
from batchferry.domain.errors import ConfigError, GateRefused, KafkaUnavailable
from batchferry.server import WebhookProcess, hook_of, plans_of, try_webhook_process, webhookprocess
from batchferry.server.webhookauth import Outcome
from batchferry.server.webhooks import PATH
from batchferry.server.webhooktally import WebhookTally
from batchferry.server.webhookwire import Bounds, Link, Plan, Rehearsal, Sheet
from batchferry.telemetry import RecordingTelemetry

SECRET = "whsec_" + base64.b64encode(b"the key of the process's tests").decode()
PLAIN_SECRET = "plain-secret_0123456789.~"
ACCOUNTS = {
    "gate": {"api_key": "k", "webhook_secret": SECRET},
    "plain": {"api_key": "k", "webhook_secret": PLAIN_SECRET, "webhook": {"auth": "path", "form": "generic"}},
}


def settings_of(accounts: dict[str, Any] | None = None, **given: Any) -> Any:
    """Settings with these accounts."""
    made = {"accounts": {"default": {"api_key": "k"}, **(ACCOUNTS if accounts is None else accounts)}, **given}
    return load_settings(None, {}, made, dotenv_path=None)


class Sink:
    """Keeps what it was asked; ``answers`` says what it knows of a batch, True of all others."""

    def __init__(self) -> None:
        self.poked: list[tuple[str, str]] = []
        self.answers: dict[str, bool | None] = {}
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.entered = 0

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        self.entered += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.poked.append((account, provider_batch_id))
        return self.answers.get(provider_batch_id, True)


class Dock:
    """A webhook process with its sink, its telemetry and a client."""

    def __init__(self, clock: Any = None, **given: Any) -> None:
        self.sink, self.telemetry = Sink(), RecordingTelemetry()
        self.clock = clock or SystemClock()
        self.process = WebhookProcess(
            plans_of(settings_of().accounts),
            self.sink,
            host="127.0.0.1",
            port=0,
            clock=self.clock,
            telemetry=self.telemetry,
            **given,
        )
        self.client = httpx.AsyncClient(timeout=20)

    async def post(self, headers: dict[str, str], body: bytes, path: str = "gate") -> int:
        """The status of a delivery."""
        address = f"{self.process.address}/webhooks/{path}"
        return (await self.client.post(address, headers=headers, content=body)).status_code

    def outcomes(self) -> dict[str, float]:
        """How often each outcome was counted, by account."""
        return {
            f"{dict(labels)['account']} {dict(labels)['outcome']}": value
            for (name, labels), value in self.telemetry.counters.items()
            if name == "webhooks_received"
        }


@asynccontextmanager
async def dock(clock: Any = None, **given: Any) -> AsyncIterator[Dock]:
    """A process that answers."""
    made = Dock(clock, **given)
    await made.process.start()
    try:
        ended = made.telemetry.named("webhook_process_ended")
        await until(lambda: made.process.is_up.is_set() or bool(ended), "the process is up")
        assert ended == []
        yield made
    finally:
        await made.process.stop()
        await made.client.aclose()


async def until(is_so: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Wait for what another process does."""
    by_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < by_s, what
        await asyncio.sleep(0.01)


def signed(batch: str = "batch_1", delivery_id: str = "msg_1", *, at: datetime | None = None, key: str = SECRET) -> Any:
    """A delivery, signed by hand."""
    body = json.dumps({"type": "batch.completed", "data": {"id": batch}}).encode()
    stamp = int((at or datetime.now(UTC)).timestamp())
    mac = hmac.digest(base64.b64decode(key[6:]), f"{delivery_id}.{stamp}.".encode() + body, "sha256")
    signature = "v1," + base64.b64encode(mac).decode()
    return {"webhook-id": delivery_id, "webhook-timestamp": str(stamp), "webhook-signature": signature}, body


def is_alive(pid: int) -> bool:
    """Whether this process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


STRANGER = "whsec_" + base64.b64encode(b"the key of somebody unknown").decode()


async def test_deliveries_are_judged_there_and_told_here(monkeypatch: pytest.MonkeyPatch):
    """Taken, repeated, unknown, forged and odd ones get the documented answers; every one is counted in the service's
    own telemetry, and the process was given no key of the service and no secret that others could see.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "sk-the-key-of-the-service")
    async with dock() as one:
        one.sink.answers = {"batch_2": None, "batch_3": False}
        seen = Path(f"/proc/{one.process.pid}")
        told = (seen / "environ").read_bytes() + (seen / "cmdline").read_bytes()
        for secret in ("sk-the-key-of-the-service", SECRET, PLAIN_SECRET):
            assert secret.encode() not in told
        assert await one.post(*signed()) == 200
        assert await one.post(*signed()) == 200
        assert await one.post(*signed("batch_2", "msg_2")) == 200
        assert await one.post(*signed("batch_3", "msg_3")) == 200
        assert await one.post(*signed("batch_4", "msg_4", key=STRANGER)) == 401
        assert await one.post(*signed("batch_4", "msg_5", at=datetime.now(UTC) - timedelta(hours=1))) == 400
        assert await one.post({}, b'{"batch_id": "b-1", "status": "completed"}', f"plain/{PLAIN_SECRET}") == 200
        assert await one.post({}, b"{}", "plain/wrong") == 401
        assert await one.post(*signed(), "nobody") == 404
        assert await one.post(*signed(), "gate/x/y") == 404
        expected = {
            "gate poked": 1, "gate duplicate": 1, "gate unknown_batch": 1, "gate no_effect": 1, "gate bad_signature": 1,
            "gate out_of_time": 1, "plain poked": 1, "plain bad_signature": 1, "other unknown_account": 1,
        }  # fmt: skip
        await until(lambda: sum(one.outcomes().values()) == 9, "every delivery is counted")
        assert one.outcomes() == expected
    assert one.sink.poked == [("gate", "batch_1"), ("gate", "batch_2"), ("gate", "batch_3"), ("plain", "b-1")]
    assert [event["provider_batch_id"] for event in one.telemetry.named("webhook_received")] == ["batch_1", "b-1"]
    assert {(e["account"], e["outcome"]) for e in one.telemetry.named("webhook_refused")} == {
        ("gate", "bad_signature"), ("gate", "out_of_time"), ("plain", "bad_signature"), ("other", "unknown_account"),
    }  # fmt: skip
    assert one.telemetry.total("http_requests", route=PATH, status="200") == 4
    assert one.telemetry.total("http_requests") == 9
    assert one.telemetry.named("webhooks_listening") == [{"host": "127.0.0.1", "port": one.process.port}]


async def test_what_the_service_cannot_know_now_is_asked_for_again():
    """503 while Kafka is away, 500 at a bug of which the service tells the place; and a repetition is welcome after
    both.
    """
    async with dock() as one:
        one.sink.error = KafkaUnavailable("no broker")
        assert await one.post(*signed()) == 503
        one.sink.error = RuntimeError("prompt: tell me a story")
        assert await one.post(*signed()) == 500
        one.sink.error = None
        assert await one.post(*signed()) == 200
    assert one.outcomes() == {"gate not_taken": 1, "gate poked": 1}
    (event,) = one.telemetry.named("api_failed")
    assert event["error"] == "RuntimeError"
    assert "story" not in repr(one.telemetry.events)
    assert one.telemetry.total("http_requests", status="500") == 1


async def test_more_than_may_be_asked_about_is_sent_away():
    """With both places taken a third batch is a 503 at once; a second delivery about a batch in question waits with
    the first and has no effect of its own; afterwards the third is welcome.
    """
    async with dock(bounds=Bounds(max_asks=2)) as one:
        one.sink.gate = asyncio.Event()
        held = [asyncio.create_task(one.post(*signed(f"batch_{number}", f"msg_{number}"))) for number in (1, 2)]
        await until(lambda: one.sink.entered == 2, "both are asked about")
        assert await one.post(*signed("batch_3", "msg_3")) == 503
        held.append(asyncio.create_task(one.post(*signed("batch_1", "msg_4"))))
        # The sheet of the refusal shows that what was sent before it has arrived.
        await until(lambda: one.outcomes() == {"gate not_taken": 1}, "the refusal is counted")
        one.sink.gate.set()
        assert await asyncio.gather(*held) == [200, 200, 200]
        assert await one.post(*signed("batch_3", "msg_3")) == 200
    assert sorted(batch for _, batch in one.sink.poked if batch != "batch_1") == ["batch_2", "batch_3"]
    assert one.outcomes()["gate poked"] == 3
    assert one.outcomes().get("gate no_effect", 0) == 1


async def test_a_flood_is_a_few_messages():
    """A few hundred deliveries reach the service in no more messages than the pauses between them allow."""
    async with dock(bounds=Bounds(ask_pause_s=0.2, sheet_pause_s=0.2, max_per_s=1e6)) as one:
        heard: list[dict[str, Any]] = []
        hear = one.process._heard
        link = one.process._link
        assert link is not None
        link._on_message = lambda message: (heard.append(message), hear(message))  # type: ignore[assignment, func-returns-value]
        started = time.monotonic()
        for first in range(0, 300, 50):
            deliveries = [signed(f"batch_{number}", f"msg_{number}") for number in range(first, first + 50)]
            assert await asyncio.gather(*(one.post(*delivery) for delivery in deliveries)) == [200] * 50
        await until(lambda: one.outcomes() == {"gate poked": 300}, "all are counted")
        took_s = time.monotonic() - started
    assert len([message for message in heard if "pong" not in message]) <= took_s / 0.2 + 3
    assert len(set(one.sink.poked)) == len(one.sink.poked) == 300


async def test_a_process_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """Killed, it is told of, counted, and followed by another at the same address; what was known of refusals is not
    forgotten by its death.
    """
    monkeypatch.setattr(webhookprocess, "FIRST_PAUSE_S", 0.05)
    async with dock() as one:
        first, port = one.process.pid, one.process.port
        assert await one.post(*signed(key=STRANGER)) == 401
        in_a_row = ("webhooks_refused_in_a_row", (("account", "gate"),))
        await until(lambda: one.telemetry.gauges[in_a_row] == 1, "the refusal is known")
        os.kill(first, signal.SIGKILL)
        await until(lambda: one.telemetry.total("webhook_process_ends") == 1, "its end is noticed")
        assert one.telemetry.gauges["webhook_process_is_up", ()] == 0
        await until(one.process.is_up.is_set, "another is up")
        assert (one.process.port, one.process.status()["ends"]) == (port, 1)
        assert one.process.pid != first
        await one.client.aclose()
        one.client = httpx.AsyncClient(timeout=20)
        assert await one.post(*signed(key=STRANGER)) == 401
        await until(lambda: one.telemetry.gauges[in_a_row] == 2, "both refusals are known")
        assert await one.post(*signed()) == 200
    (event,) = one.telemetry.named("webhook_process_ended")
    assert (event["reason"], event["exit_code"], event["pause_s"]) == ("ended", -signal.SIGKILL, 0.05)
    assert len(one.telemetry.named("webhooks_listening")) == 2


async def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """One that answers nothing for three beats is killed."""
    monkeypatch.setattr(webhookprocess, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(webhookprocess, "BEAT_S", 0.1)
    monkeypatch.setattr(webhookprocess, "MAX_SILENT_BEATS", 600)  # its start takes longer than three of these beats
    async with dock() as one:
        pid = one.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(webhookprocess, "MAX_SILENT_BEATS", 3)
        await until(lambda: bool(one.telemetry.named("webhook_process_ended")), "its silence is noticed")
        assert one.telemetry.named("webhook_process_ended")[0]["reason"] == "silent"
        assert not is_alive(pid)


async def test_one_that_cannot_start_is_an_alarm(monkeypatch: pytest.MonkeyPatch):
    """It is tried again after growing pauses, and five ends in a row raise the alarm."""
    monkeypatch.setattr(webhookprocess, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(webhookprocess, "sys", type("Sys", (), {"executable": "/bin/false"}))
    one = Dock()
    await one.process.start()
    try:
        await until(lambda: one.telemetry.total("alarms", what="webhook_process_failing") == 1, "the alarm")
    finally:
        await one.process.stop()
        await one.client.aclose()
    pauses = [event["pause_s"] for event in one.telemetry.named("webhook_process_ended")]
    assert pauses[:5] == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert one.telemetry.named("webhook_process_failing")[0] == {"ends": 5}


async def test_an_orderly_stop_leaves_nothing():
    """The last counts arrive, the process is gone and the port is free; nobody is told of a death."""
    async with dock(bounds=Bounds(sheet_pause_s=3600)) as one:
        pid, port = one.process.pid, one.process.port
        assert pid is not None
        assert await one.post(*signed(key=STRANGER)) == 401
        await one.process.stop(20)
        assert one.outcomes() == {"gate bad_signature": 1}
        assert not is_alive(pid)
        await one.process.stop()
        again = webhookprocess.listen("127.0.0.1", port, "webhook", "server.webhook_port")
        again.close()
    assert one.telemetry.named("webhook_process_ended") == []


PARENT = """
import asyncio, sys
from batchferry.clock import SystemClock
from batchferry.config import load_settings
from batchferry.server import WebhookProcess, plans_of
from batchferry.telemetry import RecordingTelemetry

async def main():
    given = {"accounts": {"default": {"api_key": "k", "webhook_secret": "a secret of the tests"}}}
    plans = plans_of(load_settings(None, {}, given, dotenv_path=None).accounts)
    process = WebhookProcess(plans, None, host="127.0.0.1", port=0, clock=SystemClock(), telemetry=RecordingTelemetry())
    await process.start()
    await process.is_up.wait()
    print(process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_it_does_not_outlive_the_service():
    """When the service is killed without a word, the process ends by itself."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(pid), "the process has ended")


async def test_a_rehearsals_time_is_the_processs_time():
    """Deliveries are in time by the service's clock, though that is years from the wall clock and runs faster."""
    origin, started = datetime(2031, 5, 1, tzinfo=UTC), datetime.now(UTC)
    clock = ScaledClock(60.0, origin, started)
    async with dock(clock, rehearsal=Rehearsal(60.0, origin, started)) as one:
        assert await one.post(*signed(at=clock.now())) == 200
        assert await one.post(*signed("batch_2", "msg_2")) == 400
    assert one.outcomes() == {"gate poked": 1, "gate out_of_time": 1}


async def test_doctor_finds_out_whether_it_can_run(monkeypatch: pytest.MonkeyPatch):
    """It is started and stopped at a port of its own; what keeps it from starting is told."""
    plans = plans_of(settings_of().accounts)
    assert await try_webhook_process(plans, SystemClock()) is None
    monkeypatch.setattr(webhookprocess, "sys", type("Sys", (), {"executable": "/no/such/program"}))
    wrong = await try_webhook_process(plans, SystemClock(), 0.5)
    assert wrong == "it did not answer within 0.5 s (not_started, FileNotFoundError)"


async def test_the_service_joins_it(tmp_path: Path):
    """From its start, though no broker answers yet: deliveries go to the process's own port and are asked for again,
    the admin port knows no webhooks, its status shows the process, and the stop ends both.
    """
    closed = webhookprocess.listen("127.0.0.1", 0, "broker", "none")
    server = {"port": 0, "webhook_port": 0}
    nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    closed.close()
    settings = settings_of(server=server, state_dir=str(tmp_path / "state"), kafka={"bootstrap_servers": [nowhere]})
    telemetry = RecordingTelemetry()
    service = Service(settings, telemetry)
    try:
        with pytest.raises(KafkaUnavailable):
            await service.start()
        await until(lambda: bool(telemetry.named("webhooks_listening")), "the process is up")
        assert service.webhook_address != service.admin_address
        headers, body = signed()
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(f"{service.webhook_address}/webhooks/gate", headers=headers, content=body)
            assert answer.status_code == 503
            answer = await client.post(f"{service.admin_address}/webhooks/gate", headers=headers, content=body)
            assert answer.status_code == 404
            shown = (await client.get(f"{service.admin_address}/api/status")).json()["webhooks"]
        assert (shown["state"], shown["ends"]) == ("up", 0)
        assert service.webhook_address == f"http://127.0.0.1:{shown['port']}"
        assert is_alive(shown["pid"])
    finally:
        await service.stop()
    assert not is_alive(shown["pid"])
    assert telemetry.total("webhooks_received", outcome="not_taken") == 1


# -- without a process


async def test_a_taken_port_is_refused_with_the_remedy():
    """Two services on one port: the second says what to set."""
    holder = webhookprocess.listen("127.0.0.1", 0, "webhook", "server.webhook_port")
    one = Dock()
    one.process._port = holder.getsockname()[1]
    try:
        with pytest.raises(GateRefused, match=r"webhook address .* server\.webhook_port"):
            await one.process.start()
    finally:
        holder.close()
        await one.client.aclose()


@pytest.mark.parametrize("auth", ["standard", "hmac", "header", "path"])
def test_a_plan_survives_the_way_and_shows_no_secret(auth: str):
    """What the process is told makes the same hook, and the plan's text holds no secret."""
    secrets = [SECRET, STRANGER] if auth == "standard" else [PLAIN_SECRET, "another_secret-0123456789"]
    header = {"header": "X-Hook", "header_prefix": "v="} if auth in {"hmac", "header"} else {}
    own = {"api_key": "k", "webhook_secret": secrets, "webhook": {"auth": auth, "form": "generic", **header}}
    accounts = settings_of({"gate": own}).accounts
    plan = Plan(plans_of(accounts), Bounds(max_asks=3), Rehearsal(2.0, datetime.now(UTC), datetime.now(UTC)))
    received: list[dict[str, Any]] = []
    link = Link.__new__(Link)
    link._received, link._on_message = bytearray(), received.append
    text = orjson.dumps(plan.plain())
    link._received += len(text).to_bytes(4, "big") + text
    message = link._next()
    assert message is not None
    assert Plan.of_plain(message) == plan
    for secret in (*secrets, *(base64.b64decode(one[6:]).decode() for one in secrets if auth == "standard")):
        assert secret not in repr(plan)
    assert hook_of(accounts["default"]) is None
    assert repr(type(hook_of(accounts["gate"]).auth)) == repr(type(plan.hooks["gate"].hook().auth))  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x01{"])
async def test_nonsense_ends_the_link(text: bytes):
    """A length beyond the bound, something that is no object, and something that is no JSON."""
    link = Link(lambda _message: None)
    link.data_received(text)
    assert isinstance(await link.ended, Exception)


def test_a_sheet_tells_what_single_deliveries_would():
    """Any mixture in one sheet leaves the same counts and the same alarm as the deliveries one by one."""
    story = [
        ("gate", Outcome.BAD_SIGNATURE), ("gate", Outcome.POKED), ("plain", Outcome.BAD_BODY), (None, Outcome.TOO_MANY),
        ("gate", Outcome.BAD_HEADERS), ("gate", Outcome.BAD_HEADERS), ("plain", Outcome.BAD_BODY),
        ("gate", Outcome.TOO_LARGE), ("plain", Outcome.BAD_BODY), (None, Outcome.UNKNOWN_ACCOUNT),
    ]  # fmt: skip
    accounts = settings_of(
        {
            name: {**one, "webhook": {**one.get("webhook", {}), "alarm_rejected": 3, "alarm_quiet_s": 0}}  # type: ignore[dict-item]
            for name, one in ACCOUNTS.items()
        }
    ).accounts
    hooks = {name: plan.hook() for name, plan in plans_of(accounts).items()}
    singly, at_once, sheet = RecordingTelemetry(), RecordingTelemetry(), Sheet()
    tally = WebhookTally(hooks, SystemClock(), singly)
    for account, outcome in story:
        for one in (tally, sheet):
            if outcome.is_refusal:
                one.refused(account, outcome)
            else:
                one.taken(str(account), outcome)
    plain = json.loads(json.dumps(sheet.plain()))
    WebhookTally(hooks, SystemClock(), at_once).add(Sheet.of_plain(plain))
    assert at_once.counters == singly.counters
    assert at_once.gauges == singly.gauges
    (alarm,) = singly.named("webhooks_all_refused")
    assert alarm["account"] == "plain"
    assert at_once.named("webhooks_all_refused") == [alarm]


@pytest.mark.parametrize(("given", "is_wrong"), [({}, False), ({"port": 9}, True), ({"webhooks": "in_process"}, False)])
def test_one_port_cannot_be_both(given: dict[str, Any], is_wrong: bool):
    """The admin address and the webhook process need different ports, unless both take free ones."""
    port = given.get("port", 0) or (9 if given else 0)
    server = {"port": port, "webhook_port": port, **{k: v for k, v in given.items() if k != "port"}}
    if is_wrong:
        with pytest.raises(ConfigError, match=r"server\.webhook_port: 9 is server\.port as well"):
            settings_of(server=server)
    else:
        settings_of(server=server)
    assert settings_of({}, server={"port": 9, "webhook_port": 9}).server.webhooks == "own_process"
