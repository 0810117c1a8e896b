"""Apache Kafka as a child process: fetched once by Maven, one node that is broker and controller (KRaft)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from xml.etree import ElementTree as ET

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
FETCH_LIMIT_S = 600
READY_LIMIT_S = 90
STOP_LIMIT_S = 20
HEAP_MB = 512

LOG4J = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


class BrokerUnavailable(Exception):
    """No real broker can be had here; the text says why."""


class BrokerFailed(Exception):
    """There is a real broker, but it did not come up; the text has the end of its log."""


def kafka_version() -> str:
    """The Apache Kafka version that ``pom.xml`` names."""
    namespace = {"m": "http://maven.apache.org/POM/4.0.0"}
    found = ET.parse(HERE / "pom.xml").findtext("m:properties/m:kafka.version", namespaces=namespace)
    assert found, "pom.xml names no kafka.version"
    return found


def cache_folder() -> Path:
    """Where the jars are kept between runs."""
    named = os.environ.get("BATCHFERRY_BROKER_CACHE")
    return Path(named) if named else REPOSITORY / ".cache" / f"kafka-{kafka_version()}"


def fetch_jars() -> Path:
    """The folder of broker jars, fetched by Maven the first time; safe to call from several processes.

    Raises:
        BrokerUnavailable: no Java, no Maven, or the fetch failed.
    """
    if shutil.which("java") is None:
        raise BrokerUnavailable("no java on the PATH")
    folder = cache_folder()
    jars, complete = folder / "lib", folder / "complete"
    if complete.exists():
        return jars
    if shutil.which("mvn") is None:
        raise BrokerUnavailable(f"no mvn on the PATH, and no jars in the cache folder {folder.name}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may start at once; one of them fetches
        if complete.exists():
            return jars
        command = [
            "mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies",
            "-DincludeScope=runtime", f"-DoutputDirectory={jars}",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BrokerUnavailable(f"mvn did not finish: {error}") from error
        if done.returncode != 0:
            last = (done.stdout + done.stderr).strip().splitlines()[-3:]
            raise BrokerUnavailable("mvn could not fetch the broker: " + " / ".join(last))
        complete.touch()
    return jars


def free_port() -> int:
    """A loopback port nobody listens on, below those the system gives to outgoing connections."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RealBroker:
    """One Kafka node on loopback with its data in ``folder``; killed and started again it finds its data."""

    kind = "apache-kafka"
    is_real = True

    def __init__(self, folder: Path, port: int | None = None, settings: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.version = kafka_version()
        self._controller_port = free_port()
        self._extra = settings or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Format the data folder if it is new, start the node and wait until it answers.

        Raises:
            BrokerUnavailable: it cannot be fetched.
            BrokerFailed: it did not come up in time.
        """
        jars = fetch_jars()
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        (self.folder / "log4j2.properties").write_text(LOG4J)
        if not (self.folder / "data" / "meta.properties").exists():
            cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
            self._java(jars, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)).wait(60)
        self._process = self._java(jars, "kafka.Kafka", str(properties))
        self._wait_until_ready()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL when that takes too long; twice is once."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL: the crash."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, kill: bool = True) -> None:
        """Down and up again on the same port and data."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay, answers do not come."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: undo ``freeze``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def recover(self) -> None:
        """Running and answering again, whatever was done to it."""
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self.start()
        else:
            self.thaw()

    def wait(self) -> int:
        """Block until the node ends by itself or by a signal."""
        assert self._process is not None
        return self._process.wait()

    def _java(self, jars: Path, main: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            "java", f"-Xmx{HEAP_MB}m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
            "-Djava.awt.headless=true", f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}",
            "-cp", f"{jars}/*", main, *arguments,
        ]  # fmt: skip
        with (self.folder / "broker.log").open("ab") as log:
            # Its own session: Ctrl-C in the test run must reach pytest, which then stops the broker in order.
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    def _wait_until_ready(self) -> None:
        from batchferry.kafka.embedded import answers  # noqa: PLC0415 (the command's --help needs no batchferry)

        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                self._process = None
                raise BrokerFailed(f"the broker ended at once: {self._log_tail()}")
            if answers(self.bootstrap):
                return
            time.sleep(0.1)
        self.kill()
        raise BrokerFailed(f"the broker did not answer within {READY_LIMIT_S} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        log = (self.folder / "broker.log").read_text(errors="replace")
        return " / ".join(log.strip().splitlines()[-5:])

    def _settings(self) -> dict[str, str]:
        small = "5"  # partitions of the internal topics: each costs files and start-up time
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self.folder / "data"),
            "auto.create.topics.enable": "false",
            "default.replication.factor": "1",
            "min.insync.replicas": "1",
            "offsets.topic.num.partitions": small,
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": small,
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
            "controlled.shutdown.enable": "false",
            "broker.heartbeat.interval.ms": "500",
            "num.network.threads": "2",
            "num.io.threads": "4",
            "log.cleaner.dedupe.buffer.size": "20971520",
            **self._extra,
        }
