"""``python -m bench [big | takeover | quota | webhooks]``: the measurements of the README, printed as ratios."""

from __future__ import annotations

import asyncio
import resource
import sys

from . import big, ingest, landing, quota, takeover, webhooks
from .kit import Rehearsal, cluster, folder, simulator

GOALS = {4096: 0.45, 1024: 0.35}
LANDING_GOAL = 0.5


async def main() -> None:
    """Measure and print."""
    with cluster() as bootstrap:
        clock = Rehearsal(speed=1.0)  # nothing is to be sealed by time while it is counted
        with simulator(clock) as base_url:
            for body_bytes, rows in ((4096, 40_000), (1024, 80_000)):
                result = await ingest.measure(bootstrap, base_url, clock, rows, body_bytes)
                print(
                    f"ingest {body_bytes:>5} B: raw getmany {result.raw:>9,.0f} records/CPU-s,"
                    f" ours {result.ours:>9,.0f}, ratio {result.ratio:.2f} (goal {GOALS[body_bytes]})",
                    flush=True,
                )
        for body_bytes in (1024, 4096):
            clock = Rehearsal()
            with simulator(clock) as base_url:
                landed = await landing.measure(bootstrap, base_url, clock, 20_000, body_bytes)
                print(
                    f"landing {landed.outcome_bytes / landed.rows:>5,.0f} B outcomes: raw transactional send_batch"
                    f" {landed.raw:>9,.0f} rows/CPU-s, ours {landed.ours:>9,.0f}, ratio {landed.ratio:.2f}"
                    f" (goal {LANDING_GOAL})",
                    flush=True,
                )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory of this process (services and raw loops together): {peak / 1e6:,.0f} MB")


async def takeovers() -> None:
    """Measure how soon a moved partition can settle again."""
    with cluster() as bootstrap:
        clock = Rehearsal(speed=1.0)
        with simulator(clock) as base_url:
            async with folder() as place:
                print(takeover.explain(await takeover.measure(bootstrap, base_url, clock, place)), flush=True)


async def quotas() -> None:
    """Run one stream of rows through a queue that holds three and a half of its twenty batches."""
    with cluster() as bootstrap:
        async with folder() as place:
            print(f"{quota.GROUPS} batches of {quota.ROWS * quota.ROW_TOKENS:,} tokens, limit {quota.LIMIT_TOKENS:,}")
            print(quota.HEADINGS)
            for voyage in await quota.measure(bootstrap, place):
                print(quota.explain(voyage), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["big"]:
        big.main()
    elif sys.argv[1:] == ["takeover"]:
        asyncio.run(takeovers())
    elif sys.argv[1:] == ["quota"]:
        asyncio.run(quotas())
    elif sys.argv[1:] == ["webhooks"]:
        webhooks.main()
    else:
        asyncio.run(main())
