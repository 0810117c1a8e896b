"""What the README shows can be copied: settings, a profile, a scenario, official clients, commands and targets."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import yaml
from readme_parts import parts, snippet
from typer.main import get_command

from acceptance.readme_blocks import README
from batchferry.cli.main import cli
from batchferry.config import Settings, load_settings
from batchferry.config.profiles import load_profile
from batchferry.simulator import DEFAULT_KEY, Simulator, SimulatorSettings, load_scenario
from batchferry.telemetry.catalogue import EVENTS, METRICS

VARIABLES = ("OPENAI", "ANTHROPIC", "GEMINI", "DOUBLEWORD", "DASHSCOPE", "ACME")
KEYS = {f"{name}_API_KEY": f"sk-{name.lower()}-0123456789-0123456789" for name in VARIABLES}
TOLD = (
    "batch_cancel_withheld", "batch_not_ours", "possibly_paid_twice", "account_unknown", "webhooks_all_refused",
    "webhooks_taken_again", "result_archived", "archive_failed", "archive_dropped", "batch_uploaded",
    "batch_downloaded", "provider_file_deleted", "webhook_process_ended", "webhook_process_failing",
)  # fmt: skip
COUNTED = (
    "possibly_paid_twice_rows", "webhooks_received", "masked_places", "waste_rows", "provider_files",
    "unknown_row_codes",
)  # fmt: skip


def loaded(text: str, folder: Path) -> Settings:
    """Settings as the page shows them, with its secrets and its profile in this folder."""
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    for name in re.findall(r"/run/secrets/([\w-]+)", text):
        (secrets / name).write_text("whsec_" + "c2VjcmV0" * 4 if "webhooks" in name else "secret-0123456789-0123456789")
    (folder / "acme.yaml").write_text(snippet("profile"))
    path = folder / "batchferry.yaml"
    text = text.replace("/run/secrets", str(secrets)).replace("profile: acme.yaml", f"profile: {folder / 'acme.yaml'}")
    path.write_text(text)
    return load_settings(path, KEYS, dotenv_path=None)


def test_every_example_of_settings_is_lawful(tmp_path: Path) -> None:
    """Each is taken as it stands; one that could not work would be refused with its faults."""
    own, routed, hooked, private = (loaded(text, tmp_path) for text in parts("settings"))
    assert own.accounts["default"].base_url == "https://api.acme.example/v1"
    assert own.accounts["default"].api_key is not None
    assert [routed.route_for(model).account for model in ("claude-x", "gemini-x", "qwen3-30b", "gpt-5", "qwen-plus")] == [
        "claude", "gemini", "hour", "openai_a", "chat",
    ]  # fmt: skip
    assert {name: account.webhook.auth for name, account in hooked.accounts.items()} == {
        "default": "standard", "gemini": "standard", "gateway": "hmac", "lan": "path",
    }  # fmt: skip
    assert private.masker() is not None


def test_the_example_of_a_profile_is_one(tmp_path: Path) -> None:
    """It is read by its path, and what it departs in reaches the account."""
    path = tmp_path / "acme.yaml"
    path.write_text(snippet("profile"))
    profile = load_profile(str(path))
    assert profile.takes_window("7d")
    assert profile.settings()["dialect"]["key_header"] == "x-acme-key"
    assert profile.is_uncertain("limits")


def test_the_example_of_a_scenario_is_one(tmp_path: Path) -> None:
    """It is taken for the APIs that it names, and all it scripts has an effect there."""
    path = tmp_path / "night.yaml"
    path.write_text(snippet("scenario"))
    scenario = load_scenario(path)
    assert not scenario.not_played().keys() & set(scenario.surfaces)


def test_the_example_of_masking_finds_what_it_says() -> None:
    """The rules of the page are those that are looked for when none is named."""
    shown = next(yaml.safe_load(text) for text in parts("settings") if "masker" in text)
    named = load_settings(None, KEYS, {"mask": {"masker": "stock", "rules": shown["mask"]["rules"]}}, dotenv_path=None)
    usual = load_settings(None, KEYS, {"mask": {"masker": "stock"}}, dotenv_path=None)
    assert repr(named.masker()) == repr(usual.masker())


async def test_official_clients_at_the_simulator() -> None:
    """The clients of the page list the batches of each API, which are none."""
    names: dict[str, object] = {}
    exec(compile(snippet("clients snippet"), str(README), "exec"), names)
    async with Simulator(SimulatorSettings()) as simulator:
        openai, anthropic, gemini, mistral = names["clients"](simulator.origin_url, DEFAULT_KEY)

        def ask() -> list[int]:
            with openai, anthropic, mistral:
                return [
                    len(list(openai.batches.list())),
                    len(list(anthropic.messages.batches.list())),
                    len(list(gemini.batches.list())),
                    mistral.batch.jobs.list().total,
                ]

        try:
            assert await asyncio.to_thread(ask) == [0, 0, 0, 0]
        finally:
            gemini.close()


def test_commands_and_targets_exist() -> None:
    """Every ``batchferry`` command with its options, and every ``make`` target, is there."""
    text = README.read_text()
    commands = get_command(cli).commands
    for command, rest in re.findall(r"batchferry ([a-z]+)\b([^`\n#|;]*)", "\n".join(_code(text))):
        assert command in commands, command
        known = {option for parameter in commands[command].params for option in parameter.opts} | {"--help"}
        assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known, (command, rest)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (README.parent / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z][a-z-]*)", "\n".join(_code(text)))) <= targets


def test_events_and_metrics_of_the_page_are_told() -> None:
    """What a reader would look for under these names is in the catalogue, and the page has no other spelling."""
    text = README.read_text()
    assert [name for name in TOLD if name not in EVENTS or f"`{name}`" not in text] == []
    assert [name for name in COUNTED if name not in METRICS or f"`{name}`" not in text] == []


def _code(text: str) -> list[str]:
    """What stands in code on the page."""
    return re.findall(r"```console\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
