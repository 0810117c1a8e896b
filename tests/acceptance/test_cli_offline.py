"""The command line without a broker: help, settings, plans, schemas, and clear words for what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import Run, settings_file

from batchferry import __version__
from batchferry.cli.exits import Exit

COMMANDS = (
    "run", "demo", "produce", "results", "status", "batches", "show", "plan", "doctor", "settings", "schemas",
    "simulate", "validate", "report",
)  # fmt: skip
NO_BROKER = {"kafka": {"bootstrap_servers": ["127.0.0.1:1"], "request_timeout_s": 2}}


def test_version_is_the_packages(cli: Run) -> None:
    """--version names the version."""
    ran = cli("--version")
    assert (ran.code, ran.out) == (0, f"batchferry {__version__}\n")


def test_help_lists_every_command_and_exit_code(cli: Run) -> None:
    """The help shows each command, and at its end what each exit code means."""
    ran = cli("--help")
    assert ran.code == Exit.OK
    for command in COMMANDS:
        assert f" {command} " in ran.out
    for code in Exit:
        assert f" {code.value} " in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_exit_codes(cli: Run, command: str) -> None:
    """Every command explains itself."""
    ran = cli(command, "--help")
    assert ran.code == Exit.OK
    assert "Exit codes:" in ran.out


def test_a_wrong_flag_is_a_usage_error(cli: Run) -> None:
    """An unknown flag ends with code 2 and says what was wrong."""
    ran = cli("plan", "--no-such-flag")
    assert ran.code == Exit.USAGE
    assert "no-such-flag" in ran.err


def test_three_mistakes_are_told_at_once(cli: Run, tmp_path: Path) -> None:
    """A settings file with three mistakes lists all three, each on a line of its own, without a traceback."""
    path = settings_file(
        tmp_path,
        {"kafka": {"bootstrap_servers": ["nowhere"]}, "limitz": {}, "routes": {"default": {"sla_s": "24h"}}},
    )
    ran = cli("plan", "--config", path)
    assert ran.code == Exit.USAGE
    lines = [line for line in ran.err.splitlines() if line.startswith("  ")]
    assert len(lines) == 3
    assert "kafka.bootstrap_servers" in ran.err
    assert "limitz" in ran.err
    assert "SLA 24 h - completion window 24 h - margin 2 h = -2 h" in ran.err
    assert "Traceback" not in ran.err


def test_run_without_a_key_says_where_to_put_it(cli: Run) -> None:
    """The service needs a key, and its absence is one clear message."""
    ran = cli("run")
    assert ran.code == Exit.USAGE
    assert "OPENAI_API_KEY" in ran.err


@pytest.mark.parametrize("command", [("status",), ("batches",), ("results",), ("show", "x"), ("report",)])
def test_no_broker_is_one_clear_message(cli: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Without a broker a command ends with code 1, names the address and a remedy, and shows no traceback."""
    ran = cli(*command, "--config", settings_file(tmp_path, NO_BROKER))
    assert ran.code == Exit.FAILED
    assert "127.0.0.1:1" in ran.err
    assert "KAFKA_BOOTSTRAP_SERVERS" in ran.err
    assert "Traceback" not in ran.err


def test_doctor_without_a_broker_refuses(cli: Run, tmp_path: Path) -> None:
    """Doctor tells a missing broker as a finding with its remedy, and ends with the code of a refusal."""
    path = settings_file(tmp_path, {**NO_BROKER, "accounts": {"default": {"api_key": "sk-x"}}})
    ran = cli("doctor", "--config", path, "--json")
    assert ran.code == Exit.REFUSED
    assert not ran.json["ok"]
    assert ran.json["findings"][0]["remedy"]


def test_plan_writes_the_sum_out(cli: Run) -> None:
    """30 h - 24 h - 2 h = 4 h, and 28 h at worst, in words and as numbers."""
    shown = cli("plan", "--table").out
    assert "SLA 30 h - completion window 24 h - margin 2 h = 4 h" in shown
    assert "4 h waiting + 24 h window = 28 h, 2 h before the deadline" in shown
    (told,) = cli("plan").json
    assert told["max_wait_s"] == 4 * 3600
    assert told["worst_case_s"] == 28 * 3600


def test_plan_sizes_batches_by_the_first_limit(cli: Run) -> None:
    """A thin stream is sealed by time, a thick one by rows, large rows by bytes."""
    by = {}
    for rate, row_bytes in ((1_000, 2_000), (20_000, 1_000), (20_000, 100_000)):
        (told,) = cli("plan", "--rows-per-hour", rate, "--row-bytes", row_bytes).json
        by[told["batch"]["sealed_by"]] = told["batch"]
    assert by["time"]["rows"] == 4_000
    assert by["rows"]["rows"] == 25_000
    assert by["bytes"]["bytes"] <= 100_000_000


