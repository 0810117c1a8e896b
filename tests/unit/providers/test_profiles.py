"""Profiles as data: every shipped file is sound, and what is set explicitly wins."""

import hashlib
from fractions import Fraction

import httpx
import pytest
from openai_kit import CHAT, BytesSource, HandClock, Server, answer, batch

from batchferry.config import load_settings, profiles
from batchferry.config.models import AccountLimits, AccountSettings
from batchferry.config.profiles import load_profile, profile_names, read_profile, table
from batchferry.domain.dialect import UploadWay
from batchferry.domain.errors import ConfigError
from batchferry.domain.money import PriceList
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from profile_kit import account_of, settings_of

ASKED_FOR = {
    "aibrix",
    "anthropic",
    "azure",
    "azure-legacy",
    "dashscope",
    "dashscope-dry-run",
    "deepinfra",
    "doubleword",
    "gemini",
    "groq",
    "litellm",
    "llm-d",
    "mistral",
    "moonshot",
    "novita",
    "openai",
    "self-hosted",
    "siliconflow",
    "together",
    "zhipu",
}
OURS = [name for name in profile_names() if load_profile(name).family == "openai" and load_profile(name).supports.batch]
MINIMAL = """
name: mine
title: Mine
family: openai
base_url: https://mine.example/v1
windows: [24h]
price: {says: free}
adoption: metadata
"""


def filled(name: str) -> dict[str, str]:
    """What only an account's owner knows, for a profile that asks for it."""
    profile = load_profile(name)
    return {"base_url": "https://own.example/v1"} if profile.places else {}


def test_every_provider_of_the_field_has_a_profile():
    """The providers that the service is meant for are there."""
    assert set(profile_names()) >= ASKED_FOR


@pytest.mark.parametrize("name", profile_names())
def test_every_deviation_says_who_says_so(name):
    """Each deviation of a shipped profile has a text and a source, and none is told twice in the same words."""
    told = load_profile(name).deviations
    assert all(len(one.says) > 3 and one.source for one in told)
    assert len({(one.about, one.says) for one in told}) == len(told)


@pytest.mark.parametrize("name", OURS)
def test_every_compatible_profile_makes_an_account(name):
    """A profile and what only the owner knows are enough for an account of the adapter."""
    profile = load_profile(name)
    account = account_of(name, settings=filled(name))
    assert account.completion_window == profile.window
    assert account.send_metadata is profile.supports.metadata
    if profile.limits.max_file_bytes is not None:
        assert account.max_upload_bytes == profile.limits.max_file_bytes


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_a_layer_of_settings(name):
    """A profile's settings are an account's own settings by name and form, its limits among them."""
    profile = load_profile(name)
    layer = profile.settings()
    assert layer.pop("provider") == profile.family
    made = AccountSettings.model_validate(layer)
    assert made.completion_window == profile.window
    assert made.sync.enabled is profile.supports.sync
    assert made.limits.max_rows == (profile.limits.max_rows or AccountLimits().max_rows)
    assert ("base_url" in layer) is not bool(profile.places)


def test_openai_has_no_departures():
    """OpenAI's own profile is the adapter's default in every point."""
    assert account_of("openai", api_key="") == OpenAIAccount("a")


@pytest.mark.parametrize(
    ("name", "hours"),
    [("openai", 720), ("groq", 720), ("siliconflow", 720), ("anthropic", 696), ("gemini", 48), ("mistral", 24)],
)
def test_how_long_results_are_sure_to_stay(name, hours):
    """Counted from the creation; where sources disagree, or count from the end, the shorter is taken."""
    assert settings_of(name).results_kept_s == hours * 3600


