"""Answered prompts, as `selfspec answer` writes them: the model's own words, its EOS included where it ended itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from selfspec.prompts import read_rows
from selfspec.training.shards import shard_files


@dataclass(frozen=True)
class Answer:
    """One prompt and the model's own answer to it.

    Attributes:
        id: unique in its data set.
        prompt: tokens that the model saw, chat template and earlier turns included.
        answer: tokens that it answered; the EOS is the last one when it came before the cap.
    """

    id: str
    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def load_answers(paths: Iterable[str | Path] | str | Path, limit: int | None = None) -> list[Answer]:
    """Read answers from shard files, or from folders of them in order of their names.

    Args:
        paths: `.parquet`, `.jsonl` or `.jsonl.gz` files, or folders that `selfspec answer` wrote.
        limit: read no more than so many.

    Raises:
        FileNotFoundError: a path holds no answers.
        ValueError: a record lacks `prompt_ids` or `answer_ids`.
    """
    out: list[Answer] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        files = shard_files(path) if path.is_dir() else [path]
        if not files or not all(f.exists() for f in files):
            raise FileNotFoundError(f"no answers at {path}: expected a shard file or a folder of them")
        for file in files:
            for i, row in enumerate(read_rows(file)):
                if limit is not None and len(out) >= limit:
                    return out
                try:
                    prompt, answer = row["prompt_ids"], row["answer_ids"]
                except (KeyError, TypeError):
                    raise ValueError(f"{file}, record {i + 1}: expected the fields prompt_ids and answer_ids") from None
                out.append(Answer(str(row.get("id", len(out))), list(prompt), list(answer)))
    return out


def hold_out(answers: list[Answer], n: int) -> tuple[list[Answer], list[Answer]]:
    """Take n evenly spaced answers off the training data (half of them at most), for validation."""
    every = max(2, len(answers) // max(1, n))
    kept = [a for i, a in enumerate(answers) if i % every or i // every >= n]
    return kept, answers[::every][:n]
