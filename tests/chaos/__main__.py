"""``python -m chaos [--minutes M] [--seed N] [--records R]``: one run and its report; exit code 1 if it failed."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

from broker import BrokerUnavailable

from .run import report, run
from .stage import Scale

FINISH_LIMIT_S = 300.0


def main() -> int:
    """Run once. The folder with logs, topics and the provider's data stays when the run fails."""
    wanted = argparse.ArgumentParser(prog="chaos", description=__doc__)
    wanted.add_argument("--minutes", type=float, default=5.0, help="how long misfortunes happen")
    wanted.add_argument("--seed", type=int, default=None, help="of the plan, the input and the provider's script")
    wanted.add_argument("--records", type=int, default=None, help="default: 5,000 a minute")
    wanted.add_argument("--keep", action="store_true", help="keep the folder of a run that succeeded, too")
    given = wanted.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # our own client has a lot to say of a broker that is dead
    seed = random.SystemRandom().randrange(100_000) if given.seed is None else given.seed
    records = round(given.minutes * 5000) if given.records is None else given.records
    folder = Path(tempfile.mkdtemp(prefix=f"batchferry-chaos-{seed}-"))
    print(f"seed {seed}: {given.minutes:g} minutes, {records:,} records; folder {folder}", flush=True)
    try:
        verdict = asyncio.run(run(folder, Scale(seed, given.minutes * 60, records), finish_limit_s=FINISH_LIMIT_S))
    except BrokerUnavailable as reason:
        raise SystemExit(f"chaos needs a real broker: {reason}") from None
    text = report(verdict)
    (folder / "report.txt").write_text(text)
    (folder / "history.txt").write_text("\n".join(verdict.stage.history.lines()))
    print(text)
    if not verdict.faults and not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
