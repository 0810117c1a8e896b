"""What is the simulator's own about Mistral's API: ids, copies of lines, projects, restarts and odd bytes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sim_kit import CHAT, bench, body

from batchferry.simulator import (
    DEFAULT_KEY,
    CallName,
    FaultRule,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    Simulator,
    SimulatorSettings,
)
from batchferry.simulator import mistralwire as wire
from batchferry.simulator.state import SimBatch, Status

MODEL = "mistral-small-latest"
V1 = "/mistral/v1"


def lines(*ids: str) -> bytes:
    """A file of rows without a model."""
    messages = body()["messages"]
    return b"".join(json.dumps({"custom_id": one, "body": {"messages": messages}}).encode() + b"\n" for one in ids)


async def upload(http: httpx.AsyncClient, content: bytes) -> str:
    """The id of an upload that must succeed."""
    answer = await http.post(f"{V1}/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def create(http: httpx.AsyncClient, file_id: str, **members: Any) -> httpx.Response:
    """A create."""
    wanted = {"input_files": [file_id], "endpoint": CHAT, "model": MODEL} | members
    return await http.post(f"{V1}/batch/jobs", json=wanted)


@pytest.mark.parametrize(
    ("own", "show", "back"),
    [
        ("file-0123456789abcdef012345", wire.shown_file_id, wire.own_file_id),
        ("batch_0123456789abcdef01234567", wire.shown_job_id, wire.own_job_id),
    ],
)
def test_ids_are_uuids_and_come_back(own, show, back):
    """What is shown is a UUID, and leads back to the simulator's own id."""
    shown = show(own)
    assert len(shown) == 36
    assert back(shown) == own


def test_every_status_is_shown():
    """Each status of the world has one of Mistral's words."""
    assert set(wire.STATUSES) == set(Status)


async def test_the_two_apis_show_nothing_of_each_other():
    """Files and batches made over one API are not in the other's lists, though they share the bill."""
    async with bench() as it:
        theirs = await it.start(b'{"custom_id":"a","method":"POST","url":"%s","body":%s}\n' % (
            CHAT.encode(), json.dumps(body()).encode()))  # fmt: skip
        job = (await create(it.http, await upload(it.http, lines("b")))).json()
        it.clock.advance(3600)
        assert [one["id"] for one in (await it.http.get("/v1/batches")).json()["data"]] == [theirs]
        assert [one["id"] for one in (await it.http.get(f"{V1}/batch/jobs")).json()["data"]] == [job["id"]]
        assert len((await it.http.get("/v1/files")).json()["data"]) == 2
        assert len((await it.http.get(f"{V1}/files")).json()["data"]) == 2
        assert (await it.http.get("/_sim/bill")).json()["batch_paid_runs"] == 2


async def test_the_copy_of_the_lines_goes_with_the_job():
    """A job runs on a copy that nobody sees; it may lose its input file, and the copy is gone at its end."""
    async with bench() as it:
        file_id = await upload(it.http, lines("a", "b"))
        job = (await create(it.http, file_id)).json()
        state = it.simulator.world.state
        (copy,) = [file for file in state.files.values() if file.id.startswith(wire.INPUT_PREFIX)]
        assert state.file_path(copy.id).exists()
        assert (await it.http.delete(f"{V1}/files/{file_id}")).json()["deleted"] is True
        it.clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        assert (done["status"], done["succeeded_requests"], done["input_files"]) == ("SUCCESS", 2, [file_id])
        assert not state.file_path(copy.id).exists()


async def test_a_restart_forgets_nothing(tmp_path):
    """A job that was under way is found again with model, files and window, and ends."""
    clock = ManualSimClock()
    made = {"clock": clock, "data_dir": tmp_path}
    async with bench(**made) as it:
        job = (await create(it.http, await upload(it.http, lines("a")), timeout_hours=100)).json()
    async with bench(**made) as it:
        again = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        assert again == job
        clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        assert done["status"] == "SUCCESS"


async def test_several_files_make_one_job():
    """Their lines run one behind the other, under the job's model."""
    async with bench() as it:
        files = [await upload(it.http, lines(name)) for name in ("a", "b")]
        job = (await create(it.http, files[0], input_files=files)).json()
        it.clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        assert (done["total_requests"], done["input_files"], done["model"]) == (2, files, MODEL)


async def test_bad_lines_fail_the_job_with_messages_and_counts():
    """Entries have a message and how often it came, and nothing else."""
    async with bench() as it:
        job = (await create(it.http, await upload(it.http, lines("a") + b"x\ny\n"))).json()
        it.clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        assert done["status"] == "FAILED"
        assert done["errors"] == [{"message": "This line is not parseable as valid JSON.", "count": 2}]


@pytest.mark.parametrize(("unknown_file", "status"), [("reject", 400), ("reject_404", 404), ("fail_job", 200)])
async def test_a_file_that_is_not_there(unknown_file, status):
    """The create is refused, or its job fails."""
    async with bench(Scenario(unknown_file=unknown_file)) as it:
        answer = await create(it.http, "00000000-0000-4000-8000-00000000000f")
        assert answer.status_code == status
        if status != 200:
            assert answer.json()["object"] == "error"
            return
        it.clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{answer.json()['id']}")).json()
        assert (done["status"], done["errors"]) == ("FAILED", [{"message": "Input file not found.", "count": 1}])


