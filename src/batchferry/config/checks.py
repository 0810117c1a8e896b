"""What settings must be together: every fault with the sum or the pair that causes it, and the remedy."""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from batchferry.config.models import AccountSettings, CanarySettings, RouteSettings, Settings
from batchferry.config.profiles import Profile, load_profile, windows
from batchferry.domain.answercheck import compile_schema
from batchferry.domain.errors import ConfigError
from batchferry.domain.requests import OWN_ENDPOINTS
from batchferry.domain.retry import ALLOWED, Policy
from batchferry.domain.rows import RowClass
from batchferry.domain.splitting import load_splitter
from batchferry.domain.times import check_route, hours

_KEY_NEEDED_AT = "api.openai.com"
_HOUR_S = 3600.0


class CrossFault(NamedTuple):
    """A fault between settings. ``paths`` are the settings it was concluded from.

    It is not told when one of them, or the mapping one stands in, was faulty itself.
    """

    paths: tuple[str, ...]
    text: str


def cross_faults(settings: Settings) -> list[CrossFault]:
    """Everything wrong between settings that are each lawful alone; empty when they fit together."""
    return [
        *_kafka(settings),
        *_topics(settings),
        *_accounts(settings),
        *_routes(settings),
        *_limits(settings),
        *_clock(settings),
        *_privacy(settings),
        *_server(settings),
    ]


def _privacy(settings: Settings) -> Iterator[CrossFault]:
    try:
        settings.masker()
    except ConfigError as error:
        for fault in error.faults:
            yield CrossFault(("mask.masker", "mask.rules", "mask.key"), f"mask.masker: {fault}")
    folder = settings.archive.folder
    # Links and steps upwards are followed: wiped is what lies there, under whatever name it is known.
    if folder is not None and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(settings.state_dir)):
        yield CrossFault(
            ("archive.folder", "state_dir"),
            f"archive.folder: {folder} is inside state_dir, which is wiped at every start; name another",
        )


def _kafka(settings: Settings) -> Iterator[CrossFault]:
    kafka = settings.kafka
    wants_login = kafka.security_protocol.startswith("SASL_")
    if wants_login:
        for name, value in (
            ("sasl_mechanism", kafka.sasl_mechanism),
            ("sasl_username", kafka.sasl_username),
            ("sasl_password", kafka.sasl_password),
        ):
            if value is None:
                yield CrossFault(
                    (f"kafka.{name}", "kafka.security_protocol"),
                    f"kafka.{name}: missing, though kafka.security_protocol is {kafka.security_protocol};"
                    f" set KAFKA_{name.upper()}",
                )
    elif kafka.sasl_mechanism is not None or kafka.sasl_password is not None:
        yield CrossFault(
            ("kafka.security_protocol", "kafka.sasl_mechanism", "kafka.sasl_password"),
            f"kafka.security_protocol: {kafka.security_protocol} does not log in, though a login is given;"
            " set it to SASL_SSL (or SASL_PLAINTEXT inside a closed network)",
        )
    certificates = (kafka.ssl_cafile, kafka.ssl_certfile, kafka.ssl_keyfile)
    if any(certificates) and not kafka.security_protocol.endswith("SSL"):
        yield CrossFault(
            ("kafka.security_protocol", "kafka.ssl_cafile", "kafka.ssl_certfile", "kafka.ssl_keyfile"),
            f"kafka.security_protocol: {kafka.security_protocol} uses no TLS, though certificates are given;"
            " set it to SSL or SASL_SSL",
        )
    if (kafka.ssl_certfile is None) != (kafka.ssl_keyfile is None):
        yield CrossFault(
            ("kafka.ssl_certfile", "kafka.ssl_keyfile"),
            "kafka.ssl_certfile and kafka.ssl_keyfile: a certificate and its key go together; set both or neither",
        )
    yield from _ordered(
        ("kafka.heartbeat_s", kafka.heartbeat_s * 3, "three heartbeats"),
        ("kafka.session_timeout_s", kafka.session_timeout_s),
    )
    yield from _ordered(
        ("kafka.session_timeout_s", kafka.session_timeout_s, None),
        ("kafka.max_poll_interval_s", kafka.max_poll_interval_s),
    )
    yield from _ordered(
        ("kafka.request_timeout_s", kafka.request_timeout_s, None),
        ("kafka.transaction_timeout_s", kafka.transaction_timeout_s),
    )
    yield from _ordered(
        ("kafka.partition_fetch_max_bytes", kafka.partition_fetch_max_bytes, None),
        ("kafka.fetch_max_bytes", kafka.fetch_max_bytes),
    )


