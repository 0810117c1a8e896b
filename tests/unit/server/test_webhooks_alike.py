"""Webhooks of every sender: rotation, Gemini, gateways that sign and that cannot, alarms and bounds."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchferry.config import load_settings
from batchferry.domain.errors import ConfigError
from batchferry.server import AdminServer, hook_of, make_app, webhook_routes
from batchferry.telemetry import RecordingTelemetry

NOW = 1_760_000_000
OLD_SECRET = "whsec_" + base64.b64encode(b"the key that is being replaced").decode()
NEW_SECRET = "whsec_" + base64.b64encode(b"the key that replaces the other").decode()
PLAIN_SECRET = "plain-secret_0123456789.~"
STRANGER = "a key of nobody we know"


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = datetime.fromtimestamp(NOW, UTC)

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)

    def pass_s(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class Sink:
    """Keeps what it was asked; ``answers`` says what it knows of a batch, True of all others."""

    def __init__(self) -> None:
        self.poked: list[tuple[str, str]] = []
        self.answers: dict[str, bool | None] = {}
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Semaphore(0)

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        if self.gate is not None:
            self.entered.release()
            await self.gate.wait()
        self.poked.append((account, provider_batch_id))
        return self.answers.get(provider_batch_id, True)


class Nothing:
    """No health, no pages."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Bench:
    """The application with the webhooks of the given accounts."""

    def __init__(self, accounts: dict[str, Any], **bounds: Any) -> None:
        settings = load_settings(None, {}, {"accounts": {"default": {"api_key": "k"}, **accounts}}, dotenv_path=None)
        hooks = {name: hook for name, account in settings.accounts.items() if (hook := hook_of(account))}
        self.clock, self.sink, self.telemetry = SetClock(), Sink(), RecordingTelemetry()
        routes = webhook_routes(hooks, self.sink, clock=self.clock, telemetry=self.telemetry, **bounds)
        self.app = make_app(Nothing(), bytes, Nothing(), telemetry=self.telemetry, extra_routes=routes)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def post(self, headers: Any, body: Any, path: str = "gate") -> int:
        """The status of a delivery."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return (await self.client.post(f"/webhooks/{path}", headers=headers, content=content)).status_code

    def outcome(self, name: str) -> float:
        """How often this outcome was counted."""
        return self.telemetry.total("webhooks_received", outcome=name)

    def batches(self) -> list[str]:
        """The batches named to the sink."""
        return [batch for _, batch in self.sink.poked]


def account(**given: Any) -> dict[str, Any]:
    """One account called ``gate``."""
    return {"gate": {"api_key": "k", **given}}


def signed(body: dict[str, Any], *secrets: str, delivery_id: str = "msg_1", at: int = NOW) -> tuple[Any, bytes]:
    """A Standard Webhooks delivery with a signature by each secret, made by hand."""
    raw = json.dumps(body).encode()
    signatures = []
    for secret in secrets:
        key = base64.b64decode(secret[6:]) if secret.startswith("whsec_") else secret.encode()
        mac = hmac.digest(key, f"{delivery_id}.{at}.".encode() + raw, "sha256")
        signatures.append("v1," + base64.b64encode(mac).decode())
    headers = {"webhook-id": delivery_id, "webhook-timestamp": str(at), "webhook-signature": " ".join(signatures)}
    return headers, raw


OPENAI = {"id": "evt_1", "type": "batch.completed", "data": {"id": "batch_1"}}
GENERIC = {"batch_id": "b-1", "status": "completed"}


# -- secrets being replaced


@pytest.mark.parametrize("form", ["list", "lines"])
async def test_any_secret_of_the_account_may_sign(form: str):
    """While a secret is replaced both are listed; the old alone, the new alone, and both at once are believed."""
    secrets: Any = [OLD_SECRET, NEW_SECRET]
    bench = Bench(account(webhook_secret=secrets if form == "list" else "\n".join(secrets)))
    assert await bench.post(*signed(OPENAI, OLD_SECRET, delivery_id="msg_1")) == 200
    assert await bench.post(*signed(OPENAI, NEW_SECRET, delivery_id="msg_2")) == 200
    assert await bench.post(*signed(OPENAI, OLD_SECRET, NEW_SECRET, delivery_id="msg_3")) == 200
    assert await bench.post(*signed(OPENAI, STRANGER, NEW_SECRET, delivery_id="msg_4")) == 200
    assert await bench.post(*signed(OPENAI, STRANGER, delivery_id="msg_5")) == 401
    assert bench.batches() == ["batch_1"] * 4


async def test_one_delivery_signed_twice_by_different_secrets_is_one_delivery():
    """A repetition after the sender has changed its secret is still a repetition."""
    bench = Bench(account(webhook_secret=[OLD_SECRET, NEW_SECRET]))
    assert await bench.post(*signed(OPENAI, OLD_SECRET)) == 200
    assert await bench.post(*signed(OPENAI, NEW_SECRET)) == 200
    assert bench.batches() == ["batch_1"]
    assert bench.outcome("duplicate") == 1


async def test_a_replay_is_known_for_as_long_as_its_signature_is_good():
    """Signed five minutes ahead of our clock and sent again ten minutes later, it has no second effect."""
    bench = Bench(account(webhook_secret=OLD_SECRET))
    delivery = signed(OPENAI, OLD_SECRET, at=NOW + 300)
    assert await bench.post(*delivery) == 200
    bench.clock.pass_s(599)
    assert await bench.post(*delivery) == 200
    bench.clock.pass_s(2)
    assert await bench.post(*delivery) == 400
    assert bench.batches() == ["batch_1"]
    assert (bench.outcome("duplicate"), bench.outcome("out_of_time")) == (1, 1)


async def test_unknown_batches_are_acknowledged_and_counted_by_themselves():
    """Somebody else's batch is a 200 of its own kind, and one just looked at is another; neither fills the log."""
    bench = Bench(account(webhook_secret=OLD_SECRET))
    bench.sink.answers = {"batch_1": None, "batch_2": False}
    assert await bench.post(*signed(OPENAI, OLD_SECRET)) == 200
    assert await bench.post(*signed({"data": {"id": "batch_2"}}, OLD_SECRET, delivery_id="msg_2")) == 200
    assert (bench.outcome("unknown_batch"), bench.outcome("no_effect")) == (1, 1)
    assert bench.telemetry.named("webhook_received") == []


