"""The dry run: what a step costs here, which shape of step suits the machine, and what the budget will buy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from selfspec.training.batches import Shape
from selfspec.training.flops import mfu, total

if TYPE_CHECKING:
    from selfspec.training.trainer import Trainer

GAIN = 1.03  # a larger step has to bring this much more anchors a second
FULL = 0.92  # of the device's memory, to be left alone by nothing else


@dataclass(frozen=True)
class Cost:
    """What a step of a shape took.

    Attributes:
        seconds: of a step without the optimizer's part.
        groups: draft groups of the step, over all processes.
        memory: bytes at the peak, on the process that used most; 0 where it isn't known.
        mfu: share of the device's bf16 peak, or None.
    """

    seconds: float
    groups: float
    memory: float = 0.0
    mfu: float | None = None

    @property
    def rate(self) -> float:
        """Anchors a second."""
        return self.groups / self.seconds


def larger(shape: Shape, most: int) -> Iterator[Shape]:
    """Shapes that might use the machine better, at most `most` groups on a process.

    More anchors of the same rows come first: their clean rows are paid for already.
    """
    for anchors, rows in ((shape.anchors * 3 // 2, shape.rows), (shape.anchors, shape.rows * 2)):
        if (anchors, rows) != (shape.anchors, shape.rows) and anchors * rows <= most:
            yield Shape(rows, rows if shape.micro == shape.rows else shape.micro, anchors, shape.block)


def search(
    measure: Callable[[Shape], Cost | None],
    start: Shape,
    most: int,
    room: float,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Shape, Cost, list[Shape]]:
    """Climb from a shape to the fastest one nearby that fits.

    Args:
        measure: runs a step and says what it cost, or None where memory ran out.
        start: the shape to begin with; smaller ones are taken where it doesn't fit.
        most: groups of a step on a process, at most.
        room: bytes that a step may use.
        seconds: after which no further shape is tried; the first is measured in any case.
        clock: the time, in seconds.

    Returns:
        The shape, its cost, and the shapes that ran out of memory.

    Raises:
        torch.OutOfMemoryError: not even one anchor of one row fits.
    """
    began, failed = clock(), []
    best, cost = start, measure(start)
    while cost is None:
        failed.append(best)
        best = lower(best)
        cost = measure(best)
    tried = {best, *failed}
    improved = not failed  # what just fitted is not made larger
    while improved:
        improved = False
        for shape in larger(best, most):
            grown = cost.memory * shape.micro * shape.anchors / (best.micro * best.anchors)  # at most: rows cost less
            if shape in tried or grown > room or clock() - began > seconds:
                continue
            tried.add(shape)
            new = measure(shape)
            if new is None:
                failed.append(shape)
            elif new.rate > GAIN * cost.rate and new.memory <= room:
                best, cost, improved = shape, new, True
                break
    return best, cost, failed


def fit(trainer: Trainer) -> dict[str, Any]:
    """Choose a trainer's shape, and project what its budget buys. Weights, schedule and data stay as they are.

    Returns:
        The record for the log.
    """
    began, config, world = time.perf_counter(), trainer.config, trainer.world
    room = _room(trainer)
    most = max(config.groups // world.size, trainer.shape.rows * trainer.shape.anchors)
    started = trainer.shape

    def measure(shape: Shape) -> Cost | None:
        return _measure(trainer, shape)

    shape, cost, failed = search(measure, started, most, room, config.fit)
    trainer.reshape(shape)
    steps = config.max_steps - trainer.step if config.max_steps else int((60 * config.minutes) / cost.seconds)
    left = steps * cost.seconds
    record: dict[str, Any] = {
        "event": "fit", "step": trainer.step, "seconds": round(time.perf_counter() - began, 1),
        "rows": shape.rows, "micro": shape.micro, "anchors": shape.anchors, "ms": round(1e3 * cost.seconds, 2),
        "anchors_s": round(cost.rate), "memory_gib": round(cost.memory / 2**30, 2), "steps": steps,
        "anchors_total": round(cost.groups * steps), "minutes_left": round(left / 60, 1),
        "finish": time.strftime("%H:%M", time.localtime(time.time() + left)),
    }  # fmt: skip
    if cost.mfu is not None:
        record["mfu"] = round(cost.mfu, 4)
    if failed:
        record["out_of_memory"] = [f"{s.micro} rows x {s.anchors} anchors" for s in failed]
    return record


def _measure(trainer: Trainer, shape: Shape, warm: int = 2, repeats: int = 3) -> Cost | None:
    """Run forward and backward of a few steps; gradients are dropped."""
    device, world = trainer.device, trainer.world
    trainer.reshape(shape)
    batches = trainer.batches.step(trainer.cursor, shape)
    divisors = torch.tensor(world.sum(sum(b.divisors for b in batches)))  # type: ignore[arg-type]
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    failed, times = False, []
    for i in range(warm + repeats if cuda else 1 + repeats):
        begin = time.perf_counter()
        ran_out = not trainer.attempt(batches, divisors)
        failed = world.any(ran_out)
        if failed:
            break
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
        if sum(times) > 10 and i:  # a slow machine is measured well by few steps
            break
    trainer.clear()
    if failed:
        trainer.clear(drop=True)
        return None
    best = max(world.gather(min(times[1:])))
    moments = 8.0 * sum(p.numel() for p in trainer.params) / (world.size if world.sharded else 1)
    memory = max(world.gather(torch.cuda.max_memory_allocated(device) + moments if cuda else 0.0))
    groups = world.sum([total([b.work for b in batches]).groups])[0]
    mine = mfu(trainer.backbone, total([b.work for b in batches]), best)
    return Cost(best, groups, memory, mine)


def _room(trainer: Trainer) -> float:
    """Bytes that this process may have on its device."""
    if trainer.device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(trainer.device)
    own = free + torch.cuda.memory_reserved(trainer.device)
    return FULL * min(trainer.world.gather(own))


def lower(shape: Shape) -> Shape:
    """The shape to go on with after memory ran out.

    Raises:
        torch.OutOfMemoryError: there is no smaller one.
    """
    smaller = shape.smaller()
    if smaller is None:
        raise torch.OutOfMemoryError("a single draft group does not fit into memory: lower length")
    return smaller
