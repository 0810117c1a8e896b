"""The calls of an account over httpx: connections, deadlines, repeats, streamed uploads and downloads.

Every call answers with a value: what was asked for, or a ``CallFailed``. Repeats follow the one table in
``providers.retries``; a create is sent once, over a connection of its own, so that neither a retry nor a stale
kept-alive connection can make two bills of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx

from batchferry import __version__
from batchferry.domain.errors import InvariantBroken
from batchferry.domain.provider import CallFailed, CallFailure, DownloadedFile
from batchferry.ports import Clock, UploadSource
from batchferry.providers import failures, http
from batchferry.providers.connection import Connection
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, read_json

_T = TypeVar("_T")

LINK_REFUSED = "link_refused"
"""Our code for a result file's address that another host refuses."""
KEEP_ALIVE_S = 5.0
"""Idle connections are closed early, before the servers and balancers on the way do it."""

BAD_ADDRESS = "bad_redirect"
"""Our code for a path, out of an answer or made of a row's model, that leads away from the account's server or API."""
_DOTS = frozenset({".", ".."})

Refuse = Callable[[Call, int, httpx.Headers, bytes, datetime, str | None], CallFailed]
"""Translates an answer other than 2xx: call, status, headers, body, now, and the input file of a create."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A try that failed, with the server's ``x-should-retry``."""

    failure: CallFailed
    should_retry: bool | None = None


class Answer(NamedTuple):
    """A whole 2xx answer."""

    status: int
    headers: httpx.Headers
    body: bytes


class _Headers(dict[str, str]):
    """Headers of an account. Its key is among them, so only their names are ever shown."""

    def __repr__(self) -> str:
        return f"headers {sorted(self)}"

    __str__ = __repr__


