"""The contract of ``ports.BatchProvider``: the same claims for every provider, driven as the engine drives it.

What one provider cannot do, or does otherwise, stands in a table beside the claim, with its reason; what only one has
is tested in a file of its own. Some claims hold for servers of somebody else's too: these parameters are long.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from adapter_kit import (
    AIBRIX,
    ALPHABET,
    FILE_LIFE_S,
    HOUR_S,
    KEY,
    LEDGER,
    LITELLM,
    PORTS,
    Berth,
    Books,
    Lines,
    Port,
    SimBerth,
    TrueBerth,
    make_provider,
    moored,
    told,
)
from independent_kit import LITELLM_KEY, running_aibrix, running_litellm

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.ids import MAX_WIRE_ID_CHARS, FileId, ProviderBatchId, parse_batch_file_name
from batchferry.domain.provider import (
    BatchSnapshot,
    CallFailed,
    CallFailure,
    FilePage,
    FileRole,
    ListedFile,
    ProviderStatus,
)
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.simulator import (
    BatchRule,
    CallName,
    FaultKind,
    FaultRule,
    JobError,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    body_digest,
)

TIMEOUT_S = 20.0
WHATEVER = "What is my balance?"

every_port = pytest.mark.parametrize("port", PORTS, ids=lambda port: port.name)
OWN_WAYS = [port for port in PORTS if port.family != "openai" or port.name in {"openai", "azure", "azure-legacy"}]
every_adapter = pytest.mark.parametrize("port", OWN_WAYS, ids=lambda port: port.name)
"""Compatible profiles are OpenAI's adapter with other settings: they need not repeat what no setting touches."""
adapters_with_files = pytest.mark.parametrize(
    "port", [port for port in OWN_WAYS if port.family != "anthropic"], ids=lambda port: port.name
)
"""Rows and results of Message Batches are no files: nothing is uploaded, and nothing but the batch can be listed."""

_LONG = [pytest.mark.long, pytest.mark.timeout(900)]
SERVERS = [
    *(pytest.param(port, id=port.name) for port in PORTS),
    pytest.param(AIBRIX, id=AIBRIX.name, marks=_LONG),
    pytest.param(LITELLM, id=LITELLM.name, marks=_LONG),
]
every_server = pytest.mark.parametrize("berth", SERVERS, indirect=True)


@pytest.fixture(scope="module")
def aibrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of AIBrix's batch server."""
    with running_aibrix(tmp_path_factory.mktemp("aibrix")) as address:
        yield address


@pytest.fixture(scope="module")
def litellm(aibrix: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a LiteLLM gateway in front of it."""
    with running_litellm(tmp_path_factory.mktemp("litellm"), aibrix) as address:
        yield address


_TLS = httpx.create_ssl_context()


@pytest.fixture(autouse=True)
def _one_trust_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of accounts are made here and none speaks TLS: the machine's certificates are read once."""
    monkeypatch.setattr(httpx, "create_ssl_context", lambda: _TLS)


@pytest.fixture
async def berth(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Berth]:
    """An account at a server: our simulator, or a real one."""
    port: Port = request.param
    if port is AIBRIX or port is LITELLM:
        own_key = {"api_key": LITELLM_KEY} if port is LITELLM else {}
        address = request.getfixturevalue("litellm" if port is LITELLM else "aibrix")
        made = TrueBerth(port, address, tmp_path, **own_key)
        yield made
        await made.close()
        return
    async with moored(port, tmp_path) as moored_berth:
        yield moored_berth


# ------------------------------------------------------------------------------------------- the whole way


@every_server
async def test_the_whole_way_of_a_batch(berth: Berth) -> None:
    """Made, looked at, listed, ended, fetched and deleted; every row has its line, files are 0600 and named by us."""
    cargo, batch = await berth.sent([f"row {row}" for row in range(30)])
    assert batch.status in {ProviderStatus.VALIDATING, ProviderStatus.IN_PROGRESS}
    assert batch.created_at is not None
    assert abs(batch.created_at - berth.clock.now()) < timedelta(seconds=60)
    assert batch.input_file_id == cargo.file_id
    assert [one.provider_batch_id for one in await berth.recognised(cargo)] == [batch.provider_batch_id]
    done = await berth.ended(batch)
    assert (done.status, done.counts.total) == (ProviderStatus.COMPLETED, 30)
    assert done.ended_at is not None
    assert done.ended_at >= batch.created_at
    books = Books(cargo, await berth.lines(done))
    assert books.classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)
    assert books.doubled == books.foreign == []
    for line in books.by_id.values():
        assert isinstance(json.loads(line.body or b""), dict)
        assert line.usage is not None
        assert line.usage.input_tokens > 0
    assert done.output_file_id is not None
    file = await berth.fetched(done.output_file_id)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for file_id in (done.output_file_id, done.error_file_id, cargo.file_id):
        if file_id is not None:
            assert await berth.provider.delete_file(file_id) is None
            assert await berth.provider.delete_file(file_id) is None  # gone is gone
    again = await berth.provider.download(done.output_file_id, berth.folder / "gone")
    assert isinstance(again, CallFailed)
    assert again.kind is CallFailure.NOT_FOUND
    assert not (berth.folder / "gone").exists()


@every_server
async def test_the_list_is_newest_first_and_ends(berth: Berth) -> None:
    """Pages of two chained by their cursors show each batch once, the newest first, and come to an end."""
    made = []
    for number in range(5):
        made.append((await berth.sent([f"list {number}"]))[1].provider_batch_id)
        if isinstance(berth, SimBerth):
            berth.hand.advance(1)
    found = await berth.listed(berth.with_small_pages())
    ids = [one.provider_batch_id for one in found]
    assert len(ids) == len(set(ids))
    assert [one for one in ids if one in made] == made[::-1] or not isinstance(berth, SimBerth)
    assert set(made) <= set(ids)
    times = [one.created_at for one in found if one.created_at is not None]
    assert len(times) == len(found)
    assert times == sorted(times, reverse=True)


