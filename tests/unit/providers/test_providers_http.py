from datetime import UTC, datetime, timedelta

import httpx
import pytest
from openai_kit import HandClock, Server, answer

from batchferry.domain.errors import StoreUnavailable
from batchferry.providers import http
from batchferry.providers.anthropic import AnthropicAccount, AnthropicProvider
from batchferry.providers.calls import HttpCalls, path_segment
from batchferry.providers.gemini import GeminiAccount, GeminiProvider
from batchferry.providers.mistral import MistralAccount, MistralProvider
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider

QUIET = httpx.MockTransport(Server(answer(200, b"")))
"""A server that nobody calls."""

NOW = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "wish_s"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, http.MAX_HINT_S),
        ({"retry-after": "1e12"}, http.MAX_HINT_S),
        ({"retry-after": "later"}, None),
        ({"retry-after": "Sun, 15 Nov 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Sun, 15 Nov 2026 11:00:00 GMT"}, 0.0),
        # the server's clock is 10 minutes ahead: only its own two dates count
        ({"retry-after": "Sun, 15 Nov 2026 12:10:30 GMT", "date": "Sun, 15 Nov 2026 12:10:00 GMT"}, 30.0),
    ],
)
def test_the_wish_of_a_server_is_read_in_every_form(headers, wish_s):
    """Seconds, milliseconds and dates are understood, nonsense is none, and no wish exceeds a day."""
    assert http.retry_after_s(httpx.Headers(headers), NOW) == wish_s


@pytest.mark.parametrize(("text", "meaning"), [("true", True), ("FALSE", False), ("perhaps", None), ("", None)])
def test_x_should_retry(text, meaning):
    """Only true and false say something."""
    assert http.should_retry(httpx.Headers({"x-should-retry": text})) is meaning


def test_skew_is_the_median_of_the_last_answers():
    """One odd Date does not move the figure, old ones are forgotten, cached answers do not count."""
    meter = http.SkewMeter()
    assert meter.skew_s is None
    meter.note(httpx.Headers({"date": "rubbish"}), NOW)
    meter.note(httpx.Headers({"date": "Sun, 15 Nov 2026 12:00:40 GMT", "age": "3"}), NOW)
    assert meter.skew_s is None
    for ahead_s in (90, 10, 11, 9000, 10, 10):
        date = (NOW + timedelta(seconds=ahead_s)).strftime("%a, %d %b %Y %H:%M:%S GMT")
        meter.note(httpx.Headers({"date": date}), NOW)
    assert meter.skew_s == pytest.approx(10.5, abs=0.01)


def reply(body=b"hello", headers=None):
    """A streamed answer."""

    async def stream():
        for start in range(0, len(body), 2):
            yield body[start : start + 2]

    request = httpx.Request("GET", "https://llm.example/x")
    return httpx.Response(200, headers=headers or {}, content=stream(), request=request)


async def test_a_body_is_read_up_to_its_bound():
    """One byte more than allowed is refused, not kept."""
    assert await http.read_whole(reply(), 5) == b"hello"
    with pytest.raises(http.AnswerTooLarge):
        await http.read_whole(reply(), 4)


async def test_a_saved_file_is_whole_private_and_alone(tmp_path):
    """The file has the bytes, the hash and mode 0600, and no part file is left."""
    to = tmp_path / "out.jsonl"
    saved = await http.save_body(reply(headers={"content-length": "5"}), to, 100)
    assert (saved.size_bytes, to.read_bytes()) == (5, b"hello")
    assert saved.sha256 == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert to.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [to]


@pytest.mark.parametrize(
    ("headers", "limit", "expected"),
    [({"content-length": "6"}, 100, http.AnswerCut), ({}, 4, http.AnswerTooLarge)],
)
async def test_a_broken_download_leaves_nothing(tmp_path, headers, limit, expected):
    """Neither a short nor an overlong body replaces what was there, and no part file stays."""
    to = tmp_path / "out.jsonl"
    to.write_bytes(b"old")
    with pytest.raises(expected):
        await http.save_body(reply(headers=headers), to, limit)
    assert to.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [to]


async def test_a_full_disk_is_named(tmp_path):
    """A folder that is not there is the store's trouble, not the provider's."""
    with pytest.raises(StoreUnavailable):
        await http.save_body(reply(), tmp_path / "gone" / "out.jsonl", 100)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/other", "https://llm.example/other"),
        ("https://blobs.example/x?sig=1", "https://blobs.example/x?sig=1"),
        ("http://llm.example/x", None),
        ("ftp://blobs.example/x", None),
        (None, None),
    ],
)
def test_redirects_never_leave_tls(location, target):
    """A redirect is followed where it is safe; to plain text, elsewhere or nowhere it is refused."""
    response = httpx.Response(
        302,
        headers={} if location is None else {"location": location},
        request=httpx.Request("GET", "https://llm.example/v1/files/x/content"),
    )
    if target is None:
        with pytest.raises(http.BadRedirect):
            http.redirect_target(response)
    else:
        assert str(http.redirect_target(response)) == target


@pytest.mark.parametrize(
    ("provider_id", "segment"),
    [("file-1", "file-1"), ("a/b?c#d", "a%2Fb%3Fc%23d"), ("..", "%2E%2E"), (".", "%2E"), ("a..b", "a..b"), ("", "")],
)
def test_an_id_is_one_segment_of_a_path(provider_id: str, segment: str) -> None:
    """No id of a provider's leads upwards or into a query: another address would be called with our key."""
    assert path_segment(provider_id) == segment
    url = httpx.URL(f"https://host/v1/batches/{segment}/cancel")
    assert url.raw_path == f"/v1/batches/{segment}/cancel".encode()


@pytest.mark.parametrize(
    "provider",
    [
        OpenAIProvider(
            OpenAIAccount("main", api_key="k-secret", headers={"x-gateway": "g-secret"}), HandClock(), QUIET
        ),
        AnthropicProvider(AnthropicAccount("main", api_key="k-secret"), HandClock(), QUIET),
        GeminiProvider(GeminiAccount("main", api_key="k-secret"), HandClock(), QUIET),
        MistralProvider(MistralAccount("main", api_key="k-secret"), HandClock(), QUIET),
    ],
    ids=lambda provider: type(provider).__name__,
)
def test_no_part_of_an_adapter_shows_its_key(provider: HttpCalls) -> None:
    """What a traceback or a debugger would write of an adapter and of everything it holds has no secret in it."""
    held = vars(provider)
    assert {"account", "_headers", "_sync"} <= held.keys()
    for name, part in held.items():
        assert "secret" not in f"{part!r}{part!s}", name