class HttpCalls:
    """What the adapters are built on; one account, safe for concurrent use within one event loop.

    Args:
        connection: where the server is, and the bounds of its calls.
        headers: sent with every call, the key among them.
        clock: time and the pauses between tries.
        refuse: the provider's translation of refused calls.
        transport: stands in for the network, in tests.
        rng: source of the jitter.
    """

    def __init__(
        self,
        connection: Connection,
        headers: dict[str, str],
        clock: Clock,
        refuse: Refuse,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        self.name = connection.name
        self._connection = connection
        self._refuse = refuse
        self._clock = clock
        self._rng = rng or Random()  # noqa: S311 (spreads retries, guards nothing)
        self._skew = http.SkewMeter()
        self._base = connection.base_url.rstrip("/")
        self._headers = _Headers(headers)
        tls = httpx.create_ssl_context() if transport is None else True
        times = connection.timeouts
        self._timeout = httpx.Timeout(
            connect=times.connect_s, read=times.read_s, write=times.write_s, pool=times.pool_s
        )
        self._download_timeout = httpx.Timeout(
            connect=times.connect_s, read=times.download_read_s, write=times.write_s, pool=times.pool_s
        )

        def client(connections: int, kept_alive: int) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                transport=transport,
                verify=tls,
                timeout=self._timeout,
                limits=httpx.Limits(
                    max_connections=connections,
                    max_keepalive_connections=kept_alive,
                    keepalive_expiry=KEEP_ALIVE_S,
                ),
                headers={"user-agent": f"batchferry/{__version__}"},
                follow_redirects=False,
            )

        self._client = client(connection.max_connections, connection.max_connections)
        # A create on a kept-alive connection that the server has just closed would count as unanswered.
        self._create_client = client(connection.max_connections, 0)
        self._sync_client = client(connection.max_sync_connections, 0)

    @property
    def clock_skew_s(self) -> float | None:
        """Provider's clock minus ours in seconds; None before the first answer."""
        return self._skew.skew_s

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        await self._create_client.aclose()
        await self._sync_client.aclose()

    async def _patiently(self, attempt: Callable[[], Awaitable[_T | Miss]]) -> _T | CallFailed:
        """Try as often as the table says; pauses are slept on the service's clock."""
        began = self._clock.monotonic()
        tries = 0
        while True:
            outcome = await attempt()
            if not isinstance(outcome, Miss):
                return outcome
            tries += 1
            pause_s = self._connection.retries.pause_before_next(
                outcome.failure, tries, self._clock.monotonic() - began, outcome.should_retry, self._rng
            )
            if pause_s is None:
                return outcome.failure
            await self._clock.sleep(pause_s)

    async def _exchange(
        self,
        call: Call,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        total_s: float | None = None,
        file_id: str | None = None,
        takes: frozenset[int] = frozenset(),
    ) -> Answer | Miss:
        """One request and its whole answer, whatever becomes of it; ``takes`` are statuses that are answers too."""
        client = self._create_client if call is Call.CREATE else self._client
        try:
            request = client.build_request(
                method,
                self._base + path,
                params=_merged(self._connection.query, params),
                content=content,
                headers={"accept": "application/json", **self._headers, **(headers or {})},
            )
        except httpx.InvalidURL:
            return _no_address(call)
        if not http.same_origin(request.url, httpx.URL(self._base)) or not _DOTS.isdisjoint(path.split("/")):
            # Some paths are taken from answers, and models stand in some: one without a slash in front would lengthen
            # the host's name, and one with steps upwards would leave the API.
            return _no_address(call)
        try:
            async with asyncio.timeout(total_s or self._connection.timeouts.call_s):
                response = await client.send(request, stream=True)
                try:
                    self._skew.note(response.headers, self._clock.now())
                    body = await http.read_whole(response, self._connection.max_answer_bytes)
                finally:
                    await response.aclose()
        except http.BREAKS as error:
            return Miss(failures.broken(call, http.fault_of(error)))
        if response.is_success or response.status_code in takes:
            return Answer(response.status_code, response.headers, body)
        return self._refused(call, response, body, file_id)

    async def _read(
        self,
        call: Call,
        method: str,
        path: str,
        read: Callable[[Any], _T],
        params: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> _T | Miss:
        """One request, and what ``read`` makes of its answer; see ``read_answer``."""
        answer = await self._exchange(call, method, path, params=params)
        return answer if isinstance(answer, Miss) else read_answer(call, answer, read)

    async def _ask(
        self,
        call: Call,
        method: str,
        path: str,
        read: Callable[[Any], _T],
        params: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> _T | CallFailed:
        """The same, tried as often as the table says."""
        return await self._patiently(lambda: self._read(call, method, path, read, params))

    def _refused(self, call: Call, response: httpx.Response, body: bytes, file_id: str | None = None) -> Miss:
        failure = self._refuse(call, response.status_code, response.headers, body, self._clock.now(), file_id)
        if (
            call is Call.DOWNLOAD
            and failure.kind is CallFailure.ACCOUNT
            and not http.same_origin(response.url, httpx.URL(self._base))
        ):
            # A storage that refuses an old address says nothing about our account.
            failure = replace(failure, kind=CallFailure.UNAVAILABLE, code=LINK_REFUSED)
        return Miss(failure, http.should_retry(response.headers))

    async def _download_once(
        self, path: str, to: Path, *, address: httpx.URL | None = None, stays_home: bool = False
    ) -> DownloadedFile | Miss:
        """One try to fetch what lies at a path, or at an address given in its place.

        Another host than the account's own gets no header of the account; with ``stays_home`` no redirect is followed
        to one.
        """
        home = httpx.URL(self._base + path).copy_merge_params(self._connection.query)
        try:
            async with asyncio.timeout(self._connection.timeouts.download_s):
                target = address or home
                for _ in range(http.MAX_REDIRECTS + 1):
                    request = self._client.build_request(
                        "GET",
                        target,
                        # A compressed answer would hide whether its length is the promised one.
                        headers={"accept": "*/*", "accept-encoding": "identity"}
                        | (self._headers if http.same_origin(target, home) else {}),
                        timeout=self._download_timeout,
                    )
                    response = await self._client.send(request, stream=True)
                    try:
                        self._skew.note(response.headers, self._clock.now())
                        if response.is_success:
                            return await http.save_body(response, to, self._connection.max_download_bytes)
                        if not response.is_redirect:
                            body = await http.read_whole(response, self._connection.max_answer_bytes)
                            return self._refused(Call.DOWNLOAD, response, body)
                        target = http.redirect_target(response)
                        if stays_home and not http.same_origin(target, home):
                            raise http.BadRedirect
                    finally:
                        await response.aclose()
                raise http.BadRedirect
        except http.BREAKS as error:
            return Miss(failures.broken(Call.DOWNLOAD, http.fault_of(error)))


class Form:
    """A multipart body of known length, around a file that is streamed or without one.

    httpx's own multipart takes blocking files only; ours asks the source for chunks and knows its size before.
    """

    def __init__(self, fields: Mapping[str, str], file_name: str = "", source: UploadSource | None = None) -> None:
        boundary = f"batchferry-{secrets.token_hex(16)}"
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        )
        end = f"--{boundary}--\r\n"
        if source is not None:
            head += (
                f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{file_name}"\r\n'
                "Content-Type: application/jsonl\r\n\r\n"
            )
            end = f"\r\n{end}"
        self._head = head.encode()
        self._tail = end.encode()
        self._source = source
        self.file_bytes = 0 if source is None else source.size_bytes
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self.size_bytes = len(self._head) + self.file_bytes + len(self._tail)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole body, from its beginning."""
        yield self._head
        if self._source is not None:
            async for chunk in exactly(self._source, self.file_bytes):
                yield chunk
        yield self._tail


async def exactly(source: UploadSource, size_bytes: int) -> AsyncIterator[bytes]:
    """The source's chunks, which must be as many bytes as it promised.

    Raises:
        InvariantBroken: they are more or fewer.
    """
    sent = 0
    async for chunk in source.chunks():
        sent += len(chunk)
        if sent > size_bytes:
            break
        yield chunk
    if sent != size_bytes:
        raise InvariantBroken(f"an upload of {size_bytes} bytes gave {sent}")


def _merged(
    query: Mapping[str, str], params: Mapping[str, str] | Sequence[tuple[str, str]]
) -> dict[str, str] | tuple[tuple[str, str], ...]:
    """The account's parameters and the call's; where both name one, the call's stands."""
    if isinstance(params, Mapping):
        return {**query, **params}
    names = {name for name, _ in params}
    return (*(pair for pair in query.items() if pair[0] not in names), *params)


def _no_address(call: Call) -> Miss:
    """A call that was not sent: the fault is an answer's, or in a create the rows' own, never the account's."""
    kind = CallFailure.REJECTED if call is Call.CREATE else CallFailure.PROTOCOL
    return Miss(CallFailed(call, kind, code=BAD_ADDRESS, is_definite=True))


def path_segment(provider_id: str) -> str:
    """An id as one path segment: some servers' ids hold slashes, or are whole base64 texts.

    An id of dots alone would be taken for a step upwards, and another address be called.
    """
    return quote(provider_id, safe="") if set(provider_id) != {"."} else provider_id.replace(".", "%2E")


def read_answer(call: Call, answer: Answer, read: Callable[[Any], _T]) -> _T | Miss:
    """What ``read`` makes of the answer's JSON; it raises ``NotOurShape`` for what is not that object."""
    try:
        return read(read_json(answer.body))
    except NotOurShape:
        return nonsense_answer(call, answer, "unreadable_answer")


def nonsense_answer(call: Call, answer: Answer, code: str) -> Miss:
    """A 2xx that is not what was asked for."""
    return Miss(failures.nonsense(call, answer.status, answer.headers, code), http.should_retry(answer.headers))
