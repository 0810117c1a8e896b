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


def test_a_batch_chat_call_is_held_as_long_as_its_profile_says() -> None:
    """An answer may take the provider an hour: a call that is let go before has run, and would be paid again."""
    chat = {"profile": "dashscope", "api_key": "k", "sync": {"batch_chat": True}}
    assert load({"accounts.default": chat}).accounts["default"].sync.call_timeout_s == 3_600
    own = chat | {"sync": {"batch_chat": True, "call_timeout_s": "20m"}}
    assert load({"accounts.default": own}).accounts["default"].sync.call_timeout_s == 1_200
    plain = chat | {"sync": {"batch_chat": False}}
    assert load({"accounts.default": plain}).accounts["default"].sync.call_timeout_s == 600


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


def test_an_archive_is_never_wiped_under_another_name(tmp_path: Path) -> None:
    """Steps upwards and links that lead into the state folder are seen through: it is wiped at every start."""
    state = tmp_path / "state"
    (state / "kept").mkdir(parents=True)
    (tmp_path / "link").symlink_to(state / "kept")
    for folder in (tmp_path / "x" / ".." / "state" / "kept", tmp_path / "link", state / "." / "kept"):
        with pytest.raises(ConfigError, match="is inside state_dir"):
            load({"state_dir": str(state), "archive.folder": str(folder)})
    beside = load({"state_dir": str(state), "archive.folder": str(tmp_path / "x" / ".." / "kept")})
    assert beside.archive.folder is not None


def test_a_route_without_windows_needs_no_time_for_them(tmp_path: Path) -> None:
    """A route whose rows all go through the lane may promise less than a completion window."""
    made = load({"routes.default.lane": "sync", "routes.default.sla_s": "3h", "archive.folder": str(tmp_path)})
    assert made.routes["default"].sla_s == 10_800
