"""What an account may say of its prices, and what the privacy settings refuse."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from batchferry.config import Settings, load_settings
from batchferry.domain.errors import ConfigError
from batchferry.domain.money import PriceList, UnitPrices


def load(given: dict[str, Any]) -> Settings:
    """Settings with a key."""
    return load_settings(None, {"OPENAI_API_KEY": "sk-0123456789abcdef"}, given, dotenv_path=None)


def test_an_account_has_prices_of_its_own() -> None:
    """By model and for a million tokens; what a batch costs of them is the account's affair as well."""
    prices = {"house-*": {"input_usd": "0.15", "output_usd": 2, "batch_share": "0.4"}}
    account = load({"accounts.default.prices": prices}).accounts["default"]
    named = UnitPrices.per_million("0.15", "2", Fraction(2, 5))
    assert account.price_list == PriceList("openai", (("house-*", named),), None)
    assert load({}).accounts["default"].price_list == "openai"
    assert load({"accounts.default.price_provider": ""}).accounts["default"].price_list == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask.masker": "none-such"}, "mask.masker: there is no masker 'none-such'; known are: stock"),
        ({"mask": {"masker": "stock", "rules": ["shoe-size"]}}, "mask.rules"),
        ({"mask": {"masker": "stock", "key": "short"}}, "mask.masker: the key of masker 'stock' is too short"),
        ({"state_dir": "state", "archive.folder": "state/kept"}, "archive.folder: state/kept is inside state_dir"),
        (
            {"accounts.default.sync.enabled": False, "routes.default.lane": "sync"},
            "routes.default.lane: is sync, though",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    """Each with the setting and the remedy, and without the key."""
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert said in str(caught.value)
    assert "short\n" not in str(caught.value)


def test_a_route_without_windows_needs_no_time_for_them(tmp_path: Path) -> None:
    """A route whose rows all go through the lane may promise less than a completion window."""
    made = load({"routes.default.lane": "sync", "routes.default.sla_s": "3h", "archive.folder": str(tmp_path)})
    assert made.routes["default"].sla_s == 10_800