# -- Gemini


@pytest.mark.parametrize("given", ["123456", "batches/123456"])
async def test_a_delivery_of_gemini_names_its_batch(given: str):
    """In the documented envelope, whether or not ``data.id`` begins as the API's own names do."""
    bench = Bench(account(provider="gemini", webhook_secret=OLD_SECRET))
    envelope = {
        "type": "batch.succeeded",
        "version": "v1",
        "timestamp": "2026-01-22T12:00:00Z",
        "data": {"id": given, "output_file_uri": "files/results"},
    }
    assert await bench.post(*signed(envelope, OLD_SECRET)) == 200
    assert bench.batches() == ["batches/123456"]


@pytest.mark.parametrize("given", ["batches/", "batches/a/b", "batches/../x", "files/1", "batches/batches/1"])
async def test_only_one_plain_name_comes_after_the_prefix(given: str):
    """Nothing that could lead a call elsewhere goes on."""
    bench = Bench(account(provider="gemini", webhook_secret=OLD_SECRET))
    assert await bench.post(*signed({"data": {"id": given}}, OLD_SECRET)) == 400
    assert bench.sink.poked == []


async def test_fields_and_prefix_of_any_sender_can_be_set():
    """What a provider's documents leave open is a setting."""
    hook = {"batch_id_field": "data.job.name", "batch_id_prefix": ""}
    bench = Bench(account(provider="gemini", webhook_secret=OLD_SECRET, webhook=hook))
    assert await bench.post(*signed({"data": {"job": {"name": "j1"}}}, OLD_SECRET)) == 200
    assert bench.batches() == ["j1"]


