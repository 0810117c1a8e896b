"""Message Batches behind the HTTP surface: their lives by the same clock, script, seed and bill as all else here.

They are kept beside the files and batches of ``State``, in the data folder's ``anthropic``: ``journal.jsonl`` (the
newest record of each batch wins), ``<batch id>.rows`` and ``<batch id>.results``.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from batchferry.domain.errors import ConfigError
from batchferry.simulator.anthropic_rows import (
    MESSAGES,
    BatchOrder,
    MessageEnd,
    message_end,
    row_of,
    run_batch,
    take_in,
)
from batchferry.simulator.bill import Run, RunKind
from batchferry.simulator.errors import Refused
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.outcomes import decide
from batchferry.simulator.scenario import DAY_S, Durations, Outcome, RowOutcome
from batchferry.simulator.world import World

WINDOW_S = DAY_S
_LEAST_SHARE = 1e-9
"""So small a share of the rows that none is reached."""
_BATCH_ONLY = frozenset({Outcome.EXPIRED, Outcome.MISSING, Outcome.DUPLICATE, Outcome.FOREIGN})


@dataclass(slots=True)
class MessageBatch:
    """A batch. Times are virtual seconds since the epoch; ``number`` is 1 for the first batch of the simulator."""

    id: str
    number: int
    project: str
    version: str
    rows: int
    created_at: float
    run_s: float
    cancelling_s: float
    cancel_at: float | None = None
    ended_at: float | None = None
    deleted: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def expires_at(self) -> float:
        """When the rows that are left expire."""
        return self.created_at + WINDOW_S

    @property
    def due_at(self) -> float:
        """When it ends by itself."""
        own_end = min(self.created_at + self.run_s, self.expires_at)
        return own_end if self.cancel_at is None else self.cancel_at + self.cancelling_s

    def reached_rows(self, at: float) -> int:
        """How many rows are done at this time, at an even pace in the order of the create."""
        if self.run_s <= 0:
            return self.rows
        return max(0, min(self.rows, int(self.rows * (at - self.created_at) / self.run_s)))


class MessageWorld:
    """The Message Batches of a ``World``. All methods belong to one event loop; heavy work goes to a worker thread.

    Raises (constructor):
        ConfigError: the journal cannot be read.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.script = world.scenario.anthropic
        self._folder = world.state.folder / "anthropic"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._batches: dict[str, MessageBatch] = {}
        self._live: dict[str, MessageBatch] = {}
        self._settling = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retrieves = 0
        self._seen: Counter[str] = Counter()
        self._load()
        self._journal: IO[bytes] = self._journal_path.open("ab", buffering=0)
        world.join(self)

    # ------------------------------------------------------------------------------------------ time

    async def settle(self, max_wait_s: float | None = None) -> bool:
        """End the batches that must have ended by now; False when ``max_wait_s`` real seconds were not enough."""
        now = self.world.clock.timestamp()
        if not self._settling.locked() and not any(batch.due_at <= now for batch in self._live.values()):
            return True
        task = asyncio.create_task(self._settle_until(now), name="simulator-settle-messages")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=max_wait_s)
        return bool(done)

    async def close(self) -> None:
        """Wait until nothing works on the files any more."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._journal.close()

    async def _settle_until(self, now: float) -> None:
        async with self._settling:
            while due := [batch for batch in self._live.values() if batch.due_at <= now]:
                await self._conclude(min(due, key=lambda batch: (batch.due_at, batch.number)))

    async def _conclude(self, batch: MessageBatch) -> None:
        world, at = self.world, batch.due_at
        reached, unrun = batch.rows, "expired"
        if batch.cancel_at is not None:
            reached = min(batch.rows, batch.reached_rows(batch.cancel_at) + world.scenario.in_flight_rows)
            unrun = "canceled"
        elif batch.created_at + batch.run_s > batch.expires_at:
            reached = batch.reached_rows(batch.expires_at)
        rule = world.scenario.batch_rule(batch.number, MESSAGES, None)
        order = BatchOrder(
            batch.number,
            batch.version,
            self._rows_path(batch.id),
            reached,
            unrun,
            at,
            world.seed,
            None if rule is None else rule.fail_with,
        )
        scenario = world.scenario
        if rule is not None and rule.cut_last_line:
            scenario = scenario.model_copy(update={"cut_last_line": True})
        end = await asyncio.to_thread(
            run_batch,
            order,
            scenario,
            world.state.bill.attempts,
            self.results_path(batch),
            self._bill_path(batch),
        )
        batch.counts, batch.ended_at = end.counts, at
        del self._live[batch.id]
        self._save(batch)
        world.state.bill.add_batch(end.runs)
        self._rows_path(batch.id).unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------- batches

    def new_body_path(self) -> Path:
        """Where the body of a create may be put while it comes in."""
        return self._folder / f"body-{secrets.token_hex(8)}.part"

    async def create(self, project: str, version: str, body_path: Path) -> MessageBatch:
        """Make a batch of a body; the body's file is deleted.

        Raises:
            Refused: the body is at fault; there is no batch.
        """
        world = self.world
        batch_id = f"msgbatch_{secrets.token_hex(12)}"
        rows_path = self._rows_path(batch_id)
        try:
            rows = await asyncio.to_thread(take_in, body_path, rows_path, self.script.rows_per_batch)
        except Refused:
            await asyncio.to_thread(rows_path.unlink, missing_ok=True)
            raise
        finally:
            await asyncio.to_thread(body_path.unlink, missing_ok=True)
        number = len(world.state.batches) + len(self._batches) + 1
        rule = world.scenario.batch_rule(number, MESSAGES, None)
        durations: Durations = rule.durations if rule and rule.durations else world.scenario.durations
        rng = random.Random(f"{world.seed}:{number}:messages")
        whole_s = durations.validating_s + durations.in_progress.duration_s(rows) + durations.finalizing_s
        if rule is not None and rule.expire_with_share is not None:
            whole_s = WINDOW_S / max(rule.expire_with_share, _LEAST_SHARE)
        batch = MessageBatch(
            batch_id,
            number,
            project,
            version,
            rows,
            world.clock.timestamp(),
            durations.jittered(whole_s, rng),
            durations.jittered(durations.cancelling_s, rng),
        )
        self._save(batch)
        self._live[batch.id] = batch
        return batch

    def find(self, project: str, batch_id: str) -> MessageBatch:
        """A batch of the project.

        Raises:
            Refused: 404.
        """
        batch = self._batches.get(batch_id)
        if batch is None or batch.deleted or batch.project != project or not self._is_visible(batch):
            raise _unseen(batch_id)
        return batch

    def _is_visible(self, batch: MessageBatch) -> bool:
        return self.world.clock.timestamp() >= batch.created_at + self.world.scenario.retrieve_gap_s

    def look(self, project: str, batch_id: str) -> MessageBatch:
        """``find`` for a retrieve, which the script may make blind.

        Raises:
            Refused: 404.
        """
        batch = self.find(project, batch_id)
        self._retrieves += 1
        self._seen[batch_id] += 1
        every = self.script.unseen_every
        if self._seen[batch_id] <= self.script.unseen_retrieves or (every and self._retrieves % every == 0):
            raise _unseen(batch_id)
        return batch

    def list_all(self, project: str) -> list[MessageBatch]:
        """The project's batches, newest first."""
        return [
            one
            for one in reversed(self._batches.values())
            if one.project == project and not one.deleted and self._is_visible(one)
        ]

    async def cancel(self, project: str, batch_id: str) -> MessageBatch:
        """Begin to cancel; a batch that has ended, or is being cancelled, stays as it is.

        Raises:
            Refused: 404.
        """
        batch = self.find(project, batch_id)
        await self.settle()
        if batch.ended_at is None and batch.cancel_at is None:
            batch.cancel_at = self.world.clock.timestamp()
            self._save(batch)
        return batch

    def delete(self, project: str, batch_id: str) -> None:
        """Delete a batch that has ended.

        Raises:
            Refused: 404, or 400 while it has not ended.
        """
        batch = self.find(project, batch_id)
        if batch.ended_at is None:
            raise Refused(400, "A message batch that has not ended cannot be deleted: cancel it first.")
        batch.deleted = True
        self._save(batch)
        self.results_path(batch).unlink(missing_ok=True)

    def results(self, project: str, batch_id: str) -> Path:
        """The results of a batch.

        Raises:
            Refused: 404 while it has not ended, when they are archived, or by the script.
        """
        batch = self.find(project, batch_id)
        if batch.ended_at is None or self.is_archived(batch):
            raise Refused(404, f"No results are available for message batch '{batch_id}'.")
        self._seen[f"results {batch_id}"] += 1
        if self._seen[f"results {batch_id}"] <= self.script.unseen_results:
            raise _unseen(batch_id)
        return self.results_path(batch)

    def is_archived(self, batch: MessageBatch) -> bool:
        """Whether its results are gone for good."""
        return self.world.clock.timestamp() >= batch.created_at + self.script.results_kept_s

    def results_path(self, batch: MessageBatch) -> Path:
        """Where the results of an ended batch are."""
        return self._folder / f"{batch.id}.results"

    def _rows_path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.rows"

    def _bill_path(self, batch: MessageBatch) -> Path:
        return self._folder / f"{batch.id}.bill"

    @property
    def _journal_path(self) -> Path:
        return self._folder / "journal.jsonl"

    # ------------------------------------------------------------------------------------------ sync

    def answer_now(self, params: dict[str, Any], version: str, client_id: str) -> tuple[MessageEnd | None, Outcome]:
        """Answer one call of ``/v1/messages`` and book it; no end hangs up."""
        world = self.world
        row = row_of(client_id, params, None)
        attempt = world.state.bill.attempts(row.digest) + 1
        chosen = decide(world.scenario, world.seed, row, attempt, "sync")
        if chosen.outcome in _BATCH_ONLY:
            chosen = RowOutcome()
        end = message_end(world.scenario, row, chosen, world.clock.timestamp(), version, in_batch=False)
        run = end.run if end is not None else Run(None, row.digest, RunKind.RUN, model=row.model or "")
        world.state.book_sync(run._replace(wire_id=None))
        return (None if chosen.outcome is Outcome.STATUS_ZERO else end), chosen.outcome

    # --------------------------------------------------------------------------------------- the disk

    def _save(self, batch: MessageBatch) -> None:
        self._batches[batch.id] = batch
        self._journal.write(dump_json(asdict(batch)) + b"\n")

    def _load(self) -> None:
        """Take up the state of a simulator that was here before."""
        for path in self._folder.glob("*.part"):
            path.unlink()
        for record in _records(self._journal_path):
            batch = MessageBatch(**record)
            self._batches[batch.id] = batch
        fresh = self._journal_path.with_suffix(".new")
        fresh.write_bytes(b"".join(dump_json(asdict(batch)) + b"\n" for batch in self._batches.values()))
        fresh.replace(self._journal_path)
        for batch in self._batches.values():
            if batch.ended_at is None:
                # What a run that was cut off has left is made again.
                self._live[batch.id] = batch
            else:
                self.world.state.bill.add_batch(_runs(self._bill_path(batch)))


def _unseen(batch_id: str) -> Refused:
    return Refused(404, f"Message batch '{batch_id}' not found.")


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a line file; a torn last line, left by a kill, is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_json(line)
            except ValueError as error:
                raise ConfigError([f"{path}: damaged: take an empty data folder"]) from error


def _runs(path: Path) -> Iterator[Run]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            wire_id, digest, kind, input_tokens, output_tokens, model = parse_json(line)
            yield Run(wire_id, digest, RunKind(kind), input_tokens, output_tokens, model)
