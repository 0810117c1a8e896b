"""Independent batch servers as processes, and what the tests against them share.

``BATCHFERRY_AIBRIX_PYTHON`` may name a Python that has aibrix; else one is made in the cache folder, which takes a
minute and a package index. Where neither can be had the running test is skipped and says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from batchferry.domain.provider import BatchSnapshot, DownloadedFile, ProviderStatus, UploadedFile
from batchferry.domain.rows import ResultLine
from batchferry.providers.openai import OpenAIProvider

CHAT = "/v1/chat/completions"
CACHE = Path(__file__).parents[2] / ".cache"
LAUNCHER = Path(__file__).with_name("aibrix_launcher.py")
READY_S = 120.0
ENDS_S = 120.0


def python_with(module: str, *wanted: str) -> Path:
    """A Python that has the module, by the environment or made of these packages; else the test is skipped."""
    variable = f"BATCHFERRY_{module.upper()}_PYTHON"
    named = os.environ.get(variable)
    folder = CACHE / f"independent-{module}"
    python = Path(named) if named else folder / "bin" / "python"
    mark = folder / "complete"
    if named is None and not (mark.exists() and mark.read_text() == " ".join(wanted)):
        for command in (
            [sys.executable, "-m", "venv", "--clear", folder],
            [python, "-m", "pip", "install", "-q", *wanted],
        ):
            done = subprocess.run(command, capture_output=True, timeout=540, check=False)
            if done.returncode:
                pytest.skip(f"no {module} here: {' '.join(wanted)} cannot be installed")
        mark.write_text(" ".join(wanted))
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{variable} names a Python without {module}")
    return python


@contextmanager
def running(command: list[str | Path], environment: dict[str, str], folder: Path, ready_at: str) -> Iterator[None]:
    """A server as a process of ours, ready when the address answers; ended with the block."""
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | environment, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + READY_S
        while True:
            try:
                if httpx.get(ready_at, timeout=2, trust_env=False).is_success:
                    break
            except httpx.TransportError:
                pass
            if server.poll() is not None or time.monotonic() > until:
                pytest.fail(f"the server did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)


class Model(BaseHTTPRequestHandler):
    """Echoes the last message; ``refuse`` in it is answered by 400, ``wait`` after as many seconds as follow it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Say nothing."""

    def do_POST(self):
        """Answer one chat request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        status = 400 if "refuse" in text else 200
        if text.startswith("wait "):
            time.sleep(float(text.split()[1]))
        answer = (
            {"error": {"message": "refused", "type": "invalid_request_error", "param": None, "code": None}}
            if status == 400
            else {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1790000000,
                "model": body["model"],
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": f"echo {text}"}, "finish_reason": "stop"}
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_aibrix(folder: Path) -> Iterator[str]:
    """Base address of a running server, whose files lie in the folder."""
    python = python_with("aibrix", "aibrix==0.8.0")
    model = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    model.daemon_threads = True
    threading.Thread(target=model.serve_forever, daemon=True).start()
    port = free_port()
    command = [python, LAUNCHER, "--port", str(port), "--model-url", f"http://127.0.0.1:{model.server_port}/"]
    try:
        with running(
            command, {"STORAGE_LOCAL_PATH": str(folder / "store")}, folder, f"http://127.0.0.1:{port}/healthz"
        ):
            yield f"http://127.0.0.1:{port}/v1"
    finally:
        model.shutdown()
        model.server_close()


_LITELLM = """
model_list:
  - model_name: stub
    litellm_params: {{model: openai/stub, api_base: "{upstream}", api_key: sk-upstream}}
    model_info: {{mode: batch}}
files_settings:
  - {{custom_llm_provider: openai, api_base: "{upstream}", api_key: sk-upstream}}
general_settings: {{master_key: {key}}}
litellm_settings: {{telemetry: false, drop_params: false}}
"""
LITELLM_KEY = "sk-litellm"


@contextmanager
def running_litellm(folder: Path, upstream: str) -> Iterator[str]:
    """Base address of a LiteLLM gateway in front of a batch server."""
    python = python_with("litellm", "litellm[proxy]==1.108.7", "prisma==0.15.0")
    config, port = folder / "config.yaml", free_port()
    config.write_text(_LITELLM.format(upstream=upstream, key=LITELLM_KEY))
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DISABLE_ADMIN_UI": "True"}
    command = [python.with_name("litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with running([*command, "--telemetry", "False"], environment, folder, f"{address}/health/liveliness"):
        yield f"{address}/v1"


class Lines:
    """An upload source over rendered lines."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 1 << 16):
            yield self.data[start : start + (1 << 16)]


def rows_of(provider: OpenAIProvider, texts: list[str]) -> bytes:
    """A batch file of these texts; the row's number is its wire id's third part."""
    return b"".join(
        provider.line_head(f"0123456789-0-{row}-1")
        + provider.render_line(
            CHAT, json.dumps({"model": "stub", "messages": [{"role": "user", "content": text}]}).encode()
        )
        for row, text in enumerate(texts)
    )


async def submitted(
    provider: OpenAIProvider, texts: list[str], window: str = "24h", tag: str = "b-1"
) -> tuple[UploadedFile, BatchSnapshot]:
    """A file of these texts and its batch."""
    file = await provider.upload(Lines(rows_of(provider, texts)), "batchferry-test.jsonl", 1_209_600)
    assert isinstance(file, UploadedFile), file
    made = await provider.create(file.file_id, CHAT, window, {"batch_id": tag})
    assert isinstance(made, BatchSnapshot), made
    return file, made


async def until_true(what: Callable[[], Awaitable[BatchSnapshot | None]]) -> BatchSnapshot:
    """Ask until there is an answer; the server is another process, so only its answers tell how far it is."""
    until = time.monotonic() + ENDS_S
    while time.monotonic() < until:
        found = await what()
        if found is not None:
            return found
        await asyncio.sleep(0.2)
    raise AssertionError(f"not so within {ENDS_S} s")


async def ended(
    provider: OpenAIProvider, batch: BatchSnapshot, seen: set[ProviderStatus] | None = None
) -> BatchSnapshot:
    """The batch at its end; every status on the way is one that we know."""

    async def look() -> BatchSnapshot | None:
        got = await provider.retrieve(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        assert got.status is not ProviderStatus.UNKNOWN, got.raw_status
        if seen is not None:
            seen.add(got.status)
        return got if got.status.is_terminal else None

    return await until_true(look)


async def lines_of(provider: OpenAIProvider, file_id: str | None, to: Path) -> dict[int, ResultLine]:
    """The lines of a result file by row number."""
    if file_id is None:
        return {}
    saved = await provider.download(file_id, to)
    assert isinstance(saved, DownloadedFile), saved
    found: dict[int, ResultLine] = {}
    for raw in (await asyncio.to_thread(to.read_bytes)).splitlines():
        line = provider.parse_line(raw, CHAT)
        assert isinstance(line, ResultLine), line
        found[int(line.wire_id.split("-")[2])] = line
    return found
