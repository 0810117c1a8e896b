"""The webhook address: what is believed, what is refused, and that nothing but a batch's name goes on."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchferry.config import Settings, load_settings
from batchferry.config.values import webhook_key
from batchferry.domain.errors import ConfigError, KafkaUnavailable
from batchferry.server import make_app, webhook_routes, webhooks
from batchferry.server.webhookauth import StandardAuth
from batchferry.telemetry import RecordingTelemetry

SECRET = "whsec_b25seS1mb3ItdGVzdHMtMDEyMzQ1Njc4OWFiY2RlZiE="
NOW = 1_760_000_000
OLD = (
    {
        "webhook-id": "wh_test_1",
        "webhook-timestamp": "1000000000",
        "webhook-signature": "v1,rXMTrpcOJ2wwFfsN7Tsw6yUVZyX/5vHvaPg0xwdU3K4=",
    },
    b'{"id":"evt_test_0001","object":"event","created_at":1000000000,"type":"batch.completed","data":{"id":"batch_test_01"}}',
)
CURRENT = (
    {
        "webhook-id": "wh_test_2",
        "webhook-timestamp": "1760000000",
        "webhook-signature": "v1,24Ki+BN7NrriBgdnhrjvGUmtIG1DkHIwKp2nLF4pHTg=",
    },
    b'{"id":"evt_test_0002","object":"event","created_at":1760000000,"type":"batch.completed","data":{"id":"batch_test_02"}}',
)


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
    """Knows the batches of ``live``; keeps what it was asked."""

    def __init__(self) -> None:
        self.poked: list[tuple[str, str]] = []
        self.live = {"batch_test_02"}
        self.error: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()

    async def poke(self, account: str, provider_batch_id: str) -> bool:
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.poked.append((account, provider_batch_id))
        return provider_batch_id in self.live


class Nothing:
    """No health, no pages."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Bench:
    """An application with the route, its clock and its sink. ``default`` and ``second`` have secrets."""

    def __init__(self, **otherwise: Any) -> None:
        self.clock, self.sink, self.telemetry = SetClock(), Sink(), RecordingTelemetry()
        hooks = {
            "default": webhooks.Hook(StandardAuth([webhook_key(SECRET)])),
            "second": webhooks.Hook(StandardAuth([webhook_key("a second raw secret")])),
        }
        routes = webhook_routes(hooks, self.sink, clock=self.clock, telemetry=self.telemetry, **otherwise)
        app = make_app(Nothing(), bytes, Nothing(), telemetry=self.telemetry, token="admin", extra_routes=routes)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def post(self, headers: Any, body: Any, account: str = "default") -> int:
        """The status of a delivery."""
        answer = await self.client.post(f"/webhooks/{account}", headers=headers, content=body)
        assert answer.status_code < 300 or "error" in answer.json()
        return answer.status_code

    def outcomes(self) -> dict[str, float]:
        """How often each outcome was counted."""
        found: dict[str, float] = {}
        for (name, labels), value in self.telemetry.counters.items():
            if name == "webhooks_received":
                outcome = dict(labels)["outcome"]
                found[outcome] = found.get(outcome, 0) + value
        return found


def signed(
    body: bytes | str = b'{"data":{"id":"batch_test_02"}}',
    delivery_id: str = "wh_9",
    at: int | str = NOW,
    key: bytes | None = None,
) -> tuple[dict[str, str], bytes]:
    """A delivery signed by hand, not by the code that checks it."""
    raw = body.encode() if isinstance(body, str) else body
    mac = hmac.digest(webhook_key(SECRET) if key is None else key, f"{delivery_id}.{at}.".encode() + raw, "sha256")
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(at),
        "webhook-signature": "v1," + base64.b64encode(mac).decode(),
    }, raw


