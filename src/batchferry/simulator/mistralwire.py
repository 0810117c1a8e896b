"""How files, jobs, rows and errors look at Mistral; the simulator's own words are OpenAI's.

Shapes are those of the official client (``BatchJob``, ``FileSchema``, ``ChatCompletionResponse``). Error types and
numbers are those that users of the API have published; where there is none for an outcome, the wording here is ours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from batchferry.simulator.answers import CHAT, EMBEDDINGS
from batchferry.simulator.errors import INVALID_REQUEST, Refused
from batchferry.simulator.inputfile import NATIVE
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.scenario import Scenario
from batchferry.simulator.state import SimBatch, SimFile, Status
from batchferry.simulator.wire import counts_at

STATUSES = {
    Status.VALIDATING: "QUEUED",
    Status.IN_PROGRESS: "RUNNING",
    Status.FINALIZING: "RUNNING",
    Status.CANCELLING: "CANCELLATION_REQUESTED",
    Status.COMPLETED: "SUCCESS",
    Status.FAILED: "FAILED",
    Status.EXPIRED: "TIMEOUT_EXCEEDED",
    Status.CANCELLED: "CANCELLED",
}
INPUT_PREFIX = "mistral-lines-"
"""Begins the ids of the files in which the lines of a job stand as the simulator runs them; nobody is shown these."""
BATCH_REQUEST, BATCH_RESULT, BATCH_ERROR = "batch_request", "batch_result", "batch_error"

_UUID_DIGITS = 32
_FILE, _BATCH = ("file-", 22), ("batch_", 24)
_SECOND_NUMBER = re.compile(r"(\d+) tokens.*?(\d+) tokens", re.DOTALL)


# --------------------------------------------------------------------------------------------- ids


def _shown_id(own: str, kind: tuple[str, int]) -> str:
    prefix, digits = kind
    text = own.removeprefix(prefix)
    return str(UUID(text[:digits].ljust(_UUID_DIGITS, "0")))


def _own_id(shown: str, kind: tuple[str, int]) -> str:
    prefix, digits = kind
    return prefix + shown.replace("-", "")[:digits]


def shown_file_id(own: str) -> str:
    """A file's id as Mistral shows it: a UUID."""
    return _shown_id(own, _FILE)


def own_file_id(shown: str) -> str:
    """The simulator's id of a file."""
    return _own_id(shown, _FILE)


def shown_job_id(own: str) -> str:
    """A job's id as Mistral shows it: a UUID."""
    return _shown_id(own, _BATCH)


def own_job_id(shown: str) -> str:
    """The simulator's id of a job."""
    return _own_id(shown, _BATCH)


# -------------------------------------------------------------------------------------- files and jobs


def sample_type(file: SimFile) -> str:
    """What a batch file holds."""
    if file.purpose != "batch_output":
        return BATCH_REQUEST
    return BATCH_ERROR if file.filename.endswith("_error.jsonl") else BATCH_RESULT


def render_file(file: SimFile) -> dict[str, Any]:
    """A file object. Result files have the purpose of the job's input, and a sample type of their own."""
    is_result = file.purpose == "batch_output"
    return {
        "id": shown_file_id(file.id),
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": "batch" if is_result else file.purpose,
        "sample_type": sample_type(file),
        "num_lines": None,
        "mimetype": "application/jsonl",
        "source": "mistral" if is_result else "upload",
        "signature": None,
        "expires_at": None,
    }


