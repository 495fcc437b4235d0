"""`selfspec train`: also `python -m selfspec.training` and `accelerate launch -m selfspec.training`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.terminal import refusing

if TYPE_CHECKING:
    from selfspec.training.trainer import Trainer


def main(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Fields of TrainConfig, as lr=3e-4 adapter.block_size=16."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON file with such fields.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Budget that the schedule is fitted to; the field minutes.")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Train every row of a sweep, one after another, and compare them."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint; the field resume.")] = False,
) -> int:
    """Train an adapter on a model's own answers."""
    fields = list(overrides or ())
    fields += [f"minutes={minutes}"] if minutes is not None else []
    fields += ["resume=true"] if resume else []
    if sweep is not None:
        from selfspec.training.sweep import run

        with refusing():
            return run(sweep, config, fields)
    from selfspec.training.config import TrainConfig
    from selfspec.training.trainer import Trainer

    with refusing():
        settings = TrainConfig.load(config, fields)
        if not settings.model or not settings.data:
            raise ValueError("name a model and data: model=FOLDER data=ANSWERS")
        trainer = Trainer(settings)
    stop_on_signal(trainer)
    trainer.train()
    trainer.world.close()
    return 0


def stop_on_signal(trainer: Trainer) -> None:
    """Let SIGTERM end the training after the running step; it saves, and can be resumed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stop", True))
