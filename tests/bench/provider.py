"""``python -m bench.provider PORT DATA_DIR SPEED ORIGIN STARTED``: the simulator as a process of its own."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

from batchferry.simulator import ClockSettings, Limits, Scenario, SimulatorSettings, run_forever


def main() -> None:
    """Serve until terminated."""
    port, data_dir, speed, origin, started = sys.argv[1:6]
    run_forever(
        SimulatorSettings(
            port=int(port),
            data_dir=Path(data_dir),
            scenario=Scenario(
                limits=Limits(rows_per_batch=1_000_000, input_file_bytes=2_000_000_000, any_file_bytes=2_000_000_000)
            ),
            clock=ClockSettings(
                speed=float(speed), origin=datetime.fromisoformat(origin), started_real=datetime.fromisoformat(started)
            ),
        )
    )


if __name__ == "__main__":
    main()
