"""What stands around the service in the demo: a folder, a broker, a simulated provider, and the settings for them.

Broker and provider run in a process of their own, in their own session, so that they outlive a demo that is killed;
they end by themselves when nobody has called the provider for ``IDLE_EXIT_S``. ``batchferry run --config
<folder>/batchferry.yaml`` can take the work over at any time until then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
import yaml

from batchferry.cli.demo.ports import Port, port_of
from batchferry.cli.demo.questions import ALWAYS_FAILS
from batchferry.domain.errors import BatchferryError, ConfigError, KafkaUnavailable

SPEED = 3600.0
"""One second of the demo is an hour."""
BEFORE_S = 48 * 3600.0
"""The demo's clock begins so long ago, so that it is never ahead of the broker's: brokers refuse the future."""
IDLE_EXIT_S = 480.0
"""Broker and provider wait so long for somebody to go on. Provider files of that clock live 30 days: 12 minutes."""
READY_LIMIT_S = 45.0
PARTITIONS = 4
MAX_ROWS = 450
KEY = "sk-demo"
STATE_FILE = "demo.json"
SETTINGS_FILE = "batchferry.yaml"
_FORMAT = 1


class StageMissing(BatchferryError):
    """There is no demo in this folder, or it has ended."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A demo that has been set up."""

    folder: Path
    pid: int
    """Of the process that runs provider and broker."""
    base_url: str
    bootstrap: str
    own_broker: bool
    provider: str

    @property
    def settings_path(self) -> Path:
        """The complete settings, also for ``batchferry run``."""
        return self.folder / SETTINGS_FILE

    @property
    def log_path(self) -> Path:
        """What the service told."""
        return self.folder / "service.log"

    @property
    def is_alive(self) -> bool:
        """Whether provider and broker still run."""
        with contextlib.suppress(httpx.HTTPError):
            return self.ask("clock") is not None
        return False

    @property
    def provider_url(self) -> str:
        """Where the simulated provider's API is."""
        return self.base_url.removesuffix("/v1") + port_of(self.provider).path

    def ask(self, what: str) -> dict[str, Any]:
        """What the simulated provider says of itself: ``state``, ``clock``.

        Raises:
            httpx.HTTPError: it does not answer.
        """
        found: dict[str, Any] = self._get(what).json()
        return found

    def sync_billed(self) -> int:
        """How many calls outside batches were paid."""
        return int(self._get("bill").json()["sync_paid_runs"])

    def bill(self) -> dict[str, int]:
        """How often each wire id was paid; those that never were are in it with 0.

        Raises:
            httpx.HTTPError: it does not answer.
        """
        lines = self._get("bill/rows.jsonl").content.splitlines()
        return {row["wire_id"]: row["paid_runs"] for row in map(orjson.loads, lines)}

    def _get(self, what: str) -> httpx.Response:
        answer = httpx.get(f"{self.base_url.removesuffix('/v1')}/_sim/{what}", timeout=10.0)
        answer.raise_for_status()
        return answer

    def end(self) -> None:
        """End provider and broker; bounded, and only the process this stage started."""
        if not _is_ours(self.pid, self.folder):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGTERM)
            for _ in range(150):
                # A child of ours has to be waited for, somebody else's is gone by itself.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.pid, os.WNOHANG)
                os.kill(self.pid, 0)
                time.sleep(0.1)


