"""``batchferry schemas``: the published contracts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from batchferry.cli.console import fail, out, print_json, print_line, wants_json
from batchferry.cli.exits import Exit
from batchferry.cli.options import JsonOption

ASYNCAPI = "asyncapi"
SCENARIO = "scenario"
SCENARIO_FILE = Path("simulator", "scenario.v1.json")
"""What ``simulate --scenario`` takes; no message, so it has a folder of its own beside theirs."""


def schemas(
    name: Annotated[str | None, typer.Argument(help="Print this one; without it the names are listed.")] = None,
    write: Annotated[Path | None, typer.Option(metavar="DIR", help="Write all of them into this folder.")] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Compare this folder with the code; exit code 1 on drift.")
    ] = None,
    as_json: JsonOption = None,
) -> None:
    """Print, write or check the JSON Schemas of all messages and of scenarios, and the AsyncAPI document."""
    from batchferry import messages  # noqa: PLC0415 - see options.load

    if sum(chosen is not None for chosen in (name, write, check)) > 1:
        fail(Exit.USAGE, "give one of NAME, --write and --check")
    if write is not None:
        for written in messages.write_schemas(write):
            print_line(str(write / written))
        path = write / SCENARIO_FILE
        path.parent.mkdir(exist_ok=True)
        path.write_text(_scenario_text(), encoding="utf-8")
        print_line(str(path))
        return
    if check is not None:
        drift = messages.check_schemas(check) + _scenario_drift(check)
        if drift:
            fail(Exit.FAILED, f"{check} differs from the code:", *drift, f"remedy: batchferry schemas --write {check}")
        print_line(f"{check} agrees with the code")
        return
    documents: dict[str, object] = {
        **messages.schemas(),
        ASYNCAPI: messages.asyncapi(),
        SCENARIO: _scenario(),
    }
    if name is None:
        if wants_json(as_json):
            print_json(sorted(documents))
        else:
            out().print("\n".join(sorted(documents)))
        return
    if name not in documents:
        fail(Exit.USAGE, f"there is no schema {name!r}; known are {', '.join(sorted(documents))}")
    if name == ASYNCAPI and not as_json:
        print_line(yaml.safe_dump(documents[name], sort_keys=False, allow_unicode=True, width=110).rstrip("\n"))
    else:
        print_json(documents[name])


def _scenario() -> dict[str, object]:
    """The schema of a scenario, JSON Schema 2020-12."""
    from batchferry.simulator import Scenario  # noqa: PLC0415 - see options.load

    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:batchferry:schema:scenario:1",
    }
    return {**about, **Scenario.model_json_schema()}


def _scenario_text() -> str:
    return json.dumps(_scenario(), indent=2, ensure_ascii=False) + "\n"


def _scenario_drift(folder: Path) -> list[str]:
    """What differs between its file and the code, as ``messages.check_schemas`` tells it."""
    path = folder / SCENARIO_FILE
    if not path.is_file():
        return [f"{SCENARIO_FILE}: missing"]
    return [] if path.read_text(encoding="utf-8") == _scenario_text() else [f"{SCENARIO_FILE}: differs from the models"]
