"""Planted faults: each breaks one rule of the service, and the books must notice within so many lives.

A mutant is a change of the service's own source text, or of one function, made in the process of one life. The text
must be there: a mutant that no longer fits says so instead of passing for caught.
"""

from __future__ import annotations

import inspect
import secrets
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from batchferry.domain import partition as ledger_module
from batchferry.domain.ledger import LotState, SettledBlock
from batchferry.domain.partition import PartitionLedger
from batchferry.engine import partition as partition_module
from batchferry.engine import sealed as sealed_module
from batchferry.engine.fleet import FleetView
from batchferry.engine.landing import Landing
from batchferry.engine.partition import SETTLE, PartitionPlaces, PartitionTask
from batchferry.engine.supervisor import Supervisor
from batchferry.engine.synclane import SyncLane
from batchferry.engine.work import BatchWork


class Mutant(NamedTuple):
    """A planted fault."""

    name: str
    what: str
    plant: Callable[[], None]


def rewrite(owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replace a function by its own text with changes; each text must occur."""
    function = inspect.unwrap(owner.__dict__[name])
    function = function.fget if isinstance(function, property) else function
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if old not in text:
            raise LookupError(f"{owner.__name__}.{name} no longer has {old!r}")
        text = text.replace(old, new)
    space: dict[str, Any] = {}
    module = sys.modules[function.__module__]
    exec(compile(f"from __future__ import annotations\n{text}", f"<mutant {name}>", "exec"), module.__dict__, space)
    setattr(owner, name, space[name])


def _settled_apart() -> None:
    transact = PartitionTask._transact

    async def apart(self: Any, entries: Any, committed_offset: Any = None, records: Any = (), *, purpose: str) -> None:
        blocks = [one for one in entries if isinstance(one, SettledBlock)]
        if purpose != SETTLE or not blocks:
            await transact(self, entries, committed_offset, records, purpose=purpose)
            return
        rest = [one for one in entries if not isinstance(one, SettledBlock)]
        await transact(self, rest, committed_offset, records, purpose=purpose)
        await transact(self, blocks, purpose=purpose)

    PartitionTask._transact = apart


def _no_fence_check() -> None:
    rewrite(
        BatchWork,
        "_record_submitting",
        (
            "        except PartitionLost:\n            return m.SubmittingRefused()\n",
            "        except PartitionLost:\n            continue\n",
        ),
        ("    if not sealed.is_whole:\n        return m.SubmittingRefused()\n", ""),
    )


def _nobody_is_fenced() -> None:
    PartitionPlaces.transactional_id = lambda self, partition: f"{partition}-{secrets.token_hex(4)}"


def _reads_before_fencing() -> None:
    restore = PartitionTask.restore

    async def stale(self: Any, reader: Any, *rest: Any) -> Any:
        places = self._places
        known = [records async for records in reader.read_to_end(places.ledger_topic, self.partition)]

        class Remembered:
            def __getattr__(self, name: str) -> Any:
                return getattr(reader, name)

            async def read_to_end(self, topic: str, partition: int, start: int | None = None) -> Any:
                if topic != places.ledger_topic:
                    async for records in reader.read_to_end(topic, partition, start):
                        yield records
                    return
                for records in known:
                    yield records

        return await restore(self, Remembered(), *rest)

    PartitionTask.restore = stale


def _create_again() -> None:
    rewrite(
        BatchWork,
        "_create",
        (
            "    if isinstance(answer, BatchSnapshot):",
            (
                "    if not isinstance(answer, BatchSnapshot):\n"
                "        answer = await provider.create(file_id, batch.key.endpoint, batch.key.completion_window, metadata)\n"
                "    if isinstance(answer, BatchSnapshot):"
            ),
        ),
    )


def _submitting_first() -> None:
    upload = BatchWork._upload

    async def early(self: Any, context: Any, batch: Any, provider: Any) -> Any:
        sealed = context.sealed
        for partition in sealed.partitions:
            lot = sealed.lot(partition, submit_ttl_s=self._limits.submit_ttl_s)
            await sealed.parts[partition].task.commit(
                lambda ledger, lot=lot: ledger.plan_submitting(lot), purpose="submitting"
            )
        return await upload(self, context, batch, provider)

    BatchWork._upload = early


def _everybody_leads() -> None:
    rewrite(BatchWork, "_clean_up", ("if leader_partition in mine:", "if True:"))
    rewrite(BatchWork, "_delete_files", ("mine[min(batch.partitions)]", "mine[min(mine)]"))


def _retried_row_left_out() -> None:
    partition_module.LotState = LotState
    rewrite(
        PartitionTask,
        "finish_lot",
        (
            "        is_done = any(",
            (
                "        entries = [one for one in entries if not (isinstance(one, Lot) and one.state is LotState.WAITING)]\n"
                "        is_done = any("
            ),
        ),
    )


def _one_growing_record() -> None:
    for module in (ledger_module, sys.modules["batchferry.domain.offsets"], sys.modules["batchferry.domain.ledger"]):
        module.BLOCK_SHIFT = 20
        module.BLOCK_SIZE = 1 << 20


def _ids_without_ledger() -> None:
    rewrite(
        sealed_module.BatchFile,
        "__init__",
        ("(part.task.ledger_id, part.submission)", '("0000000000", part.submission)'),
    )


def _missing_at_once() -> None:
    rewrite(Landing, "_class_of_absent", ("    if not absent or effect.is_last_chance:", "    if True:"))


def _hold_at_home() -> None:
    async def publish(self: Any, entry: Any) -> None:
        self.control.apply(entry)
        self.changed.set()

    FleetView.publish = publish


def _init_again() -> None:
    rewrite(
        Supervisor,
        "_after_loss",
        ("if await self.consumer.confirms_assignment(partition, CONFIRM_TIMEOUT_S):", "if True:"),
        ("self._begin_restore(partition, RESTORE_PAUSE_S)", "self._begin_restore(partition, 0.0)"),
    )


def _dissolved_rows_dropped() -> None:
    rewrite(
        PartitionLedger,
        "plan_dissolve",
        ("return [*into, Tombstone(lot_key(lot_id))]", "return [Tombstone(lot_key(lot_id))]"),
    )


def _claim_makes_a_ledger() -> None:
    rewrite(
        PartitionTask,
        "restore",
        ("if self.ledger.header is None:", "if True:"),
        ("is_new = self.ledger.header is None", "is_new = True"),
    )


def _anybody_fails_a_row() -> None:
    rewrite(PartitionTask, "_settle_chunk", ("if settlement.only_if_held_by is not None:", "if False:"))


def _files_gone_early() -> None:
    rewrite(
        BatchWork,
        "_delete_files",
        ("if any(p in known and known[p].state not in {LotState.DONE, LotState.CLEAN} for p in others):", "if False:"),
    )


def _submission_again() -> None:
    PartitionLedger.next_submission = lambda self, offsets: 1
    PartitionLedger._check_takeable = lambda self, lot: None
    PartitionLedger._check_heirs = lambda self, rows, into: None


def _no_look_up_after_the_deletion() -> None:
    """Absence from one list is believed although the input file is still there."""
    rewrite(
        BatchWork,
        "_delete_input",
        ("    failure = await provider.delete_file(batch.input_file_id)", "    failure = None"),
    )


def _settled_twice() -> None:
    """Landing asks once more, to spare work: that question is left out too."""
    rewrite(
        Landing,
        "_settle_successes",
        ("if not ledger.is_settled(pair[0])", "if True"),
        ("            if not ledger.is_settled(offset)\n", ""),
    )
    rewrite(
        PartitionTask,
        "_settle_chunk",
        ("if ledger.is_settled(offset) or offset in settled_now:", "if offset in settled_now:"),
    )
    rewrite(PartitionLedger, "plan_settle", ("if len(self.unsettled(settled_now)) != len(settled_now):", "if False:"))


def _calls_before_their_wave() -> None:
    """The wave is written, but only once its calls are out."""
    rewrite(
        SyncLane,
        "_record",
        (
            '    await task.commit(plan, told, purpose="wave")\n',
            (
                "    plan(task.ledger)\n"
                "    async def later():\n"
                "        await asyncio.sleep(0.3)\n"
                "        await task.commit(lambda ledger: ledger.plan_submitting(made[0]), told, purpose='wave')\n"
                "    self._later = asyncio.ensure_future(later())\n"
            ),
        ),
    )


def _lost_wave_not_counted() -> None:
    rewrite(SyncLane, "resolve", ('    self._possibly_paid_twice(lot, unknown, "sync_wave_lost")\n', ""))


def _lost_wave_dropped() -> None:
    rewrite(
        SyncLane,
        "_hand_on_unknown",
        ("return ledger.plan_dissolve(lot.lot_id, [heir])", "return ledger.plan_dissolve(lot.lot_id, [heir])[1:]"),
    )


def _wave_ends_unsettled() -> None:
    """What has been answered is handed on with the rest, as if nobody had answered."""
    rewrite(SyncLane, "_run_wave", ("    await task.flush()\n    back = ", "    back = "))


def _silent_miss() -> None:
    rewrite(PartitionTask, "_settle_chunk", ("            if settlement.is_missed:\n", "            if False:\n"))


def _cancel_forgets_finished() -> None:
    """The results of a cancelled batch are not read: all its rows count as not run."""
    rewrite(
        Landing,
        "land",
        (
            "if one is not None]\n",
            "if one is not None and snapshot.status is not ProviderStatus.CANCELLED]\n",
        ),
        (
            "counted = snapshot.counts.completed + snapshot.counts.failed\n",
            "counted = snapshot.counts.completed + snapshot.counts.failed if file_ids else 0\n",
        ),
    )


def _strangers_landed() -> None:
    """What was only taken for ours is read as if it were, whatever its lines say."""
    rewrite(Landing, "land", ("if is_uncertain and not await", "if False and not await"))


def _not_ours_deleted() -> None:
    """What turns out to be another's is cleaned up as if it were ours."""
    rewrite(
        BatchWork,
        "_disown",
        (
            "    context.is_uncertain, context.twins",
            (
                "    if not is_gone:\n"
                "        await self._providers[context.account].delete_file(FileId(f'results:{provider_batch_id}'))\n"
                "    context.is_uncertain, context.twins"
            ),
        ),
    )


def _gone_without_a_word() -> None:
    """Rows of a batch that was not found, or is not there any more, go again and nobody is told."""
    rewrite(
        BatchWork,
        "_hand_rows_on",
        ("self._count_second_runs(context, batch, [lot for _, lot in own.values()])", "pass"),
    )


MUTANTS = (
    Mutant("settled-apart", "the settled bitmap is not written in the transaction of the outcomes", _settled_apart),
    Mutant("no-fence-check", "a create is sent although SUBMITTING could not be written", _no_fence_check),
    Mutant("nobody-is-fenced", "every life of a partition has a transactional id of its own", _nobody_is_fenced),
    Mutant("reads-before-fencing", "the ledger is read before the predecessor is fenced", _reads_before_fencing),
    Mutant("create-again", "an unanswered create is sent again", _create_again),
    Mutant("submitting-first", "SUBMITTING is written before the upload", _submitting_first),
    Mutant("everybody-leads", "two owners both act as leader", _everybody_leads),
    Mutant(
        "retried-row-left-out",
        "rows to be retried are left out of the transaction that ends their lot",
        _retried_row_left_out,
    ),
    Mutant("one-growing-record", "the settled set is kept in one growing record", _one_growing_record),
    Mutant("ids-without-ledger", "wire ids carry no ledger id", _ids_without_ledger),
    Mutant("missing-at-once", "a row is called missing after one download", _missing_at_once),
    Mutant("hold-at-home", "a hold is kept by its owner and not in the control topic", _hold_at_home),
    Mutant("init-again", "a fenced owner takes the partition back without asking the group", _init_again),
    Mutant(
        "dissolved-rows-dropped", "rows of a dissolved lot are not written into a waiting lot", _dissolved_rows_dropped
    ),
    Mutant("claim-makes-a-ledger", "a claim overwrites the ledger id", _claim_makes_a_ledger),
    Mutant("anybody-fails-a-row", "a failure counts although its lot does not hold the row", _anybody_fails_a_row),
    Mutant("files-gone-early", "provider files are deleted before every owner has written DONE", _files_gone_early),
    Mutant("submission-again", "a submission number is used again", _submission_again),
    Mutant("file-left", "a lost create is given up while its file is still there", _no_look_up_after_the_deletion),
    Mutant("calls-before-their-wave", "sync calls are made before their wave is written", _calls_before_their_wave),
    Mutant("lost-wave-not-counted", "rows of a lost wave run again and are not counted", _lost_wave_not_counted),
    Mutant("lost-wave-dropped", "rows of a lost wave are not written into a waiting lot", _lost_wave_dropped),
    Mutant("wave-ends-unsettled", "a wave ends before its answers are settled", _wave_ends_unsettled),
    Mutant("silent-miss", "a deadline is missed and no event says so", _silent_miss),
    Mutant("cancel-forgets-finished", "what a cancelled batch had finished is not read", _cancel_forgets_finished),
    Mutant(
        "strangers-landed", "a batch that was only taken for ours is landed unproven (anthropic)", _strangers_landed
    ),
    Mutant("not-ours-deleted", "a batch that turns out to be another's is deleted (anthropic)", _not_ours_deleted),
    Mutant(
        "gone-without-a-word", "rows of a lost batch go again and are not counted (anthropic)", _gone_without_a_word
    ),
    Mutant("settled-twice", "an outcome is published without asking whether the row is settled", _settled_twice),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