def set_up(folder: Path, cluster: str | None, provider: str) -> Stage:
    """Make the folder anew and start what the service needs; blocks for a few seconds.

    Args:
        folder: emptied if a demo was here before.
        cluster: bootstrap servers of a cluster to use; None: an embedded broker.
        provider: name of a port.

    Raises:
        ConfigError: the folder holds something else, or there is no such provider.
        KafkaUnavailable: the embedded broker is not installed or did not start.
    """
    port = port_of(provider)
    folder = folder.resolve()
    _empty(folder)
    (folder / "scenario.yaml").write_text(yaml.safe_dump(_scenario(port), sort_keys=False), encoding="utf-8")
    (folder / "faults.yaml").write_text(yaml.safe_dump(FAULTS, sort_keys=False), encoding="utf-8")
    started = datetime.now(UTC)
    clock = {"speed": SPEED, "origin": started - timedelta(seconds=BEFORE_S), "started": started}
    process = _start(folder, clock, own_broker=cluster is None)
    import batchferry.app  # noqa: F401, PLC0415 - the heavy parts are loaded while the others start

    ready = _wait_ready(process, folder)
    stage = Stage(
        folder,
        process.pid,
        str(ready["base_url"]),
        cluster or str(ready["kafka_bootstrap_servers"]),
        own_broker=cluster is None,
        provider=provider,
    )
    text = yaml.safe_dump(_settings(stage, clock, uuid4().hex[:8]), sort_keys=False)
    stage.settings_path.write_text(f"# Written by 'batchferry demo'. One real second is an hour here.\n{text}")
    state = {
        "format": _FORMAT,
        "pid": stage.pid,
        "base_url": stage.base_url,
        "bootstrap": stage.bootstrap,
        "own_broker": stage.own_broker,
        "provider": stage.provider,
    }
    (folder / STATE_FILE).write_bytes(orjson.dumps(state))
    return stage


