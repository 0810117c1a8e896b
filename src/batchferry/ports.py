"""The seams: what the engine needs of Kafka, of a provider, of the local disk, of time and of telemetry.

Everything here is a Protocol or a plain value. The engine is written against these names only; the rooms
``kafka``, ``providers``, ``store`` and ``simulator`` play the parts, and ``app`` joins them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.ids import BatchId, FileId, ProviderBatchId
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    DownloadedFile,
    FilePage,
    FileRole,
    LineError,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, SyncAnswer, UnreadableLine

Headers = tuple[tuple[str, bytes | None], ...]
"""A Kafka header may have no value: None goes in and out as it is."""
LogMark = Mapping[tuple[str, int], int]
"""Ends (next offsets) by topic and partition."""


# --------------------------------------------------------------------------------------------- time


@runtime_checkable
class Clock(Protocol):
    """Time as the service sees it; a rehearsal runs it faster than the wall clock."""

    def now(self) -> datetime:
        """The instant, aware UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, at the speed of ``now``."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds of this clock."""
        ...


# -------------------------------------------------------------------------------------------- kafka


class Record(Protocol):
    """A consumed Kafka record, as the client hands it out (aiokafka's ConsumerRecord fits as it is)."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since the epoch; negative when the record has none."""
    timestamp_type: int
    """0 = set by the producer, 1 = set by the broker at append."""
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class OutRecord(NamedTuple):
    """A record to be produced. ``partition`` None lets the key decide (murmur2, as every Kafka client does)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class AssignmentListener(Protocol):
    """Told about every rebalance, synchronously; must return at once and never raise."""

    def on_assignment(self, kept: frozenset[int], added: frozenset[int], lost: frozenset[int]) -> None:
        """The group has a new generation.

        ``added`` partitions are paused until ``resume`` names a position; ``kept`` ones go on where they
        were; work for ``lost`` ones must stop.
        """
        ...

    def on_suspect(self, partitions: frozenset[int]) -> None:
        """A rebalance has begun: start nothing new for these partitions that cannot be undone."""
        ...


class RequestConsumer(Protocol):
    """The group member that reads the input topic; the group only balances load, it proves nothing."""

    async def start(self, listener: AssignmentListener) -> None:
        """Join the group.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        ...

    async def poll(self, max_records: int, timeout_ms: int) -> Mapping[int, Sequence[Record]]:
        """Records of resumed partitions by partition, offsets ascending; empty after ``timeout_ms``.

        Never cancel this call. A partition whose position was deleted from the log is paused and reported
        through ``lost_positions`` instead of jumping.
        """
        ...

    def lost_positions(self) -> Mapping[int, int]:
        """Partitions whose position lies below the log start, with that position; cleared by ``resume``."""
        ...

    def assignment(self) -> frozenset[int]: ...

    def pause(self, partitions: Iterable[int]) -> None: ...

    def resume(self, partition: int, offset: int | None = None) -> None:
        """Deliver this partition again, from ``offset`` if given, else from where it was paused."""
        ...

    def position(self, partition: int) -> int | None:
        """The next offset that will be delivered, past control markers where the client knows; None if unknown."""
        ...

    def complaints(self) -> Sequence[str]:
        """What the watchdog finds wrong now (dead tasks, stuck rejoin, no poll); empty when healthy."""
        ...

    async def confirms_assignment(self, partition: int, timeout_s: float) -> bool:
        """Whether a heartbeat answered after this call still has the partition assigned to us."""
        ...

    async def stop(self) -> None:
        """Leave the group; bounded, safe to call twice."""
        ...


class PartitionProducer(Protocol):
    """The one transactional producer of one input partition. After any exception it is dead for ever."""

    async def init(self) -> None:
        """Fence the predecessor and end its transaction.

        Raises:
            PartitionLost: fenced while starting.
            KafkaUnavailable: no answer in time.
        """
        ...

    async def transact(self, records: Sequence[OutRecord], committed_offset: int | None = None) -> None:
        """All records and the input partition's committed offset in one transaction, or nothing.

        Raises:
            PartitionLost: fenced, or a record was refused: nothing of this transaction is visible.
            CommitUnknown: the commit was sent and not answered.
        """
        ...

    @property
    def last_transaction_at(self) -> float:
        """Monotonic real seconds of the last finished transaction (or of init)."""
        ...

    async def close(self) -> None:
        """Give up the connection; bounded, never raises, safe to call twice."""
        ...


