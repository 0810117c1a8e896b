"""Gemini's rows between its shape and the simulator's own: what a request asks, and how its end looks on the wire.

A batch file is translated line by line before it is checked and run, the result lines are translated back afterwards.
A row's identity, by which it is billed and by which scenarios match it, is the caller's request with its ``model``, not
the translation.

Shapes: https://ai.google.dev/api/generate-content, https://ai.google.dev/api/batch-api, and google.rpc.Status.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from batchferry.simulator.answers import CHAT
from batchferry.simulator.inputfile import NATIVE
from batchferry.simulator.jsontext import dump_json, parse_json

MODEL_MEMBER = "model"
_LABELLED_ROLES = {"user": "user", "model": "assistant", "function": "user"}
_BROKEN_BYTE = b"\xff"
_BROKEN_MARK = "\ue000"
"""Stands for a byte that is not UTF-8 while a line is translated; a private-use character no answer has by itself."""
_NOT_A_REQUEST = b"not a request"
_FIRST_BYTES = 4096
_WIRE_ID = re.compile(rb'"custom_id":"([^"\\]{1,128})"')
_LINE_NUMBER = re.compile(rb'"id":"batch_req_[^"]{16}([0-9a-f]{6})f?"')
_COPY_BYTES = 1024 * 1024


class Google(NamedTuple):
    """A google.rpc status: number, word and the HTTP status that goes with it."""

    number: int
    word: str
    http_status: int


_BY_WORD: Mapping[str, Google] = MappingProxyType(
    {
        google.word: google
        for google in (
            Google(1, "CANCELLED", 499),
            Google(3, "INVALID_ARGUMENT", 400),
            Google(4, "DEADLINE_EXCEEDED", 504),
            Google(5, "NOT_FOUND", 404),
            Google(7, "PERMISSION_DENIED", 403),
            Google(8, "RESOURCE_EXHAUSTED", 429),
            Google(9, "FAILED_PRECONDITION", 400),
            Google(10, "ABORTED", 409),
            Google(12, "UNIMPLEMENTED", 501),
            Google(13, "INTERNAL", 500),
            Google(14, "UNAVAILABLE", 503),
            Google(16, "UNAUTHENTICATED", 401),
        )
    }
)
_WORDS_OF_STATUS: Mapping[int, str] = MappingProxyType(
    {
        401: "UNAUTHENTICATED",
        402: "PERMISSION_DENIED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED",
        409: "ABORTED",
        429: "RESOURCE_EXHAUSTED",
        499: "CANCELLED",
        500: "INTERNAL",
        501: "UNIMPLEMENTED",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    }
)


def google_of(status: int) -> Google:
    """The google.rpc status that stands for an HTTP status."""
    usual = "INVALID_ARGUMENT" if 400 <= status < 500 else "UNAVAILABLE" if status > 500 else "INTERNAL"
    return _BY_WORD[_WORDS_OF_STATUS.get(status, usual)]


def google_error(word: str, message: str, details: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The body of a refused call."""
    google = _BY_WORD[word]
    error: dict[str, Any] = {"code": google.http_status, "message": message, "status": word}
    if details:
        error["details"] = details
    return {"error": error}


# ------------------------------------------------------------------------------------------- what is asked


def chat_of(request: dict[str, Any], model: str) -> dict[str, Any]:
    """The simulator's own form of a GenerateContentRequest."""
    messages: list[dict[str, Any]] = []
    system = _text_of(request.get("systemInstruction") or request.get("system_instruction"))
    if system:
        messages.append({"role": "system", "content": system})
    contents = request.get("contents")
    for content in contents if isinstance(contents, list) else [contents] if isinstance(contents, dict) else ():
        role = _LABELLED_ROLES.get(content.get("role") or "user", "user") if isinstance(content, dict) else "user"
        messages.append({"role": role, "content": _text_of(content)})
    chat: dict[str, Any] = {"model": model, "messages": messages if contents else []}
    config = request.get("generationConfig") or request.get("generation_config")
    config = config if isinstance(config, dict) else {}
    for ours, theirs in (("max_tokens", "maxOutputTokens"), ("n", "candidateCount"), ("temperature", "temperature")):
        if config.get(theirs) is not None:
            chat[ours] = config[theirs]
    if config.get("responseMimeType") == "application/json":
        schema = config.get("responseJsonSchema") or config.get("responseSchema")
        chat["response_format"] = (
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": _lower_types(schema)}}
            if isinstance(schema, dict)
            else {"type": "json_object"}
        )
    tools = [
        {"type": "function", "function": function}
        for tool in request.get("tools") or ()
        if isinstance(tool, dict)
        for function in tool.get("functionDeclarations") or ()
        if isinstance(function, dict)
    ]
    if tools:
        chat["tools"] = tools
    return chat


