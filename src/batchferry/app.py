"""The composition root: builds every part from the settings and joins them. Nowhere else are rooms joined."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.routing import Route
from ulid import ULID

from batchferry import __version__
from batchferry.clock import ScaledClock, SystemClock
from batchferry.config import AccountSettings, Settings
from batchferry.config.profiles import load_profile
from batchferry.domain.errors import BatchferryError, ConfigError, GateRefused, KafkaUnavailable
from batchferry.domain.money import warm_up
from batchferry.domain.requests import DEFAULT_ENDPOINTS, OWN_ENDPOINTS, RequestRules
from batchferry.domain.yamltext import YamlFault, parse_yaml
from batchferry.engine.gates import Finding, Verdict, World, look, look_without_broker
from batchferry.engine.metered import MeteredProvider
from batchferry.engine.supervisor import RunState, Supervisor
from batchferry.kafka import AioKafka, EmbeddedBroker, KafkaClientSettings
from batchferry.kafka.lapsed import LapsedMembers
from batchferry.ports import BatchProvider, Clock
from batchferry.providers.anthropic import AnthropicAccount, AnthropicProvider
from batchferry.providers.connection import CallTimeouts
from batchferry.providers.gemini import GeminiAccount, GeminiProvider
from batchferry.providers.mistral import MistralAccount, MistralProvider
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from batchferry.server import (
    MAX_CONNECTIONS,
    AdminServer,
    HookPlan,
    WebhookProcess,
    make_app,
    plans_of,
    try_webhook_process,
    webhook_routes,
)
from batchferry.server.webhookwire import Rehearsal
from batchferry.simulator import FaultRule, Scenario, SimulatorSettings, load_scenario, run_forever, with_webhooks
from batchferry.store import LocalState
from batchferry.store.archive import Archive, WhenFull
from batchferry.telemetry import ServiceTelemetry, build_telemetry, error_fields

EXIT_DRAINED = 0
EXIT_FAILED = 1
EXIT_GATE_REFUSED = 3
EXIT_BUDGET_PASSED = 4
EXIT_SECOND_SIGNAL = 130

STOP_RESERVE_S = 4.5
"""Beyond ``stop_budget_s``: so much later (real seconds) a process that was told to stop is over, whatever hangs in it.
The budget is for the work in hand, the reserve for closing; both together fit into the 30 s that Kubernetes gives."""
START_PATIENCE_S = 2.0
"""A start that a signal cuts short may take so long (real seconds) to let go of what it had opened."""

__all__ = [
    "EXIT_BUDGET_PASSED",
    "EXIT_DRAINED",
    "EXIT_FAILED",
    "EXIT_GATE_REFUSED",
    "EXIT_SECOND_SIGNAL",
    "STOP_RESERVE_S",
    "EmbeddedBroker",
    "Finding",
    "Service",
    "Verdict",
    "build_clock",
    "build_kafka",
    "build_providers",
    "check_gates",
    "embedded_broker",
    "openai_account",
    "run_service",
    "run_simulator",
]


# ------------------------------------------------------------------------------------------------- parts


def build_clock(settings: Settings) -> Clock:
    """The wall clock, or the rehearsal's faster one."""
    clock = settings.clock
    if not clock.is_scaled or clock.origin is None or clock.started is None:
        return SystemClock()
    return ScaledClock(clock.speed, clock.origin, clock.started)


