"""Where settings come from, which source wins, and that every fault is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from batchferry.config import Settings, example_text, load_settings
from batchferry.config.checks import cross_faults
from batchferry.domain.errors import ConfigError
from batchferry.domain.retry import ALLOWED, Policy
from batchferry.domain.rows import RowClass

LANE_OFF = "accounts: {default: {sync: {enabled: false}}}"
KEY = {"OPENAI_API_KEY": "sk-test-0123456789abcdef"}


def load(tmp_path: Path, text: str = "", env: dict[str, str] | None = None, dotenv: str | None = None, **more: Any):
    """Settings from a file, variables and .env in a folder of their own."""
    config = tmp_path / "settings.yaml"
    config.write_text(text, encoding="utf-8")
    dotenv_path = tmp_path / ".env"
    if dotenv is not None:
        dotenv_path.write_text(dotenv, encoding="utf-8")
    return load_settings(config, {**KEY, **(env or {})}, dotenv_path=dotenv_path, **more)


def faults(tmp_path: Path, text: str = "", env: dict[str, str] | None = None, dotenv: str | None = None, **more: Any):
    """The faults of such settings."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, env, dotenv, **more)
    return caught.value.faults


def test_nothing_but_a_key_is_enough():
    """The defaults fit together; only the provider's key has none."""
    settings = load_settings(None, KEY, dotenv_path=None)
    assert settings.topics.ledger_topic == "requests.batchferry.ledger"
    assert settings.topics.control_topic == "requests.batchferry.control"
    assert list(settings.routes) == ["default"]
    assert settings.wait_plan(settings.routes["default"]).max_wait_s == 4 * 3600


def test_without_a_key_the_fault_names_the_variable():
    """A missing key is told with the variable that would hold it."""
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        load_settings(None, {}, dotenv_path=None)


def test_a_compatible_server_needs_no_key():
    """Only OpenAI's own address demands a key; a server in one's own network may have none."""
    settings = load_settings(None, {"OPENAI_BASE_URL": "http://simulator:9400/v1"}, dotenv_path=None)
    assert settings.accounts["default"].base_url == "http://simulator:9400/v1"


def test_later_sources_win_key_by_key(tmp_path: Path):
    """File < .env < environment < flags, and what a later source leaves out stays."""
    settings = load(
        tmp_path,
        "limits: {max_uploads: 3, max_downloads: 3, poll_records: 30, mailbox_events: 33}",
        {"BATCHFERRY_LIMITS__MAX_DOWNLOADS": "5", "BATCHFERRY_LIMITS__MAX_UPLOADS": "5"},
        "BATCHFERRY_LIMITS__POLL_RECORDS=40\nBATCHFERRY_LIMITS__MAX_DOWNLOADS=4\n",
        overrides={"limits.max_uploads": 6, "limits.max_downloads": None},
    )
    limits = settings.limits
    assert (limits.max_uploads, limits.max_downloads, limits.poll_records, limits.mailbox_events) == (6, 5, 40, 33)


def test_flags_may_be_a_tree_and_are_not_changed(tmp_path: Path):
    """A nested mapping of flags works like dotted names, and the caller keeps it as it was."""
    secret = tmp_path / "key"
    secret.write_text("from-file\n")
    flags = {"accounts": {"other": {"base_url": "http://h/v1", "api_key_file": str(secret)}}}
    settings = load(tmp_path, "routes: {r: {account: other}}", overrides=flags)
    key = settings.accounts["other"].api_key
    assert key is not None
    assert key.get_secret_value() == "from-file"
    assert flags == {"accounts": {"other": {"base_url": "http://h/v1", "api_key_file": str(secret)}}}