def _text_of(content: Any) -> str:
    parts = content.get("parts") if isinstance(content, dict) else None
    parts = [parts] if isinstance(parts, dict) else parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _lower_types(schema: Any) -> Any:
    """A schema with the names of its types as JSON Schema has them: Gemini writes ``OBJECT`` and ``STRING``."""
    if isinstance(schema, list):
        return [_lower_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else _lower_types(value)
        for name, value in schema.items()
    }


def identity_of(request: dict[str, Any], model: str) -> dict[str, Any]:
    """The request as its caller wrote it: with the model, which the wire carries elsewhere."""
    return {**request, MODEL_MEMBER: model}


def translate_requests(source: Path, target: Path, model: str, max_line_bytes: int) -> None:
    """Write a file of ``{"key", "request"}`` lines in the simulator's form; what is none fails the later check."""
    with source.open("rb") as lines, target.open("wb") as out:
        while line := lines.readline(max_line_bytes + 1):
            if len(line) > max_line_bytes and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = lines.readline(_COPY_BYTES)
                out.write(_NOT_A_REQUEST + b"\n")
                continue
            out.write(_translate_request(line.removesuffix(b"\n"), model) + b"\n")


def _translate_request(line: bytes, model: str) -> bytes:
    try:
        parsed = parse_json(line)
    except ValueError:
        return _NOT_A_REQUEST
    request, key = (parsed.get("request"), parsed.get("key")) if isinstance(parsed, dict) else (None, None)
    if not isinstance(request, dict) or not isinstance(key, str) or not key:
        return _NOT_A_REQUEST
    chat, native = chat_of(request, model), identity_of(request, model)
    return dump_json({"custom_id": key, "method": "POST", "url": CHAT, "body": chat, NATIVE: native})


# --------------------------------------------------------------------------------------------- how it ends


class End(NamedTuple):
    """How a row ends on the wire: a response, or an error as google.rpc.Status."""

    response: dict[str, Any] | None
    error: dict[str, Any] | None
    google: Google | None = None
    is_blocked: bool = False
    """The prompt was not let through, which counts as a success."""


