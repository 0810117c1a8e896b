"""A short run of the chaos: every promise of the books on a real broker, in under a minute."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from broker import RealBroker

from .plan import FAULTS_BY_NAME, REPLICA_KINDS, SESSION_S, Kind, plan
from .run import report, run
from .stage import Scale

SHORT = Scale(seed=4, length_s=12.0, records=1000, window="1h")
FINISH_LIMIT_S = 60.0


def test_plan_is_the_seeds() -> None:
    """The same seed gives the same plan, another one another; five minutes hold every kind of misfortune."""
    long = plan(5, 300.0)
    assert long == plan(5, 300.0)
    assert long != plan(6, 300.0)
    assert {one.kind for one in long} == set(Kind)
    assert {one.fault for one in long if one.kind is Kind.PROVIDER} == FAULTS_BY_NAME.keys()
    assert {one.replica for one in long if one.kind in REPLICA_KINDS} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_shortest_plan_has_the_worst(seed: int) -> None:
    """However short a run is, a replica and the broker are killed and a zombie wakes up."""
    short = plan(seed, SHORT.length_s)
    assert {Kind.KILL, Kind.BROKER_KILL, Kind.FREEZE_LONG} <= {one.kind for one in short}
    assert all(one.lasts_s > SESSION_S for one in short if one.kind is Kind.FREEZE_LONG)


@pytest.mark.real_broker
@pytest.mark.timeout(180)
async def test_short_chaos(own_broker: RealBroker) -> None:
    """After kills, freezes, a dead broker and an unreliable provider the books agree in every record."""
    folder = Path(tempfile.mkdtemp(prefix=f"batchferry-chaos-{SHORT.seed}-"))  # stays if this fails
    verdict = await run(folder, SHORT, finish_limit_s=FINISH_LIMIT_S, broker=own_broker)
    text = report(verdict)
    (folder / "report.txt").write_text(text)
    assert not verdict.faults, text
    print(text)
    shutil.rmtree(folder, ignore_errors=True)
    done = verdict.stage.done
    assert done[Kind.KILL]
    assert done[Kind.BROKER_KILL]
    assert done[Kind.FREEZE_LONG]
    assert sum(verdict.stage.faults_fired.values())
    assert len(verdict.books.rows) >= verdict.stage.sent > 0
    assert verdict.books.paid_runs >= verdict.books.classes["succeeded"] > 0
