"""The state folder: whose it is, who uses it, what a start leaves of it."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import GateRefused, StoreUnavailable
from batchferry.domain.ids import BatchId
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import IndexRow, LocalStore
from batchferry.store import LocalState

KEY = BatchKey("acct", "/v1/chat/completions", "small", "24h")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_the_state_fits_its_port(tmp_path: Path) -> None:
    """LocalState plays the port's part (the type checker proves it, this names every method)."""
    port: LocalStore = LocalState(tmp_path / "state")
    for name in (name for name in vars(LocalStore) if not name.startswith("_")):
        assert hasattr(port, name)


async def test_start_wipes_what_an_earlier_life_left(tmp_path: Path) -> None:
    """After a start nothing of the life before can be found: no row, line, result file or batch."""
    first = LocalState(tmp_path / "state")
    await first.start()
    await first.put_rows(0, [IndexRow(1, "a", None, (), 0, 0, KEY.digest)])
    first.append(KEY, 0, [(1, b"{}\n")])
    await first.close_segment(KEY, 0)
    first.download_path(BatchId("01B"), "output").write_bytes(b"answer")
    await first.save_batch({"batch_id": "01B"})
    await first.close()
    second = LocalState(tmp_path / "state")
    await second.start()
    assert await second.get_rows(0, [1]) == {}
    assert second.spooled_bytes == 0
    assert not second.spooled(0, OffsetSet([1]))
    assert await second.batches() == []
    left = sorted(p.relative_to(tmp_path / "state").as_posix() for p in (tmp_path / "state").rglob("*"))
    assert left == ["batchferry.lock", "downloads", "index.sqlite3", "spool"]
    await second.close()


async def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """Folders are 0700 and files 0600, whatever the umask and the folder's rights before."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        state = LocalState(folder)
        await state.start()
        state.append(KEY, 0, [(1, b"{}\n")])
        await state.close_segment(KEY, 0)
        state.download_path(BatchId("01B"), "output")
    finally:
        os.umask(before)
    for path in (folder, *folder.rglob("*")):
        assert _mode(path) == (0o700 if path.is_dir() else 0o600), path
    await state.close()


@pytest.mark.parametrize("name", ["thesis.docx", "spool", "index.sqlite3"])
def test_a_folder_of_somebody_else_is_refused_untouched(tmp_path: Path, name: str) -> None:
    """A file that is not ours, even by a name that could be, is named with a remedy; nothing is changed."""
    (tmp_path / name).write_text("keep me")
    tmp_path.chmod(0o755)
    with pytest.raises(GateRefused, match=rf"'{name}'.*name a folder that is empty"):
        asyncio.run(LocalState(tmp_path).start())
    assert (tmp_path / name).read_text() == "keep me"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert _mode(tmp_path) == 0o755


async def test_a_foreign_file_in_our_folder_is_refused(tmp_path: Path) -> None:
    """A folder that was ours is refused too once somebody keeps a file in it."""
    state = LocalState(tmp_path)
    await state.start()
    await state.close()
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(GateRefused, match=r"'notes\.txt'"):
        await LocalState(tmp_path).start()
    assert (tmp_path / "notes.txt").read_text() == "keep me"


async def test_a_link_in_our_folder_is_not_followed(tmp_path: Path) -> None:
    """A symbolic link in place of a folder of ours is foreign: what it points to is not deleted."""
    folder, other = tmp_path / "state", tmp_path / "other"
    state = LocalState(folder)
    await state.start()
    await state.close()
    other.mkdir()
    (other / "precious").write_text("keep me")
    (folder / "spool").rmdir()
    (folder / "spool").symlink_to(other)
    with pytest.raises(GateRefused, match="'spool'"):
        await LocalState(folder).start()
    assert (other / "precious").exists()


async def test_an_empty_volume_is_accepted(tmp_path: Path) -> None:
    """The lost+found of a fresh ext volume is nobody's file, and stays."""
    (tmp_path / "lost+found").mkdir()
    state = LocalState(tmp_path)
    await state.start()
    await state.close()
    assert (tmp_path / "lost+found").exists()


async def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A state folder that is a file is refused with the remedy."""
    (tmp_path / "state").write_text("")
    with pytest.raises(GateRefused, match="is a file: name a folder"):
        await LocalState(tmp_path / "state").start()


async def test_one_process_a_folder(tmp_path: Path) -> None:
    """A second user of the folder is refused, told who holds it, and harms nothing; after close it may."""
    first, second = LocalState(tmp_path), LocalState(tmp_path)
    await first.start()
    await first.put_rows(0, [IndexRow(1, "a", None, (), 0, 0, KEY.digest)])
    with pytest.raises(GateRefused, match=rf"in use by another batchferry process \({os.getpid()}\)"):
        await second.start()
    assert 1 in await first.get_rows(0, [1])
    await first.close()
    await second.start()
    await second.close()


async def test_closed_is_closed(tmp_path: Path) -> None:
    """Before start and after close every act says so; close may come twice; a life starts once."""
    state = LocalState(tmp_path)
    with pytest.raises(StoreUnavailable):
        state.append(KEY, 0, [(1, b"{}\n")])
    await state.close()
    await state.start()
    with pytest.raises(RuntimeError):
        await state.start()
    await state.close()
    await state.close()
    with pytest.raises(StoreUnavailable):
        await state.put_rows(0, [IndexRow(1, "a", None, (), 0, 0, KEY.digest)])
    with pytest.raises(StoreUnavailable):
        await state.get_rows(0, [1])


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A path below a file is trouble of the disk, named with its remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="make it writable"):
        await LocalState(tmp_path / "file" / "state").start()


@pytest.mark.parametrize(("batch_id", "kind"), [("../x", "output"), ("01B", "a/b"), ("", "output"), (".", "output")])
async def test_a_download_stays_in_its_folder(tmp_path: Path, batch_id: str, kind: str) -> None:
    """No batch id or kind can lead out of the downloads folder."""
    state = LocalState(tmp_path)
    await state.start()
    with pytest.raises(ValueError, match="cannot be part of a file name"):
        state.download_path(BatchId(batch_id), kind)
    assert state.download_path(BatchId("01B"), "output").parent == tmp_path / "downloads"
    await state.close()
