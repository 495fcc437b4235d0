"""The learning rate's schedule: a linear rise, then a cosine, over a share of time or of steps."""

from __future__ import annotations

import math
from typing import Any

from selfspec.training.config import TrainConfig

# what the schedule is fitted from
FIELDS = ("minutes", "max_steps", "lr", "mask_lr", "warmup", "final_lr", "deterministic")


def progress(config: TrainConfig, step: int, elapsed: float, steps: int) -> float:
    """Share of the schedule that is done.

    Args:
        config: how many minutes there are.
        step: steps that were taken.
        elapsed: seconds of training that they took.
        steps: that there are; 0 goes by the minutes.
    """
    if steps:
        return min(1.0, step / steps)
    return min(1.0, elapsed / (60 * config.minutes))


def rate(config: TrainConfig, progress: float) -> float:
    """Learning rate as a share of the peak (cosine: arXiv 1608.03983)."""
    if progress < config.warmup:
        # the first step has a rate, too
        return max(progress, 0.05 * config.warmup) / config.warmup
    at = (progress - config.warmup) / max(1e-9, 1 - config.warmup)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * at))


def kept(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint remembers of it."""
    return {name: getattr(config, name) for name in FIELDS}


def check(config: TrainConfig, stored: dict[str, Any]) -> None:
    """Refuse to go on under another schedule than the one that a run was started with.

    Raises:
        ValueError: which fields differ.
    """
    stored = {"deterministic": False} | stored  # which older checkpoints know nothing of
    if changed := [f"{k}={v!r} (now {getattr(config, k)!r})" for k, v in stored.items() if getattr(config, k) != v]:
        raise ValueError(
            f"the checkpoint in {config.out} was fitted to {', '.join(changed)}: resume it with those values, or start "
            "another run from its adapter with init=FOLDER and another out"
        )