async def test_b13_old_repeated_and_changed_deliveries():
    """A validly signed old one and a changed one are refused without effect; the current one, delivered twice, is
    answered 2xx twice and acted upon once.
    """
    bench = Bench()
    assert await bench.post(*OLD) == 400
    headers, body = CURRENT
    assert await bench.post(headers, body.replace(b"batch_test_02", b"batch_test_99")) == 401
    assert bench.sink.poked == []
    assert await bench.post(*CURRENT) == 200
    bench.clock.pass_s(3)
    assert await bench.post(*CURRENT) == 200
    assert bench.sink.poked == [("default", "batch_test_02")]
    assert bench.outcomes() == {"out_of_time": 1, "bad_signature": 1, "poked": 1, "duplicate": 1}


async def test_the_vector_of_the_official_client():
    """A delivery that the provider's own library accepts is accepted."""
    key = webhook_key("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    hooks = {"default": webhooks.Hook(StandardAuth([key]))}
    bench = Bench()
    bench.clock.at = datetime.fromtimestamp(1_750_000_000, UTC)
    routes = webhook_routes(hooks, bench.sink, clock=bench.clock, telemetry=bench.telemetry)
    app = make_app(Nothing(), bytes, Nothing(), telemetry=bench.telemetry, extra_routes=routes)
    bench.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    headers = {
        "webhook-id": "wh_test_1",
        "webhook-timestamp": "1750000000",
        "webhook-signature": "v1,oQx5DvWs442HD2Eywd36gwbM3rdAe7ePAbc2GIKazvw=",
    }
    body = (
        b'{"id":"evt_1","object":"event","created_at":1750000000,"type":"batch.completed","data":{"id":"batch_abc123"}}'
    )
    assert await bench.post(headers, body) == 200
    assert bench.sink.poked == [("default", "batch_abc123")]


@pytest.mark.parametrize(("off_s", "status"), [(-301, 400), (-300, 200), (0, 200), (300, 200), (301, 400)])
async def test_the_age_is_checked_both_ways_by_the_service_clock(off_s: int, status: int):
    """Five minutes early or late is taken, a second more is not."""
    bench = Bench()
    assert await bench.post(*signed(at=NOW + off_s)) == status
    assert len(bench.sink.poked) == (status == 200)


@pytest.mark.parametrize(
    "timestamp", ["", "soon", "1760000000.0", "01760000000", "-1760000000", "9" * 13, "１７６０００００００".encode()]
)
async def test_odd_timestamps_are_refused(timestamp: Any):
    """Only the plain number that was signed is a timestamp; nothing overflows."""
    bench = Bench()
    headers, body = signed()
    assert await bench.post({**headers, "webhook-timestamp": timestamp}, body) == 400
    assert bench.sink.poked == []


@pytest.mark.parametrize("left_out", ["webhook-id", "webhook-timestamp", "webhook-signature"])
async def test_each_header_is_needed(left_out: str):
    """Without one of the three there is nothing to check."""
    bench = Bench()
    headers, body = signed()
    del headers[left_out]
    assert await bench.post(headers, body) == 400
    assert bench.sink.poked == []


async def test_an_id_with_a_full_stop_is_refused():
    """The full stop separates what is signed: an id with one could move the borders."""
    bench = Bench()
    assert await bench.post(*signed(delivery_id="wh.9")) == 400
    assert await bench.post(*signed(delivery_id="w" * 257)) == 400
    assert await bench.post(*signed(delivery_id="w" * 256)) == 200


async def test_any_one_of_several_signatures_is_enough():
    """While a secret is replaced the provider signs with both; unknown versions are passed over; the number is bounded."""
    bench = Bench()
    headers, body = signed()
    good = headers["webhook-signature"]
    other, _ = signed(key=b"another key of theirs")
    many = f"v1a,abc {other['webhook-signature']} {good}"
    assert await bench.post({**headers, "webhook-signature": many}, body) == 200
    for bad in (other["webhook-signature"], good.removeprefix("v1,"), good[:-1], "v2" + good[2:], "v1,", "é".encode()):
        assert await bench.post({**headers, "webhook-signature": bad}, body) == 401, bad
    assert await bench.post({**headers, "webhook-signature": f"{good} " * 17}, body) == 400


@pytest.mark.parametrize("place", ["id", "timestamp", "body"])
async def test_everything_signed_is_bound(place: str):
    """Another id, another timestamp within the tolerance, or white space in the body: the signature does not fit."""
    bench = Bench()
    headers, body = signed()
    if place == "id":
        headers["webhook-id"] = "wh_10"
    elif place == "timestamp":
        headers["webhook-timestamp"] = str(NOW + 1)
    else:
        body = json.dumps(json.loads(body)).encode()
    assert await bench.post(headers, body) == 401
    assert bench.sink.poked == []


async def test_accounts_have_secrets_of_their_own():
    """One account's secret signs nothing for another; an account without a secret looks like none at all."""
    bench = Bench()
    assert await bench.post(*signed(), account="second") == 401
    raw = signed(key=b"a second raw secret")
    assert await bench.post(*raw, account="second") == 200
    assert await bench.post(*raw, account="default") == 401
    assert bench.sink.poked == [("second", "batch_test_02")]
    for account in ("no-secret", "other", "%20", "x" * 5000):
        assert await bench.post(*signed(), account=account) == 404
    assert bench.telemetry.total("webhooks_received", account="other", outcome="unknown_account") == 4


async def test_one_delivery_id_of_two_accounts_is_two_deliveries():
    """Ids are told apart by account."""
    bench = Bench()
    assert await bench.post(*signed()) == 200
    assert await bench.post(*signed(key=b"a second raw secret"), account="second") == 200
    assert [account for account, _ in bench.sink.poked] == ["default", "second"]


async def test_the_content_is_not_taken_for_the_result():
    """Type, counts and whatever else are its sender's word: only the batch's name goes on, of any kind of event."""
    bench = Bench()
    for number, kind in enumerate(("batch.completed", "batch.failed", "response.completed", "", None, ["x"])):
        event = {"type": kind, "status": "completed", "data": {"id": "batch_test_02", "output_file_id": "file-1"}}
        assert await bench.post(*signed(json.dumps(event), f"wh_{number}")) == 200
    assert bench.sink.poked == [("default", "batch_test_02")] * 6


@pytest.mark.parametrize(
    "body",
    [
        b"", b"no json", b"null", b"[]", b'"batch_1"', b"{}", b'{"data":null}', b'{"data":[]}', b'{"data":{}}',
        b'{"data":{"id":null}}', b'{"data":{"id":7}}', b'{"data":{"id":""}}', b'{"data":{"id":"a/b"}}',
        b'{"data":{"id":"../x"}}', b'{"data":{"id":"a b"}}', b'{"data":{"id":"b\\u0000"}}', b'{"data":{"id":"b\\n"}}',
        b'{"data":{"id":"\xc3\xa9"}}', b'{"data":{"id":"%b"}}' % (b"b" * 257), b'{"data":{"id":"\xff"}}',
        b"[" * 5000 + b"]" * 5000,
    ],
)  # fmt: skip
async def test_a_signed_body_that_names_no_batch_is_refused(body: bytes):
    """Whatever it holds instead of a batch's name, it is a 400 without effect; its repetition is refused as well."""
    bench = Bench()
    assert await bench.post(*signed(body)) == 400
    assert await bench.post(*signed(body)) == 400
    assert bench.sink.poked == []
    assert bench.outcomes() == {"bad_body": 2}


async def test_the_signature_is_checked_before_the_body_is_read_as_json():
    """An unsigned body that is not JSON is told nothing about its form."""
    bench = Bench()
    headers, _ = signed()
    assert await bench.post(headers, b"{no json") == 401


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_large_body_is_not_read_to_its_end(says_so: bool):
    """Beyond 64 KiB it is a 413, whether the length is stated or found out while reading."""
    bench = Bench()
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1_000_000:
            sent += 1000
            yield b"x" * 1000

    headers, _ = signed()
    if says_so:
        assert await bench.post(headers, b"x" * (webhooks.MAX_BODY_BYTES + 1)) == 413
    else:
        assert await bench.post(headers, endless()) == 413
    limit = b'{"data":{"id":"batch_test_02"}}'.ljust(webhooks.MAX_BODY_BYTES)
    assert await bench.post(*signed(limit)) == 200
    assert bench.outcomes() == {"too_large": 1, "poked": 1}


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    """A client that sends nothing is let go after the limit."""
    monkeypatch.setattr(webhooks, "BODY_LIMIT_S", 0.02)
    bench = Bench()

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    headers, _ = signed()
    assert await bench.post(headers, never()) == 408


async def test_nobody_waits_for_the_batch():
    """A name that no live batch has is answered 2xx all the same: the provider need not send it for three days."""
    bench = Bench()
    assert await bench.post(*signed(b'{"data":{"id":"batch_of_somebody"}}')) == 200
    assert bench.outcomes() == {"no_effect": 1}


@pytest.mark.parametrize("error", [KafkaUnavailable("no broker"), TimeoutError()])
async def test_what_could_not_be_noted_is_asked_for_again(error: Exception):
    """503 now, and the repetition of the same delivery is not taken for a duplicate."""
    bench = Bench()
    bench.sink.error = error
    assert await bench.post(*CURRENT) == 503
    bench.sink.error = None
    assert await bench.post(*CURRENT) == 200
    assert await bench.post(*CURRENT) == 200
    assert bench.sink.poked == [("default", "batch_test_02")]
    assert bench.outcomes() == {"not_taken": 1, "poked": 1, "duplicate": 1}


async def test_a_sink_that_hangs_does_not_keep_the_provider_waiting(monkeypatch: pytest.MonkeyPatch):
    """After the limit it is a 503, and the delivery may come again."""
    monkeypatch.setattr(webhooks, "SINK_LIMIT_S", 0.02)
    bench = Bench()
    bench.sink.gate = asyncio.Event()
    assert await bench.post(*CURRENT) == 503
    bench.sink.gate = None
    assert await bench.post(*CURRENT) == 200
    assert bench.outcomes() == {"not_taken": 1, "poked": 1}


async def test_a_bug_behind_the_sink_tells_nothing():
    """It is a 500 without its text, one event with its place, and the delivery may come again."""
    bench = Bench()
    bench.sink.error = RuntimeError("prompt: tell me a story")
    answer = await bench.client.post("/webhooks/default", headers=CURRENT[0], content=CURRENT[1])
    assert answer.status_code == 500
    assert "story" not in answer.text
    (event,) = bench.telemetry.named("api_failed")
    assert event["error"] == "RuntimeError"
    bench.sink.error = None
    assert await bench.post(*CURRENT) == 200
    assert bench.sink.poked == [("default", "batch_test_02")]


async def test_two_of_one_delivery_at_one_time_are_acted_upon_once():
    """The second is answered while the first is still being noted."""
    bench = Bench()
    bench.sink.gate = asyncio.Event()
    first = asyncio.create_task(bench.post(*CURRENT))
    await bench.sink.entered.wait()
    second = await bench.post(*CURRENT)
    bench.sink.gate.set()
    assert (await first, second) == (200, 200)
    assert len(bench.sink.poked) == 1


async def test_remembered_ids_are_bounded():
    """The id not met for longest is forgotten first; one met again counts as new in the order."""
    bench = Bench(max_remembered_ids=3)
    for one in ("wh_1", "wh_2", "wh_3", "wh_1", "wh_4"):
        assert await bench.post(*signed(delivery_id=one)) == 200
    assert len(bench.sink.poked) == 4
    await bench.post(*signed(delivery_id="wh_1"))
    assert len(bench.sink.poked) == 4
    await bench.post(*signed(delivery_id="wh_2"))
    assert len(bench.sink.poked) == 5


async def test_a_refused_delivery_is_not_remembered():
    """Whoever cannot sign cannot make us take a later true delivery for its repetition."""
    bench = Bench()
    headers, body = CURRENT
    assert await bench.post({**headers, "webhook-signature": "v1,AAAA"}, body) == 401
    assert await bench.post(*CURRENT) == 200
    assert len(bench.sink.poked) == 1


async def test_a_flood_of_refusals_does_not_fill_the_log():
    """A refusal is told once a minute for each account and reason; the metric counts every one."""
    bench = Bench()
    headers, body = signed()
    bad = {**headers, "webhook-signature": "v1,AAAA"}
    for _ in range(50):
        await bench.post(bad, body)
        await bench.post(headers, body, account="nobody")
    assert len(bench.telemetry.named("webhook_refused")) == 2
    bench.clock.pass_s(60)
    await bench.post(bad, body)
    assert len(bench.telemetry.named("webhook_refused")) == 3
    assert bench.outcomes() == {"bad_signature": 51, "unknown_account": 50}


async def test_neither_body_nor_secret_nor_signature_is_told():
    """Events and metrics hold the account, the batch's name and the outcome, and nothing else of a delivery."""
    bench = Bench()
    await bench.post(*signed(b'{"data":{"id":"batch_test_02"},"note":"a private word"}'))
    await bench.post({**signed()[0], "webhook-signature": "v1,c2VjcmV0"}, b"a private word")
    await bench.post(*signed(b'{"data":{"id":"a private word"}}', "wh_10"))
    told = repr(bench.telemetry.events) + repr(bench.telemetry.counters)
    for word in ("private", "whsec", SECRET[6:], "c2VjcmV0", "wh_9", "wh_10"):
        assert word not in told
    (event,) = bench.telemetry.named("webhook_received")
    assert event == {"account": "default", "provider_batch_id": "batch_test_02", "outcome": "poked"}


async def test_only_post_is_taken_and_the_admin_token_is_not_asked_for():
    """A provider has no token of ours: its signature is its right."""
    bench = Bench()
    assert (await bench.client.get("/webhooks/default")).status_code == 405
    assert (await bench.client.post("/webhooks")).status_code == 404
    assert await bench.post(*CURRENT) == 200
    assert bench.telemetry.total("http_requests", route="/webhooks/{account}", status="200") == 1


@pytest.mark.parametrize(
    ("secret", "key"),
    [
        (SECRET, b"only-for-tests-0123456789abcdef!"),
        (SECRET.rstrip("="), b"only-for-tests-0123456789abcdef!"),
        ("sixteen bytes ok", b"sixteen bytes ok"),
    ],
)
def test_a_secret_stands_for_its_key(secret: str, key: bytes):
    """Base64 behind the prefix, padded or not; without the prefix the text's own bytes."""
    assert webhook_key(secret) == key


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "short",
        "whsec_",
        "whsec_c2hvcnQ=",
        "whsec_not*base64*at*all*****",
        "whsec_b25seS1mb3ItdGVzdHMtMDEyMzQ1Njc4OWFiY2RlZ",
    ],
)
def test_a_secret_that_signs_nothing_is_refused(secret: str):
    """Empty, short or mangled: whoever guesses the key could sign; the refusal does not quote it."""
    with pytest.raises(ValueError, match=r"base64|at least 16 bytes") as caught:
        webhook_key(secret)
    assert len(secret) < 6 or secret not in str(caught.value)


