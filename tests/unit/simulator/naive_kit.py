"""The clients that a user writes from the providers' guides, with the providers' official libraries.

Upload, create, poll until the status is an end, download the output file, split it into lines, read them. When the
script dies, its user starts it again. It is honest code that works on a good day; nothing in it is made worse on
purpose.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
from google import genai
from google.genai import types
from mistralai.client import Mistral
from sim_kit import CHAT, Bench, body

from batchferry.simulator import DEFAULT_KEY, ManualSimClock

POLLS_S = (*[60.0] * 60, *[900.0] * 120)
"""Virtual seconds between polls: thirty-one hours in all."""
ENDS = ("completed", "failed", "expired", "cancelled")


class Library(openai.AsyncOpenAI):
    """The official library with its own retries; the waits between them pass on the simulator's clock."""

    virtual: ManualSimClock

    def _calculate_retry_timeout(self, *args: Any, **kwargs: Any) -> float:
        self.virtual.advance(super()._calculate_retry_timeout(*args, **kwargs))
        return 0.0


@dataclass
class Tally:
    """What a naive client has in the end."""

    answers: Counter[str] = field(default_factory=Counter)
    """Lines it passed on, by custom_id."""
    died_of: list[str] = field(default_factory=list)
    """Names of the exceptions that ended it, one a run of the script."""

    def lost(self, rows: int) -> int:
        """Rows sent that it has no answer for."""
        return sum(not self.answers[name] for name in ids(rows))

    def passed_on_twice(self, rows: int) -> int:
        """Rows whose answer it passed on more than once."""
        return sum(self.answers[name] > 1 for name in ids(rows))

    def strangers(self, rows: int) -> int:
        """Answers it passed on that nobody asked for."""
        return len(self.answers.keys() - set(ids(rows)))


def ids(rows: int) -> list[str]:
    """The custom ids of so many rows."""
    return [f"r{number}" for number in range(1, rows + 1)]


def paid_twice(it: Bench, rows: int) -> int:
    """Rows on the bill more than once."""
    return sum(it.simulator.bill.paid_runs_of_body(body(f"Question {name}")) > 1 for name in ids(rows))


class NaiveClient:
    """``run`` is the script, from its first line to its last."""

    def __init__(self, it: Bench, timeout_s: float = 20.0) -> None:
        self._it = it
        self._timeout_s = timeout_s
        self.tally = Tally()

    def library(self) -> Library:
        made = Library(
            api_key=DEFAULT_KEY,
            base_url=self._it.simulator.base_url,
            timeout=self._timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),  # no certificates to load: plain HTTP
        )
        made.virtual = self._it.clock
        return made

    async def run(self, rows: int, *, starts: int = 1, cancels_after_s: float | None = None) -> Tally:
        """Start the script, and again when it died, ``starts`` times at most."""
        for start in range(starts):
            try:
                async with self.library() as client:
                    await self._script(client, rows, None if start else cancels_after_s)
            except Exception as error:  # noqa: BLE001 - whatever it dies of is what is asked
                self.tally.died_of.append(type(error).__name__)
            else:
                break
        return self.tally

    async def _script(self, client: Library, rows: int, cancels_after_s: float | None) -> None:
        content = b"".join(
            json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body(f"Question {name}")}).encode()
            + b"\n"
            for name in ids(rows)
        )
        file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        if cancels_after_s is not None:
            self._it.clock.advance(cancels_after_s)
            batch = await client.batches.cancel(batch.id)
        else:
            for pause_s in POLLS_S:
                if batch.status in ENDS:
                    break
                self._it.clock.advance(pause_s)
                batch = await client.batches.retrieve(batch.id)
        answers = await client.files.content(batch.output_file_id)  # type: ignore[arg-type] # the guide does not ask
        for line in answers.text.splitlines():
            row = json.loads(line)
            row["response"]["body"]["choices"][0]["message"]["content"]
            self.tally.answers[row["custom_id"]] += 1


# ------------------------------------------------------------------------------------- the other providers


class OtherScript:
    """One provider's script: from its first line to its last, once."""

    model: str

    def __init__(self, it: Bench, tally: Tally) -> None:
        self.it = it
        self.tally = tally

    def request(self, name: str) -> dict[str, Any]:
        """The request of a row, as its caller writes it; by this it stands on the bill."""
        return {"messages": [{"role": "user", "content": f"Question {name}"}]}

    async def run(self, rows: int) -> None:
        """Send so many rows and read their answers."""
        raise NotImplementedError

    def paid_twice(self, rows: int) -> int:
        """Rows on the bill more than once."""
        return sum(self.it.simulator.bill.paid_runs_of_body(self.request(name)) > 1 for name in ids(rows))


