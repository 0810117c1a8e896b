"""Checks calls against the published OpenAPI description of files, batches and the synchronous endpoints.

``data/openai-batch.patched.json`` is cut from OpenAI's own document (MIT, see ``data/LICENSE.openai-openapi``), with
the members that their servers answer as null allowed to be null.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

_DOCUMENT = Path(__file__).parent / "data" / "openai-batch.patched.json"
_ROOT = "urn:openai"

RESPONSE_SCHEMAS = {
    "/v1/chat/completions": "CreateChatCompletionResponse",
    "/v1/responses": "Response",
    "/v1/embeddings": "CreateEmbeddingResponse",
    "/v1/completions": "CreateCompletionResponse",
    "/v1/moderations": "CreateModerationResponse",
}


class Contract:
    """The description, ready to check answers; every check returns a list of complaints."""

    def __init__(self) -> None:
        self._document: dict[str, Any] = json.loads(_DOCUMENT.read_text(encoding="utf-8"))
        resource = Resource.from_contents(self._document, default_specification=DRAFT202012)
        self._registry = Registry().with_resource(_ROOT, resource)
        self._paths = [
            (re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(f"/v1{path}"))), item)
            # Fixed paths before those with variables, so that a name is not taken for an id.
            for path, item in sorted(self._document["paths"].items(), key=lambda pair: "{" in pair[0])
        ]

    @cache  # noqa: B019 (one contract lives as long as the test process)
    def _validator(self, pointer: str) -> Draft202012Validator:
        return Draft202012Validator({"$ref": f"{_ROOT}#{pointer}"}, registry=self._registry)

    def schema_faults(self, name: str, value: Any) -> list[str]:
        """What is wrong with a value of a named schema."""
        return self._faults(f"/components/schemas/{name}", value)

    def _faults(self, pointer: str, value: Any) -> list[str]:
        return [f"{fault.json_path}: {fault.message[:200]}" for fault in self._validator(pointer).iter_errors(value)]

    def answer_faults(self, method: str, path: str, status: int, content_type: str, content: bytes) -> list[str]:
        """What is wrong with an answer."""
        found = next(((regex, item) for regex, item in self._paths if regex.fullmatch(path)), None)
        if found is None or method.lower() not in found[1]:
            return [f"{method} {path} is not described"]
        if status >= 400:
            return self.schema_faults("ErrorResponse", json.loads(content))
        answer = found[1][method.lower()]["responses"].get(str(status))
        if answer is None:
            return [f"{method} {path}: status {status} is not described"]
        kind = content_type.partition(";")[0]
        if kind not in answer["content"]:
            return [f"{method} {path}: content type {kind} is not described"]
        if kind != "application/json":
            return []
        described = answer["content"][kind]["schema"]
        return self._faults(described["$ref"].removeprefix("#"), json.loads(content))

    def line_faults(self, line: dict[str, Any], endpoint: str) -> list[str]:
        """What is wrong with a line of an output or error file."""
        faults = self.schema_faults("BatchRequestOutput", line)
        faults += [f"{member} is missing" for member in ("id", "custom_id", "response", "error") if member not in line]
        response = line.get("response")
        if isinstance(response, dict):
            schema = RESPONSE_SCHEMAS[endpoint] if response["status_code"] == 200 else "ErrorResponse"
            faults += [f"body {fault}" for fault in self.schema_faults(schema, response["body"])]
        return faults
