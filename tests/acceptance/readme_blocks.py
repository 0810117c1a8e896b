"""The generated parts of the README: what the code says, in the words of the page.

``python -m acceptance.readme_blocks`` (from ``tests``) writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from batchferry.config import explain_settings, profiles
from batchferry.domain.deadlines import table as deadlines_table
from batchferry.domain.machine import diagram
from batchferry.domain.retry import ALLOWED, DEFAULT_POLICIES, DEFAULT_RETRIES, NOT_RUN, Policy
from batchferry.domain.rows import RowClass
from batchferry.engine.bounds import table as bounds
from batchferry.providers import verdicts
from batchferry.providers.openai import classes as tables
from batchferry.simulator import scenarios

README = Path(__file__).resolve().parents[2] / "README.md"
SOURCE = Path(__file__).resolve().parents[2] / "src" / "batchferry" / "domain" / "rows.py"


def class_texts() -> dict[str, str]:
    """What ``rows.py`` says beside each class."""
    found = re.findall(r'^    [A-Z_]+ = "(\w+)"\n    """(.+?)"""', SOURCE.read_text(), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


_TOLD = {
    RowClass.SUCCEEDED: "it says something, or nothing for a reason that trying again would not change (flag `empty`)",
    RowClass.TOO_LONG: "before sending: certainly more tokens than the model's context; a 4xx whose message says so",
    RowClass.INVALID_REQUEST: "*any other 4xx*",
    RowClass.MODEL_UNAVAILABLE: "a 4xx whose message says so",
    RowClass.CONTENT_FILTERED: "an answer stopped by the filter before it said anything",
    RowClass.TRANSIENT: "*any other status, or an error without one*",
    RowClass.UNREADABLE: "a result line, or an answer of the sync lane, that cannot be read",
    RowClass.EXPIRED: "",
    RowClass.CANCELLED: "",
    RowClass.MISSING: "no line in the result files of a batch that has ended",
    RowClass.ACCOUNT: "",
    RowClass.BATCH_FAILED: "a batch's error list that names other rows, or none",
    RowClass.RETENTION: "the record's age and the topic's `retention.ms`",
    RowClass.OUTCOME_TOO_LARGE: "the outcome's size and the topic's `max.message.bytes`",
    RowClass.MAX_AGE: "time since the record began to wait, holds not counted",
    RowClass.LATE: "deadline, completion window and margin",
    RowClass.SYNC_UNKNOWN: "a call that was begun by a replica which died",
    RowClass.SPLIT: "`too_long` under the policy `split`",
    RowClass.DUPLICATE: "`custom_id` and body of rows that wait",
    RowClass.BAD_RECORD: "the rules of an input record",
}
"""What is judged outside the tables: by the reader of a line, by a batch's own end, or by us."""
_SET_BY = {
    RowClass.SUCCEEDED: "`review`: flagged answers go to the review topic",
    RowClass.TOO_LONG: "`context_tokens`, `larger_model`, `splitter`",
    RowClass.TRANSIENT: "`retries.transient`",
    RowClass.UNREADABLE: "`retries.transient`",
    RowClass.MISSING: "`retries.missing`",
    RowClass.EXPIRED: "`retries.expired`",
    RowClass.CANCELLED: "`retries.expired`",
    RowClass.OUTCOME_TOO_LARGE: "`keep_oversize_answers_dir`",
    RowClass.MAX_AGE: "`max_age_s`",
    RowClass.LATE: "`late`",
    RowClass.SYNC_UNKNOWN: "`sync_unknown`",
    RowClass.SPLIT: "`policies.too_long`, `max_split_depth`",
    RowClass.DUPLICATE: "`duplicates`",
}
"""Settings of a route beside its policies."""


