"""``batchferry simulate`` and its library of scenarios, as a user meets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_kit import Run

from batchferry.cli.exits import Exit
from batchferry.simulator import DEFAULT_KEY, load_scenario, scenarios

pytestmark = pytest.mark.timeout(60)


def test_the_library_is_listed_for_people_and_for_programs(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name and a title a line; with --json also what happens and what a client must do."""
    listed = cli("simulate", "--list-scenarios", "--json").json
    assert [one["name"] for one in listed] == scenarios.names()
    assert all(one["title"] and one["about"] and one["client_must"] and one["surfaces"] for one in listed)
    lines = cli("simulate", "--list-scenarios", "--table").out.splitlines()
    assert [line.split()[0] for line in lines] == scenarios.names()
    assert "half_expired " in "\n".join(lines)


def test_a_scenario_can_be_copied_and_changed(cli: Run, tmp_path: Path) -> None:
    """--show-scenario prints the file itself, which --scenario takes back."""
    shown = cli("simulate", "--show-scenario", "webhook_lost").out
    mine = tmp_path / "mine.yaml"
    mine.write_text(shown)
    assert scenarios.load("webhook_lost") == load_scenario(mine)


def test_an_unknown_name_is_refused_with_the_remedy(cli: Run) -> None:
    """A bare word that is no scenario is not looked for as a file."""
    ran = cli("simulate", "--scenario", "half_expierd")
    assert ran.code == Exit.USAGE
    assert "half_expierd" in ran.err
    assert "--list-scenarios" in ran.err
    assert cli("simulate", "--show-scenario", "nothing").code == Exit.USAGE


def test_the_schema_of_scenarios_is_published(cli: Run, tmp_path: Path) -> None:
    """``batchferry schemas scenario`` prints it, for editors and for other tools."""
    schema = cli("schemas", "scenario").json
    assert "scenario" in cli("schemas").json
    assert {"title", "about", "faults", "batches", "webhooks"} <= schema["properties"].keys()


def test_the_schema_file_of_scenarios_is_written_and_checked(cli: Run, tmp_path: Path) -> None:
    """It lies in a folder beside the messages' schemas; a changed or a missing one is drift."""
    folder = tmp_path / "schemas"
    assert cli("schemas", "--write", folder).code == 0
    assert cli("schemas", "--check", folder).code == 0
    file = folder / "simulator" / "scenario.v1.json"
    assert json.loads(file.read_text()) == cli("schemas", "scenario").json
    assert json.loads(file.read_text())["properties"]["surfaces"]["description"]
    file.write_text("{}")
    ran = cli("schemas", "--check", folder)
    assert (ran.code, "scenario.v1.json: differs" in ran.out + ran.err) == (Exit.FAILED, True)
    file.unlink()
    ran = cli("schemas", "--check", folder)
    assert (ran.code, "scenario.v1.json: missing" in ran.out + ran.err) == (Exit.FAILED, True)


def test_webhook_options_that_are_not_enough_are_refused(cli: Run, tmp_path: Path) -> None:
    """An address without a secret and the other way round, for a scenario that has no script of its own."""
    secret = tmp_path / "secret"
    secret.write_text("whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0")
    ran = cli("simulate", "--webhook-url", "http://127.0.0.1:1/x")
    assert (ran.code, "file of its secret" in ran.err) == (Exit.USAGE, True)
    ran = cli("simulate", "--webhook-secret-file", secret)
    assert (ran.code, "its address" in ran.err) == (Exit.USAGE, True)


def test_webhooks_go_where_the_options_say(tmp_path: Path) -> None:
    """Address and secret go before the scenario's; ``/_sim/webhooks`` shows each try; APIs without webhooks are named."""
    secret = tmp_path / "secret"
    secret.write_text("whsec_YmF0Y2hmZXJyeS1yZWhlYXJzYWwta2V5LTI0\n")
    process, told = started(
        "--speed", "3600", "--webhook-url", "http://127.0.0.1:1/hook", "--webhook-secret-file", str(secret)
    )
    try:
        assert told["surfaces"] == ["openai", "azure", "anthropic", "gemini", "mistral"]
        assert told["not_played"] == {"anthropic": ["webhooks"], "mistral": ["webhooks"]}
        assert told["webhooks_to"] == "http://127.0.0.1:1"
        with httpx.Client(
            base_url=told["base_url"], headers={"authorization": f"Bearer {DEFAULT_KEY}"}, trust_env=False
        ) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
            files = {"file": ("in.jsonl", json.dumps(line).encode() + b"\n")}
            file = http.post("/files", files=files, data={"purpose": "batch"}).json()["id"]
            wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = http.post("/batches", json=wanted).json()["id"]
            deadline = time.monotonic() + 20
            while not (shown := http.get(f"{told['admin_url']}/webhooks").json())["deliveries"]:
                assert time.monotonic() < deadline, shown
                time.sleep(0.02)
        assert shown["to"] == "http://127.0.0.1:1"
        first = shown["deliveries"][0]
        assert (first["batch_id"], first["type"], first["status"]) == (batch, "batch.completed", 0)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


def started(*arguments: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """The simulator as a process, and what it said when it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "batchferry", "simulate", "--port", "0", "--json", *arguments], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_a_scenario_is_played_by_name() -> None:
    """Its faults are in force from the first call on: the first create answers 502 although it worked."""
    process, told = started("--scenario", "create_error_but_done")
    try:
        with httpx.Client(
            base_url=told["base_url"], headers={"authorization": f"Bearer {DEFAULT_KEY}"}, trust_env=False
        ) as http:
            line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}
            files = {"file": ("in.jsonl", json.dumps(line).encode() + b"\n")}
            file = http.post("/files", files=files, data={"purpose": "batch"}).json()["id"]
            wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            assert http.post("/batches", json=wanted).status_code == 502
            assert len(http.get("/batches").json()["data"]) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()