def test_what_is_given_wins():
    """What an account says goes before its profile down to the single member, query and dialect among them."""
    given = {
        "base_url": "https://gateway.example/azure",
        "query": {"api-version": "2025-04-01-preview", "subscription": "s"},
        "limits": {"max_file_bytes": 5_000},
        "dialect": {"key_header": "ocp-apim-subscription-key"},
    }
    made = account_of("azure-legacy", settings=given)
    assert (made.base_url, made.max_upload_bytes) == ("https://gateway.example/azure", 5_000)
    assert made.query == {"api-version": "2025-04-01-preview", "subscription": "s"}
    assert made.dialect.key_header == "ocp-apim-subscription-key"
    assert made.dialect.deployment_paths
    assert settings_of("groq").limits.max_rows == 50_000
    assert settings_of("groq", limits={"max_rows": 1_000}).limits.max_file_bytes == 100_000_000


@pytest.mark.parametrize(
    ("account", "said"),
    [
        ({"profile": "azure"}, "accounts.a.base_url: missing; write your own in place of {resource} in https://"),
        ({"profile": "openai", "completion_window": "1h"}, "completion_window: 1h is not taken by OpenAI: 24h"),
        ({"profile": "groq", "completion_window": "8d"}, "8d is not taken by Groq: 24h to 7d, by default 24h"),
        (
            {"profile": "openai", "dialect": {"key_heder": "x"}},
            "unknown setting 'key_heder'; did you mean 'key_header'",
        ),
        ({"profile": "openai", "dialect": {"files_path": "x"}}, "dialect.files_path is no path"),
        ({"profile": "anthropic", "provider": "openai"}, "though the profile anthropic speaks anthropic; leave it out"),
        (
            {"profile": "volcengine"},
            "routes.default.lane: Volcengine Ark has no batches that we can use; set it to sync",
        ),
        ({"profile": "groq", "sync": {"batch_chat": True}}, "accounts.a.sync.batch_chat: Groq has none"),
        ({"sync": {"batch_chat": True}}, "accounts.a.sync.batch_chat: no profile says where it is"),
        ({"profile": "groc"}, "accounts.a.profile: profile 'groc' is unknown; is 'groq' meant?"),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(account, said):
    """A missing address, a window that is not sold, a misspelt member and a foreign family are told in words."""
    made = {"accounts": {"a": {"api_key": "k", **account}}, "routes": {"default": {"account": "a"}}}
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {}, made, dotenv_path=None)
    assert said in str(caught.value)


def test_the_key_comes_from_the_providers_own_variable():
    """For the account ``default``, or the only one of its profile; two of one profile must not share a bill unsaid."""
    env = {"GROQ_API_KEY": "gsk-from-the-variable"}
    one = {"accounts": {"g": {"profile": "groq"}}, "routes": {"default": {"account": "g"}}}
    key = load_settings(None, env, one, dotenv_path=None).accounts["g"].api_key
    assert key is not None
    assert key.get_secret_value() == "gsk-from-the-variable"
    two = {"accounts": {"g": {"profile": "groq"}, "h": {"profile": "groq"}}, "routes": {"default": {"account": "g"}}}
    with pytest.raises(
        ConfigError, match=r"accounts\.g\.api_key: missing; set GROQ_API_KEY or BATCHFERRY_ACCOUNTS__G__"
    ):
        load_settings(None, env, two, dotenv_path=None)


def test_a_family_brings_its_profile():
    """``provider: anthropic`` alone is enough for its address, limits and prices."""
    made = load_settings(
        None,
        {"ANTHROPIC_API_KEY": "sk-ant"},
        {"accounts": {"default": {"provider": "anthropic"}}, "routes": {"default": {"endpoint": "/v1/messages"}}},
        dotenv_path=None,
    ).accounts["default"]
    assert (made.base_url, made.limits.max_rows) == ("https://api.anthropic.com", 100_000)
    assert (made.profile, made.price_list) == ("anthropic", PriceList("anthropic", (), Fraction(1, 2)))


def test_a_lane_of_batch_chat():
    """Batch chat is the sync lane at another address, at the price of a batch."""
    made = account_of("volcengine", settings={"sync": {"enabled": True, "batch_chat": True}})
    assert made.dialect.sync_base_url == "https://ark.cn-beijing.volces.com/api/v3/batch"


def test_windows():
    """A window is taken by its length where a range is known, else only if it is named."""
    assert load_profile("groq").takes_window("168h")
    assert load_profile("doubleword").takes_window("60m")
    assert not load_profile("doubleword").takes_window("2h")
    assert load_profile("doubleword").window == "1h"
    assert load_profile("mistral").takes_window("7d")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "a mapping is wanted"),
        ("a: b: c", "not YAML in line 1"),
        ("a: &a [*a]", "not YAML in line 1 (an alias of something that it is a part of)"),
        ("{a: " * 3000, "nested more than"),
        (MINIMAL + "models: [2026-99-99]\n", "does not fit its form"),
        (MINIMAL + "models: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        (MINIMAL + "windos: [1h]\n", "windos: Extra inputs"),
        (MINIMAL + "limits: {max_rows: -1}\n", "limits.max_rows: "),
        (MINIMAL + "dialect: {key_header: api-key}\n", "dialect.key_header has no deviation that says why"),
        (
            MINIMAL + "account: {api_key: x}\ndeviations: [{about: account.api_key, says: x, source: y}]\n",
            "account.api_key is no setting that a profile may fill in",
        ),
        (MINIMAL + "deviations: [{about: weather, says: x, source: y}]\n", "is about nothing known"),
        (MINIMAL + "supports: {metadata: false}\n", "adoption by metadata needs supports.metadata"),
        (MINIMAL.replace("[24h]", "[soon]"), "profile x: "),
        (MINIMAL.replace("family: openai", "family: cobol"), "family: "),
        (
            MINIMAL + "dialect: {files_path: files/}\ndeviations: [{about: dialect.files_path, says: x, source: y}]\n",
            "dialect.files_path is no path",
        ),
    ],
)
def test_a_wrong_profile_names_the_fault(text, said):
    """Each fault of a profile's file is told with the place where it stands."""
    with pytest.raises(ConfigError) as caught:
        read_profile(text, "x")
    assert said in str(caught.value)