def find(folder: Path) -> Stage:
    """The demo that was set up in this folder.

    Raises:
        StageMissing: there is none, or provider and broker have ended.
    """
    folder = folder.resolve()
    try:
        state = orjson.loads((folder / STATE_FILE).read_bytes())
        stage = Stage(
            folder,
            state["pid"],
            state["base_url"],
            state["bootstrap"],
            own_broker=state["own_broker"],
            provider=state["provider"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise StageMissing(f"no demo was set up in {folder}; 'batchferry demo' starts one") from None
    if not stage.is_alive:
        raise StageMissing(
            f"the demo in {folder} has ended: its provider and broker wait {IDLE_EXIT_S / 60:.0f} minutes for"
            " somebody to go on; 'batchferry demo' starts a new one"
        )
    return stage


def _empty(folder: Path) -> None:
    if folder.exists():
        is_demo = (folder / STATE_FILE).is_file() or (folder / "scenario.yaml").is_file()
        if not folder.is_dir() or (any(folder.iterdir()) and not is_demo):
            raise ConfigError([f"--folder: {folder} holds something else than a demo; name another or an empty one"])
        with contextlib.suppress(StageMissing):
            find(folder).end()
        shutil.rmtree(folder)
    folder.mkdir(parents=True, mode=0o700)


def _start(folder: Path, clock: Mapping[str, Any], *, own_broker: bool) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "batchferry", "simulate", "--json", "--port", "0",
        "--scenario", str(folder / "scenario.yaml"), "--faults", str(folder / "faults.yaml"),
        "--speed", str(clock["speed"]), "--origin", clock["origin"].isoformat(),
        "--started", clock["started"].isoformat(), "--data-dir", str(folder / "provider"),
        "--key", KEY, "--seed", "77", "--idle-exit-s", str(IDLE_EXIT_S),
    ]  # fmt: skip
    if own_broker:
        command += ["--with-broker", str(folder / "broker")]
    with (folder / "ready.json").open("wb") as out, (folder / "provider.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - our own argument list, no shell
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
        )


def _wait_ready(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        line, newline, _ = (folder / "ready.json").read_bytes().partition(b"\n")
        if newline:
            found: dict[str, Any] = orjson.loads(line)
            return found
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.terminate()
    told = (folder / "provider.log").read_text(encoding="utf-8", errors="replace").strip()
    raise KafkaUnavailable(f"the demo's broker and provider did not start: {told or f'see {folder}/provider.log'}")


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether the process is still the one we started, and not another that got its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return Path("/proc").is_dir() is False  # no such process; or a system that cannot be asked this way
    return os.fsencode(str(folder)) in command


def _settings(stage: Stage, clock: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """Settings of the service: the promise of real work, and patience scaled to a clock that runs 3,600 times faster.

    Lengths that the service measures on its own clock (windows, polls, graces) are in demo time; those that concern
    broker, disk and connections (sessions, transactions, timeouts, the time to live of a create) are in real time.
    """
    port = port_of(stage.provider)
    return {
        "kafka": {
            "bootstrap_servers": [stage.bootstrap] if "," not in stage.bootstrap else stage.bootstrap.split(","),
            "session_timeout_s": 6,
            "heartbeat_s": 1,
            "rebalance_timeout_s": 10,
        },
        "topics": {
            "requests": f"demo-{suffix}-requests",
            "results": f"demo-{suffix}-results",
            "failures": f"demo-{suffix}-failures",
            "events": f"demo-{suffix}-events",
            "group": f"demo-{suffix}",
            "partitions": PARTITIONS,
        },
        "accounts": {
            "default": {
                "profile": port.profile,
                "base_url": stage.provider_url,
                "api_key": KEY,
                "completion_window": port.window,
                "sync": {"enabled": True},
                "timeouts": {"create_s": 10, "read_s": 20, "upload_s": 20, "download_s": 60},
                "poll": {"first_s": "5m", "factor": 1.5, "max_s": "20m", "floor_s": "5m"},
                "file_expiry_s": "30d",
            }
        },
        "routes": {
            "default": {"endpoint": port.endpoint, "sla_s": port.sla, "margin_s": port.margin, "max_rows": MAX_ROWS},
        },
        "limits": {
            "settle_max_delay_s": 0.1,
            "submit_ttl_s": 15,
            "max_clock_skew_s": "2h",
            "missing_confirm_s": "10m",
            "missing_grace_s": "40m",
            "lookup_pause_s": "10m",
            "window_grace_s": "1h",
        },
        "state_dir": str(stage.folder / "state"),
        "server": {"port": 0},
        "log": {"format": "json"},
        "otel": {"enabled": False},
        "clock": {
            "speed": clock["speed"],
            "origin": clock["origin"].isoformat(),
            "started": clock["started"].isoformat(),
        },
        "stop_budget_s": 10,
    }


def _scenario(port: Port) -> dict[str, Any]:
    endless = {"in_progress": {"factor_s": 0, "exponent": 1, "minimum_s": port.unfinished_h * 3600}}
    return {**SCENARIO, "batches": [{"nth": 1, "durations": endless}]}


SCENARIO: dict[str, Any] = {
    # A batch of 450 rows takes about three hours, a small one minutes.
    "durations": {
        "validating_s": 120,
        "in_progress": {"factor_s": 24, "exponent": 1, "minimum_s": 300},
        "finalizing_s": 120,
        "jitter": 0.4,
    },
    # Besides, the first batch does not finish in its window: what it has done is landed, the rest travels again.
    "rows": [{"match": {"body_contains": ALWAYS_FAILS}, "outcome": "http_error", "status": 500}],
    "shares": [
        {"outcome": "content_filter", "share": 0.01},
        {"outcome": "http_error", "status": 500, "first_attempts": 1, "share": 0.02},
        {"outcome": "http_error", "status": 429, "first_attempts": 1, "share": 0.005},
        {"outcome": "http_error", "status": 400, "code": "invalid_value", "share": 0.003},
        {"outcome": "missing", "first_attempts": 1, "share": 0.004},
        {"outcome": "unreadable", "first_attempts": 1, "share": 0.002},
        {"outcome": "duplicate", "share": 0.003},
        {"outcome": "foreign", "share": 0.002},
        {"outcome": "truncated", "share": 0.005},
        {"outcome": "refusal", "share": 0.005},
        {"outcome": "line_separator", "share": 0.005},
        {"outcome": "nul", "share": 0.003},
    ],
}
"""What goes wrong at the provider, for everything that real providers are known to do."""

FAULTS: list[dict[str, Any]] = [
    {"call": "create", "kind": "lose_reply", "nth": 3},
    {"call": "upload", "status": 503, "nth": 2},
    {"call": "content", "kind": "cut", "nth": 3},
    {"call": "retrieve", "status": 429, "retry_after_s": 1, "every": 40},
    {"call": "retrieve", "status": 500, "every": 55},
]
"""What goes wrong on the way there: a create whose answer is lost, an outage, a download that breaks off."""
