"""What the tests of the Mistral adapter share: a provider in front of a scripted server, and its objects."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import httpx
from openai_kit import HandClock, Server

from batchferry.providers.mistral import MistralAccount, MistralProvider
from batchferry.providers.retries import CallRetries

KEY = "mistral-test-very-secret"
BASE = "https://mistral.example/v1"
CHAT = "/v1/chat/completions"
FILE = "7c1f2a30-0000-4000-8000-000000000001"


def account(**changes: Any) -> MistralAccount:
    """An account whose retries have no jitter."""
    made = MistralAccount(name="main", base_url=BASE, api_key=KEY, retries=CallRetries(jitter=0.0))
    return replace(made, **changes)


def provider(server: Server, clock: HandClock | None = None, **changes: Any) -> MistralProvider:
    """A provider in front of a scripted server."""
    return MistralProvider(account(**changes), clock or HandClock(), httpx.MockTransport(server), Random(1))


def error(message: Any = "m", kind: str | None = None, code: str | None = None, status: int = 400) -> dict[str, Any]:
    """The flat error body."""
    return {
        "object": "error",
        "message": message,
        "type": kind,
        "param": None,
        "code": code,
        "raw_status_code": status,
    }


def job(**members: Any) -> dict[str, Any]:
    """A running job with changes."""
    return {
        "id": "job-1",
        "object": "batch",
        "input_files": [FILE],
        "endpoint": CHAT,
        "model": "mistral-small-latest",
        "status": "RUNNING",
        "errors": [],
        "created_at": 1_790_000_000,
        "total_requests": 3,
        "completed_requests": 2,
        "succeeded_requests": 1,
        "failed_requests": 1,
        **members,
    }
