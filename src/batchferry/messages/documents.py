"""JSON Schemas and the AsyncAPI document, generated; and the check that the files agree with the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from batchferry.messages.models import EventMessage, FailureMessage, RequestRecord, ResultMessage, SplitMessage

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MODELS: dict[str, type[BaseModel]] = {
    "request": RequestRecord,
    "result": ResultMessage,
    "split": SplitMessage,
    "failure": FailureMessage,
    "event": EventMessage,
}
ASYNCAPI_FILE = "asyncapi.yaml"


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema (2020-12) of each message by its name: request, result, split, failure, event."""
    made = {}
    for name, model in _MODELS.items():
        schema = model.model_json_schema(by_alias=True)
        made[name] = {"$schema": _DIALECT, "$id": f"urn:batchferry:schema:{name}:1", **schema}
    return made


def asyncapi(version: str = "1.0.0") -> dict[str, Any]:
    """The AsyncAPI 3.0 document: topics, who sends and who receives, headers, and the schemas by reference.

    ``version`` is that of the messages, not of the program.
    """
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "batchferry",
            "version": version,
            "description": "LLM requests in, one outcome a request out. Read every topic with "
            "isolation.level=read_committed; outcomes come in any order.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {
            "requests": _channel("requests", "One LLM request a record.", "anything", "request"),
            "results": _channel(
                "results",
                "Outcomes that succeeded, and those of requests that went on in parts.",
                "the input key, else custom_id",
                "result",
                "split",
            ),
            "failures": _channel("failures", "Outcomes that failed.", "the input key, else custom_id", "failure"),
            "review": _channel(
                "review",
                "Rows a person should look at, answered or not; optional.",
                "the input key, else custom_id",
                "result",
                "failure",
            ),
            "events": _channel("events", "The life of batches, holds and alarms.", "batch_id, else scope", "event"),
        },
        "operations": {
            "takeRequests": _operation("receive", "requests"),
            "publishResults": _operation("send", "results"),
            "publishFailures": _operation("send", "failures"),
            "publishReview": _operation("send", "review"),
            "publishEvents": _operation("send", "events"),
        },
        "components": {
            "messages": {
                name: {
                    "name": name,
                    "title": str(model.__doc__).splitlines()[0],
                    "contentType": "application/json",
                    "headers": _REQUEST_HEADERS if name == "request" else _OUR_HEADERS,
                    "payload": {
                        "schemaFormat": "application/schema+json;version=draft-2020-12",
                        "schema": {"$ref": f"./{_file_of(name)}"},
                    },
                }
                for name, model in _MODELS.items()
            }
        },
    }


def rendered() -> dict[str, str]:
    """Every published file by its name, as text."""
    files = {
        _file_of(name): json.dumps(schema, indent=2, ensure_ascii=False) + "\n" for name, schema in schemas().items()
    }
    files[ASYNCAPI_FILE] = yaml.dump(asyncapi(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return files


def write_schemas(directory: Path) -> list[str]:
    """Write every file; returns the names written."""
    directory.mkdir(parents=True, exist_ok=True)
    files = rendered()
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return sorted(files)


def check_schemas(directory: Path) -> list[str]:
    """What differs between the files and the code, one line each; empty when they agree."""
    wanted = rendered()
    drift = []
    for name, text in sorted(wanted.items()):
        path = directory / name
        if not path.is_file():
            drift.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != text:
            drift.append(f"{name}: differs from the models")
    if directory.is_dir():
        strangers = {path.name for path in directory.iterdir() if path.suffix in {".json", ".yaml"}} - wanted.keys()
        drift += [f"{name}: made by nobody" for name in sorted(strangers)]
    return drift


class _Dumper(yaml.SafeDumper):
    """Writes shared parts out again instead of as YAML aliases, which AsyncAPI tools do not all read."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (the base class decides the signature)
        return True


def _file_of(name: str) -> str:
    return f"{name}.v1.json"


def _channel(address: str, description: str, keyed_by: str, *messages: str) -> dict[str, Any]:
    return {
        "address": address,
        "description": f"{description} Keyed by {keyed_by}. The topic's name is configurable.",
        "messages": {message: {"$ref": f"#/components/messages/{message}"} for message in messages},
        "bindings": {"kafka": {"bindingVersion": "0.5.0"}},
    }


def _operation(action: str, channel: str) -> dict[str, Any]:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}}


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


_REQUEST_HEADERS = {
    "type": "object",
    "description": "All optional. Headers not named here are passed on to the outcome.",
    "properties": {
        "sla": _text("ISO 8601 duration within which the outcome is wanted, such as PT30H; not beside deadline."),
        "deadline": _text("ISO 8601 instant with a zone by which the outcome is wanted; not beside sla."),
        "provider": _text("Name of the account to use."),
        "slice": _text("A business dimension: requests of different slices never share a batch."),
        "priority": _text("now asks for the sync lane.", enum=["now", "batch"]),
        "traceparent": _text("W3C Trace Context; also ce_traceparent."),
        "content-type": _text(
            "application/cloudevents+json if the value is a structured CloudEvent around the request."
        ),
    },
}

_OUR_HEADERS = {
    "type": "object",
    "properties": {
        "ce_specversion": _text("CloudEvents.", const="1.0"),
        "ce_id": _text("Deterministic: tells a repetition from a second message."),
        "ce_source": _text("/batchferry/<input topic>"),
        "ce_type": _text(
            "batchferry.request.succeeded, batchferry.request.failed, batchferry.request.split or"
            " batchferry.batch.<kind>."
        ),
        "ce_time": _text("When the message was made.", format="date-time"),
        "ce_subject": _text("Of an outcome: <input topic>/<partition>/<offset>."),
        "content-type": _text("Of the value.", const="application/json"),
        "traceparent": _text("Of the request, passed on."),
    },
    "required": ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "content-type"],
}