class LogReader(Protocol):
    """Reads topics without a group, always ``read_committed``. One read at a time each instance."""

    async def start(self) -> None: ...

    def read_to_end(self, topic: str, partition: int, start: int | None = None) -> AsyncIterator[Sequence[Record]]:
        """Every record from ``start`` (None: the log's start) to the high watermark as it is now.

        Ends when the position has reached that watermark, control markers included.

        Raises:
            KafkaUnavailable: the end could not be reached in time (a hanging transaction, or no broker).
        """
        ...

    def read_offsets(self, topic: str, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[Record]]:
        """The records at these offsets that the log still has, ascending, in bounded chunks."""
        ...

    async def bounds(self, topic: str, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        """Log start and high watermark (end) of each partition."""
        ...

    async def stop(self) -> None: ...


class LogTail(Protocol):
    """Follows whole topics without a group, ``read_committed``, from the log's start."""

    async def start(self, topics: Sequence[str]) -> None: ...

    async def poll(self, timeout_ms: int) -> Sequence[Record]: ...

    async def caught_up(self) -> bool:
        """Whether everything committed when this was asked has been returned by ``poll``.

        While others write without a pause this may never be so: take a ``mark`` once and wait for ``reached``.
        """
        ...

    async def mark(self) -> LogMark:
        """The ends of all partitions now, those added since the last look included.

        Raises:
            KafkaUnavailable: no answer in time.
        """
        ...

    def reached(self, mark: LogMark) -> bool:
        """Whether ``poll`` has returned everything below these ends; False after ``stop``."""
        ...

    async def stop(self) -> None: ...


class ReadPositionCommitter(Protocol):
    """Commits the read position to the memberless group ``<group>.read``, for lag tools and autoscalers."""

    async def commit(self, positions: Mapping[int, int]) -> None:
        """Best effort: a failure is reported by the next ``complaints``-style metric, never raised."""
        ...

    async def stop(self) -> None: ...


class TopicDescription(NamedTuple):
    """A topic as the cluster describes it."""

    name: str
    partitions: int
    configs: Mapping[str, str]


class KafkaAdmin(Protocol):
    """What start-up checks, the demo and the CLI ask the cluster."""

    async def describe(self, topics: Sequence[str]) -> Mapping[str, TopicDescription | None]:
        """Each topic's description, None where it does not exist.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        ...

    async def create(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Make the topic if it is not there; an existing one is left alone."""
        ...

    async def grow(self, topic: str, partitions: int) -> None:
        """Raise an existing topic to so many partitions; one that has as many or more is left alone.

        Returns when every partition has a leader. Several callers may ask at one time.

        Raises:
            KafkaUnavailable: no broker answered, the topic does not exist, or the cluster refuses; the text says which.
        """
        ...

    async def committed(self, group: str, topic: str) -> Mapping[int, int]:
        """Committed offsets of the group by partition; partitions without one are absent."""
        ...

    async def close(self) -> None: ...


class KafkaPort(Protocol):
    """The factory of everything Kafka; one an application."""

    def consumer(self, topic: str, group: str) -> RequestConsumer: ...

    def partition_producer(self, topic: str, partition: int, group: str, transactional_id: str) -> PartitionProducer:
        """``group`` and ``topic`` name the consumer group whose offset of ``partition`` a transaction commits."""
        ...

    def reader(self) -> LogReader: ...

    def tail(self) -> LogTail: ...

    def read_position(self, topic: str, group: str) -> ReadPositionCommitter: ...

    def plain_producer(self) -> PlainProducer: ...

    async def admin(self) -> KafkaAdmin: ...


class PlainProducer(Protocol):
    """An idempotent producer outside the partitions' transactions: ``control`` records, ``produce``."""

    async def start(self) -> None: ...

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Returns when all are acknowledged.

        Raises:
            KafkaUnavailable: not acknowledged in time; some may have been written.
        """
        ...

    async def stop(self) -> None: ...


# ----------------------------------------------------------------------------------------- provider


class UploadSource(Protocol):
    """The batch file as a stream that can be started again from zero."""

    @property
    def size_bytes(self) -> int: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The whole file in chunks of at most 1 MiB; each call starts from the beginning."""
        ...


class BatchProvider(Protocol):
    """One provider account. Every method answers with a value; none retries a ``create`` by itself."""

    name: str
    is_inline: bool
    """Whether a create carries the rows itself: ``create_inline`` then takes the place of ``upload`` and ``create``."""

    async def upload(
        self, source: UploadSource, file_name: str, expires_after_s: int | None
    ) -> UploadedFile | CallFailed: ...

    async def create(
        self,
        file_id: FileId,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str],
        model: str = "",
    ) -> BatchSnapshot | CallFailed:
        """Ask once for a batch of an uploaded file. ``model`` is the rows' own, for those who want it on the job."""
        ...

    async def create_inline(self, source: UploadSource, endpoint: str, model: str) -> BatchSnapshot | CallFailed:
        """Ask once for a batch of these rows (lines as ``line_head`` and ``render_line`` make them), streamed."""
        ...

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed: ...

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed: ...

    async def list_files(self, role: FileRole, cursor: str | None = None) -> FilePage | CallFailed:
        """A page of the account's batch files of this role, newest first, whoever made them."""
        ...

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed: ...

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed: ...

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """None when the file is gone; a 404 counts as gone."""
        ...

    async def answer(self, endpoint: str, body: bytes, timeout_s: float) -> SyncAnswer:
        """Run one row now, at the ordinary endpoint and the full price. Sent once, over a connection of its own.

        Args:
            endpoint: as in the row, such as ``/v1/chat/completions``.
            body: the request body, sent unchanged.
            timeout_s: real seconds for the whole call.
        """
        ...

    def check_request(self, endpoint: str, body: bytes) -> tuple[str, str] | None:
        """The first member of a request that a batch refuses, and why, with the remedy; None: nothing is known.

        Told before anything is sent, once for every record. ``body`` is a JSON object.
        """
        ...

    def render_line(self, url: str, body: bytes) -> bytes:
        """The request line behind its custom_id member, with the last newline: what is spooled.

        ``body`` is JSON without raw line breaks and goes in unchanged.
        """
        ...

    def line_head(self, wire_id: str) -> bytes:
        """What the upload puts in front of a spooled line."""
        ...

    def parse_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:
        """Take one result line apart and classify its row; the bytes of the body stay as they are."""
        ...

    def classify_batch_error(self, error: LineError) -> BatchErrorKind:
        """What an entry of a failed batch's error list is about."""
        ...

    @property
    def clock_skew_s(self) -> float | None:
        """Provider's clock minus ours, from the last ``Date`` header; None before the first answer."""
        ...

    async def close(self) -> None: ...


