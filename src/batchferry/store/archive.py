"""Copies of result files that outlive their landing: a folder of the owner's, ours to write and nobody else's to read.

Unlike the state folder it is no cache: a file that is in it was synced to disk before it got its name, and nothing is
deleted except by the policy that was asked for. Names say where a file came from and what it holds::

    <batch_id>.<kind>.<sha256>.jsonl

so that keeping the same file twice keeps it once, and a file that was cut short or changed can be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from batchferry.domain.errors import StoreUnavailable

READ_BYTES = 1024 * 1024
LOCK_NAME = "batchferry-archive.lock"
"""Held while a file is added; also what several processes with one archive wait for."""
PARTIAL_SUFFIX = ".partial"
PARTIAL_MAX_AGE = timedelta(days=1)
"""A file of this name that is older was left by a process that died."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
_NAME = re.compile(
    r"(?P<batch_id>[A-Za-z0-9_][A-Za-z0-9_-]{0,127})\.(?P<kind>[A-Za-z0-9_][A-Za-z0-9_-]{0,127})"
    r"\.(?P<sha256>[0-9a-f]{64})\.jsonl"
)


class WhenFull(StrEnum):
    """What is done when a file does not fit under ``max_bytes``."""

    REFUSE = "refuse"
    """The file is not kept: the caller decides whether its batch waits."""
    DROP_OLDEST = "drop_oldest"
    """The oldest files make room."""


@dataclass(frozen=True, slots=True)
class Archived:
    """A file of the archive."""

    path: Path
    batch_id: str
    kind: str
    sha256: str
    size_bytes: int
    kept_at: datetime
    """When it was added, aware UTC."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What ``Archive.keep`` did."""

    file: Archived
    is_new: bool
    """False: it was there already."""
    dropped: tuple[Archived, ...] = ()
    """Files that went, for age or for room."""


