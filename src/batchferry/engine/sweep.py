"""The sweep: finds batches and files of ours at the providers that no ledger names, and takes them away.

One replica does it, the owner of partition 0, every ``sweep_interval_s`` of the service's time and whenever a
``sweep/`` record of the control topic moves on. What is found and why it is safe to act stands in
``domain.orphans``; here are the order of the readings, the fence check before each act, and the bounds.

Nothing is acted upon before a second pass, at least the time a create may be under way later (real seconds, as the
creator counts them), has found it as well; that second pass follows by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

from batchferry.config import Settings
from batchferry.domain.control import ALL_ACCOUNTS
from batchferry.domain.errors import KafkaUnavailable, PartitionLost
from batchferry.domain.ids import BatchId, ProviderBatchId
from batchferry.domain.orphans import HORIZON_S, Act, Finding, Knowledge, Listing, Why, due, judge, remember
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    FilePage,
    FileRole,
    ListedFile,
)
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.engine.fleet import FleetView
from batchferry.engine.metered import tell_failed_call
from batchferry.engine.partition import PartitionTask
from batchferry.ports import BatchProvider, Clock, Telemetry

SWEEPER_PARTITION = 0
"""Its owner sweeps."""
LOOK_S = 1.0
"""Real seconds between two looks whether a sweep is due."""
MIN_PAUSE_S = 60.0
"""Real seconds between two sweeps that only the timetable asks for: a rehearsal's hour may be a second."""
MAX_FOLLOW_UPS = 10
"""Passes that follow one by themselves while suspects or failures are left; then they wait for the timetable."""
MAX_LIST_PAGES = 100
"""Pages of one list that one pass reads."""
MAX_ACTS = 200
"""Batches and files that one pass takes away from one account; the others wait for the next pass."""
MAX_COUNTED = 10_000
"""Collected batches that are remembered, so that one whose files resist is counted once."""
FENCE_AGE_S = 30.0
"""Each act follows a transaction of our partition at most this old (real seconds)."""

_KINDS: Mapping[Why, Literal["batch", "twin"]] = {Why.ORPHAN: "batch", Why.TWIN: "twin"}


async def read_listing(
    account: str, provider: BatchProvider, now: datetime, *, keeps_files: bool
) -> tuple[Listing, list[CallFailed]]:
    """What an account shows, back to the horizon; read-only.

    Returns:
        the listing, with None for file lists that could not be had, and the calls that failed. Without the batch
        list there are no file lists either: a file may belong to a batch that was not seen.
    """
    oldest = now - timedelta(seconds=HORIZON_S)
    batches = await _read_batches(provider, oldest)
    if isinstance(batches, CallFailed):
        return Listing(account, (), None, None, keeps_files), [batches]
    failures: list[CallFailed] = []
    files: list[Sequence[ListedFile] | None] = []
    for role in (FileRole.INPUT, FileRole.OUTPUT):
        found = await _read_files(provider, role, oldest)
        if isinstance(found, CallFailed):
            failures.append(found)
            files.append(None)
        else:
            files.append(found)
    return Listing(account, batches, files[0], files[1], keeps_files), failures


async def _read_batches(provider: BatchProvider, oldest: datetime) -> list[BatchSnapshot] | CallFailed:
    found: dict[ProviderBatchId, BatchSnapshot] = {}
    cursor: str | None = None
    for _ in range(MAX_LIST_PAGES):
        page = await provider.list_batches(cursor)
        if not isinstance(page, BatchPage):
            return page
        found.update((one.provider_batch_id, one) for one in page.batches)
        if page.next_cursor in {None, cursor} or _is_past(page.batches, oldest):
            break
        cursor = page.next_cursor
    return list(found.values())


async def _read_files(provider: BatchProvider, role: FileRole, oldest: datetime) -> list[ListedFile] | CallFailed:
    found: dict[str, ListedFile] = {}
    cursor: str | None = None
    for _ in range(MAX_LIST_PAGES):
        page = await provider.list_files(role, cursor)
        if not isinstance(page, FilePage):
            return page
        found.update((one.file_id, one) for one in page.files)
        if page.next_cursor in {None, cursor} or _is_past(page.files, oldest):
            break
        cursor = page.next_cursor
    return list(found.values())


