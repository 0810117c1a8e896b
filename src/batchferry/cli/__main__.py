"""``python -m batchferry.cli``: the same as the ``batchferry`` command."""

from batchferry.cli.main import main

main()
