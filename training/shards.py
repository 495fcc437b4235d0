"""A folder of answers that survives being killed: shards appear whole or not at all, and a manifest says what they are.

The shards are the truth; the manifest only describes them. A shard that cannot be read, or is not what the manifest saw
written, is set aside (renamed), and what it held is answered again.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from selfspec.prompts import read_rows

MANIFEST = "manifest.json"
VERSION = 1
FORMATS = {"parquet": ".parquet", "jsonl": ".jsonl.gz"}
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")  # of files of rows that anybody wrote
Row = dict[str, Any]  # id, prompt_ids, answer_ids, temperature, finish_reason


def shard_files(folder: Path) -> list[Path]:
    """The shards of an answer folder, in order; any rows' files where it was not made by `selfspec answer`."""
    files = sorted(f for f in folder.iterdir() if f.name.endswith(SUFFIXES))
    return [f for f in files if f.name.startswith("answers-")] or files


class AnswerFolder:
    """Where answers are written. Use as a context manager: leaving it, however that happens, writes what is buffered.

    Args:
        folder: made if it does not exist.
        settings: what the answers depend on; answers made with other settings are never mixed in.
        format: "parquet", "jsonl" (gzipped), or "auto": parquet where pyarrow is installed.
        shard_rows: answers a shard.
        keep: is called with every row that is already there.

    Raises:
        ValueError: the folder's answers were made with other settings; the message says which.
        RuntimeError: another process is writing into the folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        format: str = "auto",
        shard_rows: int = 4096,
        keep: Callable[[Row], None] | None = None,
    ):
        if format == "auto":
            format = "parquet" if importlib.util.find_spec("pyarrow") else "jsonl"
        self.folder, self.settings, self.shard_rows = folder, settings, shard_rows
        self.format, self.suffix = format, FORMATS[format]
        self.ids: set[str] = set()
        self.counts = Counter(dict.fromkeys(("answers", "stop", "length", "prompt_tokens", "answer_tokens"), 0))
        self.notes: dict[str, Any] = {}  # further entries of the manifest
        self._shards: dict[str, dict[str, Any]] = {}
        self._buffer: list[Row] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RuntimeError(f"{folder}: another process is writing answers here") from None
        try:
            self._open(keep)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> AnswerFolder:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._lock.release()

    def add(self, row: Row) -> None:
        """Take an answer; it is safe once its shard is full or `flush` was called."""
        if row["id"] in self.ids:
            raise ValueError(f"{row['id']} was answered twice")
        self.ids.add(row["id"])
        self._buffer.append(row)
        if len(self._buffer) >= self.shard_rows:
            self.flush()

    def flush(self) -> None:
        """Write the buffered answers as a shard, and the manifest."""
        if self._buffer:
            path = self.folder / f"answers-{self._next:05d}{self.suffix}"
            _replace(path, lambda temporary: _write(temporary, self._buffer, self.format))
            self._next += 1
            self._count(path, self._buffer)
            self._buffer = []
        self.write_manifest()

    def write_manifest(self) -> dict[str, Any]:
        """Describe what is there. Returns the manifest."""
        manifest = {
            "version": VERSION,
            "settings": self.settings,
            "counts": dict(self.counts),
            "shards": [{"file": name, **facts} for name, facts in sorted(self._shards.items())],
            **self.notes,
        }
        text = json.dumps(manifest, indent=1) + "\n"
        _replace(self.folder / MANIFEST, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return manifest

    def _open(self, keep: Callable[[Row], None] | None) -> None:
        """Take stock of what is there."""
        for stale in self.folder.glob(".*.partial"):
            stale.unlink()
        known = self._read_manifest()
        numbers = [int(f.name.split("-")[1][:5]) for f in self.folder.glob("answers-*")]  # those set aside too
        self._next = max(numbers, default=-1) + 1
        for path in shard_files(self.folder):
            rows = None
            if path.name not in known or known[path.name] == _sha256(path):
                rows = _read(path)
            if rows is None:
                print(f"{path} is damaged: set aside, its prompts are answered again", file=sys.stderr)
                path.rename(path.with_name(path.name + ".damaged"))
                continue
            self._count(path, rows)
            self.ids.update(r["id"] for r in rows)
            if keep is not None:
                for row in rows:
                    keep(row)
        self.write_manifest()

    def _read_manifest(self) -> dict[str, str]:
        """Hashes of the known shards; checks the settings."""
        path = self.folder / MANIFEST
        if not path.exists():
            if shard_files(self.folder):
                raise ValueError(f"{self.folder} has answers but no {MANIFEST}: nobody knows how they were made")
            return {}
        manifest = json.loads(path.read_text(encoding="utf-8"))
        old, new = manifest["settings"], json.loads(json.dumps(self.settings))
        other = [f"{k}: {old.get(k)!r}, now {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        if other:
            what = "; ".join(other)
            raise ValueError(f"{self.folder} holds answers made with other settings ({what}); use another folder")
        return {s["file"]: s["sha256"] for s in manifest["shards"]}

    def _count(self, path: Path, rows: list[Row]) -> None:
        self._shards[path.name] = {"rows": len(rows), "sha256": _sha256(path)}
        self.counts["answers"] += len(rows)
        for row in rows:
            self.counts[row["finish_reason"]] += 1
            self.counts["prompt_tokens"] += len(row["prompt_ids"])
            self.counts["answer_tokens"] += len(row["answer_ids"])


def _read(path: Path) -> list[Row] | None:
    """All rows of a shard, or None if it is not whole."""
    try:
        return list(read_rows(path))
    except ImportError:
        raise
    except Exception:  # pyarrow, zlib, gzip and json each have their own way of saying so
        return None


def _write(path: Path, rows: list[Row], format: str) -> None:
    if format == "jsonl":
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = pa.list_(pa.int32())
    kinds = {"id": pa.string(), "prompt_ids": ids, "answer_ids": ids}
    kinds |= {"temperature": pa.float64(), "finish_reason": pa.string()}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))), path, compression="zstd")


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file so that it is there whole, on the disk, or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    write(temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
