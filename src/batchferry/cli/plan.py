"""``batchferry plan``: what the settings promise, written out, and what a load would make of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import typer

from batchferry.cli.console import amount, cell, count, facts, length, money, out, print_json, size, usd, wants_json
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.domain.money import PICODOLLARS, PriceBasis, Prices, UnitPrices, price_row
from batchferry.domain.provider import Usage
from batchferry.domain.requests import LINE_OVERHEAD_BYTES
from batchferry.domain.times import HOUR_S, WaitPlan

if TYPE_CHECKING:
    from batchferry.config import AccountSettings, RouteSettings, Settings

DEFAULT_MODEL = "gpt-4o-mini"
DAY_H = 24
DAYS = 30
"""Days of the longer forecast."""
WORTH_ROWS = 500
"""Below so many rows a batch saves little for the hours it takes."""


@dataclass(frozen=True, slots=True)
class Load:
    """What comes in, evenly over the hours."""

    rows_per_hour: float
    row_bytes: int
    input_tokens: int
    output_tokens: int
    model: str
    rows_per_day: Fraction
    """The same a day, exactly: money is worked out from it."""


@dataclass(frozen=True, slots=True)
class Filling:
    """How a route's batches fill under a load."""

    rows: float
    """Rows of one batch."""
    reason: str
    """What seals it: rows, bytes, tokens, inputs or time."""
    fill_s: float
    """How long it gathers: the longest wait of a row."""
    per_day: float
    """Batches a day."""
    at_provider: float
    """Batches at the provider at one time, if each takes its whole window."""


def plan(
    config: ConfigOption = None,
    rows_per_hour: Annotated[float, typer.Option(min=0, help="Requests that come in each hour.")] = 1000,
    rows_per_day: Annotated[
        float | None, typer.Option(min=0, help="The same for a day; it goes before --rows-per-hour.")
    ] = None,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one request.")] = 2000,
    tokens: Annotated[int, typer.Option(min=0, help="Input tokens of one request.")] = 500,
    output_tokens: Annotated[int, typer.Option(min=0, help="Output tokens of one answer.")] = 100,
    model: Annotated[
        str | None, typer.Option(help="Model to price; left out: the route's own, else gpt-4o-mini.")
    ] = None,
    price_in: Annotated[
        str | None, typer.Option(metavar="USD", help="Your price of a million input tokens outside a batch.")
    ] = None,
    price_out: Annotated[str | None, typer.Option(metavar="USD", help="The same for output tokens.")] = None,
    as_json: JsonOption = None,
) -> None:
    """Write out each route's deadline arithmetic, its batch sizes under a load, and the cost.

    A route whose promise cannot be kept is refused with its sum (exit code 2). Needs no broker and no provider.
    Prices come from the price data; with --price-in and --price-out from you, a batch at half of them.
    """
    settings = load(config, keys_needed=False)
    prices = _unit_prices(price_in, price_out)
    a_day = Fraction(rows_per_hour) * DAY_H if rows_per_day is None else Fraction(rows_per_day)
    routes = [
        _Route(
            settings,
            route,
            Load(float(a_day / DAY_H), row_bytes, tokens, output_tokens, model or _model_of(route), a_day),
            prices,
        )
        for route in settings.routes.values()
    ]
    if wants_json(as_json):
        print_json([route.as_json() for route in routes])
        return
    for route in routes:
        route.show()


