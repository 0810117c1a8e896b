"""What the tests of the OpenAI adapter share: a clock that only moves when told, and servers made of a function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import httpx

from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from batchferry.providers.retries import CallRetries

T0 = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
KEY = "sk-test-very-secret"
BASE = "https://llm.example/v1"
CHAT = "/v1/chat/completions"


class HandClock:
    """Time that moves by the seconds slept, and by hand."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.sleeps: list[float] = []

    def now(self) -> datetime:
        return T0 + timedelta(seconds=self.elapsed_s)

    def monotonic(self) -> float:
        return self.elapsed_s

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.elapsed_s += seconds


class BytesSource:
    """An upload source in memory that counts how often it was started."""

    def __init__(self, data: bytes, chunk_bytes: int = 7, claimed_bytes: int | None = None) -> None:
        self.data = data
        self.chunk_bytes = chunk_bytes
        self.size_bytes = len(data) if claimed_bytes is None else claimed_bytes
        self.starts = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        self.starts += 1
        for start in range(0, len(self.data), self.chunk_bytes):
            yield self.data[start : start + self.chunk_bytes]


class Server:
    """Answers each request with the next scripted answer (the last one for ever) and keeps what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.bodies.append(await request.aread())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return answer(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def account(**changes: Any) -> OpenAIAccount:
    """An account whose retries have no jitter."""
    made = OpenAIAccount(name="main", base_url=BASE, api_key=KEY, retries=CallRetries(jitter=0.0))
    return replace(made, **changes)


def provider(server: Server, clock: HandClock | None = None, **changes: Any) -> OpenAIProvider:
    """A provider in front of a scripted server."""
    return OpenAIProvider(account(**changes), clock or HandClock(), httpx.MockTransport(server), Random(1))


def answer(status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """A scripted answer: JSON, or bytes as they are."""
    if isinstance(body, bytes):
        return httpx.Response(status, content=body, headers=headers)
    return httpx.Response(status, json=body, headers=headers)


def error(message: str = "m", code: str | None = None, kind: str = "invalid_request_error", param: str | None = None):
    """The OpenAI error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def batch(**members: Any) -> dict[str, Any]:
    """A running batch object with changes."""
    return {"id": "batch_1", "object": "batch", "status": "in_progress", "input_file_id": "file-1", **members}
