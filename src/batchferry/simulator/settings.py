"""Settings of a simulator."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, field_validator

from batchferry.simulator.clock import ManualSimClock, SimClock, VirtualClock
from batchferry.simulator.faults import FaultRule
from batchferry.simulator.scenario import Scenario

DEFAULT_KEY = "sk-simulated"
DEFAULT_PROJECT = "proj_simulated"


class ClockSettings(BaseModel):
    """Virtual time: ``origin + (real time - started_real) * speed``; missing instants are the moment of the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    origin: AwareDatetime | None = None
    started_real: AwareDatetime | None = None

    def build(self) -> SimClock:
        """The clock."""
        started_real = self.started_real or datetime.now(UTC)
        return SimClock(self.speed, self.origin, started_real)


class SimulatorSettings(BaseModel):
    """What a simulator is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    data_dir: Path | None = None
    """Where files, batches and bill are kept; a folder with state is taken up again. None: a temporary folder."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0 takes a free one."""
    keys: dict[SecretStr, str] = {SecretStr(DEFAULT_KEY): DEFAULT_PROJECT}
    """API keys and the project each belongs to: a project sees its own files and batches only. A list of keys
    means one project for all."""
    scenario: Scenario = Scenario()
    faults: tuple[FaultRule, ...] = ()
    clock: ClockSettings | SimClock | ManualSimClock = ClockSettings()
    seed: int = 0
    idle_exit_s: Annotated[float, Field(gt=0)] | None = None
    """Exit after so many real seconds without a request; None: never."""
    admin: bool = True
    """Serve ``/_sim``: bill, faults, gates, clock. It asks for no key."""
    patience_s: Annotated[float, Field(ge=0)] = 5.0
    """Real seconds a read waits for rows being worked off before it answers with the state so far."""

    @field_validator("keys", mode="before")
    @classmethod
    def _list_is_one_project(cls, keys: Any) -> Any:
        if isinstance(keys, list | tuple | set | frozenset):
            keys = dict.fromkeys(keys, DEFAULT_PROJECT)
        if isinstance(keys, dict):
            # Pydantic leaves secrets that are dictionary keys in their frozen form only if they come as such.
            keys = {SecretStr(key) if isinstance(key, str) else key: project for key, project in keys.items()}
        return keys

    @field_validator("keys")
    @classmethod
    def _there_is_a_key(cls, keys: dict[SecretStr, str]) -> dict[SecretStr, str]:
        if not keys or any(not key.get_secret_value() for key in keys):
            raise ValueError("give at least one API key that is not empty")
        return keys

    def build_clock(self) -> VirtualClock:
        """The clock these settings mean."""
        return self.clock.build() if isinstance(self.clock, ClockSettings) else self.clock