def _is_past(page: Sequence[BatchSnapshot] | Sequence[ListedFile], oldest: datetime) -> bool:
    """Whether a whole page is older than what is judged. Not every server sorts strictly, so one entry is no proof."""
    return bool(page) and all(one.created_at is not None and one.created_at < oldest for one in page)


FULL_SHARE = 0.9
"""Above this share of an account's files an alarm is raised."""


class Sweeper:
    """One a process; idle while another replica owns partition 0."""

    def __init__(
        self,
        settings: Settings,
        providers: Mapping[str, BatchProvider],
        tasks: Mapping[int, PartitionTask],
        clock: Clock,
        telemetry: Telemetry,
        fleet: FleetView,
    ) -> None:
        self._settings = settings
        self._providers = providers
        self._tasks = tasks
        self._clock = clock
        self._telemetry = telemetry
        self._fleet = fleet
        longest_s = max(settings.submit_ttl_s(name) for name in settings.accounts)
        self.quiet_s = longest_s + settings.limits.resolve_lag_s
        """Real seconds between the first sight of a suspect and the first act."""
        self._first_seen: dict[str, dict[str, float]] = {}
        """Suspects of each account with the real seconds since when they are suspects."""
        self._counted: dict[tuple[BatchId | None, ProviderBatchId | None], None] = {}
        self._answered: dict[str, datetime] = {}
        """The instant of the last wish of each scope that a sweep has begun for."""
        self._full: set[str] = set()
        """Accounts with hardly room for more files, of which that has been told."""
        self._owner: PartitionTask | None = None
        self._next_at: datetime | None = None
        self._not_before_s = 0.0
        self._follow_at_s: float | None = None
        self._follow_ups = 0
        self._follow_accounts: set[str] = set()
        self._unfinished_accounts: set[str] = set()

    # ------------------------------------------------------------------------------------------- when

    async def run(self) -> None:
        """Sweep when it is time, until cancelled."""
        await self._fleet.ready()
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Sweep if it is due now and ours to do."""
        loop = asyncio.get_running_loop()
        task = self._tasks.get(SWEEPER_PARTITION)
        if task is None or not task.is_live:
            self._owner = None
            return
        if task is not self._owner:
            self._start_anew(task, loop.time())
        wanted = self._wished()
        if wanted:
            await self._sweep_all(wanted, "asked")
            self._follow_ups = 0
        elif self._next_at is not None and self._clock.now() >= self._next_at and loop.time() >= self._not_before_s:
            self._set_timetable(loop.time())
            await self._sweep_all(set(self._settings.accounts), "interval")
            self._follow_ups = 0
        elif self._follow_at_s is not None and loop.time() >= self._follow_at_s:
            self._follow_ups += 1
            await self._sweep_all(set(self._follow_accounts), "confirm")
        else:
            return
        self._plan_follow_up(loop.time())

    def _start_anew(self, task: PartitionTask, now_s: float) -> None:
        """The partition has come to us: what an earlier life of it suspected is suspected anew."""
        self._owner = task
        self._first_seen.clear()
        self._follow_at_s = None
        self._follow_accounts.clear()
        self._unfinished_accounts.clear()
        self._set_timetable(now_s)

    def _set_timetable(self, now_s: float) -> None:
        self._next_at = self._clock.now() + timedelta(seconds=self._settings.limits.sweep_interval_s)
        self._not_before_s = now_s + MIN_PAUSE_S

    def _wished(self) -> set[str]:
        """Accounts that a control record wants swept and that no sweep has begun for since."""
        wanted: set[str] = set()
        for scope, wish in list(self._fleet.control.sweeps.items()):
            answered = self._answered.get(scope)
            if answered is not None and wish.at <= answered:
                continue
            self._answered[scope] = wish.at
            wanted.update(name for name in self._settings.accounts if scope in {ALL_ACCOUNTS, name})
        for gone in self._answered.keys() - self._fleet.control.sweeps.keys():
            del self._answered[gone]
        return wanted

    def _plan_follow_up(self, now_s: float) -> None:
        self._follow_accounts = self._unfinished_accounts | {name for name, seen in self._first_seen.items() if seen}
        goes_on = bool(self._follow_accounts) and self._follow_ups < MAX_FOLLOW_UPS
        self._follow_at_s = now_s + self.quiet_s if goes_on else None

    # ------------------------------------------------------------------------------------------- what

    async def _sweep_all(self, accounts: Collection[str], reason: str) -> None:
        self._unfinished_accounts -= set(accounts)
        for account in sorted(accounts):
            try:
                await self.sweep(account, reason)
            except PartitionLost:
                self._unfinished(account, "partition_lost")
                return
        suspects = sum(len(seen) for seen in self._first_seen.values())
        self._telemetry.gauge("orphan_suspects", suspects)

    async def sweep(self, account: str, reason: str) -> Sequence[Finding]:
        """One pass over one account; what was found.

        Raises:
            PartitionLost: partition 0 is no longer ours; nothing was done after that.
        """
        listing, failures = await read_listing(
            account,
            self._providers[account],
            self._clock.now(),
            keeps_files=self._settings.accounts[account].keep_files,
        )
        for failure in failures:
            tell_failed_call(self._telemetry, account, failure)
        self._tell_files(account, listing)
        if any(failure.call == "list" for failure in failures):
            self._unfinished(account, "list_unavailable")
            return ()
        try:
            await self._fleet.catch_up()  # after the lists: a lot is recorded before its batch is asked for
        except KafkaUnavailable:
            self._unfinished(account, "ledgers_unavailable")
            return ()
        if self._fleet.unreadable:
            self._unfinished(account, "ledger_unreadable", min(self._fleet.unreadable))
            return ()
        findings = judge(listing, Knowledge.of(self._fleet.ledgers().values()), self._clock.now())
        seen = self._first_seen.get(account, {})
        now_s = asyncio.get_running_loop().time()
        self._tell_found(findings, seen)
        ripe = due(findings, seen, now_s, self.quiet_s)
        self._first_seen[account] = remember(findings, seen, now_s)
        done = await self._act_on(ripe[:MAX_ACTS], self._providers[account])
        if failures:
            self._unfinished(account, "file_list_unavailable")
        elif len(ripe) > MAX_ACTS:
            self._unfinished(account, "too_many")
        else:
            self._telemetry.count("sweeps", outcome="done")
        self._tell_done(listing, reason, findings, done)
        return findings

    def _unfinished(self, account: str, reason: str, partition: int | None = None) -> None:
        self._unfinished_accounts.add(account)
        self._telemetry.count("sweeps", outcome="unfinished")
        self._telemetry.event("sweep_unfinished", account=account, reason=reason, partition=partition)

    # ------------------------------------------------------------------------------------------- acts

    async def _act_on(self, findings: Sequence[Finding], provider: BatchProvider) -> Counter[str]:
        done: Counter[str] = Counter()
        for finding in findings:
            task = self._owner
            if task is None:
                raise PartitionLost(SWEEPER_PARTITION, "not ours")
            await task.confirm_ownership(FENCE_AGE_S)
            if finding.act is Act.CANCEL:
                went_well = await self._cancel(finding, provider)
            elif finding.act is Act.COLLECT:
                went_well = await self._collect(finding, provider)
            else:
                went_well = await self._delete(finding, provider)
            done[finding.act if went_well else "failed"] += 1
        return done

    async def _cancel(self, finding: Finding, provider: BatchProvider) -> bool:
        """Cancelling twice is harmless; one that has ended meanwhile is collected by the next pass."""
        assert finding.provider_batch_id is not None
        reach(Failpoint.CANCEL_BEFORE)
        answer = await provider.cancel(finding.provider_batch_id)
        reach(Failpoint.CANCEL_AFTER)
        if isinstance(answer, CallFailed) and answer.kind is not CallFailure.CONFLICT:
            tell_failed_call(self._telemetry, finding.account, answer)
            return False
        self._telemetry.count("orphans_cleared", act="cancelled")
        self._telemetry.event(
            "orphan_cancelled",
            account=finding.account,
            batch_id=finding.batch_id,
            provider_batch_id=finding.provider_batch_id,
            kind=_KINDS.get(finding.why, ""),
            status=finding.status,
        )
        return True

    async def _collect(self, finding: Finding, provider: BatchProvider) -> bool:
        """Deleting is a state. Its rows are counted once: at the pass that first takes a result file away."""
        self._count_waste(finding)
        reach(Failpoint.DELETE_FILES_BEFORE)
        for file_id in finding.files:
            failure = await provider.delete_file(file_id)
            if failure is not None:
                tell_failed_call(self._telemetry, finding.account, failure)
                return False
        reach(Failpoint.DELETE_FILES_AFTER)
        self._telemetry.count("orphans_cleared", act="collected")
        self._telemetry.event(
            "orphan_collected",
            account=finding.account,
            batch_id=finding.batch_id,
            provider_batch_id=finding.provider_batch_id,
            kind=_KINDS.get(finding.why, ""),
            status=finding.status,
            files=len(finding.files),
            rows=finding.waste_rows,
        )
        return True

    def _count_waste(self, finding: Finding) -> None:
        # Two accounts of the settings may be one at the provider: the batch counts once.
        key = (finding.batch_id, finding.provider_batch_id)
        if not finding.waste_rows or key in self._counted:
            return
        self._counted[key] = None
        while len(self._counted) > MAX_COUNTED:
            del self._counted[next(iter(self._counted))]
        rows = finding.waste_rows
        self._telemetry.count("orphan_waste_rows", rows)
        self._telemetry.count("possibly_paid_twice_rows", rows)
        self._telemetry.event("possibly_paid_twice", batch_id=finding.batch_id, rows=rows, reason="orphan")

    async def _delete(self, finding: Finding, provider: BatchProvider) -> bool:
        """A deleted file stays deleted."""
        assert finding.file_id is not None
        reach(Failpoint.DELETE_FILES_BEFORE)
        failure = await provider.delete_file(finding.file_id)
        reach(Failpoint.DELETE_FILES_AFTER)
        if failure is not None:
            tell_failed_call(self._telemetry, finding.account, failure)
            return False
        self._telemetry.count("orphans_cleared", act="file_deleted")
        self._telemetry.event(
            "orphan_file_deleted", account=finding.account, batch_id=finding.batch_id, file_id=finding.file_id
        )
        return True

    # ---------------------------------------------------------------------------------------- telling

    def _tell_found(self, findings: Sequence[Finding], seen: Mapping[str, float]) -> None:
        for finding in findings:
            if not finding.is_suspect or finding.key in seen:
                continue
            kind = "file" if finding.file_id is not None else _KINDS[finding.why]
            self._telemetry.count("orphans_found", kind=kind)
            self._telemetry.event(
                "orphan_found",
                account=finding.account,
                batch_id=finding.batch_id,
                provider_batch_id=finding.provider_batch_id,
                file_id=finding.file_id,
                kind=kind,
                status=finding.status,
            )

    def _tell_files(self, account: str, listing: Listing) -> None:
        """How many files the account has by its lists, and an alarm when there is hardly room for more."""
        if listing.input_files is None or listing.output_files is None:
            return
        files = len(listing.input_files) + len(listing.output_files)
        self._telemetry.gauge("provider_files", files, account=account)
        max_files = self._settings.accounts[account].limits.max_files
        is_full = max_files is not None and files > max_files * FULL_SHARE
        if is_full and account not in self._full:
            self._telemetry.event("alarm", what="provider_files_full", scope=account, rows=files)
            self._telemetry.count("alarms", what="provider_files_full")
        (self._full.add if is_full else self._full.discard)(account)

    def _tell_done(self, listing: Listing, reason: str, findings: Sequence[Finding], done: Mapping[str, int]) -> None:
        whys = Counter(finding.why for finding in findings)
        self._telemetry.event(
            "sweep_done",
            account=listing.account,
            reason=reason,
            batches=len(listing.batches),
            files=len(listing.input_files or ()) + len(listing.output_files or ()),
            known=whys[Why.KNOWN],
            not_ours=whys[Why.FOREIGN] + whys[Why.OTHER_LEDGER] + whys[Why.CONTRADICTORY],
            open=whys[Why.RESOLVING] + whys[Why.UNRECORDED] + whys[Why.TOO_YOUNG],
            too_old=whys[Why.TOO_OLD],
            suspects=sum(finding.is_suspect for finding in findings),
            cancelled=done.get(Act.CANCEL, 0),
            collected=done.get(Act.COLLECT, 0),
            deleted=done.get(Act.DELETE, 0),
            failed=done.get("failed", 0),
        )
