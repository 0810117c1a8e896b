"""``batchferry doctor``: every start-up check, without starting and without changing anything."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from batchferry.cli.console import out, print_json, table, wants_json
from batchferry.cli.exits import Exit
from batchferry.cli.options import ConfigOption, JsonOption, load

if TYPE_CHECKING:
    from batchferry.app import Finding

_STYLES = {"ok": "green", "warn": "yellow", "refuse": "bold red"}
_TOPIC_EXISTS = "topic exists"


def doctor(config: ConfigOption = None, as_json: JsonOption = None) -> None:
    """Check settings, cluster, topics and accounts; say what is wrong and what to do about it.

    Makes no topic and sends no request to a model. Exit code 3 when `run` would refuse to start.
    """
    settings = load(config)
    from batchferry import app  # noqa: PLC0415 - see run

    looking = settings.model_copy(update={"topics": settings.topics.model_copy(update={"create": False})})
    findings = asyncio.run(app.check_gates(looking))
    if settings.topics.create:
        findings = [_would_be_made(one) for one in findings]
    refused = any(one.verdict == app.Verdict.REFUSE for one in findings)
    if wants_json(as_json):
        print_json(
            {
                "ok": not refused,
                "findings": [
                    {
                        "gate": one.gate,
                        "verdict": str(one.verdict),
                        "subject": one.subject,
                        "text": one.text,
                        "remedy": one.remedy,
                    }
                    for one in findings
                ],
            }
        )
    else:
        _show(findings)
    raise typer.Exit(Exit.REFUSED if refused else Exit.OK)


def _would_be_made(finding: Finding) -> Finding:
    """A topic that is missing is no reason to refuse where `run` makes it."""
    if finding.gate != _TOPIC_EXISTS or str(finding.verdict) != "refuse":
        return finding
    return replace(
        finding,
        verdict=type(finding.verdict)("warn"),
        text="the topic does not exist yet",
        remedy="'run' makes it at its start (topics.create); to choose its settings yourself, make it before",
    )


def _show(findings: list[Finding]) -> None:
    shown = table("", "check", "about", "finding")
    for one in findings:
        verdict = str(one.verdict)
        text = one.text + (f"\n-> {one.remedy}" if one.remedy else "")
        shown.add_row(Text(verdict, style=_STYLES.get(verdict, "")), Text(one.gate), Text(one.subject), Text(text))
    out().print(shown)
    counted = {verdict: sum(str(one.verdict) == verdict for one in findings) for verdict in _STYLES}
    out().print(f"\n{counted['ok']} in order, {counted['warn']} to look at, {counted['refuse']} refused")
