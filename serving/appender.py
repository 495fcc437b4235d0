"""A file of lines that only grows, in chunks that are there whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

READ = 1 << 20
MEMBER = gzip.compress(b"", 6, mtime=0)[:10]  # how each of our gzip members begins


class OutputError(RuntimeError):
    """The output cannot be written; what was written before is safe."""


class Appender:
    """A file of lines that only grows. `rows` are those that were there; what follows the last whole one is cut off.

    Args:
        path: made if it is not there.
        zipped: gzip members, one a chunk.
    """

    def __init__(self, path: Path, zipped: bool = False):
        self.path, self.zipped = path, zipped
        self.rows: list[bytes] = []
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self.size = self._recover()
            os.ftruncate(self._file, self.size)
        except BaseException:
            self.close()
            raise

    def append(self, rows: list[bytes]) -> None:
        """Add rows: all of them, or none.

        Raises:
            OutputError: the disk is full, or fails; the file is as it was.
        """
        if not rows:
            return
        data = b"".join(rows)
        data = gzip.compress(data, 6, mtime=0) if self.zipped else data
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self.size + done)
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror or error}. What was finished is safe there; "
                "make room and run the same command again"
            ) from error
        self.size += len(data)

    def rewrite(self, rows: list[bytes]) -> None:
        """Hold these rows instead, in one step."""
        replace(self.path, lambda to: to.write_bytes(b"".join(rows)))
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR)
        self.size = sum(map(len, rows))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _recover(self) -> int:
        """Read what is there. Returns the bytes that are whole."""
        good, bad = 0, None
        for chunk, end in self._members() if self.zipped else self._lines():
            rows = chunk.splitlines(keepends=True)
            if not all(_whole(r) for r in rows):
                bad = bad or f"before byte {end}"
                continue
            if bad is not None:
                raise ValueError(f"{self.path} is damaged {bad}: its rows cannot be told; move it away or overwrite it")
            if not all(isinstance(id_of(json.loads(r)), str | int) for r in rows):
                raise ValueError(
                    f"{self.path} is damaged before byte {end}: a row has no id; move it away or overwrite it"
                )
            self.rows += rows
            good = end
        return good

    def _lines(self) -> Iterator[tuple[bytes, int]]:
        with os.fdopen(os.dup(self._file), "rb") as file:
            end = 0
            for line in file:
                end += len(line)
                yield line, end

    def _members(self) -> Iterator[tuple[bytes, int]]:
        """Whole gzip members and where each ends.

        What follows the last whole one is left out: a member that was cut short, perhaps with zeros behind it, as a
        crash of the machine can leave them. A member in the middle cannot be damaged by that, so it is an error.
        """
        with os.fdopen(os.dup(self._file), "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
            end = 0
            while end < len(data):
                member = zlib.decompressobj(31)
                out, at = [], end
                try:
                    while not member.eof and at < len(data):
                        out.append(member.decompress(data[at : at + READ]))
                        at += READ
                except zlib.error as error:
                    if data.find(MEMBER, end + 1) < 0:
                        return
                    raise ValueError(f"{self.path} is damaged after byte {end} ({error})") from error
                if not member.eof:
                    return
                end = min(at, len(data)) - len(member.unused_data)
                yield b"".join(out), end


def id_of(row: dict[str, Any]) -> Any:
    """A row's id, in our form or OpenAI's; None where it has none."""
    return row.get("custom_id", row.get("id"))


def _whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file so that it is there whole, on the disk, or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {error.strerror or error}; make room and run again") from error
