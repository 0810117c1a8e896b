"""Profiles: what is known of each provider, as data in one small file each, and how it becomes an account's settings.

A new compatible provider is a new file here, or anywhere else: ``load_profile`` takes a path too. Whatever departs
from OpenAI's ways stands in a ``deviations`` entry with its source; what no primary source confirms is marked
``uncertain``, and nothing that would lose or double a row may rest on it. Settings that are given explicitly win.

Must not know calls, answers, or what a running account does: it reads files and hands out values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from batchferry.domain.dialect import Dialect
from batchferry.domain.errors import ConfigError
from batchferry.domain.times import parse_window_s
from batchferry.domain.yamltext import YamlFault, parse_yaml

_SUFFIX = ".yaml"
_PLACE = re.compile(r"\{([a-z_]+)\}")
_MAX_FILE_BYTES = 1 << 20
_dialect_of = TypeAdapter(Dialect)

TOPICS = frozenset(
    {
        "address",
        "key",
        "windows",
        "limits",
        "price",
        "supports",
        "account",
        "dialect",
        "poll",
        "batch_chat",
        "adoption",
        "models",
        "statuses",
        "files",
        "batches",
        "lists",
        "lines",
        "errors",
    }
)
"""What a deviation may be about; behind it may stand a dot and the field, as in ``dialect.key_header``."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Price(_Part):
    """Whose prices apply, and what a batch costs of them."""

    provider: str | None = None
    """Id in the price data (genai-prices); None: prices are not known, and nobody else's are taken."""
    batch_share: float | None = Field(default=None, gt=0, le=1)
    """Part of the list price that a batch costs; None: it differs by model or window, or is not known."""
    says: str
    """The discount in words, for people."""


class Limits(_Part):
    """What the provider takes; None where it names no limit."""

    max_rows: int | None = Field(default=None, ge=1)
    max_file_bytes: int | None = Field(default=None, ge=1)
    max_line_bytes: int | None = Field(default=None, ge=1)
    max_inputs: int | None = Field(default=None, ge=1)
    """Embedding inputs of one batch."""
    batches_per_hour: int | None = Field(default=None, ge=1)
    max_files: int | None = Field(default=None, ge=1)
    results_kept: str | None = None
    """How long after a batch was made its results stay, such as ``29d``."""
    enqueued_tokens: Mapping[str, int] = Field(default_factory=dict)
    """Tokens waiting at the provider, by model, where every account has the same."""


class Supports(_Part):
    """What may be asked of the provider."""

    batch: bool = True
    """Whether it has a batch API that the family's adapter speaks."""
    metadata: bool = True
    file_expiry: bool = True
    list_batches: bool = True
    """Whether batches can be listed, newest first: many polls become one, and a lost create is found."""
    sync: bool = True
    """Whether the same account answers single calls of the same models."""
    cancel: bool = True
    delete_file: bool = True
    webhook: Literal["standard", "own", "generic", "none"] = "none"
    """``standard``: OpenAI's events under the Standard Webhooks signature; ``own``: events of its own; ``generic``: a
    gateway that can be made to call any address."""


class Poll(_Part):
    """How often a batch is best asked for, in seconds."""

    first_s: float | None = Field(default=None, gt=0)
    max_s: float | None = Field(default=None, gt=0)
    floor_s: float | None = Field(default=None, ge=1)


class BatchChat(_Part):
    """A synchronous endpoint at the batch price, whose connection is held until the answer is there."""

    base_url: str
    path: str
    """Endpoint behind the base address."""
    hold_s: int = Field(ge=1)
    """How long the connection may be held."""


class Deviation(_Part):
    """One departure from OpenAI's ways, and who says so."""

    about: str
    says: str
    source: str
    uncertain: bool = False

    @field_validator("about")
    @classmethod
    def _known(cls, about: str) -> str:
        if about.partition(".")[0] not in TOPICS:
            raise ValueError(f"is about nothing known: begin with one of {', '.join(sorted(TOPICS))}")
        return about


