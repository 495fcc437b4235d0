"""Answered prompts, as `selfspec answer` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from selfspec.training.prompts import read_rows, shard_files


@dataclass(frozen=True)
class Answer:
    """One prompt and the model's own answer to it.

    Attributes:
        id: unique in its data set.
        prompt_ids: tokens that the model saw, chat template and earlier turns included.
        answer_ids: tokens that it answered; the EOS is the last one when it came before the cap.
    """

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]


def load_answers(paths: list[str]) -> list[Answer]:
    """Read answers from shard files, or from folders of them.

    Args:
        paths: `.parquet`, `.jsonl` or `.jsonl.gz` files, or folders that `selfspec answer` wrote.
    """
    files = [f for p in map(Path, paths) for f in (shard_files(p) if p.is_dir() else [p])]
    return [Answer(row["id"], row["prompt_ids"], row["answer_ids"]) for f in files for row in read_rows(f)]
