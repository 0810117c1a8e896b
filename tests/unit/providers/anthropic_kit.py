"""What the tests of the Anthropic adapter share, beside the clock, source and server of the other adapters."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import httpx
from openai_kit import HandClock, Server

from batchferry.providers.anthropic import AnthropicAccount, AnthropicProvider
from batchferry.providers.retries import CallRetries

KEY = "sk-ant-very-secret"
BASE = "https://claude.example"
MESSAGES = "/v1/messages"
BATCHES = f"{BASE}/v1/messages/batches"


def account(**changes: Any) -> AnthropicAccount:
    """An account whose retries have no jitter."""
    made = AnthropicAccount(name="claude", base_url=BASE, api_key=KEY, retries=CallRetries(jitter=0.0))
    return replace(made, **changes)


def provider(server: Server, clock: HandClock | None = None, **changes: Any) -> AnthropicProvider:
    """A provider in front of a scripted server."""
    return AnthropicProvider(account(**changes), clock or HandClock(), httpx.MockTransport(server), Random(1))


def error(kind: str = "invalid_request_error", message: str = "m", code: str | None = None) -> dict[str, Any]:
    """The error body."""
    inner: dict[str, Any] = {"type": kind, "message": message}
    if code is not None:
        inner["details"] = {"error_code": code}
    return {"type": "error", "error": inner, "request_id": "req_1"}


def batch(**members: Any) -> dict[str, Any]:
    """A running batch of four rows with changes."""
    counts = {"processing": 4, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    return {
        "id": "msgbatch_1",
        "type": "message_batch",
        "processing_status": "in_progress",
        "request_counts": counts,
        "created_at": "2026-11-15T10:00:00Z",
        "expires_at": "2026-11-16T10:00:00Z",
        "ended_at": None,
        "cancel_initiated_at": None,
        "archived_at": None,
        "results_url": None,
        **members,
    }


def ended(**members: Any) -> dict[str, Any]:
    """The same, ended: two rows answered, one refused, one expired."""
    counts = {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 1}
    return batch(
        **{
            "processing_status": "ended",
            "request_counts": counts,
            "ended_at": "2026-11-15T10:41:00Z",
            "results_url": "https://elsewhere.example/v1/messages/batches/msgbatch_1/results",
            **members,
        }
    )


def message(text: str | None = "hi", stop_reason: str | None = "end_turn", **members: Any) -> dict[str, Any]:
    """A message of the model."""
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [] if text is None else [{"type": "text", "text": text}],
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 9,
            "cache_creation_input_tokens": 20,
            "cache_read_input_tokens": 100,
            "output_tokens": 3,
            "service_tier": "batch",
        },
        **members,
    }