def test_an_unknown_name_gets_the_nearest():
    """A misspelt profile is answered with the one that was meant, and all there are."""
    with pytest.raises(ConfigError, match=r"'groc' is unknown; is 'groq' meant\? there are aibrix, anthropic"):
        load_profile("groc")


def test_a_profile_of_ones_own(tmp_path):
    """A new compatible provider is one file, loaded by its path; a missing or odd one is refused in words."""
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    assert account_of(str(path)).base_url == "https://mine.example/v1"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(str(tmp_path / "absent.yaml"))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_profile(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_profile(str(path)).family == "openai"
    path.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ConfigError, match="more than"):
        load_profile(str(path))


def test_the_table_has_a_row_for_each():
    """The table names each profile once, has equally many cells in each row, and marks what is uncertain."""
    rows = table().splitlines()
    assert len(rows) == len(profile_names()) + 2
    assert {row.count(" | ") for row in rows if "---" not in row} == {8}
    assert all(sum(f"(`{name}`)" in row for row in rows) == 1 for name in profile_names())
    row = table([load_profile("groq")]).splitlines()[2]
    assert row == (
        "| Groq (`groq`) | yes | yes | no | yes | by input file and metadata | 24h to 7d, by default 24h"
        " | 50,000 rows, 100 MB ? | 50 % |"
    )


def test_topics_are_those_of_the_shipped_profiles():
    """No topic is offered that no profile needs, so that a mistyped one is noticed."""
    told = {one.about.partition(".")[0] for name in profile_names() for one in load_profile(name).deviations}
    assert told == set(profiles.TOPICS)


# -------------------------------------------------------------------- what the profiles make the adapter do


def provider_of(name: str, server: Server, clock: HandClock | None = None, **given) -> OpenAIProvider:
    """The adapter by a profile, in front of a scripted server."""
    account = account_of(name, settings={**filled(name), "api_key": "sk-1", **given})
    return OpenAIProvider(account, clock or HandClock(), httpx.MockTransport(server))