def load(tmp_path: Path, text: str) -> Settings:
    """Settings from a file and nothing else."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_settings(path, {}, dotenv_path=tmp_path / "none.env")


def test_the_secret_comes_from_a_file_and_is_never_shown(tmp_path: Path):
    """An account's secret may stand in a file; its key is there for the receiver, and no rendering holds it."""
    secret = tmp_path / "hook"
    secret.write_text(f"{SECRET}\n")
    account = f"{{api_key: k, webhook_secret_file: {secret}}}"
    settings = load(tmp_path, f"accounts: {{default: {account}, other: {{api_key: k}}}}")
    assert settings.accounts["default"].webhook_secrets == (SECRET,)
    assert settings.accounts["other"].webhook_secrets == ()
    assert SECRET not in repr(settings) + settings.model_dump_json()


@pytest.mark.parametrize(
    "given", ["webhook_secret: 'whsec_*-no-base64'", "webhook_secret: short", "webhook_secret_file: /nowhere/hook"]
)
def test_an_unusable_secret_is_one_fault_of_the_settings(tmp_path: Path, given: str):
    """Told at the start, under the setting's name and with a remedy, not with the first delivery."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"accounts: {{default: {{api_key: k, {given}}}}}")
    (fault,) = caught.value.faults
    assert fault.startswith("accounts.default.webhook_secret")
    assert "no-base64" not in fault