def _topics(settings: Settings) -> Iterator[CrossFault]:
    topics = settings.topics
    seen: dict[str, str] = {}
    for field, name in (
        ("requests", topics.requests),
        ("results", topics.results),
        ("failures", topics.failures),
        ("events", topics.events),
        ("ledger", topics.ledger_topic),
        ("control", topics.control_topic),
        *((("review", topics.review),) if topics.review not in {None, topics.failures} else ()),
    ):
        if name is None:
            continue
        if name in seen:
            yield CrossFault(
                (f"topics.{field}", f"topics.{seen[name]}"),
                f"topics.{field}: {name!r} is topics.{seen[name]} already; give each its own topic",
            )
        seen.setdefault(name, field)


def _accounts(settings: Settings) -> Iterator[CrossFault]:
    if not settings.accounts:
        yield CrossFault(("accounts",), "accounts: none is named; add one, or leave the setting out for the default")
    for name, account in settings.accounts.items():
        at = f"accounts.{name}"
        profile = _known_profile(account)
        home: str | None = _KEY_NEEDED_AT
        if profile is not None:
            home = urlsplit(profile.base_url).hostname if profile.key_variable else None
        if account.api_key is None and not account.headers and urlsplit(account.base_url).hostname == home:
            yield CrossFault(
                (f"{at}.api_key", f"{at}.base_url", f"{at}.headers"),
                f"{at}.api_key: missing; set {_key_variable(name, profile)}, or {at}.api_key_file to a file that holds"
                " it",
            )
        if profile is not None:
            yield from _profile(settings, name, account, profile)
        elif account.sync.batch_chat:
            yield _no_batch_chat(at, "no profile says where it is")
        poll = account.poll
        yield from _ordered((f"{at}.poll.floor_s", poll.floor_s, None), (f"{at}.poll.max_s", poll.max_s))
        yield from _ordered((f"{at}.poll.first_s", poll.first_s, None), (f"{at}.poll.max_s", poll.max_s))
        yield from _ordered(
            (f"{at}.timeouts.create_s", account.timeouts.create_s, None),
            ("limits.submit_ttl_s", settings.limits.submit_ttl_s),
        )
        kept_s = account.window_s + settings.limits.window_grace_s + _HOUR_S
        if account.file_expiry_s is not None and account.file_expiry_s < kept_s:
            yield CrossFault(
                (f"{at}.file_expiry_s", f"{at}.completion_window", "limits.window_grace_s"),
                f"{at}.file_expiry_s: after {hours(account.file_expiry_s)} the input file is gone before its batch ends"
                f" (window {account.completion_window} + grace {hours(settings.limits.window_grace_s)} + 1 h"
                f" = {hours(kept_s)}); set it to {hours(kept_s)} or more",
            )


def _known_profile(account: AccountSettings) -> Profile | None:
    """The account's profile; None without one, or where it cannot be read: the loader has said so already."""
    try:
        return None if account.profile is None else load_profile(account.profile)
    except ConfigError:
        return None


def _key_variable(account: str, profile: Profile | None) -> str:
    own = f"BATCHFERRY_ACCOUNTS__{account.upper()}__API_KEY"
    usual = "OPENAI_API_KEY" if profile is None else profile.key_variable
    return f"{usual} or {own}" if account == "default" or profile is not None else own