@every_server
async def test_wire_ids_come_back_as_they_went(berth: Berth) -> None:
    """Ids of the greatest length with every character that may stand in one are on the lines that come back."""
    length = MAX_WIRE_ID_CHARS
    ids = [ALPHABET[:length], ALPHABET[-length:], "-" * (length - 1) + "0", "0" * length, "Z"]
    cargo, batch = await berth.sent([f"row {row}" for row in range(len(ids))], ids)
    books = Books(cargo, await berth.lines(await berth.ended(batch)))
    assert books.classes == dict.fromkeys(ids, RowClass.SUCCEEDED)
    assert not books.foreign


LATE_CANCEL = {
    "anthropic": "a batch that has ended is shown as it is",
}
NOTHING_OF_A_CANCELLED = {
    "gemini": "a job that does not come to its end has no results",
}


@every_server
async def test_cancelling(berth: Berth) -> None:
    """A running batch is cancelled, asking twice is harmless, what was done is kept, and after the end it is too late."""
    is_true = isinstance(berth, TrueBerth)
    count = 120 if is_true else 600
    cargo, batch = await berth.sent([f"wait {1 if is_true else 0} {row}" for row in range(count)])
    for _ in range(300):
        if (await berth.seen(batch)).status is ProviderStatus.IN_PROGRESS:
            break
        await berth.clock.sleep(0.2 if is_true else 5)
    await berth.clock.sleep(0.2 if is_true else 10)
    for _ in range(2):
        got = await berth.provider.cancel(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot) or got.kind is CallFailure.CONFLICT, got
        if isinstance(got, BatchSnapshot):
            assert got.status in {ProviderStatus.CANCELLING, ProviderStatus.CANCELLED}
    done = await berth.ended(batch)
    assert done.status is ProviderStatus.CANCELLED
    books = Books(cargo, await berth.lines(done))
    ran = sum(one is RowClass.SUCCEEDED for one in books.classes.values())
    assert set(books.classes.values()) <= {RowClass.SUCCEEDED, RowClass.CANCELLED, RowClass.MISSING}
    assert ran < count
    if not is_true:
        assert (ran == 0) is (berth.port.family in NOTHING_OF_A_CANCELLED)
        assert done.counts.completed == ran
    late = await berth.provider.cancel(batch.provider_batch_id)
    if isinstance(late, BatchSnapshot):
        assert late.status is ProviderStatus.CANCELLED
    else:
        assert late.kind is CallFailure.CONFLICT


@every_adapter
async def test_too_late_to_cancel(port: Port, tmp_path: Path) -> None:
    """A completed batch stays completed: a conflict, or the batch as it is."""
    async with moored(port, tmp_path) as berth:
        _, batch = await berth.sent([WHATEVER])
        await berth.ended(batch)
        late = await berth.provider.cancel(batch.provider_batch_id)
        if port.family in LATE_CANCEL:
            assert isinstance(late, BatchSnapshot)
            assert late.status is ProviderStatus.COMPLETED
        else:
            assert isinstance(late, CallFailed)
            assert late.kind is CallFailure.CONFLICT
        assert (await berth.seen(batch)).status is ProviderStatus.COMPLETED


@every_server
async def test_what_is_not_there_is_told_apart(berth: Berth) -> None:
    """A batch of a deleted or invented id is not found, whatever is asked of it."""
    unknown = ProviderBatchId(
        {"gemini": "batches/" + "a" * 24, "anthropic": "msgbatch_" + "0" * 24}.get(
            berth.port.family, "00000000-0000-4000-8000-000000000000"
        )
    )
    for got in (await berth.provider.retrieve(unknown), await berth.provider.cancel(unknown)):
        assert isinstance(got, CallFailed)
        assert got.kind is CallFailure.NOT_FOUND, got.summary


@adapters_with_files
async def test_files_are_listed_by_the_names_we_gave(port: Port, tmp_path: Path) -> None:
    """Small pages give each input file once, newest first, and its name says whose it is; results are told from them."""
    async with moored(port, tmp_path) as berth:
        cargo, batch = await berth.sent([WHATEVER])
        done = await berth.ended(batch)
        made = [cargo]
        for _ in range(4):
            berth.hand.advance(1)
            made.append(await berth.loaded(berth.cargo([WHATEVER])))
        small = berth.with_small_pages()

        async def every(role: FileRole) -> list[ListedFile]:
            found: list[ListedFile] = []
            cursor = None
            for _ in range(20):
                page = await small.list_files(role, cursor)
                assert isinstance(page, FilePage), page
                found += page.files
                cursor = page.next_cursor
                if cursor is None:
                    return found
            raise AssertionError("a list without an end")

        inputs = await every(FileRole.INPUT)
        assert [file.file_id for file in inputs] == [one.file_id for one in reversed(made)]
        assert [parse_batch_file_name(file.name) for file in inputs] == [
            (LEDGER, one.batch_id) for one in reversed(made)
        ]
        assert all(file.created_at is not None and file.size_bytes > 0 for file in inputs)
        outputs = {file.file_id for file in await every(FileRole.OUTPUT)}
        assert done.output_file_id in outputs
        assert not outputs & {one.file_id for one in made}
        assert made[1].file_id is not None
        assert await small.delete_file(made[1].file_id) is None
        assert made[1].file_id not in {file.file_id for file in await every(FileRole.INPUT)}


# ------------------------------------------------------------------------------------------ how rows end


class End(NamedTuple):
    """An outcome of the simulator, and what it is to us."""

    outcome: Outcome
    row_class: RowClass
    flags: tuple[RowFlag, ...] = ()
    status: int = 500
    code: str | None = None
    lane: str = "both"

    @property
    def label(self) -> str:
        """Names it in the tables."""
        if self.outcome is not Outcome.HTTP_ERROR:
            return self.outcome.value
        return f"{self.status} {self.code}" if self.code else str(self.status)


