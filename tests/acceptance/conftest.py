"""What the acceptance tests of the command line share."""

from cli_kit import run_cli  # noqa: F401 - a fixture
