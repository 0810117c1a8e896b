"""Takes a multipart upload apart as it comes in: fields in memory (small), the file's bytes to disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchferry.simulator.errors import Refused

_FLUSH_BYTES = 1024 * 1024
_MAX_FIELD_BYTES = 64 * 1024
_MAX_FIELDS = 32


@dataclass(slots=True)
class Upload:
    """What an upload held. ``filename`` is None when no file part came."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size_bytes: int = 0


class _Parts:
    """The parser's callbacks: collects fields, and file bytes until they are fetched."""

    def __init__(self) -> None:
        self.upload = Upload()
        self.pending = bytearray()
        self.ended = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._in_file = False
        self._field = bytearray()

    def on_part_begin(self) -> None:
        self._headers, self._field = {}, bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._in_file = self._name == "file" and filename is not None
        if self._in_file and filename is not None:
            if self.upload.filename is not None:
                raise Refused(400, "Only one file may be uploaded at a time.", param="file")
            self.upload.filename = filename.decode("utf-8", "replace")
        elif len(self.upload.fields) >= _MAX_FIELDS:
            raise Refused(400, "Too many form fields.")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.pending += memoryview(data)[start:end]
            self.upload.size_bytes += end - start
        else:
            self._field += data[start:end]
            if len(self._field) > _MAX_FIELD_BYTES:
                raise Refused(400, "A form field is too long.")

    def on_part_end(self) -> None:
        if not self._in_file:
            self.upload.fields[self._name] = self._field.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True


async def receive_upload(content_type: str, chunks: AsyncIterator[bytes], path: Path, max_bytes: int) -> Upload:
    """Read a multipart body; the bytes of its ``file`` part go to ``path``.

    At most about 1 MiB is in memory at any time.

    Raises:
        Refused: not a multipart form, cut short, or larger than ``max_bytes``; ``path`` is gone then.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise Refused(400, "The upload must be a multipart form.")
    parts = _Parts()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": parts.on_part_begin,
            "on_header_field": parts.on_header_field,
            "on_header_value": parts.on_header_value,
            "on_header_end": parts.on_header_end,
            "on_headers_finished": parts.on_headers_finished,
            "on_part_data": parts.on_part_data,
            "on_part_end": parts.on_part_end,
            "on_end": parts.on_end,
        },
    )
    whole = False
    target: IO[bytes] = await asyncio.to_thread(path.open, "wb")
    try:
        async for chunk in chunks:
            parser.write(chunk)
            if parts.upload.size_bytes > max_bytes:
                raise Refused(413, f"The file is larger than {max_bytes} bytes.", param="file")
            if len(parts.pending) >= _FLUSH_BYTES:
                await asyncio.to_thread(target.write, parts.pending)
                parts.pending = bytearray()
        await asyncio.to_thread(target.write, parts.pending)
        if not parts.ended:
            raise Refused(400, "The upload ended in the middle.")
        whole = True
    except FormParserError as error:
        raise Refused(400, "The multipart form cannot be read.") from error
    finally:
        await asyncio.to_thread(target.close)
        if not whole:
            await asyncio.to_thread(path.unlink, missing_ok=True)
    return parts.upload