async def test_a_token_by_a_providers_own_key_is_refused():
    """A JWT in the signature's place is signed by a key that nobody here knows."""
    bench = Bench(account(provider="gemini", webhook_secret=OLD_SECRET))
    headers, body = signed({"data": {"id": "1"}}, OLD_SECRET)
    assert await bench.post({**headers, "webhook-signature": "eyJhbGciOiJSUzI1NiJ9.e30.c2ln"}, body) == 401


# -- gateways


async def test_a_gateway_that_signs_by_standard_webhooks():
    """Default fields of the generic form."""
    bench = Bench(account(webhook_secret=OLD_SECRET, webhook={"form": "generic"}))
    assert await bench.post(*signed(GENERIC, OLD_SECRET)) == 200
    assert await bench.post(*signed(OPENAI, OLD_SECRET, delivery_id="msg_2")) == 400
    assert bench.batches() == ["b-1"]


@pytest.mark.parametrize("digest", ["hex", "base64"])
async def test_a_gateway_that_signs_the_body(digest: str):
    """HMAC-SHA256 over the raw body in a header of any name, with what stands before it; nothing else will do."""
    hook = {
        "auth": "hmac", "form": "generic", "header": "X-Hub-Signature-256", "header_prefix": "sha256=", "digest": digest,
    }  # fmt: skip
    bench = Bench(account(webhook_secret=[PLAIN_SECRET, "another secret, with spaces"], webhook=hook))
    raw = json.dumps(GENERIC).encode()

    def header(key: str, body: bytes = raw, prefix: str = "sha256=") -> dict[str, str]:
        mac = hmac.digest(key.encode(), body, "sha256")
        return {"X-Hub-Signature-256": prefix + (mac.hex() if digest == "hex" else base64.b64encode(mac).decode())}

    assert await bench.post(header(PLAIN_SECRET), raw) == 200
    other = raw.replace(b"b-1", b"b-2")
    assert await bench.post(header("another secret, with spaces", other), other) == 200
    for headers, status in (
        (header(STRANGER), 401), (header(PLAIN_SECRET, b"{}"), 401), (header(PLAIN_SECRET, prefix=""), 400),
        (header(PLAIN_SECRET, prefix="sha1="), 400), ({}, 400), ({"X-Hub-Signature-256": "sha256="}, 400),
        ({"X-Hub-Signature-256": "sha256=zz"}, 400), ({"X-Hub-Signature-256": "sha256=é".encode()}, 400),
    ):  # fmt: skip
        assert await bench.post(headers, raw) == status, headers
    assert bench.batches() == ["b-1", "b-2"]


async def test_a_gateway_with_a_secret_in_a_header():
    """The secret behind its prefix is believed; another, a longer one, none at all or one in the address is not."""
    hook = {"auth": "header", "form": "generic", "header": "Authorization", "header_prefix": "Bearer"}
    bench = Bench(account(webhook_secret=[PLAIN_SECRET, "second-secret-0123456789"], webhook=hook))
    assert await bench.post({"Authorization": f"Bearer {PLAIN_SECRET}"}, GENERIC) == 200
    assert await bench.post({"Authorization": "Bearer second-secret-0123456789"}, {"batch_id": "b-2"}) == 200
    for value in ("", PLAIN_SECRET, f"Bearer {PLAIN_SECRET}x", f"Bearer {PLAIN_SECRET[:-1]}", "Bearer ", "Bearer é"):
        assert await bench.post({"Authorization": value.encode()}, GENERIC) == 401, value
    assert await bench.post({}, GENERIC, f"gate/{PLAIN_SECRET}") == 404
    assert bench.batches() == ["b-1", "b-2"]