_HTTP = Outcome.HTTP_ERROR
ENDS = (
    End(Outcome.SUCCESS, RowClass.SUCCEEDED),
    End(Outcome.TRUNCATED, RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
    End(Outcome.REFUSAL, RowClass.SUCCEEDED, (RowFlag.REFUSED,)),
    End(Outcome.TOOL_CALL, RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
    End(Outcome.LINE_SEPARATOR, RowClass.SUCCEEDED),
    End(Outcome.NUL, RowClass.SUCCEEDED),
    End(Outcome.INVALID_UTF8, RowClass.SUCCEEDED),
    End(Outcome.HUGE, RowClass.SUCCEEDED),
    End(Outcome.FILTERED, RowClass.CONTENT_FILTERED, (RowFlag.FILTERED, RowFlag.EMPTY)),
    End(Outcome.CONTENT_FILTER, RowClass.CONTENT_FILTERED),
    End(Outcome.CONTEXT_LENGTH, RowClass.TOO_LONG),
    End(_HTTP, RowClass.INVALID_REQUEST, status=400),
    End(_HTTP, RowClass.INVALID_REQUEST, status=404),
    End(_HTTP, RowClass.INVALID_REQUEST, status=409),
    End(_HTTP, RowClass.INVALID_REQUEST, status=413),
    End(_HTTP, RowClass.INVALID_REQUEST, status=422),
    End(_HTTP, RowClass.MODEL_UNAVAILABLE, status=404, code="model_not_found"),
    End(_HTTP, RowClass.ACCOUNT, status=401),
    End(_HTTP, RowClass.ACCOUNT, status=403),
    End(_HTTP, RowClass.ACCOUNT, status=429, code="insufficient_quota"),
    End(_HTTP, RowClass.TRANSIENT, status=408),
    End(_HTTP, RowClass.TRANSIENT, status=429),
    End(_HTTP, RowClass.TRANSIENT, status=500),
    End(_HTTP, RowClass.TRANSIENT, status=502),
    End(_HTTP, RowClass.TRANSIENT, status=503),
    End(_HTTP, RowClass.TRANSIENT, status=504),
    End(_HTTP, RowClass.TRANSIENT, status=529),
    End(Outcome.TIMEOUT, RowClass.TRANSIENT),
    End(Outcome.STATUS_ZERO, RowClass.TRANSIENT),
    End(Outcome.EMPTY_BODY, RowClass.TRANSIENT),
    End(Outcome.EXPIRED, RowClass.EXPIRED),
    End(Outcome.UNREADABLE, RowClass.UNREADABLE),
    End(Outcome.MISSING, RowClass.MISSING),
    End(Outcome.DUPLICATE, RowClass.SUCCEEDED),
    End(Outcome.FOREIGN, RowClass.SUCCEEDED),
)
OTHER_ENDS: dict[tuple[str, str], tuple[RowClass, tuple[RowFlag, ...], str]] = {
    ("mistral", "refusal"): (RowClass.SUCCEEDED, (), "no member says it: a refusal is a text like any other"),
    ("gemini", "refusal"): (RowClass.SUCCEEDED, (), "no member says it: a refusal is a text like any other"),
    ("anthropic", "filtered"): (
        RowClass.SUCCEEDED,
        (RowFlag.REFUSED, RowFlag.EMPTY),
        "a stopped answer is a message with the stop reason refusal",
    ),
    ("anthropic", "408"): (
        RowClass.INVALID_REQUEST,
        (),
        "a row has a type and no status, and there is no type for 408",
    ),
    ("anthropic", "409"): (RowClass.TRANSIENT, (), "conflict_error is about the moment"),
    ("anthropic", "413"): (RowClass.TOO_LONG, (), "request_too_large is about the row's length"),
    ("gemini", "409"): (RowClass.TRANSIENT, (), "ABORTED is about the moment"),
    ("gemini", "expired"): (RowClass.TRANSIENT, (), "no row expires alone: DEADLINE_EXCEEDED is a timeout"),
}
"""By family and end: class, flags and why."""


def wanted_end(port: Port, end: End) -> tuple[RowClass, tuple[RowFlag, ...]]:
    """How this row ends at this provider."""
    other = OTHER_ENDS.get((port.family, end.label))
    return (end.row_class, end.flags) if other is None else other[:2]


def scripted(ends: tuple[End, ...]) -> Scenario:
    """Rows whose text ends in ``end N.`` end as the N-th."""
    return Scenario(
        rows=tuple(
            RowRule(
                match=RowMatch(body_contains=f'end {number}."'),
                outcome=end.outcome,
                status=end.status,
                code=end.code,
                size_bytes=200_000,
            )
            for number, end in enumerate(ends)
        )
    )


@every_port
async def test_every_end_of_a_row_has_its_class(port: Port, tmp_path: Path) -> None:
    """Each way in which a row can end is the same class, with the same flags, at every provider that can say it."""
    async with moored(port, tmp_path, scripted(ENDS)) as berth:
        cargo, batch = await berth.sent([f"end {number}." for number in range(len(ENDS))])
        done = await berth.ended(batch)
        assert done.status is ProviderStatus.COMPLETED
        books = Books(cargo, await berth.lines(done))
        found, wanted = {}, {}
        for wire_id, end in zip(cargo.ids, ENDS, strict=True):
            line = books.by_id.get(wire_id)
            found[end.label] = (books.classes[wire_id], () if line is None else line.flags)
            wanted[end.label] = wanted_end(port, end)
        assert found == wanted
        labels = dict(zip((end.label for end in ENDS), cargo.ids, strict=True))
        assert books.doubled == [labels["duplicate"]]
        assert len(books.foreign) == 1
        assert [line.wire_id for line in books.unreadable] == [labels["unreadable"]]
        text = books.by_id[labels["line_separator"]].body or b""
        assert "\u2028".encode() in text
        assert "\u2029".encode() in text
        assert b"\\u0000" in (books.by_id[labels["nul"]].body or b"")
        for label in ("nul", "line_separator", "invalid_utf8", "huge"):
            json.loads(books.by_id[labels[label]].body or b"")


SYNC_ENDS = tuple(
    end
    for end in ENDS
    if end.outcome not in {Outcome.EXPIRED, Outcome.UNREADABLE, Outcome.MISSING, Outcome.DUPLICATE, Outcome.FOREIGN}
)
"""What can happen to a single call."""
OTHER_SYNC_ENDS: dict[tuple[str, str], RowClass] = {
    ("anthropic", "408"): RowClass.TRANSIENT,
}
"""A single call has a status, which a row of a batch has not."""


@every_adapter
async def test_a_single_call_ends_like_a_row(port: Port, tmp_path: Path) -> None:
    """The same request at the ordinary endpoint has the class and flags that its row would have in a batch."""
    async with moored(port, tmp_path, scripted(SYNC_ENDS)) as berth:
        found, wanted = {}, {}
        for number, end in enumerate(SYNC_ENDS):
            got = await berth.provider.answer(port.endpoint, port.body(f"end {number}."), TIMEOUT_S)
            found[end.label] = (got.line.row_class, got.line.flags)
            row_class, flags = wanted_end(port, end)
            if end.label == "404":
                row_class = (
                    RowClass.MODEL_UNAVAILABLE
                )  # there is one body and one address: it is the model that is not there
            wanted[end.label] = (OTHER_SYNC_ENDS.get((port.family, end.label), row_class), flags)
            assert got.line.wire_id == ""
            if got.failure is not None:
                assert got.failure.call == "answer"
        assert found == wanted


@every_adapter
async def test_rows_arrive_unchanged(port: Port, tmp_path: Path) -> None:
    """Raw separators, quotes, NUL escapes and characters of every width arrive as they were, and each row is run once."""
    texts = ["one\u2028two\u2029three", 'say "no" \\ or not', "nul \x00 inside", "\U0001f99c ключ 我的", "a" * 70_000]
    async with moored(port, tmp_path) as berth:
        cargo, batch = await berth.sent(texts)
        books = Books(cargo, await berth.lines(await berth.ended(batch)))
        assert books.classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)
        for text in texts:
            booked = berth.simulator.bill.body_of_digest(body_digest(port.body(text)))
            assert booked.paid_runs == 1, text[:20]


# ----------------------------------------------------------------------------------- batches that end badly


EXPIRES_HALF = Scenario(batches=(BatchRule(expire_with_share=0.5),), in_flight_rows=0)
EXPIRES_EMPTY = Scenario(batches=(BatchRule(expire_with_share=0.0),), in_flight_rows=0)
ENDS_OF_A_WINDOW = {"anthropic": ProviderStatus.COMPLETED}
"""Its one word for every end is ended; that a row has expired is said by the row."""
KEEPS_RUNNING = {"azure", "azure-legacy"}
"""Profiles whose jobs run on past their window."""


def window_s(port: Port) -> float:
    """Seconds after which a batch has expired."""
    return float(port.profile.windows[0].removesuffix("h")) * HOUR_S


@every_adapter
@pytest.mark.parametrize(("script", "share"), [(EXPIRES_HALF, 0.5), (EXPIRES_EMPTY, 0.0)], ids=["half", "none"])
async def test_a_window_that_closes(port: Port, script: Scenario, share: float, tmp_path: Path) -> None:
    """What was done by then is kept and the rest has expired; a job that keeps running is ours to cancel."""
    async with moored(port, tmp_path, script) as berth:
        cargo, batch = await berth.sent([f"row {row}" for row in range(40)])
        late = await berth.after(batch, window_s(port) + 60)
        rest = RowClass.EXPIRED
        if port.name in KEEPS_RUNNING:
            assert late.status is ProviderStatus.IN_PROGRESS
            assert isinstance(await berth.provider.cancel(batch.provider_batch_id), BatchSnapshot)
            late, rest = await berth.ended(batch), RowClass.CANCELLED
            assert late.status is ProviderStatus.CANCELLED
        else:
            assert late.status is ENDS_OF_A_WINDOW.get(port.family, ProviderStatus.EXPIRED)
        counts = list(Books(cargo, await berth.lines(late)).classes.values())
        if port.family == "gemini":  # after its 48 hours a job has no results at all
            assert counts == [RowClass.MISSING] * 40
            return
        ran = counts.count(RowClass.SUCCEEDED)
        assert counts.count(rest) == 40 - ran
        assert abs(ran - 40 * share) <= 1


FAILED = {
    "token_limit_exceeded": BatchErrorKind.TOKEN_LIMIT,
    "model_not_found": BatchErrorKind.MODEL,
    "some_new_code": BatchErrorKind.UNKNOWN,
}


@adapters_with_files
@pytest.mark.parametrize(("code", "kind"), FAILED.items())
async def test_a_batch_refused_as_a_whole_says_why(port: Port, code: str, kind: BatchErrorKind, tmp_path: Path) -> None:
    """Its end is failed, and the entry is about the quota, the model, or unknown: it never blames rows at random."""
    messages = {
        "token_limit_exceeded": "Enqueued token limit reached for this model.",
        "model_not_found": "The model does not exist or is not supported in the Batch API.",
    }
    entry = JobError(code=code, message=messages.get(code, "Something odd."))
    async with moored(port, tmp_path, Scenario(batches=(BatchRule(fail_with=(entry,)),))) as berth:
        cargo, batch = await berth.sent([WHATEVER])
        failed = await berth.ended(batch)
        assert failed.status is ProviderStatus.FAILED
        assert [berth.provider.classify_batch_error(error) for error in failed.errors] == [kind]
        assert Books(cargo, await berth.lines(failed)).classes == {cargo.ids[0]: RowClass.MISSING}


# --------------------------------------------------------------------------------------- calls that fail


Call = Callable[[], Awaitable[object]]


async def every_call(berth: SimBerth) -> dict[CallName, Call]:
    """Each call of the port on things that are there."""
    provider = berth.provider
    cargo, ended = await berth.sent(["ended"])
    done = await berth.ended(ended)
    loaded = await berth.loaded(berth.cargo(["to be made"]))
    _, running = await berth.sent(["running"])
    assert done.output_file_id is not None
    results: FileId = done.output_file_id

    async def answer() -> object:
        got = await provider.answer(berth.port.endpoint, berth.port.body(WHATEVER), TIMEOUT_S)
        return got if got.failure is None else got.failure

    calls: dict[CallName, Call] = {
        CallName.UPLOAD: lambda: provider.upload(Lines(cargo.data), f"{LEDGER}-{cargo.batch_id}.jsonl", FILE_LIFE_S),
        CallName.CREATE: lambda: berth.ask(loaded),
        CallName.RETRIEVE: lambda: provider.retrieve(running.provider_batch_id),
        CallName.LIST: provider.list_batches,
        CallName.FILE_LIST: lambda: provider.list_files(FileRole.INPUT),
        CallName.CANCEL: lambda: provider.cancel(running.provider_batch_id),
        CallName.CONTENT: lambda: provider.download(results, berth.folder / "failed"),
        CallName.DELETE: lambda: provider.delete_file(results),
        CallName.SYNC: answer,
    }
    if provider.is_inline:
        del calls[CallName.UPLOAD], calls[CallName.FILE_LIST]
    return calls


async def left_in(folder: Path) -> set[str]:
    """Names of the files there."""
    return await asyncio.to_thread(lambda: {path.name for path in folder.iterdir()})


async def met(berth: SimBerth, calls: dict[CallName, Call], **fault: Any) -> dict[CallName, object]:
    """How each call ends under this fault, which it meets at every try."""
    found = {}
    for name, call in calls.items():
        number = berth.simulator.faults.put(FaultRule(call=name, **fault))
        found[name] = told(await call())
        berth.simulator.faults.take_away(number)
    assert not any("failed" in name for name in await left_in(berth.folder)), "a failed download leaves nothing"
    return found


REFUSED = {
    401: (CallFailure.ACCOUNT, True),
    403: (CallFailure.ACCOUNT, True),
    429: (CallFailure.THROTTLED, True),
    500: (CallFailure.UNAVAILABLE, False),
    503: (CallFailure.UNAVAILABLE, False),
    529: (CallFailure.UNAVAILABLE, False),
}
UNSURE = (CallFailure.UNANSWERED, False)
OTHER_REFUSALS: dict[tuple[str, CallName, int], tuple[tuple[CallFailure, bool], str]] = {
    ("litellm", CallName.CREATE, 429): (UNSURE, "the gateway repeats creates by itself: its last try was refused"),
}


@every_port
async def test_refused_calls_are_values(port: Port, tmp_path: Path) -> None:
    """On every call 401 and 403 hold the account, 429 is about the pace, and 5xx of a create leave it unanswered."""
    async with moored(port, tmp_path) as berth:
        calls = await every_call(berth)
        for status, usual in REFUSED.items():
            wanted = dict.fromkeys(calls, usual)
            if status >= 500:
                wanted[CallName.CREATE] = UNSURE
            for (name, call, of), (other, _) in OTHER_REFUSALS.items():
                if (name, of) == (port.name, status):
                    wanted[call] = other
            assert await met(berth, calls, status=status) == wanted, status
        assert berth.simulator.faults.calls[CallName.CREATE] == 2 + len(REFUSED), "a create is never repeated"


@every_adapter
async def test_pages_of_gateways_prove_nothing(port: Port, tmp_path: Path) -> None:
    """A web page with a refusal status makes no create definite, and its 404 makes nothing gone."""
    async with moored(port, tmp_path) as berth:
        calls = await every_call(berth)
        for status in (400, 403, 404, 429, 502):
            found = await met(berth, calls, status=status, body="<html>no</html>")
            assert found[CallName.CREATE] == UNSURE, status
            assert all(one is not None for one in found.values()), status
            assert not any(isinstance(one, tuple) and one[1] for one in found.values()), status
            if status == 404:
                gone = {name for name, one in found.items() if one == (CallFailure.NOT_FOUND, False)}
                assert not gone & {CallName.RETRIEVE, CallName.DELETE, CallName.CONTENT, CallName.CANCEL}


@every_adapter
@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.CUT])
async def test_broken_connections_are_values(port: Port, kind: FaultKind, tmp_path: Path) -> None:
    """A connection that ends too early: what was asked once is unanswered, everything else unavailable."""
    async with moored(port, tmp_path) as berth:
        calls = await every_call(berth)
        if kind is FaultKind.CUT:
            del calls[CallName.DELETE]  # some answer it without a body, which cannot be cut
        wanted = dict.fromkeys(calls, (CallFailure.UNAVAILABLE, False))
        wanted |= {CallName.CREATE: UNSURE, CallName.SYNC: UNSURE}
        assert await met(berth, calls, kind=kind) == wanted
        assert berth.simulator.faults.calls[CallName.CREATE] == 3, "a create is never repeated"
        assert berth.simulator.faults.calls[CallName.SYNC] == 1, "nor is a single call"


