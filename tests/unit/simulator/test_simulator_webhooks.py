"""Webhooks of the simulated providers, taken by the receiver that they are meant for: form by form, fault by fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import standardwebhooks
from sim_kit import Bench, bench, jsonl, line, rows
from starlette.applications import Starlette

from batchferry.config import AccountSettings
from batchferry.domain.errors import ConfigError
from batchferry.server import hook_of, webhook_routes
from batchferry.simulator import (
    DEFAULT_KEY,
    BatchRule,
    JobError,
    ManualSimClock,
    Scenario,
    webhooks,
    with_webhooks,
)
from batchferry.simulator.scenario import WebhookScript
from batchferry.telemetry import RecordingTelemetry

SIGNED = "whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0"
PLAIN = "a-plain-secret-of-letters-and-digits-0123"
LONG_S = 6 * 3600.0
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Way:
    """An API, how its webhooks come, and the settings of the account that takes them."""

    api: str
    account: dict[str, Any] = field(default_factory=dict)
    script: dict[str, Any] = field(default_factory=dict)
    secret: str = SIGNED

    @property
    def has_time(self) -> bool:
        return self.script.get("auth", "standard") == "standard"


def gateway(auth: str, **members: str) -> Way:
    """A gateway that proves itself so."""
    both: dict[str, Any] = {"form": "generic", "auth": auth, **members}
    return Way("openai", {"webhook": both}, dict(both), SIGNED if auth == "standard" else PLAIN)


WAYS = {
    "openai": Way("openai"),
    "azure": Way("azure"),
    "gemini": Way("gemini", {"provider": "gemini"}),
    "gateway-signed": gateway("standard"),
    "gateway-hmac": gateway("hmac"),
    "gateway-hmac-base64": gateway("hmac", digest="base64", header="x-hub-signature-256", header_prefix="sha256="),
    "gateway-header": gateway("header"),
    "gateway-bearer": gateway("header", header="authorization", header_prefix="Bearer "),
    "gateway-path": gateway("path"),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Quay:
    """A simulator, and a receiver that knows every batch of it."""

    def __init__(self, way: Way, it: Bench) -> None:
        self.way, self.it = way, it
        self.telemetry = RecordingTelemetry()
        self.poked: list[str] = []
        account = AccountSettings.model_validate({**way.account, "webhook_secret": way.secret})
        hook = hook_of(account)
        assert hook is not None
        routes = webhook_routes({"a": hook}, self, clock=self, telemetry=self.telemetry)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=list(routes))))

    def now(self) -> datetime:
        return self.it.clock.now()

    def monotonic(self) -> float:
        return self.it.clock.timestamp()

    async def poke(self, account: str, provider_batch_id: str) -> bool:
        assert account == "a"
        self.poked.append(provider_batch_id)
        return True

    async def post(self, url: str, headers: dict[str, str], content: bytes) -> int:
        """Stands for the network."""
        return (await self.http.post(url, headers=headers, content=content)).status_code

    async def end(self, batches: int = 1) -> list[str]:
        """So many jobs of one row, ended one after the other; their names as their API has them."""
        names = []
        for _ in range(batches):
            names.append(await self.make())
            self.it.clock.advance(LONG_S)
            await self.it.simulator.settle()
        return names

    async def make(self) -> str:
        """A job of one row; its name as its API has it."""
        if self.way.api == "gemini":
            return await self._make_gemini()
        root = {"openai": "/v1", "azure": "/openai/v1"}[self.way.api]
        row = line("r1") if self.way.api == "openai" else line("r1", url="/chat/completions")
        made = await self.it.http.post(
            f"{root}/files", files={"file": ("in.jsonl", jsonl([row]))}, data={"purpose": "batch"}
        )
        wanted = {"input_file_id": made.json()["id"], "endpoint": row["url"], "completion_window": "24h"}
        return str((await self.it.http.post(f"{root}/batches", json=wanted)).json()["id"])

    async def _make_gemini(self) -> str:
        http, key = self.it.http, {"x-goog-api-key": DEFAULT_KEY}
        start = {"x-goog-upload-protocol": "resumable", "x-goog-upload-command": "start"}
        begun = await http.post("/upload/v1beta/files", headers=key | start)
        content = jsonl([{"key": "r1", "request": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}}])
        rest = {"x-goog-upload-command": "upload, finalize", "x-goog-upload-offset": "0"}
        file = (await http.post(begun.headers["x-goog-upload-url"], headers=rest, content=content)).json()["file"][
            "name"
        ]
        wanted = {"batch": {"displayName": "mine", "inputConfig": {"fileName": file}}}
        made = await http.post("/v1beta/models/gemini-2.5-flash:batchGenerateContent", json=wanted, headers=key)
        return str(made.json()["name"])

    async def told(self, tries: int) -> list[int]:
        """The answers to so many tries, and that no more come of what has happened."""
        async with asyncio.timeout(20):
            while len(self.it.simulator.deliveries) < tries:
                self.it.clock.advance(5)
                await asyncio.sleep(0.001)
        self.it.clock.advance(LONG_S)
        await asyncio.sleep(0.02)
        assert len(self.it.simulator.deliveries) == tries
        return [one.status for one in self.it.simulator.deliveries]

    @property
    def counted(self) -> dict[str, float]:
        """How often the receiver came to each outcome."""
        found = {
            dict(labels)["outcome"]: count
            for (name, labels), count in self.telemetry.counters.items()
            if name == "webhooks_received"
        }
        return dict(sorted(found.items()))


@asynccontextmanager
async def quay(way: Way, patch: pytest.MonkeyPatch, **script: Any) -> AsyncIterator[Quay]:
    """A simulator whose webhooks go to a receiver with the right settings."""
    given = {"url": "http://ferry/webhooks/a", "secret": way.secret, **way.script, **script}
    async with bench(Scenario(webhooks=WebhookScript.model_validate(given))) as it:
        made = Quay(way, it)
        patch.setattr(webhooks, "_post", made.post)
        yield made
        await made.http.aclose()


@every_way
async def test_a_delivery_is_taken_and_names_the_batch(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form is believed by an account set up for it, and brings forward the poll of the batch by its own name."""
    async with quay(way, monkeypatch) as it:
        names = await it.end(2)
        assert await it.told(2) == [200, 200]
        # A webhook's tasks run side by side, so two that are due at once may change places.
        assert sorted(it.poked) == sorted(names)
        assert it.counted == {"poked": 2}
        assert sorted(one.batch_id for one in it.it.simulator.deliveries) == sorted(names)