class Profile(_Part):
    """What is known of one provider."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    title: str
    family: Literal["openai", "anthropic", "gemini", "mistral"]
    """Whose adapter speaks to it."""
    base_url: str
    """Root of the API; a ``{word}`` in it stands for what only you know: then ``base_url`` must be given."""
    key_variable: str | None = None
    """Environment variable in which the provider's own tools look for the key; None: it may have none."""
    windows: tuple[str, ...] = Field(min_length=1)
    """Completion windows by name, the one that is asked for by default first."""
    window_range: tuple[str, str] | None = None
    """Shortest and longest window where any length between them is taken; None: only those named."""
    price: Price
    limits: Limits = Limits()
    supports: Supports = Supports()
    adoption: Literal["metadata", "input_file", "display_name", "wire_ids", "none"]
    """By what a batch whose create was not answered is recognised as ours."""
    poll: Poll = Poll()
    query: Mapping[str, str] = Field(default_factory=dict)
    """Query parameters of every call."""
    account: Mapping[str, Any] = Field(default_factory=dict)
    """Further settings of the account's ``dialect``, about files and lists."""
    dialect: Mapping[str, Any] = Field(default_factory=dict)
    """Members of ``Dialect`` that differ from OpenAI's."""
    models: tuple[str, ...] = ()
    """The only models it takes, where it says so."""
    batch_chat: BatchChat | None = None
    deviations: tuple[Deviation, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for window in (*self.windows, *(self.window_range or ())):
            parse_window_s(window)
        if self.adoption == "metadata" and not self.supports.metadata:
            raise ValueError("adoption by metadata needs supports.metadata")
        told = {deviation.about for deviation in self.deviations}
        for section in ("account", "dialect"):
            for name in getattr(self, section):
                if f"{section}.{name}" not in told:
                    raise ValueError(f"{section}.{name} has no deviation that says why, and who says so")
        unknown = set(self.account) - _ACCOUNT_FIELDS
        if unknown:
            raise ValueError(f"account.{min(unknown)} is no setting that a profile may fill in")
        if self.family == "openai":
            faults = _dialect(self.dialect).faults()
            if faults:
                raise ValueError("; ".join(faults))
        return self

    @property
    def window(self) -> str:
        """The window that is asked for unless another is given."""
        return self.windows[0]

    @property
    def places(self) -> tuple[str, ...]:
        """Words in ``base_url`` that stand for what only the account's owner knows."""
        return tuple(_PLACE.findall(self.base_url))

    def takes_window(self, window: str) -> bool:
        """Whether the provider is known to take this completion window.

        Raises:
            ValueError: it is no window at all.
        """
        length_s = parse_window_s(window)
        if self.window_range is not None:
            shortest, longest = self.window_range
            return parse_window_s(shortest) <= length_s <= parse_window_s(longest)
        return any(parse_window_s(one) == length_s for one in self.windows)

    def is_uncertain(self, about: str) -> bool:
        """Whether an uncertain deviation is about this, or about a field of it."""
        return any(
            deviation.uncertain and (deviation.about == about or deviation.about.startswith(f"{about}."))
            for deviation in self.deviations
        )

    def settings(self) -> dict[str, Any]:
        """The same as the lowest layer of an account's settings: a nested mapping in the settings' own names.

        Holds only what the profile says; ``base_url`` is absent where it has places to fill in.
        """
        limits = self.limits
        layer: dict[str, Any] = {
            "provider": self.family,
            "completion_window": self.window,
            "price_provider": self.price.provider or "",
            "limits": _given(
                max_rows=limits.max_rows,
                max_file_bytes=limits.max_file_bytes,
                max_line_bytes=limits.max_line_bytes,
                max_inputs=limits.max_inputs,
                batches_per_hour=limits.batches_per_hour,
                max_files=limits.max_files,
                enqueued_tokens=dict(limits.enqueued_tokens) or None,
            ),
            "poll": _given(first_s=self.poll.first_s, max_s=self.poll.max_s, floor_s=self.poll.floor_s),
            "sync": {} if self.supports.sync else {"enabled": False},
            "query": dict(self.query),
            "dialect": {
                **self.account,
                **self.dialect,
                **_given(
                    batch_metadata=None if self.supports.metadata else False,
                    file_expiry=None if self.supports.file_expiry else False,
                ),
            },
            **_given(results_kept_s=limits.results_kept),
            **_given(batch_share=None if self.price.batch_share is None else str(self.price.batch_share)),
        }
        if not self.places:
            layer["base_url"] = self.base_url
        return {name: value for name, value in layer.items() if value != {}}


_ACCOUNT_FIELDS = frozenset({"file_purpose", "output_purpose", "list_page_size", "file_page_size"})


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _dialect(members: Mapping[str, Any]) -> Dialect:
    """A dialect of what a file holds.

    Raises:
        ValueError: a member that is not known, or has another form.
    """
    unknown = set(members) - set(Dialect.__dataclass_fields__)
    if unknown:
        near = difflib.get_close_matches(min(unknown), Dialect.__dataclass_fields__, 1)
        hint = f"; is {near[0]} meant?" if near else ""
        raise ValueError(f"dialect.{min(unknown)} is unknown{hint}")
    return _dialect_of.validate_python(dict(members))


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))


