"""``python -m batchferry.messages --check|--write [DIR]``: the published schemas against the code.

Exit codes: 0 in agreement (or written), 1 drift.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from batchferry.messages.documents import check_schemas, write_schemas


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m batchferry.messages", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="say what differs, change nothing")
    what.add_argument("--write", action="store_true", help="write the files anew")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("schemas"))
    options = parser.parse_args(arguments)
    if options.write:
        sys.stdout.write("".join(f"wrote {options.directory / name}\n" for name in write_schemas(options.directory)))
        return 0
    drift = check_schemas(options.directory)
    sys.stdout.write("".join(f"{line}\n" for line in drift) or "schemas agree with the code\n")
    if drift:
        sys.stdout.write("run: python -m batchferry.messages --write\n")
    return 1 if drift else 0


if __name__ == "__main__":
    sys.exit(main())
