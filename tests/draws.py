"""Draft groups of a test: random anchors of a pack, and a trainer's own draws."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.training.anchors import Groups, choose
from selfspec.training.pack import Pack
from selfspec.training.trainer import Trainer


def sampled(pack: Pack, n: int, seed: int, step: int) -> Tensor:
    """n random anchors of every row, the same on every machine. [N, n]"""
    random = torch.Generator().manual_seed(seed * 1_000_003 + step * 7919 + 1)
    return choose(pack, n, torch.rand(pack.tokens.shape, generator=random))


def draw(trainer: Trainer, index: int = 0) -> tuple[Pack, Groups]:
    """A micro-batch of a trainer's stream and its draft groups."""
    shape = trainer.shape
    micro = trainer.batches.micro(index * shape.micro, shape.micro, shape).to(trainer.device)
    return micro.pack, micro.groups