@every_way
async def test_a_forged_delivery_is_refused_and_the_true_one_taken(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key, another secret or another address: 401, whatever the way of proof."""
    async with quay(way, monkeypatch, forge_every=1) as it:
        names = await it.end()
        assert await it.told(2) == [401, 200]
        assert [one.is_forged for one in it.it.simulator.deliveries] == [True, False]
        assert it.poked == names
        assert it.counted == {"bad_signature": 1, "poked": 1}


@every_way
async def test_a_doubled_delivery_is_acknowledged_and_looked_at_once(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one gets its 200, so that it does not come again, and changes nothing."""
    async with quay(way, monkeypatch, double_every=1) as it:
        names = await it.end()
        assert await it.told(2) == [200, 200]
        assert it.poked == names
        assert it.counted == {"duplicate": 1, "poked": 1}


@every_way
async def test_deliveries_out_of_order_are_all_taken(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of deliveries means nothing: each is about its own batch."""
    async with quay(way, monkeypatch, hold_every=2, hold_s=9e5) as it:
        names = await it.end(3)
        assert await it.told(3) == [200] * 3
        assert sorted(it.poked) == sorted(names)
        assert it.poked.index(names[2]) < it.poked.index(names[1])


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.has_time])
async def test_a_late_delivery_is_refused_and_the_next_try_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 300 s old by its own time it could be a captured one; tried again it is signed anew."""
    async with quay(WAYS[name], monkeypatch, late_every=1, late_s=301.0) as it:
        names = await it.end()
        assert await it.told(2) == [400, 200]
        assert [one.is_late for one in it.it.simulator.deliveries] == [True, False]
        assert it.poked == names
        assert it.counted == {"out_of_time": 1, "poked": 1}
    async with quay(WAYS[name], monkeypatch, late_every=1, late_s=299.0) as it:
        await it.end()
        assert await it.told(1) == [200]


async def test_progress_of_a_gateway_is_acknowledged_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is on its way is no reason to look; its end is."""
    way = gateway("hmac")
    way.account["webhook"] = way.account["webhook"] | {"running_statuses": ["validating", "in_progress", "finalizing"]}
    async with quay(way, monkeypatch, tells_progress=True) as it:
        names = await it.end()
        assert await it.told(4) == [200] * 4
        assert it.poked == names
        assert it.counted == {"poked": 1, "still_running": 3}


async def test_gemini_envelopes_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type, version, time and a thin ``data``: results by name, a failure with its error, names with and without their prefix."""
    seen: list[dict[str, Any]] = []
    batches = (
        BatchRule(nth=2, fail_with=(JobError(code="server_error", message="Broken."),)),
        BatchRule(nth=3, expire_with_share=0.5),
    )
    hook = WebhookScript.model_validate({"url": "http://ferry/webhooks/a", "secret": SIGNED})
    async with bench(Scenario(webhooks=hook, batches=batches)) as it:
        made = Quay(WAYS["gemini"], it)

        async def post(url: str, headers: dict[str, str], content: bytes) -> int:
            assert {"webhook-id", "webhook-timestamp", "webhook-signature"} <= headers.keys()
            seen.append(json.loads(content))
            return await made.post(url, headers, content)

        monkeypatch.setattr(webhooks, "_post", post)
        names = []
        for _ in range(3):
            names.append(await made.make())
            it.clock.advance(3 * 86_400)
            await it.simulator.settle()
        assert await made.told(3) == [200] * 3
        job = (await it.http.get(f"/v1beta/{names[0]}", headers={"x-goog-api-key": DEFAULT_KEY})).json()
    seen.sort(key=lambda one: one["timestamp"])
    assert [one["type"] for one in seen] == ["batch.succeeded", "batch.failed", "batch.expired"]
    assert all(one.keys() == {"type", "version", "timestamp", "data"} and one["version"] == "v1" for one in seen)
    assert [one["data"]["id"].rpartition("/")[2] for one in seen] == [name.rpartition("/")[2] for name in names]
    assert {one["data"]["id"].startswith("batches/") for one in seen} == {True, False}
    assert sorted(made.poked) == sorted(names), "whatever the form, the name that the API has"
    assert seen[0]["data"]["output_file_uri"] == job["response"]["responsesFile"]
    assert seen[1]["data"] | {"id": ""} == {"id": "", "error_code": 13, "error_message": "Broken."}
    assert seen[2]["data"].keys() == {"id"}


AN_END: tuple[BatchRule, ...] = (
    BatchRule(nth=2, fail_with=(JobError(code="server_error"),)),
    BatchRule(nth=3, expire_with_share=0.5),
)
"""One of four jobs completes, one fails, one expires; the fourth is to be cancelled."""


async def heard(way: Way, patch: pytest.MonkeyPatch, tries: int, **script: Any) -> list[tuple[dict[str, str], bytes]]:
    """Headers and body of each try to tell of four jobs, one of each end, at the true time of day."""
    taken: list[tuple[dict[str, str], bytes]] = []

    async def post(_url: str, headers: dict[str, str], content: bytes) -> int:
        taken.append((headers, content))
        return 200

    patch.setattr(webhooks, "_post", post)
    age = timedelta(days=3)
    hook = WebhookScript.model_validate({"url": "http://ferry/webhooks/a", "secret": SIGNED, **way.script, **script})
    clock = ManualSimClock(datetime.now(UTC) - age)
    async with bench(Scenario(webhooks=hook, batches=AN_END), clock=clock) as it:
        made = Quay(way, it)
        names = [await made.make() for _ in range(4)]
        if way.api == "gemini":
            await it.http.post(f"/v1beta/{names[3]}:cancel", headers={"x-goog-api-key": DEFAULT_KEY})
        else:
            await it.http.post(f"/v1/batches/{names[3]}/cancel")
        clock.advance(age.total_seconds())
        await it.simulator.settle()
        async with asyncio.timeout(20):
            while len(taken) < tries:
                clock.advance(1)
                await asyncio.sleep(0.001)
    return taken


async def test_the_official_library_believes_the_true_deliveries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``client.webhooks.unwrap`` makes the event of each of the four ends; forged and late ones it refuses."""
    client = openai.AsyncOpenAI(
        api_key=DEFAULT_KEY,
        webhook_secret=SIGNED,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),  # no certificates to load: nothing is called
    )
    events = {}
    for headers, content in await heard(WAYS["openai"], monkeypatch, 4):
        event = client.webhooks.unwrap(content, headers)
        assert event.id == headers["webhook-id"]
        events[event.type] = type(event).__name__
    assert events == {
        "batch.completed": "BatchCompletedWebhookEvent",
        "batch.failed": "BatchFailedWebhookEvent",
        "batch.expired": "BatchExpiredWebhookEvent",
        "batch.cancelled": "BatchCancelledWebhookEvent",
    }
    refused = 0
    for headers, content in await heard(WAYS["openai"], monkeypatch, 8, forge_every=1, late_every=2):
        try:
            client.webhooks.unwrap(content, headers)
        except openai.InvalidWebhookSignatureError:
            refused += 1
    assert refused == 6, "four forged ones and two late ones"
    await client.close()


@pytest.mark.parametrize("name", ["gemini", "gateway-signed"])
async def test_the_library_of_the_standard_believes_the_true_deliveries_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's library verifies nothing, so the standard's own stands for it. Gemini tells of no cancel."""
    library, ends = standardwebhooks.Webhook(SIGNED), 3 if name == "gemini" else 4
    seen = [library.verify(content, headers) for headers, content in await heard(WAYS[name], monkeypatch, ends)]
    kinds = {one["type"] if name == "gemini" else one["status"] for one in seen}
    assert kinds == (
        {"batch.succeeded", "batch.failed", "batch.expired"}
        if name == "gemini"
        else {"completed", "failed", "expired", "cancelled"}
    )
    refused = 0
    for headers, content in await heard(WAYS[name], monkeypatch, 2 * ends, forge_every=1):
        try:
            library.verify(content, headers)
        except standardwebhooks.WebhookVerificationError:
            refused += 1
    assert refused == ends


async def test_providers_without_webhooks_send_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of Mistral and Message Batches end in silence, whatever the script; so do Gemini's behind a gateway."""
    sent: list[bytes] = []

    async def post(_url: str, _headers: dict[str, str], content: bytes) -> int:
        sent.append(content)
        return 200

    monkeypatch.setattr(webhooks, "_post", post)
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for script in ({"secret": SIGNED}, {"secret": PLAIN, "form": "generic", "auth": "hmac"}):
        hook = WebhookScript.model_validate({"url": "http://ferry/webhooks/a", **script})
        async with bench(Scenario(webhooks=hook)) as it:
            job = {"endpoint": CHAT, "model": "m", "requests": [{"custom_id": "a", "body": body}]}
            assert (await it.http.post("/mistral/v1/batch/jobs", json=job)).status_code == 200
            rows_ = {"requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 9, **body}}]}
            keys = {"x-api-key": DEFAULT_KEY, "anthropic-version": "2026-10-21"}
            assert (await it.http.post("/v1/messages/batches", json=rows_, headers=keys)).status_code == 200
            if "form" in script:
                await Quay(WAYS["gemini"], it).make()
            it.clock.advance(LONG_S)
            await it.simulator.settle()
            last = await it.start(jsonl(rows(1)))
            it.clock.advance(LONG_S)
            await it.simulator.settle()
            async with asyncio.timeout(20):
                while not it.simulator.deliveries:
                    it.clock.advance(5)
                    await asyncio.sleep(0.001)
            assert [one.batch_id for one in it.simulator.deliveries] == [last]
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ({"secret": PLAIN, "auth": "hmac"}, "form to generic"),
        ({"secret": SIGNED, "tells_progress": True}, "form to generic"),
        ({"secret": PLAIN, "auth": "hmac", "form": "generic", "late_every": 1}, "auth to standard"),
        ({"secret": PLAIN}, "whsec_"),
        ({"secret": "too-short", "auth": "path", "form": "generic"}, "24 or more"),
        ({"secret": f"{PLAIN}/{PLAIN}", "auth": "path", "form": "generic"}, "letters, digits"),
    ],
)
def test_what_does_not_fit_together_is_refused(script: dict[str, Any], says: str) -> None:
    """Told with its remedy when the scenario is read, and never with the secret."""
    with pytest.raises(ValueError, match=says) as refused:
        WebhookScript.model_validate({"url": "http://localhost/x", **script})
    assert script["secret"] not in str(refused.value)


async def test_the_admin_view_shows_deliveries_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """``/_sim/webhooks``: how each try fared; of the address only the host, since some end with the secret."""
    async with bench() as it:
        assert (await it.http.get("/_sim/webhooks")).json() is None
    async with quay(WAYS["gateway-path"], monkeypatch, forge_every=1) as it:
        (name,) = await it.end()
        await it.told(2)
        answer = await it.it.http.get("/_sim/webhooks")
        shown = answer.json()
        assert PLAIN not in answer.text
        assert "/webhooks/a" not in answer.text
        assert (shown["to"], shown["form"], shown["auth"]) == ("http://ferry", "generic", "path")
        assert (shown["events"], shown["tries"]) == (1, 2)
        assert [(one["batch_id"], one["status"], one["is_forged"]) for one in shown["deliveries"]] == [
            (name, 401, True),
            (name, 200, False),
        ]
        assert len((await it.it.http.get("/_sim/webhooks?limit=1")).json()["deliveries"]) == 1
        assert (await it.it.http.get("/_sim/webhooks?limit=99999")).status_code == 400


def test_an_address_and_a_secret_file_go_before_the_script(tmp_path: Path) -> None:
    """Each alone changes a script that is there, both make one, and what is missing or wrong is told by name."""
    file = tmp_path / "secret"
    file.write_text(f"{SIGNED}\n")
    plain = Scenario()
    assert with_webhooks(plain, None, None) is plain
    made = with_webhooks(plain, "http://here/x", file).webhooks
    assert made is not None
    assert (made.url, made.secret.get_secret_value()) == ("http://here/x", SIGNED)
    scripted = Scenario(webhooks=made.model_copy(update={"lose_every": 2}))
    other = with_webhooks(scripted, "http://there/x", None).webhooks
    assert other == made.model_copy(update={"url": "http://there/x", "lose_every": 2})
    for given, says in (
        (("http://here/x", None), "file of its secret"),
        ((None, file), "its address"),
        (("ftp://here", file), "url"),
        (("http://here/x", tmp_path / "none"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            with_webhooks(plain, *given)
    file.write_text("short-and-secret")
    with pytest.raises(ConfigError, match="whsec_") as refused:
        with_webhooks(plain, "http://here/x", file)
    assert "short-and-secret" not in str(refused.value)
