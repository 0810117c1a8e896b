"""A provider that takes less than the settings say: batches it refuses for their size are halved until they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inprocess_kit import QUICK, Pier, request

from batchferry.simulator import Scenario
from batchferry.simulator.scenario import Limits

pytestmark = pytest.mark.broker


@pytest.mark.parametrize(
    ("limits", "most_rows"),
    [
        pytest.param(Limits(rows_per_batch=3), 3, id="rows"),
        pytest.param(Limits(input_file_bytes=900), 5, id="bytes"),
    ],
)
async def test_a_batch_refused_for_its_size_is_halved(
    broker: Any, tmp_path: Path, monkeypatch: Any, limits: Limits, most_rows: int
) -> None:
    """Nobody is held and no attempt is used up: the rows go on in batches of half the size, and of half of that."""
    scenario = Scenario(durations=QUICK, limits=limits)
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, scenario=scenario) as pier:
        await pier.send("large", [request("large", f"r{number}") for number in range(10)])
        outcomes = await pier.landed("large")
        assert len(outcomes) == 10
        assert {one.said["status"] for one in outcomes} == {"succeeded"}
        assert [one.said["attempts"] for one in outcomes] == [{}] * 10
        sizes = [job["rows"] for job in await pier.jobs("large")]
        assert max(sizes) == 10
        assert all(job["rows"] <= most_rows for job in await pier.jobs("large") if job["succeeded"])
        assert not pier.service.supervisor.fleet.control.holds