@pytest.mark.parametrize(
    "members",
    [
        {"timeout_hours": 0},
        {"timeout_hours": "24"},
        {"endpoint": "/v1/responses"},
        {"model": ""},
        {"metadata": {"a": 1}},
        {"input_files": []},
        {"requests": [{"custom_id": "a", "body": {}}]},
        {"input_files": None, "requests": [{"body": {}}] * 10_001},
    ],
)
async def test_a_create_that_breaks_the_schema(members):
    """It is answered 422 with what is wrong."""
    async with bench() as it:
        answer = await create(it.http, await upload(it.http, lines("a")), **members)
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"][0] == "body"


@pytest.mark.parametrize(
    ("path", "data"), [("/files", {"purpose": "assistants"}), ("/files", {"purpose": "batch", "file": ""})]
)
async def test_an_upload_that_breaks_the_schema(path, data):
    """A purpose that is none, and a form without a file, leave nothing behind."""
    async with bench() as it:
        files = {"x" if "file" in data else "file": ("a.jsonl", lines("a"))}
        answer = await it.http.post(f"{V1}{path}", files=files, data=data)
        assert answer.status_code == 422
        assert list((it.simulator.world.state.folder / "files").iterdir()) == []


async def test_faults_and_wrong_addresses_speak_mistral():
    """An answer by plan and an address that is not served have the flat error body."""
    async with bench() as it:
        it.simulator.faults.put(FaultRule(call=CallName.LIST, status=429))
        limited = await it.http.get(f"{V1}/batch/jobs")
        assert limited.status_code == 429
        assert limited.json() == {
            "object": "error",
            "message": "Rate limit exceeded",
            "type": "rate_limited",
            "param": None,
            "code": "1300",
            "raw_status_code": 429,
        }
        assert (await it.http.get(f"{V1}/nowhere")).json()["object"] == "error"
        assert "error" in (await it.http.get("/v1/nowhere")).json()
        assert "openai-version" not in limited.headers


async def test_odd_bytes_survive_the_change_of_shape():
    """A byte that is no UTF-8, a cut line and a cut file come out as they went in."""
    rules = (
        RowRule(match=RowMatch(wire_id="bytes"), outcome=Outcome.INVALID_UTF8),
        RowRule(match=RowMatch(wire_id="cut"), outcome=Outcome.UNREADABLE),
    )
    async with bench(Scenario(rows=rules, cut_last_line=True, shuffle_output=False)) as it:
        job = (await create(it.http, await upload(it.http, lines("bytes", "cut", "last")))).json()
        it.clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        raw = (await it.http.get(f"{V1}/files/{done['output_file']}/content")).content
        first, second, third = raw.split(b"\n")
        assert b"\xff" in first
        assert "service_tier" not in json.loads(first.decode(errors="replace"))["response"]["body"]
        for cut in (second, third):
            with pytest.raises(json.JSONDecodeError):
                json.loads(cut)


@pytest.mark.parametrize(("shown", "member"), [("null", None), ("absent", "absent"), ("empty", "")])
async def test_a_clean_job_shows_no_error_file(shown, member):
    """Null, absent or empty, as the script says."""
    async with bench(Scenario(error_file_when_clean=shown)) as it:
        job = (await create(it.http, await upload(it.http, lines("a")))).json()
        it.clock.advance(3600)
        done = (await it.http.get(f"{V1}/batch/jobs/{job['id']}")).json()
        assert done.get("error_file", "absent") == member


async def test_late_file_ids_are_late_here_too():
    """A job that has ended may hide its files for a while."""
    async with bench(Scenario(late_file_ids_s=7200)) as it:
        job = (await create(it.http, await upload(it.http, lines("a")))).json()
        it.clock.advance(3600)
        path = f"{V1}/batch/jobs/{job['id']}"
        done = (await it.http.get(path)).json()
        assert (done["status"], done["output_file"]) == ("SUCCESS", None)
        it.clock.advance(7200)
        assert (await it.http.get(path)).json()["output_file"] is not None


async def test_a_job_that_runs_cannot_be_deleted():
    """It has to be cancelled first."""
    async with bench() as it:
        job = (await create(it.http, await upload(it.http, lines("a")))).json()
        assert (await it.http.delete(f"{V1}/batch/jobs/{job['id']}")).status_code == 409


def test_a_batch_of_another_api_has_no_extra():
    """What an API keeps beside is empty by default, so that older journals are read."""
    assert SimBatch("b", 1, "p", CHAT, "f", "24h", None, 1, 0.0, 0.0, 0.0).extra == {}


async def test_the_address_for_clients():
    """The simulator names the address that an adapter takes."""
    async with Simulator(SimulatorSettings(clock=ManualSimClock())) as simulator, httpx.AsyncClient() as http:
        answer = await http.get(f"{simulator.mistral_url}/models", headers={"authorization": f"Bearer {DEFAULT_KEY}"})
        assert answer.json()["data"][0]["object"] == "model"
