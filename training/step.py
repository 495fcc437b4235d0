"""One training forward: clean rows once without gradient, then the draft rows that read what they left.

Clean rows never see draft rows, so their keys, values and features are constants of the loss: only draft rows are kept
for the backward pass, and memory grows with them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.backbone import Backbone, DraftRows, MaskPath
from selfspec.cache import PrefixCache
from selfspec.rows import RowLayout
from selfspec.training.anchors import Groups, groups, path_groups
from selfspec.training.data import Answer
from selfspec.training.pack import Pack, Packer


@torch.no_grad()
def run_clean(backbone: Backbone, pack: Pack) -> tuple[PrefixCache, Tensor, Tensor | None]:
    """The documents through the untouched model.

    Returns:
        Their keys and values, the hidden states after the final norm [N, S, d], and the mask path's features [N, S, F].
    """
    n, s = pack.tokens.shape
    start = torch.zeros(n, dtype=torch.long, device=pack.tokens.device)
    cache = PrefixCache(backbone.n_layers)
    hidden = backbone(RowLayout(pack.positions, start, s, segments=pack.segments), cache, pack.tokens)
    cache.freeze()
    return cache, hidden.clean, hidden.taps


def run_draft(backbone: Backbone, drafted: Groups, cache: PrefixCache, taps: Tensor | None) -> Tensor:
    """The draft rows over a recorded prefix. Hidden states after the final norm, [N, A, B, d]."""
    rows = drafted.rows
    if taps is not None:
        last = (drafted.anchors - 1).clamp(min=0)  # the last clean position that a group sees
        features = taps.gather(1, last[:, :, None].expand(-1, -1, taps.shape[2]))
        rows = replace(rows, features=features.repeat_interleave(drafted.labels.shape[2], 1))
    return backbone(drafted.layout, cache, draft=rows).draft.unflatten(1, drafted.labels.shape[1:])


def backbone_of(model: PreTrainedModel, path: MaskPath, backend: str) -> Backbone:
    """A backbone to train.

    Args:
        model: the base model.
        path: what is trained.
        backend: of attention. "auto" is grouped attention where a draft by it succeeds, else FlexAttention (float32,
            windows, soft-caps, sinks, no Triton, a GPU that the kernels do not fit).
    """
    if backend == "auto" and model.dtype in (torch.bfloat16, torch.float16):
        try:
            body = Backbone(model, path, "grouped")
            _try_out(body)
            return body
        except Exception:  # whatever a kernel that this GPU cannot run may raise
            pass
    return Backbone(model, path, "flex" if backend == "auto" else backend)


def _try_out(body: Backbone) -> None:
    """Forward and backward of one draft group."""
    pack = Packer([Answer("", [1] * 4, [1] * 4)], 8, 1).batch(0).to(body.device)
    cache, _, taps = run_clean(body, pack)
    drafted = path_groups(body.path.config, pack, torch.tensor([[5]], device=body.device))  # type: ignore[union-attr]
    loss = run_draft(body, drafted, cache, taps).float().sum()
    params = [p for p in body.path.parameters() if p.requires_grad]  # type: ignore[union-attr]
    if params and loss.requires_grad:  # where heads are trained alone the path is constant
        torch.autograd.grad(loss, params, allow_unused=True)


class Untouched(nn.Module):
    """A mask path that changes nothing: its rows are the base model's own, at any place of a pack."""

    entry, taps = 0, ()

    def embed(self, rows: DraftRows, backbone: Backbone) -> Tensor:
        """The rows' tokens, as the model embeds them. [N, D, d]"""
        return backbone.embed(rows.tokens.clamp(min=0))

    def delta(self, layer: int, name: str) -> None:
        """Nothing, anywhere."""


def verifier_of(model: PreTrainedModel, backend: str = "sdpa") -> Backbone:
    """A backbone whose draft rows are clean ones, to run texts that branch off a pack (`run_verifier`)."""
    return Backbone(model, Untouched(), backend, verify=False)


