"""Where settings come from, and how all faults of one start are told at once.

Sources, the later one wins, key by key:

1. the profile that an account names, or that of its ``provider``; with the key from the variable that the provider's
   own tools read (``GROQ_API_KEY`` ...), for the account ``default`` or where no other account has the profile;
   without a profile ``OPENAI_API_KEY`` and ``OPENAI_BASE_URL``, for the account ``default`` only;
2. the YAML file (path from the flag, or from ``BATCHFERRY_CONFIG``);
3. ``.env``;
4. the environment: the Kafka field's own names (``KAFKA_BOOTSTRAP_SERVERS`` ...), then ``BATCHFERRY_*`` with
   ``__`` between the levels (``BATCHFERRY_ROUTES__NIGHTLY__SLA_S=36h``);
5. flags.

A secret may stand in a file: the setting's name with ``_file`` behind it (``api_key_file``) names it.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from dotenv.parser import parse_stream
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from batchferry.config.checks import cross_faults, nearest
from batchferry.config.models import (
    ENV_DELIMITER,
    ENV_PREFIX,
    KAFKA_ALIASES,
    KafkaSettings,
    Settings,
)
from batchferry.config.profiles import Profile, load_profile
from batchferry.config.values import routes_by_name
from batchferry.domain.errors import ConfigError
from batchferry.domain.yamltext import YamlFault, parse_yaml

CONFIG_VARIABLE = "BATCHFERRY_CONFIG"
_MAX_FILE_BYTES = 1_000_000
_MAX_SECRET_BYTES = 65_536
_PROFILE_OF = {"anthropic": "anthropic", "gemini": "gemini", "mistral": "mistral"}
"""Profiles of API families that one provider alone speaks."""
_FALLBACKS = {"OPENAI_API_KEY": "api_key", "OPENAI_BASE_URL": "base_url"}
_KAFKA_VARIABLES = {
    **{
        f"KAFKA_{name.upper()}": name
        for name in KafkaSettings.model_fields
        if name.startswith(("sasl_", "ssl_", "security_", "bootstrap_", "client_"))
    },
    "KAFKA_CLIENT_RACK": "rack",
}
# Kubernetes puts the addresses of a Service called "batchferry" into every pod's environment under our prefix.
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# Faults whose input may be shown: numbers, switches and choices, never text that could be a secret.
_SHOWN_KINDS = ("int_", "float_", "bool_", "literal_", "greater_", "less_", "datetime_", "timezone_")
_SHOWN_ENDS = ("_s", "_bytes", "_window", "_rows", "_keys", "_tokens", "_inputs")

_PLACEHOLDER = "in the place of a secret that cannot be read"
"""Long enough for any rule about secrets."""

Path_ = tuple[str, ...]


@dataclass
class _Layer:
    """One source: what it says, and how to name the place where it says it."""

    data: dict[str, Any]
    places: dict[Path_, str] = field(default_factory=dict)


def load_settings(
    config_path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    dotenv_path: Path | None = Path(".env"),
) -> Settings:
    """Gather all sources into one checked tree.

    ``env`` None means this process's environment. ``overrides`` are flags: a nested mapping, or dotted names
    (``{"kafka.rack": "a"}``); None values are left out. A missing ``.env`` is no fault; a missing settings file
    that was asked for is.

    Raises:
        ConfigError: with every fault of every source, each with its place and remedy.
    """
    environment = dict(os.environ if env is None else env)
    faults: list[str] = []
    dotenv = _read_dotenv(dotenv_path, faults)
    known_env = {name: value for name, value in environment.items() if value}
    chosen = config_path or _path_of(known_env.get(CONFIG_VARIABLE) or dotenv.get(CONFIG_VARIABLE))
    layers = [
        _yaml_layer(chosen, faults) if chosen is not None else _Layer({}),
        _env_layer(dotenv, f" in {dotenv_path}", faults),
        _env_layer(known_env, "", faults),
        _flag_layer(overrides or {}),
    ]
    for layer in layers:
        _spell_kafka_names(layer)
        _name_routes(layer, faults)
        _read_secret_files(layer, faults)
    layers.insert(0, _account_layer(layers, {**dotenv, **known_env}, faults))
    return _validated(layers, faults)


def example_text() -> str:
    """The example settings file, with a comment at every part."""
    return resources.files("batchferry.config").joinpath("example.yaml").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ sources


def _path_of(text: str | None) -> Path | None:
    return Path(text) if text else None


def _read_dotenv(path: Path | None, faults: list[str]) -> dict[str, str]:
    if path is None:
        return {}
    try:
        with path.open(encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{path}: cannot be read ({_why(error)}); make it readable UTF-8, or remove it")
        return {}
    faults.extend(
        f"{path} line {binding.original.line}: not NAME=value; correct it, or put '#' in front"
        for binding in bindings
        if binding.error
    )
    return {binding.key: binding.value for binding in bindings if binding.key and binding.value}


def _yaml_layer(path: Path, faults: list[str]) -> _Layer:
    try:
        raw = path.read_bytes()
        if len(raw) > _MAX_FILE_BYTES:
            faults.append(f"{path}: is larger than {_MAX_FILE_BYTES} bytes; this is not a settings file")
            return _Layer({})
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{path}: the settings file cannot be read ({_why(error)}); correct the path or the file")
        return _Layer({})
    try:
        node, data = parse_yaml(text)
    except YamlFault as fault:
        where = "" if fault.line is None else f" line {fault.line} column {fault.column}"
        faults.append(f"{path}{where}: not YAML ({fault.problem}); correct it")
        return _Layer({})
    if node is None:
        return _Layer({})
    places = dict(_yaml_places(node, (), path, faults))
    if not isinstance(data, dict):
        faults.append(f"{path}: a settings file is a mapping of names to values; see the example")
        return _Layer({})
    return _Layer(_text_keys(data), places)


def _text_keys(data: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _text_keys(value) if isinstance(value, dict) else value for key, value in data.items()}


def _yaml_places(node: yaml.Node, at: Path_, path: Path, faults: list[str]) -> Iterator[tuple[Path_, str]]:
    """Line of each key; a key given twice is a fault, since YAML would silently keep the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value)
        if key in lines:
            faults.append(f"{path} line {line}: {'.'.join((*at, key))} stands in line {lines[key]} too; keep one")
        lines.setdefault(key, line)
        yield (*at, key), f"{path} line {line}"
        yield from _yaml_places(value_node, (*at, key), path, faults)
        if isinstance(value_node, yaml.SequenceNode) and (*at, key) == ("routes",):
            for item in value_node.value:
                yield from _yaml_places(item, ("routes", _yaml_name(item)), path, faults)


