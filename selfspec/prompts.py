"""Prompts: JSON Lines files (plain or .gz), the built-in suite, and the model's own chat template."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.suite import SUITE

Message = dict[str, str]


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file, the line and what was expected."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: the row's own `id`, else the file's name and the line.
        messages: the conversation up to the answer that is asked for.
        later: what the user says after that answer (the other turns of a `turns` row).
    """

    id: str
    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()


def builtin() -> list[Prompt]:
    """The built-in suite: chat, word problems, Python tasks."""
    return [Prompt(id, (user(text),)) for id, text in SUITE]


def user(text: str) -> Message:
    """A message of the user's."""
    return {"role": "user", "content": text}


def read(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file.

    Args:
        path: JSON Lines, gzipped if the name ends in `.gz`. A row holds `prompt` (a string), `messages` (a conversation
            that ends with the user) or `turns` (what the user says, turn by turn; the first is asked, the others stand
            in `later`), and perhaps `id`.
        limit: read this many rows at most.

    Raises:
        PromptError: no such file, no rows, or a row of another form.
    """
    path = Path(path)
    if not path.is_file():
        raise PromptError(f"no prompt file at {path}")
    prompts: list[Prompt] = []
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(prompts) >= limit:
                    break
                if line.strip():
                    prompts.append(_row(line, f"{stem}/{number}", f"{path}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read as {'gzipped ' * (path.suffix == '.gz')}text: {error}") from error
    if not prompts:
        raise PromptError(f"{path} holds no prompts; expected one JSON object a line")
    return prompts


def read_sets(files: list[str] | None, limit: int | None) -> dict[str, list[Prompt]]:
    """Prompt sets by file name (by path where two names are the same), or the built-in suite."""
    if not files:
        return {"builtin": builtin()[:limit]}
    short = len({Path(f).name for f in files}) == len(files)
    return {Path(f).name if short else f: read(f, limit) for f in files}


def encode(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ready for the answer.

    Args:
        tokenizer: its chat template is applied; one without a template gets the messages as plain text.
        messages: the last one is the user's.

    Returns:
        Token ids.
    """
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids  # the template writes the special tokens itself
    return tokenizer("\n\n".join(m["content"] for m in messages)).input_ids


def _row(line: str, default_id: str, where: str) -> Prompt:
    """One row of a prompt file; `where` names it in errors."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise PromptError(f"{where}: expected an object with `prompt`, `messages` or `turns`, found {line[:40]!r}")
    id = str(row.get("id", default_id))
    if row.get("messages") is not None:
        return Prompt(id, tuple(_messages(row["messages"], where)))
    turns = row["turns"] if row.get("turns") is not None else [row.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise PromptError(f"{where}: expected a non-empty string `prompt`, a list `turns` of them, or `messages`")
    return Prompt(id, (user(turns[0]),), tuple(turns[1:]))


def _messages(found: Any, where: str) -> list[Message]:
    """Checked messages; an answer at the end, as training data has it, is left out."""
    good = isinstance(found, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in found
    )
    if not good:
        raise PromptError(f"{where}: `messages` must be a list of objects with the strings `role` and `content`")
    messages = [{"role": m["role"], "content": m["content"]} for m in found]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise PromptError(f"{where}: `messages` holds nothing that asks for an answer")
    return messages
