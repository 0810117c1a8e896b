"""The batch input file: read line by line, checked as the provider checks it, and run row by row.

Everything here runs in a worker thread and holds one line at a time, plus eight bytes for each line of the file.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from batchferry.simulator.answers import EMBEDDINGS, PROMPT_MEMBER, count_inputs, model_of
from batchferry.simulator.bill import Run
from batchferry.simulator.jsontext import canonical_json, dump_json, parse_json
from batchferry.simulator.outcomes import Counted, Row, batch_end, decide, natural_end, unrun_line
from batchferry.simulator.scenario import JobError, Limits, Outcome, Scenario

_SCAN_BYTES = 1024 * 1024
_FAILING = frozenset({Outcome.CONTENT_FILTER, Outcome.CONTEXT_LENGTH, Outcome.HTTP_ERROR, Outcome.TIMEOUT})


@dataclass(frozen=True, slots=True)
class Checked:
    """What validation found. ``failing`` is how many rows will end in an error, for the counts under way."""

    rows: int
    model: str | None
    input_tokens: int
    failing: int
    errors: tuple[JobError, ...]


class RunOrder(NamedTuple):
    """What to run: the first ``reached`` lines of the file; the others get a line with ``unrun_code``, if any."""

    batch_id: str
    number: int
    endpoint: str
    input_path: Path
    reached: int
    unrun_code: str | None
    at: float
    seed: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """What running gave."""

    runs: list[Run]
    completed: int
    failed: int


def _lines(file: IO[bytes], limits: Limits) -> Iterator[bytes | None]:
    """The lines without their break; None for one longer than the limit."""
    while True:
        line = file.readline(limits.line_bytes + 1)
        if not line:
            return
        if line.endswith(b"\n"):
            yield line[:-1]
        elif len(line) <= limits.line_bytes:
            yield line
        else:
            while line and not line.endswith(b"\n"):
                line = file.readline(_SCAN_BYTES)
            yield None


def first_line_is_json(path: Path, limits: Limits) -> bool:
    """Whether the file is not empty and its first line is JSON; a byte order mark is overlooked here."""
    with path.open("rb") as file:
        line = next(_lines(file, limits), None)
    if not line:
        return False
    try:
        parse_json(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        return False
    return True


def _line_error(
    line: bytes | None, endpoint: str, scenario: Scenario, line_url: str
) -> tuple[tuple[str, str, str | None] | None, Any]:
    """The first fault of a line as (code, message, param), and the parsed line."""
    if line is None:
        return ("invalid_request", "This line is longer than a request may be.", None), None
    try:
        parsed = parse_json(line)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return ("invalid_json_line", "This line is not parseable as valid JSON.", None), None
    for member in ("custom_id", "method", "url", "body"):
        if parsed.get(member) is None:
            return ("missing_required_parameter", f"Missing required parameter: '{member}'.", member), None
    body, wire_id = parsed["body"], parsed["custom_id"]
    if not isinstance(wire_id, str) or not wire_id:
        return ("invalid_request", "'custom_id' must be a string that is not empty.", "custom_id"), None
    if parsed["method"] != "POST":
        return ("invalid_method", "The HTTP method of a batch line must be POST.", "method"), None
    if parsed["url"] != line_url:
        return ("invalid_url", f"The URL of this line does not match the batch endpoint '{line_url}'.", "url"), None
    if not isinstance(body, dict):
        return ("invalid_request", "'body' must be an object.", "body"), None
    if body.get("stream") not in {None, False}:
        return ("streaming_unsupported", "Streaming is not supported in a batch.", "body.stream"), None
    model = model_of(endpoint, body)
    if model is None:
        return ("invalid_request", "You must provide a model parameter.", "body.model"), None
    prompt = PROMPT_MEMBER[endpoint]
    if body.get(prompt) is None:
        return ("invalid_request", f"You must provide a {prompt} parameter.", f"body.{prompt}"), None
    if not scenario.allows_model(model):
        message = f"The model '{model}' does not exist or is not supported in the Batch API."
        return ("model_not_found", message, "body.model"), None
    return None, parsed


NATIVE = "_native"
"""Member of a line that another API has translated: the request as its caller wrote it, by which the row is known."""


def _row(parsed: dict[str, Any], endpoint: str, number: int) -> Row:
    raw = canonical_json(parsed.get(NATIVE, parsed["body"]))
    return Row(parsed["custom_id"], endpoint, parsed["body"], raw, hashlib.sha256(raw).hexdigest(), number)


def check(
    path: Path,
    endpoint: str,
    scenario: Scenario,
    seed: int,
    attempts: Callable[[str], int],
    line_url: str | None = None,
) -> Checked:
    """Check every line; one bad line is enough to refuse the file.

    ``attempts`` tells how often a body has had its turn before, ``line_url`` what the lines name where that is not the
    endpoint.
    """
    limits = scenario.limits
    errors: list[JobError] = []
    seen: set[int] = set()
    rows = tokens = failing = inputs = 0
    file_model: str | None = None

    def note(code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        if len(errors) < limits.errors_listed:
            errors.append(JobError(code=code, message=message, param=param, line=line))

    if path.stat().st_size > limits.input_file_bytes:
        message = f"The input file is larger than {limits.input_file_bytes} bytes."
        return Checked(0, None, 0, 0, (JobError(code="file_too_large", message=message, param="file_id"),))
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, limits), start=1):
            if number > limits.rows_per_batch:
                errors.clear()
                note("too_many_tasks", f"The input file has more than {limits.rows_per_batch} requests.")
                break
            rows = number
            fault, parsed = _line_error(line, endpoint, scenario, line_url or endpoint)
            if fault is not None:
                note(*fault, line=number)
                continue
            row = _row(parsed, endpoint, number)
            identity = int.from_bytes(
                hashlib.blake2b(row.wire_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            )
            if identity in seen:
                note("duplicate_custom_id", "This custom_id is used on an earlier line.", "custom_id", number)
                continue
            seen.add(identity)
            model = row.model
            if file_model is None:
                file_model = model
            elif model != file_model:
                message = f"The model '{model}' does not match the rest of the batch, which uses '{file_model}'."
                note("mismatched_model", message, "body.model", number)
                continue
            tokens += row.input_tokens
            if endpoint == EMBEDDINGS:
                inputs += count_inputs(row.body)
            chosen = decide(scenario, seed, row, attempts(row.digest) + 1, "batch")
            failing += chosen.outcome in _FAILING or natural_end(scenario, row) is not None
    if rows == 0:
        note("empty_file", "The input file has no requests.")
    if inputs > limits.embedding_inputs:
        note("too_many_tasks", f"The input file has more than {limits.embedding_inputs} embedding inputs.")
    return Checked(rows, file_model, tokens, failing, tuple(errors))


def _offsets(path: Path) -> array[int]:
    """Where each line begins."""
    starts = array("Q")
    position = 0
    with path.open("rb") as file:
        at_start = True
        while block := file.read(_SCAN_BYTES):
            if at_start:
                starts.append(0)
                at_start = False
            found = block.find(b"\n")
            while found >= 0:
                starts.append(position + found + 1)
                found = block.find(b"\n", found + 1)
            position += len(block)
    if starts and starts[-1] == position:
        starts.pop()
    return starts


def run(
    order: RunOrder,
    scenario: Scenario,
    attempts: Callable[[str], int],
    output_path: Path,
    error_path: Path,
    bill_path: Path,
) -> RunResult:
    """Run the reached rows and write both result files and the batch's part of the bill.

    The three files appear whole or not at all; running again after a crash writes the same ones.
    """
    starts = _offsets(order.input_path)
    sequence = list(range(len(starts)))
    if scenario.shuffle_output:
        random.Random(f"{order.seed}:{order.number}:order").shuffle(sequence)
    counts: Counter[Counted] = Counter()
    runs: list[Run] = []
    targets = [path.with_name(f"{path.name}.part") for path in (output_path, error_path, bill_path)]
    with (
        order.input_path.open("rb") as file,
        targets[0].open("wb") as output,
        targets[1].open("wb") as error,
        targets[2].open("wb") as bill,
    ):
        for index in sequence:
            file.seek(starts[index])
            row = _row(parse_json(file.readline()), order.endpoint, index + 1)
            line_id = f"{order.batch_id.removeprefix('batch_')[:16]}{index:06x}"
            if index >= order.reached:
                if order.unrun_code is not None:
                    error.write(unrun_line(row.wire_id, line_id, order.unrun_code) + b"\n")
                continue
            chosen = decide(scenario, order.seed, row, attempts(row.digest) + 1, "batch")
            end = batch_end(scenario, row, chosen, order.at, line_id)
            output.writelines(line + b"\n" for line in end.output)
            error.writelines(line + b"\n" for line in end.error)
            counts[end.counted] += 1
            runs.append(end.run)
            bill.write(dump_json(list(end.run)) + b"\n")
        if scenario.cut_last_line and output.tell() > 0:
            output.truncate(output.tell() - min(20, output.tell() // 2))
    for target, path in zip(targets, (output_path, error_path, bill_path), strict=True):
        target.replace(path)
    return RunResult(runs, counts[Counted.COMPLETED], counts[Counted.FAILED])
