"""``batchferry sweep``: search the accounts for batches and files of ours that no ledger names."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from batchferry.cli.console import count, counts_text, fail, instant, out, print_json, rows, size, table, wants_json
from batchferry.cli.control import write_control
from batchferry.cli.errors import TopicMissing
from batchferry.cli.exits import Exit
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.domain.control import ALL_ACCOUNTS, SweepWish
from batchferry.domain.errors import LedgerTooNew
from batchferry.domain.orphans import Act, Finding, Knowledge, Why, judge
from batchferry.domain.partition import PartitionLedger

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import KafkaPort

_TEXT = {
    Act.CANCEL: "cancel it",
    Act.WAIT: "wait for the end of its cancelling",
    Act.COLLECT: "delete its files, count its rows as waste",
    Act.DELETE: "delete it",
    Act.NONE: "leave it alone",
}
_ORDINARY = frozenset({Why.KNOWN, Why.FOREIGN})
"""What is there by right; only counted."""


@dataclass(slots=True)
class _Look:
    """What a dry run has seen."""

    findings: list[Finding] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Why something was not seen; nothing must be concluded from an absence then."""


def sweep(
    config: ConfigOption = None,
    account: Annotated[
        str | None, typer.Option("--account", metavar="NAME", help="Only this account; left out: all.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look by yourself, change nothing, show what a sweep would do.")
    ] = False,
    as_json: JsonOption = None,
) -> None:
    """Have the running service search the accounts for batches and files of ours that no ledger names.

    Writes the wish to the control topic; the owner of partition 0 sweeps at once, and once more before it cancels or
    deletes anything. The service does this every sweep_interval_s by itself. --dry-run asks the accounts and reads the
    ledgers here, read-only. Exit code 1 when an account or a ledger could not be read whole.
    """
    settings = load(config, keys_needed=dry_run)
    if account is not None and account not in settings.accounts:
        fail(
            Exit.USAGE, f"there is no account {account!r}", f"the settings have: {', '.join(sorted(settings.accounts))}"
        )
    if not dry_run:
        wish = asyncio.run(_ask(settings, account or ALL_ACCOUNTS))
        if wants_json(as_json):
            print_json({"scope": wish.scope, "at": wish.at})
        else:
            out().print(f"asked for a sweep of {wish.scope} at {instant(wish.at)}; the log tells 'sweep_done'")
        return
    looked = asyncio.run(_look(settings, [account] if account is not None else sorted(settings.accounts)))
    if wants_json(as_json):
        print_json(_as_json(looked))
    else:
        _show(looked)
    if looked.faults:
        fail(Exit.FAILED, "not everything could be read:", *looked.faults)


async def _ask(settings: Settings, scope: str) -> SweepWish:
    from batchferry import app  # noqa: PLC0415 - see run

    kafka = app.build_kafka(settings)
    try:
        wish = SweepWish(scope, app.build_clock(settings).now())
        await write_control(kafka, settings, wish)
        return wish
    finally:
        await kafka.aclose()


async def _look(settings: Settings, accounts: Sequence[str]) -> _Look:
    from batchferry import app  # noqa: PLC0415 - see run
    from batchferry.engine.sweep import read_listing  # noqa: PLC0415

    clock = app.build_clock(settings)
    providers = app.build_providers(settings, clock)
    kafka = app.build_kafka(settings)
    looked = _Look()
    try:
        listings = []
        for account in accounts:
            keeps_files = settings.accounts[account].keep_files
            listing, failures = await read_listing(account, providers[account], clock.now(), keeps_files=keeps_files)
            looked.faults += [f"account {account}: {failure.summary}" for failure in failures]
            listings.append(listing)
        ledgers, faults = await _read_ledgers(kafka, settings)  # after the lists, see the domain's rules
        looked.faults += faults
        if not faults:
            knowledge = Knowledge.of(ledgers)
            for listing in listings:
                looked.findings += judge(listing, knowledge, clock.now())
    finally:
        for provider in providers.values():
            await provider.close()
        await kafka.aclose()
    return looked


async def _read_ledgers(kafka: KafkaPort, settings: Settings) -> tuple[list[PartitionLedger], list[str]]:
    topic = settings.topics.ledger_topic
    admin = await kafka.admin()
    reader = kafka.reader()
    ledgers: list[PartitionLedger] = []
    faults: list[str] = []
    try:
        description = (await admin.describe([topic]))[topic]
        if description is None:
            raise TopicMissing(f"topic {topic} does not exist; 'batchferry run' makes it at its first start")
        await reader.start()
        for partition in range(description.partitions):
            ledger = PartitionLedger(partition)
            ledgers.append(ledger)
            async for records in reader.read_to_end(topic, partition):
                for record in records:
                    try:
                        if record.key is not None:
                            ledger.replay(record.key, record.value)
                    except (ValueError, LedgerTooNew) as error:
                        faults.append(f"ledger record at {record.offset} of partition {partition}: {error}")
    finally:
        await reader.stop()
        await admin.close()
    return ledgers, faults


def _told(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.why not in _ORDINARY]


def _as_json(looked: _Look) -> dict[str, object]:
    return {
        "complete": not looked.faults,
        "faults": looked.faults,
        "counts": dict(Counter(finding.why.value for finding in looked.findings)),
        "findings": [
            {
                "account": one.account,
                "why": one.why.value,
                "act": one.act.value,
                "batch_id": one.batch_id,
                "provider_batch_id": one.provider_batch_id,
                "file_id": one.file_id,
                "status": one.status or None,
                "files": list(one.files),
                "waste_rows": one.waste_rows,
            }
            for one in _told(looked.findings)
        ],
    }


def _show(looked: _Look) -> None:
    console = out()
    told = _told(looked.findings)
    if told:
        shown = table(
            "account", "batch", "at the provider", "status", "what it is", "a sweep would", "rows", right=("rows",)
        )
        lines = (
            (
                one.account,
                one.batch_id or "-",
                one.provider_batch_id or f"{one.file_id} ({size(one.size_bytes)})",
                one.status or "-",
                one.why.value.replace("_", " "),
                _TEXT[one.act],
                count(one.waste_rows) if one.waste_rows else "-",
            )
            for one in told
        )
        console.print(rows(shown, lines))
    console.print(
        counts_text(Counter(one.why.value.replace("_", " ") for one in looked.findings)) or "nothing is listed"
    )
