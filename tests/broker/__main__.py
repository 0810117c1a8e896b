"""``python -m tests.broker start --port N --dir D``: a real broker in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from .real import BrokerFailed, BrokerUnavailable, RealBroker, fetch_jars


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.broker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="fetch the broker into the cache folder and leave")
    start = commands.add_parser("start", help="start one node and print its bootstrap address when it answers")
    start.add_argument("--port", type=int, default=9092)
    start.add_argument("--dir", type=Path, required=True, help="data folder; kept, and found again next time")
    options = parser.parse_args()
    try:
        if options.command == "fetch":
            print(fetch_jars())
            return 0
        broker = RealBroker(options.dir.resolve(), options.port)
        broker.start()
    except (BrokerFailed, BrokerUnavailable) as reason:
        print(f"no broker: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(broker.bootstrap, flush=True)
    try:
        return broker.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        broker.stop()


if __name__ == "__main__":
    raise SystemExit(main())