@every_adapter
async def test_where_nobody_listens_nothing_was_done(port: Port, tmp_path: Path) -> None:
    """Without a connection a create and a single call surely did not happen."""
    async with moored(port, tmp_path) as berth:
        nowhere = make_provider(port, "http://127.0.0.1:9/v1", berth.time)
        cargo = await berth.loaded(berth.cargo([WHATEVER]))
        berth.provider, here = nowhere, berth.provider
        got = await berth.ask(cargo)
        berth.provider = here
        answered = await nowhere.answer(port.endpoint, port.body(WHATEVER), TIMEOUT_S)
        await nowhere.close()
        assert told(got) == told(answered.failure) == (CallFailure.UNAVAILABLE, True)
        assert not answered.may_have_run


@every_adapter
async def test_hiccups_are_bridged(port: Port, tmp_path: Path) -> None:
    """Dropped, throttled and refused tries of what may be repeated are repeated from zero, with the asked-for pause."""
    async with moored(port, tmp_path) as berth:
        faults = berth.simulator.faults
        for rule in (
            FaultRule(call=CallName.UPLOAD, kind=FaultKind.DROP, nth=1),
            FaultRule(call=CallName.UPLOAD, status=429, nth=2, retry_after_s=17),
            FaultRule(call=CallName.RETRIEVE, status=502, nth=1),
            FaultRule(call=CallName.LIST, kind=FaultKind.DROP, nth=1),
            FaultRule(call=CallName.CONTENT, kind=FaultKind.CUT, nth=1),
            FaultRule(call=CallName.CONTENT, status=503, nth=2),
        ):
            faults.put(rule)
        cargo, batch = await berth.sent([f"row {row}" for row in range(150)])
        assert (max(berth.time.sleeps, default=0) >= 17) is not berth.provider.is_inline
        assert [one.provider_batch_id for one in await berth.listed()] == [batch.provider_batch_id]
        books = Books(cargo, await berth.lines(await berth.ended(batch)))
        assert books.classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)
        assert faults.calls[CallName.CREATE] == 1
        assert faults.calls[CallName.CONTENT] >= 3
        assert not any(name.startswith(".") for name in await left_in(tmp_path))


