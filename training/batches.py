"""Micro-batches: drawn on the host from seed, document and epoch alone, ahead of the step that uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from selfspec import sampling
from selfspec.training import anchors as anchoring
from selfspec.training import noise
from selfspec.training.anchors import Groups
from selfspec.training.config import TrainConfig
from selfspec.training.flops import Work, work
from selfspec.training.objectives import Mix, dloop
from selfspec.training.pack import Pack, Packer, send

ANCHOR, HIDDEN, SPLIT, SPLIT_LENGTH, REPLAY, NOISE = range(6)  # what a slot's random numbers decide
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Shape:
    """What a step is made of on one process.

    Attributes:
        rows: packed rows of a step.
        micro: packed rows of a forward, at most; a step that holds more rows runs as several forwards.
        anchors: draft groups of a packed row.
        block: block size of the groups.
    """

    rows: int
    micro: int
    anchors: int
    block: int

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
class Choices:
    """What is random about the groups of a pack, on the host.

    Attributes:
        anchors: [N, A] long, slots in the pack, -1 pads.
        hidden: [N, A] bool, groups whose bonus is hidden, or None.
        splits: [N, A] long, how many drafts of a group are known, or None.
        ends: [N, A] long, last token that a group is charged for, or None.
        replayed: [N, A] bool, groups that start where their drafts fail instead, or None.
        seeds: [N, A] long, of each group's noise.
    """

    anchors: Tensor
    hidden: Tensor | None
    splits: Tensor | None
    ends: Tensor | None
    replayed: Tensor | None
    seeds: Tensor


@dataclass(frozen=True)
class Micro:
    """One forward's worth of a step.

    Attributes:
        pack, groups: what runs.
        choices: how the groups came about.
        divisors: [terms] double on the host, this micro-batch's share of what each loss term is divided by.
        labels: rows that predict something.
        work: what the forward has to compute.
    """

    pack: Pack
    groups: Groups
    choices: Choices
    divisors: Tensor
    labels: int
    work: Work

    def to(self, device: torch.device) -> Micro:
        """The same on the device, without waiting for the copies."""
        if device.type == "cpu":
            return self
        groups = _each(self.groups, lambda x: send(x, device))
        return dataclasses.replace(self, pack=self.pack.to(device), groups=groups)


class Batches:
    """The steps of one process.

    Args:
        packer: rows of documents.
        config: the adapter, shares of layouts, how far to draw ahead.
        mix: objectives, for their divisors.
        vocab_size: V, for noise.
        rank: of this process.
        size: processes; each takes its part of the rows of a step.
        pin: lay the tensors out for a fast copy to the device.
    """

    def __init__(
        self,
        packer: Packer,
        config: TrainConfig,
        mix: Mix,
        vocab_size: int,
        rank: int = 0,
        size: int = 1,
        pin: bool = False,
    ):
        self.packer, self.config, self.path, self.mix = packer, config, config.path, mix
        self.vocab_size, self.rank, self.size, self.pin = vocab_size, rank, size, pin
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
        return self._micro(pack, choose(pack, shape.anchors, shape.block, self.config), shape.block)

    def with_anchors(self, micro: Micro, anchors: Tensor, shape: Shape) -> Micro:
        """The same micro-batch with other anchors, [N, A] long on the host."""
        return self._micro(micro.pack, dataclasses.replace(micro.choices, anchors=anchors), shape.block)

    def _micro(self, pack: Pack, choices: Choices, size: int) -> Micro:
        c = choices
        groups = anchoring.path_groups(self.path, pack, c.anchors, size, c.hidden, c.splits, c.ends)
        groups = noise.fill(groups, pack, self.path.noise, self.vocab_size, self.path.mask_id, c.seeds)
        steps, labels = groups.charged()
        divisors, n_labels = self.mix.divisors(steps, labels >= 0).double(), int((labels >= 0).sum())
        if not n_labels:
            divisors = torch.zeros_like(divisors)
        done = work(pack, groups, labels)
        if self.pin:
            pack, groups = pack.each(_pinned), _each(groups, _pinned)
        return Micro(pack, groups, choices, divisors, n_labels, done)

    def _step(self, key: tuple[int, Shape]) -> list[Micro]:
        cursor, shape = key
        first = cursor + self.rank * shape.rows
        starts = range(first, first + shape.rows, shape.micro)
        return [self.micro(i, min(shape.micro, first + shape.rows - i), shape) for i in starts]


def choose(pack: Pack, n: int, size: int, config: TrainConfig) -> Choices:
    """Random draft groups of a pack, each a function of seed, document, epoch and position alone.

    Args:
        pack: of a `Packer`.
        n: groups of a row.
        size: block size.
        config: shares of layouts.
    """
    path = config.path
    anchors = anchoring.choose(pack, n // 2 if config.complement else n, pack.random(ANCHOR))

    def random(what: int) -> Tensor:
        return pack.random(what).gather(1, anchors.clamp(min=0))  # [N, A]

    hidden = splits = ends = None
    if config.complement:
        anchors, splits, ends = dloop.views(anchors, size, random(SPLIT_LENGTH))
    if "hidden" in path.layouts:
        hidden = random(HIDDEN) < (config.hidden_share if "known" in path.layouts else 1.0)
        if splits is not None:
            hidden &= splits == 0
    if path.prefix_splits and splits is None:
        splits = 1 + (random(SPLIT_LENGTH) * (size - 2)).long()
        splits = splits.masked_fill(random(SPLIT) >= config.split_share, 0)
        splits = splits if hidden is None else splits.masked_fill(hidden, 0)
    replayed = random(REPLAY) < config.replay_share if config.replay_share else None
    assert pack.keys is not None
    seeds = sampling.hashed(pack.keys, pack.positions, NOISE).gather(1, anchors.clamp(min=0))
    return Choices(anchors, hidden, splits, ends, replayed, seeds)


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


def _pinned(x: Tensor) -> Tensor:
    """In memory that a device copies from by itself; what is expanded is written out, as pinning asks for."""
    return x.contiguous().pin_memory()
