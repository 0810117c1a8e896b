"""The provider behind the HTTP surface: batches and their lives, files and their ends, told by the clock.

Nothing runs in the background. Whenever somebody asks, everything that the clock says must have happened by now
is made to happen first, in the order of its virtual time (``World.settle``). So the same requests at the same
virtual times always meet the same world, at any speed.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from batchferry.simulator.answers import ANSWERED_ENDPOINTS, count_input_tokens, model_of, token_limit
from batchferry.simulator.bill import Run, RunKind
from batchferry.simulator.clock import VirtualClock
from batchferry.simulator.errors import Refused
from batchferry.simulator.inputfile import Checked, RunOrder, check, first_line_is_json, run
from batchferry.simulator.jsontext import canonical_json
from batchferry.simulator.outcomes import HttpEnd, Row, decide, http_end
from batchferry.simulator.scenario import DAY_S, Durations, JobError, Outcome, RowOutcome, Scenario, window_seconds
from batchferry.simulator.state import SimBatch, SimFile, State, Status
from batchferry.simulator.syncgate import SyncGate

_log = logging.getLogger(__name__)

BATCH_FILE_LIFE_S = 30 * DAY_S
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * DAY_S
UPLOAD_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
BATCH_ENDPOINTS = (*ANSWERED_ENDPOINTS, "/v1/images/generations", "/v1/images/edits", "/v1/videos")
"""What the create call takes; batches for endpoints that are not answered here fail with a clear message."""

_NEVER = 1e9
"""Longer than the window by so much that no row is reached in it."""


class Companion(Protocol):
    """Batches that are kept beside the world's own."""

    async def settle(self, max_wait_s: float | None = None) -> bool:
        """As ``World.settle``."""
        ...

    async def close(self) -> None:
        """Wait until nothing works on files any more."""
        ...


