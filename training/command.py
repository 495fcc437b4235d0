"""`selfspec train`: also `python -m selfspec.training` and `accelerate launch -m selfspec.training`."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.terminal import refuse, refusing, say

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
        typer.Option(metavar="FILE", help="Train every row of a sweep, one on each GPU at a time, and compare them."),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="STAGE,...", help="Of a sweep: stages whose rows may be trained now; all by default.")
    ] = "",
    until_minutes: Annotated[
        float | None, typer.Option(help="Of a sweep: minutes after which no further row is begun.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Of a sweep: rows trained at once; by default one for each GPU, or one.")
    ] = None,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Of a sweep: load the next row of a GPU while one trains there.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint; the field resume.")] = False,
) -> int:
    """Train an adapter on a model's own answers."""
    fields = list(overrides or ())
    fields += [f"minutes={minutes}"] if minutes is not None else []
    fields += ["resume=true"] if resume else []
    if sweep is not None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # every process would begin every row
            refuse(
                "a sweep starts a process for each row, and each takes a GPU: run selfspec train --sweep by itself, "
                "without accelerate launch or torchrun"
            )
        from selfspec.training.sweep import run

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes are to save and end, too
        with refusing():
            stages = [name.strip() for name in only.split(",") if name.strip()]
            return run(sweep, config, fields, only=stages, until=until_minutes, jobs=jobs, ahead=ahead)
    if only or until_minutes is not None or jobs is not None or ahead:
        refuse("--only, --until-minutes, --jobs and --ahead are options of a sweep: name its file with --sweep")
    from selfspec.training.config import TrainConfig
    from selfspec.training.deterministic import deterministic
    from selfspec.training.trainer import Trainer

    with refusing():
        settings = TrainConfig.load(config, fields)
        if not settings.model or not settings.data:
            raise ValueError("name a model and data: model=FOLDER data=ANSWERS")
    with deterministic(settings.deterministic):
        with refusing():
            trainer = Trainer(settings)
        stop_on_signal(trainer)
        few_threads(trainer.device.type)
        report = trainer.train()
    if trainer.world.main:
        say(ending(report, settings.model, trainer.out))
    trainer.world.close()
    return 0


def ending(report: dict[str, Any], model: str, out: Path) -> str:
    """What a run has left, and what to do with it, for a person.

    Args:
        report: of `Trainer.train`.
        model: its name.
        out: folder of the run.
    """
    from selfspec.training.report import taus

    adapter, use = out / "adapter", f'selfspec generate "..." --model {model} --adapter {out / "adapter"}'
    if not report["finished"]:
        return (
            f"stopped at {report['progress']:.0%} of the schedule; the run is in {out}, and the same command with "
            f"--resume goes on from there\nthe adapter so far is in {adapter}: {use}"
        )
    found = taus(report) or "not measured, as no answer of two tokens was kept for it"
    return (
        f"trained {report['step']:,} steps; the run is in {out}: report.json, log.jsonl\n"
        f"tau: {found}\nthe adapter is in {adapter}: {use}"
    )


def few_threads(device: str) -> None:
    """Let the host of a GPU lay batches out on one thread, unless the user has said how many.

    They are small: dozens of threads that wait for one another take many times as long where the cores are shared.
    """
    if device == "cuda" and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def stop_on_signal(trainer: Trainer) -> None:
    """Let SIGTERM end the training after the running step; it saves, and can be resumed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stop", True))
