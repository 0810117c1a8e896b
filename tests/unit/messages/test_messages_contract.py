"""The published schemas describe what is really written and read, and the files agree with the code."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
import yaml
from jsonschema import Draft202012Validator, FormatChecker

from batchferry.domain.envelope import (
    BatchFacts,
    EventFields,
    EventKind,
    OutcomeContext,
    quote_original,
    render_event,
    render_failure,
    render_result,
    render_split,
)
from batchferry.domain.money import price_row
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import Usage
from batchferry.domain.requests import Request, parse_request
from batchferry.domain.rows import ResultLine, RowClass, RowFlag
from batchferry.messages import (
    EventMessage,
    FailureMessage,
    RequestRecord,
    ResultMessage,
    SplitMessage,
    asyncapi,
    check_schemas,
    schemas,
    write_schemas,
)
from batchferry.messages.__main__ import main

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
PUBLISHED = Path(__file__).parents[3] / "schemas"
BATCH = BatchFacts(
    account="main", provider="openai", endpoint="/v1/embeddings", model="m", batch_id="01JD", landed_at=NOW
)
BARE = OutcomeContext(ledger_id="abcdefghjk", topic="requests", partition=0, offset=7)
WHOLE = OutcomeContext(
    ledger_id="abcdefghjk",
    topic="requests",
    partition=0,
    offset=7,
    custom_id="a",
    t0=NOW,
    deadline=NOW,
    deadline_met=False,
    wire_id="abcdefghjk-0-7-2",
    submission=2,
    attempts={"expired": 1},
    batch=BATCH,
    source_event="e",
)


@functools.cache
def validator(name: str) -> Draft202012Validator:
    """A validator of a published schema."""
    schema = schemas()[name]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=FormatChecker())


def results() -> list[bytes]:
    """Every look of a result."""
    price = price_row("openai", "gpt-4o-mini", Usage(1, 2, 1), NOW, batch=True)
    line = ResultLine("w", RowClass.SUCCEEDED, 200, "req", b'{"a":[1]}', usage=Usage(1, 2, 1), flags=tuple(RowFlag))
    bare = ResultLine("w", RowClass.SUCCEEDED, 200)
    return [
        render_result(WHOLE, line, price),
        render_result(BARE, bare, None),
        render_result(WHOLE, ResultLine("w", RowClass.SUCCEEDED, 200, body=b"\xff"), None, is_strict=False),
    ]


def failures() -> list[bytes]:
    """Every look of a failure."""
    line = ResultLine("w", RowClass.TRANSIENT, 503, "req", b'{"error":{}}')
    made = [
        render_failure(WHOLE, row_class, "code", "message", original=quote_original(b"\xff")) for row_class in RowClass
    ]
    made.append(render_failure(BARE, RowClass.BAD_RECORD, "tombstone", "no value"))
    made.append(
        render_failure(
            WHOLE,
            RowClass.OUTCOME_TOO_LARGE,
            "outcome_too_large",
            "m",
            remedy="r",
            tried=[
                {"lane": "batch", "batch_id": "b", "wire_id": "w", "row_class": "transient", "code": None, "at": NOW}
            ],
            original=quote_original(b"{}"),
            line=line,
            price=price_row("openai", "gpt-4o-mini", Usage(1, 2), NOW, batch=True),
            duplicate_of=3,
            answer={"bytes": 9, "sha256": "ab", "file_id": "f", "kept_at": None},
        )
    )
    return made


def splits() -> list[bytes]:
    """A request that was cut after a provider refused it, and one that was never sent."""
    return [
        render_split(WHOLE, ResultLine("w", RowClass.TOO_LONG, 400, code="context_length_exceeded"), 3),
        render_split(BARE, ResultLine("", RowClass.TOO_LONG), 2),
    ]


def events() -> list[bytes]:
    """Every kind of event, and one with every field."""
    fields: EventFields = {
        "from_state": "a",
        "to_state": "b",
        "reason": "count",
        "scope": "main",
        "alarm": "x",
        "remedy": "y",
        "rows": 1,
        "bytes": 2,
        "tokens": 3,
        "partitions": [0],
        "classes": {"succeeded": 1},
        "partition": 0,
        "offset": 1,
        "deadline": NOW,
        "late_s": 1.5,
        "waited_s": 2.0,
        "input_tokens": 1,
        "output_tokens": 1,
        "cached_tokens": 0,
        "usd": "0.1",
        "sync_usd": "0.2",
        "unpriced_rows": 0,
        "lane": "sync",
        "row_class": "expired",
        "offsets": OffsetSet([1, 70_000]).dumps(),
        "submission": 2,
        "codes": {"context_length_exceeded": 1},
        "unknown_rows": 1,
        "shape": "f00d",
        "estimated_usd": "0.3",
    }
    assert set(fields) == set(EventFields.__annotations__)
    return [render_event(kind, "e", NOW, BATCH) for kind in EventKind] + [
        render_event(EventKind.COST, "e", NOW, None, **fields)
    ]


@pytest.mark.parametrize(
    ("name", "model", "values"),
    [
        ("result", ResultMessage, results()),
        ("split", SplitMessage, splits()),
        ("failure", FailureMessage, failures()),
        ("event", EventMessage, events()),
    ],
)
def test_messages_written_bytes_are_valid(name, model, values):
    """Every kind of message as it is really rendered obeys its schema and is read by its model, strangers ignored."""
    check = validator(name)
    members = set(schemas()[name]["properties"])
    for value in values:
        found = orjson.loads(value)
        check.validate(found)
        assert set(found) <= members
        found["added_later"] = {"x": 1}
        check.validate(found)
        model.model_validate_json(orjson.dumps(found))


def test_messages_every_field_of_an_event_reaches_its_model():
    """A field that is written is one that the model names: nothing of an event is ignored by its own reader."""
    told = orjson.loads(events()[-1])
    read = EventMessage.model_validate(told).model_dump(exclude={"batch"}, exclude_none=True)
    assert read.keys() == told.keys() - {"batch"}


def test_messages_outcomes_of_one_topic_are_told_apart():
    """The results topic holds answers and cut requests, and no value is both; a reader tells them by their kind."""
    document = asyncapi()
    of_topic = {name: set(channel["messages"]) for name, channel in document["channels"].items()}
    assert of_topic["results"] == {"result", "split"}
    assert of_topic["review"] == {"result", "failure"}
    values = {"result": results(), "split": splits(), "failure": failures()}
    for kind, mine in values.items():
        for value in mine:
            found = orjson.loads(value)
            assert found["kind"] == kind
            assert [name for name in values if validator(name).is_valid(found)] == [kind]


@pytest.mark.parametrize(
    ("value", "is_good"),
    [
        (b'{"custom_id":"a","body":{"model":"m","messages":[],"temperature":1}}', True),
        (
            b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]},"x":1}',
            True,
        ),
        (b'{"custom_id":"","body":{"model":"m","messages":[]}}', False),
        (b'{"custom_id":1,"body":{"model":"m","messages":[]}}', False),
        (b'{"body":{"model":"m","messages":[]}}', False),
        (b'{"custom_id":"a","method":"GET","body":{"model":"m","messages":[]}}', False),
        (b'{"custom_id":"a","url":"https://x","body":{"model":"m","messages":[]}}', False),
        (b'{"custom_id":"a","body":{"model":"m","messages":[],"stream":true}}', False),
        (b'{"custom_id":"a","body":{"messages":[]}}', False),
        (b'{"custom_id":"a"}', False),
    ],
)
def test_messages_request_schema_agrees_with_the_reader(value: bytes, is_good: bool):
    """The request schema and the reader of records accept and refuse the same."""
    found = orjson.loads(value)
    assert validator("request").is_valid(found) is is_good
    assert isinstance(parse_request(value), Request) is is_good
    if is_good:
        RequestRecord.model_validate_json(value)


def test_messages_published_files_agree():
    """The files in schemas/ are what the code generates."""
    assert check_schemas(PUBLISHED) == []


def test_messages_drift_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A changed, missing or foreign file is reported, and the command's exit code says so."""
    names = write_schemas(tmp_path)
    assert main(["--check", str(tmp_path)]) == 0
    (tmp_path / names[1]).write_text("{}")
    (tmp_path / names[2]).unlink()
    (tmp_path / "stray.json").write_text("{}")
    assert main(["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("\n") >= 4
    assert check_schemas(tmp_path) == [
        f"{names[1]}: differs from the models",
        f"{names[2]}: missing",
        "stray.json: made by nobody",
    ]
    assert main(["--write", str(tmp_path)]) == 0
    assert check_schemas(tmp_path) == ["stray.json: made by nobody"]


def test_messages_asyncapi_is_whole():
    """Every reference in the AsyncAPI document leads somewhere, and the file holds no YAML aliases."""
    document = asyncapi()
    assert yaml.safe_load((PUBLISHED / "asyncapi.yaml").read_text(encoding="utf-8")) == document
    references = []

    def collect(node: object) -> None:
        if isinstance(node, dict):
            references.extend([node["$ref"]] if "$ref" in node else [])
            for inner in node.values():
                collect(inner)

    collect(document)
    assert len(references) > 12
    for reference in references:
        if reference.startswith("#/"):
            target = document
            for part in reference[2:].split("/"):
                target = target[part]
        else:
            assert (PUBLISHED / reference).is_file()
