"""One batch's actor: a mailbox, the machine, and the effects it asks for.

Events of one batch are handled one after the other, batches side by side. Each transition is written to the local
read model and its history; then the effects run, each as a task of its own that ends by posting an event. An
exception out of an effect is our bug: that batch is quarantined with its history, the service goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from batchferry.domain.errors import IllegalTransition, StoreUnavailable
from batchferry.domain.machine import (
    FINAL,
    Batch,
    BatchState,
    CancelWanted,
    DeleteInput,
    Effect,
    Event,
    InputUploaded,
    MachineSettings,
    Poked,
    PollAnswered,
    Transition,
    UploadInput,
    begin,
    transition,
)
from batchferry.domain.provider import BatchSnapshot, ProviderStatus
from batchferry.ports import Clock, LocalStore, Telemetry
from batchferry.telemetry import error_fields

RunEffect = Callable[[Batch, Effect], Awaitable[Event | None]]
Changed = Callable[[Batch, Batch, Event], Awaitable[None]]

HISTORY_LINES = 50
REPEATED = (CancelWanted, Poked)
"""News that is told again as long as it is true."""
FAREWELL_S = 30.0
"""Real seconds that an upload or a deletion gets when its batch is over: it is the last who knows of the file."""


class BatchActor:
    """Runs one batch from its present state to an end."""

    def __init__(
        self,
        batch: Batch,
        settings: MachineSettings,
        run_effect: RunEffect,
        changed: Changed,
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        mailbox_events: int,
        details: Mapping[str, object],
        stretch: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.batch = batch
        self._settings = settings
        self._run_effect = run_effect
        self._changed = changed
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._mailbox: asyncio.Queue[Event] = asyncio.Queue(mailbox_events)
        self._effects: set[asyncio.Task[None]] = set()
        self._last_acts: set[asyncio.Task[None]] = set()
        self._details = dict(details)
        self._stretch = stretch
        self._history: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to this batch here."""
        return self.batch.state in FINAL or self.batch.is_clean

    @property
    def waiting_events(self) -> int:
        """News that has not been handled yet."""
        return self._mailbox.qsize()

    def post(self, event: Event) -> None:
        """Put news into the mailbox. When it is full, news that comes again by itself is dropped, else the oldest."""
        if self._mailbox.full():
            self._telemetry.event("mailbox_overflowed", batch_id=self.batch.batch_id)
            if isinstance(event, REPEATED):
                return
            self._mailbox.get_nowait()
        self._mailbox.put_nowait(event)

    async def run(self) -> None:
        """Handle events until the batch is over or the task is cancelled."""
        try:
            await self._save(None, None)
            for effect in begin(self.batch, self._clock.now(), self._settings):
                self._start(effect)
            while not self.is_over:
                await self._handle(await self._mailbox.get())
            await self._farewell()
        finally:
            for task in self._effects:
                task.cancel()
            await asyncio.gather(*self._effects, return_exceptions=True)

    async def _farewell(self) -> None:
        """Nobody else knows of the file: let its deletion end, and delete what a late upload still brings."""
        if self._last_acts:
            await asyncio.wait(self._last_acts, timeout=FAREWELL_S)
        while not self._mailbox.empty():
            event = self._mailbox.get_nowait()
            if isinstance(event, InputUploaded):
                self.batch = replace(self.batch, input_file_id=event.file_id)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_S):
                        await self._run_effect(self.batch, DeleteInput())

    async def _handle(self, event: Event) -> None:
        before = self.batch
        try:
            settings = replace(self._settings, poll_stretch=self._stretch())
            decided = transition(before, event, self._clock.now(), settings)
        except IllegalTransition as error:
            await self._quarantine(str(error))
            return
        self._remember(before, event, decided)
        if isinstance(event, PollAnswered):
            self._tell_poll(before, decided.batch, event.snapshot)
        if decided.is_ignored:
            self._telemetry.count("news_ignored")
            self._telemetry.event(
                "news_ignored", batch_id=before.batch_id, state=before.state.value, news=type(event).__name__
            )
            return
        self.batch = decided.batch
        await self._save(before, event)
        if before.state is not self.batch.state:
            await self._changed(before, self.batch, event)
        for effect in decided.effects:
            self._start(effect)

    def _tell_poll(self, before: Batch, after: Batch, snapshot: BatchSnapshot) -> None:
        self._telemetry.event(
            "batch_polled",
            batch_id=before.batch_id,
            status=snapshot.raw_status,
            completed=snapshot.counts.completed,
            failed=snapshot.counts.failed,
            total=snapshot.counts.total,
            next_poll_at=after.next_poll_at,
        )
        if snapshot.status is ProviderStatus.UNKNOWN and snapshot.raw_status != before.provider_status:
            self._telemetry.event(
                "status_unknown", batch_id=before.batch_id, account=before.key.account, status=snapshot.raw_status
            )

    def _start(self, effect: Effect) -> None:
        task = asyncio.create_task(self._do(effect), name=f"{type(effect).__name__} {self.batch.batch_id}")
        self._effects.add(task)
        task.add_done_callback(self._effects.discard)
        if isinstance(effect, DeleteInput | UploadInput):
            self._last_acts.add(task)
            task.add_done_callback(self._last_acts.discard)

    async def _do(self, effect: Effect) -> None:
        try:
            if effect.after_s:
                await self._clock.sleep(effect.after_s)
            event = await self._run_effect(self.batch, effect)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (an effect that raises is a bug; it must cost one batch only)
            self._telemetry.count("effects_failed", effect=type(effect).__name__)
            self._telemetry.event(
                "effect_failed",
                batch_id=self.batch.batch_id,
                effect=type(effect).__name__,
                **error_fields(error),
            )
            await self._quarantine(f"{type(effect).__name__} raised {type(error).__name__}")
            return
        if event is not None:
            self.post(event)

    async def _quarantine(self, why: str) -> None:
        before = self.batch
        if before.state is BatchState.QUARANTINED:
            return
        self.batch = replace(before, state=BatchState.QUARANTINED, state_since=self._clock.now())
        self._telemetry.count("quarantined_batches")
        self._telemetry.event(
            "batch_quarantined",
            batch_id=before.batch_id,
            state=before.state.value,
            why=why,
            history=list(self._history),
        )
        await self._save(before, None)
        self.post(Event())  # wakes `run`, which then ends

    def _remember(self, before: Batch, event: Event, decided: Transition) -> None:
        name = type(event).__name__
        what = "ignored" if decided.is_ignored else decided.batch.state.value
        self._history.append(f"{self._clock.now().isoformat()} {before.state.value} {name} -> {what}")
        del self._history[:-HISTORY_LINES]

    async def _save(self, before: Batch | None, event: Event | None) -> None:
        """Show the batch in the read model; it is for people only, so a full disk costs no more than that."""
        try:
            await self._write(before, event)
        except StoreUnavailable:
            self._telemetry.event("store_unavailable", what="batch_jobs")

    async def _write(self, before: Batch | None, event: Event | None) -> None:
        batch = self.batch
        await self._store.save_batch(
            {
                **self._details,
                "batch_id": batch.batch_id,
                "platform_batch_id": batch.provider_batch_id,
                "state": batch.state.value,
                "provider_status": batch.provider_status or None,
                "input_file_id": batch.input_file_id,
                "output_file_id": None if batch.snapshot is None else batch.snapshot.output_file_id,
                "error_file_id": None if batch.snapshot is None else batch.snapshot.error_file_id,
                "sealed_at": batch.sealed_at,
                "submitted_at": batch.submitted_at,
                "finalized_at": batch.ended_at,
                "next_poll_at": batch.next_poll_at,
                "rows": batch.rows,
                "total_requests": batch.counts.total or batch.rows,
            }
        )
        if before is None or event is None or before.state is batch.state:
            return
        await self._store.add_batch_event(
            {
                "batch_id": batch.batch_id,
                "at": self._clock.now(),
                "event": type(event).__name__,
                "from_state": before.state.value,
                "to_state": batch.state.value,
            }
        )