def load_profile(name: str) -> Profile:
    """A profile by its name, or by the path of a file (which ends in ``.yaml`` or ``.yml``).

    Raises:
        ConfigError: there is no such profile, or its file is wrong; every fault is listed.
    """
    if name.endswith((_SUFFIX, ".yml")):
        path = Path(name)
        try:
            with path.open("rb") as stream:
                raw = stream.read(_MAX_FILE_BYTES + 1)
            if len(raw) > _MAX_FILE_BYTES:
                raise ConfigError([f"profile {name}: the file has more than {_MAX_FILE_BYTES} bytes"])
            text = raw.decode("utf-8-sig")
        except OSError as error:
            raise ConfigError([f"profile {name}: cannot be read ({error.strerror}); check the path"]) from None
        except UnicodeDecodeError:
            raise ConfigError([f"profile {name}: is not UTF-8; save it so"]) from None
        except ValueError:  # a NUL
            raise ConfigError([f"profile {name!r}: cannot be read (no path); check the path"]) from None
        return read_profile(text, name)
    if name not in profile_names():
        near = difflib.get_close_matches(name, profile_names(), 1)
        hint = f"is {near[0]!r} meant? " if near else ""
        raise ConfigError(
            [f"profile {name!r} is unknown; {hint}there are {', '.join(profile_names())}; or name a .yaml file"]
        )
    return _shipped(name)


@cache
def _shipped(name: str) -> Profile:
    text = resources.files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    profile = read_profile(text, name)
    if profile.name != name:
        raise ConfigError([f"profile {name}: its name is {profile.name!r}; name it after its file"])
    return profile


def read_profile(text: str, where: str) -> Profile:
    """A profile from the text of its file; ``where`` names it in faults.

    Raises:
        ConfigError: no YAML, or not a profile; every fault is listed.
    """
    try:
        _, value = parse_yaml(text)
    except YamlFault as problem:
        line = f" in line {problem.line}" if problem.line is not None else ""
        raise ConfigError([f"profile {where}: not YAML{line} ({problem}); check indentation and colons"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"profile {where}: a mapping is wanted, with name, title, family, base_url ..."])
    try:
        return Profile.model_validate(value)
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            at = ".".join(str(part) for part in fault["loc"])
            faults.append(f"profile {where}: {at + ': ' if at else ''}{fault['msg'].removeprefix('Value error, ')}")
        raise ConfigError(faults) from None


# ------------------------------------------------------------------------------------------- the table

_COLUMNS = (
    "provider",
    "batch",
    "sync lane",
    "webhook",
    "list polling",
    "adoption after a crash",
    "windows",
    "limits",
    "discount",
)
_WEBHOOKS = {"standard": "yes", "own": "yes, its own events", "generic": "generic", "none": "no"}
_ADOPTION = {
    "metadata": "by input file and metadata",
    "input_file": "by input file",
    "display_name": "by display name",
    "wire_ids": "by row ids, time and count",
    "none": "no",
}


def table(profiles: Iterable[Profile] | None = None) -> str:
    """The profiles as a Markdown table; ``?`` marks what no primary source confirms. Ends with a line feed."""
    shown = [load_profile(name) for name in profile_names()] if profiles is None else list(profiles)
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    lines.extend(f"| {' | '.join(_cells(profile))} |" for profile in shown)
    return "\n".join(lines) + "\n"


def _cells(profile: Profile) -> tuple[str, ...]:
    supports = profile.supports
    sync = "yes" if supports.sync else "no"
    if profile.batch_chat is not None:
        sync += ", batch chat"

    def doubted(text: str, about: str) -> str:
        return f"{text} ?" if profile.is_uncertain(about) else text

    return (
        f"{profile.title} (`{profile.name}`)",
        doubted("yes" if supports.batch else "no", "supports.batch"),
        doubted(sync, "supports.sync"),
        doubted(_WEBHOOKS[supports.webhook], "supports.webhook"),
        doubted("yes" if supports.list_batches else "no", "supports.list_batches"),
        doubted(_ADOPTION[profile.adoption] if supports.batch else "-", "adoption"),
        doubted(windows(profile) if supports.batch else "-", "windows"),
        doubted(_limits(profile.limits), "limits"),
        doubted(profile.price.says, "price"),
    )


def windows(profile: Profile) -> str:
    """The completion windows that a provider takes, in words."""
    if profile.window_range is not None:
        shortest, longest = profile.window_range
        return f"{shortest} to {longest}, by default {profile.window}"
    return ", ".join(profile.windows)


def _limits(limits: Limits) -> str:
    parts = []
    if limits.max_rows is not None:
        parts.append(f"{limits.max_rows:,} rows")
    if limits.max_file_bytes is not None:
        parts.append(_size(limits.max_file_bytes))
    if limits.max_line_bytes is not None:
        parts.append(f"{_size(limits.max_line_bytes)} a line")
    return ", ".join(parts) or "none named"


def _size(size_bytes: int) -> str:
    for unit, unit_bytes in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:g} {unit}"
    return f"{size_bytes} bytes"
