"""``batchferry run``: the service."""

from __future__ import annotations

import typer

from batchferry.cli.options import ConfigOption, load


def run(config: ConfigOption = None) -> None:
    """Run the service until a signal: read requests, send batches, publish outcomes.

    SIGTERM and Ctrl-C drain within stop_budget_s; a second signal ends it at once. Killing it at any moment is safe.
    """
    settings = load(config)
    from batchferry import app  # noqa: PLC0415 - flags and settings are checked before the heavy parts are loaded

    raise typer.Exit(app.run_service(settings))