class Archive:
    """One folder of result files.

    Args:
        folder: made with mode 0700 if it is not there.
        max_bytes: of all files together; None: no limit of ours.
        max_age_s: files are deleted this long after they were added; None: never.
        when_full: what happens at ``max_bytes``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        max_age_s: float | None = None,
        when_full: WhenFull = WhenFull.REFUSE,
    ) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._when_full = when_full

    async def open(self) -> StoreUnavailable | None:
        """Make the folder private, and remove what a killed process left half written. None when it can be used."""
        return await asyncio.to_thread(self._open)

    async def keep(
        self, source: Path, batch_id: str, kind: str, now: datetime, *, sha256: str | None = None, move: bool = False
    ) -> Kept | StoreUnavailable:
        """Copy a landed file here, or move it; it is on disk, whole and under its name, when this returns.

        Args:
            source: the file, which must not change meanwhile.
            batch_id: our id of its batch.
            kind: what it is to the batch, such as ``output`` or ``error``.
            now: the time, aware.
            sha256: what the file's bytes are known to have; another sum is a ``StoreUnavailable``.
            move: whether ``source`` is gone afterwards. It is still there when this fails.

        Raises:
            ValueError: ``batch_id`` or ``kind`` is no plain name, or ``now`` is not aware.
        """
        for part in (batch_id, kind):
            if _PART.fullmatch(part) is None:
                raise ValueError(f"{part!r} cannot be part of a file name: letters, digits, '_' and '-' only")
        if now.tzinfo is None:
            raise ValueError("now must be aware")
        return await asyncio.to_thread(self._keep, source, batch_id, kind, now.astimezone(UTC), sha256, move)

    async def expire(self, now: datetime) -> tuple[Archived, ...] | StoreUnavailable:
        """Delete what is older than ``max_age_s``; returns what went. To be called now and then."""
        return await asyncio.to_thread(self._expire, now)

    async def files(self) -> tuple[Archived, ...] | StoreUnavailable:
        """What is here, oldest first; files that are not ours are passed over."""
        return await asyncio.to_thread(self._list_guarded)

    # ------------------------------------------------------------------------------------------- in a thread

    def _open(self) -> StoreUnavailable | None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                return _unusable(self.folder, "not writable")
            # A mounted volume may belong to somebody else: then the rights of the files have to do.
            with contextlib.suppress(PermissionError):
                self.folder.chmod(0o700)
            with self._locked():
                for path in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
                    age_s = datetime.now(UTC).timestamp() - path.stat().st_mtime
                    if age_s > PARTIAL_MAX_AGE.total_seconds():
                        path.unlink(missing_ok=True)
        except OSError as error:
            return _unusable(self.folder, error.strerror)
        return None

    def _keep(
        self, source: Path, batch_id: str, kind: str, now: datetime, sha256: str | None, move: bool
    ) -> Kept | StoreUnavailable:
        partial: Path | None = None
        try:
            with self._locked():
                dropped = list(self._drop_expired(now))
                size_bytes = source.stat().st_size
                if self._max_bytes is not None and size_bytes > self._max_bytes:
                    return self._full(size_bytes)  # before a byte of it is written
                partial = self.folder / f"{batch_id}.{kind}.{os.getpid()}{PARTIAL_SUFFIX}"
                found, size_bytes = _copy(source, partial)
                if sha256 is not None and found != sha256:
                    return StoreUnavailable(
                        f"archive {self.folder}: file {batch_id}.{kind} has another sha256 than when it was downloaded;"
                        " fetch it again"
                    )
                path = self.folder / f"{batch_id}.{kind}.{found}.jsonl"
                is_new = not path.exists()
                if is_new:
                    if not self._make_room(size_bytes, dropped):
                        return self._full(size_bytes)
                    os.utime(partial, (now.timestamp(), now.timestamp()))
                    partial.rename(path)
                    _sync_folder(self.folder)
                kept = Archived(path, batch_id, kind, found, size_bytes, _kept_at(path))
            if move:
                source.unlink(missing_ok=True)
            return Kept(kept, is_new, tuple(dropped))
        except OSError as error:
            return _unusable(self.folder, error.strerror)
        finally:
            if partial is not None:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int, dropped: list[Archived]) -> bool:
        if self._max_bytes is None:
            return True
        there = self._list()
        used_bytes = sum(file.size_bytes for file in there)
        if self._when_full is WhenFull.DROP_OLDEST:
            for file in there:
                if used_bytes + size_bytes <= self._max_bytes:
                    break
                file.path.unlink(missing_ok=True)
                used_bytes -= file.size_bytes
                dropped.append(file)
        return used_bytes + size_bytes <= self._max_bytes

    def _full(self, size_bytes: int) -> StoreUnavailable:
        used_bytes = sum(file.size_bytes for file in self._list())
        return StoreUnavailable(
            f"archive {self.folder} is full: {used_bytes} of {self._max_bytes} bytes are used and a file of"
            f" {size_bytes} does not fit; move files away, raise its limit, or let it drop the oldest"
        )

    def _expire(self, now: datetime) -> tuple[Archived, ...] | StoreUnavailable:
        try:
            with self._locked():
                return tuple(self._drop_expired(now))
        except OSError as error:
            return _unusable(self.folder, error.strerror)

    def _drop_expired(self, now: datetime) -> Iterator[Archived]:
        if self._max_age_s is None:
            return
        oldest = now - timedelta(seconds=self._max_age_s)
        for file in self._list():
            if file.kept_at < oldest:
                file.path.unlink(missing_ok=True)
                yield file

    def _list_guarded(self) -> tuple[Archived, ...] | StoreUnavailable:
        try:
            return tuple(self._list())
        except OSError as error:
            return _unusable(self.folder, error.strerror)

    def _list(self) -> list[Archived]:
        found = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():
                continue
            size_bytes = path.stat().st_size
            found.append(Archived(path, match["batch_id"], match["kind"], match["sha256"], size_bytes, _kept_at(path)))
        return sorted(found, key=lambda file: (file.kept_at, file.path.name))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time, other processes included: two that make room at once would drop too much."""
        fd = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _copy(source: Path, to: Path) -> tuple[str, int]:
    """Copy, sync, and tell sha256 and size of what was written."""
    digest = hashlib.sha256()
    size_bytes = 0
    to.unlink(missing_ok=True)
    fd = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as written, source.open("rb") as read:
        while piece := read.read(READ_BYTES):
            digest.update(piece)
            written.write(piece)
            size_bytes += len(piece)
        written.flush()
        os.fsync(written.fileno())
    return digest.hexdigest(), size_bytes


def _sync_folder(folder: Path) -> None:
    """Without it the new name may be lost with the power although the bytes are there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _kept_at(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _unusable(folder: Path, reason: str | None) -> StoreUnavailable:
    return StoreUnavailable(f"archive {folder}: {reason}; free space there or make it writable for this user")