def _profile(settings: Settings, name: str, account: AccountSettings, profile: Profile) -> Iterator[CrossFault]:
    """What is asked of the account that its provider does not have."""
    at = f"accounts.{name}"
    if not profile.takes_window(account.completion_window):
        yield CrossFault(
            (f"{at}.completion_window", f"{at}.profile"),
            f"{at}.completion_window: {account.completion_window} is not taken by {profile.title}: {windows(profile)}",
        )
    if account.provider != profile.family:
        yield CrossFault(
            (f"{at}.provider", f"{at}.profile"),
            f"{at}.provider: {account.provider}, though the profile {profile.name} speaks {profile.family};"
            " leave it out",
        )
    if account.sync.batch_chat and profile.batch_chat is None:
        yield _no_batch_chat(at, f"{profile.title} has none")
    if not profile.supports.batch:
        for route_name, route in settings.routes.items():
            if name in (route.account, *route.fallback) and route.lane == "batch":
                yield CrossFault(
                    (f"routes.{route_name}.lane", f"routes.{route_name}.account", f"{at}.profile"),
                    f"routes.{route_name}.lane: {profile.title} has no batches that we can use; set it to sync,"
                    f" with {at}.sync.batch_chat",
                )


def _no_batch_chat(at: str, why: str) -> CrossFault:
    return CrossFault(
        (f"{at}.sync.batch_chat", f"{at}.profile"),
        f"{at}.sync.batch_chat: {why}; name a profile that has batch chat, or turn it off",
    )


def _routes(settings: Settings) -> Iterator[CrossFault]:
    if not settings.routes:
        yield CrossFault(("routes",), "routes: none is named; add one, or leave the setting out for the default")
    takes_all: str | None = None
    for name, route in settings.routes.items():
        at = f"routes.{name}"
        if takes_all is not None:
            yield CrossFault(
                (f"routes.{takes_all}.models", f"routes.{takes_all}.endpoints"),
                f"{at}: is never tried, since routes.{takes_all} before it takes everything; put it further up",
            )
        elif "*" in route.models and not route.endpoints:
            takes_all = name
        account = settings.accounts.get(route.account)
        if account is None:
            yield CrossFault(
                (f"{at}.account", "accounts"),
                f"{at}.account: there is no account {route.account!r}{nearest(route.account, settings.accounts)}",
            )
        else:
            yield from _route_promise(settings, at, route, account)
            yield from _route_size(settings, at, route, account)
            yield from _fallbacks(settings, at, route, account)
            yield from _route_lane(at, route, account)
            if route.canary is not None:
                yield from _canary_window(at, route, route.canary, account)
        yield from _route_policies(at, route)
        if route.canary is not None:
            yield from _canary_check(at, route.canary)


def _route_promise(settings: Settings, at: str, route: RouteSettings, account: AccountSettings) -> Iterator[CrossFault]:
    concluded_from = (
        *(f"{at}.{field}" for field in ("sla_s", "margin_s", "max_wait_s", "account")),
        *(f"accounts.{route.account}.{field}" for field in ("completion_window", "poll.max_s")),
        "cancel_s",
        "download_s",
        "rescue_lead_s",
    )
    yield from _ordered((f"{at}.sla_s", route.sla_s, None), ("limits.max_sla_s", settings.limits.max_sla_s))
    if route.lane == "sync":
        return  # no window is waited for
    for text in check_route(
        sla_s=route.sla_s,
        window_s=account.window_s,
        margin_s=route.margin_s,
        max_wait_s=route.max_wait_s,
        poll_cap_s=account.poll_cap_s,
        cancel_s=settings.cancel_s,
        download_s=settings.download_s,
        rescue_lead_s=settings.rescue_lead_s,
    ):
        yield CrossFault(concluded_from, f"{at}: {text}")


def _fallbacks(settings: Settings, at: str, route: RouteSettings, first: AccountSettings) -> Iterator[CrossFault]:
    """Accounts to fall back on take the same requests, and keep the same promise."""
    for name in route.fallback:
        paths = (f"{at}.fallback", "accounts")
        other = settings.accounts.get(name)
        if other is None:
            yield CrossFault(paths, f"{at}.fallback: there is no account {name!r}{nearest(name, settings.accounts)}")
        elif name == route.account:
            yield CrossFault(paths, f"{at}.fallback: {name!r} is the route's account already; leave it out")
        elif OWN_ENDPOINTS.get(other.provider) != OWN_ENDPOINTS.get(first.provider):
            yield CrossFault(
                paths,
                f"{at}.fallback: {name!r} speaks another API ({other.provider}) than {route.account!r}"
                f" ({first.provider}): its rows could not travel there",
            )
        else:
            yield from _route_promise(settings, at, route.model_copy(update={"account": name}), other)


