"""The command line on a broker: produce, status, results, doctor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cli_kit import Ran, Run, chat_line, settings_file

from batchferry.cli.exits import Exit
from batchferry.cli.main import call

pytestmark = pytest.mark.broker


@pytest.fixture
def config(broker: object, topic_name: Callable[[str], str], tmp_path: Path) -> Path:
    """Settings for this run's broker, with topics nobody else uses."""
    return settings_file(
        tmp_path,
        {
            "kafka": {"bootstrap_servers": [broker.bootstrap]},  # type: ignore[attr-defined]
            "topics": {
                **{name: topic_name(name) for name in ("requests", "results", "failures", "events")},
                "group": topic_name("group"),
                "partitions": 3,
            },
            "accounts": {"default": {"api_key": "sk-x", "base_url": "http://127.0.0.1:1/v1"}},
        },
    )


def _file(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_each_line_becomes_a_record(cli: Run, config: Path, tmp_path: Path) -> None:
    """A file's lines arrive as they are, blank ones are skipped, and status counts what is not settled."""
    lines = [chat_line(f"c{number}") for number in range(40)]
    ran = cli("produce", _file(tmp_path, *lines, b"", b"not json"), "--config", config)
    assert ran.code == Exit.OK
    assert (ran.json["sent"], ran.json["blank_lines"], ran.json["without_key"]) == (41, 1, 1)
    status = cli("status", "--config", config).json
    assert status["unsettled"] == 41
    assert sum(part["open"] for part in status["partitions"]) == 41
    assert "the service has not run" in cli("status", "--config", config, "--table").out.lower()


def test_a_file_with_a_bad_line_is_refused_whole_by_check(cli: Run, config: Path, tmp_path: Path) -> None:
    """--check names the bad lines by number, rule and remedy, and sends nothing."""
    path = _file(tmp_path, chat_line("good"), b'{"custom_id": 7}', b"\xef\xbb\xbf{}", chat_line("s", stream=True))
    ran = cli("produce", path, "--config", config, "--check")
    assert ran.code == Exit.LINES_REFUSED
    assert ran.json["sent"] == 0
    for number, rule in ((2, "custom_id_type"), (3, "bom"), (4, "streaming")):
        assert any(fault.startswith(f"line {number}:") and rule in fault for fault in ran.json["faults"])
    assert cli("status", "--config", config).json["unsettled"] == 0


def test_a_line_too_large_for_the_topic_is_named(cli: Run, config: Path, tmp_path: Path) -> None:
    """A line of 40 MB does not stop its neighbours, is told by number, and is never held in memory whole."""
    path = _file(tmp_path, chat_line("before"), b'{"x":"' + b"y" * 40_000_000 + b'"}', chat_line("after"))
    ran = cli("produce", path, "--config", config)
    assert ran.code == Exit.LINES_REFUSED
    assert ran.json["sent"] == 2
    assert ran.json["faults"][0].startswith("line 2: 40,000,008 bytes")


def test_produce_reads_a_pipe_and_goes_on_at_a_line(cli: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """- reads standard input; --from-line leaves out what was sent before."""
    reading, writing = os.pipe()
    os.write(writing, b"\n".join(chat_line(f"c{number}") for number in range(10)))
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        ran = cli("produce", "-", "--config", config, "--from-line", 4)
    assert ran.json["sent"] == 7


@pytest.mark.real_broker
def test_a_timestamp_that_the_broker_refuses_is_told_for_what_it_is(cli: Run, config: Path, tmp_path: Path) -> None:
    """A rehearsal's clock that runs ahead of the broker's: the remedy is another timestamp, not another cluster."""
    path = _file(tmp_path, chat_line("tomorrow"))
    ahead = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    ran = cli("produce", path, "--config", config, "--timestamps", ahead)
    assert ran.code == Exit.FAILED
    assert "INVALID_TIMESTAMP" in ran.err
    assert "--timestamps" in ran.err
    assert "bootstrap_servers" not in ran.err
    settings = {
        **yaml.safe_load(config.read_text()),
        "clock": {"origin": ahead, "started": datetime.now(UTC).isoformat()},
    }
    ran = cli("produce", path, "--config", settings_file(tmp_path, settings))
    assert "clock.origin" in ran.err
    assert cli("produce", path, "--config", config, "--timestamps", datetime.now(UTC).isoformat()).json["sent"] == 1


def test_a_bom_is_warned_of_and_utf_16_refused(cli: Run, config: Path, tmp_path: Path) -> None:
    """A file of the wrong encoding is told with the remedy."""
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + chat_line("x"))
    ran = cli("produce", path, "--config", config)
    assert ran.code == Exit.OK
    assert "byte order mark" in ran.err
    path.write_bytes(chat_line("x").decode().encode("utf-16"))
    ran = cli("produce", path, "--config", config)
    assert ran.code == Exit.LINES_REFUSED
    assert "UTF-16" in ran.err


def test_doctor_makes_nothing_and_tells_what_run_would_make(cli: Run, config: Path) -> None:
    """Missing topics are a remark where the service may make them; nothing is made by looking."""
    first = cli("doctor", "--config", config)
    second = cli("doctor", "--config", config)
    for ran in (first, second):
        assert ran.code == Exit.OK
        assert [one["verdict"] for one in ran.json["findings"] if one["gate"] == "topic exists"] == ["warn"] * 6


def test_results_stay_one_line_each(cli: Run, config: Path, tmp_path: Path) -> None:
    """Outcomes with U+2028 or control characters in them are printed as one line each, with the same meaning."""
    settings = config.read_text()
    results = next(line.split(": ")[1] for line in settings.splitlines() if line.startswith("  results:"))
    failures = next(line.split(": ")[1] for line in settings.splitlines() if line.startswith("  failures:"))
    text = "one\u2028two\u2029three\x85four\x7f"
    outcome = {
        "status": "succeeded",
        "custom_id": "c",
        "source": {"topic": "t", "partition": 0, "offset": 7},
        "response": {"body": {"choices": [{"message": {"content": text}}]}},
        "flags": [],
    }
    line = json.dumps(outcome, ensure_ascii=False).encode()
    for topic in (results, failures):
        made = tmp_path / "topic.yaml"
        made.write_text(
            settings.replace(next(x for x in settings.splitlines() if "requests:" in x), f"  requests: {topic}")
            .replace(f"  results: {results}", "  results: other-r")
            .replace(f"  failures: {failures}", "  failures: other-f")
        )
        assert cli("produce", _file(tmp_path, line), "--config", made).code == Exit.OK
    ran = cli("results", "--config", config)
    assert ran.code == Exit.OK
    printed = ran.out.splitlines()
    assert len(printed) == 2
    assert json.loads(printed[0]) == outcome
    table: Ran = cli("results", "--config", config, "--table", "--max", 1)
    assert len(table.out.splitlines()) == 1
    assert "\\u2028" in table.out
    assert cli("results", "--config", config, "--follow", "--from-beginning", "--max", 2).code == Exit.OK


def test_missing_topics_are_told(cli: Run, config: Path) -> None:
    """Results before the first run, and status before the first record, say which topic is missing."""
    for command in ("results", "status"):
        ran = cli(command, "--config", config)
        assert ran.code == Exit.FAILED
        assert "does not exist" in ran.err


def test_call_returns_what_main_exits_with(config: Path) -> None:
    """The exit code of a command is what the process ends with."""
    assert call(["show", "nothing", "--config", str(config)]) == Exit.FAILED