def render_job(job: SimBatch, scenario: Scenario, now: float) -> dict[str, Any]:
    """A job object as it looks at ``now`` (virtual seconds since the epoch)."""
    counts = counts_at(job, now)
    output, error = job.output_file_id, job.error_file_id
    if job.status is Status.COMPLETED and job.ended_at is not None and now < job.ended_at + scenario.late_file_ids_s:
        output = error = None
    shown: dict[str, Any] = {
        "id": shown_job_id(job.id),
        "object": "batch",
        "input_files": job.extra.get("input_files", []),
        "metadata": job.metadata,
        "endpoint": job.endpoint,
        "model": job.extra.get("model"),
        "agent_id": None,
        "output_file": output and shown_file_id(output),
        "error_file": error and shown_file_id(error),
        "outputs": None,
        "errors": _errors(job),
        "status": STATUSES[job.status],
        "created_at": int(job.created_at),
        "started_at": None if job.in_progress_at is None else int(job.in_progress_at),
        "completed_at": int(job.ended_at) if job.status.is_terminal and job.ended_at is not None else None,
        "total_requests": counts["total"],
        "completed_requests": counts["completed"] + counts["failed"],
        "succeeded_requests": counts["completed"],
        "failed_requests": counts["failed"],
    }
    if error is None and scenario.error_file_when_clean != "null" and job.status is Status.COMPLETED:
        if scenario.error_file_when_clean == "absent":
            del shown["error_file"]
        else:
            shown["error_file"] = ""
    return shown


def _errors(job: SimBatch) -> list[dict[str, Any]]:
    """Messages and how often each came; no entry names a code or a line."""
    messages = Counter(_job_message(error) for error in job.errors)
    return [{"message": message, "count": count} for message, count in messages.items()]


def _job_message(error: dict[str, Any]) -> str:
    if error["code"] == "model_not_found":
        return f"Invalid model: {error['message']}"
    if error.get("param") == "file_id" and error["code"] == "invalid_request":
        return "Input file not found."
    if error["code"] == "too_many_tasks":
        return "Too many requests in the batch."
    return str(error["message"])


# ------------------------------------------------------------------------------------ errors and rows


class Shown(NamedTuple):
    """An answer that is no success."""

    status: int
    body: dict[str, Any]


def show_error(status: int, error: dict[str, Any]) -> Shown:
    """Mistral's answer for one of OpenAI's; a guardrail that stops a prompt has a status of its own."""
    code, kind = error.get("code"), error.get("type")
    message, number = error.get("message") or "", None
    word = code or kind or INVALID_REQUEST
    if status == 401:
        return Shown(status, {"detail": "Unauthorized"})
    if code == "context_length_exceeded":
        found = _SECOND_NUMBER.search(message)
        limit, tokens = found.groups() if found else ("0", "0")
        message = (
            f"Prompt contains {tokens} tokens and 0 draft tokens, "
            f"too large for model with {limit} maximum context length"
        )
        word, number = "invalid_request_invalid_args", "3051"
    elif code == "model_not_found":
        message, word, number = f"Invalid model: {message}", "invalid_model", "1500"
    elif code in {"content_policy_violation", "content_filter"}:
        status, word = 403, "guardrail_blocked"
        message = f"The prompt was blocked by a guardrail: {message}"
    elif status == 429 and code in {None, "rate_limit_exceeded"}:
        message, word, number = "Rate limit exceeded", "rate_limited", "1300"
    elif status == 503 and code in {None, "server_is_overloaded"}:
        word, number = "service_tier_capacity_exceeded", "3505"
    elif status >= 500 and code is None:
        word = "internal_server_error"
    elif kind == INVALID_REQUEST and code in {None, "invalid_type", "invalid_value", "missing_required_parameter"}:
        word = INVALID_REQUEST
    return Shown(status, _flat(status, message, word, error.get("param"), number))


def _flat(status: int, message: str, word: str, param: str | None, number: str | None) -> dict[str, Any]:
    return {
        "object": "error",
        "message": message,
        "type": word,
        "param": param,
        "code": number,
        "raw_status_code": status,
    }


class Invalid(Refused):
    """A body that breaks the schema: 422 with a list of what is wrong."""

    def __init__(self, loc: Sequence[str | int], kind: str, message: str) -> None:
        super().__init__(422, message)
        self.detail = [{"type": kind, "loc": ["body", *loc], "msg": message}]


