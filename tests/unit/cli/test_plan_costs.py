"""What a load costs is worked out exactly, and what is not known is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchferry.cli.exits import Exit
from batchferry.cli.main import call
from batchferry.cli.plan import Cost, Load, cost_of
from batchferry.domain.money import PICODOLLARS, UnitPrices

Plan = Callable[..., Any]
WHEN = datetime(2026, 11, 15, tzinfo=UTC)


@pytest.fixture
def plan(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    """Runs the command with a default route that has these settings; the one route of --json, or the table."""
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "BATCHFERRY_CONFIG", "KAFKA_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)

    def run(*flags: object, route: dict[str, object] | None = None, limits: dict[str, object] | None = None) -> Any:
        path = tmp_path / "settings.yaml"
        path.write_text(
            yaml.safe_dump({"routes": {"default": route or {}}, "accounts": {"default": {"limits": limits or {}}}})
        )
        capfd.readouterr()
        assert call(["plan", "--config", str(path), *map(str, flags)]) == Exit.OK
        told = capfd.readouterr().out
        return told if "--table" in flags else json.loads(told)[0]

    return run


def test_plan_textbook_day_and_month(plan: Plan) -> None:
    """50,000 rows a day of 150 and 50 tokens at 5 and 10 USD: 62.50, by batch 31.25, 937.50 saved in 30 days."""
    flags = ("--rows-per-day", 50_000, "--tokens", 150, "--output-tokens", 50, "--price-in", "5", "--price-out", "10")
    told = plan(*flags, "--model", "nobody-knows-it")
    assert told["per_day"]["sync_cost_usd"] == "62.5"
    assert told["per_day"]["cost_usd"] == "31.25"
    assert told["per_day"]["basis"] == "named"
    assert told["in_30_days"] == {"cost_usd": "937.5", "sync_cost_usd": "1875", "saving_usd": "937.5"}
    assert told["load"]["rows_per_day"] == 50_000
    shown = plan(*flags, "--table")
    assert "$31.25 by batch, $62.50 outside: $31.25 saved" in shown
    assert "$937.50 by batch, $1,875.00 outside: $937.50 saved" in shown


def test_plan_textbook_large_job() -> None:
    """21,000 rows that cost 87 USD outside are 43.50 USD by batch, without a rest lost in a row's price."""
    load = Load(875, 2_000, 1_000, 0, "m", Fraction(21_000))
    cost = cost_of(load, "openai", UnitPrices(Fraction(87 * PICODOLLARS, 21_000 * 1_000), 0), WHEN)
    assert cost == Cost(43_500_000_000_000, 87 * PICODOLLARS)
    assert cost.saving == cost.batch


def test_plan_known_model_is_the_price_datas(plan: Plan) -> None:
    """Without named prices the price data rules: gpt-4o-mini costs 0.15 and 0.60 USD a million, half of it by batch."""
    told = plan("--rows-per-day", 1_000_000, "--tokens", 1_000, "--output-tokens", 100, "--model", "gpt-4o-mini")
    assert (told["per_day"]["cost_usd"], told["per_day"]["sync_cost_usd"]) == ("105", "210")
    assert told["in_30_days"]["saving_usd"] == "3150"


def test_plan_unknown_is_said(plan: Plan) -> None:
    """A model without a price has unknown costs, in words and as null."""
    told = plan("--model", "nobody-knows-it", route={"max_usd_per_day": 5})
    assert told["per_day"]["cost_usd"] is None
    assert told["in_30_days"]["saving_usd"] is None
    assert told["spending_limit"] == {"usd_per_day": 5.0, "share_of_a_day": None}
    shown = plan("--model", "nobody-knows-it", "--table", route={"max_usd_per_day": 5})
    assert "unknown" in shown
    assert "a day's cost is unknown" in shown


def test_plan_spending_limit(plan: Plan) -> None:
    """The limit is set beside the day's cost; one that is too low is told with when it is reached."""
    flags = ("--rows-per-day", 50_000, "--tokens", 150, "--output-tokens", 50, "--price-in", "5", "--price-out", "10")
    low = plan(*flags, route={"max_usd_per_day": 15.625})
    assert low["spending_limit"] == {"usd_per_day": 15.625, "share_of_a_day": 2.0}
    assert any("after 12 h" in remark for remark in low["remarks"])
    high = plan(*flags, route={"max_usd_per_day": 100})
    assert not any("spending" in remark for remark in high["remarks"])
    assert "31% of it" in plan(*flags, "--table", route={"max_usd_per_day": 100})


def test_plan_enqueued_tokens(plan: Plan) -> None:
    """Tokens at the provider at one time stand beside the account's limit; too many are told."""
    flags = ("--rows-per-day", 24_000, "--tokens", 500, "--model", "gpt-4o-mini")
    told = plan(*flags, limits={"enqueued_tokens": {"gpt-4o-mini": 2_000_000}})
    assert told["enqueued_tokens"] == {"at_once": 12_000_000, "limit": 2_000_000}
    assert any("wait for room" in remark for remark in told["remarks"])
    assert plan(*flags)["enqueued_tokens"]["limit"] is None
    assert "12,000,000 at one time; no limit is set" in plan(*flags, "--table")


def test_plan_wrong_price(plan: Plan) -> None:
    """A price that is no plain decimal is a usage error."""
    assert call(["plan", "--price-in", "five"]) == Exit.USAGE
