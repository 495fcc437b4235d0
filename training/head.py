"""What objectives need of the vocabulary, without a graph of operations over it: label log-probabilities, divergences.

Logits are in the model's own precision and made one chunk of rows at a time; the softmax is in float32 (float64 for a
float64 model). For label log-probabilities every chunk's logits are kept for the backward pass, where their gradient is
written down in closed form: that takes rows x vocabulary of memory and saves a second product with the head
(`selfspec.training.fused` does it the other way round). Where the head is no plain linear layer, and for divergences, a
chunk's logits are forgotten and made again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from selfspec.backbone import Backbone
from selfspec.training import fused

CHUNK = 8192  # rows


class Head:
    """The model's own output head, over rows of hidden states.

    Args:
        backbone: whose head it is.
        compiled: fuse the softmax with torch.compile.
        chunk: rows at a time.
        forget: keep no logits for the backward pass where the head is a plain linear layer (`training.fused`).
    """

    def __init__(self, backbone: Backbone, compiled: bool = False, chunk: int = CHUNK, forget: bool = False):
        self.backbone, self.compiled, self.chunk, self.forget = backbone, compiled, chunk, forget
        self.plain = _plain_linear(backbone)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, d] -> [M, V]"""
        return self.backbone.logits(hidden[None])[0]

    def logp(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of every label, and whether the label is the most probable token.

        Args:
            hidden: [M, d]
            labels: [M] long, not negative.
        """
        chunk = self._even(len(hidden))
        if self.plain is not None and self.forget:
            return fused.label_logp(hidden, *self.plain, labels)
        if self.plain is not None:
            return _LabelLogp.apply(hidden, *self.plain, labels, chunk, self.compiled)
        parts = []
        for h, label in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            parts.append(
                checkpoint(
                    lambda h, t: _label_stats(self.logits(h), t)[1:],
                    h,
                    label,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        return torch.cat([p for p, _ in parts]), torch.cat([hit for _, hit in parts])

    def measure(self, fn: Callable, hidden: Tensor, teacher: Tensor, *scales: Tensor, **options) -> Tensor:
        """A number for every row from the draft's logits and the verifier's, recomputed for the backward pass.

        Args:
            fn: from logits [m, V] and [m, V], and the scales, to [m]; a module-level function.
            hidden: [M, d] draft rows.
            teacher: [M, d] clean rows that predict the same tokens; no gradient.
            scales: [M] each.
            options: of `fn`.

        Returns:
            [M]
        """

        def run(h: Tensor, t: Tensor, *rest: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.logits(t)
            return (_compiled(fn) if self.compiled else fn)(self.logits(h), target, *rest, **options)

        parts, chunk = [], self._even(len(hidden))
        for some in zip(*(x.split(chunk) for x in (hidden, teacher, *scales)), strict=True):
            parts.append(checkpoint(run, *some, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts)

    def _even(self, rows: int) -> int:
        """Chunks of one size where that is possible, so that one compiled kernel serves them."""
        return max(1, -(-rows // max(1, -(-rows // self.chunk))))

    @torch.no_grad()
    def argmax(self, hidden: Tensor, banned: int | None = None) -> Tensor:
        """The most probable token of every row but a banned one. [M, d] -> [M]"""
        parts = []
        for h in hidden.split(self.chunk):
            logits = self.logits(h)
            if banned is not None:
                logits[:, banned] = float("-inf")
            parts.append(logits.argmax(-1))
        return torch.cat(parts)


class _LabelLogp(torch.autograd.Function):
    """log softmax(h W^T + b)[label]; its gradient is (onehot - softmax) W."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk, compiled):
        stats = _compiled(_label_stats) if compiled else _label_stats
        ctx.compiled, kept, out = compiled, [], []
        for h, label in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = linear(h, weight, bias)
            lse, logp, hit = stats(logits, label)
            kept += [logits, lse]
            out.append((logp, hit))
        ctx.save_for_backward(weight, labels, *kept)
        ctx.chunk = chunk
        logp, hit = (torch.cat(x) for x in zip(*out, strict=True))
        ctx.mark_non_differentiable(hit)
        return logp, hit

    @staticmethod
    def backward(ctx, grad, _):
        weight, labels, *kept = ctx.saved_tensors
        grad_logits = _compiled(_label_grad) if ctx.compiled else _label_grad
        parts = []
        for i, (label, g) in enumerate(zip(labels.split(ctx.chunk), grad.split(ctx.chunk), strict=True)):
            parts.append(grad_logits(kept[2 * i], kept[2 * i + 1], label, g) @ weight)
        return torch.cat(parts), None, None, None, None, None


def _label_stats(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, label's log-probability, label is the maximum. Each [M]"""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = wide.logsumexp(-1)
    picked = logits.gather(-1, labels[:, None])[:, 0].to(wide.dtype)
    return lse, picked - lse, picked >= wide.amax(-1)


def _label_grad(logits: Tensor, lse: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits in the logits' precision. [M, V]"""
    p = (logits.to(lse.dtype) - lse[:, None]).exp()
    at = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    return ((at.to(p.dtype) - p) * grad[:, None]).to(logits.dtype)


@functools.cache
def _compiled(fn: Callable) -> Callable:
    return torch.compile(fn, dynamic=False)


@torch.no_grad()
def _plain_linear(backbone: Backbone) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias where the head is a Linear and nothing more (no soft-cap, no scale); found by trying."""
    found = [m for m in backbone.head.children() if isinstance(m, nn.Linear) and m.out_features >= backbone.vocab_size]
    if len(found) != 1:
        return None
    weight, bias = found[0].weight, found[0].bias
    probe = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight) * 8
    own, ours = backbone.logits(probe[None])[0], linear(probe, weight, bias)
    if (own - ours).abs().max() > 1e-2 * ours.abs().max():
        return None
    return weight.detach(), None if bias is None else bias.detach()
