"""Whether an answer is what the route asks for: any text, JSON, or JSON that fits a schema.

Where a model answers by calling a tool instead of writing text (a forced tool is the older way to structured output),
the arguments of its calls are what is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import jsonschema
import msgspec
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

from batchferry.domain.errors import ConfigError

CheckKind = Literal["none", "json", "json_schema"]


class AnswerFault(StrEnum):
    """Why an answer is bad. None of these words quotes it."""

    UNREADABLE = "unreadable"
    """The body is no JSON of the endpoint's documented shape."""
    NO_TEXT = "no_text"
    """No text and no tool call is in it, or the endpoint (embeddings, say) never answers in text."""
    NOT_JSON = "not_json"
    """The text is no JSON value by itself; JSON inside a Markdown fence is none."""
    TOO_DEEP = "too_deep"
    """It is nested deeper than can be checked."""
    SCHEMA = "schema"
    """It is JSON and does not fit the schema."""


@dataclass(frozen=True, slots=True, eq=False)
class AnswerSchema:
    """A JSON Schema ready for use; made by ``compile_schema``."""

    _validator: Validator

    def fits(self, value: Any) -> bool:
        """Whether a decoded JSON value fits."""
        return self._validator.is_valid(value)


def compile_schema(text: bytes) -> AnswerSchema:
    """A JSON Schema of any draft (2020-12 where it names none), checked and with every reference followed.

    Nothing is ever fetched: what a reference names must be inside the schema. ``format`` is a remark, as the drafts
    since 2019-09 have it.

    Raises:
        ConfigError: not JSON, no lawful schema, or a reference that leads nowhere.
    """
    try:
        schema: Any = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(["the answer schema is not JSON: write one JSON Schema as JSON, in UTF-8"]) from error
    if not isinstance(schema, dict):
        raise ConfigError(["the answer schema is no JSON object: write a JSON Schema"])
    if not isinstance(schema.get("$schema", ""), str):
        raise ConfigError(["$schema of the answer schema is not a text: name the draft by its address"])
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        lost = _lost_reference(schema)
        if lost is not None:
            raise ConfigError(
                [f"the answer schema refers to {lost}, which is not in it: nothing is fetched, so put it under $defs"]
            )
        compiled = AnswerSchema(kind(schema, registry=EMPTY_REGISTRY))
        compiled.fits(None)
    except jsonschema.SchemaError as error:
        raise ConfigError([f"the answer schema breaks its own rules at {error.json_path}: correct it"]) from error
    except RecursionError as error:
        raise ConfigError(["the answer schema is nested too deep or refers to itself without an end"]) from error
    return compiled


def check_answer(body: bytes, endpoint: str, kind: CheckKind, schema: AnswerSchema | None = None) -> AnswerFault | None:
    """What is wrong with the native answer of an endpoint; None when it is good.

    With several choices every one must be good.

    Args:
        body: the provider's native answer to one request, JSON.
        endpoint: path of the endpoint it comes from, such as ``/v1/chat/completions``.
        kind: ``none`` finds nothing wrong with anything.
        schema: for ``json_schema``.

    Raises:
        ValueError: ``json_schema`` without a schema.
    """
    if kind == "none":
        return None
    if kind == "json_schema" and schema is None:
        raise ValueError("the check json_schema needs a schema")
    try:
        texts = _texts(body, endpoint)
    except (ValueError, RecursionError):
        return AnswerFault.UNREADABLE
    if not texts or not all(text.strip() for text in texts):
        return AnswerFault.NO_TEXT
    for text in texts:
        try:
            value = msgspec.json.decode(text)
        except RecursionError:
            return AnswerFault.TOO_DEEP
        except ValueError:
            return AnswerFault.NOT_JSON
        try:
            if kind == "json_schema" and schema is not None and not schema.fits(value):
                return AnswerFault.SCHEMA
        except RecursionError:
            return AnswerFault.TOO_DEEP
    return None


# ------------------------------------------------------------------------------------ the text of an answer


class _Function(msgspec.Struct, gc=False):
    arguments: msgspec.Raw = msgspec.Raw()
    """JSON inside a text; Mistral's API also allows the JSON itself."""


