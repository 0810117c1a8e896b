"""``batchferry validate``: a JSONL file held against the service's own rules, and what it would make and cost."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from batchferry.cli.console import (
    amount,
    cell,
    complain,
    count,
    counts_text,
    facts,
    money,
    out,
    print_json,
    rows,
    size,
    table,
    usd,
    wants_json,
)
from batchferry.cli.exits import Exit
from batchferry.cli.lines import UTF16_MARKS, Line, opened, progress
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.domain.accumulator import OpenBatch
from batchferry.domain.context import context_tokens, is_surely_too_long
from batchferry.domain.estimate import UNLEARNED_OUTPUT_TOKENS
from batchferry.domain.money import Prices, parse_usd, price_row
from batchferry.domain.provider import Usage
from batchferry.domain.requests import (
    REMEDIES,
    BadRecord,
    RecordRule,
    Request,
    check_max_tokens,
    has_answer_tokens,
    parse_request,
)
from batchferry.domain.retry import Policy
from batchferry.domain.rows import RowClass

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.domain.batchkey import BatchKey
    from batchferry.domain.requests import RequestRules
    from batchferry.engine.routing import Routed, Router

KAFKA_DEFAULT_BYTES = 1_048_588
"""``max.message.bytes`` of a topic that sets none."""
LINE_FRAME_BYTES = 90
"""About what a line of a provider's file has around body and url."""
SHOWN_KEYS = 20
"""Rows of the table of batch keys; --json has them all."""
DUPLICATE = "duplicate_custom_id"
_SAME = "leave the line out: the service answers it once, twice or not at all, as the route's duplicates setting says"
_OTHER = "give each request a custom_id of its own: by it you tell the answers apart"


class Fault(NamedTuple):
    """What is wrong with a line. Nothing of the line is quoted."""

    line: int
    rule: str
    message: str
    remedy: str

    @property
    def text(self) -> str:
        """The fault for people."""
        return f"line {self.line}: {self.message} ({self.rule}); {self.remedy}"


def validate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL: one provider batch line a line; - is stdin.")],
    config: ConfigOption = None,
    max_errors: Annotated[
        int, typer.Option(min=0, metavar="N", help="Name at most so many faults, the first; all are counted.")
    ] = 50,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of an answer, for the cost; never more than its request allows. Left out: what the request"
            " allows, 1,000 where it sets no bound.",
        ),
    ] = None,
    as_json: JsonOption = None,
) -> None:
    """Check every line as the service would, and estimate batches, tokens and cost. Sends nothing, needs no broker.

    Ends with exit code 5 when a line has a fault. Reads the file once, as it comes; memory is 16 bytes a line (to find
    a custom_id again) plus a 256th part of that, unpacked, at the end.
    """
    settings = load(config, keys_needed=False)
    from batchferry import app  # noqa: PLC0415 - see run
    from batchferry.engine.routing import Router  # noqa: PLC0415 - same

    check = Check(
        settings,
        app.request_rules(settings),
        Router(settings),
        app.build_clock(settings).now(),
        max_errors,
        output_tokens,
    )
    with opened(file, settings.limits.max_record_bytes) as (reader, total), progress("validating", total) as advance:
        for block in reader.blocks():
            if block[0].number == 1 and reader.first.startswith(UTF16_MARKS):
                check.refuse(1, RecordRule.NOT_UTF8, "the file is UTF-16; no other line was looked at")
                break
            for line in block:
                check.take(line)
            advance(reader.read_bytes)
        read_bytes = reader.read_bytes
    check.finish()
    if wants_json(as_json):
        print_json({"file": file, "bytes": read_bytes, **check.as_json()})
    else:
        check.show(file, read_bytes)
        if check.errors:
            more = check.errors - len(check.faults)
            complain(
                f"{count(check.errors)} fault{'' if check.errors == 1 else 's'}:",
                *(fault.text for fault in check.faults),
                *([f"... and {count(more)} more"] if more else []),
            )
    if check.errors:
        raise typer.Exit(Exit.LINES_REFUSED)


