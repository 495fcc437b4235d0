"""How prompts are answered for training, and the command line's way to say it. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass

import typer


@dataclass(frozen=True)
class AnswerOptions:
    """How prompts are answered.

    Attributes:
        max_new_tokens: cap; answers that reach it are kept, with finish_reason "length".
        temperature_mix: temperature -> share of the prompts answered at it; the others are answered greedily.
        seed: of the choice of temperatures and of all draws.
        batch: requests at a time; fewer where they would not fit into memory.
        attention: backend; "flash" prefills by flash-attn. None chooses Triton on CUDA where it is installed, else the
            reference.
        cuda_graphs: False runs step by step (for debugging).
        format: of the shards, "parquet", "jsonl" or "auto".
        shard_rows: answers a shard; a kill loses less than this many and the running batch.
    """

    max_new_tokens: int = 256
    temperature_mix: tuple[tuple[float, float], ...] = ()
    seed: int = 0
    batch: int = 2048
    attention: str | None = None
    cuda_graphs: bool = True
    format: str = "auto"
    shard_rows: int = 4096

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.batch < 1 or self.shard_rows < 1:
            raise ValueError("max_new_tokens, batch and shard_rows must be at least 1")
        if any(t <= 0 or s < 0 for t, s in self.temperature_mix) or sum(s for _, s in self.temperature_mix) > 1 + 1e-9:
            raise ValueError(f"temperatures must be above 0 and their shares sum to at most 1: {self.temperature_mix}")


class Mix(tuple[tuple[float, float], ...]):
    """Temperatures and shares of an option."""


def mix(text: str) -> Mix:
    """`0.7=0.2,1.0=0.1` -> ((0.7, 0.2), (1.0, 0.1))"""
    pairs = [part.split("=") for part in text.split(",") if part]
    try:
        return Mix((float(t), float(s)) for t, s in pairs)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not like 0.7=0.2,1.0=0.1 (temperature=share)") from None