def test_the_kafka_fields_own_names(tmp_path: Path):
    """KAFKA_* variables and dotted names in the file are understood; our own variables win over them."""
    settings = load(
        tmp_path,
        "kafka: {bootstrap.servers: 'a:1', security.protocol: SASL_SSL, ssl.ca.location: ca.pem}",
        {
            "KAFKA_BOOTSTRAP_SERVERS": "b:2,c:3",
            "KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "KAFKA_SASL_USERNAME": "u",
            "KAFKA_SASL_PASSWORD": "p",
            "KAFKA_CLIENT_RACK": "z1",
            "KAFKA_CLIENT_ID": "x",
            "BATCHFERRY_KAFKA__CLIENT_ID": "mine",
            "KAFKA_HEAP_OPTS": "-Xmx1g",
        },
    )
    kafka = settings.kafka
    assert kafka.bootstrap_servers == ("b:2", "c:3")
    assert (kafka.security_protocol, kafka.sasl_mechanism) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (kafka.rack, kafka.client_id, str(kafka.ssl_cafile)) == ("z1", "mine", "ca.pem")


def test_openai_variables_never_change_what_a_file_says(tmp_path: Path):
    """OPENAI_* variables of the machine only fill gaps of the account named default."""
    settings = load(
        tmp_path,
        "accounts: {default: {api_key: from-file-of-settings}}",
        {"OPENAI_BASE_URL": "http://elsewhere/v1"},
    )
    account = settings.accounts["default"]
    assert account.api_key is not None
    assert account.api_key.get_secret_value() == "from-file-of-settings"
    assert account.base_url == "http://elsewhere/v1"
    only_eu = load(tmp_path, "accounts: {eu: {base_url: 'http://h'}}\nroutes: {r: {account: eu}}")
    assert list(only_eu.accounts) == ["eu"]


def test_lists_in_variables(tmp_path: Path):
    """A list in the environment is JSON, or words with commas between them."""
    settings = load(
        tmp_path,
        env={
            "BATCHFERRY_ROUTES__A__MODELS": "gpt-*, o4-mini",
            "BATCHFERRY_ROUTES__A__ENDPOINTS": '["/v1/embeddings"]',
            "BATCHFERRY_ACCOUNTS__DEFAULT__LIMITS__ENQUEUED_TOKENS": '{"gpt-5": "2_000_000"}',
        },
    )
    assert settings.routes["a"].models == ("gpt-*", "o4-mini")
    assert settings.routes["a"].endpoints == ("/v1/embeddings",)
    assert settings.accounts["default"].limits.enqueued_tokens == {"gpt-5": 2_000_000}


def test_durations_and_sizes_as_people_write_them(tmp_path: Path):
    """Lengths of time and sizes take units, ISO 8601 and underscores."""
    settings = load(
        tmp_path,
        "routes: {a: {sla_s: PT36H, margin_s: 3h, max_wait_s: 1h 30m, max_bytes: 50MB, max_rows: 10_000}}",
        {"BATCHFERRY_LIMITS__SPOOL_BUFFER_BYTES": "16 MiB"},
    )
    route = settings.routes["a"]
    assert (route.sla_s, route.margin_s, route.max_wait_s) == (129_600, 10_800, 5400)
    assert (route.max_bytes, route.max_rows) == (50_000_000, 10_000)
    assert settings.limits.spool_buffer_bytes == 16 * 1024 * 1024


def test_large_numbers_survive_helm(tmp_path: Path):
    """Helm renders 8000000000 as 8e+09; sizes, counts and lengths of time mean the same."""
    settings = load(
        tmp_path,
        """
limits: {spool_high_bytes: 9e+09, max_index_rows: 4.5e+06}
accounts: {default: {file_expiry_s: 1.2096e+06}}
""",
    )
    assert (settings.limits.spool_high_bytes, settings.limits.max_index_rows) == (9_000_000_000, 4_500_000)
    assert settings.accounts["default"].file_expiry_s == 1_209_600


def test_routes_are_tried_in_order(tmp_path: Path):
    """The first route whose models and endpoints match is taken; none may match."""
    settings = load(
        tmp_path,
        """
routes:
  vectors: {models: ["text-embedding-*"], endpoints: [/v1/embeddings], endpoint: /v1/embeddings}
  chat: {models: ["gpt-*"]}
""",
    )

    def name(model: str, endpoint: str | None = None) -> str | None:
        route = settings.route_for(model, endpoint)
        return route.name if route else None

    assert name("text-embedding-3-small") == "vectors"
    assert name("text-embedding-3-small", "/v1/chat/completions") is None
    assert name("gpt-5", "/v1/responses") == "chat"
    assert name("claude") is None


