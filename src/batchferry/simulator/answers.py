"""Plausible answers of a model, derived from the request alone: the same body always gets the same text.

Success bodies follow the published response schemas of each endpoint. Tokens are counted as a quarter of the
characters, which is the usual rule of thumb for English text.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from batchferry.simulator.jsontext import dump_json
from batchferry.simulator.scenario import Outcome

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"
MODERATIONS = "/v1/moderations"
ANSWERED_ENDPOINTS = (CHAT, RESPONSES, EMBEDDINGS, COMPLETIONS, MODERATIONS)

PROMPT_MEMBER = {
    CHAT: "messages",
    RESPONSES: "input",
    EMBEDDINGS: "input",
    COMPLETIONS: "prompt",
    MODERATIONS: "input",
}
"""Which member of the body holds what the model is asked."""

DEFAULT_MODERATION_MODEL = "omni-moderation-latest"
DEFAULT_DIMENSIONS = 8
"""Real vectors have hundreds of numbers; these are short so that test files stay small."""
MAX_DIMENSIONS = 4096
MAX_CHOICES = 16

_SNAPSHOTS = {
    "gpt-5": "gpt-5-2025-08-07",
    "gpt-5-mini": "gpt-5-mini-2025-08-07",
    "gpt-5-nano": "gpt-5-nano-2025-08-07",
    "gpt-4.1": "gpt-4.1-2025-04-14",
    "gpt-4.1-mini": "gpt-4.1-mini-2025-04-14",
    "gpt-4o": "gpt-4o-2024-08-06",
    "gpt-4o-mini": "gpt-4o-mini-2024-07-18",
}

_MODERATION_CATEGORIES = (
    "hate",
    "hate/threatening",
    "harassment",
    "harassment/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/intent",
    "self-harm/instructions",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)

_ECHO_CHARS = 400
"""How much of a question its answer repeats at most."""
_LABEL = re.compile(r"\b[A-Za-z]+(?:_[A-Za-z]+)+\b")
_WORD = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer: the body of the HTTP response and what it costs in tokens."""

    body: dict[str, Any]
    input_tokens: int
    output_tokens: int


def snapshot(model: str) -> str:
    """The dated name a model alias resolves to; other names stay as they are."""
    return _SNAPSHOTS.get(model, model)


def model_of(endpoint: str, body: dict[str, Any]) -> str | None:
    """The model a body asks for; only moderations have a default."""
    model = body.get("model")
    if isinstance(model, str) and model:
        return model
    return DEFAULT_MODERATION_MODEL if endpoint == MODERATIONS and model is None else None