def _yaml_name(node: yaml.Node) -> str:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((str(value.value) for key, value in pairs if key.value == "name"), "")


class _GivenEnvironment(EnvSettingsSource):
    """The library's reading of environment variables, over a mapping that is handed in."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._variables.items()}

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
        """Leave text that is not JSON as it is: the field's own type says what is wrong, beside all other faults."""
        try:
            return super().decode_complex_value(field_name, field, value)  # type: ignore[arg-type]  # as above
        except ValueError:
            return value


def _env_layer(variables: Mapping[str, str], where: str, faults: list[str]) -> _Layer:
    ours: dict[str, str] = {}
    for name, value in variables.items():
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper == CONFIG_VARIABLE:
            continue
        if ENV_DELIMITER not in upper and _SERVICE_LINK.fullmatch(upper):
            continue
        first = upper.removeprefix(ENV_PREFIX).split(ENV_DELIMITER)[0].lower()
        if first in Settings.model_fields:
            ours[name] = value
        else:
            faults.append(f"{name}{where}: unknown setting {first!r}{_suggest((), first)}")
    layer = _Layer(dict(_GivenEnvironment(ours)()))
    for name in ours:
        path = tuple(name.upper().removeprefix(ENV_PREFIX).lower().split(ENV_DELIMITER))
        layer.places[path] = name + where
    for name, key in _KAFKA_VARIABLES.items():
        section = layer.data.setdefault("kafka", {})
        if name in variables and isinstance(section, dict) and key not in section:
            section[key] = variables[name]
            layer.places["kafka", key] = name + where
    return layer


def _flag_layer(overrides: Mapping[str, Any]) -> _Layer:
    layer = _Layer({})
    for name, value in overrides.items():
        if value is None:
            continue
        *above, last = name.split(".")
        section = layer.data
        for part in above:
            section = section.setdefault(part, {})
        section[last] = copy.deepcopy(value)
        layer.places[(*above, last)] = "a flag"
    return layer


