"""``python -m batchferry`` is the command ``batchferry``."""

from batchferry.cli.main import main

if __name__ == "__main__":
    main()