def test_routes_as_a_list_keep_their_order_and_take_variables(tmp_path: Path):
    """Tools that sort the keys of a mapping keep a list; a variable still reaches a route by its name."""
    settings = load(
        tmp_path,
        """
routes:
  - {name: vectors, models: ["text-*"]}
  - {name: default, max_rows: 7000}
""",
        {"BATCHFERRY_ROUTES__DEFAULT__SLA_S": "40h"},
    )
    assert list(settings.routes) == ["vectors", "default"]
    assert (settings.routes["default"].max_rows, settings.routes["default"].sla_s) == (7000, 144_000)


def test_secrets_from_files_and_never_shown(tmp_path: Path):
    """A secret's file is read, and neither repr nor JSON shows what was in it."""
    key = tmp_path / "key"
    key.write_text("sk-from-a-file\n")
    settings = load(tmp_path, f"accounts: {{default: {{api_key_file: {key}}}}}\nserver: {{token_file: {key}}}")
    secret = settings.accounts["default"].api_key
    assert secret is not None
    assert secret.get_secret_value() == "sk-from-a-file"
    assert "sk-from-a-file" not in repr(settings) + settings.model_dump_json()


@pytest.mark.parametrize("written", ["whsec_{0}\n", "\ufeffwhsec_{0}", "\r\n\r\nwhsec_{0}\r\n\r\n", "whsec_{0}\n\n\n"])
def test_what_editors_put_around_a_secret_is_no_part_of_it(tmp_path: Path, written: str):
    """A byte order mark, blank lines and either kind of line end: the secret alone is taken, and it is one."""
    encoded = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
    (tmp_path / "hook").write_bytes(written.format(encoded).encode())
    settings = load(tmp_path, f"accounts: {{default: {{webhook_secret_file: {tmp_path / 'hook'}}}}}")
    assert settings.accounts["default"].webhook_secrets == (f"whsec_{encoded}",)


def test_a_path_that_is_none_is_a_fault(tmp_path: Path):
    """A NUL in the name of a file is told like any file that cannot be read."""
    (only,) = faults(tmp_path, 'accounts: {default: {webhook_secret_file: "a\\0b"}}')
    assert only.startswith("accounts.default.webhook_secret_file: the file cannot be read")
    (only,) = faults(tmp_path, 'accounts: {default: {profile: "a\\0b.yaml"}}')
    assert "cannot be read" in only


@pytest.mark.parametrize("text", ["[" * 5000, "a: &a [*a]", "kafka: 2026-99-99", "kafka: !!int x", "kafka: \x01"])
def test_hostile_yaml_is_one_fault(tmp_path: Path, text: str):
    """A file that the library stumbles over is refused with its path, whatever it stumbled over."""
    (only,) = faults(tmp_path, text)
    assert str(tmp_path / "settings.yaml") in only
    assert "not YAML" in only


def test_faults_of_every_kind_are_told_at_once(tmp_path: Path):
    """Unknown names, wrong types, bad units and settings that do not fit together come in one list."""
    found = faults(
        tmp_path,
        """
kafka: {heartbeet_s: 3}
routes:
  night: {sla_s: 24h, account: defualt2}
  day: {models: [x], sla_s: 24h}
  small: {models: [y], max_rows: 60000, margin_s: soon}
max_uploads: 3
""",
        {"BATCHFERRY_LOGG__LEVEL": "info", "BATCHFERRY_SERVER__PORT": "99999"},
    )
    text = "\n".join(found)
    assert "'heartbeet_s'; did you mean 'heartbeat_s'?" in text
    assert "BATCHFERRY_LOGG__LEVEL: unknown setting 'logg'; did you mean 'log'?" in text
    assert "'max_uploads'; did you mean 'limits.max_uploads'?" in text
    assert "server.port (BATCHFERRY_SERVER__PORT)" in text
    assert "routes.small.margin_s" in text
    assert "line 6" in text
    assert "there is no account 'defualt2'" in text
    assert (
        "routes.day: no time is left to gather a batch: SLA 24 h - completion window 24 h - margin 2 h = -2 h" in text
    )
    assert "routes.small.max_rows: is 60_000, more than accounts.default.limits.max_rows with 50_000" in text
    assert len(found) == len(set(found))


