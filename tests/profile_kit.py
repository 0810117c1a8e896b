"""Accounts by profile, made the way the service makes them: through the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchferry.app import openai_account
from batchferry.config import AccountSettings, load_settings
from batchferry.providers.openai import OpenAIAccount


def settings_of(profile: str, **given: Any) -> AccountSettings:
    """Settings of one account by this profile; ``given`` are settings of its own."""
    account = {"profile": profile, "api_key": "sk-profile-kit-key", **given}
    route = {"account": "a", "lane": "sync"} if given.get("sync", {}).get("batch_chat") else {"account": "a"}
    route |= {"sla_s": "400h", "max_rows": 1, "max_bytes": 4096, "max_inputs": 1}
    made = {"accounts": {"a": account}, "routes": {"default": route}, "limits": {"max_record_bytes": 4096}}
    return load_settings(None, {}, made, dotenv_path=None).accounts["a"]


def account_of(profile: str, *, settings: dict[str, Any] | None = None, **given: Any) -> OpenAIAccount:
    """The adapter's account: ``settings`` as a user sets them, ``given`` changed behind their back."""
    return replace(openai_account("a", settings_of(profile, **(settings or {}))), **given)
