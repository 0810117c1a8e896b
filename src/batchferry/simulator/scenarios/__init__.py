"""The library of scenarios: one YAML file each, loaded by name, with what happens and what a client must do right.

This folder must not know how a simulator works: what a scenario can say is in ``simulator.scenario``.
"""

from __future__ import annotations

from pathlib import Path

from batchferry.domain.errors import ConfigError
from batchferry.simulator.scenario import Scenario, load_scenario
from batchferry.simulator.surfaces import SURFACES

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Every scenario of the library, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load(name: str) -> Scenario:
    """A scenario of the library.

    Raises:
        ConfigError: there is none of this name.
    """
    return load_scenario(path_of(name))


def path_of(wanted: str | Path) -> Path:
    """The file of a scenario, given its name in the library or a path.

    A bare word is a name; with a folder or an ending it is a path. So a file of one's own never hides a name.

    Raises:
        ConfigError: a bare word that the library does not have.
    """
    path = Path(wanted)
    if path.suffix or len(path.parts) > 1:
        return path
    found = _FOLDER / f"{path}.yaml"
    if not found.is_file():
        raise ConfigError(
            [f"scenario {str(wanted)!r}: the library has none of this name: see --list-scenarios, or give a file"]
        )
    return found


def table() -> str:
    """The library as a Markdown table: name, what happens, what a client must do right, the APIs that can play it."""
    lines = ["| scenario | what happens | what a client must do right | APIs |", "|---|---|---|---|"]
    for name in names():
        scenario = load(name)
        played = "all" if set(scenario.surfaces) == set(SURFACES) else ", ".join(scenario.surfaces)
        cells = (f"`{name}`", scenario.title, scenario.client_must, played)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
