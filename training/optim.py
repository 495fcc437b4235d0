"""The optimizer over trained parameters, some of which may be split over processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from selfspec.adapters import MaskPathModel
from selfspec.training.config import TrainConfig
from selfspec.training.objectives import Mix, term_of
from selfspec.training.world import World, local


def freeze(path: MaskPathModel, mix: Mix) -> None:
    """Take the gradient from what no objective trains, so that no backward pass goes through the layers for it.

    Args:
        path: before its optimizer is made.
        mix: the objectives; where all of them train heads alone, the rest of the path is left as it is, heads of other
            objectives too.
    """
    if mix.heads_alone:
        path.requires_grad_(False)
        terms = {name for name, _, _ in mix.terms}
        for head, module in path.heads.items():
            module.requires_grad_(term_of(head) in terms)


def optimizer_of(path: MaskPathModel, config: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over a mask path's trained parameters.

    Mask embeddings have a rate of their own. What stands in layers is a group apart: it may be split over processes,
    and fused updates don't take both kinds.

    Args:
        path: in float32.
        config: rate, decay, betas.
        fused: one kernel for many parameters (CUDA).
    """
    inside = {id(p) for p in path.deltas.parameters()}
    trained = [p for p in path.parameters() if p.requires_grad]
    rest = [p for p in trained if p is not path.mask]
    outside, deltas = ([p for p in rest if (id(p) in inside) == yes] for yes in (False, True))
    parts = ([p for p in trained if p is path.mask], outside, deltas)
    scales = (config.mask_lr, 1.0, 1.0)
    groups = [{"params": params, "scale": scale} for params, scale in zip(parts, scales) if params]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay,
        fused=fused or None,
    )  # fmt: skip


@torch.no_grad()
def clip(params: Sequence[nn.Parameter], most: float, world: World) -> Tensor:
    """Scale gradients down to a norm of at most `most`, over all parameters and processes; 0 leaves them alone.

    Returns:
        The norm that they had.
    """
    split = [local(p.grad) for p in params if isinstance(p, DTensor) and p.grad is not None]
    whole = [p.grad for p in params if not isinstance(p, DTensor) and p.grad is not None]
    norm = torch.nn.utils.get_total_norm(whole)
    if world.sharded:
        squared = torch.nn.utils.get_total_norm(split).square() if split else torch.zeros_like(norm)
        world.sum_([squared])
        norm = (norm.square() + squared).sqrt()
    factor = ((most or math.inf) / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([*whole, *split], factor)
    return norm


@torch.no_grad()
def lerp_(means: Sequence[Tensor], params: Sequence[Tensor], weight: float) -> None:
    """Move averaged weights towards the present ones."""
    torch._foreach_lerp_([local(m) for m in means], [local(p.detach()) for p in params], weight)


@contextmanager
def swapped(params: Sequence[Tensor], other: Sequence[Tensor]) -> Iterator[None]:
    """Work with another set of weights for a while; an empty one is the present ones."""
    swap_(params, other)
    try:
        yield
    finally:
        swap_(params, other)


@torch.no_grad()
def swap_(params: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Exchange the weights with another set; an empty one changes nothing."""
    for p, q in zip(params, other):
        mine, its = local(p.detach()), local(q)
        kept = mine.clone()
        mine.copy_(its)
        its.copy_(kept)
