"""The state folder: ours alone, locked by one process, emptied at start."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from batchferry.domain.errors import GateRefused, StoreUnavailable

LOCK_NAME = "batchferry.lock"
"""Held while a process uses the folder; also the sign that the folder is ours and may be emptied."""
INDEX_NAME = "index.sqlite3"
SPOOL_NAME = "spool"
DOWNLOADS_NAME = "downloads"

_INDEX_FILES = (INDEX_NAME, f"{INDEX_NAME}-journal", f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm")
_FOLDERS = (SPOOL_NAME, DOWNLOADS_NAME)
_OURS = frozenset((LOCK_NAME, *_INDEX_FILES, *_FOLDERS))
_NOT_OURS_BUT_HARMLESS = frozenset(("lost+found",))
"""Stands at the root of every ext file system, so also in an empty volume."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class StateFolder:
    """The folder's life: check, lock, wipe, use, unlock. All methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = path / INDEX_NAME
        self.spool_path = path / SPOOL_NAME
        self.downloads_path = path / DOWNLOADS_NAME
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Take the folder and empty it; twice in a row is the same as once.

        Raises:
            GateRefused: it holds files that are not ours, or another process uses it.
            StoreUnavailable: it cannot be made, emptied or written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock()
        except FileExistsError as error:
            raise GateRefused([f"state folder {self.path} is a file: name a folder instead"]) from error
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            # A mounted volume may belong to root and be shared by group: then it cannot be narrowed, and the
            # rights of what stands inside (0700 and 0600) have to do.
            with suppress(PermissionError):
                self.path.chmod(0o700)
            self._wipe()
            for folder in (self.spool_path, self.downloads_path):
                folder.mkdir(mode=0o700)
            _make_private(self.index_path)
        except OSError as error:
            self.close()
            raise _unusable(self.path, error) from error

    def close(self) -> None:
        """Let another process have the folder; safe to call twice."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def download_path(self, batch_id: str, kind: str) -> Path:
        """An empty 0600 file for a result file, or the one that is already there.

        Raises:
            ValueError: a part could leave the folder or is not a plain name.
            StoreUnavailable: the file cannot be made.
        """
        for part in (batch_id, kind):
            if _SAFE_NAME.fullmatch(part) is None:
                raise ValueError(f"{part!r} cannot be part of a file name: letters, digits, '_', '-' and '.' only")
        path = self.downloads_path / f"{batch_id}.{kind}"
        try:
            _make_private(path)
        except OSError as error:
            raise _unusable(path, error) from error
        return path

    def _refuse_foreign(self) -> None:
        entries = sorted(entry for entry in self.path.iterdir() if entry.name not in _NOT_OURS_BUT_HARMLESS)
        # Names alone prove little ("spool" and "downloads" are anybody's words): only the lock file makes them ours.
        is_ours = any(entry.name == LOCK_NAME and entry.is_file() and not entry.is_symlink() for entry in entries)
        for entry in entries:
            if not is_ours or entry.name not in _OURS or entry.is_symlink():
                finding = (
                    f"state folder {self.path} holds {entry.name!r}, which is not ours, and everything in the folder"
                    " is deleted at every start: name a folder that is empty or not there yet, or move that file away"
                )
                raise GateRefused([finding])

    def _lock(self) -> None:
        if self._lock_fd is not None:
            return
        fd = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            finding = (
                f"state folder {self.path} is in use by another batchferry process ({holder or 'unknown'}): stop that"
                " one first, or give each replica a folder of its own"
            )
            raise GateRefused([finding]) from error
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _wipe(self) -> None:
        for name in _INDEX_FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            with suppress(FileNotFoundError):
                shutil.rmtree(self.path / name)


def _make_private(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def _unusable(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"{path}: {error.strerror}; free space there or make it writable for this user")