@every_adapter
async def test_what_is_cut_without_a_trace_is_seen_in_the_rows(port: Port, tmp_path: Path) -> None:
    """A file that ends too early although the transport is content: the last line is unreadable, the rest missing."""
    async with moored(port, tmp_path) as berth:
        cargo, batch = await berth.sent([f"row {row}" for row in range(50)])
        done = await berth.ended(batch)
        berth.simulator.faults.put(FaultRule(call=CallName.CONTENT, kind=FaultKind.SHORTEN, share=0.47))
        books = Books(cargo, await berth.lines(done))
        classes = list(books.classes.values())
        assert 10 < classes.count(RowClass.SUCCEEDED) < 40
        assert set(classes) <= {RowClass.SUCCEEDED, RowClass.MISSING, RowClass.UNREADABLE}
        assert len(books.unreadable) == 1
        whole = Books(cargo, await _again(berth, done))
        assert whole.classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)


async def _again(berth: SimBerth, done: BatchSnapshot) -> list[ResultLine | UnreadableLine]:
    berth.simulator.faults.clear()
    return await berth.lines(done)


# ------------------------------------------------------------------------------- creates and their doubts


@every_port
@pytest.mark.parametrize("kind", [FaultKind.LOSE_REPLY, FaultKind.CUT, FaultKind.ANSWER])
async def test_a_lost_reply_leaves_a_batch_that_is_recognised(port: Port, kind: FaultKind, tmp_path: Path) -> None:
    """A create that was carried out unheard is unanswered; its batch is told from others as the profile says."""
    async with moored(port, tmp_path) as berth:
        await berth.sent(["somebody else's", "of two rows"])
        berth.hand.advance(3 * HOUR_S)
        cargo = await berth.loaded(berth.cargo([f"row {row}" for row in range(7)]))
        berth.simulator.faults.put(FaultRule(call=CallName.CREATE, kind=kind, status=502, after_work=True))
        assert told(await berth.ask(cargo)) == UNSURE
        berth.simulator.faults.clear()
        assert berth.simulator.faults.calls[CallName.CREATE] == 2
        # Where rows are counted only after they have been read, a moment must pass.
        await berth.clock.sleep(60)
        (found,) = await berth.recognised(cargo)
        books = Books(cargo, await berth.lines(await berth.ended(found)))
        assert books.classes == dict.fromkeys(cargo.ids, RowClass.SUCCEEDED)


