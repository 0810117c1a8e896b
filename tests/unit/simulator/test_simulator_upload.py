"""Taking a multipart upload apart."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.simulator.upload import receive_upload

BOUNDARY = "edge"


def form(content: bytes) -> bytes:
    """A form with one field and one file."""
    return (
        b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n" + content + b"\r\n--edge--\r\n"
    )


# The boundary itself may not be in the content; what looks like the beginning of one may.
CONTENT = (
    st.lists(st.sampled_from([b"\r\n", b"\r\n--", b"--ed", b"\r\n--edg", b"-", b"\x00\xff", b"{}\n"]), max_size=40)
    .map(b"".join)
    .filter(lambda content: b"\r\n--edge" not in content)
)


# No deadline: an event loop and a file for each example take as long as the machine is busy.
@settings(deadline=None, max_examples=100)
@given(content=CONTENT, piece_bytes=st.integers(1, 64))
def test_a_file_is_the_same_in_pieces_of_any_size(content: bytes, piece_bytes: int) -> None:
    """However the network cuts an upload, even inside what looks like a boundary, the bytes are the same."""
    whole = form(content)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), piece_bytes):
            yield whole[start : start + piece_bytes]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        upload = asyncio.run(
            receive_upload(f"multipart/form-data; boundary={BOUNDARY}", pieces(), path, max_bytes=1_000_000)
        )
        assert path.read_bytes() == content
    assert (upload.filename, upload.fields, upload.size_bytes) == ("in.jsonl", {"purpose": "batch"}, len(content))