# -------------------------------------------------------------------------------------------- archive


class KeptFile(Protocol):
    """What became of a file that the archive was given."""

    @property
    def is_new(self) -> bool:
        """False: the same file was there already."""
        ...

    @property
    def dropped(self) -> Sequence[object]:
        """Files that went, for age or for room."""
        ...


class ResultArchive(Protocol):
    """Where copies of result files stay. What cannot be done is answered, not raised."""

    async def open(self) -> StoreUnavailable | None:
        """Make the folder usable; None when it is."""
        ...

    async def keep(
        self, source: Path, batch_id: str, kind: str, now: datetime, *, sha256: str | None = None
    ) -> KeptFile | StoreUnavailable:
        """Copy a file; it is on disk and whole when this returns."""
        ...

    async def expire(self, now: datetime) -> Sequence[object] | StoreUnavailable:
        """Delete what is too old."""
        ...


# ---------------------------------------------------------------------------------------- local store


class IndexRow(NamedTuple):
    """What the local index keeps of an accepted record until it is settled."""

    offset: int
    custom_id: str
    key: bytes | None
    headers: Headers
    t0_ms: int
    deadline_ms: int
    key_digest: str
    masked: int = 0
    """Places of the request where personal data was masked."""


class SpoolRef(NamedTuple):
    """A spool segment: the waiting lines of one batch key and partition, offsets ascending."""

    key_digest: str
    partition: int
    number: int


