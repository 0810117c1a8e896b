"""Routing: which account takes a request, whose API it must speak, and who takes over while that one is held."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchferry.app import request_rules
from batchferry.config import load_settings
from batchferry.domain.errors import ConfigError
from batchferry.domain.requests import BadRecord, RecordRule, parse_request
from batchferry.engine.routing import Routed, Router

ACCOUNTS: dict[str, Any] = {
    "first": {"api_key": "a", "base_url": "http://first/v1"},
    "second": {"api_key": "b", "base_url": "http://second/v1", "completion_window": "12h"},
    "claude": {"provider": "anthropic", "api_key": "c", "base_url": "http://claude"},
}
ROUTES: dict[str, Any] = {
    "claude": {"models": ["claude-*"], "account": "claude", "endpoint": "/v1/messages"},
    "default": {"account": "first", "fallback": ["second"]},
}


def settings(**routes: Any) -> Any:
    """Three accounts of two families, and a route for each family."""
    made = {**ROUTES, **routes}
    return load_settings(None, {}, {"accounts": ACCOUNTS, "routes": made}, dotenv_path=None)


def sent(value: dict[str, Any], **headers: str) -> Any:
    """The route of a record, or why it is refused."""
    made = settings()
    read = parse_request(json.dumps(value).encode(), [(n, v.encode()) for n, v in headers.items()], request_rules(made))
    return read if isinstance(read, BadRecord) else Router(made).route(read)


CHAT = {"custom_id": "c", "body": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}]}}
CLAUDE = {
    "custom_id": "c",
    "params": {"model": "claude-sonnet-4-5", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
}


def test_each_shape_goes_to_its_family() -> None:
    """``{custom_id, params}`` is Anthropic's Messages, ``{custom_id, body}`` OpenAI's chat by default."""
    chat, claude = sent(CHAT), sent(CLAUDE)
    assert (chat.key.account, chat.key.endpoint) == ("first", "/v1/chat/completions")
    assert (claude.key.account, claude.key.endpoint) == ("claude", "/v1/messages")


@pytest.mark.parametrize(("value", "account"), [(CHAT, "claude"), (CLAUDE, "first")], ids=["chat", "messages"])
def test_an_account_of_another_family_refuses(value: Any, account: str) -> None:
    """A request would be nonsense there: it is a bad record that names the account and the endpoint."""
    refused = sent(value, provider=account)
    assert isinstance(refused, BadRecord)
    assert refused.rule is RecordRule.SHAPE_NOT_SUPPORTED
    assert account in refused.message


def test_params_need_an_account_that_takes_them() -> None:
    """Without any Anthropic account the shape is refused with what would be taken."""
    made = load_settings(None, {"OPENAI_API_KEY": "sk-test-0123456789abcdef"}, {}, dotenv_path=None)
    refused = parse_request(json.dumps(CLAUDE).encode(), (), request_rules(made))
    assert isinstance(refused, BadRecord)
    assert refused.rule is RecordRule.SHAPE_NOT_SUPPORTED


def test_a_held_account_gives_way() -> None:
    """New rows take the first account that is not held, with its own window; who names an account keeps it."""
    made = settings()
    router, held = Router(made), set[str]()
    router.is_held = held.__contains__
    rules = request_rules(made)
    plain: Any = parse_request(json.dumps(CHAT).encode(), (), rules)
    named: Any = parse_request(json.dumps(CHAT).encode(), [("provider", b"first")], rules)

    def account_of(request: Any) -> str:
        routed = router.route(request)
        assert isinstance(routed, Routed)
        return routed.key.account

    assert account_of(plain) == "first"
    held.add("first")
    assert (account_of(plain), account_of(named)) == ("second", "first")
    routed = router.route(plain)
    assert isinstance(routed, Routed)
    assert routed.plan.window_s == 12 * 3600.0
    held.add("second")
    assert account_of(plain) == "first"
    held.clear()
    assert account_of(plain) == "first"


@pytest.mark.parametrize(
    ("fallback", "told"),
    [(["nobody"], "there is no account 'nobody'"), (["first"], "account already"), (["claude"], "another API")],
    ids=["unknown", "itself", "another-family"],
)
def test_who_cannot_take_over_is_a_fault(fallback: list[str], told: str) -> None:
    """Found at the start, with the account's name."""
    with pytest.raises(ConfigError, match=told):
        settings(default={"account": "first", "fallback": fallback})