@every_adapter
async def test_a_create_that_was_not_carried_out_is_not_recognised(port: Port, tmp_path: Path) -> None:
    """A dropped create looks the same to its caller, and the list shows nothing that could be taken for it."""
    async with moored(port, tmp_path) as berth:
        await berth.sent(["somebody else's", "of two rows"])
        cargo = await berth.loaded(berth.cargo([WHATEVER]))
        berth.simulator.faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.DROP))
        assert told(await berth.ask(cargo)) == UNSURE
        assert await berth.recognised(cargo) == []


@every_adapter
async def test_a_doubled_create_shows_both(port: Port, tmp_path: Path) -> None:
    """When a gateway sends a create on twice, both batches are recognised, so that one can be cancelled."""
    async with moored(port, tmp_path) as berth:
        cargo = await berth.loaded(berth.cargo(["one", "two", "three"]))
        berth.simulator.faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.REPEAT))
        got = await berth.ask(cargo)
        assert isinstance(got, BatchSnapshot)
        found = {one.provider_batch_id for one in await berth.recognised(cargo)}
        assert len(found) == 2
        assert got.provider_batch_id in found


@every_adapter
async def test_a_fresh_batch_that_is_not_seen_yet(port: Port, tmp_path: Path) -> None:
    """A 404 in the first seconds is a value that says not found; then the batch is there."""
    async with moored(port, tmp_path, Scenario(retrieve_gap_s=30)) as berth:
        _, batch = await berth.sent([WHATEVER])
        early = await berth.provider.retrieve(batch.provider_batch_id)
        assert isinstance(early, CallFailed)
        assert early.kind is CallFailure.NOT_FOUND
        assert (await berth.after(batch, 31)).provider_batch_id == batch.provider_batch_id


@adapters_with_files
@pytest.mark.parametrize("unknown_file", ["reject", "reject_404"])
async def test_a_file_that_is_not_seen_yet(port: Port, unknown_file: str, tmp_path: Path) -> None:
    """A create that comes too early is not ready and definitely not made; so is one whose file has been deleted."""
    script = Scenario.model_validate({"create_gap": 1, "unknown_file": unknown_file})
    async with moored(port, tmp_path, script) as berth:
        cargo = await berth.loaded(berth.cargo([WHATEVER]))
        assert told(await berth.ask(cargo)) == (CallFailure.NOT_READY, True)
        assert isinstance(await berth.ask(cargo), BatchSnapshot)
        other = await berth.loaded(berth.cargo([WHATEVER]))
        assert other.file_id is not None
        assert await berth.provider.delete_file(other.file_id) is None
        assert told(await berth.ask(other)) == (CallFailure.NOT_READY, True)