async def test_a_gateway_with_a_secret_in_the_address():
    """For senders that know nothing but an address; without the secret, or with another, it is a 401."""
    bench = Bench(account(webhook_secret=PLAIN_SECRET, webhook={"auth": "path", "form": "generic"}))
    assert await bench.post({}, GENERIC, f"gate/{PLAIN_SECRET}") == 200
    for path in ("gate", "gate/wrong", f"gate/{PLAIN_SECRET}x", f"gate/{PLAIN_SECRET[:-1]}"):
        assert await bench.post({"x-webhook-secret": PLAIN_SECRET}, GENERIC, path) == 401, path
    assert await bench.post({}, GENERIC, f"nobody/{PLAIN_SECRET}") == 404
    assert await bench.post({}, GENERIC, f"gate/{PLAIN_SECRET}/more") == 404
    assert bench.batches() == ["b-1"]


async def test_without_a_signature_the_same_news_is_looked_at_once_in_five_minutes():
    """Nothing binds a time, so a body that comes again is a repetition, until it may well be news."""
    bench = Bench(account(webhook_secret=PLAIN_SECRET, webhook={"auth": "path", "form": "generic"}))
    for wait_s in (0, 100, 199):
        bench.clock.pass_s(wait_s)
        assert await bench.post({}, GENERIC, f"gate/{PLAIN_SECRET}") == 200
    assert (bench.batches(), bench.outcome("duplicate")) == (["b-1"], 2)
    bench.clock.pass_s(1)
    assert await bench.post({}, GENERIC, f"gate/{PLAIN_SECRET}") == 200
    assert bench.batches() == ["b-1", "b-1"]


@pytest.mark.parametrize(
    ("status", "is_looked_at"),
    [
        ("completed", True),
        ("In_Progress", False),
        ("batch.running", False),
        ("odd word", True),
        (7, True),
        (None, True),
    ],
)
async def test_a_report_of_progress_is_no_reason_to_look(status: Any, is_looked_at: bool):
    """A status that tells of no end is acknowledged; any other, or none, brings the poll forward."""
    bench = Bench(account(webhook_secret=OLD_SECRET, webhook={"form": "generic"}))
    assert await bench.post(*signed({"batch_id": "b-1", "status": status}, OLD_SECRET)) == 200
    assert bool(bench.sink.poked) == is_looked_at
    assert bench.outcome("still_running") == (not is_looked_at)


async def test_a_status_at_another_place_is_understood():
    """Both fields are dotted paths, through objects only."""
    hook = {"form": "generic", "batch_id_field": "job.id", "status_field": "job.state.name", "running_statuses": "busy"}
    bench = Bench(account(webhook_secret=OLD_SECRET, webhook=hook))
    for number, job in enumerate(({"id": "a", "state": {"name": "BUSY"}}, {"id": "b", "state": ["busy"]}, {"id": "c"})):
        assert await bench.post(*signed({"job": job}, OLD_SECRET, delivery_id=f"msg_{number}")) == 200
    assert await bench.post(*signed({"job": [{"id": "d"}]}, OLD_SECRET, delivery_id="msg_9")) == 400
    assert bench.batches() == ["b", "c"]