def _account_layer(layers: list[_Layer], variables: Mapping[str, str], faults: list[str]) -> _Layer:
    """What is known of the accounts before anything is set: their profiles, and the usual variables."""
    given: dict[str, dict[str, Any]] = {}
    for layer in layers:
        accounts = layer.data.get("accounts")
        for name, account in accounts.items() if isinstance(accounts, dict) else ():
            if isinstance(account, dict):
                given.setdefault(str(name), {}).update(account)
    if not any("accounts" in layer.data for layer in layers):
        given["default"] = {}
    made = _Layer({})
    profiles: dict[str, Profile] = {}
    for name, account in given.items():
        wanted = account.get("profile") or _PROFILE_OF.get(str(account.get("provider")))
        if wanted is None:
            continue
        try:
            profile = load_profile(str(wanted))
        except ConfigError as error:
            faults.extend(f"accounts.{name}.profile: {fault}" for fault in error.faults)
            continue
        profiles[name] = profile
        if profile.places and not account.get("base_url"):
            faults.append(
                f"accounts.{name}.base_url: missing; write your own in place of {{{profile.places[0]}}}"
                f" in {profile.base_url}"
            )
        known = profile.settings() | {"profile": str(wanted)}
        lane = account.get("sync")
        if profile.batch_chat is not None and isinstance(lane, dict) and lane.get("batch_chat") not in (None, False):
            known["sync"] = known.get("sync", {}) | {"call_timeout_s": profile.batch_chat.hold_s}
        made.data.setdefault("accounts", {})[name] = known
        for key in known:
            made.places["accounts", name, key] = f"profile {profile.name}"
    names = [profile.name for profile in profiles.values()]
    for name, profile in profiles.items():
        variable = profile.key_variable
        if variable is not None and variable in variables and (name == "default" or names.count(profile.name) == 1):
            made.data["accounts"][name]["api_key"] = variables[variable]
            made.places["accounts", name, "api_key"] = variable
    if "default" in given and "default" not in profiles:
        plain = {key: variables[name] for name, key in _FALLBACKS.items() if name in variables}
        if plain:
            made.data.setdefault("accounts", {})["default"] = plain
            made.places.update({("accounts", "default", key): name for name, key in _FALLBACKS.items()})
    return made


def _spell_kafka_names(layer: _Layer) -> None:
    """Take Kafka's own spelling in a file: ``bootstrap.servers`` is ``bootstrap_servers``."""
    section = layer.data.get("kafka")
    if not isinstance(section, dict):
        return
    for name in [name for name in section if "." in name]:
        ours = KAFKA_ALIASES.get(name, name.replace(".", "_"))
        if ours not in KafkaSettings.model_fields:
            continue  # left as it stands, to be refused under the name that was written
        section.setdefault(ours, section.pop(name))
        layer.places["kafka", ours] = layer.places.get(("kafka", name), "")


def _name_routes(layer: _Layer, faults: list[str]) -> None:
    """Take routes as a list too, before sources are laid over one another by name."""
    try:
        named = routes_by_name(layer.data.get("routes"))
    except ValueError as error:
        faults.append(f"routes{_in_brackets(layer.places.get(('routes',)))}: {error}; give each its own")
        del layer.data["routes"]
        return
    if not isinstance(named, dict):
        return
    layer.data["routes"] = named
    for key, route in named.items():
        if isinstance(route, dict) and route.get("name", key) != key:
            where = _in_brackets(layer.places.get(("routes", key, "name")))
            faults.append(f"routes.{key}.name{where}: differs from the key above it; leave it out")


def _read_secret_files(layer: _Layer, faults: list[str]) -> None:
    for at, section in list(_sections(layer.data, ())):
        for name in [name for name in section if name.endswith("_file") and section[name]]:
            secret = name.removesuffix("_file")
            model = _model_at(at)
            if model is None or secret not in model.model_fields:
                continue
            setting = ".".join((*at, name))
            if secret in section:
                faults.append(f"{setting}: {secret} is given in the same place; keep one of the two")
                continue
            section[secret] = _secret_in(Path(str(section[name])), setting, faults)


def _secret_in(path: Path, setting: str, faults: list[str]) -> str:
    """The secret, or after a fault some text in its place, so that nobody complains of its absence as well."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_SECRET_BYTES + 1)
        # An editor's byte order mark is no part of a secret, and nobody sees it.
        text = raw.decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        faults.append(f"{setting}: the file cannot be read ({_why(error)}); correct the path or its rights")
        return _PLACEHOLDER
    if not text or len(raw) > _MAX_SECRET_BYTES:
        faults.append(f"{setting}: the file is {'too large' if text else 'empty'}; it holds the secret alone")
        return _PLACEHOLDER
    return text


def _sections(data: dict[str, Any], at: Path_) -> Iterator[tuple[Path_, dict[str, Any]]]:
    yield at, data
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _sections(value, (*at, key))


def _in_brackets(place: str | None) -> str:
    return f" ({place})" if place else ""


def _why(error: Exception) -> str:
    """The system's words for the failure, without the file's content."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "not UTF-8"


# --------------------------------------------------------------------------------------- validation