@dataclass(slots=True)
class KeyEstimate:
    """What the rows of one batch key make together."""

    routed: Routed
    prices: Prices
    context: int | None
    """Tokens of the model's context; None: not known."""
    open: OpenBatch
    batches: int = 0
    """Those that are full."""
    rows: int = 0
    bytes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: int | None = 0
    """Picodollars by batch; None once the price of a row is not known."""
    sync_cost: int | None = 0

    @property
    def key(self) -> BatchKey:
        """The batch key."""
        return self.routed.key

    @property
    def all_batches(self) -> int:
        """With the last one, which leaves when its time comes."""
        return self.batches + bool(self.open.rows)

    def add(self, request: Request, output_tokens: int, when: datetime) -> None:
        """One row more: priced alone, because a model may be dearer above so many tokens of one row."""
        line_bytes = len(request.body) + len(request.url) + LINE_FRAME_BYTES
        gathering = self.open
        if gathering.full_for(line_bytes, request.tokens, request.inputs) is not None:
            gathering = self._next_batch()
        gathering.rows += 1
        gathering.bytes += line_bytes
        gathering.tokens += request.tokens
        gathering.inputs += request.inputs
        if gathering.full() is not None:
            self._next_batch()
        self.rows += 1
        self.bytes += line_bytes
        self.input_tokens += request.tokens
        self.output_tokens += output_tokens
        usage = Usage(request.tokens, output_tokens)
        paid = price_row(self.prices, request.model, usage, when, batch=True)
        listed = paid or price_row(self.prices, request.model, usage, when, batch=False)
        self.cost = None if self.cost is None or paid is None else self.cost + paid.picodollars
        self.sync_cost = None if self.sync_cost is None or listed is None else self.sync_cost + listed.list_picodollars

    def _next_batch(self) -> OpenBatch:
        self.batches += 1
        self.open = OpenBatch(self.key, self.routed.limits)
        return self.open

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "route": self.routed.route.name,
            "account": self.key.account,
            "endpoint": self.key.endpoint,
            "model": self.key.model,
            "rows": self.rows,
            "bytes": self.bytes,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "batches": self.all_batches,
            "cost_usd": usd(self.cost),
            "sync_cost_usd": usd(self.sync_cost),
        }


class CustomIds:
    """Finds ids that stand in a file twice, for 14 bytes a line (16 as the buffers grow).

    An id is known by 64 bits of its digest (one of them is the part it lies in), a request by 24: two different ids of
    a file of ten million lines are taken for one with a chance of three in a million.
    """

    _ID_BYTES, _REQUEST_BYTES, _LINE_BYTES = 7, 3, 4
    _ENTRY_BYTES = 14

    def __init__(self) -> None:
        self._parts = [bytearray() for _ in range(256)]

    def add(self, line: int, request: Request) -> None:
        """A request stands on this line; lines come in order."""
        known_by = blake2b(request.custom_id.encode(), digest_size=8).digest()
        says = blake2b(request.url.encode() + request.body, digest_size=self._REQUEST_BYTES).digest()
        self._parts[known_by[0]] += known_by[1:] + says + line.to_bytes(self._LINE_BYTES, "big")

    def repeated(self) -> Iterator[tuple[int, int, bool]]:
        """(line, first line with this id, whether both ask the same), in no particular order."""
        for part in self._parts:
            first: dict[bytes, tuple[int, bytes]] = {}
            for at in range(0, len(part), self._ENTRY_BYTES):
                entry = bytes(part[at : at + self._ENTRY_BYTES])
                known_by, says = entry[: self._ID_BYTES], entry[self._ID_BYTES : -self._LINE_BYTES]
                line = int.from_bytes(entry[-self._LINE_BYTES :], "big")
                before = first.setdefault(known_by, (line, says))
                if before[0] != line:
                    yield line, before[0], before[1] == says


