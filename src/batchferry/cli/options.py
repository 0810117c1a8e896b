"""Flags that several commands share, and how they become settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchferry.domain.errors import ConfigError

if TYPE_CHECKING:
    from batchferry.config import Settings

_MISSING_KEY = re.compile(r"accounts\.([^.]+)\.api_key: missing;")
_NO_KEY = "not-needed"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Settings file (YAML); BATCHFERRY_CONFIG names one too. Environment variables win over it.",
    ),
]
JsonOption = Annotated[
    bool | None,
    typer.Option(
        "--json/--table",
        help="JSON or tables. Left out: tables on a terminal, JSON elsewhere.",
        show_default=False,
    ),
]


def load(config: Path | None, overrides: Mapping[str, Any] | None = None, *, keys_needed: bool = True) -> Settings:
    """The checked settings.

    ``keys_needed`` False is for commands that call no provider: a missing API key is no fault there.

    Raises:
        ConfigError: with every fault.
    """
    from batchferry.config import load_settings  # noqa: PLC0415 - a second that --help and --version need not pay

    try:
        return load_settings(config, None, overrides)
    except ConfigError as error:
        missing = [found[1] for fault in error.faults if (found := _MISSING_KEY.match(fault))]
        if keys_needed or not missing:
            raise
    stand_ins = {f"accounts.{name}.api_key": _NO_KEY for name in missing}
    return load_settings(config, None, {**(overrides or {}), **stand_ins})