def test_plan_halves_the_price(cli: Run) -> None:
    """The cost of a known model is half outside's; an unknown model has none and says so."""
    (known,) = cli("plan", "--model", "gpt-4o-mini").json
    assert known["per_day"]["sync_cost_picodollars"] == 2 * known["per_day"]["cost_picodollars"]
    (unknown,) = cli("plan", "--model", "nobody-knows-it").json
    assert unknown["per_day"]["cost_picodollars"] is None
    assert any("no price" in remark for remark in unknown["remarks"])


def test_settings_are_explained(cli: Run) -> None:
    """Each setting is told with its variable; words narrow the list; example and schema are printed whole."""
    every = cli("settings").json
    assert {"kafka.bootstrap_servers", "routes.<name>.sla_s"} <= {row["name"] for row in every}
    some = cli("settings", "sla_s").json
    assert 0 < len(some) < len(every)
    assert "BATCHFERRY_ROUTES__<name>__SLA_S" in {row["env"] for row in some}
    assert "sla_s: 30h" in cli("settings", "--example").out
    assert json.loads(cli("settings", "--schema").out)["title"] == "batchferry settings"


def test_the_example_settings_load(cli: Run, tmp_path: Path) -> None:
    """What --example prints can be used as it stands."""
    path = tmp_path / "example.yaml"
    path.write_text(cli("settings", "--example").out)
    assert cli("plan", "--config", path).code == Exit.OK


def test_schemas_are_listed_printed_written_and_checked(cli: Run, tmp_path: Path) -> None:
    """The published contracts come out by name, and drift in a folder is told with code 1."""
    assert "result" in cli("schemas").json
    assert cli("schemas", "result").json["title"]
    folder = tmp_path / "schemas"
    assert cli("schemas", "--write", folder).code == Exit.OK
    assert cli("schemas", "--check", folder).code == Exit.OK
    (folder / "result.v1.json").write_text("{}")
    ran = cli("schemas", "--check", folder)
    assert ran.code == Exit.FAILED
    assert "result.v1.json" in ran.err
    assert cli("schemas", "nothing").code == Exit.USAGE


def test_simulate_lists_what_is_wrong_with_its_flags(cli: Run, tmp_path: Path) -> None:
    """Bad clock values and a broken scenario are told with their names."""
    ran = cli("simulate", "--origin", "yesterday", "--started", "2026-01-01T00:00:00")
    assert ran.code == Exit.USAGE
    assert "--origin" in ran.err
    assert "--started" in ran.err
    broken = tmp_path / "scenario.yaml"
    broken.write_text("durations: {validating_s: -1}\nnonsense: 1\n")
    ran = cli("simulate", "--scenario", broken)
    assert ran.code == Exit.USAGE
    assert "nonsense" in ran.err
    assert "validating_s" in ran.err


def test_demo_keeps_away_from_other_folders(cli: Run, tmp_path: Path) -> None:
    """A folder with something else in it is never emptied."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    ran = cli("demo", "--folder", folder)
    assert ran.code == Exit.USAGE
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_demo_without_a_demo_to_resume_says_so(cli: Run, tmp_path: Path) -> None:
    """--resume, --verify and --stop of nothing are one clear message."""
    for flag in ("--resume", "--verify", "--stop"):
        ran = cli("demo", flag, "--folder", tmp_path / "none")
        assert ran.code == Exit.FAILED
        assert "no demo was set up" in ran.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--sla", "soon"), "--sla"),
        (("--deadline", "2026-01-01"), "--deadline"),
        (("--header", "novalue"), "--header"),
        (("--timestamps", "later"), "--timestamps"),
    ],
)
def test_produce_checks_its_flags_before_it_sends(cli: Run, tmp_path: Path, flags: tuple[str, ...], named: str) -> None:
    """A wrong flag is told by its name, before a broker is asked for."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"{}\n")
    ran = cli("produce", file, *flags)
    assert ran.code == Exit.USAGE
    assert named in ran.err


def test_produce_names_a_file_it_cannot_read(cli: Run, tmp_path: Path) -> None:
    """A missing file and a folder are told before a broker is asked for."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        ran = cli("produce", path)
        assert ran.code == Exit.USAGE
        assert str(path) in ran.err