def build_kafka(settings: Settings) -> AioKafka:
    """The Kafka port over aiokafka."""
    kafka = settings.kafka
    return AioKafka(
        KafkaClientSettings(
            bootstrap_servers=",".join(kafka.bootstrap_servers),
            security_protocol=kafka.security_protocol,
            sasl_mechanism=kafka.sasl_mechanism or "PLAIN",
            username=kafka.sasl_username,
            password=None if kafka.sasl_password is None else kafka.sasl_password.get_secret_value(),
            ssl_cafile=_text(kafka.ssl_cafile),
            ssl_certfile=_text(kafka.ssl_certfile),
            ssl_keyfile=_text(kafka.ssl_keyfile),
            client_id=f"{kafka.client_id}-{socket.gethostname()}",
            client_rack=kafka.rack,
            compression=kafka.compression,
            max_batch_bytes=kafka.produce_batch_bytes,
            max_record_bytes=kafka.produce_record_max_bytes,
            fetch_max_bytes=kafka.fetch_max_bytes,
            max_partition_fetch_bytes=kafka.partition_fetch_max_bytes,
            fetch_min_bytes=kafka.fetch_min_bytes,
            check_crcs=kafka.check_crcs,
            session_timeout_s=kafka.session_timeout_s,
            heartbeat_interval_s=kafka.heartbeat_s,
            rebalance_timeout_s=kafka.rebalance_timeout_s,
            max_poll_interval_s=kafka.max_poll_interval_s,
            metadata_max_age_s=kafka.metadata_max_age_s,
            transaction_timeout_s=kafka.transaction_timeout_s,
            # Given up before the broker would abort it, and a read of the ledger outlasts any dead transaction.
            transaction_deadline_s=kafka.transaction_timeout_s * 2 / 3,
            commit_deadline_s=kafka.transaction_timeout_s / 2,
            read_stall_s=kafka.transaction_timeout_s * 1.5,
            request_timeout_s=kafka.request_timeout_s,
        )
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def build_providers(settings: Settings, clock: Clock) -> dict[str, BatchProvider]:
    """One adapter an account, by account name."""
    return {name: _provider(name, account, clock) for name, account in settings.accounts.items()}


def _provider(name: str, account: AccountSettings, clock: Clock) -> BatchProvider:
    match account.provider:
        case "anthropic":
            return AnthropicProvider(_anthropic_account(name, account), clock)
        case "mistral":
            window_hours = max(1, round(account.window_s / 3600))
            return MistralProvider(MistralAccount(timeout_hours=window_hours, **_connection(name, account)), clock)
        case "gemini":
            expires_after_s = round(account.window_s)
            return GeminiProvider(GeminiAccount(expires_after_s=expires_after_s, **_connection(name, account)), clock)
        case "openai":
            return OpenAIProvider(openai_account(name, account), clock)


def _connection(name: str, account: AccountSettings) -> dict[str, Any]:
    """What every family's account says of its connection."""
    timeouts = account.timeouts
    return {
        "name": name,
        "base_url": account.base_url,
        "api_key": "" if account.api_key is None else account.api_key.get_secret_value(),
        "headers": {header: value.get_secret_value() for header, value in account.headers.items()},
        "timeouts": CallTimeouts(
            connect_s=timeouts.connect_s,
            read_s=timeouts.read_s,
            write_s=timeouts.write_s,
            create_s=timeouts.create_s,
            upload_s=timeouts.upload_s,
            download_s=timeouts.download_s,
        ),
        "max_connections": account.max_concurrent_calls,
        "max_sync_connections": account.sync.max_concurrency,
        "max_upload_bytes": account.limits.max_file_bytes,
    }


def _anthropic_account(name: str, account: AccountSettings) -> AnthropicAccount:
    own, connection = account.anthropic, _connection(name, account)
    # The rows travel in the create itself: it is given the time of an upload.
    connection["timeouts"] = replace(connection["timeouts"], create_s=account.timeouts.upload_s)
    return AnthropicAccount(
        version=own.version,
        betas=own.betas,
        workspace=own.workspace,
        key_header=own.key_header,
        **connection,
    )


def openai_account(name: str, account: AccountSettings) -> OpenAIAccount:
    """The adapter's settings of an account that speaks like OpenAI, its profile's departures included."""
    dialect = account.dialect
    wire = dialect.wire
    if account.sync.batch_chat and account.profile is not None:
        chat = load_profile(account.profile).batch_chat
        if chat is not None:
            wire = replace(wire, sync_base_url=wire.sync_base_url or chat.base_url)
    return OpenAIAccount(
        organization=account.organization,
        project=account.project,
        query=account.query,
        completion_window=account.completion_window,
        list_page_size=dialect.list_page_size,
        file_page_size=dialect.file_page_size,
        file_purpose=dialect.file_purpose,
        output_purpose=dialect.output_purpose,
        send_metadata=dialect.batch_metadata,
        send_file_expiry=dialect.file_expiry,
        dialect=wire,
        **_connection(name, account),
    )


def build_archive(settings: Settings) -> Archive | None:
    """Where copies of result files stay; None: nowhere."""
    archive = settings.archive
    if archive.folder is None:
        return None
    when_full = WhenFull.DROP_OLDEST if archive.when_full == "drop_oldest" else WhenFull.REFUSE
    max_bytes = None if archive.max_bytes is None else int(archive.max_bytes)
    return Archive(archive.folder, max_bytes=max_bytes, max_age_s=archive.max_age_s, when_full=when_full)


def request_rules(settings: Settings) -> RequestRules:
    """The limits an input record is held against."""
    routes = list(settings.routes.values())

    families = {account.provider for account in settings.accounts.values()}
    endpoints = set(DEFAULT_ENDPOINTS if families - OWN_ENDPOINTS.keys() else ())
    endpoints |= {endpoint for family, endpoint in OWN_ENDPOINTS.items() if family in families}

    def default_url_of(model: str) -> str:
        return (settings.route_for(model) or routes[0]).endpoint

    return RequestRules(
        endpoints=frozenset(endpoints),
        default_url=routes[0].endpoint,
        default_url_of=default_url_of if len({route.endpoint for route in routes}) > 1 else None,
        accounts=frozenset(settings.accounts),
        max_record_bytes=settings.limits.max_record_bytes,
        max_line_bytes=min(
            min(route.max_bytes, settings.accounts[route.account].limits.max_file_bytes) for route in routes
        ),
        max_depth=settings.limits.max_json_depth,
        max_sla_s=settings.limits.max_sla_s,
    )


def embedded_broker(folder: Path) -> EmbeddedBroker:
    """A small Kafka-compatible broker for demos and for machines without Java."""
    return EmbeddedBroker(folder)


async def check_gates(settings: Settings) -> list[Finding]:
    """Every start-up check, for ``doctor``."""
    clock = build_clock(settings)
    kafka = build_kafka(settings)
    providers = build_providers(settings, clock)
    try:
        found = list((await _look(settings, kafka, providers)).findings)
    except KafkaUnavailable as error:
        found = await look_without_broker(error)
    finally:
        for provider in providers.values():
            await provider.close()
        await kafka.aclose()
    return found + await _look_at_webhooks(settings, clock)


def _own_process_plans(settings: Settings) -> dict[str, HookPlan]:
    """The webhooks that a process of their own takes; empty: there is none."""
    server = settings.server
    return plans_of(settings.accounts) if server.enabled and server.webhooks == "own_process" else {}


def _rehearsal(settings: Settings) -> Rehearsal | None:
    clock = settings.clock
    if not clock.is_scaled or clock.origin is None or clock.started is None:
        return None
    return Rehearsal(clock.speed, clock.origin, clock.started)


async def _look_at_webhooks(settings: Settings, clock: Clock) -> list[Finding]:
    """Whether the webhook process can run here. Its port is not tried: a service beside us may have it already."""
    plans = _own_process_plans(settings)
    if not plans:
        return []
    gate, subject = "webhook process starts", f"port {settings.server.webhook_port}"
    wrong = await try_webhook_process(plans, clock)
    if wrong is None:
        return [Finding(gate, Verdict.OK, subject, f"it takes deliveries for {', '.join(sorted(plans))}", "")]
    remedy = "see the memory and process limits of this machine, or set server.webhooks to in_process"
    return [Finding(gate, Verdict.WARN, subject, wrong, remedy)]


async def _look(settings: Settings, kafka: AioKafka, providers: Mapping[str, BatchProvider]) -> World:
    admin = await kafka.admin()
    try:
        return await look(settings, kafka, admin, providers)
    finally:
        await admin.close()


# ----------------------------------------------------------------------------------------------- service


class Service:
    """One process's service: parts, probes, supervisor. For ``run``, and in-process for the demo and the tests."""

    def __init__(self, settings: Settings, telemetry: Any = None) -> None:
        self.settings = settings
        self.incarnation = str(ULID())
        self.telemetry: Any = telemetry or build_telemetry(
            version=__version__,
            incarnation=self.incarnation,
            log_format=settings.log.format,
            log_level=settings.log.level,
            otel_enabled=settings.otel.enabled,
            service_name=settings.otel.service_name,
        )
        self.clock = build_clock(settings)
        self.kafka = build_kafka(settings)
        limits = settings.limits
        self.providers: dict[str, BatchProvider] = {
            name: MeteredProvider(provider, self.telemetry, limits.max_clock_skew_s)
            for name, provider in build_providers(settings, self.clock).items()
        }
        self.store = LocalState(
            settings.state_dir,
            max_spool_bytes=2 * limits.spool_high_bytes,  # the high mark pauses; only a burst goes beyond it
            max_pending_bytes=limits.spool_buffer_bytes,
        )
        self.archive = build_archive(settings)
        self.supervisor: Supervisor | None = None
        self._server: AdminServer | None = None
        self._webhooks: WebhookProcess | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def admin_address(self) -> str | None:
        """``http://host:port`` of the probes, None when they are not served."""
        return None if self._server is None else self._server.address

    @property
    def webhook_address(self) -> str | None:
        """``http://host:port`` that takes webhooks, None when no account has any or nothing is served."""
        if self._webhooks is not None:
            return self._webhooks.address
        return self.admin_address if plans_of(self.settings.accounts) else None

    async def start(self) -> None:
        """Check the world, open the local state, begin to work.

        Raises:
            GateRefused: a start-up check failed; every finding with its remedy.
            KafkaUnavailable: no broker answered.
            StoreUnavailable: the state folder cannot be used.
        """
        if self.settings.server.enabled:
            token = self.settings.server.token
            self._server = AdminServer(
                self.settings.server.host,
                self.settings.server.port,
                make_app(
                    self,
                    self._metrics_text,
                    self,
                    telemetry=self.telemetry,
                    token=None if token is None else token.get_secret_value(),
                    extra_routes=self._webhook_routes(),
                ),
            )
            await self._server.start()
            self.telemetry.event("server_listening", host=self.settings.server.host, port=self._server.port)
            if plans := _own_process_plans(self.settings):
                self._webhooks = WebhookProcess(
                    plans,
                    self,
                    host=self.settings.server.host,
                    port=self.settings.server.webhook_port,
                    clock=self.clock,
                    telemetry=self.telemetry,
                    rehearsal=_rehearsal(self.settings),
                )
                await self._webhooks.start()
        self.telemetry.event(
            "settings_loaded", routes=len(self.settings.routes), accounts=sorted(self.settings.accounts)
        )
        world = await _look(self.settings, self.kafka, self.providers)
        for name, partitions in world.made.items():
            self.telemetry.event("topic_created", topic=name, partitions=partitions)
        for finding in world.findings:
            if finding.verdict is Verdict.OK:
                self.telemetry.event("gate_passed", gate=finding.gate, topic=finding.subject)
            elif finding.verdict is Verdict.WARN:
                self.telemetry.event(
                    "gate_warned", gate=finding.gate, topic=finding.subject, finding=finding.text, remedy=finding.remedy
                )
        if world.refusals:
            raise GateRefused(world.refusals)
        await self.store.start()
        if self.archive is not None and (unusable := await self.archive.open()) is not None:
            raise unusable
        await asyncio.to_thread(warm_up)  # the price data takes a second to load
        self.supervisor = Supervisor(
            self.settings,
            self.kafka,
            self.providers,
            self.store,
            self.clock,
            self.telemetry,
            self.incarnation,
            request_rules(self.settings),
            world.max_outcome_bytes,
            world.partitions,
            world.input_retention_s,
            self.archive,
        )
        self._run = asyncio.create_task(self.supervisor.run(), name="supervisor")

    def _webhook_routes(self) -> Sequence[Route]:
        if self.settings.server.webhooks != "in_process":
            return []
        hooks = {name: plan.hook() for name, plan in plans_of(self.settings.accounts).items()}
        return webhook_routes(hooks, self, clock=self.clock, telemetry=self.telemetry) if hooks else []

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        """A webhook named a batch; whether there was reason to look at it, None when nobody waits for it.

        Raises:
            KafkaUnavailable: it cannot be known yet.
        """
        if self.supervisor is None or not self.supervisor.fleet.is_ready:
            raise KafkaUnavailable("the ledgers are still being read")
        return await self.supervisor.poke(account, provider_batch_id)

    def _metrics_text(self) -> bytes:
        if self._server is not None:
            self.telemetry.gauge("bound_used", self._server.connections, bound="admin_connections")
            self.telemetry.gauge("bound_limit", MAX_CONNECTIONS, bound="admin_connections")
        text = getattr(self.telemetry, "metrics_text", None)
        return b"" if text is None else bytes(text())

    async def wait(self) -> None:
        """Return when the service has ended by itself; raises what ended it."""
        if self._run is not None:
            await asyncio.shield(self._run)

    async def stop(self) -> bool:
        """Drain within the budget, and close everything within ``STOP_RESERVE_S`` more.

        Returns whether all was drained and closed in time. What hangs beyond that is left to the end of the process.
        """
        loop = asyncio.get_running_loop()
        stop_by = loop.time() + self.settings.stop_budget_s + STOP_RESERVE_S
        done = True
        if self.supervisor is not None:
            done = await self.supervisor.stop()
        else:
            self.telemetry.event("service_stopped", drained=True, reason="nothing had begun")
        steps = [*(provider.close() for provider in self.providers.values()), self.store.close(), self.kafka.aclose()]
        if self._run is not None:
            steps.append(_ended(self._run))
        closing = [asyncio.create_task(one, name="closing") for one in steps]
        # Half of the time that is left: the probes and the last metrics want some too.
        ended, late = await asyncio.wait(closing, timeout=max(0.0, stop_by - loop.time()) / 2)
        for task in late:
            task.cancel()
        for task in ended:
            task.result()
        servers = [one for one in (self._webhooks, self._server) if one is not None]
        await asyncio.gather(*(one.stop(max(0.1, stop_by - loop.time()) / 2) for one in servers))
        close = getattr(self.telemetry, "close", None)
        if close is not None:
            await close(max(0.1, stop_by - loop.time()) / 2)
        return done and not late

    # -- what the admin address asks

    def not_live(self) -> Sequence[str]:
        """What the watchdog finds wrong."""
        return [] if self.supervisor is None else self.supervisor.complaints()

    def not_ready(self) -> Sequence[str]:
        """Why not all of the work is done now."""
        return ["starting"] if self.supervisor is None else self.supervisor.unready()

    def not_started(self) -> Sequence[str]:
        """Why the start is not over."""
        if self.supervisor is None or self.supervisor.state is RunState.STARTING:
            return ["starting"]
        return []

    async def status(self) -> Mapping[str, object]:
        """A short account of what waits and what is on its way."""
        own = {} if self._webhooks is None else {"webhooks": self._webhooks.status()}
        if self.supervisor is None:
            return {"state": "starting", **own}
        return {**self.supervisor.status(), **own}

    async def batches(self) -> Sequence[Mapping[str, object]]:
        """The ``batch_jobs`` read model."""
        return [] if self.supervisor is None else await self.supervisor.batches()

    async def batch_events(self, batch_id: str) -> Sequence[Mapping[str, object]]:
        """One batch's history."""
        return [] if self.supervisor is None else await self.supervisor.batch_events(batch_id)


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for its end. What ended it was told when it happened, and is raised by ``Service.wait``."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


class _LastWord:
    """Ends the process when its stop does not end. A thread: what hangs may be the event loop, or its closing."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None
        self.code = EXIT_DRAINED

    def begin(self) -> None:
        """The time runs from the first call."""
        if self._timer is None:
            self._timer = threading.Timer(self._limit_s, self._speak)
            self._timer.daemon = True
            self._timer.start()

    def withdraw(self) -> None:
        """All is over in time."""
        if self._timer is not None:
            self._timer.cancel()

    def _speak(self) -> None:
        os._exit(self.code or EXIT_BUDGET_PASSED)


def run_service(settings: Settings) -> int:
    """Run until a signal or a failure; the exit code says which (see the ``EXIT_`` constants).

    From the signal or the failure on, the process lives at most ``stop_budget_s`` + ``STOP_RESERVE_S``.
    """
    runner_factory: Any = None
    with contextlib.suppress(ImportError):  # not on every platform
        runner_factory = import_module("uvloop").new_event_loop
    last_word = _LastWord(settings.stop_budget_s + STOP_RESERVE_S)
    try:
        # Its end is part of the stop: it waits for tasks and threads that were left, for which nobody else has a limit.
        with asyncio.Runner(loop_factory=runner_factory) as runner:
            return runner.run(_serve(settings, last_word))
    finally:
        last_word.withdraw()


async def _serve(settings: Settings, last_word: _LastWord) -> int:
    service = Service(settings)
    telemetry: ServiceTelemetry = service.telemetry
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal(name: str) -> None:
        if asked.is_set():
            os._exit(EXIT_SECOND_SIGNAL)  # a second signal means: now
        last_word.begin()
        telemetry.event("service_stopping", signal=name, budget_s=settings.stop_budget_s)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    code = EXIT_DRAINED
    try:
        stop = asyncio.create_task(asked.wait())
        starting = asyncio.create_task(service.start(), name="start")
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ended = asyncio.create_task(service.wait())
            await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if ended.done():
                error = ended.exception()
                if error is not None:
                    code = EXIT_FAILED
            else:
                ended.cancel()
        else:  # told to stop while it looked around: nothing was read, so nothing is left to do
            starting.cancel()
            await asyncio.wait({starting}, timeout=START_PATIENCE_S)
    except GateRefused as refused:
        for finding in refused.findings:
            telemetry.event("gate_refused", finding=finding)
        code = EXIT_GATE_REFUSED
    except BatchferryError as error:
        telemetry.event("task_failed", task="start", **error_fields(error))
        code = EXIT_FAILED
    last_word.code = code
    last_word.begin()
    drained = await service.stop()
    return EXIT_BUDGET_PASSED if code == EXIT_DRAINED and not drained else code


# ------------------------------------------------------------------- parts that only the command line joins


def run_simulator(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    scenario_file: Path | None = None,
    faults_file: Path | None = None,
    clock: Mapping[str, object] | None = None,
    data_dir: Path | None = None,
    keys: Mapping[str, str] | None = None,
    seed: int = 0,
    idle_exit_s: float | None = None,
    broker_dir: Path | None = None,
    webhook_url: str | None = None,
    webhook_secret_file: Path | None = None,
    on_ready: Callable[[str, str | None], None] | None = None,
) -> None:
    """Run a simulated provider until a signal or idleness ends it; blocks.

    Args:
        clock: ``speed``, ``origin``, ``started`` as in the service's settings.
        keys: API keys with the project each belongs to; none: the one default key.
        broker_dir: an embedded broker runs beside it, as long as it does, with its data here.
        webhook_url: where webhooks go, instead of where the scenario says.
        webhook_secret_file: holds what they are proven by, instead of the scenario's secret.
        on_ready: called with the base URL and, if there is one, the broker's address.

    Raises:
        ConfigError: the scenario, the faults, the folder or the port cannot be used; every fault is listed.
        KafkaUnavailable: the embedded broker did not start.
    """
    scenario = Scenario() if scenario_file is None else load_scenario(scenario_file)
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "seed": seed,
        "idle_exit_s": idle_exit_s,
        "scenario": with_webhooks(scenario, webhook_url, webhook_secret_file),
        "faults": () if faults_file is None else _fault_rules(faults_file),
        "clock": {"started_real" if name == "started" else name: value for name, value in (clock or {}).items()},
    }
    if keys:
        given["keys"] = dict(keys)
    try:
        settings = SimulatorSettings.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_told(error, "simulator")) from error
    broker = None if broker_dir is None else EmbeddedBroker(broker_dir)
    lapsed: LapsedMembers | None = None
    if broker is not None:
        broker.start()
        lapsed = LapsedMembers(broker.bootstrap)
        lapsed.start()
    try:
        address = None if broker is None else broker.bootstrap
        run_forever(settings, None if on_ready is None else lambda url: on_ready(url, address))
    finally:
        if lapsed is not None:
            lapsed.stop()
        if broker is not None:
            broker.stop()


def _fault_rules(path: Path) -> tuple[FaultRule, ...]:
    try:
        _, found = parse_yaml(path.read_text(encoding="utf-8"))
        return TypeAdapter(tuple[FaultRule, ...]).validate_python(found or ())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"faults {path}: cannot be read ({type(error).__name__}): give a readable file"]) from error
    except YamlFault as fault:
        where = "" if fault.line is None else f" line {fault.line} column {fault.column}"
        raise ConfigError([f"faults {path}{where}: {fault.problem}: mend the file"]) from None
    except ValidationError as error:
        raise ConfigError(_told(error, f"faults {path}")) from error


def _told(error: ValidationError, what: str) -> list[str]:
    return [f"{what}: {'.'.join(map(str, fault['loc'])) or 'document'}: {fault['msg']}" for fault in error.errors()]