def test_a_setting_that_was_refused_causes_no_second_complaint(tmp_path: Path):
    """What was concluded from a faulty value is not told as well."""
    (only,) = faults(tmp_path, "routes: {a: {max_wait_s: 100h, sla_s: never}}")
    assert "routes.a.sla_s" in only


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("routes: {a: {max_wait_s: 5h}}", "max_wait_s of 5 h is longer than the SLA allows: SLA 30 h - completion"),
        ("routes: {a: {margin_s: 30m}}", "poll cap 5 min + cancel 10 min + download 10 min + rescue lead 30 min"),
        ("routes: {a: {sla_s: 31d}}", "routes.a.sla_s: is 744 h, more than limits.max_sla_s with 720 h"),
        ("routes: {a: {max_bytes: 300MB}}", "accounts.default.limits.max_file_bytes"),
        ("routes: {a: {}, b: {}}", "routes.b: is never tried"),
        ("routes: {A b: {}}", "is not a name"),
        ("routes: {}", "routes: none is named"),
        ("routes: [{models: [x]}]", "item 1 of the list has no name"),
        ("routes: [{name: a, models: [x]}, {name: a}]", "two items of the list have the name 'a'"),
        ("routes: {a: {name: b}}", "differs from the key above it"),
        ("routes:\n- name: a\n  max_rows: -1", "line 3"),
        ("kafka: {security_protocol: SASL_SSL}", "KAFKA_SASL_USERNAME"),
        ("kafka: {sasl_mechanism: PLAIN}", "does not log in"),
        ("kafka: {ssl_cafile: x}", "uses no TLS"),
        ("kafka: {bootstrap_servers: [broker]}", "each broker is host:port"),
        ("kafka: {session_timeout_s: 5s}", "three heartbeats take 9 s"),
        ("topics: {results: requests}", "'requests' is topics.requests already"),
        ("topics: {results: 'no spaces'}", "not a Kafka topic name"),
        ("accounts: {default: {base_url: 'ftp://x'}}", "an address like https://host/v1"),
        ("accounts: {default: {file_expiry_s: 2h}}", "the input file is gone before its batch ends"),
        ("accounts: {default: {completion_window: '24'}}", "write it with its unit"),
        ("limits: {spool_low_bytes: 9GB}", "more than limits.spool_high_bytes"),
        ("limits: {max_uploads: yes}", "a number is wanted"),
        ("limits: {max_record_bytes: 1XB}", "not a size"),
        (
            f"{LANE_OFF}\nroutes: {{a: {{small: sync}}}}",
            "routes.a.small: is sync, though accounts.default.sync.enabled",
        ),
        (f"{LANE_OFF}\nroutes: {{a: {{long_row: {{lane: sync}}}}}}", "routes.a.long_row.lane: is sync, though"),
        (f"{LANE_OFF}\nroutes: {{a: {{canary: {{}}}}}}", "routes.a.canary.lane: is sync, though"),
        (
            f"{LANE_OFF}\nroutes: {{a: {{policies: {{transient: sync}}}}}}",
            "routes.a.policies.transient: is sync, though",
        ),
        (
            "routes: {a: {canary: {lane: batch}, sla_s: 52h}}",
            "gather 5 min + 2 x (completion window 24 h + margin 2 h) = 52 h 5 min; set it to sync",
        ),
        ("routes: {a: {policies: {content_filtered: retry}}}", "take one of fail, review"),
        ("routes: {a: {policies: {account: fail}}}", "is not for rows of this class; leave it out"),
        ("routes: {a: {policies: {invalid_request: split}}}", "routes.a.policies.invalid_request: split is not for"),
        ("routes: {a: {policies: {too_long: sync}}}", "routes.a.larger_model: missing, though"),
        ("routes: {a: {policies: {too_long: split}, splitter: absent}}", "there is no splitter 'absent'; known are"),
        ("routes: {a: {canary: {check: json_schema}}}", "routes.a.canary.schema_file: missing, though check is"),
        ("routes: {a: {canary: {check: json, schema_file: x}}}", "is not used, as check is json"),
        ("routes: {a: {canary: {check: json_schema, schema_file: absent.json}}}", "cannot be read (FileNotFoundError)"),
        (
            "routes: {a: {sla_s: 31h, margin_s: 55min}}\naccounts: {default: {sync: {call_timeout_s: 1h}}}",
            "call_timeout_s",
        ),
        ("state_dir: /", "a folder of its own"),
        ("clock: {speed: 1000}", "clock.origin and clock.started"),
        ("clock: {origin: '2026-01-01T00:00:00'}", "clock.origin"),
        ("log: {level: loud}", "(got 'loud')"),
        ("- a\n- b", "a mapping of names to values"),
        ("kafka: [", "line"),
        ("topics: {create: true}\ntopics: {create: false}", "stands in line 1 too"),
        ("accounts: 5", "dictionary"),
    ],
)
def test_single_faults(tmp_path: Path, text: str, expected: str):
    """Each fault is told once, with what helps to correct it."""
    found = faults(tmp_path, text)
    assert expected in "\n".join(found)