_FINISHES = {"stop": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY", "tool_calls": "STOP"}
_UNRUN = {"request_timeout", "batch_expired"}


def end_of(status: int, body: dict[str, Any], model: str) -> End:
    """An HTTP answer of the simulator's chat endpoint in Gemini's words."""
    if status == 200:
        return End(_response(body, model) if body else {}, None)
    error = body.get("error") if isinstance(body.get("error"), dict) else {}
    assert isinstance(error, dict)
    code, message = error.get("code"), str(error.get("message") or "")
    if code == "content_policy_violation":
        return End(_blocked(model), None, is_blocked=True)
    word = google_of(status).word if status else "INTERNAL"
    if code == "context_length_exceeded":
        limit, asked = ([int(number) for number in re.findall(r"\d+", message)] + [0, 0])[:2]
        message = f"The input token count ({asked}) exceeds the maximum number of tokens allowed ({limit})."
    elif code == "model_not_found":
        word, message = "NOT_FOUND", unknown_model(model)
    elif code == "insufficient_quota":
        word, message = "RESOURCE_EXHAUSTED", "Your prepayment credits are depleted."
    elif error.get("param") == "messages":
        message = "* GenerateContentRequest.contents: contents is not specified\n"
    return _error(word, message or "Internal error encountered.")


def unknown_model(model: str) -> str:
    """How a model is refused."""
    return (
        f"models/{model} is not found for API version v1beta, or is not supported for generateContent. Call ListModels "
        "to see the list of available models and their supported methods."
    )


def _error(word: str, message: str) -> End:
    google = _BY_WORD[word]
    return End(None, {"code": google.number, "message": message, "status": word}, google)


def _response(body: dict[str, Any], model: str) -> dict[str, Any]:
    candidates = []
    for index, choice in enumerate(body.get("choices") or ()):
        message, finish = choice["message"], choice["finish_reason"]
        candidate: dict[str, Any] = {"finishReason": _FINISHES.get(finish, "OTHER"), "index": index}
        calls = message.get("tool_calls")
        if calls:
            name = calls[0]["function"]["name"]
            candidate["content"] = {"parts": [{"functionCall": {"name": name, "args": {}}}], "role": "model"}
        elif finish != "content_filter":
            # There is no member for a refusal here: it is an answer like any other.
            text = message.get("content") or message.get("refusal") or ""
            candidate["content"] = {"parts": [{"text": text}], "role": "model"}
        candidates.append(candidate)
    usage = body["usage"]
    return {
        "candidates": candidates,
        "usageMetadata": _usage(usage["prompt_tokens"], usage["completion_tokens"]),
        "modelVersion": model,
        "responseId": _response_id(str(body.get("id"))),
    }


def _usage(taken: int, given: int) -> dict[str, Any]:
    """A quarter of what the model made were thoughts, which are billed and stand apart; zeros are left out."""
    thoughts = given // 4
    counts = {
        "promptTokenCount": taken,
        "candidatesTokenCount": given - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": taken + given,
    }
    usage: dict[str, Any] = {name: count for name, count in counts.items() if count}
    return usage | {"promptTokensDetails": [{"modality": "TEXT", "tokenCount": taken}]}


def _response_id(seed: str) -> str:
    return hashlib.sha256(seed.encode()).hexdigest()[:22]


def _blocked(model: str) -> dict[str, Any]:
    return {
        "promptFeedback": {"blockReason": "PROHIBITED_CONTENT"},
        "usageMetadata": {"promptTokenCount": 1, "totalTokenCount": 1},
        "modelVersion": model,
    }


def _line_of(parsed: dict[str, Any], model: str) -> tuple[bytes, bool]:
    """One result line, and whether its prompt was blocked."""
    key, response = parsed["custom_id"], parsed.get("response")
    if isinstance(response, dict):
        end = end_of(response["status_code"], response["body"], model)
    else:
        code = (parsed.get("error") or {}).get("code")
        end = _error("DEADLINE_EXCEEDED" if code in _UNRUN else "CANCELLED", "The request was not finished in time.")
    if end.error is None:
        return dump_json({"key": key, "response": end.response}), end.is_blocked
    assert end.google is not None
    # Rows have been reported with either kind of number: which one a row has follows from its key.
    is_http = hashlib.sha256(str(key).encode()).digest()[0] % 2 == 1
    code = end.google.http_status if is_http else end.google.number
    error = {"code": code, "message": end.error["message"]}
    return dump_json({"key": key, "error": error}), False


def _translate_result(line: bytes, model: str) -> tuple[bytes, bool]:
    is_broken = _BROKEN_BYTE in line
    try:
        parsed = parse_json(line.replace(_BROKEN_BYTE, _BROKEN_MARK.encode()) if is_broken else line)
        made, is_blocked = _line_of(parsed, model)
    except ValueError:
        return _cut_line(line), False
    return (made.replace(_BROKEN_MARK.encode(), _BROKEN_BYTE) if is_broken else made), is_blocked


def _cut_line(line: bytes) -> bytes:
    """What stands for a line that breaks off in its middle."""
    found = _WIRE_ID.search(line[:_FIRST_BYTES])
    key = found.group(1) if found is not None else b""
    return b'{"key":"' + key + (b'","response":{"candidates":[{"content":{"parts":[{"text":"' if key else b"")


class _Place(NamedTuple):
    """A result line in one of the two files: its row, which file, where it begins."""

    row: int
    file: int
    start: int


def translate_results(output: Path, error: Path, model: str, *, in_order: bool) -> int:
    """Make one file of Gemini's lines of both result files, in place of ``output``; ``error`` is empty afterwards.

    Args:
        output: the file of answers.
        error: the file of errors.
        model: the job's.
        in_order: in the order of the requests, as is documented; else answers first, as they come.

    Returns:
        How many prompts were blocked.
    """
    made, blocked = output.with_name(f"{output.name}.gemini"), 0
    with output.open("rb") as first, error.open("rb") as second, made.open("wb") as out:
        files: tuple[IO[bytes], IO[bytes]] = (first, second)
        places = [place for number, file in enumerate(files) for place in _places(file, number)]
        if in_order:
            places.sort(key=lambda place: place.row)
        is_cut = False
        for place in places:
            files[place.file].seek(place.start)
            line = files[place.file].readline()
            if not line.endswith(b"\n"):
                is_cut = True  # the end of the whole file, wherever its row belongs
                continue
            translated, is_blocked = _translate_result(line[:-1], model)
            blocked += is_blocked
            out.write(translated + b"\n")
        if is_cut:
            out.write(_cut_line(b""))
    made.replace(output)
    error.write_bytes(b"")
    return blocked


def _places(file: IO[bytes], number: int) -> Iterator[_Place]:
    start = row = 0
    for line in file:
        found = _LINE_NUMBER.search(line[:_FIRST_BYTES])
        row = int(found.group(1), 16) if found is not None else row
        yield _Place(row, number, start)
        start += len(line)
