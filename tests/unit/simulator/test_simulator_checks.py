"""What the simulator refuses: uploads, creates, and lines of a batch file."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sim_kit import CHAT, LONG_S, bench, body, jsonl, line, rows

from batchferry.simulator import DEFAULT_KEY, Limits, Scenario


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error inside the envelope."""
    return dict(answer.json()["error"])


async def test_an_upload_is_stamped_with_its_expiry() -> None:
    """A batch file expires after 30 days unless the bracketed form fields say otherwise."""
    async with bench() as it:
        usual = (await it.upload(jsonl(rows(1)))).json()
        assert usual["expires_at"] == usual["created_at"] + 2_592_000
        assert (usual["status"], usual["status_details"], usual["purpose"]) == ("processed", None, "batch")
        short = (
            await it.upload(jsonl(rows(1)), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        ).json()
        assert short["expires_at"] == short["created_at"] + 3600
        assert (await it.http.get(f"/v1/files/{short['id']}")).status_code == 200
        it.clock.advance(3600)
        for path in (f"/v1/files/{short['id']}", f"/v1/files/{short['id']}/content"):
            assert (await it.http.get(path)).status_code == 404
        assert [file["id"] for file in (await it.http.get("/v1/files")).json()["data"]] == [usual["id"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "cats"}, "purpose"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
    ],
)
async def test_wrong_upload_fields_are_named(fields: dict[str, str], param: str) -> None:
    """A wrong purpose or expiry is a 400 that names the field."""
    async with bench() as it:
        answer = await it.upload(jsonl(rows(1)), **fields)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("name", "content"),
    [("in.txt", jsonl(rows(1))), ("in.jsonl", b""), ("in.jsonl", b"not json\n"), ("in.jsonl", b"\n{}\n")],
)
async def test_what_is_no_batch_file_is_refused_at_upload(name: str, content: bytes) -> None:
    """A wrong name, an empty file and a first line that is not JSON are refused, and leave nothing behind."""
    async with bench() as it:
        answer = await it.upload(content, name)
        assert answer.status_code == 400
        assert ".jsonl" in error_of(answer)["message"]
        assert error_of(answer)["param"] is None
        assert (await it.http.get("/v1/files")).json()["data"] == []


async def test_an_upload_that_is_no_form_is_refused() -> None:
    """JSON, a form without a file, and a form cut short are refused with an envelope."""
    async with bench(Scenario(limits=Limits(any_file_bytes=1000))) as it:
        assert (await it.http.post("/v1/files", json={})).status_code == 400
        assert (
            await it.http.post("/v1/files", files={"other": ("x", b"y")}, data={"purpose": "batch"})
        ).status_code == 400
        cut = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}'
        headers = {"content-type": "multipart/form-data; boundary=b"}
        assert (await it.http.post("/v1/files", content=cut, headers=headers)).status_code == 400
        assert (await it.upload(b"{}" * 600)).status_code == 413


async def test_file_contents_come_back_byte_for_byte() -> None:
    """A file with bytes that look like the form's own is stored unchanged."""
    content = json.dumps({"a": "\r\n--boundary--\r\n"}).encode() + b"\n--\r\n\r\n\x00\xff" * 1000
    async with bench() as it:
        assert await it.content(await it.file_id(content)) == content


@pytest.mark.parametrize(
    ("members", "code", "param"),
    [
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"endpoint": "/v1/cats"}, "invalid_value", "endpoint"),
        ({"completion_window": "48h"}, "invalid_value", "completion_window"),
        ({"completion_window": 24}, "invalid_type", "completion_window"),
        ({"metadata": {"tags": 1}}, "invalid_type", "metadata.tags"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "invalid_value", "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "string_above_max_length", "metadata." + "k" * 65),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "invalid_value",
            "output_expires_after.seconds",
        ),
        ({"input_file_id": "file-nobody"}, None, "file_id"),
    ],
)
async def test_wrong_creates_are_refused_at_once(members: dict[str, Any], code: str | None, param: str) -> None:
    """Each wrong member of a create is a 400 with the code and param on record."""
    async with bench() as it:
        answer = await it.create(await it.file_id(jsonl(rows(1))), **members)
        assert answer.status_code == 400
        assert (error_of(answer)["code"], error_of(answer)["param"]) == (code, param)
        assert error_of(answer)["type"] == "invalid_request_error"


async def test_an_unknown_file_can_also_be_a_404_or_a_failed_job() -> None:
    """All three behaviours on record can be scripted."""
    async with bench(Scenario(unknown_file="reject_404")) as it:
        assert (await it.create("file-nobody")).status_code == 404
    async with bench(Scenario(unknown_file="fail_job")) as it:
        batch_id = (await it.create("file-nobody")).json()["id"]
        it.clock.advance(LONG_S)
        (entry,) = (await it.get(batch_id))["errors"]["data"]
        assert (entry["code"], entry["param"], entry["line"]) == ("invalid_request", "file_id", None)