def show_answer(endpoint: str, status: int, body: dict[str, Any]) -> Shown:
    """The answer of an endpoint for one of OpenAI's."""
    if status != 200:
        error = body.get("error")
        return show_error(status, error) if isinstance(error, dict) else Shown(status, body)
    shown = {name: value for name, value in body.items() if name not in {"service_tier", "system_fingerprint"}}
    if endpoint == CHAT and "choices" in body:
        shown["id"] = str(body["id"]).removeprefix("chatcmpl-")
        shown["choices"] = [_choice(choice) for choice in body["choices"]]
    if endpoint == EMBEDDINGS and "data" in body:
        shown["id"] = "embd"
    usage = body.get("usage")
    if isinstance(usage, dict):
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        shown["usage"] = {name: usage.get(name, 0) for name in names}
    return Shown(200, shown)


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A refusal stands in the text: there is no member for it."""
    message = choice["message"]
    shown = {
        "role": "assistant",
        "content": message.get("content") if message.get("refusal") is None else message["refusal"],
        "tool_calls": message.get("tool_calls"),
        "prefix": False,
    }
    return {"index": choice["index"], "finish_reason": choice["finish_reason"], "message": shown}


def show_line(line: bytes, endpoint: str) -> bytes:
    """A result line as Mistral writes it; one that cannot be read stays as it is."""
    try:
        parsed = parse_json(line)
    except ValueError:
        try:
            # A byte that is no UTF-8 goes through as it is.
            parsed = json.loads(line.decode("utf-8", "surrogateescape"))
            return json.dumps(_shown_line(parsed, endpoint), ensure_ascii=False, separators=(",", ":")).encode(
                "utf-8", "surrogateescape"
            )
        except ValueError:
            return line
    return dump_json(_shown_line(parsed, endpoint))


def _shown_line(parsed: dict[str, Any], endpoint: str) -> dict[str, Any]:
    shown = {"id": parsed["id"], "custom_id": parsed["custom_id"]}
    response = parsed.get("response")
    if response is None:
        error = parsed["error"]
        return shown | {"response": None, "error": {"type": error["code"], "message": error["message"]}}
    status, body = response["status_code"], response["body"]
    if body:
        status, body = show_answer(endpoint, status, body)
    return shown | {"response": {"status_code": status, "body": body}, "error": None}


def rewrite_results(job: SimBatch, path: Path) -> None:
    """Bring a finished result file into Mistral's shape."""
    fresh = path.with_name(f"{path.name}.rewritten")
    with path.open("rb") as source, fresh.open("wb") as target:
        for line in source:
            if line.endswith(b"\n"):
                target.write(show_line(line[:-1], job.endpoint) + b"\n")
            else:
                target.write(line)  # a cut last line
    fresh.replace(path)


# -------------------------------------------------------------------------------------------- input


def own_line(line: bytes, endpoint: str, model: str | None) -> bytes:
    """A request line as the simulator runs it: with method and address, and with the job's model."""
    try:
        parsed = parse_json(line)
    except ValueError:
        return line
    if not isinstance(parsed, dict):
        return line
    body = parsed.get("body")
    own = parsed | {"method": "POST", "url": endpoint}
    if model is not None and isinstance(body, dict) and body.get("model") != model:
        own |= {"body": body | {"model": model}, NATIVE: body}
    return dump_json(own)


def write_lines(sources: Sequence[Path | bytes], target: Path, endpoint: str, model: str | None) -> int:
    """Write the lines of a job to ``target``; sources are files, or lines. The number of bytes."""

    def lines() -> Iterator[bytes]:
        for source in sources:
            if isinstance(source, bytes):
                yield source
                continue
            with source.open("rb") as file:
                for line in file:
                    yield line.removesuffix(b"\n")

    with target.open("wb") as out:
        for line in lines():
            out.write(own_line(line, endpoint, model) + b"\n")
        return out.tell()