def filling(route: RouteSettings, account: AccountSettings, wait: WaitPlan, load: Load) -> Filling:
    """How the route's batches fill: the first of its limits, or the time threshold."""
    line_bytes = load.row_bytes + LINE_OVERHEAD_BYTES
    limits = {
        "rows": float(min(route.max_rows, account.limits.max_rows)),
        "bytes": min(route.max_bytes, account.limits.max_file_bytes) / line_bytes,
    }
    if route.max_tokens is not None and load.input_tokens:
        limits["tokens"] = route.max_tokens / load.input_tokens
    if route.endpoint.endswith("/embeddings"):
        limits["inputs"] = float(min(route.max_inputs, account.limits.max_inputs))
    reason, most = min(limits.items(), key=lambda item: item[1])
    by_time = load.rows_per_hour * wait.max_wait_s / HOUR_S
    if by_time <= most:
        reason, most = "time", by_time
    fill_s = most / load.rows_per_hour * HOUR_S if load.rows_per_hour else wait.max_wait_s
    per_day = load.rows_per_hour * DAY_H / most if most else 0.0
    return Filling(most, reason, fill_s, per_day, per_day * account.window_s / (DAY_H * HOUR_S))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a load costs in some days, in picodollars."""

    batch: int
    sync: int

    @property
    def saving(self) -> int:
        """What the batch saves."""
        return self.sync - self.batch

    def as_json(self) -> dict[str, str | None]:
        """Exact decimals."""
        return {"cost_usd": usd(self.batch), "sync_cost_usd": usd(self.sync), "saving_usd": usd(self.saving)}


UNKNOWN_COST = {"cost_usd": None, "sync_cost_usd": None, "saving_usd": None}


def cost_of(load: Load, known: Prices, prices: UnitPrices | None, when: datetime, days: int = 1) -> Cost | None:
    """What a load costs in so many days, rounded once; None where the price of its model is not known.

    Args:
        load: what comes in.
        known: whose prices apply where none are named.
        prices: named ones, which go before the price data's.
        when: whose prices apply, aware UTC.
        days: of 24 hours.
    """
    many = load.rows_per_day * days
    if prices is not None:
        return Cost(*prices.cost(many * load.input_tokens, many * load.output_tokens))
    row = price_row(known, load.model, Usage(load.input_tokens, load.output_tokens), when, batch=True)
    return None if row is None else Cost(round(row.picodollars * many), round(row.list_picodollars * many))


class _Route:
    """One route under a load."""

    def __init__(self, settings: Settings, route: RouteSettings, load: Load, prices: UnitPrices | None) -> None:
        self.route = route
        self.account = settings.account_of(route)
        self.load = load
        self.wait = settings.wait_plan(route)
        self.filling = filling(route, self.account, self.wait, load)
        self.poll_cap_s = self.account.poll_cap_s
        self.cancel_s, self.download_s, self.lead_s = settings.cancel_s, settings.download_s, settings.rescue_lead_s
        now = datetime.now(UTC)
        usage = Usage(load.input_tokens, load.output_tokens)
        row = price_row(self.account.price_list, load.model, usage, now, batch=True)
        self.basis = "named" if prices is not None else None if row is None else row.basis.value
        self.day = cost_of(load, self.account.price_list, prices, now)
        self.days = cost_of(load, self.account.price_list, prices, now, DAYS)

    @property
    def enqueued_tokens(self) -> float:
        """Input tokens at the provider at one time, when each batch takes its whole window."""
        return self.filling.rows * self.load.input_tokens * max(1.0, self.filling.at_provider)

    @property
    def enqueued_limit(self) -> int | None:
        """The account's limit for the model; None: none is set."""
        return self.account.limits.enqueued_tokens.get(self.load.model)

    @property
    def spending_share(self) -> float | None:
        """The day's cost in shares of the route's spending limit; None without a limit or a price."""
        limit = self.route.max_usd_per_day
        return None if limit is None or self.day is None else self.day.batch / PICODOLLARS / limit

    @property
    def margin_needed_s(self) -> float:
        return self.poll_cap_s + self.cancel_s + self.download_s + self.lead_s

    def as_json(self) -> dict[str, object]:
        wait, made = self.wait, self.filling
        return {
            "route": self.route.name,
            "account": self.route.account,
            "sla_s": wait.sla_s,
            "completion_window_s": wait.window_s,
            "margin_s": wait.margin_s,
            "margin_needed_s": self.margin_needed_s,
            "formula_wait_s": wait.formula_wait_s,
            "max_wait_s": wait.max_wait_s,
            "worst_case_s": wait.worst_case_s,
            "sum": wait.sum_text,
            "load": {
                "rows_per_hour": self.load.rows_per_hour,
                "rows_per_day": float(self.load.rows_per_day),
                "row_bytes": self.load.row_bytes,
                "input_tokens": self.load.input_tokens,
                "output_tokens": self.load.output_tokens,
                "model": self.load.model,
            },
            "batch": {
                "rows": round(made.rows),
                "bytes": round(made.rows * (self.load.row_bytes + LINE_OVERHEAD_BYTES)),
                "input_tokens": round(made.rows * self.load.input_tokens),
                "sealed_by": made.reason,
                "gathers_s": round(made.fill_s),
                "batches_per_day": round(made.per_day, 2),
                "at_provider_at_most": round(made.at_provider, 2),
            },
            "per_day": {
                "cost_picodollars": None if self.day is None else self.day.batch,
                "sync_cost_picodollars": None if self.day is None else self.day.sync,
                **(UNKNOWN_COST if self.day is None else self.day.as_json()),
                "basis": self.basis,
            },
            "in_30_days": UNKNOWN_COST if self.days is None else self.days.as_json(),
            "spending_limit": {
                "usd_per_day": self.route.max_usd_per_day,
                "share_of_a_day": None if self.spending_share is None else round(self.spending_share, 4),
            },
            "enqueued_tokens": {"at_once": round(self.enqueued_tokens), "limit": self.enqueued_limit},
            "remarks": self.remarks(),
        }

    def remarks(self) -> list[str]:
        """What a reader should think about."""
        told = []
        made = self.filling
        if 0 < made.rows < WORTH_ROWS:
            told.append(
                f"batches of {count(made.rows)} rows leave all the same, but below {WORTH_ROWS} rows a file and a batch"
                " are hardly worth it; a longer SLA gathers more"
            )
        queue, wanted = self.enqueued_limit, self.enqueued_tokens
        if queue is not None and wanted > queue:
            told.append(
                f"up to {count(wanted)} input tokens would be at the provider, the account's limit for"
                f" {self.load.model} is {count(queue)}: batches will wait for room"
            )
        share = self.spending_share
        if share is not None and share > 1:
            told.append(
                f"the spending limit of ${self.route.max_usd_per_day:,.2f} a day is reached after"
                f" {length(DAY_H * HOUR_S / share)}: the route is then held until the next day"
            )
        if self.basis is None:
            where = self.account.knows_models_of or "this provider"
            told.append(f"no price is known for {self.load.model} at {where}: what it costs is unknown")
        elif self.basis == PriceBasis.ASSUMED_DISCOUNT.value:
            told.append(f"half of the list price is assumed: the price data has no batch price of {self.load.model}")
        return told

    def show(self) -> None:
        """Print it."""
        console, wait, made, load = out(), self.wait, self.filling, self.load
        console.print(f"\n[bold]route {self.route.name}[/] (account {self.route.account}, {self.route.endpoint})")
        line_bytes = load.row_bytes + LINE_OVERHEAD_BYTES
        shorter = wait.max_wait_s < wait.formula_wait_s
        told = [
            ("a record waits at most", wait.sum_text),
            *([("", f"shortened by max_wait_s to {length(wait.max_wait_s)}")] if shorter else []),
            (
                "worst case",
                (
                    f"{length(wait.max_wait_s)} waiting + {length(wait.window_s)} window = {length(wait.worst_case_s)},"
                    f" {length(wait.sla_s - wait.worst_case_s)} before the deadline"
                ),
            ),
            (
                "the margin holds",
                (
                    f"poll cap {length(self.poll_cap_s)} + cancel {length(self.cancel_s)} + download"
                    f" {length(self.download_s)} + rescue lead {length(self.lead_s)} = {length(self.margin_needed_s)}"
                    f" of {length(wait.margin_s)}"
                ),
            ),
            (
                "limits of a batch",
                f"{count(min(self.route.max_rows, self.account.limits.max_rows))} rows,"
                f" {size(min(self.route.max_bytes, self.account.limits.max_file_bytes))}"
                + ("" if self.route.max_tokens is None else f", {count(self.route.max_tokens)} tokens"),
            ),
            (
                "load",
                (
                    f"{count(load.rows_per_hour)} rows an hour of {size(load.row_bytes)},"
                    f" {count(load.input_tokens)} input and {count(load.output_tokens)} output tokens, {load.model}"
                ),
            ),
            (
                "a batch",
                (
                    f"{count(made.rows)} rows, {size(made.rows * line_bytes)}, {count(made.rows * load.input_tokens)}"
                    f" tokens; sealed by {made.reason} after {length(made.fill_s)}"
                ),
            ),
            (
                "batches",
                f"{made.per_day:.1f} a day, at most {made.at_provider:.1f} at the provider at one time",
            ),
            ("tokens at the provider", self._enqueued_text()),
            ("cost a day", _cost_text(self.day)),
            (f"cost in {DAYS} days", _cost_text(self.days)),
            *([] if self.route.max_usd_per_day is None else [("spending limit", self._spending_text())]),
        ]
        console.print(facts(told))
        for remark in self.remarks():
            console.print(cell(f"note: {remark}"))

    def _enqueued_text(self) -> str:
        limit = self.enqueued_limit
        known = f"no limit is set for {self.load.model}" if limit is None else f"the limit is {count(limit)}"
        return f"{count(self.enqueued_tokens)} at one time; {known}"

    def _spending_text(self) -> str:
        share = self.spending_share
        used = "a day's cost is unknown" if share is None else f"a day takes {share:.0%} of it"
        return f"${self.route.max_usd_per_day:,.2f} a day; {used}"


def _cost_text(cost: Cost | None) -> str:
    if cost is None:
        return amount(None)
    return f"{money(cost.batch)} by batch, {money(cost.sync)} outside: {money(cost.saving)} saved"


def _unit_prices(price_in: str | None, price_out: str | None) -> UnitPrices | None:
    if price_in is None and price_out is None:
        return None
    try:
        return UnitPrices.per_million(price_in or "0", price_out or "0")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--price-in, --price-out") from error


def _model_of(route: RouteSettings) -> str:
    """The first model of the route that is a name and no pattern."""
    return next((name for name in route.models if not set(name) & set("*?[")), DEFAULT_MODEL)
