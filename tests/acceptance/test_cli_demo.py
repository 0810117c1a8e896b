"""The demo, killed half way and finished by somebody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchferry.kafka import EmbeddedBroker

pytestmark = [pytest.mark.timeout(300)]
COMMAND = [sys.executable, "-m", "batchferry"]


def _environment() -> dict[str, str]:
    ours = ("KAFKA_", "OPENAI_", "BATCHFERRY_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The demo's folder; what still runs there is ended."""
    if EmbeddedBroker.binary() is None:
        pytest.skip("the embedded broker is not installed: install batchferry[demo]")
    path = tmp_path / "demo"
    yield path
    subprocess.run([*COMMAND, "demo", "--stop", "--folder", path], env=_environment(), capture_output=True, check=False)


def _wait_for(path: Path, word: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while word not in path.read_text():
        assert time.monotonic() < deadline, f"{word!r} did not come:\n{path.read_text()}"
        time.sleep(0.1)


def test_killed_half_way_another_process_finishes_and_the_books_agree(folder: Path, tmp_path: Path) -> None:
    """Kill -9 while batches are at the provider; ``run`` on the same broker, with an empty state folder, ends it well."""
    told = tmp_path / "demo.out"
    with told.open("w") as out:
        demo = subprocess.Popen([*COMMAND, "demo", "--folder", folder], env=_environment(), stdout=out, stderr=out)
    try:
        _wait_for(told, "in_progress", 90)
    finally:
        demo.send_signal(signal.SIGKILL)
        demo.wait()
    with (tmp_path / "run.out").open("w") as out:
        run = subprocess.Popen(
            [*COMMAND, "run", "--config", folder / "batchferry.yaml"], env=_environment(), stdout=out, stderr=out
        )
    try:
        verified = subprocess.run(
            [*COMMAND, "demo", "--verify", "--json", "--folder", folder, "--limit-s", "150"],
            env=_environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert verified.returncode == 0, verified.stderr + verified.stdout
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0
    finally:
        run.kill()
        run.wait()
    books = json.loads(verified.stdout[verified.stdout.index("{") :])
    assert books["ok"]
    assert books["records"] == books["succeeded"] + sum(books["failed"].values()) > 2_000
