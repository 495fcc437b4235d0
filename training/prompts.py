"""Files of rows, and prompts as users have them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn; the model answers each turn.

    Attributes:
        id: unique in its data set.
        turns: the user's messages, each `{role, content}`.
        context: messages before the first turn, kept as they are.
    """

    id: str
    turns: tuple[dict[str, Any], ...]
    context: tuple[dict[str, Any], ...] = ()


def shard_files(folder: Path) -> list[Path]:
    """The shards of an answer folder, in order."""
    return sorted(f for f in folder.glob("answers-*") if f.name.endswith(SUFFIXES))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file (gzipped or not) or a parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def read_prompts(paths: Iterable[str | Path], limit: int | None = None) -> list[Conversation]:
    """Read prompts: one JSON object (or parquet row) each, or one line of a `.txt` file each.

    A row has `prompt` (a string), or `turns` (strings: the user's messages, each answered before the next), or
    `messages` (`{role, content}`: the last of the user's is answered; those before it are context, those after it are
    dropped).
    A row without `id` is named after its file and line. A row that stands there twice counts once.

    Args:
        paths: files.
        limit: read no more than this many.

    Raises:
        ValueError: a row has none of these fields, or two different rows have the same id; the message names it.
    """
    found: dict[str, Conversation] = {}
    for path in map(Path, paths):
        rows: Iterable[dict[str, Any]]
        if path.suffix == ".txt":
            rows = ({"prompt": s} for s in path.read_text(encoding="utf-8").splitlines() if s.strip())
        else:
            rows = read_rows(path)
        for number, row in enumerate(rows):
            if limit is not None and len(found) >= limit:
                return list(found.values())
            where = f"{path.name.split('.')[0]}/{number}"
            new = _conversation(str(row.get("id", where)), row, f"{path}, row {number}")
            if found.setdefault(new.id, new) != new:
                raise ValueError(f"{path}, row {number}: another prompt already has the id {new.id!r}")
    return list(found.values())


def _conversation(name: str, row: dict[str, Any], where: str) -> Conversation:
    """One row of a prompt file. `turns` goes before `prompt`: data sets that have both repeat the first turn there."""
    if row.get("turns"):
        return Conversation(name, tuple({"role": "user", "content": t} for t in row["turns"]))
    if row.get("messages"):
        messages = [dict(m) for m in row["messages"]]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if messages:
            return Conversation(name, (messages[-1],), tuple(messages[:-1]))
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return Conversation(name, ({"role": "user", "content": row["prompt"]},))
    raise ValueError(f"{where}: needs a `prompt`, `turns`, or `messages` with a user's message in them")
