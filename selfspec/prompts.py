"""Prompts: files of them, the built-in suite, and the model's own chat template."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from selfspec.suite import SUITE

Message = dict[str, Any]  # role, content
MARKS = {  # how files begin that are taken for lines of text
    codecs.BOM_UTF16_LE: "UTF-16 text: expected UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text: expected UTF-8",
    b"\x1f\x8b": "gzipped: expected a file whose name ends in .gz, or unzipped lines",
    b"PAR1": "a parquet file: expected a name that ends in .parquet",
}
Row = dict[str, Any]


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file, the line and what was expected."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique in its data set.
        messages: the conversation up to the answer that is asked for.
        later: what the user says after that answer, turn by turn (the other turns of a `turns` row).
    """

    id: str
    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()


def builtin() -> list[Prompt]:
    """The built-in suite, its kinds in turn."""
    return [Prompt(id, (user(text),)) for id, text in SUITE]


def user(text: str) -> Message:
    """A message of the user's."""
    return {"role": "user", "content": text}


def read(paths: str | Path | Iterable[str | Path], limit: int | None = None) -> list[Prompt]:
    """Read prompts: JSON Lines (gzipped where the name ends in `.gz`), parquet, or `.txt` with a prompt a line.

    A row holds `turns` (what the user says, turn by turn; the first is asked, the others stand in `later`), or
    `messages` (a conversation; answers at its end are left out), or `prompt` (a string): the first of them that is
    there. A row without `id` is named after its file and its index, from 0. A prompt that stands there twice counts
    once.

    Args:
        paths: one file, or several.
        limit: read this many prompts at most.

    Raises:
        PromptError: no such file, no rows, a row of another form, or two different prompts with one id.
        ModuleNotFoundError: a parquet file, and pyarrow is not installed.
    """
    found: dict[str, Prompt] = {}
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if limit is not None and len(found) >= limit:
            break
        if not path.is_file():
            raise PromptError(f"no prompt file at {path}")
        index = -1
        for index, (where, row) in enumerate(_rows(path)):
            if limit is not None and len(found) >= limit:
                break
            prompt = prompt_of(row, f"{_stem(path)}/{index}", where)
            if found.setdefault(prompt.id, prompt) != prompt:
                raise PromptError(f"{where}: another prompt already has the id {prompt.id!r}")
        if index < 0:
            raise PromptError(f"{path} holds no prompts; expected one JSON object a line")
    return list(found.values())


def read_sets(files: list[str] | None, limit: int | None) -> dict[str, list[Prompt]]:
    """Prompt sets by file name (by path where two names are the same), or the built-in suite."""
    if not files:
        return {"builtin": builtin()[:limit]}
    short = len({Path(f).name for f in files}) == len(files)
    return {Path(f).name if short else f: read(f, limit) for f in files}


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSON Lines file (gzipped or not) or a parquet file.

    Raises:
        PromptError: a line is no JSON object, or the file is damaged; the message says where.
    """
    return (row for _, row in _rows(path))


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """A conversation as text, ready for the answer: by the chat template, or without one as plain text."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return "\n\n".join(m["content"] for m in messages)


def encode(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ready for the answer.

    Args:
        tokenizer: its chat template is applied; one without a template gets the messages as plain text.
        messages: the last one is the user's.

    Returns:
        Token ids.
    """
    return encode_all(tokenizer, [messages])[0]


def encode_all(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
    """`encode` of several conversations at once."""
    texts = [render(tokenizer, messages) for messages in conversations]
    if not texts:
        return []
    # a template writes the special tokens itself
    return tokenizer(texts, add_special_tokens=not getattr(tokenizer, "chat_template", None)).input_ids


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return next((name.removesuffix(s) for s in (".jsonl", ".parquet", ".txt") if name.endswith(s)), name)


def numbered(path: str | Path, stream: BinaryIO | None = None) -> Iterator[tuple[int, Row | PromptError]]:
    """Rows and their line numbers, from 1 (in parquet, row numbers). A line that is no row comes as what is wrong.

    Blank lines are left out, a byte order mark too.

    Args:
        path: what the file is called: `.parquet`, `.txt` (a prompt a line), anything else JSON Lines; `.gz` is gzipped.
        stream: where to read it from, if not there; not gzipped whatever the name.

    Raises:
        PromptError: the file as a whole cannot be read, from here on.
        ModuleNotFoundError: a parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        yield from _parquet(path, stream)
        return
    plain = path.name.removesuffix(".gz").endswith(".txt")
    try:
        with stream or (gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as lines:
            for number, line in enumerate(lines, 1):
                kind = next((k for mark, k in MARKS.items() if number == 1 and line.startswith(mark)), None)
                if kind:
                    raise PromptError(f"{path} is {kind}")
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, _row(line, f"{path}, line {number}", plain)
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(f"{path} cannot be read as {'gzipped ' * (path.suffix == '.gz')}text: {error}") from error


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Where each row stands, for errors, and the row."""
    kind = "row" if path.suffix == ".parquet" else "line"
    for number, row in numbered(path):
        if isinstance(row, PromptError):
            raise row
        yield f"{path}, {kind} {number}", row


def _parquet(path: Path, stream: BinaryIO | None) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"reading {path} needs pyarrow: pip install 'selfspec[train]'") from error
    number = 0
    try:
        with pq.ParquetFile(stream or path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"{path} cannot be read as parquet: {error}") from error


def _row(line: bytes, where: str, plain: bool) -> Row | PromptError:
    """One line's row, or what is wrong with it."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return PromptError(f"{where}: not UTF-8 text ({error})")
    if plain:
        return {"prompt": text.rstrip("\r\n")}
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return PromptError(f"{where}: not JSON ({error})")
    return row if isinstance(row, dict) else PromptError(f"{where}: expected an object, found {text[:40]!r}")


def prompt_of(row: Row, default_id: str, where: str) -> Prompt:
    """One row of a prompt file. `turns` goes before `prompt`: data sets that have both repeat the first turn there.

    Args:
        row: as read.
        default_id: where it has none.
        where: it stands, for errors.

    Raises:
        PromptError: it is of another form.
    """
    id = str(default_id if row.get("id") is None else row["id"])
    if row.get("messages") and not row.get("turns"):
        return Prompt(id, _messages(row["messages"], where))
    turns = row.get("turns") or [row.get("prompt")]
    if not isinstance(turns, list) or not all(isinstance(t, str) and t for t in turns):
        raise PromptError(f"{where}: expected a non-empty string `prompt`, a list `turns` of them, or `messages`")
    return Prompt(id, (user(turns[0]),), tuple(turns[1:]))


def _messages(found: Any, where: str) -> tuple[Message, ...]:
    """Checked messages; an answer at the end, as training data has it, is left out."""
    good = isinstance(found, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in found
    )
    if not good:
        raise PromptError(f"{where}: `messages` must be a list of objects with the strings `role` and `content`")
    messages = list(found)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if all(m["role"] != "user" for m in messages):
        raise PromptError(f"{where}: `messages` holds nothing that asks for an answer")
    return tuple(messages)
