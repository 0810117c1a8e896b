"""The admin pages over an in-process client: probes, metrics, JSON, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from batchferry.server import make_app
from batchferry.telemetry import RecordingTelemetry


class Health:
    """Reasons that a test sets."""

    def __init__(self) -> None:
        self.live: list[str] = []
        self.ready: list[str] = []
        self.started: list[str] = []

    def not_live(self) -> Sequence[str]:
        return self.live

    def not_ready(self) -> Sequence[str]:
        return self.ready

    def not_started(self) -> Sequence[str]:
        return self.started


class Model:
    """Two batches."""

    rows: Sequence[Mapping[str, object]] = (
        {"batch_id": "01B", "state": "landed", "rows": 2, "ship_by": datetime(2026, 1, 1, tzinfo=UTC)},
        {"batch_id": "01C", "state": "in_progress", "rows": 3, "blob": b"a prompt"},
    )
    broken = False

    async def status(self) -> Mapping[str, object]:
        return {"version": "1", "partitions": {"0": {"state": "ready", "unsettled": 4}}}

    async def batches(self) -> Sequence[Mapping[str, object]]:
        if self.broken:
            raise RuntimeError("prompt: tell me a story")
        return self.rows

    async def batch_events(self, batch_id: str) -> Sequence[Mapping[str, object]]:
        return [{"at": "t", "event": f"sealed {batch_id}"}]


class Bench:
    """An application and a client."""

    def __init__(self, token: str | None = None) -> None:
        self.health, self.model, self.telemetry = Health(), Model(), RecordingTelemetry()
        hook = Route("/webhooks/{account}", lambda _request: PlainTextResponse("hooked"), methods=["POST"])
        app = make_app(
            self.health, lambda: b"metric 1\n", self.model, telemetry=self.telemetry, token=token, extra_routes=[hook]
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(("path", "kind"), [("/livez", "live"), ("/readyz", "ready"), ("/startupz", "started")])
async def test_probes_fail_with_reasons(path: str, kind: str):
    """A probe is 200 while there is no reason against it, else 503 with the reasons."""
    bench = Bench()
    assert (await bench.client.get(path)).status_code == 200
    getattr(bench.health, kind).append("partition 3 restores")
    answer = await bench.client.get(path)
    assert answer.status_code == 503
    assert answer.json() == {"status": "failing", "reasons": ["partition 3 restores"]}
    others = {"/livez", "/readyz", "/startupz"} - {path}
    assert [(await bench.client.get(other)).status_code for other in others] == [200, 200]


async def test_metrics_are_plain_text():
    """Prometheus gets the text as it is made, under its own content type."""
    answer = await Bench().client.get("/metrics")
    assert answer.text == "metric 1\n"
    assert answer.headers["content-type"].startswith("text/plain; version=")


async def test_batches_newest_first():
    """Batches come newest first, filtered by state, cut by limit, with the total."""
    client = Bench().client
    everything = (await client.get("/api/batches")).json()
    assert [row["batch_id"] for row in everything["batches"]] == ["01C", "01B"]
    assert everything["batches"][1]["ship_by"] == "2026-01-01T00:00:00.000Z"
    assert (await client.get("/api/batches?state=landed")).json()["total"] == 1
    cut = (await client.get("/api/batches?limit=1")).json()
    assert (len(cut["batches"]), cut["total"]) == (1, 2)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1e3", "99999999999", "²"])
async def test_bad_limits_are_refused(limit: str):
    """A limit outside its bounds is a 400 that names them."""
    answer = await Bench().client.get("/api/batches", params={"limit": limit})
    assert answer.status_code == 400
    assert "1 to 1000" in answer.json()["error"]["message"]


async def test_one_batch_with_its_history():
    """A batch's page has its row and its events; an unknown id is a 404."""
    client = Bench().client
    page = (await client.get("/api/batches/01B")).json()
    assert page["batch"]["state"] == "landed"
    assert page["events"] == [{"at": "t", "event": "sealed 01B"}]
    assert (await client.get("/api/batches/01X")).status_code == 404


async def test_status_is_one_object():
    """The status page passes nested counts through."""
    assert (await Bench().client.get("/api/status")).json()["partitions"]["0"]["unsettled"] == 4


async def test_bytes_never_get_out():
    """Bytes could be payload: only their type is shown."""
    assert (await Bench().client.get("/api/batches/01C")).json()["batch"]["blob"] == "<bytes>"


async def test_a_broken_page_tells_nothing_of_its_error():
    """A bug behind a page is a 500 without text, an event with the place, and the next page works."""
    bench = Bench()
    bench.model.broken = True
    answer = await bench.client.get("/api/batches")
    assert answer.status_code == 500
    assert "story" not in answer.text
    (event,) = bench.telemetry.named("api_failed")
    assert event["error"] == "RuntimeError"
    assert "error_text" not in event
    assert (await bench.client.get("/api/status")).status_code == 200
    assert bench.telemetry.total("http_requests", route="/api/batches", status="500") == 1


async def test_a_token_guards_the_api_alone():
    """With a token the JSON asks for it, whatever else is wrong; probes and metrics stay open."""
    client = Bench(token="right").client
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic right"},
        {"Authorization": "right"},
    ):
        answer = await client.get("/api/status", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await client.get("/api/batches/01X")).status_code == 401
    assert (await client.get("/api/status", headers={"Authorization": "Bearer right"})).status_code == 200
    for path in ("/livez", "/readyz", "/startupz", "/metrics"):
        assert (await client.get(path)).status_code == 200


async def test_unknown_paths_and_methods_answer_json():
    """What is not there is a JSON 404, what may not be done a 405; nothing can be changed here."""
    client = Bench().client
    assert (await client.get("/nothing")).json()["error"]["status"] == 404
    for path in ("/api/batches", "/api/status", "/metrics"):
        assert (await client.post(path)).status_code == 405


async def test_further_routes_can_be_handed_in():
    """Webhooks and a console are served beside the pages of this room."""
    assert (await Bench().client.post("/webhooks/default")).text == "hooked"
