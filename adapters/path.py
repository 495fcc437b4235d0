"""The mask path as a module: mask embeddings, slot-0 projection, features, deltas of the tuned projections, heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import kernels
from selfspec.adapters import heads
from selfspec.adapters.attention import CopyDelta
from selfspec.adapters.config import MaskPathConfig
from selfspec.adapters.lora import LoraDelta
from selfspec.backbone import Backbone, DraftRows
from selfspec.draft.condition import Condition
from selfspec.shadow import inner_decoder, layers_of, table_of


class MaskPathModel(nn.Module):
    """Implements `selfspec.backbone.MaskPath` for one model and one configuration.

    Args:
        model: the base model; its weights are read for shapes and starting values, nothing on it changes.
        config: what to build.
        dtype: of the trained parameters; training keeps float32, decoding the model's own.
    """

    def __init__(self, model: PreTrainedModel, config: MaskPathConfig, dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        layers, table = layers_of(inner_decoder(model)), table_of(model)
        if any(not 0 <= t <= len(layers) for t in config.taps):
            raise ValueError(f"taps {config.taps} must lie between 0 and {len(layers)}, the model's last hidden state")
        if config.mask_id is not None and not 0 <= config.mask_id < table.shape[0]:
            raise ValueError(f"mask_id {config.mask_id} is outside the vocabulary, 0..{table.shape[0] - 1}")
        dtype = dtype or table.dtype
        d, n = table.shape[1], config.block_size if config.mask_embedding == "per_slot" else 1
        start = table.float().mean(0) if config.mask_id is None else table[config.mask_id]
        # [1 or B, d]; where noise stands in its place nothing trains it
        self.mask = nn.Parameter(start.detach().to(dtype).expand(n, d).clone(), requires_grad=config.noise != "uniform")
        make = dict(bias=False, device=table.device, dtype=dtype)
        # at a late entry slot 0 is no longer what the embedding table holds: start from the identity
        self.token = nn.Linear(d, d, **make) if config.entry else None  # type: ignore[arg-type]
        if self.token is not None:
            nn.init.eye_(self.token.weight)
        self.feature = nn.Linear(d * len(config.taps), d, **make) if config.taps else None  # type: ignore[arg-type]
        if self.feature is not None:
            nn.init.zeros_(self.feature.weight)
        self.deltas = nn.ModuleDict()
        for i in config.tuned_layers(len(layers)):
            for name, base in _targets(layers[i], config.target_names):
                delta: nn.Module
                if config.tuning == "lora":
                    delta = LoraDelta(base, config.rank, config.alpha, dtype)
                else:
                    delta = CopyDelta(base, dtype)
                self.deltas[_key(i, name)] = delta
        self.heads = heads.build(config.heads, d, config.head_rank, config.block_size, device=table.device, dtype=dtype)
        if not self.deltas:
            raise ValueError(f"no Linear named {config.target_names} in the layers of {type(model).__name__}")

    @property
    def entry(self) -> int:
        return self.config.entry

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def delta(self, layer: int, name: str) -> nn.Module | None:
        """The delta of a Linear of a layer, or None where it is not tuned."""
        key = _key(layer, name)
        return self.deltas[key] if key in self.deltas else None  # noqa: SIM401 (a ModuleDict has no get)

    def calibrate(self, backbone: Backbone) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What corrects a hidden group's drafts once their bonus is known; None without such a head."""
        return partial(heads.calibrated, self.heads, backbone) if "calibrator" in self.heads else None

    def confide(self) -> Callable[[Tensor], Tensor] | None:
        """What gives the chance that each draft survives once those before it do, [N, T], of the drafts' hidden states
        [N, T, d] as the layers left them; None without such a head."""
        return self._asked("confidence", heads.confidence)

    def lengths(self) -> Callable[[Tensor], Tensor] | None:
        """Likewise the probability of 0..T accepted drafts, [N, T + 1]."""
        return self._asked("length", heads.lengths)

    def _asked(self, name: str, ask: Callable[..., Tensor]) -> Callable[[Tensor], Tensor] | None:
        return partial(ask, self.heads, seeded=self.config.seed_row) if name in self.heads else None

    def condition(self, backbone: Backbone) -> Condition | None:
        """What conditions drafts on the tokens before them; None without such a head."""
        if heads.conditioner(self.heads) is None:
            return None
        return Condition(
            partial(heads.corrected, self.heads, backbone), partial(heads.read, backbone), backbone.readout
        )

    def embed(self, rows: DraftRows, backbone: Backbone) -> Tensor:
        """Draft rows as they enter.

        Args:
            rows: tokens [N, D], slots [N, D], features [N, D or 1, F].
            backbone: whose token embeddings are looked up.

        Returns:
            [N, D, d] in the embeddings' dtype.
        """
        dtype, extra = backbone.dtype, None
        if self.feature is not None:
            if rows.features is None:
                raise ValueError(f"this mask path needs the features {self.config.taps} of the last clean position")
            extra = nn.functional.linear(rows.features.to(dtype), self.feature.weight.to(dtype))
        weight = None if self.token is None else self.token.weight.to(dtype)
        mask = self.mask.to(dtype)
        if kernels.serve(mask) and not torch.is_grad_enabled() and dtype != torch.float64:
            from selfspec.kernels import enter as kernel

            source = backbone.table if backbone.table is not None else backbone.embed(rows.tokens.clamp(min=0))
            return kernel.enter(rows.tokens, rows.slots, source, mask, weight, extra)
        return enter(rows.tokens, rows.slots, backbone.embed(rows.tokens.clamp(min=0)), mask, weight, extra)


def enter(
    tokens: Tensor, slots: Tensor, source: Tensor, mask: Tensor, weight: Tensor | None, extra: Tensor | None
) -> Tensor:
    """Inputs of draft rows: their tokens' embeddings, projected, or their masks, and what comes on top.

    Args:
        tokens: [N, D] long, below 0 for a mask.
        slots: [N, D] long.
        source: [N, D, d] embeddings of the tokens, or the table [V, d] that holds them.
        mask: [1, d] for all slots, or [B, d].
        weight: [d, d] of the tokens' projection, or None.
        extra: [N, 1 or D, d], or None.

    Returns:
        [N, D, d]
    """
    embeddings = source[tokens.clamp(min=0)] if source.dim() == 2 else source
    if len(mask) == 1:
        masks = mask[0]
    elif torch.is_grad_enabled():  # the same values as by indexing; the gradient is one matrix product
        masks = (slots[..., None] == torch.arange(len(mask), device=mask.device)).to(mask) @ mask
    else:
        masks = mask[slots]
    x = embeddings if weight is None else nn.functional.linear(embeddings, weight)
    x = torch.where((tokens >= 0)[..., None], x, masks)
    return x if extra is None else x + extra


def _key(layer: int, name: str) -> str:
    return f"{layer}:{name.replace('.', ':')}"  # ModuleDict keys hold no dot


def _targets(layer: nn.Module, names: tuple[str, ...]) -> list[tuple[str, nn.Linear]]:
    """The Linears of a layer to tune. Experts see rows in another order, so they are left out."""
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names and "expert" not in name:
            found.append((name, module))
    return found