def _quoted(words: Iterable[object]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _recognised(row_class: RowClass) -> str:
    """The words and statuses that the provider's tables have for a class, then what else tells it."""
    own = [code.value for code, found in verdicts.OUR_CODES.items() if found is row_class]
    codes = [code for code, found in tables.CODES.items() if found is row_class]
    codes += [f"{prefix}…" for prefix, found in tables.CODE_PREFIXES if found is row_class]
    statuses = [
        status
        for statuses in (verdicts.STATUS_CLASSES, verdicts.BARE_STATUS_CLASSES)
        for status, found in statuses.items()
        if found is row_class
    ]
    types = [word for word, found in tables.TYPES.items() if found is row_class and word not in codes]
    types += [word for word, found in tables.GENERIC_WORDS.items() if found is row_class]
    parts = [
        f"code {_quoted(sorted(codes))}" if codes else "",
        f"type {_quoted(sorted(types))}" if types else "",
        f"status {', '.join(map(str, sorted(statuses)))}" if statuses else "",
        f"responses `status` {_quoted(sorted(verdicts.UNANSWERED_STATUSES))}"
        if row_class is RowClass.TRANSIENT
        else "",
        f"`finish_reason` {_quoted(sorted(verdicts.BROKEN_REASONS))}" if row_class is RowClass.TRANSIENT else "",
        f"no answer (our code {_quoted(own)})" if own else "",
        _TOLD[row_class],
    ]
    return "; ".join(part for part in parts if part)


_ACTIONS = {
    Policy.REVIEW: "`topics.review`, or `failures` where there is none; never asked again",
    Policy.FAIL: "`failures`",
    Policy.HOLD: "the row stays, its account or batch key is held, and no attempt is used up",
}


def _default_action(row_class: RowClass) -> str:
    if row_class is RowClass.SUCCEEDED:
        return "`results`"
    if row_class is RowClass.SPLIT:
        return "`results`, of kind `split`; its parts go to the input topic"
    if row_class is RowClass.MODEL_UNAVAILABLE:
        return "`failures`, and the batch key is held"
    policy = DEFAULT_POLICIES.get(row_class, Policy.FAIL)
    if policy is not Policy.RETRY:
        return _ACTIONS[policy]
    times = DEFAULT_RETRIES[row_class]
    often = "once more" if times == 1 else f"{times} times more"
    then = "then the sync lane where there is one, else `failures`" if row_class in NOT_RUN else "then `failures`"
    return f"{often} in a small batch, or through the sync lane where the time is short; {then}"


def _settings_of(row_class: RowClass) -> str:
    allowed = ALLOWED.get(row_class, frozenset())
    choices = ", ".join(f"`{policy.value}`" for policy in Policy if policy in allowed)
    parts = [f"`policies.{row_class.value}`: {choices}" if choices else "", _SET_BY.get(row_class, "")]
    return "; ".join(part for part in parts if part) or "none"


def classes() -> str:
    """The table of row classes: how each is known, what is done about it, and what a route may set instead."""
    texts = class_texts()
    lines = ["| class | how recognised | default action | setting under `routes.<name>` |", "|---|---|---|---|"]
    for row_class in RowClass:
        told = _recognised(row_class)
        known = f"{texts[row_class.value]} {told[:1].upper()}{told[1:]}." if told else texts[row_class.value]
        lines.append(f"| `{row_class.value}` | {known} | {_default_action(row_class)} | {_settings_of(row_class)} |")
    lines += [
        "",
        "What no table knows has the class of its status: a 4xx is `invalid_request`, all else is `transient`. It is",
        "counted in the metric `unknown_row_codes`. The words of this table are those of the OpenAI family; Anthropic's,",
        "Gemini's and Mistral's lead to the same classes, by tables of their own.",
    ]
    return "\n".join(lines)


def settings() -> str:
    """The table of all settings."""
    lines = ["| setting | type | default | why |", "|---|---|---|---|"]
    for row in explain_settings():
        cells = (f"`{row.name}`", str(row.type), f"`{row.default}`" if row.default else "", row.why)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def blocks() -> dict[str, str]:
    """Every generated part by its name."""
    return {
        "bounds": bounds(),
        "deadlines": deadlines_table(),
        "machine": f"```mermaid\n{diagram()}\n```",
        "classes": classes(),
        "settings": settings(),
        "providers": profiles.table().rstrip("\n"),
        "scenarios": scenarios.table().rstrip("\n"),
    }


def with_blocks(text: str) -> str:
    """The page with its generated parts made anew."""
    for name, content in blocks().items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
        assert count == 1, f"README has no place for {name}"
    return text


if __name__ == "__main__":
    README.write_text(with_blocks(README.read_text()))
