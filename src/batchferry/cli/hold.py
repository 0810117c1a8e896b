"""``batchferry hold``, ``release``, ``flush``, ``cancel`` and ``rescue``: what an operator wants, by a control record.

Every replica follows the control topic, so none of these asks a running service and each may be given again. A scope
is typed as ``account:NAME``, ``key:DIGEST``, ``shape:ID``, or as a piece of a label that ``status`` shows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from batchferry.cli.console import complain, fail, instant, out, print_json, safe, wants_json
from batchferry.cli.control import write_control
from batchferry.cli.exits import Exit
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.cli.standing import BatchStanding, Standing, find_batches, read_standing
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import (
    CancelWish,
    Flush,
    Hold,
    Lifted,
    RescueWish,
    account_scope,
    hold_key,
    key_scope,
    shape_scope,
)
from batchferry.domain.envelope import EventKind, event_headers, render_event
from batchferry.domain.ids import BatchId
from batchferry.domain.ledger import Lane, LotState
from batchferry.domain.times import hours, parse_duration_s
from batchferry.ports import OutRecord

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import KafkaPort

OPERATOR = "operator"
"""Reasons of operators begin so: the service lifts only its own, and a hold stands while any reason does."""
ALL_KEYS = "all"
MAX_REASON_CHARS = 80
NAMED = 20
"""So many names are listed where one has to be chosen."""
_DIGEST = re.compile(r"[0-9a-f]{16}")
_REASON = re.compile(rf"[^/\x00-\x1f\x7f]{{1,{MAX_REASON_CHARS}}}")
_OVER = frozenset({LotState.DONE, LotState.CLEAN})
T = TypeVar("T")

ScopeArgument = Annotated[
    str,
    typer.Argument(metavar="SCOPE", help="account:NAME, key:DIGEST, shape:ID, or a piece of a label in 'status'."),
]
BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Our batch id, the beginning of one, or the provider's id.")
]


class Unrun(StrEnum):
    """What becomes of the rows that a cancelled batch has not run."""

    FAIL = "fail"
    REQUEUE = "requeue"
    HOLD = "hold"


_UNRUN_TEXT = {
    Unrun.FAIL: "end on the failures topic",
    Unrun.REQUEUE: "go into a new batch at once",
    Unrun.HOLD: "wait until the hold on their batch key is released",
}


# ------------------------------------------------------------------------------------------------ the commands


def hold(
    scope: ScopeArgument,
    config: ConfigOption = None,
    reason: Annotated[str, typer.Option(help="Why, for people; stands beside the scope in 'status'.")] = "",
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="Lifts by itself, such as 2h; left out: never.")
    ] = None,
    as_json: JsonOption = None,
) -> None:
    """Submit nothing more of a scope: an account, a batch key, or a kind of prompt.

    Records are still read and gathered, and batches at the provider go on and land. No row uses up an attempt, but the
    clock of its deadline runs. Lifted by 'batchferry release'.
    """
    why = _reason(reason)
    lasts_s = _duration_s(lasting)
    settings = load(config, keys_needed=False)

    async def work(kafka: KafkaPort, now: datetime) -> tuple[Hold, list[Hold]]:
        standing = await read_standing(kafka, settings, now)
        found, label = _resolve(scope, settings, standing)
        until = None if lasts_s is None else now + timedelta(seconds=lasts_s)
        made = Hold(found, why, now, until, 1, label)
        await write_control(kafka, settings, made)
        await _announce(kafka, settings, EventKind.HELD, made, now)
        return made, [one for one in standing.holds if one.scope == found and one.reason != why]

    made, others = _run(settings, work)
    if wants_json(as_json):
        print_json({"held": _hold_json(made), "also_held_for": [_hold_json(one) for one in others]})
        return
    out().print(f"held: {_told(made)}", markup=False, soft_wrap=True)
    for one in others:
        out().print(f"it is held for another reason too: {_told(one)}", markup=False, soft_wrap=True)


def release(
    scope: ScopeArgument,
    config: ConfigOption = None,
    reason: Annotated[str | None, typer.Option(help="Lift only the hold with this reason.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Lift every hold of the scope.")] = False,
    as_json: JsonOption = None,
) -> None:
    """Lift a hold. A scope stays held while any other reason stands; those are told.

    Of a kind of prompt (shape:ID) the canary's verdict is lifted too: its next rows are sampled anew.
    """
    if every and reason is not None:
        fail(Exit.USAGE, "--all and --reason exclude one another; give one of them")
    settings = load(config, keys_needed=False)

    async def work(kafka: KafkaPort, now: datetime) -> tuple[list[Hold], list[Hold], str | None]:
        standing = await read_standing(kafka, settings, now)
        found = _resolve_standing(scope, standing)
        mine = [one for one in standing.controls.holds.values() if one.scope == found]
        shape = found.removeprefix("shape:") if found.startswith("shape:") else ""
        has_verdict = shape in standing.controls.canaries
        lifted = _chosen_holds(found, mine, reason, every=every, may_be_none=has_verdict and reason is None)
        for one in lifted:
            await write_control(kafka, settings, Lifted(hold_key(one)))
            await _announce(kafka, settings, EventKind.RELEASED, one, now)
        left = [one for one in mine if one not in lifted and one in standing.holds]
        verdict = shape if has_verdict and not left else None
        if verdict is not None:
            await write_control(kafka, settings, Lifted(f"canary/{verdict}"))
        return lifted, [*left, *_of_the_account(found, mine, settings, standing)], verdict

    lifted, left, verdict = _run(settings, work)
    if wants_json(as_json):
        print_json(
            {
                "released": [_hold_json(one) for one in lifted],
                "still_held_for": [_hold_json(one) for one in left],
                "canary_verdict_lifted": verdict,
            }
        )
        return
    for one in lifted:
        out().print(f"released: {_told(one)}", markup=False, soft_wrap=True)
    if verdict is not None:
        out().print(f"the canary's verdict on shape:{verdict} is lifted; the next rows of it are sampled anew")
    for one in left:
        out().print(f"still held: {_told(one)}", markup=False, soft_wrap=True)


def flush(
    key: Annotated[
        str, typer.Argument(metavar="[KEY|all]", help="key:DIGEST, a piece of a batch key's label, or all.")
    ] = ALL_KEYS,
    config: ConfigOption = None,
    as_json: JsonOption = None,
) -> None:
    """Let what waits leave now, in however small batches: rows of one batch key, or of all.

    Concerns the rows read until now; those that come later wait as usual.
    """
    settings = load(config, keys_needed=False)

    async def work(kafka: KafkaPort, now: datetime) -> tuple[Flush, str, list[Hold]]:
        standing = await read_standing(kafka, settings, now)
        digest, label = ALL_KEYS, "every batch key"
        if key != ALL_KEYS:
            scope, label = _resolve(key, settings, standing, only="key:")
            digest = scope.removeprefix("key:")
        wish = Flush(digest, now)
        await write_control(kafka, settings, wish)
        held = [one for one in standing.holds if digest == ALL_KEYS or one.scope == f"key:{digest}"]
        if digest != ALL_KEYS:
            held += _of_the_account(f"key:{digest}", held, settings, standing)
        return wish, label, held

    wish, label, held = _run(settings, work)
    if wants_json(as_json):
        print_json({"key": wish.key_digest, "before": wish.before, "held": [_hold_json(one) for one in held]})
        return
    out().print(f"due now: rows of {safe(label)} read before {instant(wish.before)}", markup=False, soft_wrap=True)
    for one in held:
        out().print(f"sealed, but not submitted while it is held: {_told(one)}", markup=False, soft_wrap=True)


def cancel(
    batch: BatchArgument,
    config: ConfigOption = None,
    rows: Annotated[Unrun, typer.Option(help="What becomes of the rows the provider did not run.")] = Unrun.REQUEUE,
    as_json: JsonOption = None,
) -> None:
    """Cancel a batch at its provider. What it has finished lands and is paid; the rest does as --rows says."""
    settings = load(config, keys_needed=False)

    async def work(kafka: KafkaPort, now: datetime) -> tuple[CancelWish, BatchStanding]:
        standing = await read_standing(kafka, settings, now)
        one = chosen_batch(standing, batch)
        _refuse_if_over(one, "cancel")
        if one.any_lot.lane is Lane.SYNC:
            fail(
                Exit.USAGE,
                f"{one.batch_id} is a wave of the sync lane; its calls are under way and cannot be cancelled",
                f"remedy: to stop further ones, 'batchferry hold {key_scope(one.any_lot.key)}'",
            )
        if one.state is LotState.WAITING:
            fail(
                Exit.USAGE,
                f"{one.batch_id} is not at a provider: its rows wait for their next batch",
                f"remedy: to keep them from leaving, 'batchferry hold {key_scope(one.any_lot.key)}'",
            )
        wish = CancelWish(BatchId(one.batch_id), rows.value, now)
        await write_control(kafka, settings, wish)
        return wish, one

    wish, one = _run(settings, work)
    if wants_json(as_json):
        print_json({"batch_id": wish.batch_id, "rows": wish.rows, "at": wish.at, "unsettled": one.unsettled})
        return
    out().print(f"asked to cancel {wish.batch_id}: rows it has not run {_UNRUN_TEXT[rows]}")
    out().print(f"'batchferry show {wish.batch_id}' tells how it goes")


def rescue(batch: BatchArgument, config: ConfigOption = None, as_json: JsonOption = None) -> None:
    """Run the unfinished rows of a batch through the sync lane now, at the full price, whatever their deadline."""
    settings = load(config, keys_needed=False)

    async def work(kafka: KafkaPort, now: datetime) -> tuple[RescueWish, BatchStanding]:
        standing = await read_standing(kafka, settings, now)
        one = chosen_batch(standing, batch)
        _refuse_if_over(one, "rescue")
        if one.any_lot.lane is Lane.SYNC:
            fail(Exit.USAGE, f"{one.batch_id} is a wave of the sync lane already")
        account = settings.accounts.get(one.any_lot.key.account)
        if account is None or not account.sync.enabled:
            fail(
                Exit.USAGE,
                f"account {safe(one.any_lot.key.account)} has no sync lane, so there is no other way for these rows",
                f"remedy: set accounts.{safe(one.any_lot.key.account)}.sync.enabled to true",
            )
        wish = RescueWish(BatchId(one.batch_id), now)
        await write_control(kafka, settings, wish)
        return wish, one

    wish, one = _run(settings, work)
    if wants_json(as_json):
        print_json({"batch_id": wish.batch_id, "at": wish.at, "unsettled": one.unsettled})
        return
    out().print(f"asked to run {one.unsettled} unsettled rows of {wish.batch_id} through the sync lane")


# ------------------------------------------------------------------------------------------------- choosing


def chosen_batch(standing: Standing, named: str) -> BatchStanding:
    """The one batch that is meant; leaves with the remedy when there is none or there are several."""
    found = find_batches(standing, named)
    if not found:
        fail(Exit.FAILED, f"the ledger knows no batch {named!r}; 'batchferry batches' lists those it knows")
    if len(found) > 1:
        fail(
            Exit.USAGE,
            f"{named!r} fits {len(found)} batches; give more of the id",
            *[batch.batch_id for batch in found[:NAMED]],
        )
    return found[0]


def known_keys(settings: Settings, standing: Standing) -> dict[str, str]:
    """Labels of the batch keys there are, by scope: those of the ledger, of standing holds, and of plain routes.

    A key whose rows have never been in a batch is in no ledger; where a route names its models without ``*`` or ``?``
    its keys are known all the same.
    """
    keys = {lot.key for ledger in standing.ledgers.values() for lot in ledger.lots.values()}
    for route in settings.routes.values():
        for model in route.models:
            if "*" not in model and "?" not in model:
                window = settings.accounts[route.account].completion_window
                keys.add(BatchKey(route.account, route.endpoint, model, window))
    known = {key_scope(key): key.label for key in keys}
    for one in standing.holds:
        if one.scope.startswith("key:"):
            known.setdefault(one.scope, one.label)
    return known


def _resolve(named: str, settings: Settings, standing: Standing, only: str = "") -> tuple[str, str]:
    """Scope and label of what was typed; leaves with the remedy when it is nothing, or several things."""
    kind, colon, rest = named.partition(":")
    keys = known_keys(settings, standing)
    if colon and kind in {"account", "key", "shape"}:
        if only and f"{kind}:" != only:
            fail(Exit.USAGE, f"{named!r} is no batch key; give key:DIGEST, a piece of its label, or all")
        if kind == "account":
            if rest not in settings.accounts:
                known = ", ".join(sorted(settings.accounts))
                fail(Exit.USAGE, f"there is no account {rest!r}", f"the settings have: {known}")
            return named, rest
        if kind == "key":
            if not _DIGEST.fullmatch(rest):
                fail(Exit.USAGE, f"{rest!r} is no digest of a batch key: it has 16 hexadecimal characters")
            if named not in keys:
                complain(
                    f"no batch and no hold has had the key {rest} yet; if it is misspelt, this concerns nothing",
                    *_listed(keys),
                )
            return named, keys.get(named, "")
        if not rest or len(rest) > MAX_REASON_CHARS or not rest.isprintable() or "/" in rest:
            fail(Exit.USAGE, f"{named!r} names no kind of prompt; 'batchferry status' shows the held ones")
        if rest not in standing.controls.canaries and not any(one.scope == named for one in standing.holds):
            complain(f"no canary has judged {named} yet; if it is misspelt, this concerns nothing")
        return named, ""
    accounts = {account_scope(name): name for name in settings.accounts}
    shapes = {one.scope: one.label for one in standing.holds if one.scope.startswith("shape:")}
    shapes |= {shape_scope(shape): shapes.get(shape_scope(shape), "") for shape in standing.controls.canaries}
    return _fitting(named, keys if only == "key:" else {**accounts, **keys, **shapes})


def _resolve_standing(named: str, standing: Standing) -> str:
    """The scope to release: one that is held, whatever the settings have now.

    A hold whose time is over still has its record until one batch has tried; lifting it lets all go at once.
    """
    held = {one.scope: one.label for one in standing.controls.holds.values()}
    if named in held or (named.startswith("shape:") and named.removeprefix("shape:") in standing.controls.canaries):
        return named
    kind, colon, _ = named.partition(":")
    if colon and kind in {"account", "key", "shape"}:
        fail(Exit.FAILED, f"{named} is not held", *_listed(held, "held are:", "nothing is held"))
    if not held:
        fail(Exit.FAILED, f"nothing is held, so there is nothing to release for {named!r}")
    return _fitting(named, held)[0]


def _fitting(named: str, known: Mapping[str, str]) -> tuple[str, str]:
    """The one scope whose label or name fits: exactly, else by a piece of it."""
    wanted = named.casefold()
    exact = [
        scope for scope, label in known.items() if wanted in {label.casefold(), scope.partition(":")[2].casefold()}
    ]
    fits = exact or [
        scope for scope, label in known.items() if wanted and (wanted in label.casefold() or wanted in scope.casefold())
    ]
    if not fits:
        fail(Exit.USAGE, f"{named!r} fits no account, batch key or hold", *_listed(known))
    if len(fits) > 1:
        some = {scope: known[scope] for scope in fits}
        fail(Exit.USAGE, f"{named!r} fits {len(fits)} scopes; give more of it, or one of these:", *_listed(some, ""))
    return fits[0], known[fits[0]]


def _listed(known: Mapping[str, str], head: str = "known are:", none: str = "none is known yet") -> list[str]:
    if not known:
        return [none]
    lines = [f"{scope}  {safe(label)}".rstrip() for scope, label in sorted(known.items(), key=lambda item: item[1])]
    more = [f"... and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
    return [*([head] if head else []), *lines[:NAMED], *more]


def _chosen_holds(
    scope: str, mine: Sequence[Hold], reason: str | None, *, every: bool, may_be_none: bool
) -> list[Hold]:
    if every or (reason is None and len(mine) <= 1):
        if not mine and not may_be_none:
            fail(Exit.FAILED, f"{scope} is not held")
        return list(mine)
    if reason is None:
        fail(
            Exit.USAGE,
            f"{scope} is held for {len(mine)} reasons; name one with --reason, or give --all:",
            *[_told(one) for one in mine],
        )
    chosen = [one for one in mine if one.reason in {reason, f"{OPERATOR}: {reason}"}]
    if not chosen:
        fail(Exit.FAILED, f"{scope} is not held for {reason!r}; it is held for:", *[_told(one) for one in mine])
    return chosen


def _of_the_account(scope: str, mine: Sequence[Hold], settings: Settings, standing: Standing) -> list[Hold]:
    """Holds of the account that pays for a batch key: they keep its rows as well."""
    if not scope.startswith("key:"):
        return []
    accounts = {
        lot.key.account
        for ledger in standing.ledgers.values()
        for lot in ledger.lots.values()
        if key_scope(lot.key) == scope
    }
    if not accounts:  # the account is the first word of a key's label
        labels = [*(one.label for one in mine), known_keys(settings, standing).get(scope, "")]
        accounts = {label.partition(" ")[0] for label in labels if label}
    return [one for one in standing.holds if one.scope in {account_scope(name) for name in accounts}]


def _refuse_if_over(batch: BatchStanding, what: str) -> None:
    if batch.state in _OVER:
        fail(
            Exit.USAGE,
            f"batch {batch.batch_id} has ended ({batch.state.value}); there is nothing to {what}",
            "'batchferry batches --live' lists those under way",
        )


# ------------------------------------------------------------------------------------------------- the rest


def _reason(text: str) -> str:
    stripped = text.strip()
    if not stripped or stripped == OPERATOR:
        return OPERATOR
    if not _REASON.fullmatch(stripped):
        fail(
            Exit.USAGE,
            f"--reason: at most {MAX_REASON_CHARS} characters on one line, without '/' (it is part of a key)",
        )
    return f"{OPERATOR}: {stripped}"


def _duration_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        fail(Exit.USAGE, f"--for: {error}")
    if not seconds:
        fail(Exit.USAGE, "--for: a hold lasts longer than nothing")
    return seconds


def _run(settings: Settings, work: Callable[[KafkaPort, datetime], Awaitable[T]]) -> T:
    from batchferry import app  # noqa: PLC0415 - see run

    async def whole() -> T:
        kafka = app.build_kafka(settings)
        try:
            return await work(kafka, app.build_clock(settings).now())
        finally:
            await kafka.aclose()

    return asyncio.run(whole())


async def _announce(kafka: KafkaPort, settings: Settings, kind: EventKind, about: Hold, now: datetime) -> None:
    """Put the act among the batch events, so that a row's history knows of it."""
    topic = settings.topics.events
    admin = await kafka.admin()
    try:
        if (await admin.describe([topic]))[topic] is None:
            return
    finally:
        await admin.close()
    event_id = f"{about.scope}-{about.reason}-{kind.value}-{round(now.timestamp() * 1000)}"
    scope = about.label or about.scope
    value = render_event(kind, event_id, now, scope=scope, reason=about.reason)
    headers = event_headers(kind, event_id, now, settings.topics.requests)
    producer = kafka.plain_producer()
    await producer.start()
    try:
        await producer.send([OutRecord(topic, scope.encode(), value, headers)])
    finally:
        await producer.stop()


def _told(one: Hold) -> str:
    scope = f"{one.scope} ({one.label})" if one.label else one.scope
    until = "until an operator releases it" if one.until is None else f"until {instant(one.until)}"
    return safe(f"{scope}, {one.reason}, since {instant(one.since)}, {until}")


def _hold_json(one: Hold) -> dict[str, object]:
    return {
        "scope": one.scope,
        "label": one.label,
        "reason": one.reason,
        "since": one.since,
        "until": one.until,
        "lasts": None if one.until is None else hours((one.until - one.since).total_seconds()),
    }