@torch.no_grad()
def run_verifier(verifier: Backbone, pack: Pack, cache: PrefixCache, anchors: Tensor, tokens: Tensor) -> Tensor:
    """What the untouched model says after other tokens than the pack's.

    Args:
        verifier: of `verifier_of`.
        pack: the documents.
        cache: of `run_clean`.
        anchors: [N, A] long, slots of the first tokens.
        tokens: [N, A, T] long, tokens at the anchors' positions and after them.

    Returns:
        Hidden states after each token, [N, A, T, d].
    """
    layout = groups(pack, anchors, tokens.shape[2], causal=True).layout
    slots = torch.arange(tokens.shape[2], device=tokens.device).repeat(anchors.shape[1]).expand(len(anchors), -1)
    rows = DraftRows(tokens.flatten(1), slots)
    return verifier(layout, cache, draft=rows).draft.unflatten(1, tokens.shape[1:])


def draft_states(backbone: Backbone, drafted: Groups, cache: PrefixCache, clean: Tensor, taps: Tensor | None) -> Tensor:
    """Hidden states that the drafts 1..B-1 of a decoded block come from, seed row included.

    Args:
        backbone: with a mask path.
        drafted: its groups (`anchors.path_groups`).
        cache: of `run_clean`.
        clean: likewise, [N, S, d].
        taps: likewise.

    Returns:
        [N, A, B - 1, d]
    """
    config = backbone.path.config  # type: ignore[union-attr]
    hidden = run_draft(backbone, drafted, cache, taps)
    if config.seed_row:
        seed = clean.gather(1, drafted.anchors[:, :, None].expand(-1, -1, clean.shape[2]))
        return torch.cat([seed[:, :, None], hidden], 2)
    return hidden if config.shift else hidden[:, :, 1:]


def compile_layers(backbone: Backbone, kernel: dict[str, Any] | None = None, **options) -> None:
    """Let every layer run through one compiled function: compiled once, used by all layers.

    What would make the layers differ in the compiler's eyes is taken out: their index, the cache and the rule object
    stay outside, and keys, values and the block mask go in as tensors. The backbone then serves training forwards only.

    Args:
        backbone: its layers are wrapped in place; the user's model isn't touched.
        kernel: options of FlexAttention's kernels.
        options: of `torch.compile`.
    """
    run = torch.compile(_layer_function(backbone.cache_name, kernel), dynamic=False, **options)
    for i, layer in enumerate(backbone.layers):
        backbone.layers[i] = _Compiled(layer, backbone.windows[i], run, backbone.cache_name)


class _Compiled(nn.Module):
    """A layer whose work is done by a shared compiled function."""

    def __init__(self, layer: nn.Module, window: int | None, run: Callable, cache_name: str):
        super().__init__()
        self.layer, self.window, self.run, self.cache_name = layer, window, run, cache_name

    def forward(
        self, x: Tensor, attention_mask, position_ids, position_embeddings, use_cache: bool, **kwargs
    ) -> Tensor:
        cache = kwargs[self.cache_name]
        rule = attention_mask
        mask = rule.backend.prepare(rule, self.window)
        recording = cache.recording
        prefix = (None, None) if recording else (cache.keys, cache.values)
        attention = rule.backend.attention
        x, keys, values = self.run(self.layer, x, mask, attention, position_ids, position_embeddings, *prefix)
        if recording:
            cache.keys, cache.values = keys, values
        return x


class _Prefix:
    """The cache as one layer sees it while it is compiled."""

    def __init__(self, keys: Tensor | None, values: Tensor | None):
        self.keys, self.values = keys, values
        self.new: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self.keys is None or self.values is None:
            self.new = (key_states, value_states)
            return key_states, value_states
        return torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)


class _Rule:
    """The attention rule as one layer sees it while it is compiled: what the backend reads is already built."""

    base = None  # packs stand in no slots

    def __init__(self, mask, attention: Callable, kernel: dict[str, Any] | None):
        self._mask, self._attention, self.kernel = mask, attention, kernel

    def run(self, query: Tensor, key: Tensor, value: Tensor, *how) -> Tensor:
        return self._attention(query, key, value, self, *how)

    def mask(self, window: int | None):
        return self._mask

    def blocks(self, window: int | None):
        return self._mask

    def lengths(self):
        return self._mask

    def ranges(self):
        return self._mask


def _layer_function(cache_name: str, kernel: dict[str, Any] | None) -> Callable:
    def run(layer, x, mask, attention, position_ids, position_embeddings, keys, values):
        cache = _Prefix(keys, values)
        y = layer(
            x,
            attention_mask=_Rule(mask, attention, kernel),
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            use_cache=True,
            **{cache_name: cache},
        )
        return y[0] if isinstance(y, tuple) else y, *cache.new

    return run