async def test_zhipu_has_other_names_for_endpoints_and_keeps_the_input_file():
    """Lines and create name /v4/..., and the create asks that the input file be left for us."""
    server = Server(answer(200, batch()))
    made = provider_of("zhipu", server)
    assert made.render_line(CHAT, b"{}") == b',"method":"POST","url":"/v4/chat/completions","body":{}}\n'
    await made.create("file-1", CHAT, "", {})
    assert str(server.requests[0].url) == "https://open.bigmodel.cn/api/paas/v4/batches"
    assert b'"endpoint":"/v4/chat/completions"' in server.bodies[0]
    assert b'"auto_delete_input_file":false' in server.bodies[0]


async def test_the_dry_run_goes_to_the_test_endpoint():
    """DashScope's free model has an endpoint of its own; the caller's stays what it is."""
    server = Server(answer(200, batch()))
    made = provider_of("dashscope-dry-run", server)
    await made.create("file-1", CHAT, "", {})
    assert b'"endpoint":"/v1/chat/ds-test"' in server.bodies[0]
    assert b'"url":"/v1/chat/ds-test"' in made.render_line(CHAT, b"{}")
    line = b'{"id":"x","custom_id":"a-1","response":{"status_code":200,"body":{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}},"error":null}'
    assert made.parse_line(line, CHAT).row_class == "succeeded"


async def test_groqs_lists_have_a_cursor_of_their_own():
    """The cursor goes out as cursor and comes from paging.next_cursor; null and a standing one end the list."""
    pages = [
        answer(200, {"data": [batch(id="batch_1")], "paging": {"next_cursor": "c-2"}}),
        answer(200, {"data": [batch(id="batch_2")], "paging": {"next_cursor": None}}),
        answer(200, {"data": [batch(id="batch_3")], "paging": {"next_cursor": "c-2"}}),
    ]
    server = Server(*pages)
    made = provider_of("groq", server)
    first = await made.list_batches()
    assert first.next_cursor == "c-2"
    assert (await made.list_batches(first.next_cursor)).next_cursor is None
    assert (await made.list_batches("c-2")).next_cursor is None
    assert [request.url.params.get("cursor") for request in server.requests] == [None, "c-2", "c-2"]


async def test_moonshot_refuses_a_late_cancel_in_its_own_way():
    """A 400 to a cancel means that the batch has ended; elsewhere it stays a refusal."""
    refusal = answer(400, {"error": {"message": "batch has ended", "type": "invalid_request_error"}})
    assert (await provider_of("moonshot", Server(refusal)).cancel("batch_1")).kind == "conflict"
    assert (await provider_of("openai", Server(refusal)).cancel("batch_1")).kind == "rejected"