def _validated(layers: list[_Layer], faults: list[str]) -> Settings:
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer, faults)
    dropped: set[Path_] = set()
    settings: Settings | None = None
    # What is faulty is put aside and the rest checked again, so that faults *between* settings are told in the
    # same breath. Each round drops at least one key, so this ends.
    while settings is None:
        try:
            settings = Settings(**merged)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            paths = {_path(item["loc"]) for item in found}
            faults.extend(_fault(item, layers) for item in found)
            if not all(_drop(merged, path) for path in paths) or paths <= dropped:
                break
            dropped |= paths
    if settings is not None:
        faults.extend(
            fault.text
            for fault in cross_faults(settings)
            if not any(_rests_on(path, gone) for path in fault.paths for gone in dropped)
        )
    if faults or settings is None:
        raise ConfigError(list(dict.fromkeys(faults)))
    return settings


def _merge(into: dict[str, Any], layer: _Layer, faults: list[str]) -> None:
    """Lay a source over the earlier ones, key by key; what is no mapping never hides one."""
    stack: list[tuple[dict[str, Any], dict[str, Any], Path_]] = [(into, layer.data, ())]
    while stack:
        below, above, at = stack.pop()
        for key, value in above.items():
            path = (*at, key)
            if isinstance(value, dict):
                if not isinstance(below.get(key), dict):
                    below[key] = {}
                stack.append((below[key], value, path))
            elif isinstance(below.get(key), dict):
                faults.append(
                    f"{'.'.join(path)}{_in_brackets(layer.places.get(path))}: a mapping of names to values is wanted"
                )
            else:
                below[key] = value


def _path(loc: Iterable[int | str]) -> Path_:
    # Below a setting, pydantic adds list positions and the kinds of a union; the setting is what can be corrected.
    path: list[str] = []
    model: type[BaseModel] | None = Settings
    for part in map(str, loc):
        path.append(part)
        if model is None and not _is_section(_field_at(path[:-1])):
            path.pop()
            break
        model = _model_at(tuple(path))
    return tuple(path)


def _is_section(info: FieldInfo | None) -> bool:
    return info is not None and get_origin(info.annotation) is dict


def _drop(data: dict[str, Any], path: Path_) -> bool:
    section: Any = data
    for part in path[:-1]:
        if not isinstance(section, dict) or part not in section:
            return False
        section = section[part]
    if not path or not isinstance(section, dict) or path[-1] not in section:
        return False
    del section[path[-1]]
    return True


def _rests_on(path: str, gone: Path_) -> bool:
    """Whether a setting, or a part of the tree around it, was put aside."""
    return tuple(path.split("."))[: len(gone)] == gone


def _fault(item: Any, layers: list[_Layer]) -> str:
    path = _path(item["loc"])
    name = ".".join(path) or "settings"
    place = next((layer.places[path] for layer in reversed(layers) if layer.places.get(path)), None)
    where = _in_brackets(place)
    if item["type"] == "extra_forbidden":
        return f"{name}{where}: unknown setting {path[-1]!r}{_suggest(path[:-1], path[-1])}"
    problem = item["msg"].removeprefix("Value error, ")
    shown = item["type"].startswith(_SHOWN_KINDS) or (item["type"] == "value_error" and name.endswith(_SHOWN_ENDS))
    value = item.get("input")
    got = f" (got {value!r})" if shown and isinstance(value, str | int | float) and len(repr(value)) < 60 else ""
    return f"{name}{where}: {problem[:1].lower()}{problem[1:]}{got}"


def _suggest(at: Path_, word: str) -> str:
    model = _model_at(at)
    hint = nearest(word, model.model_fields) if model is not None else ""
    if hint.startswith("; did"):
        return hint
    elsewhere = [".".join(path) for path in _known_paths() if path[-1] == word]
    return f"; did you mean {elsewhere[0]!r}?" if elsewhere else hint


def _known_paths() -> Iterator[Path_]:
    """Every setting's path; ``<name>`` stands where names are free."""
    stack: list[tuple[Path_, type[BaseModel]]] = [((), Settings)]
    while stack:
        at, model = stack.pop()
        for name, info in model.model_fields.items():
            below = _model_of(info.annotation)
            free = ("<name>",) if _is_section(info) else ()
            yield (*at, name)
            if below is not None:
                stack.append(((*at, name, *free), below))


def _model_at(path: Path_) -> type[BaseModel] | None:
    """The model whose keys stand at ``path``; None for a single value or a mapping of free names."""
    model: type[BaseModel] | None = Settings
    free = False
    for part in path:
        if free:
            free = False
            continue
        info = model.model_fields.get(part) if model is not None else None
        if info is None:
            return None
        model, free = _model_of(info.annotation), _is_section(info)
    return None if free else model


def _field_at(path: list[str]) -> FieldInfo | None:
    model = _model_at(tuple(path[:-1]))
    return model.model_fields.get(path[-1]) if model is not None and path else None


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_of(part)) is not None), None)