def _strings(value: Any) -> Iterable[str]:
    """Every text in a prompt, in order; written with a stack because prompts may nest deep."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(reversed([part for name, part in item.items() if name not in {"role", "type"}]))
        elif isinstance(item, list):
            stack.extend(reversed(item))


def tokens_of_text(text: str) -> int:
    """A quarter of the characters, at least 1 for any text."""
    return -(-len(text) // 4)


def count_input_tokens(endpoint: str, body: dict[str, Any]) -> int:
    """Estimated tokens of everything the model has to read."""
    prompt = body.get(PROMPT_MEMBER.get(endpoint, "input"))
    total = _plain_chat_tokens(prompt)
    if total is None:
        total = sum(tokens_of_text(text) for text in _strings(prompt))
    if isinstance(prompt, list):
        if prompt and all(isinstance(item, int) for item in prompt):
            return len(prompt)
        total += 3 * len(prompt)  # the frame of each message
    for member in ("instructions", "tools"):
        if member in body:
            total += sum(tokens_of_text(text) for text in _strings(body[member]))
    return max(total, 1)


def _plain_chat_tokens(prompt: Any) -> int | None:
    """The short way for messages that hold nothing but a role and a text, which nearly all do; None for others."""
    if not isinstance(prompt, list):
        return None
    total = 0
    for message in prompt:
        if not isinstance(message, dict) or len(message) != 2 or "role" not in message:
            return None
        text = message.get("content")
        if not isinstance(text, str):
            return None
        total += -(-len(text) // 4)
    return total


def count_inputs(body: dict[str, Any]) -> int:
    """How many things an embeddings body wants embedded: an array counts each element, token arrays excepted."""
    prompt = body.get("input")
    if isinstance(prompt, list) and prompt and not all(isinstance(item, int) for item in prompt):
        return len(prompt)
    return 1


def body_fault(endpoint: str, body: dict[str, Any]) -> tuple[str, str] | None:
    """What the endpoint itself refuses about a body, as (member, message), or None.

    This is what a synchronous call answers with 400 and what a batch reports for the row alone.
    """
    member = PROMPT_MEMBER[endpoint]
    prompt = body.get(member)
    if endpoint == CHAT:
        if not isinstance(prompt, list) or not prompt:
            return member, "'messages' must be an array with at least one message."
        if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt):
            return member, "Each message must be an object with a 'role'."
    elif not isinstance(prompt, str | list) or (isinstance(prompt, list) and not prompt):
        return member, f"'{member}' must be a string or a non-empty array."
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "dimensions", "n"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return name, f"'{name}' must be an integer above 0."
    if (body.get("n") or 1) > MAX_CHOICES:
        return "n", f"'n' must be at most {MAX_CHOICES}."
    if (body.get("dimensions") or 1) > MAX_DIMENSIONS:
        return "dimensions", f"'dimensions' must be at most {MAX_DIMENSIONS}."
    temperature = body.get("temperature")
    if temperature is not None and (
        not isinstance(temperature, int | float) or isinstance(temperature, bool) or not 0 <= temperature <= 2
    ):
        return "temperature", "'temperature' must be a number from 0 to 2."
    return None


def answer(
    endpoint: str,
    body: dict[str, Any],
    digest: str,
    input_tokens: int,
    created_at: float,
    outcome: Outcome,
    size: int,
) -> Answer:
    """What the model answers; ``size`` is the length of the text for ``Outcome.HUGE``."""
    model = snapshot(model_of(endpoint, body) or "unknown")
    if endpoint == EMBEDDINGS:
        return _embeddings(body, model, input_tokens)
    if endpoint == MODERATIONS:
        return _moderation(body, digest, model, input_tokens)
    text, wanted_tokens = _text(endpoint, body, digest, outcome, size), token_limit(body)
    truncated = outcome is Outcome.TRUNCATED
    if outcome is not Outcome.HUGE and wanted_tokens is not None and tokens_of_text(text) > wanted_tokens:
        text, truncated = text[: 4 * wanted_tokens], True
    elif truncated:
        text = text[: max(1, len(text) // 2)]
    if endpoint == CHAT:
        return _chat(body, digest, model, input_tokens, text, created_at, outcome, truncated)
    if endpoint == RESPONSES:
        return _response(body, digest, model, input_tokens, text, created_at, outcome, truncated)
    finish = "content_filter" if outcome is Outcome.FILTERED else "length" if truncated else "stop"
    output_tokens = tokens_of_text(text)
    return Answer(
        {
            "id": f"cmpl-{digest[:28]}",
            "object": "text_completion",
            "created": int(created_at),
            "model": model,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}],
            "usage": _chat_usage(input_tokens, output_tokens),
        },
        input_tokens,
        output_tokens,
    )


def token_limit(body: dict[str, Any]) -> int | None:
    """The most tokens that the body allows for an answer."""
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int):
            return value
    return None


def _question(endpoint: str, body: dict[str, Any]) -> str:
    """The last thing the user said."""
    prompt = body.get(PROMPT_MEMBER[endpoint])
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        for item in reversed(prompt):
            if isinstance(item, str):
                return item
            if isinstance(item, dict) and item.get("role") in {"user", None}:
                return " ".join(_strings(item.get("content")))
    return ""


def _rng(digest: str) -> random.Random:
    return random.Random(int(digest[:16], 16))


def _text(endpoint: str, body: dict[str, Any], digest: str, outcome: Outcome, size: int) -> str:
    if outcome is Outcome.HUGE:
        piece = "A long answer goes on. "
        return (piece * (size // len(piece) + 1))[:size]
    question = _question(endpoint, body)
    labels = _labels(endpoint, body)
    shape = _wanted_schema(body)
    if shape is None and not labels:
        words = question[:_ECHO_CHARS].split()
        text = f"In short: {' '.join(words[:24])}." if words else "There is nothing to answer."
    elif shape is not None:
        text = dump_json(_instance(shape, question, labels, _rng(digest), 0)).decode("utf-8")
    else:
        text = _best_label(question, labels, _rng(digest))
    if outcome is Outcome.LINE_SEPARATOR:
        return f"first\u2028{text}\u2029last"
    if outcome is Outcome.NUL:
        return f"{text}\x00mber"
    return text


def _labels(endpoint: str, body: dict[str, Any]) -> list[str]:
    """Labels the prompt offers to choose from: three or more names_with_underscores."""
    prompt = [body.get(PROMPT_MEMBER[endpoint]), body.get("instructions")]
    found: dict[str, None] = {}
    for text in _strings(prompt):
        if "_" in text:
            found |= dict.fromkeys(_LABEL.findall(text))
    return list(found) if len(found) >= 3 else []


def _best_label(question: str, labels: list[str], rng: random.Random) -> str:
    """The label that shares most words with the question; the seed decides between equals."""
    # A question that repeats the labels says nothing by them, so they are taken out of it first.
    plain = _LABEL.sub(" ", question).lower()
    words = {word[:5] for word in _WORD.findall(plain)}
    scored = [
        (sum(part[:5] in words for part in label.lower().split("_")) / label.count("_"), rng.random(), label)
        for label in labels
    ]
    return max(scored)[2]


def _wanted_schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON Schema the caller wants the answer to follow, if any."""
    wanted = body.get("response_format")
    if not isinstance(wanted, dict):
        text = body.get("text")
        wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    if wanted.get("type") == "json_schema":
        inner = wanted.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else wanted.get("schema")
        return schema if isinstance(schema, dict) else None
    return None