# ------------------------------------------------------------------------------------------- single calls


@every_adapter
async def test_single_calls(port: Port, tmp_path: Path) -> None:
    """A success, a limit with the time to come back, a refusal for what the row says: each with its failure, sent once."""
    rows = (
        RowRule(match=RowMatch(body_contains="wrong"), outcome=Outcome.HTTP_ERROR, status=400),
        RowRule(match=RowMatch(body_contains="busy"), outcome=Outcome.HTTP_ERROR, status=429, retry_after_s=7),
    )
    async with moored(port, tmp_path, Scenario(rows=rows)) as berth:

        async def ask(text: str) -> Any:
            return await berth.provider.answer(port.endpoint, port.body(text), TIMEOUT_S)

        good, wrong, busy = await ask("good"), await ask("wrong"), await ask("busy")
        assert (good.failure, good.line.row_class, good.may_have_run) == (None, RowClass.SUCCEEDED, False)
        assert good.line.usage is not None
        assert isinstance(json.loads(good.line.body), dict)
        assert told(wrong.failure) == (CallFailure.REJECTED, True)
        assert wrong.line.row_class is RowClass.INVALID_REQUEST
        assert told(busy.failure) == (CallFailure.THROTTLED, True)
        assert (busy.line.row_class, busy.hints.retry_after_s) == (RowClass.TRANSIENT, 7.0)
        assert berth.simulator.faults.calls[CallName.SYNC] == 3
        assert berth.time.sleeps == []


@every_adapter
async def test_a_single_call_that_takes_too_long(port: Port, tmp_path: Path) -> None:
    """At the end of its time it is unanswered and may have run, whether its reply was late or lost."""
    async with moored(port, tmp_path) as berth:
        faults = berth.simulator.faults
        number = faults.put(FaultRule(call=CallName.SYNC, kind=FaultKind.GATE))
        held = await berth.provider.answer(port.endpoint, port.body("late"), 0.15)
        faults.take_away(number)
        faults.put(FaultRule(call=CallName.SYNC, kind=FaultKind.LOSE_REPLY))
        lost = await berth.provider.answer(port.endpoint, port.body("lost"), TIMEOUT_S)
        for got in (held, lost):
            assert told(got.failure) == UNSURE
            assert got.may_have_run
            assert got.line.row_class is RowClass.TRANSIENT
        assert faults.calls[CallName.SYNC] == 2


CHECKED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "anthropic": (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stream": True}, "stream"),
        ({"store": True}, "store"),
    ),
}
"""By family: members of a request that a batch refuses. The others say so themselves, before a batch begins."""


@every_adapter
async def test_requests_are_checked_before_they_are_sent(port: Port, tmp_path: Path) -> None:
    """A request that can go passes; one that a batch would refuse hours later is named by its member, with the remedy."""
    async with moored(port, tmp_path) as berth:
        good = port.body(WHATEVER)
        assert berth.provider.check_request(port.endpoint, good) is None
        for change, member in CHECKED.get(port.family, ()):
            bad = json.dumps(json.loads(good) | change).encode()
            found = berth.provider.check_request(port.endpoint, bad)
            assert found is not None
            assert found[0] == member
            assert len(found[1]) > 10


# ------------------------------------------------------------------------------- the account as a whole


@every_port
async def test_a_wrong_key_holds_the_account(port: Port, tmp_path: Path) -> None:
    """Whatever is asked with a key that nobody knows is about the account, definitely."""
    async with moored(port, tmp_path) as berth:
        cargo = await berth.loaded(berth.cargo([WHATEVER]))
        stranger = berth.account(api_key="sk-nobody")
        berth.provider, own = stranger, berth.provider
        calls = [
            await berth.ask(cargo),
            await stranger.list_batches(),
            (await stranger.answer(port.endpoint, port.body(WHATEVER), TIMEOUT_S)).failure,
        ]
        if not stranger.is_inline:
            calls.append(await berth.load(berth.cargo([WHATEVER])))
        berth.provider = own
        await stranger.close()
        assert [told(one) for one in calls] == [(CallFailure.ACCOUNT, True)] * len(calls)


@every_adapter
async def test_secrets_and_payload_are_never_told(port: Port, tmp_path: Path) -> None:
    """Neither the key nor a prompt nor an answer stands in what may be logged of accounts, failures and rows."""
    prompt = "my secret question"
    rows = (RowRule(match=RowMatch(body_contains="refuse"), outcome=Outcome.CONTENT_FILTER),)
    async with moored(port, tmp_path, Scenario(rows=rows)) as berth:
        cargo, batch = await berth.sent([prompt, f"{prompt}, refuse it"])
        lines = await berth.lines(await berth.ended(batch))
        answer = await berth.provider.answer(port.endpoint, port.body(f"{prompt}, refuse it"), TIMEOUT_S)
        own: Any = berth.provider
        shown = [repr(own), repr(own.account), repr(answer), *map(repr, lines)]
        for name, call in (await every_call(berth)).items():
            for status in (400, 401, 429, 500):
                number = berth.simulator.faults.put(
                    FaultRule(call=name, status=status, message=f"The key {KEY} asked {prompt}")
                )
                got = await call()
                berth.simulator.faults.take_away(number)
                assert isinstance(got, CallFailed)
                shown += [repr(got), str(got), got.summary]
        bodies = [line.body for line in lines if isinstance(line, ResultLine) and line.body]
        assert len(bodies) == len(cargo.ids)
        for text in shown:
            assert KEY not in text
            assert prompt not in text
            assert not any(body.decode() in text for body in bodies)


