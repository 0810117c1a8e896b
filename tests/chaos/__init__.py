"""Chaos on a real broker: three replicas of the service, misfortunes of every kind, and the books at the end.

``python -m chaos --minutes 5 --seed 7 --records 30000`` (from the folder ``tests``) or ``make chaos``. The seed gives
the plan of misfortunes, the input and the provider's script; when the processes meet them is up to the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

KIT_FOLDER = str(Path(__file__).resolve().parent.parent / "integration")
if KIT_FOLDER not in sys.path:  # the parts of the crash tests; these are no package
    sys.path.append(KIT_FOLDER)