@pytest.mark.parametrize("auth", ["path", "header"])
async def test_a_shared_secret_is_written_nowhere(auth: str, caplog: pytest.LogCaptureFixture):
    """Right, wrong, met by a bug or by a bad request: no log line of any library, event, metric or answer holds it."""
    hook = {"auth": auth, "form": "generic", "header": "X-Secret"}
    bench = Bench(account(webhook_secret=PLAIN_SECRET, webhook=hook))
    wrong = "wrong-secret-9876543210"
    answers = []

    class Failing(Sink):
        async def poke(self, account: str, provider_batch_id: str) -> bool | None:
            raise RuntimeError("a bug")

    failing = Bench(account(webhook_secret=PLAIN_SECRET, webhook=hook))
    failing.sink.poke = Failing().poke  # type: ignore[method-assign]
    caplog.set_level(logging.DEBUG)
    for one in (bench, failing):
        server = AdminServer("127.0.0.1", 0, one.app)
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=server.address) as client:
                caplog.clear()
                logging.getLogger("httpx").setLevel(logging.WARNING)  # the client's own lines are not the service's
                logging.getLogger("httpcore").setLevel(logging.WARNING)
                for secret in (PLAIN_SECRET, wrong):
                    path = f"/webhooks/gate/{secret}" if auth == "path" else "/webhooks/gate"
                    headers = {"X-Secret": secret} if auth == "header" else {}
                    contents = (json.dumps(GENERIC), "no json", json.dumps({"batch_id": secret + "/"}))
                    answers += [await client.post(path, content=content, headers=headers) for content in contents]
                    answers.append(await client.get(path, headers=headers))
                    answers.append(await client.post(path + "/more", headers=headers))
        finally:
            await server.stop()
        told = caplog.text + repr(one.telemetry.events) + repr(one.telemetry.counters) + repr(one.telemetry.gauges)
        assert "gate" in told
        assert PLAIN_SECRET not in told
        assert wrong not in told
    assert {answer.status_code for answer in answers} == {200, 400, 401, 404, 405, 500}
    for answer in answers:
        assert PLAIN_SECRET not in answer.text + repr(answer.headers)
        assert wrong not in answer.text + repr(answer.headers)


# -- alarms


async def test_a_secret_replaced_on_one_side_is_an_alarm():
    """Five refused, none taken for a quarter of an hour: one error event and one alarm; a delivery taken ends it."""
    bench = Bench(account(webhook_secret=OLD_SECRET))
    assert await bench.post(*signed(OPENAI, OLD_SECRET)) == 200
    for minute in range(15):
        bench.clock.pass_s(60)
        at = int(bench.clock.now().timestamp())
        assert await bench.post(*signed(OPENAI, NEW_SECRET, delivery_id=f"lost_{minute}", at=at)) == 401
        assert len(bench.telemetry.named("webhooks_all_refused")) == (minute == 14)
    (alarm,) = bench.telemetry.named("webhooks_all_refused")
    assert alarm == {"account": "gate", "outcome": "bad_signature", "refused": 15, "quiet_s": 900}
    assert bench.telemetry.total("alarms", what="webhooks_all_refused") == 1
    assert bench.telemetry.gauges["webhooks_refused_in_a_row", (("account", "gate"),)] == 15
    at = int(bench.clock.now().timestamp())
    assert await bench.post(*signed(OPENAI, OLD_SECRET, delivery_id="found", at=at)) == 200
    assert bench.telemetry.named("webhooks_taken_again") == [{"account": "gate"}]
    assert bench.telemetry.gauges["webhooks_refused_in_a_row", (("account", "gate"),)] == 0


async def test_strangers_raise_no_alarm_while_deliveries_are_taken():
    """A hundred refusals between two that are taken, and any number for accounts without a webhook, alarm nobody."""
    bench = Bench(account(webhook_secret=OLD_SECRET))
    bench.clock.pass_s(3600)
    at = int(bench.clock.now().timestamp())
    assert await bench.post(*signed(OPENAI, OLD_SECRET, at=at)) == 200
    for number in range(100):
        assert await bench.post(*signed(OPENAI, STRANGER, delivery_id=f"x_{number}", at=at)) == 401
        assert await bench.post({}, OPENAI, "nobody") == 404
    assert bench.telemetry.named("webhooks_all_refused") == []


async def test_wrong_fields_are_an_alarm_as_well():
    """Signed deliveries of which none names a batch where the settings look for it are refused one and all."""
    bench = Bench(account(webhook_secret=OLD_SECRET, webhook={"form": "generic", "alarm_rejected": 2}))
    bench.clock.pass_s(900)
    at = int(bench.clock.now().timestamp())
    for number in range(3):
        assert await bench.post(*signed(OPENAI, OLD_SECRET, delivery_id=f"m_{number}", at=at)) == 400
    (alarm,) = bench.telemetry.named("webhooks_all_refused")
    assert alarm["outcome"] == "bad_body"


# -- bounds