def _route_size(settings: Settings, at: str, route: RouteSettings, account: AccountSettings) -> Iterator[CrossFault]:
    limits = f"accounts.{route.account}.limits"
    for mine, wanted, theirs, allowed in (
        ("max_rows", route.max_rows, "max_rows", account.limits.max_rows),
        ("max_bytes", route.max_bytes, "max_file_bytes", account.limits.max_file_bytes),
        ("max_inputs", route.max_inputs, "max_inputs", account.limits.max_inputs),
    ):
        yield from _ordered((f"{at}.{mine}", wanted, None), (f"{limits}.{theirs}", allowed))
    for model, tokens in account.limits.enqueued_tokens.items():
        if route.max_tokens is not None and any(fnmatch.fnmatchcase(model, pattern) for pattern in route.models):
            yield from _ordered(
                (f"{at}.max_tokens", route.max_tokens, None), (f"{limits}.enqueued_tokens.{model}", tokens)
            )
    yield from _ordered(
        ("limits.max_record_bytes", settings.limits.max_record_bytes, None), (f"{at}.max_bytes", route.max_bytes)
    )
    yield from _ordered(
        (f"{at}.max_bytes", route.max_bytes, None), ("limits.spool_high_bytes", settings.limits.spool_high_bytes)
    )


def _route_lane(at: str, route: RouteSettings, account: AccountSettings) -> Iterator[CrossFault]:
    """Ways that need the sync lane. ``late: sync`` is none of them: without a lane a miss is announced."""
    lane = f"accounts.{route.account}.sync"
    if account.sync.enabled:
        yield from _ordered(
            (f"{lane}.call_timeout_s", account.sync.call_timeout_s, None), (f"{at}.margin_s", route.margin_s)
        )
        return
    ways = [(f"policies.{name.value}", "") for name, policy in route.policies.items() if policy is Policy.SYNC]
    if route.lane == "sync":
        ways.append(("lane", "batch"))
    if route.small == "sync":
        ways.append(("small", "batch"))
    if route.long_row is not None and route.long_row.lane == "sync":
        ways.append(("long_row.lane", "own_batch"))
    if route.canary is not None and route.canary.lane == "sync":
        ways.append(("canary.lane", "batch"))
    for name, instead in ways:
        remedy = f"set it to {instead}" if instead else "choose another policy"
        yield CrossFault(
            (f"{at}.{name}", f"{at}.account", f"{lane}.enabled"),
            f"{at}.{name}: is sync, though {lane}.enabled is off; {remedy}, or turn the lane on",
        )


def _route_policies(at: str, route: RouteSettings) -> Iterator[CrossFault]:
    for row_class, policy in route.policies.items():
        allowed = ALLOWED.get(row_class, frozenset())
        if policy not in allowed:
            remedy = f"take one of {', '.join(sorted(allowed))}" if allowed else "leave it out"
            yield CrossFault(
                (f"{at}.policies.{row_class.value}",),
                f"{at}.policies.{row_class.value}: {policy.value} is not for rows of this class; {remedy}",
            )
    too_long = route.policies.get(RowClass.TOO_LONG)
    if too_long is Policy.SYNC and route.larger_model is None:
        yield CrossFault(
            (f"{at}.larger_model", f"{at}.policies.too_long"),
            f"{at}.larger_model: missing, though {at}.policies.too_long is sync: the same model would refuse the rows"
            " again; name one with a larger context",
        )
    if too_long is Policy.SPLIT:
        try:
            load_splitter(route.splitter)
        except ConfigError as error:
            for fault in error.faults:
                yield CrossFault((f"{at}.splitter", f"{at}.policies.too_long"), f"{at}.splitter: {fault}")


