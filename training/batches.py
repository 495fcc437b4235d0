"""Micro-batches: drawn on the host from seed, document and epoch alone, ahead of the step that uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from selfspec.adapters import MaskPathConfig
from selfspec.training import anchors as anchoring
from selfspec.training.anchors import Groups
from selfspec.training.config import TrainConfig
from selfspec.training.flops import Work, work
from selfspec.training.objectives import Mix
from selfspec.training.pack import Pack, Packer, send

ANCHOR, HIDDEN, SPLIT, SPLIT_LENGTH = range(4)  # what a slot's random numbers decide
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Shape:
    """What a step is made of on one process.

    Attributes:
        rows: packed rows of a step.
        micro: packed rows of a forward, at most; a step that holds more rows runs as several forwards.
        anchors: draft groups of a packed row.
    """

    rows: int
    micro: int
    anchors: int

    def smaller(self) -> Shape | None:
        """The next shape to try when memory ran out, or None: half the rows of a forward, then half the anchors.

        A step keeps its rows, so that losses and gradients stay what they were as long as a single row fits.
        """
        if self.micro > 1:
            return dataclasses.replace(self, micro=(self.micro + 1) // 2)
        if self.anchors > 1:
            return dataclasses.replace(self, anchors=(self.anchors + 1) // 2)
        return None


@dataclass(frozen=True)
class Micro:
    """One forward's worth of a step.

    Attributes:
        pack, groups: what runs.
        divisors: [terms] double on the host, this micro-batch's share of what each loss term is divided by.
        labels: rows that predict something.
        work: what the forward has to compute.
    """

    pack: Pack
    groups: Groups
    divisors: Tensor
    labels: int
    work: Work

    def to(self, device: torch.device) -> Micro:
        """The same on the device, without waiting for the copies."""
        if device.type == "cpu":
            return self
        return dataclasses.replace(self, pack=self.pack.to(device), groups=moved(self.groups, device))


class Batches:
    """The steps of one process.

    Args:
        packer: rows of documents.
        config: shares of layouts, how far to draw ahead.
        path: layouts that are trained.
        mix: objectives, for their divisors.
        rank: of this process.
        size: processes; each takes its part of the rows of a step.
        pin: lay the tensors out for a fast copy to the device.
    """

    def __init__(
        self,
        packer: Packer,
        config: TrainConfig,
        path: MaskPathConfig,
        mix: Mix,
        rank: int = 0,
        size: int = 1,
        pin: bool = False,
    ):
        self.packer, self.config, self.path, self.mix = packer, config, path, mix
        self.rank, self.size, self.pin = rank, size, pin
        self._ahead: Ahead[tuple[int, Shape], list[Micro]] = Ahead(self._step, config.prefetch)

    def step(self, cursor: int, shape: Shape) -> list[Micro]:
        """This process's micro-batches of the step whose first row in the stream is `cursor`."""
        stride = shape.rows * self.size
        return self._ahead.get((cursor, shape), lambda i: (cursor + i * stride, shape))

    def close(self) -> None:
        """End the thread that draws ahead."""
        self._ahead.close()

    def micro(self, first: int, n: int, shape: Shape) -> Micro:
        """The micro-batch of n rows of the stream."""
        pack = self.packer.take(first, n, shape.micro)
        groups = draw(pack, shape.anchors, self.config, self.path)
        steps, labels = targets(groups, self.path)
        divisors, n_labels = self.mix.divisors(steps, labels >= 0).double(), int((labels >= 0).sum())
        if not n_labels:
            divisors = torch.zeros_like(divisors)
        out = Micro(pack, groups, divisors, n_labels, work(pack, groups, labels))
        if not self.pin:
            return out
        return dataclasses.replace(out, pack=pack.each(Tensor.pin_memory), groups=_each(groups, Tensor.pin_memory))

    def _step(self, key: tuple[int, Shape]) -> list[Micro]:
        cursor, shape = key
        first = cursor + self.rank * shape.rows
        starts = range(first, first + shape.rows, shape.micro)
        return [self.micro(i, min(shape.micro, first + shape.rows - i), shape) for i in starts]


def draw(pack: Pack, n: int, config: TrainConfig, path: MaskPathConfig) -> Groups:
    """Random draft groups of a pack, each a function of seed, document, epoch and position alone."""
    anchors = anchoring.choose(pack, n, pack.random(ANCHOR))
    at = anchors.clamp(min=0)

    def random(what: int) -> Tensor:
        return pack.random(what).gather(1, at)  # [N, A]

    hidden = splits = None
    if "hidden" in path.layouts:
        hidden = random(HIDDEN) < (config.hidden_share if "known" in path.layouts else 1.0)
    if path.prefix_splits:
        splits = 1 + (random(SPLIT_LENGTH) * (path.block_size - 2)).long()
        splits = splits.masked_fill(random(SPLIT) >= config.split_share, 0)
        splits = splits if hidden is None else splits.masked_fill(hidden, 0)
    return anchoring.groups(pack, anchors, path.block_size, hidden, splits, path.shift, path.causal)


def first_row(path: MaskPathConfig) -> int:
    """First row of a group that may have a label: the anchor of a known group has none."""
    return 0 if path.shift or "hidden" in path.layouts else 1


def targets(groups: Groups, path: MaskPathConfig) -> tuple[Tensor, Tensor]:
    """How far ahead of the anchor each row predicts [T], and what it should predict [N * A, T]."""
    first = first_row(path)
    steps = torch.arange(first, path.block_size, device=groups.labels.device) + path.shift
    return steps, groups.labels[:, :, first:].flatten(0, 1)


def moved(x: Groups, device: torch.device) -> Groups:
    """Groups on a device, without waiting for the copies."""
    return _each(x, lambda t: send(t, device))


def _each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclass with every tensor in it changed."""
    if isinstance(x, Tensor):
        return change(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: _each(getattr(x, f.name), change) for f in dataclasses.fields(x)})
    return x


def tensors_of(x: Any) -> list[Tensor]:
    """Every tensor of a dataclass, in the order of its fields."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _each(x, note)
    return found


class Ahead(Generic[K, V]):
    """Makes values on a thread before they are asked for.

    Args:
        make: a function of its key alone.
        depth: values made ahead; 0 makes each when it is asked for, without a thread.
    """

    def __init__(self, make: Callable[[K], V], depth: int):
        self.make, self.depth = make, depth
        self._pool = ThreadPoolExecutor(1, "selfspec-batches") if depth else None
        self._coming: dict[K, Future[V]] = {}

    def get(self, key: K, after: Callable[[int], K]) -> V:
        """The value of a key; `after(i)` is the key that will be asked for i calls later."""
        if self._pool is None:
            return self.make(key)
        wanted = [key, *(after(i + 1) for i in range(self.depth))]
        for old in [k for k in self._coming if k not in wanted]:
            self._coming.pop(old).cancel()
        for k in wanted:
            if k not in self._coming:
                self._coming[k] = self._pool.submit(self.make, k)
        return self._coming.pop(key).result()

    def close(self) -> None:
        """Drop what is under way and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool, self._coming = None, {}
