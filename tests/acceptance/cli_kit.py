"""Running the command line in this process, as a user would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from batchferry.cli.main import call


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


def chat_line(custom_id: str, question: str = "hello", **more: object) -> bytes:
    """A provider batch line."""
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": question}], **more}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def settings_file(folder: Path, settings: Mapping[str, object]) -> Path:
    """A settings file with this content."""
    path = folder / "batchferry.yaml"
    path.write_text(yaml.safe_dump(dict(settings)))
    return path


@pytest.fixture(name="cli")
def run_cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Runs ``batchferry ...`` in an empty folder without any of the machine's own settings."""
    monkeypatch.chdir(tmp_path)
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "OPENAI_API_KEY", "OPENAI_BASE_URL", "BATCHFERRY_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = call([str(one) for one in arguments])
        told = capfd.readouterr()
        return Ran(int(code), told.out, told.err)

    return run