class LocalStore(Protocol):
    """SQLite index and spool segments. A cache: wiped at start, rebuilt from Kafka, never believed over it.

    Raises (all methods):
        StoreUnavailable: the disk does not take the write.
    """

    async def start(self) -> None:
        """Wipe whatever is there and open."""
        ...

    def fullness(self) -> Mapping[str, tuple[int, int]]:
        """How full the store's own bounds are, by name: what is used, and the limit."""
        ...

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Bytes of the folder's file system: what is still free for us, and all. (0, 0) when it cannot be asked."""
        ...

    async def put_rows(self, partition: int, rows: Sequence[IndexRow]) -> None: ...

    async def get_rows(self, partition: int, offsets: Sequence[int]) -> Mapping[int, IndexRow]:
        """The rows found; offsets that are not indexed are absent."""
        ...

    async def indexed(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Which of these offsets the index knows."""
        ...

    async def drop_rows(self, partition: int, offsets: OffsetSet) -> None: ...

    async def drop_partition(self, partition: int) -> None:
        """Forget rows and segments of a partition that now belongs to somebody else."""
        ...

    async def same_custom_ids(self, partition: int, offsets: OffsetSet) -> Sequence[Sequence[int]]:
        """Groups of two or more of these offsets that share a custom_id, each ascending."""
        ...

    def append(self, key: BatchKey, partition: int, lines: Sequence[tuple[int, bytes]]) -> None:
        """Add (offset, line) pairs to the open segment of this key and partition; buffered, bounded."""
        ...

    async def close_segment(self, key: BatchKey, partition: int) -> SpoolRef | None:
        """Seal the open segment; None when there is none."""
        ...

    def stream(
        self, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]
    ) -> AsyncIterator[Sequence[tuple[int, int, bytes]]]:
        """(partition, offset, line) of the wanted offsets, partition then offset ascending, in bounded chunks."""
        ...

    def line_sizes(self, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]) -> Mapping[int, int]:
        """Sum of line bytes by partition of the wanted offsets."""
        ...

    def delete_segments(self, refs: Iterable[SpoolRef]) -> None: ...

    @property
    def spooled_bytes(self) -> int: ...

    @property
    def indexed_rows(self) -> int:
        """Rows in the index, over all partitions."""
        ...

    def download_path(self, batch_id: BatchId, kind: str) -> Path:
        """Where a result file goes (0600, in the state folder)."""
        ...

    async def save_batch(self, row: Mapping[str, object]) -> None:
        """Insert or replace one ``batch_jobs`` row (the machine's read model)."""
        ...

    async def add_batch_event(self, row: Mapping[str, object]) -> None: ...

    async def batches(self) -> Sequence[Mapping[str, object]]: ...

    async def batch_events(self, batch_id: str) -> Sequence[Mapping[str, object]]: ...

    async def close(self) -> None: ...


# ----------------------------------------------------------------------------------------- telemetry


class Telemetry(Protocol):
    """Where the engine tells what happened. Names come from the catalogue in ``telemetry``; no payload, ever."""

    def event(self, name: str, **fields: object) -> None:
        """One catalogued log event (level and help stand in the catalogue)."""
        ...

    def count(self, name: str, value: float = 1, **labels: str) -> None: ...

    def gauge(self, name: str, value: float, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def batch_span(self, name: str, attributes: Mapping[str, object], parents: Sequence[bytes] = ()) -> None:
        """A finished span with links to the requests' ``traceparent`` values."""
        ...