async def test_too_many_at_one_time_are_turned_away():
    """Beyond the bound it is a 503 with a time to come back, and the places come free again."""
    bench = Bench(account(webhook_secret=OLD_SECRET), max_concurrent=2)
    bench.sink.gate = asyncio.Event()
    held = [
        asyncio.create_task(bench.post(*signed(OPENAI, OLD_SECRET, delivery_id=f"msg_{number}"))) for number in range(2)
    ]
    async with asyncio.timeout(5):
        await bench.sink.entered.acquire()
        await bench.sink.entered.acquire()
    third = signed(OPENAI, OLD_SECRET, delivery_id="msg_3")
    answer = await bench.client.post("/webhooks/gate", headers=third[0], content=third[1])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    bench.sink.gate.set()
    assert await asyncio.gather(*held) == [200, 200]
    assert await bench.post(*third) == 200
    assert bench.outcome("too_many") == 1


async def test_too_many_in_a_second_are_turned_away():
    """A flood beyond the rate costs no signature; it is no refusal that alarms, and the others come again."""
    bench = Bench(account(webhook_secret=OLD_SECRET, webhook={"alarm_rejected": 1, "alarm_quiet_s": 0}), max_per_s=5)
    statuses = [await bench.post(*signed(OPENAI, OLD_SECRET, delivery_id=f"msg_{number}")) for number in range(30)]
    assert statuses[:5] == [200] * 5
    assert statuses.count(503) >= 20
    assert bench.telemetry.named("webhooks_all_refused") == []


# -- settings


def faults_of(**given: Any) -> list[str]:
    """What the settings say to an account."""
    with pytest.raises(ConfigError) as caught:
        Bench(account(**given))
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("secret", "auth", "word"),
    [
        ("short", "path", "16 bytes"), ("a secret with spaces", "path", "letters"), ("a/secret/of/several", "path", "letters"),
        ("..0123456789012345", "path", "letters"), ("a secret with spaces", "header", "letters"), ("short", "hmac", "16 bytes"),
        ("whsec_*-no-base64", "standard", "base64"), ([OLD_SECRET, OLD_SECRET], "standard", "twice"), ([], "path", "16 bytes"),
        ([f"secret-number-{number:04}" for number in range(9)], "path", "at most 8"),
    ],
)  # fmt: skip
def test_a_secret_that_does_not_fit_its_use_is_one_fault(secret: Any, auth: str, word: str):
    """Told at the start under the setting's name, with a remedy and without the secret."""
    (fault,) = faults_of(webhook_secret=secret, webhook={"auth": auth})
    assert fault.startswith("accounts.gate.webhook_secret")
    assert word in fault
    for one in [secret] if isinstance(secret, str) else secret[:1]:
        assert one not in fault


@pytest.mark.parametrize("field", ["", "a..b", ".a", "a.", "a b", "a[0]"])
def test_a_field_is_names_with_dots_between(field: str):
    """Anything else would never be found in a body."""
    (fault,) = faults_of(webhook={"batch_id_field": field})
    assert fault.startswith("accounts.gate.webhook.batch_id_field")


def test_secrets_of_a_file_are_one_a_line(tmp_path: Path):
    """A mounted file is rotated by a second line."""
    path = tmp_path / "hooks"
    path.write_text(f"{OLD_SECRET}\n\n  {NEW_SECRET}  \n")
    given = {"accounts": {"default": {"api_key": "k", "webhook_secret_file": str(path)}}}
    settings = load_settings(None, {}, given, dotenv_path=None)
    assert settings.accounts["default"].webhook_secrets == (OLD_SECRET, NEW_SECRET)
    assert OLD_SECRET[6:] not in repr(settings) + settings.model_dump_json()


def test_an_account_without_a_secret_has_no_webhook():
    """Whatever else is set for it."""
    settings = load_settings(
        None, {}, {"accounts": {"default": {"api_key": "k", "webhook": {"auth": "path"}}}}, dotenv_path=None
    )
    assert hook_of(settings.accounts["default"]) is None
