"""The archive of result files: private, whole, bounded, and honest about what it could not do."""

from __future__ import annotations

import hashlib
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from batchferry.domain.errors import StoreUnavailable
from batchferry.store import archive as module
from batchferry.store.archive import Archive, Kept, WhenFull

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
BATCH = "01JTESTBATCH"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A result file as it has landed."""
    path = tmp_path / "landed"
    path.write_bytes(b'{"custom_id":"1"}\n')
    path.chmod(0o644)
    return path


async def opened(folder: Path, **options: object) -> Archive:
    """An archive that is ready."""
    made = Archive(folder, **options)  # type: ignore[arg-type]
    assert await made.open() is None
    return made


async def kept(archive: Archive, source: Path, batch_id: str = BATCH, at: datetime = NOW, **options: object) -> Kept:
    """A file that could be kept."""
    found = await archive.keep(source, batch_id, "output", at, **options)  # type: ignore[arg-type]
    assert isinstance(found, Kept), found
    return found


def read(path: Path) -> bytes:
    """What a file holds."""
    return path.read_bytes()


def is_there(path: Path) -> bool:
    """Whether a file is there."""
    return path.exists()


def names(folder: Path) -> list[str]:
    """The batches whose files are there."""
    return sorted(path.name.split(".")[0] for path in folder.glob("*.jsonl"))


async def test_a_file_is_kept_under_a_name_that_says_what_it_is(tmp_path: Path, source: Path) -> None:
    """Batch, kind and the sum of its bytes, at the time that was told; the landed file stays."""
    archive = await opened(tmp_path / "a")
    sha256 = hashlib.sha256(read(source)).hexdigest()
    found = await kept(archive, source, sha256=sha256)
    assert found.file.path == tmp_path / "a" / f"{BATCH}.output.{sha256}.jsonl"
    assert read(found.file.path) == read(source)
    assert (found.is_new, found.file.size_bytes, found.file.kept_at) == (True, 18, NOW)
    assert await archive.files() == (found.file,)


async def test_nobody_else_can_read_it(tmp_path: Path, source: Path) -> None:
    """0700 and 0600, whatever the umask, the folder's rights before and the file's own."""
    (tmp_path / "a").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        await kept(await opened(tmp_path / "a"), source)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").iterdir()} == {0o600}


async def test_the_same_file_twice_is_kept_once(tmp_path: Path, source: Path) -> None:
    """A second landing after a crash changes nothing."""
    archive = await opened(tmp_path / "a")
    first = await kept(archive, source)
    again = await kept(archive, source, at=NOW + timedelta(hours=1))
    assert not again.is_new
    assert again.file == first.file
    assert len(names(tmp_path / "a")) == 1


async def test_moving_removes_the_landed_file_only_when_it_is_kept(tmp_path: Path, source: Path) -> None:
    """A refusal leaves the only copy where it is."""
    full = await opened(tmp_path / "full", max_bytes=10)
    assert isinstance(await full.keep(source, BATCH, "output", NOW, move=True), StoreUnavailable)
    assert is_there(source)
    await kept(await opened(tmp_path / "a"), source, move=True)
    assert not is_there(source)


async def test_it_is_synced_before_it_has_its_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, then name, then folder: a power cut leaves the whole file or none."""
    said: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(fd: int) -> None:
        said.append("sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        fsync(fd)

    def noted_rename(path: Path, target: Path) -> Path:
        said.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    await kept(await opened(tmp_path / "a"), source)
    assert said == ["sync file", "rename", "sync folder"]


async def test_another_sum_than_the_download_s_is_refused(tmp_path: Path, source: Path) -> None:
    """What was changed between landing and here is not kept as if it were the provider's."""
    archive = await opened(tmp_path / "a")
    found = await archive.keep(source, BATCH, "output", NOW, sha256="0" * 64)
    assert isinstance(found, StoreUnavailable)
    assert "another sha256" in str(found)
    assert names(tmp_path / "a") == []
    assert not list((tmp_path / "a").glob("*.partial"))


async def test_a_full_archive_refuses_and_keeps_what_it_has(tmp_path: Path, source: Path) -> None:
    """The refusal says numbers and what to do."""
    archive = await opened(tmp_path / "a", max_bytes=40)
    await kept(archive, source, "one")
    await kept(archive, source, "two")
    found = await archive.keep(source, "three", "output", NOW)
    assert isinstance(found, StoreUnavailable)
    assert "36 of 40 bytes are used and a file of 18 does not fit" in str(found)
    assert names(tmp_path / "a") == ["one", "two"]


async def test_or_the_oldest_make_room(tmp_path: Path, source: Path) -> None:
    """As many as must, told of; but none for a file that could never fit."""
    archive = await opened(tmp_path / "a", max_bytes=40, when_full=WhenFull.DROP_OLDEST)
    await kept(archive, source, "one", NOW)
    await kept(archive, source, "two", NOW + timedelta(seconds=1))
    found = await kept(archive, source, "three", NOW + timedelta(seconds=2))
    assert [file.batch_id for file in found.dropped] == ["one"]
    assert names(tmp_path / "a") == ["three", "two"]
    large = tmp_path / "large"
    large.write_bytes(b"x" * 41)
    assert isinstance(await archive.keep(large, "four", "output", NOW), StoreUnavailable)
    assert names(tmp_path / "a") == ["three", "two"]


async def test_the_same_file_in_a_full_archive_costs_nothing(tmp_path: Path, source: Path) -> None:
    """What is there already needs no room."""
    archive = await opened(tmp_path / "a", max_bytes=20)
    await kept(archive, source)
    assert not (await kept(archive, source)).is_new


async def test_old_files_go(tmp_path: Path, source: Path) -> None:
    """By the time at which they were added; what is not ours stays."""
    archive = await opened(tmp_path / "a", max_age_s=3600)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    os.utime(tmp_path / "a" / "notes.txt", (0, 0))
    await kept(archive, source, "one", NOW)
    await kept(archive, source, "two", NOW + timedelta(minutes=30))
    assert await archive.expire(NOW + timedelta(minutes=60)) == ()
    gone = await archive.expire(NOW + timedelta(minutes=61))
    assert isinstance(gone, tuple)
    assert [file.batch_id for file in gone] == ["one"]
    assert names(tmp_path / "a") == ["two"]
    assert (tmp_path / "a" / "notes.txt").exists()


async def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path: Path) -> None:
    """Not sooner: it may be another process's that is at work."""
    (tmp_path / "a").mkdir()
    old, new = (tmp_path / "a" / f"{name}.output.1.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    await opened(tmp_path / "a")
    assert (old.exists(), new.exists()) == (False, True)


async def test_a_disk_that_fails_is_a_value_and_leaves_no_half_file(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full disk, missing source, a folder that is a file: StoreUnavailable, never an exception."""
    archive = await opened(tmp_path / "a")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        found = await archive.keep(source, BATCH, "output", NOW)
    assert isinstance(found, StoreUnavailable)
    assert "No space left on device; free space there" in str(found)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [module.LOCK_NAME]
    assert isinstance(await archive.keep(tmp_path / "gone", BATCH, "output", NOW), StoreUnavailable)
    assert isinstance(await Archive(source).open(), StoreUnavailable)
    assert isinstance(await Archive(tmp_path / "never opened").files(), StoreUnavailable)
    assert isinstance(await Archive(tmp_path / "never opened").expire(NOW), tuple | StoreUnavailable)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a.b", ".a", "x" * 129])
async def test_a_name_that_could_leave_the_folder_is_our_bug(tmp_path: Path, source: Path, name: str) -> None:
    """Dots too: they part the name."""
    archive = await opened(tmp_path / "a")
    with pytest.raises(ValueError, match="cannot be part of a file name"):
        await archive.keep(source, name, "output", NOW)
    with pytest.raises(ValueError, match="cannot be part of a file name"):
        await archive.keep(source, BATCH, name, NOW)
    with pytest.raises(ValueError, match="aware"):
        await archive.keep(source, BATCH, "output", NOW.replace(tzinfo=None))
