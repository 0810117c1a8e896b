"""``batchferry plan``: what the settings promise, written out, and what a load would make of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from batchferry.cli.console import count, facts, length, money, out, print_json, size, wants_json
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.domain.money import price_row
from batchferry.domain.provider import Usage
from batchferry.domain.requests import LINE_OVERHEAD_BYTES
from batchferry.domain.times import HOUR_S, WaitPlan

if TYPE_CHECKING:
    from batchferry.config import AccountSettings, RouteSettings, Settings

DEFAULT_MODEL = "gpt-4o-mini"
DAY_H = 24
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
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one request.")] = 2000,
    tokens: Annotated[int, typer.Option(min=0, help="Input tokens of one request.")] = 500,
    output_tokens: Annotated[int, typer.Option(min=0, help="Output tokens of one answer.")] = 100,
    model: Annotated[
        str | None, typer.Option(help="Model to price; left out: the route's own, else gpt-4o-mini.")
    ] = None,
    as_json: JsonOption = None,
) -> None:
    """Write out each route's deadline arithmetic, its batch sizes under a load, and the cost.

    A route whose promise cannot be kept is refused with its sum (exit code 2). Needs no broker and no provider.
    """
    settings = load(config, keys_needed=False)
    routes = [
        _Route(
            settings,
            route,
            Load(rows_per_hour, row_bytes, tokens, output_tokens, model or _model_of(route)),
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


class _Route:
    """One route under a load."""

    def __init__(self, settings: Settings, route: RouteSettings, load: Load) -> None:
        self.route = route
        self.account = settings.account_of(route)
        self.load = load
        self.wait = settings.wait_plan(route)
        self.filling = filling(route, self.account, self.wait, load)
        self.poll_cap_s = self.account.poll.max_s
        self.cancel_s, self.download_s, self.lead_s = settings.cancel_s, settings.download_s, settings.rescue_lead_s
        usage = Usage(load.input_tokens, load.output_tokens, 0)
        now = datetime.now(UTC)
        self.batch_price = price_row(self.account.provider, load.model, usage, now, batch=True)
        rows_a_day = load.rows_per_hour * DAY_H
        self.cost = None if self.batch_price is None else round(self.batch_price.picodollars * rows_a_day)
        self.listed = None if self.batch_price is None else round(self.batch_price.list_picodollars * rows_a_day)

    @property
    def margin_needed_s(self) -> float:
        return self.poll_cap_s + self.cancel_s + self.download_s + self.lead_s

    def as_json(self) -> dict[str, object]:
        wait, made = self.wait, self.filling
        price = self.batch_price
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
                "cost_picodollars": self.cost,
                "sync_cost_picodollars": self.listed,
                "basis": None if price is None else price.basis.value,
            },
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
        queue = self.account.limits.enqueued_tokens.get(self.load.model)
        wanted = made.rows * self.load.input_tokens * max(1.0, made.at_provider)
        if queue is not None and wanted > queue:
            told.append(
                f"up to {count(wanted)} input tokens would be at the provider, the account's limit for"
                f" {self.load.model} is {count(queue)}: batches will wait for room"
            )
        if self.batch_price is None:
            told.append(f"no price is known for {self.load.model} at {self.account.provider}")
        elif self.batch_price.basis.value == "assumed_discount":
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
            (
                "cost",
                (
                    f"{money(self.cost)} a day, {money(None if self.cost is None else self.cost * 30)} in 30 days;"
                    f" outside a batch {money(self.listed)} a day"
                ),
            ),
        ]
        console.print(facts(told))
        for remark in self.remarks():
            console.print(f"note: {remark}", markup=False)


def _model_of(route: RouteSettings) -> str:
    """The first model of the route that is a name and no pattern."""
    return next((name for name in route.models if not set(name) & set("*?[")), DEFAULT_MODEL)