class _Call(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    text: str | None = None
    input: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct, gc=False):
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct, gc=False):
    message: _Message | None = None
    text: str | None = None


class _Choices(msgspec.Struct, gc=False):
    choices: list[_Choice]


class _Output(msgspec.Struct, gc=False):
    type: str = ""
    content: list[_Part] | None = None
    arguments: str | None = None


class _Response(msgspec.Struct, gc=False):
    output: list[_Output]


class _AnthropicMessage(msgspec.Struct, gc=False):
    content: list[_Part]


class _GeminiCall(msgspec.Struct, gc=False):
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _GeminiPart(msgspec.Struct, gc=False, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    function_call: _GeminiCall | None = None


class _GeminiContent(msgspec.Struct, gc=False):
    parts: list[_GeminiPart] | None = None


class _Candidate(msgspec.Struct, gc=False):
    content: _GeminiContent | None = None


class _Candidates(msgspec.Struct, gc=False, rename="camel"):
    candidates: list[_Candidate] | None = None
    prompt_feedback: msgspec.Raw = msgspec.Raw()
    usage_metadata: msgspec.Raw = msgspec.Raw()


_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_response = msgspec.json.Decoder(_Response).decode
_decode_message = msgspec.json.Decoder(_AnthropicMessage).decode
_decode_candidates = msgspec.json.Decoder(_Candidates).decode
_decode_text = msgspec.json.Decoder(str).decode


def _texts(body: bytes, endpoint: str) -> list[str]:
    """Every text that must be good by itself; empty where there is none."""
    if endpoint.endswith("/completions"):
        found: list[str] = []
        for choice in _decode_choices(body).choices:
            found += [choice.text or ""] if choice.message is None else _of_message(choice.message)
        return found
    if endpoint.endswith("/responses"):
        output = _decode_response(body).output
        said = "".join(_joined(item.content or ()) for item in output if item.type == "message")
        return [said] if said else [item.arguments or "" for item in output if item.type == "function_call"]
    if endpoint.endswith("/messages"):
        parts = _decode_message(body).content
        said = _joined(parts)
        return [said] if said else [bytes(part.input).decode() for part in parts if part.type == "tool_use"]
    if endpoint.endswith(":generateContent"):
        answer = _decode_candidates(body)
        if answer.candidates is None and not bytes(answer.prompt_feedback) and not bytes(answer.usage_metadata):
            raise ValueError("no answer of this endpoint")
        found = []
        for candidate in answer.candidates or ():
            found += _of_candidate(candidate)
        return found
    return []


def _of_candidate(candidate: _Candidate) -> list[str]:
    parts = (candidate.content.parts if candidate.content is not None else None) or ()
    said = "".join(part.text or "" for part in parts if not part.thought)
    if said:
        return [said]
    return [bytes(part.function_call.args).decode() for part in parts if part.function_call is not None] or [""]


def _of_message(message: _Message) -> list[str]:
    said = message.content if isinstance(message.content, str) else _joined(message.content or ())
    if said:
        return [said]
    calls = [call.function for call in message.tool_calls or () if call.function is not None]
    if message.function_call is not None:
        calls.append(message.function_call)
    return [_arguments(bytes(call.arguments)) for call in calls] or [""]


def _arguments(raw: bytes) -> str:
    return _decode_text(raw) if raw[:1] == b'"' else raw.decode()


def _joined(parts: list[_Part] | tuple[()]) -> str:
    return "".join(part.text or "" for part in parts if part.type in {"text", "output_text"})


def _lost_reference(schema: Mapping[str, Any]) -> str | None:
    """The first reference found that leads nowhere."""
    resource: Resource[Any] = Resource.from_contents(schema, default_specification=DRAFT202012)
    address = resource.id() or ""
    waiting = [(resource, EMPTY_REGISTRY.with_resource(address, resource).resolver(address))]
    while waiting:
        part, resolver = waiting.pop()
        if isinstance(part.contents, Mapping):
            for name in ("$ref", "$dynamicRef", "$recursiveRef"):
                reference = part.contents.get(name)
                if isinstance(reference, str):
                    try:
                        resolver.lookup(reference)
                    except Unresolvable:
                        return reference
        waiting += [(below, resolver.in_subresource(below)) for below in part.subresources()]
    return None
