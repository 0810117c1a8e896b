"""What a replica's process runs. It stands alone so that a forked process imports nothing but the service."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batchferry.app import run_service
from batchferry.config import load_settings


def serve(config: str, log: str) -> None:
    """What ``batchferry run --config FILE`` does, with everything it prints in ``log``."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.exit(run_service(load_settings(Path(config), env={})))