def test_a_schema_that_is_none_is_told_with_its_setting(tmp_path: Path):
    """What a canary's answers are held against is compiled before the first answer comes."""
    file = tmp_path / "answer.json"
    route = f"routes: {{a: {{canary: {{check: json_schema, schema_file: {file}}}}}}}"
    for text, expected in (("{", "not JSON"), ('{"type": "nothing"}', "schema"), ('{"$ref": "#/absent"}', "not in it")):
        file.write_text(text)
        (only,) = faults(tmp_path, route)
        assert only.startswith("routes.a.canary.schema_file: ")
        assert expected in only
    file.write_text('{"type": "object"}')
    assert load(tmp_path, route).routes["a"].canary is not None


@pytest.mark.parametrize(
    "text",
    [
        f"{LANE_OFF}\nroutes: {{a: {{late: sync, small: batch, long_row: {{lane: own_batch}}}}}}",
        f"{LANE_OFF}\nroutes: {{a: {{canary: {{lane: batch, gather_s: 1h}}, sla_s: 53h}}}}",
        "routes: {a: {small: sync, long_row: {lane: sync}, canary: {}, policies: {missing: sync}}}",
        "routes: {a: {policies: {too_long: sync}, larger_model: gpt-4.1}}",
        "routes: {a: {policies: {too_long: split}}}",
        "routes: {a: {splitter: absent}}",
    ],
)
def test_ways_that_fit_the_lane_and_the_promise_are_taken(tmp_path: Path, text: str):
    """A route may ask for whatever its account and its SLA allow; a splitter that nobody asks for is not loaded."""
    assert "a" in load(tmp_path, text).routes


def test_a_route_may_set_for_a_class_exactly_what_the_table_allows(tmp_path: Path):
    """Every pair of class and policy is either in the table or a fault that says what is."""
    for row_class in RowClass:
        for policy in Policy:
            route = {"policies": {row_class.value: policy.value}, "larger_model": "gpt-4.1"}
            settings = Settings.model_validate({"routes": {"a": route}})
            told = [one.text for one in cross_faults(settings) if one.text.startswith("routes.a.policies.")]
            assert bool(told) is (policy not in ALLOWED.get(row_class, ())), (row_class, policy)


def test_faults_never_show_secrets(tmp_path: Path):
    """Whatever is wrong, a key that stands near it is not quoted."""
    secret = "sk-verysecretvalue123"
    found = faults(
        tmp_path,
        f"""
accounts:
  default: {{api_key: {{nested: {secret}}}, base_url: 'https://u:{secret}@h/v1', headers: ["{secret}"]}}
kafka: {{sasl_password: [{secret}], bootstrap_servers: ["{secret}"]}}
""",
        {"BATCHFERRY_ACCOUNTS": f"{{broken {secret}", "BATCHFERRY_SERVER": secret},
    )
    assert len(found) >= 6
    assert secret not in "\n".join(found)