async def test_a_fresh_file_can_be_unknown_for_a_while() -> None:
    """The first creates after an upload may say that the file does not exist; each file has its own gap."""
    async with bench(Scenario(create_gap=2)) as it:
        for _ in range(2):
            file_id = await it.file_id(jsonl(rows(1)))
            assert [(await it.create(file_id)).status_code for _ in range(3)] == [400, 400, 200]


async def test_a_file_of_another_purpose_makes_no_batch() -> None:
    """A file uploaded for something else is refused by create, and its form is not checked at upload."""
    async with bench() as it:
        answer = await it.upload(b"anything", "notes.txt", purpose="user_data")
        assert answer.json()["expires_at"] is None
        assert (await it.create(answer.json()["id"])).status_code == 400


async def test_batches_an_hour_are_limited() -> None:
    """One create too many in an hour is a 429; an hour later it is taken."""
    async with bench(Scenario(limits=Limits(batches_per_hour=1))) as it:
        file_id = await it.file_id(jsonl(rows(1)))
        assert [(await it.create(file_id)).status_code for _ in range(2)] == [200, 429]
        it.clock.advance(3601)
        assert (await it.create(file_id)).status_code == 200


BAD_LINES: list[tuple[Any, str, str | None]] = [
    (b"{broken", "invalid_json_line", None),
    (b"[1]", "invalid_json_line", None),
    (b"", "invalid_json_line", None),
    (b'{"custom_id":"\xff"}', "invalid_json_line", None),
    (b'{"custom_id":NaN}', "invalid_json_line", None),
    ({"method": "POST", "url": CHAT, "body": {}}, "missing_required_parameter", "custom_id"),
    ({"custom_id": "x", "url": CHAT, "body": {}}, "missing_required_parameter", "method"),
    ({"custom_id": "x", "method": "POST", "body": {}}, "missing_required_parameter", "url"),
    ({"custom_id": "x", "method": "POST", "url": CHAT}, "missing_required_parameter", "body"),
    (line("x", method="GET"), "invalid_method", "method"),
    (line("x", url="https://api.openai.com/v1/chat/completions"), "invalid_url", "url"),
    (line("x", body=body() | {"stream": True}), "streaming_unsupported", "body.stream"),
    (line("x", body={"messages": []}), "invalid_request", "body.model"),
    (line("x", body={"model": "gpt-5-mini"}), "invalid_request", "body.messages"),
    (line("x", body=body(model="sync-only")), "model_not_found", "body.model"),
    (line("first"), "duplicate_custom_id", "custom_id"),
    (line("x", body=body(model="gpt-4o")), "mismatched_model", "body.model"),
    (line("x", custom_id=7), "invalid_request", "custom_id"),
]


async def test_every_bad_line_is_listed_with_its_number() -> None:
    """One bad line fails the file; each is listed with code, param and 1-based line, and no row runs."""
    content = jsonl([line("first"), *(bad for bad, _, _ in BAD_LINES)])
    async with bench(Scenario(no_batch_models=("sync-only",))) as it:
        batch = await it.end(content)
        assert batch["status"] == "failed"
        listed = [(entry["code"], entry["param"], entry["line"]) for entry in batch["errors"]["data"]]
        assert listed == [(code, param, number) for number, (_, code, param) in enumerate(BAD_LINES, start=2)]
        assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
        assert it.simulator.bill.summary()["batch_runs"] == 0


async def test_a_byte_order_mark_passes_the_upload_and_fails_line_1() -> None:
    """A file with a byte order mark is taken and then refused at its first line."""
    async with bench() as it:
        batch = await it.end(b"\xef\xbb\xbf" + jsonl(rows(2)))
        assert [(entry["code"], entry["line"]) for entry in batch["errors"]["data"]] == [("invalid_json_line", 1)]


@pytest.mark.parametrize(
    ("limits", "content", "code"),
    [
        (Limits(rows_per_batch=3), jsonl(rows(4)), "too_many_tasks"),
        (Limits(input_file_bytes=100), jsonl(rows(2)), "file_too_large"),
        (Limits(line_bytes=200), jsonl([line("a", "x" * 500)]), "invalid_request"),
    ],
)
async def test_limits_of_a_file(limits: Limits, content: bytes, code: str) -> None:
    """Too many rows, too many bytes and too long a line fail the batch."""
    first = b"{}\n" if limits.line_bytes == 200 else b""
    async with bench(Scenario(limits=limits)) as it:
        batch = await it.end(first + content)
        assert code in {entry["code"] for entry in batch["errors"]["data"]}