def _instance(schema: Any, question: str, labels: list[str], rng: random.Random, depth: int) -> Any:
    """A small value of this schema; covers the members that structured outputs use."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    if "const" in schema:
        return schema["const"]
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        names = [choice for choice in choices if isinstance(choice, str) and "_" in choice]
        return _best_label(question, names, rng) if len(names) == len(choices) else rng.choice(choices)
    for member in ("anyOf", "oneOf"):
        options = schema.get(member)
        if isinstance(options, list) and options:
            return _instance(options[0], question, labels, rng, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        kind = kind[0]
    if kind == "object":
        members = schema.get("properties")
        return {
            name: _instance(part, question, labels, rng, depth + 1)
            for name, part in (members.items() if isinstance(members, dict) else ())
        }
    if kind == "array":
        least = schema.get("minItems")
        count = min(max(least if isinstance(least, int) else 1, 1), 8)
        return [_instance(schema.get("items"), question, labels, rng, depth + 1) for _ in range(count)]
    if kind in {"integer", "number"}:
        low = schema.get("minimum")
        return low if isinstance(low, int | float) else rng.randint(0, 1)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    return _best_label(question, labels, rng) if labels else " ".join(question.split()[:8])


def _chat_usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _first_tool(body: dict[str, Any]) -> str:
    tools = body.get("tools")
    if isinstance(tools, list) and tools and isinstance(tools[0], dict):
        function = tools[0].get("function", tools[0])
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    return "look_up"


def _chat(
    body: dict[str, Any],
    digest: str,
    model: str,
    input_tokens: int,
    text: str,
    created_at: float,
    outcome: Outcome,
    truncated: bool,
) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    finish = "length" if truncated else "stop"
    if outcome is Outcome.REFUSAL:
        message |= {"content": None, "refusal": "I cannot help with that."}
    elif outcome is Outcome.FILTERED:
        message["content"], finish = "", "content_filter"
    elif outcome is Outcome.TOOL_CALL:
        call = {
            "id": f"call_{digest[:24]}",
            "type": "function",
            "function": {"name": _first_tool(body), "arguments": "{}"},
        }
        message |= {"content": None, "tool_calls": [call]}
        finish = "tool_calls"
    wanted = body.get("n") or 1
    output_tokens = tokens_of_text(message["content"] or message["refusal"] or "{}") * wanted
    return Answer(
        {
            "id": f"chatcmpl-{digest[:28]}",
            "object": "chat.completion",
            "created": int(created_at),
            "model": model,
            "choices": [
                {"index": index, "message": message, "logprobs": None, "finish_reason": finish}
                for index in range(wanted)
            ],
            "usage": _chat_usage(input_tokens, output_tokens),
            "service_tier": "default",
            "system_fingerprint": f"fp_{hashlib.sha256(model.encode('utf-8', 'replace')).hexdigest()[:10]}",
        },
        input_tokens,
        output_tokens,
    )


def _response(
    body: dict[str, Any],
    digest: str,
    model: str,
    input_tokens: int,
    text: str,
    created_at: float,
    outcome: Outcome,
    truncated: bool,
) -> Answer:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    status, incomplete = "completed", None
    if outcome is Outcome.REFUSAL:
        part = {"type": "refusal", "refusal": "I cannot help with that."}
    elif outcome is Outcome.FILTERED:
        part["text"], status, incomplete = "", "incomplete", {"reason": "content_filter"}
    elif truncated:
        status, incomplete = "incomplete", {"reason": "max_output_tokens"}
    item: dict[str, Any] = {
        "id": f"msg_{digest[:32]}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }
    if outcome is Outcome.TOOL_CALL:
        item = {
            "id": f"fc_{digest[:32]}",
            "type": "function_call",
            "status": "completed",
            "call_id": f"call_{digest[:24]}",
            "name": _first_tool(body),
            "arguments": "{}",
        }
    output_tokens = tokens_of_text(text)
    instructions = body.get("instructions")
    metadata = body.get("metadata")
    return Answer(
        {
            "id": f"resp_{digest[:40]}",
            "object": "response",
            "created_at": int(created_at),
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": instructions if isinstance(instructions, str) else None,
            "max_output_tokens": body.get("max_output_tokens"),
            "model": model,
            "output": [item],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "metadata": metadata if isinstance(metadata, dict) else {},
            "temperature": body.get("temperature", 1.0),
            "top_p": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "service_tier": "default",
            "usage": {
                "input_tokens": input_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": input_tokens + output_tokens,
            },
        },
        input_tokens,
        output_tokens,
    )


def _embeddings(body: dict[str, Any], model: str, input_tokens: int) -> Answer:
    dimensions = body.get("dimensions") or DEFAULT_DIMENSIONS
    prompt = body["input"]
    inputs = prompt if isinstance(prompt, list) and count_inputs(body) == len(prompt) else [prompt]
    data = []
    for index, item in enumerate(inputs):
        # Equal inputs have equal vectors, whatever stands beside them.
        rng = random.Random(f"{model}:{dump_json(item).hex()}")
        vector = [round(rng.uniform(-1, 1), 6) for _ in range(dimensions)]
        packed: Any = vector
        if body.get("encoding_format") == "base64":
            packed = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode("ascii")
        data.append({"object": "embedding", "index": index, "embedding": packed})
    usage = {"prompt_tokens": input_tokens, "total_tokens": input_tokens}
    return Answer({"object": "list", "data": data, "model": model, "usage": usage}, input_tokens, 0)


def _moderation(body: dict[str, Any], digest: str, model: str, input_tokens: int) -> Answer:
    rng = _rng(digest)
    prompt = body["input"]
    inputs = prompt if isinstance(prompt, list) and all(isinstance(item, str) for item in prompt) else [prompt]
    results = []
    for item in inputs:
        about_harm = "kill" in " ".join(_strings(item)).lower()
        flags = {name: about_harm and name == "violence" for name in _MODERATION_CATEGORIES}
        results.append(
            {
                "flagged": about_harm,
                "categories": flags,
                "category_scores": {
                    name: round(0.9 if hit else rng.uniform(0, 0.01), 6) for name, hit in flags.items()
                },
                "category_applied_input_types": {name: ["text"] for name in _MODERATION_CATEGORIES},
            }
        )
    return Answer({"id": f"modr-{digest[:28]}", "model": model, "results": results}, input_tokens, 0)
