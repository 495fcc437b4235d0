"""What the numbers of a training's configuration may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.training.config import TrainConfig

SHARES = ("hidden_share", "split_share", "replay_share", "warmup", "final_lr", "ema")
COUNTS = ("length", "rows", "anchors", "accumulate", "log_every")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check(config: TrainConfig) -> None:
    """Refuse what no training can mean, before anything is loaded.

    Raises:
        ValueError: which field, what it is, and what it may be.
    """
    for name in SHARES:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name}={getattr(config, name)!r}: expected a share from 0 to 1")
    for name in COUNTS:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)!r}: expected 1 or more")
    if len(config.betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in config.betas):
        raise ValueError(f"betas={config.betas!r}: expected two numbers from 0 to below 1, as [0.9, 0.95]")
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype={config.dtype!r}: expected one of {', '.join(DTYPES)}")
    if config.max_steps < 0:
        raise ValueError(f"max_steps={config.max_steps}: expected 0 for none, or more")
    if config.minutes <= 0 and not config.max_steps:
        raise ValueError("give the training a budget: minutes or max_steps")
    if config.deterministic:
        _check_deterministic(config)


def _check_deterministic(config: TrainConfig) -> None:
    if not config.max_steps and config.fit <= 0:
        raise ValueError(
            "deterministic=true goes by steps, as no clock goes twice alike: give max_steps, or fit=SECONDS for a dry "
            "run that says how many steps the minutes hold"
        )
    if config.attention == "flash":
        raise ValueError(
            "attention=flash adds in an order that depends on what else runs: deterministic=true takes grouped, flex "
            "and sdpa"
        )
    if config.compile_mode.startswith("max-autotune"):
        raise ValueError(
            f"compile_mode={config.compile_mode} times kernels and takes another one from run to run: "
            "deterministic=true takes compile_mode=default"
        )