def test_files_that_cannot_be_read(tmp_path: Path):
    """A settings file or secret file that is not there is a fault with its path; a missing .env is none."""
    with pytest.raises(ConfigError) as caught:
        load_settings(
            tmp_path / "absent.yaml",
            {"BATCHFERRY_ACCOUNTS__DEFAULT__API_KEY_FILE": str(tmp_path / "no-key")},
            dotenv_path=tmp_path / "no.env",
        )
    assert len(caught.value.faults) == 2
    assert "absent.yaml" in caught.value.faults[0]
    assert "accounts.default.api_key_file" in caught.value.faults[1]


def test_secret_given_twice_in_one_place(tmp_path: Path):
    """A key and its file in the same source are ambiguous; a later source simply wins."""
    (only,) = faults(tmp_path, "accounts: {default: {api_key: a, api_key_file: b}}")
    assert "keep one of the two" in only
    key = tmp_path / "key"
    key.write_text("old")
    settings = load(
        tmp_path,
        f"accounts: {{default: {{api_key_file: {key}}}}}",
        {"BATCHFERRY_ACCOUNTS__DEFAULT__API_KEY": "new"},
    )
    assert settings.accounts["default"].api_key is not None
    assert settings.accounts["default"].api_key.get_secret_value() == "new"


def test_broken_lines_of_dotenv_are_told(tmp_path: Path):
    """A line of .env that cannot be read is named, not skipped."""
    (only,) = faults(tmp_path, dotenv="BATCHFERRY_LOG__LEVEL=debug\n= nothing\n")
    assert "line 2" in only


def test_kubernetes_service_links_are_not_settings(tmp_path: Path):
    """A Service named batchferry puts variables under our prefix into every pod; they are passed over."""
    load(
        tmp_path,
        env={
            "BATCHFERRY_SERVICE_HOST": "10.0.0.1",
            "BATCHFERRY_SERVICE_PORT_HTTP": "8080",
            "BATCHFERRY_PORT": "tcp://10.0.0.1:8080",
            "BATCHFERRY_PORT_8080_TCP_ADDR": "10.0.0.1",
            "BATCHFERRY_ADMIN_SERVICE_HOST": "10.0.0.2",
        },
    )


def test_empty_variables_say_nothing(tmp_path: Path):
    """Compose files pass empty variables on; they leave the default."""
    assert load(tmp_path, env={"BATCHFERRY_KAFKA__RACK": "", "BATCHFERRY_LOG__LEVEL": ""}).kafka.rack is None


def test_the_path_may_stand_in_the_environment(tmp_path: Path):
    """BATCHFERRY_CONFIG names the settings file."""
    path = tmp_path / "s.yaml"
    path.write_text("stop_budget_s: 7s")
    settings = load_settings(None, {**KEY, "BATCHFERRY_CONFIG": str(path)}, dotenv_path=None)
    assert settings.stop_budget_s == 7


def test_the_example_shows_the_defaults(tmp_path: Path):
    """The example file is lawful and changes nothing, so what it shows as default is the default."""
    assert load(tmp_path, example_text()) == load_settings(None, KEY, dotenv_path=None)
    assert yaml.safe_load(example_text())


def test_settings_are_frozen():
    """Nobody changes a setting after the check."""
    settings = load_settings(None, KEY, dotenv_path=None)
    with pytest.raises(ValueError, match="frozen"):
        settings.limits.max_uploads = 7  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        settings.stop_budget_s = 7  # type: ignore[misc]


def test_settings_read_nothing_by_themselves(monkeypatch: pytest.MonkeyPatch):
    """Making the tree does not look at the environment: only the loader does."""
    monkeypatch.setenv("BATCHFERRY_STOP_BUDGET_S", "99")
    assert Settings().stop_budget_s == 25