async def test_embedding_inputs_are_counted_one_by_one() -> None:
    """Arrays count each element against the limit of inputs; a token array is one input."""
    request = {"model": "text-embedding-3-small"}
    many = line("a", url="/v1/embeddings", body=request | {"input": ["x", "y", "z"]})
    tokens = line("b", url="/v1/embeddings", body=request | {"input": [1, 2, 3, 4]})
    async with bench(Scenario(limits=Limits(embedding_inputs=3))) as it:
        assert (await it.end(jsonl([many]), endpoint="/v1/embeddings"))["status"] == "completed"
        refused = await it.end(jsonl([many, tokens]), endpoint="/v1/embeddings")
        assert refused["errors"]["data"][0]["code"] == "too_many_tasks"


async def test_rows_the_endpoint_itself_refuses_fail_alone() -> None:
    """Wrong types in a body and a prompt beyond the context fail that row with 400, not the batch."""
    content = jsonl(
        [
            line("good"),
            line("type", body=body() | {"max_tokens": "many"}),
            line("empty", body={"model": "gpt-5-mini", "messages": "hello"}),
            line("long", "x" * 5000),
        ]
    )
    async with bench(Scenario(limits=Limits(context_tokens=1000))) as it:
        batch = await it.end(content)
        output, error = await it.parsed(batch)
        assert list(output) == ["good"]
        codes = {name: part["response"]["body"]["error"]["code"] for name, part in error.items()}
        assert codes == {"type": "invalid_type", "empty": "invalid_type", "long": "context_length_exceeded"}


async def test_lone_surrogates_and_numbers_of_any_length_are_json() -> None:
    """Text a strict reader dislikes but JSON allows is a good row, and its bill finds it."""
    odd = b'{"custom_id":"a","method":"POST","url":"%s","body":{"model":"m","n":1,"seed":%s,"messages":[{"role":"user","content":"\\ud800"}]}}'
    content = odd % (CHAT.encode(), b"9" * 40) + b"\n"
    async with bench() as it:
        batch = await it.end(content)
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert len((await it.lines_of(batch))[0]) == 1
        raw = content[content.index(b'"body":') + 7 : -2]
        assert it.simulator.bill.runs_of_body(raw) == 1


async def test_keys_open_their_own_project_only() -> None:
    """No key and a wrong key are 401; a key of another project sees neither files nor batches of this one."""
    keys = {DEFAULT_KEY: "one", "sk-other": "two"}
    async with bench(keys=keys) as it:
        batch_id = await it.start(jsonl(rows(1)))
        file_id = (await it.get(batch_id))["input_file_id"]
        for headers in ({"authorization": ""}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic x"}):
            answer = await it.http.get("/v1/batches", headers=headers)
            assert answer.status_code == 401
            assert set(error_of(answer)) == {"message", "type", "param", "code"}
        other = {"authorization": "Bearer sk-other"}
        assert (await it.http.get(f"/v1/batches/{batch_id}", headers=other)).status_code == 404
        assert (await it.http.get(f"/v1/files/{file_id}", headers=other)).status_code == 404
        assert (await it.http.get("/v1/batches", headers=other)).json()["data"] == []


async def test_unknown_addresses_and_methods_answer_in_the_same_envelope() -> None:
    """What is not served is a 404 or 405 with an envelope and a request id."""
    async with bench() as it:
        for method, path, status in (("GET", "/v1/cats", 404), ("PUT", "/v1/batches", 405)):
            answer = await it.http.request(method, path)
            assert answer.status_code == status
            assert error_of(answer)["type"] == "invalid_request_error"
            assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "after=batch_nobody"])
async def test_wrong_paging_is_refused(query: str) -> None:
    """A limit out of range and a cursor that names nothing are a 400."""
    async with bench() as it:
        assert (await it.http.get(f"/v1/batches?{query}")).status_code == 400


async def test_synchronous_calls_check_their_body() -> None:
    """Not JSON, streaming, no model, no messages and too large are refused and not on the bill."""
    async with bench(Scenario(limits=Limits(sync_body_bytes=1000))) as it:
        wrong: list[dict[str, Any]] = [body() | {"stream": True}, {"model": "m"}, {"messages": []}]
        for content in (b"{", b"[]", *(json.dumps(one).encode() for one in wrong)):
            assert (await it.http.post(CHAT, content=content)).status_code == 400
        assert (await it.http.post(CHAT, json=body("x" * 2000))).status_code == 413
        assert it.simulator.bill.summary()["sync_runs"] == 0
