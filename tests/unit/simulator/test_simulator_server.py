"""Clock, settings, scenario files, and a simulator as a process: it comes back after a kill and stays small."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import ValidationError
from sim_kit import CHAT, LONG_S, bench, body, jsonl, line, rows

from batchferry.domain.errors import ConfigError
from batchferry.simulator import (
    DEFAULT_KEY,
    ClockSettings,
    Durations,
    ManualSimClock,
    RunCurve,
    Scenario,
    SimClock,
    Simulator,
    SimulatorSettings,
    create_app,
    load_scenario,
)

ORIGIN = datetime(2030, 1, 1, tzinfo=UTC)


def test_two_clocks_with_the_same_values_agree() -> None:
    """Virtual time is origin plus the scaled real time since the start, whoever computes it."""
    started = datetime(2026, 1, 1, tzinfo=UTC)
    real = [started.timestamp()]
    one = SimClock(1440, ORIGIN, started, lambda: real[0])
    other = ClockSettings.model_validate(
        {"speed": 1440, "origin": ORIGIN.isoformat(), "started_real": started.isoformat()}
    )
    assert one.now() == ORIGIN
    real[0] += 60
    assert one.now() == ORIGIN + timedelta(days=1)
    assert other.build().describe()["origin"] == one.describe()["origin"]
    manual = ManualSimClock(ORIGIN)
    manual.advance(10)
    assert manual.timestamp() == ORIGIN.timestamp() + 10


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_a_clock_must_go_forward(speed: float) -> None:
    """A speed that is not above 0 is refused, and so is going back or an instant without a zone."""
    with pytest.raises(ValueError, match="speed"):
        SimClock(speed)
    with pytest.raises(ValueError, match="zone"):
        SimClock(1, datetime(2030, 1, 1))
    with pytest.raises(ValueError, match="back"):
        ManualSimClock().advance(-1)


async def test_a_day_passes_in_moments_on_a_fast_clock() -> None:
    """At high speed a whole batch life takes a fraction of a second, and every time stamp is virtual."""
    clock = SimClock(100_000, ORIGIN)
    async with bench(clock=clock) as it:
        batch_id = await it.start(jsonl(rows(3)))
        async with asyncio.timeout(10):
            while (batch := await it.get(batch_id))["status"] != "completed":
                pass
        assert batch["created_at"] >= ORIGIN.timestamp()
        answer = await it.http.get("/v1/batches")
        assert parsedate_to_datetime(answer.headers["date"]) >= ORIGIN
        assert answer.headers.get_list("date") == [answer.headers["date"]]
        assert (await it.http.post("/_sim/clock", json={"advance_s": 1})).status_code == 400


async def test_files_and_batches_survive_the_end_of_the_process(tmp_path: Path) -> None:
    """A simulator on the same folder takes up batches where they were, with attempts and bill."""
    clock = ManualSimClock()
    async with bench(data_dir=tmp_path, clock=clock) as it:
        done = await it.end(jsonl([line("a")]))
        await it.http.post(CHAT, json=body("sync"))
        open_id = await it.start(jsonl([line("b")]))
        clock.advance(6)
        assert (await it.get(open_id))["status"] == "in_progress"
    # What a kill in the middle of a write leaves behind.
    for torn in (tmp_path / "journal.jsonl", tmp_path / "bill" / "sync.jsonl"):
        with torn.open("ab") as file:
            file.write(b'{"batch":{"id"')
    (tmp_path / "bill" / f"{open_id}.jsonl").write_bytes(b'["b","00"')
    async with bench(data_dir=tmp_path, clock=clock) as it:
        assert (await it.get(done["id"])) == done
        assert len((await it.lines_of(done))[0]) == 1
        assert (await it.get(open_id))["status"] == "in_progress"
        clock.advance(LONG_S)
        assert (await it.get(open_id))["status"] == "completed"
        await it.http.post(CHAT, json=body("sync"))
        assert it.simulator.bill.body(body("sync")) == (0, 2, 2)
        assert [it.simulator.bill.wire(name).paid_runs for name in ("a", "b")] == [1, 1]
        listed = (await it.http.get("/v1/batches")).json()["data"]
        assert [batch["id"] for batch in listed] == [open_id, done["id"]]
    async with bench(data_dir=tmp_path, clock=clock) as it:
        assert it.simulator.bill.body(body("sync")) == (0, 2, 2)
        assert it.simulator.bill.summary()["batch_paid_runs"] == 2


async def test_a_folder_has_one_simulator(tmp_path: Path) -> None:
    """A second simulator on the same folder is refused with the remedy, and a damaged folder too."""
    async with bench(data_dir=tmp_path):
        with pytest.raises(ConfigError, match="another simulator"):
            create_app(SimulatorSettings(data_dir=tmp_path))
    (tmp_path / "journal.jsonl").write_bytes(b"damaged\n")
    with pytest.raises(ConfigError, match="damaged"):
        create_app(SimulatorSettings(data_dir=tmp_path))


async def test_a_taken_port_is_named() -> None:
    """Starting on a port somebody has is refused with the address; an unknown host too."""
    async with bench() as it:
        port = httpx.URL(it.simulator.base_url).port
        with pytest.raises(ConfigError, match=str(port)):
            await Simulator(SimulatorSettings(port=port or 0)).start()
        with pytest.raises(ConfigError, match="not an address"):
            await Simulator(SimulatorSettings(host="no such host")).start()


async def test_deleted_bytes_leave_the_disk(tmp_path: Path) -> None:
    """A deleted file's bytes go at once, or when the last batch that needs them has ended."""
    async with bench(data_dir=tmp_path) as it:
        file_id = await it.file_id(jsonl(rows(2)))
        batch_id = (await it.create(file_id)).json()["id"]
        it.clock.advance(6)
        await it.get(batch_id)
        await it.http.delete(f"/v1/files/{file_id}")
        assert (tmp_path / "files" / file_id).exists()
        it.clock.advance(LONG_S)
        batch = await it.get(batch_id)
        assert [path.name for path in (tmp_path / "files").iterdir()] == [batch["output_file_id"]]
        await it.http.delete(f"/v1/files/{batch['output_file_id']}")
        assert list((tmp_path / "files").iterdir()) == []


