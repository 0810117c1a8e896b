"""The providers that the demo can play: where the simulated one listens, and how a question is put to it.

Shapes are those of the providers' ordinary endpoints; what a batch makes of them is the service's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchferry.domain.errors import ConfigError
from batchferry.domain.requests import GENERATE_ENDPOINT, MESSAGES_ENDPOINT

CHAT_ENDPOINT = "/v1/chat/completions"
ANSWER_TOKENS = 32

Body = dict[str, Any]


def _chat(limit: str) -> Callable[[str, str, str], Body]:
    def body(model: str, instruction: str, question: str) -> Body:
        return {
            "model": model,
            "messages": [{"role": "system", "content": instruction}, {"role": "user", "content": question}],
            "temperature": 0,
            limit: ANSWER_TOKENS,
        }

    return body


def _messages(model: str, instruction: str, question: str) -> Body:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "max_tokens": ANSWER_TOKENS, "system": instruction, "messages": messages}


def _generate(model: str, instruction: str, question: str) -> Body:
    return {
        "model": model,
        "systemInstruction": {"parts": [{"text": instruction}]},
        "contents": [{"role": "user", "parts": [{"text": question}]}],
        "generationConfig": {"temperature": 0, "maxOutputTokens": ANSWER_TOKENS},
    }


@dataclass(frozen=True, slots=True)
class Port:
    """One provider."""

    profile: str
    title: str
    path: str
    """What follows the simulator's own address."""
    models: tuple[str, str]
    body: Callable[[str, str, str], Body]
    """A request of a model, an instruction and a question."""
    input_member: str = "messages"
    endpoint: str = CHAT_ENDPOINT
    window: str = "24h"
    sla: str = "30h"
    margin: str = "2h"
    unfinished_h: int = 30
    """The first batch would take so long: longer than its window."""
    odd_numbers: tuple[str, str] = ("", "")
    """A part of a printed body, and the same with numbers that no double holds."""
    wrong_type: Callable[[Body], Body] = lambda body: {**body, "max_tokens": "many"}
    too_long: str = "too_long|succeeded|failed"
    """How the longest question may end; the models' contexts differ."""

    def line(self, custom_id: str, body: Body) -> Body:
        """The record of a question, in the provider's own batch shape where it has one."""
        if self.endpoint == MESSAGES_ENDPOINT:
            return {"custom_id": custom_id, "params": body}
        return self.plain_line(custom_id, body)

    def plain_line(self, custom_id: str, body: Body) -> Body:
        """The record of a question in the shape that every family takes."""
        return {"custom_id": custom_id, "method": "POST", "url": self.endpoint, "body": body}


_NUMBERS = ('"temperature": 0', '"seed": 12345678901234567, "temperature": 0.10000000000000000001')

OPENAI = Port(
    "openai",
    "OpenAI",
    "/v1",
    ("gpt-4o-mini", "gpt-4.1-mini"),
    _chat("max_completion_tokens"),
    odd_numbers=_NUMBERS,
    wrong_type=lambda body: {**body, "max_completion_tokens": "many"},
    too_long="too_long",
)
ANTHROPIC = Port(
    "anthropic",
    "Anthropic",
    "",
    ("claude-haiku-4-5", "claude-sonnet-4-5"),
    _messages,
    endpoint=MESSAGES_ENDPOINT,
)
MISTRAL = Port(
    "mistral",
    "Mistral",
    "/mistral/v1",
    ("mistral-small-latest", "mistral-medium-latest"),
    _chat("max_tokens"),
    odd_numbers=(_NUMBERS[0], _NUMBERS[1].replace("seed", "random_seed")),
)
GEMINI = Port(
    "gemini",
    "Google Gemini",
    "/v1beta",
    ("gemini-2.5-flash", "gemini-2.5-pro"),
    _generate,
    input_member="contents",
    endpoint=GENERATE_ENDPOINT,
    window="48h",
    sla="64h",
    margin="12h",  # a job that expires leaves nothing: all its rows are rescued one by one
    unfinished_h=60,
    odd_numbers=_NUMBERS,
    wrong_type=lambda body: {**body, "contents": "many"},
)
AZURE = Port(
    "azure",
    "Azure OpenAI",
    "/openai/v1",
    ("gpt-4o-mini", "gpt-4.1-mini"),
    _chat("max_completion_tokens"),
    odd_numbers=_NUMBERS,
    wrong_type=lambda body: {**body, "max_completion_tokens": "many"},
)


def _compatible(profile: str, title: str, *models: str) -> Port:
    first, second = models
    return Port(profile, title, "/v1", (first, second), _chat("max_tokens"), odd_numbers=_NUMBERS)


PORTS: Mapping[str, Port] = {
    port.profile: port
    for port in (
        OPENAI,
        ANTHROPIC,
        AZURE,
        GEMINI,
        MISTRAL,
        _compatible("groq", "Groq", "llama-3.1-8b-instant", "llama-3.3-70b-versatile"),
        _compatible("dashscope", "Alibaba DashScope", "qwen-turbo", "qwen-plus"),
        _compatible("doubleword", "Doubleword", "qwen3-30b", "qwen3-235b"),
        _compatible("deepinfra", "DeepInfra", "llama-3.1-8b", "llama-3.3-70b"),
        _compatible("moonshot", "Moonshot", "kimi-k2-turbo", "kimi-k2"),
        _compatible("siliconflow", "SiliconFlow", "deepseek-v3", "qwen3-32b"),
        _compatible("litellm", "LiteLLM proxy", "gpt-4o-mini", "gpt-4.1-mini"),
        _compatible("llm-d", "llm-d batch gateway", "llama-3.1-8b", "llama-3.3-70b"),
        _compatible("aibrix", "AIBrix", "llama-3.1-8b", "llama-3.3-70b"),
        _compatible("self-hosted", "a server of your own", "llama-3.1-8b", "llama-3.3-70b"),
    )
}
"""Providers whose API the simulator speaks, by profile."""


def port_of(name: str) -> Port:
    """The provider of this name.

    Raises:
        ConfigError: the simulator does not play it.
    """
    if name not in PORTS:
        raise ConfigError([f"--provider: {name!r} is none that the demo can play; there are {', '.join(PORTS)}"])
    return PORTS[name]