@every_adapter
async def test_the_providers_clock_is_read(port: Port, tmp_path: Path) -> None:
    """Unknown before the first answer; then how far its clock is ahead, to the second to which a Date is cut."""
    async with moored(port, tmp_path, Scenario(clock_ahead_s=300)) as berth:
        assert berth.provider.clock_skew_s is None
        await berth.listed()
        assert berth.provider.clock_skew_s == pytest.approx(300, abs=1.0)


@every_adapter
async def test_closing_leaves_no_connection(port: Port, tmp_path: Path) -> None:
    """After close nothing of ours is connected to the server any more; closing twice is harmless."""
    async with moored(port, tmp_path) as berth:
        await berth.sent([WHATEVER])
        await berth.provider.answer(port.endpoint, port.body(WHATEVER), TIMEOUT_S)
        server = int(berth.simulator.origin_url.rsplit(":", 1)[1])

        def connected() -> int:
            open_ones = psutil.Process().net_connections("tcp4")
            return sum(
                bool(one.raddr) and one.raddr.port == server and one.status == "ESTABLISHED" for one in open_ones
            )

        await berth.listed()
        assert connected() > 0
        await berth.provider.close()
        for _ in range(100):
            if not connected():
                break
            await asyncio.sleep(0)
        assert connected() == 0
        await berth.provider.close()


# ------------------------------------------------------------------------ the same thousand questions for all


class Fate(NamedTuple):
    """How a question ends that has this word in it."""

    word: str
    end: End


FATES = (
    Fate("country", End(Outcome.INVALID_UTF8, RowClass.SUCCEEDED)),
    Fate("refund", End(_HTTP, RowClass.TRANSIENT, status=500)),
    Fate("exchange rate", End(Outcome.CONTENT_FILTER, RowClass.CONTENT_FILTERED)),
    Fate("PIN", End(_HTTP, RowClass.TRANSIENT, status=429)),
    Fate("passcode", End(_HTTP, RowClass.INVALID_REQUEST, status=400)),
    Fate("pending", End(Outcome.MISSING, RowClass.MISSING)),
    Fate("ATM", End(Outcome.UNREADABLE, RowClass.UNREADABLE)),
    Fate("identity", End(Outcome.CONTEXT_LENGTH, RowClass.TOO_LONG)),
    Fate("fee", End(Outcome.TRUNCATED, RowClass.SUCCEEDED, (RowFlag.TRUNCATED,))),
    Fate("Google", End(Outcome.TOOL_CALL, RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,))),
    Fate("Apple", End(Outcome.DUPLICATE, RowClass.SUCCEEDED)),
    Fate("virtual", End(Outcome.FOREIGN, RowClass.SUCCEEDED)),
    Fate("lost", End(Outcome.TIMEOUT, RowClass.TRANSIENT)),
    Fate("stolen", End(Outcome.EXPIRED, RowClass.EXPIRED)),
    Fate("declined", End(Outcome.LINE_SEPARATOR, RowClass.SUCCEEDED)),
    Fate("currency", End(Outcome.NUL, RowClass.SUCCEEDED)),
    Fate("limit", End(_HTTP, RowClass.ACCOUNT, status=403)),
    Fate("verify", End(_HTTP, RowClass.MODEL_UNAVAILABLE, status=404, code="model_not_found")),
    Fate("cash", End(Outcome.EMPTY_BODY, RowClass.TRANSIENT)),
)
"""The first word that stands in a question decides."""
BY_WORD = Scenario(
    rows=tuple(
        RowRule(
            match=RowMatch(body_contains=fate.word),
            outcome=fate.end.outcome,
            status=fate.end.status,
            code=fate.end.code,
        )
        for fate in FATES
    )
)
QUESTIONS = 1_000


@pytest.fixture(scope="module")
def questions() -> list[str]:
    """The first thousand questions of the data set that comes with the package."""
    text = resources.files("batchferry.cli").joinpath("data/banking77.csv").read_text(encoding="utf-8")
    return [row["text"] for row in csv.DictReader(io.StringIO(text, newline=""))][:QUESTIONS]


def fate_of(question: str) -> End:
    """How this question ends wherever it is asked."""
    return next((fate.end for fate in FATES if fate.word in question), End(Outcome.SUCCESS, RowClass.SUCCEEDED))


@every_port
async def test_a_thousand_questions_end_the_same_everywhere(port: Port, questions: list[str], tmp_path: Path) -> None:
    """The same questions meet the same fates at every provider, question by question, and none is run twice."""
    assert len(questions) == QUESTIONS
    async with moored(port, tmp_path, BY_WORD) as berth:
        cargo, batch = await berth.sent(questions)
        done = await berth.ended(batch)
        assert (done.status, done.counts.total) == (ProviderStatus.COMPLETED, QUESTIONS)
        books = Books(cargo, await berth.lines(done))
        found, wanted = {}, {}
        for wire_id, question in zip(cargo.ids, questions, strict=True):
            line = books.by_id.get(wire_id)
            found[question] = (books.classes[wire_id], () if line is None else line.flags)
            wanted[question] = wanted_end(port, fate_of(question))
        assert found == wanted
        fates = [fate_of(question).outcome for question in questions]
        assert all(fates.count(fate.end.outcome) > 0 for fate in FATES)
        assert len(books.doubled) == fates.count(Outcome.DUPLICATE)
        assert len(books.foreign) == fates.count(Outcome.FOREIGN)
        assert len(books.unreadable) == fates.count(Outcome.UNREADABLE)
        summary = berth.simulator.bill.summary()
        assert summary["batch_runs"] == QUESTIONS - fates.count(Outcome.EXPIRED)


def test_the_thousand_questions_meet_every_kind_of_end(questions: list[str]) -> None:
    """Each fate meets some of them, and most are answered: the comparison compares something."""
    outcomes = [fate_of(question) for question in questions]
    assert len(set(questions)) == QUESTIONS
    assert all(outcomes.count(fate.end) >= 3 for fate in FATES)
    assert sum(end.row_class is RowClass.SUCCEEDED for end in outcomes) > QUESTIONS / 2
