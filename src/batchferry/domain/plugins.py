"""Pieces that other packages offer as entry points: found by name, and refused with a remedy when they do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from batchferry.domain.errors import ConfigError


def load_plugin(kind: str, group: str, name: str, own: Iterable[str], protocol: type, method: str) -> Any:
    """The object of this name: an entry point's value, or an instance where that is a class.

    Args:
        kind: what it is, in messages.
        group: of the entry points.
        own: names that need no package.
        protocol: runtime-checkable, what it must satisfy.
        method: the method that ``protocol`` asks for, in messages.

    Raises:
        ConfigError: nobody offers the name, more than one do, or what is offered cannot be loaded or does not fit.
    """
    found = entry_points(group=group)
    offered = {entry.value: entry for entry in found if entry.name == name}
    if not offered:
        known = ", ".join(sorted({*own, *(entry.name for entry in found)}))
        remedy = f"install the package that offers it as an entry point of the group {group}, or name another"
        raise ConfigError([f"there is no {kind} {name!r}; known are: {known}; {remedy}"])
    if len(offered) > 1:
        raise ConfigError(
            [f"{kind} {name!r} is offered more than once ({', '.join(sorted(offered))}): uninstall all but one"]
        )
    (entry,) = offered.values()
    try:
        loaded = entry.load()
        made = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # foreign code: whatever it raises is a fault of the settings
        raise ConfigError([f"{kind} {name!r} ({entry.value}) cannot be loaded: {type(error).__name__}"]) from error
    if not isinstance(made, protocol):
        raise ConfigError([f"{kind} {name!r} ({entry.value}) has no method {method}"])
    return made