async def test_a_gateways_429_does_not_prove_that_nothing_was_made():
    """Behind LiteLLM a throttled create is looked up before another; at OpenAI it certainly made nothing."""
    refusal = answer(
        429, {"error": {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}
    )
    unsure = await provider_of("litellm", Server(refusal)).create("file-1", CHAT, "", {})
    assert (unsure.kind, unsure.is_definite) == ("unanswered", False)
    sure = await provider_of("openai", Server(refusal)).create("file-1", CHAT, "", {})
    assert (sure.kind, sure.is_definite) == ("throttled", True)


async def test_a_gateways_500_does_not_either():
    """A create answered by 500 although the batch exists is an unanswered one, with every profile."""
    for name in OURS:
        server = Server(answer(500, {"error": {"message": "unexpected status", "type": "server_error"}}))
        got = await provider_of(name, server).create("file-1", CHAT, "", {})
        assert (got.kind, len(server.requests)) == ("unanswered", 1)


async def test_litellm_is_told_which_provider_an_upload_is_for():
    """The form of an upload carries custom_llm_provider."""
    server = Server(answer(200, {"id": "file-1", "bytes": 3, "purpose": "batch"}))
    await provider_of("litellm", server).upload(BytesSource(b"abc"), "x.jsonl", None)
    assert b'name="custom_llm_provider"\r\n\r\nopenai\r\n' in server.bodies[0]


# ----------------------------------------------------------------------------------------- Together

ADDRESS = "https://storage.example/put/abc?signature=s"
ANNOUNCED = answer(302, b"", {"location": ADDRESS, "x-together-file-id": "file-t1"})
JOB = {
    "id": "job-1",
    "status": "IN_PROGRESS",
    "progress": 12.5,
    "input_file_id": "file-t1",
    "created_at": "2026-11-15T12:00:00Z",
    "job_deadline": "2026-11-16T12:00:00Z",
}


async def test_together_takes_a_file_in_three_steps():
    """Announced with name and checksum, put at the signed address without the key, preprocessed with it."""
    server = Server(ANNOUNCED, answer(200, b""), answer(200, {"id": "file-t1", "bytes": 20}))
    source = BytesSource(b'{"custom_id":"a-1"}\n')
    got = await provider_of("together", server).upload(source, "b.jsonl", 1_209_600)
    assert (got.file_id, got.size_bytes) == ("file-t1", 20)
    told, put, done = server.requests
    assert [request.method for request in server.requests] == ["POST", "PUT", "POST"]
    assert str(put.url) == ADDRESS
    assert ("authorization" in told.headers, "authorization" in put.headers, "authorization" in done.headers) == (
        True,
        False,
        True,
    )
    assert (server.bodies[1], put.headers["content-length"]) == (source.data, "20")
    assert str(done.url) == "https://api.together.xyz/v1/files/file-t1/preprocess"
    form = server.bodies[0]
    assert int(told.headers["content-length"]) == len(form)
    fields = {"purpose": "batch-api", "file_name": "b.jsonl", "file_type": "jsonl"}
    assert all(f'name="{name}"\r\n\r\n{value}\r\n'.encode() in form for name, value in fields.items())
    assert hashlib.sha256(source.data).hexdigest().encode() in form
    assert b"expires_after" not in form


async def test_together_knows_contents_that_it_has_already():
    """After a lost answer the same contents are answered by 409 and the id, which is the upload's."""
    server = Server(answer(409, {"file_id": "file-t1", "message": "exists"}))
    got = await provider_of("together", server).upload(BytesSource(b"x"), "b.jsonl", None)
    assert (got.file_id, len(server.requests)) == ("file-t1", 1)


async def test_together_gets_a_new_address_for_each_try():
    """A storage that refuses or breaks starts the whole upload again; nothing of it speaks about the account."""
    clock = HandClock()
    server = Server(ANNOUNCED, answer(403, b"<Error/>"), ANNOUNCED, answer(200, b""), answer(200, {"id": "file-t1"}))
    got = await provider_of("together", server, clock).upload(BytesSource(b"x"), "b.jsonl", None)
    assert (got.file_id, len(clock.sleeps)) == ("file-t1", 1)


@pytest.mark.parametrize(
    "announced",
    [
        answer(302, b"", {"x-together-file-id": "file-t1"}),
        answer(302, b"", {"location": ADDRESS}),
        answer(302, b"", {"location": "ftp://x/y", "x-together-file-id": "file-t1"}),
        answer(302, b"", {"location": "http://plain.example/y", "x-together-file-id": "file-t1"}),
        answer(409, {"message": "exists"}),
    ],
)
async def test_together_without_an_address_or_id_makes_no_sense(announced):
    """Nothing is put anywhere unless id and a safe address have come."""
    server = Server(announced)
    got = await provider_of("together", server).upload(BytesSource(b"x"), "b.jsonl", None)
    assert got.kind == "protocol"
    assert {request.method for request in server.requests} == {"POST"}


async def test_together_wraps_its_batch():
    """A batch inside {"job"} with capitals, ISO instants and no counts is read; metadata is not sent."""
    server = Server(answer(200, {"job": JOB, "warning": ""}))
    got = await provider_of("together", server).create("file-t1", CHAT, "", {"batchferry": "x"})
    assert (got.provider_batch_id, got.status, got.input_file_id) == ("job-1", "in_progress", "file-t1")
    assert (got.created_at.day, got.expires_at.day, got.counts.total) == (15, 16, 0)
    assert b"metadata" not in server.bodies[0]


async def test_together_lists_a_bare_array_and_says_why_it_failed_in_one_text():
    """A list without a cursor ends after its page; error as a text is one entry that names no line."""
    server = Server(answer(200, [JOB, {**JOB, "id": "job-2", "status": "FAILED", "error": "bad line"}]))
    page = await provider_of("together", server).list_batches()
    assert page.next_cursor is None
    assert [one.provider_batch_id for one in page.batches] == ["job-1", "job-2"]
    assert [(one.code, one.line) for one in page.batches[1].errors] == [("", None)]


# ------------------------------------------------------------------------------- results behind addresses

LINK = "https://files.example/out.jsonl?signature=very-secret"


async def test_an_address_in_place_of_a_file_id_is_kept_from_sight(tmp_path):
    """It never shows outside the adapter; each download asks the batch for a fresh one and sends no key there."""
    ended = batch(status="completed", output_file_id=LINK, error_file_id="")
    server = Server(answer(200, ended), answer(200, ended), answer(200, b"line\n"))
    made = provider_of("siliconflow", server)
    got = await made.retrieve("batch_1")
    assert (got.output_file_id, got.error_file_id) == ("link:output:batch_1", None)
    assert "secret" not in repr(got)
    saved = await made.download(got.output_file_id, tmp_path / "out")
    assert (saved.size_bytes, (tmp_path / "out").read_bytes()) == (5, b"line\n")
    assert [str(request.url) for request in server.requests[1:]] == [
        "https://api.siliconflow.cn/v1/batches/batch_1",
        LINK,
    ]
    assert "authorization" not in server.requests[2].headers
    assert await made.delete_file(got.output_file_id) is None
    assert len(server.requests) == 3


async def test_an_address_that_expired_is_asked_for_again(tmp_path):
    """A 403 from the storage is no verdict about the account: the next try gets a fresh address."""
    old, new = (batch(status="completed", output_file_id=f"{LINK}-{number}") for number in (1, 2))
    clock = HandClock()
    server = Server(answer(200, old), answer(403, b"<Expired/>"), answer(200, new), answer(200, b"line\n"))
    saved = await provider_of("siliconflow", server, clock).download("link:output:batch_1", tmp_path / "out")
    assert saved.size_bytes == 5
    assert str(server.requests[3].url).endswith("-2")
    assert len(clock.sleeps) == 1


@pytest.mark.parametrize("address", ["http://plain.example/x", "", None, "https://", "file:///etc/passwd"])
async def test_an_address_that_leads_nowhere_safe_is_not_followed(tmp_path, address):
    """No address any more, a broken one, or one without TLS: the answer makes no sense, nothing is fetched."""
    server = Server(answer(200, batch(status="completed", error_file_id=address)))
    got = await provider_of("siliconflow", server).download("link:error:batch_1", tmp_path / "out")
    assert got.kind == "protocol"
    assert {request.url.path for request in server.requests} == {"/v1/batches/batch_1"}


def test_an_upload_way_is_named_by_its_word():
    """A profile's words become the dialect's own values."""
    assert account_of("together").dialect.upload_way is UploadWay.SIGNED_ADDRESS


async def test_a_gateway_without_a_database_refuses_a_key_in_its_own_way():
    """LiteLLM's 400 no_db_connection is about the key, not about the call."""
    refusal = answer(400, {"error": {"message": "No connected db.", "type": "no_db_connection", "code": "400"}})
    got = await provider_of("litellm", Server(refusal)).create("file-1", CHAT, "", {})
    assert (got.kind, got.is_definite, got.code) == ("account", True, "no_db_connection")
