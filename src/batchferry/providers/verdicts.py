"""How a row's end is judged by tables: the walk that all providers share, and words that mean the same everywhere.

Each provider brings its own tables as ``RowTables``. A row that did not succeed is judged by the first of these that
knows it:

1. the code inside the error (or, when no HTTP answer was had, the line's outer code): ``codes``, then
   ``code_prefixes``;
2. the error's type, where it says something of its own: ``types``;
3. a piece of the error's message, on a 4xx, or where a word of ``generic_words`` stands for the status: ``fragments``;
4. the HTTP status, where it means the same whatever the code: ``STATUS_CLASSES``;
5. a code or type that only says "your request": ``generic_words``;
6. statuses that mean something only where nothing above spoke: ``BARE_STATUS_CLASSES``.

**The default.** What no table knows takes the class of its status's hundred: a 4xx is about the row
(``invalid_request``), anything else is not (``transient``). Without any status it is ``transient``: worth one more
try. Such a verdict is marked ``is_unknown``, and so is one that a status gave although the error had a code that no
table knows: the class stands, but the code is worth a line in a table, so it is counted.

Codes and types are compared in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from batchferry.domain.rows import RowClass


class ErrorFacts(NamedTuple):
    """What an error says of itself, whatever its shape. ``code`` and ``type`` are words, ``message`` is payload."""

    type: str | None = None
    code: str | None = None
    message: str = ""
    param: str | None = None
    http_status: int | None = None
    """A status hidden in the error: a numeric code, or ``HTTP 429`` in the text of servers that have no other place."""


NO_FACTS = ErrorFacts()


class Verdict(NamedTuple):
    """The class of a row that did not succeed, and whether no table knew what its error says."""

    row_class: RowClass
    is_unknown: bool = False


STATUS_CLASSES: Mapping[int, RowClass] = MappingProxyType(
    dict.fromkeys((401, 402, 403, 407), RowClass.ACCOUNT)
    # 0: the provider's own call of the model broke. 499: the caller was gone. 529: overloaded.
    | dict.fromkeys((0, 408, 425, 429, 499, 500, 502, 503, 504, 529), RowClass.TRANSIENT)
)
BARE_STATUS_CLASSES: Mapping[int, RowClass] = MappingProxyType(
    # A conflict that blames nothing in the request is one of timing.
    {409: RowClass.TRANSIENT} | dict.fromkeys((413, 415, 422), RowClass.INVALID_REQUEST)
)


class OurCode(StrEnum):
    """Codes of our own, for ends that the provider has no word for."""

    NO_RESPONSE_NO_ERROR = "no_response_no_error"
    """``response`` and ``error`` of the line are both null or absent: it says nothing at all."""
    EMPTY_BODY = "empty_body"
    """A 2xx without a body."""
    EMPTY_ANSWER = "empty_answer"
    """A 2xx whose body has the form of an answer and nothing in it."""
    NO_STATUS = "no_status"
    """A response without a status, whose body is neither an answer nor an error."""
    UNREADABLE_ANSWER = "unreadable_answer"
    """A 2xx of the sync endpoint whose body cannot be read."""
    BROKEN_OFF = "broken_off"
    """The server says itself that it broke off: a ``finish_reason`` of ``BROKEN_REASONS``."""


OUR_CODES: Mapping[OurCode, RowClass] = MappingProxyType(
    dict.fromkeys(OurCode, RowClass.TRANSIENT) | {OurCode.UNREADABLE_ANSWER: RowClass.UNREADABLE}
)
"""None of them blames the row."""

UNANSWERED_STATUSES = frozenset({"failed", "cancelled", "in_progress", "queued"})
"""``status`` of the responses endpoint that is no answer. Where the body names an error the row is judged by that; else
it is transient, with the code ``response_<status>``. ``completed`` and ``incomplete`` are answers."""

TRUNCATED_REASONS = frozenset({"length", "max_tokens", "model_length", "model_context_window_exceeded", "time_limit"})
"""``finish_reason`` of a cut answer: OpenAI's word, and those of Mistral, Zhipu, watsonx and gateways to Claude."""
FILTERED_REASONS = frozenset({"content_filter", "sensitive"})
"""``finish_reason`` of an answer that a filter stopped: OpenAI's word and Zhipu's."""
CALL_REASONS = frozenset({"tool_calls", "function_call", "tool_use"})
"""``finish_reason`` of a model that waits for what its tools say."""
BROKEN_REASONS = frozenset({"error", "abort", "cancelled", "network_error", "insufficient_system_resource"})
"""``finish_reason`` of an answer that the server broke off: Mistral and OpenRouter, vLLM and SGLang, watsonx, Zhipu,
DeepSeek."""


@dataclass(frozen=True, slots=True)
class RowTables:
    """One provider's tables, all words in lower case; see the module's text."""

    codes: Mapping[str, RowClass]
    types: Mapping[str, RowClass]
    generic_words: Mapping[str, RowClass]
    fragments: tuple[tuple[re.Pattern[str], RowClass], ...]
    code_prefixes: tuple[tuple[str, RowClass], ...] = ()
    generic_prefixes: tuple[tuple[str, RowClass], ...] = ()
    """Beginnings of words that count as ``generic_words``."""
    silent_codes: frozenset[str] = frozenset()
    """Codes known to say nothing."""

    def _generic(self, word: str) -> RowClass | None:
        found = self.generic_words.get(word)
        if found is None and word:
            found = next((row_class for prefix, row_class in self.generic_prefixes if word.startswith(prefix)), None)
        return found

    def classify(self, http_status: int | None, facts: ErrorFacts) -> Verdict:
        """Judge a row that did not succeed; ``http_status`` None when there was no HTTP answer."""
        code, kind = (facts.code or "").lower(), (facts.type or "").lower()
        found = self.codes.get(code)
        if found is None and code:
            found = next((row_class for prefix, row_class in self.code_prefixes if code.startswith(prefix)), None)
        if found is None:
            found = self.types.get(kind)
        if found is not None:
            return Verdict(found)
        status = http_status
        if status is None or 200 <= status < 300:
            status = facts.http_status
        generic_code = self._generic(code)
        generic = generic_code or self._generic(kind)
        is_about_request = generic is not None if status is None else 400 <= status < 500
        if is_about_request:
            for pattern, row_class in self.fragments:
                if pattern.search(facts.message):
                    return Verdict(row_class)
        is_new_code = bool(code) and generic_code is None and code not in self.silent_codes
        found = STATUS_CLASSES.get(-1 if status is None else status)
        if found is None and is_about_request:
            found = generic
        if found is None:
            found = BARE_STATUS_CLASSES.get(-1 if status is None else status)
        if found is not None:
            return Verdict(found, is_new_code)
        return Verdict(RowClass.INVALID_REQUEST if is_about_request else RowClass.TRANSIENT, is_unknown=True)