class AnthropicScript(OtherScript):
    """The example of Anthropic's guide on batch processing, with the library's own two retries."""

    model = "claude-haiku-4-5"

    class Library(anthropic.AsyncAnthropic):
        """The waits between retries pass on the simulator's clock."""

        virtual: ManualSimClock

        def _calculate_retry_timeout(self, *args: Any, **kwargs: Any) -> float:
            self.virtual.advance(super()._calculate_retry_timeout(*args, **kwargs))
            return 0.0

    def request(self, name: str) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": 64, **super().request(name)}

    async def run(self, rows: int) -> None:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)  # no certificates to load: plain HTTP
        async with self.Library(api_key=DEFAULT_KEY, base_url=self.it.simulator.origin_url, http_client=http) as client:
            client.virtual = self.it.clock
            batches = client.messages.batches
            batch = await batches.create(
                requests=[{"custom_id": name, "params": self.request(name)} for name in ids(rows)]
            )
            for pause_s in POLLS_S:
                if batch.processing_status == "ended":
                    break
                self.it.clock.advance(pause_s)
                batch = await batches.retrieve(batch.id)
            async for line in await batches.results(batch.id):
                if line.result.type == "succeeded":
                    self.tally.answers[line.custom_id] += 1


class GeminiScript(OtherScript):
    """The example of Gemini's guide on its Batch API."""

    model = "gemini-2.5-flash"
    ends = ("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")

    def row(self, name: str) -> dict[str, Any]:
        return {"contents": [{"role": "user", "parts": [{"text": f"Question {name}"}]}]}

    def request(self, name: str) -> dict[str, Any]:
        return {**self.row(name), "model": self.model}

    async def run(self, rows: int) -> None:
        options = types.HttpOptions(base_url=self.it.simulator.origin_url, api_version="v1beta")
        with genai.Client(api_key=DEFAULT_KEY, http_options=options, vertexai=False) as made:
            async with made.aio as client:
                content = b"".join(
                    json.dumps({"key": name, "request": self.row(name)}).encode() + b"\n" for name in ids(rows)
                )
                config = types.UploadFileConfig(display_name="rows", mime_type="application/jsonl")
                file = await client.files.upload(file=io.BytesIO(content), config=config)
                job = await client.batches.create(model=self.model, src=file.name, config={"display_name": "rows"})
                for pause_s in POLLS_S:
                    if job.state.name in self.ends:
                        break
                    self.it.clock.advance(pause_s * 2)
                    job = await client.batches.get(name=job.name)
                if job.state.name != "JOB_STATE_SUCCEEDED":
                    return
                data = await client.files.download(file=job.dest.file_name)
                for line in data.decode().splitlines():
                    row = json.loads(line)
                    if row.get("response"):
                        self.tally.answers[row["key"]] += 1


class MistralScript(OtherScript):
    """The example of Mistral's guide on batch inference."""

    model = "mistral-small-latest"

    async def run(self, rows: int) -> None:
        async with Mistral(api_key=DEFAULT_KEY, server_url=self.it.simulator.mistral_url.removesuffix("/v1")) as client:
            content = b"".join(
                json.dumps({"custom_id": name, "body": self.request(name)}).encode() + b"\n" for name in ids(rows)
            )
            file = await client.files.upload_async(
                file={"file_name": "rows.jsonl", "content": content}, purpose="batch"
            )
            job = await client.batch.jobs.create_async(input_files=[file.id], model=self.model, endpoint=CHAT)
            for pause_s in POLLS_S:
                if job.status not in {"QUEUED", "RUNNING"}:
                    break
                self.it.clock.advance(pause_s)
                job = await client.batch.jobs.get_async(job_id=job.id)
            answers = await client.files.download_async(file_id=job.output_file)
            async for line in answers.aiter_lines():
                row = json.loads(line)
                row["response"]["body"]["choices"][0]["message"]["content"]
                self.tally.answers[row["custom_id"]] += 1


OTHERS: dict[str, type[OtherScript]] = {
    "anthropic": AnthropicScript,
    "gemini": GeminiScript,
    "mistral": MistralScript,
}


async def run_other(script: OtherScript, rows: int, starts: int) -> Tally:
    """Start another provider's script, and again when it died, ``starts`` times at most."""
    for _ in range(starts):
        try:
            await script.run(rows)
        except Exception as error:  # noqa: BLE001 - whatever it dies of is what is asked
            script.tally.died_of.append(type(error).__name__)
        else:
            break
    return script.tally
