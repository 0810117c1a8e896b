"""The README's reader snippet, taken from the page and run against a broker."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from acceptance.readme_blocks import README
from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord


def snippet(results: str, failures: str) -> Callable[[str, str], AsyncIterator[tuple[str, str, dict[str, Any]]]]:
    """The page's function, with the test's topic names in place of the default ones."""
    text = README.read_text()
    found = re.search(r"<!-- reader snippet.*?```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code = found[1].replace('"results"', repr(results)).replace('"failures"', repr(failures))
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    return names["answers"]


@pytest.mark.broker
async def test_reader_snippet_yields_committed_outcomes(
    broker: Any, kafka: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """It yields id, ce_id and outcome of results and failures, and nothing of an aborted transaction."""
    results, failures, requests = topic_name("results"), topic_name("failures"), topic_name("requests")
    admin = await kafka.admin()
    for topic in (results, failures, requests):
        await admin.create(topic, 1, {})
    await admin.close()
    producer = kafka.partition_producer(requests, 0, topic_name("group"), topic_name("txn"))
    await producer.init()
    headers = (("ce_id", b"abc-0-1"),)
    await producer.transact(
        [
            OutRecord(results, b"k", b'{"custom_id":"good","status":"succeeded"}', headers),
            OutRecord(failures, b"k", b'{"custom_id":"bad","status":"failed"}', headers),
        ]
    )
    await producer.close()
    seen = {}
    answers = snippet(results, failures)(broker.bootstrap, topic_name("reader"))
    async for custom_id, ce_id, outcome in answers:
        seen[custom_id] = (ce_id, outcome["status"])
        if len(seen) == 2:
            break
    await answers.aclose()
    assert seen == {"good": ("abc-0-1", "succeeded"), "bad": ("abc-0-1", "failed")}