def _canary_window(
    at: str, route: RouteSettings, canary: CanarySettings, account: AccountSettings
) -> Iterator[CrossFault]:
    needed_s = canary.gather_s + 2 * (account.window_s + route.margin_s)
    if canary.lane == "batch" and needed_s > route.sla_s:
        yield CrossFault(
            (
                *(f"{at}.{name}" for name in ("canary.lane", "canary.gather_s", "sla_s", "margin_s", "account")),
                f"accounts.{route.account}.completion_window",
            ),
            f"{at}.canary.lane: a batch for the sample and one for the other rows do not fit the SLA of"
            f" {hours(route.sla_s)}: gather {hours(canary.gather_s)} + 2 x (completion window {hours(account.window_s)}"
            f" + margin {hours(route.margin_s)}) = {hours(needed_s)}; set it to sync, or make the SLA that long",
        )


def _canary_check(at: str, canary: CanarySettings) -> Iterator[CrossFault]:
    paths = (f"{at}.canary.schema_file", f"{at}.canary.check")
    subject = f"{at}.canary.schema_file"
    if canary.check != "json_schema":
        if canary.schema_file is not None:
            yield CrossFault(
                paths, f"{subject}: is not used, as check is {canary.check}; set check to json_schema, or leave it out"
            )
    elif canary.schema_file is None:
        yield CrossFault(
            paths, f"{subject}: missing, though check is json_schema; name the file of the answers' schema"
        )
    else:
        try:
            compile_schema(canary.schema_file.read_bytes())
        except OSError as error:
            yield CrossFault(paths, f"{subject}: cannot be read ({type(error).__name__}); name a file that is there")
        except ConfigError as error:
            for fault in error.faults:
                yield CrossFault(paths, f"{subject}: {fault}")


def _limits(settings: Settings) -> Iterator[CrossFault]:
    limits = settings.limits
    yield from _ordered(
        ("limits.spool_low_bytes", limits.spool_low_bytes, None), ("limits.spool_high_bytes", limits.spool_high_bytes)
    )
    yield from _ordered(
        ("limits.settle_chunk_rows", limits.settle_chunk_rows, None),
        ("limits.settle_queue_rows", limits.settle_queue_rows),
    )
    yield from _ordered(
        ("limits.missing_confirm_s", limits.missing_confirm_s, None), ("limits.missing_grace_s", limits.missing_grace_s)
    )
    # The store wipes this folder's contents at start: it must not be a folder that holds anything else.
    if settings.state_dir in {Path(), Path("/"), Path("..")} or settings.state_dir == Path.home():
        yield CrossFault(
            ("state_dir",), "state_dir: is wiped at every start, so it must be a folder of its own, like ./state"
        )


def _clock(settings: Settings) -> Iterator[CrossFault]:
    clock = settings.clock
    if clock.is_scaled and (clock.origin is None or clock.started is None):
        yield CrossFault(
            ("clock.origin", "clock.started", "clock.speed"),
            "clock: a rehearsal needs clock.origin and clock.started, the same as the simulator's;"
            " for real work leave clock out",
        )


def _server(settings: Settings) -> Iterator[CrossFault]:
    server = settings.server
    has_webhooks = server.enabled and any(account.webhook_secret for account in settings.accounts.values())
    if has_webhooks and server.webhooks == "own_process" and server.port == server.webhook_port != 0:
        yield CrossFault(
            ("server.port", "server.webhook_port", "server.webhooks"),
            f"server.webhook_port: {server.webhook_port} is server.port as well; set another,"
            " or server.webhooks to in_process",
        )


def _ordered(small: tuple[str, float, str | None], large: tuple[str, float]) -> Iterator[CrossFault]:
    """A fault when the first setting is above the second."""
    (small_at, small_value, what), (large_at, large_value) = small, large
    if small_value > large_value:
        subject = f"{what} take" if what else "is"
        yield CrossFault(
            (small_at, large_at),
            f"{small_at}: {subject} {_number(small_at, small_value)}, more than {large_at} with"
            f" {_number(large_at, large_value)}; lower the first or raise the second",
        )


def _number(path: str, value: float) -> str:
    return hours(value) if path.endswith("_s") else f"{value:,.0f}".replace(",", "_")


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, or the known words, or nothing when there are none."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(words)}" if 0 < len(words) <= 12 else ""