def test_a_scenario_is_read_from_a_file_and_its_faults_are_listed(tmp_path: Path) -> None:
    """YAML and JSON are both read; unknown keys, wrong values and unreadable text are named all at once."""
    good = tmp_path / "good.yaml"
    good.write_text("durations: {validating_s: 1}\nrows:\n- {match: {every: 2}, outcome: timeout}\n")
    assert load_scenario(good).rows[0].outcome == "timeout"
    good.write_text(json.dumps({"windows": ["1h"]}))
    assert load_scenario(good).windows == ("1h",)
    good.write_text("")
    assert load_scenario(good) == Scenario()
    bad = tmp_path / "bad.yaml"
    bad.write_text("colour: blue\nrows: [{outcome: cats}]\nwindows: [soon]\n")
    with pytest.raises(ConfigError) as refused:
        load_scenario(bad)
    assert len(refused.value.faults) == 3
    bad.write_text("shares: [{share: 0.7, outcome: timeout}, {share: 0.7, outcome: missing}]")
    with pytest.raises(ConfigError, match="more than 1"):
        load_scenario(bad)
    bad.write_text("{")
    with pytest.raises(ConfigError, match="YAML"):
        load_scenario(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.yaml")
    assert Scenario.model_json_schema()["properties"]["rows"]


def test_settings_hide_their_keys() -> None:
    """Keys are not in the text of the settings; none at all is refused."""
    settings = SimulatorSettings.model_validate({"keys": ["sk-secret-1", "sk-secret-2"]})
    assert len(settings.keys) == 2
    assert "sk-secret" not in repr(settings)
    with pytest.raises(ValidationError):
        SimulatorSettings(keys={})


@asynccontextmanager
async def process(folder: Path, options: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A simulator in a process of its own, and its base URL."""
    program = (
        "import sys\nfrom datetime import UTC, datetime\nfrom pathlib import Path\n"
        "from batchferry.simulator import *\n"
        f"run_forever(SimulatorSettings(data_dir=Path(sys.argv[1]), {options}), on_ready=lambda url: print(url, flush=True))"
    )
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(folder), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert running.stdout is not None
        async with asyncio.timeout(30):
            url = (await running.stdout.readline()).decode().strip()
        yield running, url.removesuffix("/v1")
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


def client(url: str) -> httpx.AsyncClient:
    """A client of a simulator process."""
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {DEFAULT_KEY}"}, timeout=60, verify=False)


def big_file(row_count: int, row_bytes: int) -> bytes:
    """A batch file of long rows."""
    return jsonl(line(f"r{number}", f"{number} " + "x" * row_bytes) for number in range(row_count))


async def test_a_killed_process_keeps_its_batches_and_its_memory_is_bounded(tmp_path: Path) -> None:
    """30 MB go in, are run and come out while memory grows by far less; a kill -9 loses nothing."""
    started = datetime.now(UTC)
    fast = f"clock=ClockSettings(speed=5000, started_real=datetime.fromtimestamp({started.timestamp()}, UTC))"
    content = big_file(1500, 20_000)
    assert len(content) > 30_000_000
    async with process(tmp_path, fast) as (running, url):
        async with client(url) as http:
            await http.get("/v1/batches")
            memory = psutil.Process(running.pid).memory_info
            before = memory().rss
            upload = await http.post("/v1/files", files={"file": ("big.jsonl", content)}, data={"purpose": "batch"})
            wanted = {"input_file_id": upload.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch_id = (await http.post("/v1/batches", json=wanted)).json()["id"]
            peak = memory().rss
            deadline = time.monotonic() + 60
            while (batch := (await http.get(f"/v1/batches/{batch_id}")).json())["status"] != "completed":
                peak = max(peak, memory().rss)
                assert time.monotonic() < deadline
            received = 0
            async with http.stream("GET", f"/v1/files/{upload.json()['id']}/content") as answer:
                async for chunk in answer.aiter_raw():
                    received += len(chunk)
            peak = max(peak, memory().rss)
        running.kill()
        await running.wait()
    assert received == len(content)
    assert batch["request_counts"]["completed"] == 1500
    assert peak - before < 20_000_000
    async with process(tmp_path, fast) as (_, url), client(url) as http:
        assert (await http.get(f"/v1/batches/{batch_id}")).json() == batch
        assert (await http.get("/_sim/bill")).json()["bodies_by_paid_runs"] == {"1": 1500}


async def test_an_idle_process_leaves(tmp_path: Path) -> None:
    """With an idle limit the process ends by itself, well, some time after its last request."""
    async with process(tmp_path, "idle_exit_s=0.2") as (running, url):
        async with client(url) as http:
            assert (await http.get("/v1/batches")).status_code == 200
        async with asyncio.timeout(20):
            assert await running.wait() == 0


async def test_a_process_told_to_stop_ends_well(tmp_path: Path) -> None:
    """SIGTERM ends the process with exit code 0."""
    async with process(tmp_path) as (running, _):
        running.terminate()
        async with asyncio.timeout(20):
            assert await running.wait() == 0


async def test_a_read_does_not_wait_for_ever_for_heavy_work() -> None:
    """Without patience a read answers with the state so far, and the work goes on behind it."""
    durations = Durations(validating_s=1, finalizing_s=0, in_progress=RunCurve(factor_s=0, minimum_s=1))
    async with bench(Scenario(durations=durations), patience_s=0) as it:
        batch_id = await it.start(jsonl(rows(200)))
        it.clock.advance(60)
        assert (await it.get(batch_id))["status"] == "validating"
        await it.simulator.settle()
        assert (await it.get(batch_id))["status"] == "completed"
