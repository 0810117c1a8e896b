"""What only OpenAI refuses: batches over the enqueued tokens, and lines that are named. The rest: test_every_adapter."""

from __future__ import annotations

from pathlib import Path

from adapter_kit import PORTS, Lines, moored

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import BatchSnapshot, ProviderStatus, UploadedFile
from batchferry.simulator import Limits, Scenario

(OPENAI,) = (port for port in PORTS if port.name == "openai")


async def test_the_enqueued_token_limit_is_told_from_bad_rows(tmp_path: Path) -> None:
    """A batch over the quota fails with an entry that blames nobody."""
    script = Scenario(limits=Limits(enqueued_tokens={OPENAI.model: 10}))
    async with moored(OPENAI, tmp_path, script) as berth:
        _, batch = await berth.sent([f"row {row}" for row in range(50)])
        failed = await berth.ended(batch)
        assert failed.status is ProviderStatus.FAILED
        assert [berth.provider.classify_batch_error(error) for error in failed.errors] == [BatchErrorKind.TOKEN_LIMIT]


async def test_bad_lines_are_named(tmp_path: Path) -> None:
    """A file with a bad line is accepted and fails; the entry names the line."""
    async with moored(OPENAI, tmp_path) as berth:
        bad = (
            berth.provider.line_head("0123456789-0-9-1") + b',"method":"GET","url":"/v1/chat/completions","body":{}}\n'
        )
        data = berth.cargo(["one", "two"]).data + bad
        file = await berth.provider.upload(Lines(data), "abcdefghjk-bad.jsonl", 1_209_600)
        assert isinstance(file, UploadedFile), file
        made = await berth.provider.create(file.file_id, OPENAI.endpoint, "24h", {}, OPENAI.model)
        assert isinstance(made, BatchSnapshot), made
        failed = await berth.ended(made)
        assert failed.status is ProviderStatus.FAILED
        kinds = {(berth.provider.classify_batch_error(error), error.line) for error in failed.errors}
        assert kinds == {(BatchErrorKind.ROW, 3)}