Listener = Callable[[SimBatch], None]
Rewriter = Callable[[SimBatch, Path], None]
"""Changes a finished result file of a batch, in place and in a worker thread."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A create call whose members have been checked for their shape."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_s: int | None


@dataclass(frozen=True, slots=True)
class SyncEnd:
    """How a sync call ends: ``end`` None closes the connection without an answer."""

    end: HttpEnd | None
    outcome: Outcome


class World:
    """One provider. All methods belong to one event loop; heavy work goes to a worker thread.

    ``patience_s`` is how many real seconds a read waits for heavy work before it answers with what is known.
    """

    def __init__(
        self, state: State, scenario: Scenario, clock: VirtualClock, seed: int = 0, patience_s: float = 5.0
    ) -> None:
        self.state = state
        self.scenario = scenario
        self.clock = clock
        self.seed = seed
        self._patience_s = patience_s
        self._due: list[tuple[float, int, str]] = []
        self._settling = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []
        self._rewriters: dict[str, Rewriter] = {}
        self._companions: list[Companion] = []
        self.sync_gate = SyncGate(scenario, clock)
        self._sync_calls = 0
        self._let_go = asyncio.Event()
        for batch in state.batches.values():
            self._schedule(batch)

    def subscribe(self, listener: Listener) -> None:
        """Be told about every change of a batch's status, as it is worked off (not before somebody asks)."""
        self._listeners.append(listener)

    def rewrite_results(self, prefix: str, rewriter: Rewriter) -> None:
        """Let an API write result files in its own shape, for batches of projects whose name begins so."""
        self._rewriters[prefix] = rewriter

    # ------------------------------------------------------------------------------------------ time

    @property
    def next_due_at(self) -> float | None:
        """When something happens next, in virtual seconds since the epoch; it may turn out to be nothing."""
        return self._due[0][0] if self._due else None

    def join(self, companion: Companion) -> None:
        """Let an API with batches of its own live in this world's time: it is settled and closed with it."""
        self._companions.append(companion)

    async def settle(self, max_wait_s: float | None = None) -> bool:
        """Make happen what must have happened by now; False when ``max_wait_s`` real seconds were not enough."""
        is_done = await self._settle_own(max_wait_s)
        for companion in self._companions:
            is_done = await companion.settle(max_wait_s) and is_done
        return is_done

    async def _settle_own(self, max_wait_s: float | None) -> bool:
        now = self.clock.timestamp()
        if not self._settling.locked() and not (self._due and self._due[0][0] <= now):
            return True
        task = asyncio.create_task(self._settle_until(now), name="simulator-settle")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=max_wait_s)
        return bool(done)

    async def settle_patiently(self) -> bool:
        """``settle`` for a read: waits for heavy work, but not for ever."""
        return await self.settle(self._patience_s)

    async def close(self) -> None:
        """Wait until nothing works on the files any more."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        for companion in self._companions:
            await companion.close()

    async def _settle_until(self, now: float) -> None:
        async with self._settling:
            while self._due and self._due[0][0] <= now:
                due, _, batch_id = heapq.heappop(self._due)
                batch = self.state.batches[batch_id]
                if batch.next_due_at != due:
                    continue  # a cancel has changed the plan
                try:
                    await self._step(batch, due)
                except Exception as error:  # noqa: BLE001 (any bug here)
                    # A client must see an end whatever breaks in here; the cause goes to the operator.
                    _log.exception("a simulated batch could not be worked off")
                    fault = JobError(code="server_error", message=f"The simulator failed: {type(error).__name__}.")
                    self._fail(batch, due, [fault])

    def _schedule(self, batch: SimBatch) -> None:
        due = batch.next_due_at
        if due is not None:
            heapq.heappush(self._due, (due, batch.number, batch.id))

    def _save(self, batch: SimBatch) -> None:
        self.state.save_batch(batch)
        self._schedule(batch)
        for listener in self._listeners:
            listener(batch)

    def _rng(self, batch: SimBatch, what: str) -> random.Random:
        return random.Random(f"{self.seed}:{batch.number}:{what}")

    def _durations(self, batch: SimBatch) -> Durations:
        rule = self.scenario.batch_rule(batch.number, batch.endpoint, batch.metadata)
        return rule.durations if rule is not None and rule.durations is not None else self.scenario.durations

    # ----------------------------------------------------------------------------------------- lives

    async def _step(self, batch: SimBatch, due: float) -> None:
        match batch.status:
            case Status.VALIDATING:
                await self._validate(batch, due)
            case Status.IN_PROGRESS:
                assert batch.in_progress_at is not None
                if not batch.runs_on and batch.in_progress_at + batch.run_s > batch.expires_at:
                    reached = batch.reached_rows(batch.expires_at)
                    await self._conclude(batch, due, Status.EXPIRED, reached, "batch_expired")
                else:
                    batch.status, batch.finalizing_at = Status.FINALIZING, due
                    self._save(batch)
            case Status.FINALIZING:
                await self._conclude(batch, due, Status.COMPLETED, batch.rows, None)
            case Status.CANCELLING:
                await self._conclude_cancel(batch, due)
            case _:  # an ended batch has no due time
                raise AssertionError(batch.status)

    async def _validate(self, batch: SimBatch, due: float) -> None:
        file = self.state.files.get(batch.input_file_id)
        if file is None or file.project != batch.project or not file.is_there(due):
            message = f"Cannot find file {batch.input_file_id}, or organization/project does not have access to it."
            self._fail(batch, due, [JobError(code="invalid_request", message=message, param="file_id")])
            return
        rule = self.scenario.batch_rule(batch.number, batch.endpoint, batch.metadata)
        if rule is not None and rule.fail_with is not None:
            self._fail(batch, due, list(rule.fail_with))
            return
        if batch.endpoint not in ANSWERED_ENDPOINTS:
            message = f"This simulator does not answer {batch.endpoint}."
            self._fail(batch, due, [JobError(code="invalid_request", message=message, param="endpoint")])
            return
        checked = await asyncio.to_thread(
            check,
            self.state.file_path(file.id),
            batch.endpoint,
            self.scenario,
            self.seed,
            self.state.bill.attempts,
            batch.line_url,
        )
        errors = list(checked.errors) or self._over_token_limit(checked, due)
        if errors:
            self._fail(batch, due, errors)
            return
        durations = self._durations(batch)
        rng = self._rng(batch, "run")
        batch.status, batch.in_progress_at = Status.IN_PROGRESS, due
        batch.model, batch.rows = checked.model, checked.rows
        batch.input_tokens, batch.failing_rows = checked.input_tokens, checked.failing
        batch.run_s = durations.jittered(durations.in_progress.duration_s(checked.rows), rng)
        if rule is not None and rule.expire_with_share is not None:
            window_s = max(batch.expires_at - due, 1.0)
            batch.run_s = window_s / rule.expire_with_share if rule.expire_with_share else window_s * _NEVER
        batch.finalizing_s = durations.jittered(durations.finalizing_s, rng)
        self._save(batch)

    def enqueued_tokens(self, model: str | None, at: float) -> int:
        """Input tokens of this model that wait, run, or are not yet released."""
        release_s = self.scenario.limits.enqueued_release_s
        return sum(
            batch.input_tokens
            for batch in self.state.batches.values()
            if batch.model == model
            and batch.in_progress_at is not None
            and (batch.ended_at is None or batch.ended_at + release_s > at)
        )

    def _over_token_limit(self, checked: Checked, at: float) -> list[JobError]:
        limit = self.scenario.limits.enqueued_tokens.get(checked.model or "")
        if limit is None or self.enqueued_tokens(checked.model, at) + checked.input_tokens <= limit:
            return []
        message = (
            f"Enqueued token limit reached for {checked.model} in organization org-simulated. Limit: {limit} enqueued "
            "tokens. Please try again once some in_progress batches have been completed."
        )
        return [JobError(code="token_limit_exceeded", message=message)]

    def _fail(self, batch: SimBatch, at: float, errors: list[JobError]) -> None:
        batch.status, batch.ended_at = Status.FAILED, at
        batch.errors = [error.model_dump(mode="json") for error in errors]
        self._save(batch)
        self.state.purge(at)

    async def _conclude_cancel(self, batch: SimBatch, due: float) -> None:
        assert batch.cancelling_at is not None
        if batch.in_progress_at is None:
            batch.status, batch.ended_at = Status.CANCELLED, due
            self._save(batch)
            self.state.purge(due)
            return
        if batch.finalizing_at is not None:
            completes = self.scenario.cancel_while_finalizing == "completes"
            await self._conclude(batch, due, Status.COMPLETED if completes else Status.CANCELLED, batch.rows, None)
            return
        reached = min(batch.rows, batch.reached_rows(batch.cancelling_at) + self.scenario.in_flight_rows)
        await self._conclude(batch, due, Status.CANCELLED, reached, "batch_cancelled")

    async def _conclude(self, batch: SimBatch, at: float, status: Status, reached: int, unrun_code: str | None) -> None:
        """Run the rows and end the batch."""
        if batch.loses_rows and status is not Status.COMPLETED:
            reached, unrun_code = 0, None
        # The ids follow from the batch's, so that a run made again after a crash leaves the same two files.
        output_id, error_id = (derived_file_id(batch.id, kind) for kind in ("output", "error"))
        output_path, error_path = self.state.file_path(output_id), self.state.file_path(error_id)
        listed = unrun_code if self.scenario.list_unfinished_rows else None
        rule = self.scenario.batch_rule(batch.number, batch.endpoint, batch.metadata)
        scenario = self.scenario
        if rule is not None and rule.cut_last_line:
            scenario = scenario.model_copy(update={"cut_last_line": True})
        result = await asyncio.to_thread(
            run,
            RunOrder(
                batch.id,
                batch.number,
                batch.endpoint,
                self.state.file_path(batch.input_file_id),
                reached,
                listed,
                at,
                self.seed,
            ),
            scenario,
            self.state.bill.attempts,
            output_path,
            error_path,
            self.state.bill_path(batch.id),
        )
        rewriter = next((one for prefix, one in self._rewriters.items() if batch.project.startswith(prefix)), None)
        if rewriter is not None:
            for path in (output_path, error_path):
                await asyncio.to_thread(rewriter, batch, path)
        batch.output_file_id = self._keep(batch, "output", output_path, at)
        batch.error_file_id = self._keep(batch, "error", error_path, at)
        batch.completed, batch.failed = result.completed, result.failed
        batch.used_input_tokens = sum(one.input_tokens for one in result.runs)
        batch.used_output_tokens = sum(one.output_tokens for one in result.runs)
        batch.status, batch.ended_at = status, at
        self._save(batch)
        self.state.bill.add_batch(result.runs)
        self.state.purge(at)

    def _keep(self, batch: SimBatch, kind: str, path: Path, at: float) -> str | None:
        """Register a result file; an empty one does not exist for the caller, unless the API names it all the same."""
        size_bytes = path.stat().st_size
        if size_bytes == 0 and not (batch.names_empty_error_file and kind == "error"):
            path.unlink()
            return None
        file_id = path.name
        self.state.save_file(
            SimFile(
                file_id,
                batch.project,
                f"{batch.id}_{kind}.jsonl",
                "batch_output",
                size_bytes,
                at,
                at + batch.output_expires_s,
            )
        )
        return file_id

    # ----------------------------------------------------------------------------------------- files

    def new_file_id(self) -> str:
        """An id no file has had."""
        return f"file-{secrets.token_hex(11)}"

    async def add_file(
        self, project: str, file_id: str, filename: str, purpose: str, size_bytes: int, expires_s: int | None
    ) -> SimFile:
        """Take in an upload whose bytes are already in place.

        Raises:
            Refused: not a batch file; the bytes are deleted.
        """
        path = self.state.file_path(file_id)
        fault = None
        if purpose == "batch":
            if not filename.endswith(".jsonl"):
                fault = f"Invalid file format for Batch API. Must be .jsonl, but {filename!r} is not."
            elif not await asyncio.to_thread(first_line_is_json, path, self.scenario.limits):
                fault = "Invalid file format for Batch API. Must be .jsonl with a request on the first line."
        if fault is not None:
            path.unlink(missing_ok=True)
            raise Refused(400, fault)
        now = self.clock.timestamp()
        life_s = expires_s if expires_s is not None else BATCH_FILE_LIFE_S if purpose == "batch" else None
        expires_at = now + life_s if life_s is not None else None
        file = SimFile(file_id, project, filename, purpose, size_bytes, now, expires_at)
        self.state.save_file(file)
        return file

    def file(self, project: str, file_id: str) -> SimFile:
        """A file the project can see.

        Raises:
            Refused: 404.
        """
        file = self.state.files.get(file_id)
        if file is None or file.project != project or not file.is_there(self.clock.timestamp()):
            raise Refused(404, f"No such File object: {file_id}", param="id")
        return file

    def list_files(self, project: str) -> list[SimFile]:
        """The project's files, oldest first."""
        now = self.clock.timestamp()
        return [file for file in self.state.files.values() if file.project == project and file.is_there(now)]

    def delete_file(self, project: str, file_id: str) -> None:
        """Take a file away. A batch that is past its validation keeps working on its own copy.

        Raises:
            Refused: 404.
        """
        file = self.file(project, file_id)
        file.deleted_at = self.clock.timestamp()
        self.state.save_file(file)
        self.state.purge(file.deleted_at)

    # --------------------------------------------------------------------------------------- batches

    def create(self, project: str, wanted: CreateRequest) -> SimBatch:
        """Make a batch.

        Raises:
            Refused: the file is not there (or is said not to be), has the wrong purpose, or the hour is full.
        """
        now = self.clock.timestamp()
        file = self.state.files.get(wanted.input_file_id)
        found = file is not None and file.project == project and file.is_there(now)
        missing = f"Cannot find file {wanted.input_file_id}, or organization/project does not have access to it."
        if not found and self.scenario.unknown_file != "fail_job":
            raise Refused(404 if self.scenario.unknown_file == "reject_404" else 400, missing, param="file_id")
        if file is not None and found:
            if file.purpose != "batch":
                message = f"File {file.id} has purpose '{file.purpose}'; batches need 'batch'."
                raise Refused(400, message, param="input_file_id")
            if file.refused_creates < self.scenario.create_gap:
                file.refused_creates += 1
                raise Refused(400, missing, param="file_id")
        recent = 0
        for batch in reversed(self.state.batches.values()):
            if batch.created_at <= now - 3600:
                break
            recent += 1
        if recent >= self.scenario.limits.batches_per_hour:
            message = f"Limit of {self.scenario.limits.batches_per_hour} batches an hour reached."
            raise Refused(429, message, error_type="requests", code="rate_limit_exceeded")
        batch = SimBatch(
            id=f"batch_{secrets.token_hex(12)}",
            number=len(self.state.batches) + 1,
            project=project,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            metadata=wanted.metadata,
            output_expires_s=wanted.output_expires_s or BATCH_FILE_LIFE_S,
            created_at=now,
            validate_at=now,
            expires_at=now + window_seconds(wanted.completion_window),
        )
        durations = self._durations(batch)
        rng = self._rng(batch, "create")
        batch.validate_at = now + durations.jittered(durations.validating_s, rng)
        batch.cancelling_s = durations.jittered(durations.cancelling_s, rng)
        self._save(batch)
        return batch

    def batch(self, project: str, batch_id: str) -> SimBatch:
        """A batch of the project.

        Raises:
            Refused: 404.
        """
        batch = self.state.batches.get(batch_id)
        if batch is None or batch.project != project or not self._is_visible(batch):
            raise Refused(404, f"No batch found with id '{batch_id}'.")
        return batch

    def list_batches(self, project: str) -> list[SimBatch]:
        """The project's batches, newest first."""
        return [
            batch
            for batch in reversed(self.state.batches.values())
            if batch.project == project and self._is_visible(batch)
        ]

    def _is_visible(self, batch: SimBatch) -> bool:
        return self.clock.timestamp() >= batch.created_at + self.scenario.retrieve_gap_s

    async def cancel(self, project: str, batch_id: str) -> SimBatch:
        """Begin to cancel.

        Raises:
            Refused: 404, or 409 when the batch has already ended otherwise.
        """
        batch = self.batch(project, batch_id)
        await self.settle()
        # Working off takes real time, in which more may have come due for this batch.
        while batch.next_due_at is not None and batch.next_due_at <= self.clock.timestamp():
            await self.settle()
        now = self.clock.timestamp()
        if batch.status in {Status.CANCELLING, Status.CANCELLED}:
            return batch
        if batch.status.is_terminal:
            raise Refused(409, f"Cannot cancel a batch with status '{batch.status}'.")
        batch.status, batch.cancelling_at = Status.CANCELLING, now
        self._save(batch)
        return batch

    # ------------------------------------------------------------------------------------------ sync

    def admit_sync(self, project: str, endpoint: str, body: dict[str, Any]) -> dict[str, str]:
        """Hold a call against the limits; the headers of its answer.

        Raises:
            Refused: 429.
        """
        asked = max(token_limit(body) or 0, 0)
        tokens = count_input_tokens(endpoint, body) + asked
        return self.sync_gate.admit(project, model_of(endpoint, body) or "", tokens)

    async def take_time(self) -> None:
        """Be as slow as the script says, in virtual time; ``let_go`` ends it at once."""
        script = self.scenario.sync
        self._sync_calls += 1
        if script.latency_s > 0:
            rng = random.Random(f"{self.seed}:latency:{self._sync_calls}")
            await self.wait(script.latency_s * (1 + script.latency_jitter * rng.uniform(-1, 1)))

    async def wait(self, seconds: float) -> None:
        """Let virtual time pass; ``let_go`` ends it at once."""
        if self._let_go.is_set():
            return
        waits = [asyncio.create_task(self.clock.sleep(seconds)), asyncio.create_task(self._let_go.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def let_go(self) -> None:
        """Answer the slow calls now, and all later ones without delay."""
        self._let_go.set()

    def answer_now(
        self, endpoint: str, body: dict[str, Any], client_id: str, native: dict[str, Any] | None = None
    ) -> SyncEnd:
        """Answer one synchronous call and book it. ``client_id`` is what rules on wire ids look at.

        ``native`` is the request as its caller wrote it, where another API has translated it: the row is known by it.
        """
        raw = canonical_json(body if native is None else native)
        row = Row(client_id, endpoint, body, raw, hashlib.sha256(raw).hexdigest(), None)
        attempt = self.state.bill.attempts(row.digest) + 1
        chosen: RowOutcome = decide(self.scenario, self.seed, row, attempt, "sync")
        if chosen.outcome in {Outcome.EXPIRED, Outcome.MISSING, Outcome.DUPLICATE, Outcome.FOREIGN}:
            chosen = RowOutcome()  # these can only happen to a batch
        end = http_end(self.scenario, row, chosen, self.clock.timestamp())
        run_made = end.run if end is not None else Run(None, row.digest, RunKind.RUN, model=row.model or "")
        self.state.book_sync(run_made._replace(wire_id=None))
        return SyncEnd(end, chosen.outcome)


def derived_file_id(batch_id: str, kind: str) -> str:
    """The id of a batch's ``output`` or ``error`` file."""
    return f"file-{hashlib.sha256(f'{batch_id}:{kind}'.encode()).hexdigest()[:22]}"
