"""``batchferry settings``: every setting explained."""

from __future__ import annotations

from typing import Annotated

import typer

from batchferry.cli.console import out, print_json, print_line, rows, table, wants_json
from batchferry.cli.options import JsonOption


def settings(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only settings whose name or text has this.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print an example settings file.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the settings file.")] = False,
    as_json: JsonOption = None,
) -> None:
    """Explain every setting: its type, default, reason and environment variable."""
    from batchferry.config import example_text, explain_settings, settings_schema  # noqa: PLC0415 - see options.load

    if example:
        print_line(example_text().rstrip("\n"))
        return
    if schema:
        print_json(settings_schema())
        return
    wanted = [word.lower() for word in words or []]
    found = [
        row for row in explain_settings() if all(word in f"{row.name} {row.env} {row.why}".lower() for word in wanted)
    ]
    if wants_json(as_json):
        print_json([{**row._asdict(), "env": row.env} for row in found])
        return
    shown = table("setting", "type", "default", "why")
    out().print(rows(shown, ((row.name, row.type, row.default, row.why) for row in found)))
    out().print(
        "\nIn the environment: BATCHFERRY_ and the name in capitals, with __ for each dot"
        " (BATCHFERRY_ROUTES__DEFAULT__SLA_S=36h)."
    )
