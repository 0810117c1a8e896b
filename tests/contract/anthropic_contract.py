"""Checks calls against the schema of Message Batches made of the official Python client's types.

``data/anthropic-message-batches.json`` is derived from PyPI ``anthropic`` 2.14.0 (Apache-2.0, see
``data/LICENSE.anthropic-sdk-python``); its limits were read off Anthropic's published description.
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

_DOCUMENT = Path(__file__).parent / "data" / "anthropic-message-batches.json"
_ROOT = "urn:anthropic"


class Contract:
    """The description, ready to check; every check returns a list of complaints."""

    def __init__(self) -> None:
        self._document: dict[str, Any] = json.loads(_DOCUMENT.read_text(encoding="utf-8"))
        resource = Resource.from_contents(self._document, default_specification=DRAFT202012)
        self._registry = Registry().with_resource(_ROOT, resource)
        self._operations = [
            (method, re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), operation)
            for name, operation in self._document["x-operations"].items()
            for method, path in [name.split(" ")]
        ]

    @cache  # noqa: B019 (one contract lives as long as the test process)
    def _validator(self, name: str) -> Draft202012Validator:
        return Draft202012Validator({"$ref": f"{_ROOT}#/$defs/{name}"}, registry=self._registry)

    def faults(self, name: str, value: Any) -> list[str]:
        """What is wrong with a value of a named definition."""
        return [f"{fault.json_path}: {fault.message[:200]}" for fault in self._validator(name).iter_errors(value)]

    def _operation(self, method: str, path: str) -> dict[str, str] | None:
        return next((one for m, regex, one in self._operations if m == method and regex.fullmatch(path)), None)

    def request_faults(self, method: str, path: str, content: bytes) -> list[str]:
        """What is wrong with a request's body."""
        operation = self._operation(method, path)
        if operation is None:
            return [f"{method} {path} is not described"]
        return self.faults(operation["request"], json.loads(content)) if "request" in operation else []

    def answer_faults(self, method: str, path: str, status: int, content: bytes) -> list[str]:
        """What is wrong with an answer; of results with every line."""
        operation = self._operation(method, path)
        if operation is None:
            return [f"{method} {path} is not described"]
        if status >= 400:
            return self.faults("ErrorResponse", json.loads(content))
        if "response-line" in operation:
            lines = content.split(b"\n")[:-1]
            return [fault for line in lines for fault in self.faults(operation["response-line"], json.loads(line))]
        return self.faults(operation["response"], json.loads(content))