@dataclass(slots=True)
class Check:
    """The state of one check; ``take`` every line, then ``finish``."""

    settings: Settings
    rules: RequestRules
    router: Router
    now: datetime
    max_errors: int
    output_tokens: int | None = None
    lines: int = 0
    errors: int = 0
    by_rule: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    """The first ``max_errors`` of them, by line."""
    keys: dict[BatchKey, KeyEstimate] = field(default_factory=dict)
    uncounted_rows: int = 0
    """Rows of batch keys beyond as many as the service keeps open."""
    large_lines: int = 0
    unbounded: Counter[str] = field(default_factory=Counter)
    """Rows without max tokens on routes that only warn."""
    too_long: Counter[str] = field(default_factory=Counter)
    """Rows surely too long on routes that know what to do with them."""
    seen: CustomIds = field(default_factory=CustomIds)

    def take(self, line: Line) -> None:
        """Look at one line."""
        self.lines += 1
        if not line.bytes:
            self.refuse(line.number, RecordRule.EMPTY, "the line is blank")
            return
        if line.value is None:
            self.refuse(
                line.number,
                RecordRule.TOO_LARGE,
                f"the line has {count(line.bytes)} bytes, the limit is {count(self.settings.limits.max_record_bytes)}",
            )
            return
        self.large_lines += line.bytes > KAFKA_DEFAULT_BYTES
        request = parse_request(line.value, (), self.rules)
        if isinstance(request, BadRecord):
            self._refused(line.number, request)
            return
        self.seen.add(line.number, request)
        routed = self.router.route(request)
        if isinstance(routed, BadRecord):
            self._refused(line.number, routed)
            return
        route = routed.route
        if route.missing_max_tokens != "allow" and (unbounded := check_max_tokens(request)) is not None:
            if route.missing_max_tokens == "fail":
                self._refused(line.number, unbounded)
                return
            self.unbounded[route.name] += 1
        estimate = self._estimate(routed)
        if estimate is None:
            self.uncounted_rows += 1
            return
        context = estimate.context
        if context is not None and is_surely_too_long(
            request.tokens, len(request.body), context, body=request.body, inputs=request.inputs
        ):
            if route.policies.get(RowClass.TOO_LONG) not in {Policy.SPLIT, Policy.SYNC}:
                self.refuse(
                    line.number,
                    RowClass.TOO_LONG,
                    f"about {count(request.tokens)} input tokens, the model's context has {count(context)}",
                    "shorten the request, take a model with a larger context, or let the route split it",
                )
                return
            self.too_long[route.name] += 1
        estimate.add(request, self._output_tokens(request), self.now)

    def finish(self) -> None:
        """Find the ids that were used twice, and keep the first faults."""

        def repeated() -> Iterator[Fault]:
            for line, first, is_same in self.seen.repeated():
                self.errors += 1
                self.by_rule[DUPLICATE] += 1
                what = "the same request as" if is_same else "another request than"
                told = f"custom_id of line {first} again, with {what} there"
                yield Fault(line, DUPLICATE, told, _SAME if is_same else _OTHER)

        found = heapq.nsmallest(max(1, self.max_errors), chain(self.faults, repeated()))
        self.faults = found[: self.max_errors]

    def refuse(self, line: int, rule: RecordRule | RowClass, message: str, remedy: str | None = None) -> None:
        """Note a fault."""
        self.errors += 1
        self.by_rule[rule.value] += 1
        if len(self.faults) < self.max_errors:
            told = remedy if remedy is not None or isinstance(rule, RowClass) else REMEDIES[rule]
            self.faults.append(Fault(line, rule.value, message, told or ""))

    def _refused(self, line: int, bad: BadRecord) -> None:
        self.refuse(line, bad.rule, bad.message, bad.remedy)

    def _estimate(self, routed: Routed) -> KeyEstimate | None:
        known = self.keys.get(routed.key)
        if known is None and len(self.keys) < self.settings.limits.max_open_keys:
            paying = self.settings.accounts[routed.key.account]
            context = routed.route.context_tokens or context_tokens(paying.knows_models_of, routed.key.model)
            known = KeyEstimate(routed, paying.price_list, context, OpenBatch(routed.key, routed.limits))
            self.keys[routed.key] = known
        return known

    def _output_tokens(self, request: Request) -> int:
        if not has_answer_tokens(request.url):
            return 0
        most = request.max_output_tokens
        if self.output_tokens is None:
            return UNLEARNED_OUTPUT_TOKENS if most is None else most
        return self.output_tokens if most is None else min(self.output_tokens, most)

    # ---------------------------------------------------------------------------------------------- telling

    @property
    def cost(self) -> int | None:
        """Picodollars by batch of all rows; None when the price of one is not known."""
        return _sum([one.cost for one in self.keys.values()])

    @property
    def sync_cost(self) -> int | None:
        """The same outside a batch."""
        return _sum([one.sync_cost for one in self.keys.values()])

    @property
    def saving(self) -> int | None:
        """What the batch saves."""
        cost, listed = self.cost, self.sync_cost
        return None if cost is None or listed is None else listed - cost

    def notes(self) -> list[str]:
        """What a reader should know and what is no fault."""
        told = []
        kinds = {(one.key.model, one.key.endpoint) for one in self.keys.values()}
        if len(kinds) > 1:
            told.append(
                f"{count(len(kinds))} kinds of request (model and endpoint): the service puts each into batches of its"
                " own; a provider would refuse this file as one batch"
            )
        if not self.keys and not self.errors:
            told.append("the file has no request")
        if self.large_lines:
            told.append(
                f"{count(self.large_lines)} lines have more than {count(KAFKA_DEFAULT_BYTES)} bytes, what a Kafka topic"
                " takes by default; raise max.message.bytes of the input topic"
            )
        told += [
            f"{count(number)} requests of route {name} do not bound the tokens of their answers"
            for name, number in sorted(self.unbounded.items())
        ]
        told += [
            f"{count(number)} requests of route {name} are surely too long for their model and go the way of its policy"
            " too_long"
            for name, number in sorted(self.too_long.items())
        ]
        unknown = sorted({one.key.model for one in self.keys.values() if one.cost is None})
        if unknown:
            more = f" and {count(len(unknown) - 5)} more" if len(unknown) > 5 else ""
            told.append(f"no price is known for {', '.join(unknown[:5])}{more}: what the file costs is unknown")
        if self.uncounted_rows:
            told.append(
                f"{count(self.uncounted_rows)} rows have models beyond the first"
                f" {count(self.settings.limits.max_open_keys)} (limits.max_open_keys) and are in no estimate"
            )
        told += self._spending_notes()
        return told

    def _spending_notes(self) -> list[str]:
        told = []
        for route in self.settings.routes.values():
            limit = route.max_usd_per_day
            cost = _sum([one.cost for one in self.keys.values() if one.routed.route.name == route.name])
            if limit is not None and cost is not None and cost > parse_usd(f"{limit:.12f}"):
                told.append(
                    f"the file costs about {money(cost)} by batch on route {route.name}, which spends at most"
                    f" ${limit:,.2f} a day: it will be held and go on the next day"
                )
        return told

    def as_json(self) -> dict[str, object]:
        """For ``--json``; amounts are exact decimals, null where unknown."""
        estimates = list(self.keys.values())
        return {
            "ok": not self.errors,
            "lines": self.lines,
            "errors": self.errors,
            "errors_by_rule": dict(self.by_rule),
            "faults": [fault._asdict() for fault in self.faults],
            "notes": self.notes(),
            "estimate": {
                "rows": sum(one.rows for one in estimates),
                "bytes": sum(one.bytes for one in estimates),
                "input_tokens": sum(one.input_tokens for one in estimates),
                "output_tokens": sum(one.output_tokens for one in estimates),
                "batches": sum(one.all_batches for one in estimates),
                "cost_usd": usd(self.cost),
                "sync_cost_usd": usd(self.sync_cost),
                "saving_usd": usd(self.saving),
            },
            "keys": [one.as_json() for one in estimates],
        }

    def show(self, file: str, read_bytes: int) -> None:
        """Print it."""
        estimates = sorted(self.keys.values(), key=lambda one: -one.rows)
        lines = [
            ("file", file),
            ("lines", f"{count(self.lines)}, {size(read_bytes)}"),
            ("faults", f"{count(self.errors)}{_in_brackets(self.by_rule)}"),
            ("requests that would run", count(sum(one.rows for one in estimates))),
            ("input tokens, estimated", count(sum(one.input_tokens for one in estimates))),
            ("output tokens, at most" if self.output_tokens is None else "output tokens",
             count(sum(one.output_tokens for one in estimates))),
            ("batches", count(sum(one.all_batches for one in estimates))),
            ("cost by batch", amount(self.cost)),
            ("cost outside a batch", amount(self.sync_cost)),
            ("saved", amount(self.saving)),
        ]  # fmt: skip
        out().print(facts(lines))
        if len(estimates) > 1:
            numbers = ("rows", "size", "input tokens", "batches", "by batch", "outside")
            shown = table("route", "model", *numbers, right=numbers)
            out().print()
            out().print(rows(shown, (_key_row(one) for one in estimates[:SHOWN_KEYS])))
            if len(estimates) > SHOWN_KEYS:
                out().print(f"... and {count(len(estimates) - SHOWN_KEYS)} more")
        for note in self.notes():
            out().print(cell(f"note: {note}"))


def _sum(amounts: list[int | None]) -> int | None:
    known = [one for one in amounts if one is not None]
    return sum(known) if len(known) == len(amounts) else None


def _in_brackets(by_rule: Counter[str]) -> str:
    return f" ({counts_text(by_rule)})" if by_rule else ""


def _key_row(one: KeyEstimate) -> tuple[str, ...]:
    return (
        one.routed.route.name,
        one.key.model,
        count(one.rows),
        size(one.bytes),
        count(one.input_tokens),
        count(one.all_batches),
        amount(one.cost),
        amount(one.sync_cost),
    )
