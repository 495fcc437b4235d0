"""What a step has to compute, and what share of the device's peak that is (MFU: arXiv 2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.backbone import Backbone
from selfspec.training.anchors import Groups
from selfspec.training.pack import Pack

# dense bf16 tensor-core peaks, from the makers' data sheets
PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12,
         "MI300X": 1307e12}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is useful in some forwards; padding is none of it.

    Attributes:
        clean: clean rows.
        draft: draft rows.
        labels: draft rows that go through the head.
        clean_pairs: pairs of a clean row and a key that it sees.
        draft_pairs: the same for draft rows.
        groups: draft groups that predict something.
    """

    clean: int = 0
    draft: int = 0
    labels: int = 0
    clean_pairs: int = 0
    draft_pairs: int = 0
    groups: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.values, other.values)))

    @property
    def values(self) -> tuple[int, ...]:
        """The counts in their order."""
        return self.clean, self.draft, self.labels, self.clean_pairs, self.draft_pairs, self.groups


def work(pack: Pack, groups: Groups, labels: Tensor) -> Work:
    """Count a micro-batch on the host. labels: those that the objectives look at, negative where there is none."""
    real, layout = pack.segments >= 0, groups.layout
    assert layout.group is not None and layout.limit is not None
    live = layout.group >= 0
    size = groups.labels.shape[2]
    seen = (
        layout.limit[live].sum() + (size + 1) / 2 * live.sum() if layout.causal else (layout.limit[live] + size).sum()
    )
    return Work(int(real.sum()), int(live.sum()), int((labels >= 0).sum()), int((pack.positions[real] + 1).sum()),
                int(seen), int((labels >= 0).any(1).sum()))  # fmt: skip


def flops(backbone: Backbone, done: Work) -> float:
    """Floating-point operations of the forwards and backwards that `done` counts; a multiply-add is two.

    With P the weights of linears in the layers, Pe those of the layers that draft rows enter, D the trained matrices of
    layers, I those of the path's inputs, H the head, A the width of all query heads in all layers (keys' and values'
    dimensions added up), and Ae the same from the entry layer on:

        clean · 2 P + draft · (4 Pe + 2 D + 4 I) + labels · 4 H + 2 A clean_pairs + 6 Ae draft_pairs

    that is: clean rows go forward only; draft rows go forward and give a gradient of their inputs in every layer, but a
    gradient of weights in trained matrices only; attention's backward is twice its forward, keys and values of clean
    rows having no gradient notwithstanding. Where only heads are trained, draft rows go forward only: 2 Pe, 2 I and
    2 Ae, and no D. A copy takes the place of a base matrix, a LoRA comes on top of it. Recomputation, norms,
    embeddings, small heads, second passes of some objectives and the optimizer count as nothing.
    """
    entry = backbone.path.entry if backbone.path is not None else 0
    clean = forward = trained = 0
    for i, layer in enumerate(backbone.layers):
        base, extra, tuned = _matrices(layer)
        clean += base
        if i >= entry:
            forward, trained = forward + base + extra, trained + tuned
    path = backbone.path
    outside: list[nn.Linear] = (
        [m for m in path.children() if isinstance(m, nn.Linear)] if isinstance(path, nn.Module) else []
    )
    inputs = sum(m.weight.numel() for m in outside)  # token and feature projections: what they read is constant
    head = backbone.vocab_size * backbone.embeddings.weight.shape[1]  # type: ignore[index]
    config = backbone.config
    heads = config.num_attention_heads
    width = [heads * (k + v) for _, k, v in backbone.kv_shapes]
    back = not (isinstance(path, nn.Module) and _heads_alone(path))
    attention = done.clean_pairs * sum(width) + (1 + 2 * back) * done.draft_pairs * sum(width[entry:])
    rows = done.clean * 2 * clean + done.draft * (2 * (1 + back) * (forward + inputs) + 2 * back * trained)
    return float(rows + done.labels * 4 * head + 2 * attention)


def _heads_alone(path: nn.Module) -> bool:
    """Whether heads are in training and nothing else of the path is."""
    trained = [name.startswith("heads.") for name, p in path.named_parameters() if p.requires_grad]
    return bool(trained) and all(trained)


def _matrices(layer: nn.Module) -> tuple[int, int, int]:
    """Weights of a layer's matrices: the base's, what draft rows run through besides, and what is trained."""
    base = extra = trained = 0
    for name, module in layer.named_modules():
        if ".delta" in f".{name}":
            continue
        delta = getattr(module, "delta", None)
        if isinstance(delta, nn.Module):
            tuned = sum(p.numel() for p in delta.parameters() if p.dim() == 2)
            trained += tuned
            extra += 0 if getattr(delta, "is_linear", False) else tuned
        elif isinstance(module, nn.Linear):
            base += module.weight.numel()
    return base, extra, trained


def peak(device: torch.device) -> float | None:
    """bf16 operations per second that the device's maker states, without sparsity; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for key, value in sorted(PEAKS.items(), reverse=True) if key in name), None)


def mfu(backbone: Backbone, done: Work, seconds: float, top: float | None = None) -> float | None:
    """Share of the device's bf16 peak that the useful work of so many seconds was.

    Args:
        backbone: what ran.
        done: how much of it.
        seconds: in what time.
        top: operations per second at best; None asks the device's name.
    """
    top = top or peak(backbone.device)
    return flops(backbone, done) / seconds / top if top and seconds > 0 else None


def total(parts: Sequence[Work]) -> Work:
    """The sum."""
    return sum(parts, Work())
