"""Decoder layers, final norm and head of the plain dense shape, run by our own row-invariant kernels.

Weights, norms and rotary factors stay the shadow layer's own; none is copied. `selfspec.fusable` decides what fits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfspec.attention import AttentionRule
from selfspec.cache import SlotLayer
from selfspec.kernels.linear import Span, linear
from selfspec.kernels.norm import rmsnorm
from selfspec.kernels.rotary import rotary
from selfspec.routed import RoutedLinear

MANY = 128  # rows; beyond them cuBLAS is faster than tiles made for a few, and its order of adding depends on them


class FusedLayer(nn.Module):
    """A decoder layer in eight launches, called as `Backbone` calls a shadow layer. It has no gradient.

    Args:
        layer: the shadow layer; its parameters are read at every call.
        window: its sliding window in positions, or None.
        tickets: [TICKETS] int32 zeros, shared by all of one backbone, whose sessions take turns (`selfspec.turns`).
        exact: refuse whatever is not row-invariant.
    """

    def __init__(self, layer: Any, window: int | None, tickets: Tensor, exact: bool = False):
        super().__init__()
        self.layer, self.window, self.tickets, self.exact = layer, window, tickets, exact

    def forward(
        self, x: Tensor, attention_mask: AttentionRule, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        """[N, R, d] -> [N, R, d]; `kwargs` holds the layer's part of the cache, under the name of the release."""
        cache = next((v for v in kwargs.values() if isinstance(v, SlotLayer)), None)
        if cache is None:  # nothing to decode over: the layer's own way
            if self.exact:
                raise ValueError("exact mode decodes over a KVCache; for other forwards use a backbone of their own")
            return self.layer(x, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs)
        a, mlp, x = self.layer.self_attn, self.layer.mlp, ungraded(x).contiguous()
        heads = self._project(x, (a.q_proj, a.k_proj, a.v_proj), norm=norm_of(self.layer.input_layernorm))
        norms = (norm_of(m) if (m := getattr(a, name, None)) is not None else None for name in ("q_norm", "k_norm"))
        place, keys, values = cache.place, cache.keys, cache.values
        assert place.slot is not None and place.requests is not None and keys is not None and values is not None
        q = rotary(heads, *position_embeddings, keys, values, place.requests, place.slot, *norms)  # [N, H, R, D]
        own = slice(place.first, place.first + place.n)
        keys, values = keys[own, :, : place.n_keys], values[own, :, : place.n_keys]
        seen = attention_mask.run(q, keys, values, self.window, a.scaling, None, None)
        seen = seen.transpose(1, 2).reshape(*x.shape[:2], -1)  # [N, R, H * D]
        x = self._project(seen, (a.o_proj,), residual=x)
        norm = norm_of(self.layer.post_attention_layernorm)
        y = self._project(x, (mlp.gate_proj, mlp.up_proj), norm=norm, swiglu=True)
        return self._project(y, (mlp.down_proj,), residual=x)

    def _project(
        self,
        x: Tensor,
        modules: tuple[Any, ...],
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        swiglu: bool = False,
    ) -> Tensor:
        """One product of all rows: one launch where they share their weights, else one each for clean and draft rows.

        A delta that is no more than another weight takes the base's place; any other is the mask path's own module,
        over a base that runs in our kernel.
        """
        base: list[Any] = [m.base if isinstance(m, RoutedLinear) else m for m in modules]
        n, r, _ = x.shape
        if n * r > MANY and not self.exact:
            rows = x if norm is None else rmsnorm(x, *norm)
            ys = [m(rows) for m in modules]
            y = nn.functional.silu(ys[0]).mul_(ys[1]) if swiglu else ys[0] if len(ys) == 1 else torch.cat(ys, -1)
            return y if residual is None else residual + y
        c = next((m.route.n_clean for m in modules if isinstance(m, RoutedLinear)), r)
        widths = [m.weight.shape[0] for m in base]
        out = x.new_empty(n, r, widths[0] if swiglu else sum(widths))

        def run(span: Span, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...] | None) -> None:
            linear(x, weights, biases, norm, residual, swiglu, span, out, self.tickets)

        if c:
            run(Span(0, c), *weights_of(base))
        if c == r:
            return out
        drafts = [_whole(m, x.dtype) for m in modules]
        if None not in drafts:
            run(Span(c, r - c), *weights_of(drafts))
            return out
        rows = x[:, c:].contiguous()
        rows = rows if norm is None else rmsnorm(rows, *norm)
        ys = [self._draft(m, rows) for m in modules]
        y = nn.functional.silu(ys[0]) * ys[1] if swiglu else torch.cat(ys, -1)
        out[:, c:] = y if residual is None else residual[:, c:] + y
        return out

    def _draft(self, module: Any, rows: Tensor) -> Tensor:
        """The product of draft rows alone."""
        if isinstance(module, RoutedLinear):
            return module.delta(rows, FusedLinear(module.base, self.tickets, self.exact))
        return FusedLinear(module, self.tickets, self.exact)(rows)


class FusedNorm(nn.Module):
    """An RMSNorm by our kernel.

    Args:
        norm: the module whose weight is used.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        return rmsnorm(ungraded(x), *norm_of(self.norm))


class FusedLinear(nn.Module):
    """A Linear by our kernel.

    Args:
        base: the module whose weight and bias are used.
        tickets: see `FusedLayer`.
        exact: likewise.
    """

    def __init__(self, base: Any, tickets: Tensor, exact: bool = False):
        super().__init__()
        self.base, self.tickets, self.exact = base, tickets, exact

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        rows = ungraded(x).reshape(1, -1, x.shape[-1]).contiguous()
        if rows.shape[1] > MANY and not self.exact:
            return self.base(x)
        return linear(rows, *weights_of([self.base]), tickets=self.tickets).view(*x.shape[:-1], -1)


def ungraded(x: Tensor) -> Tensor:
    """x, if nothing will ask for its gradient: it would silently be missing."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("fused layers have no gradient: train on a backbone that is not fused")
    return x


def norm_of(module: Any) -> tuple[Tensor, float]:
    """An RMSNorm's weight and epsilon."""
    eps = getattr(module, "variance_epsilon", None)
    return module.weight, float(module.eps if eps is None else eps)


def weights_of(modules: list[Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Weights and biases of Linears that all have a bias or all have none."""
    weights, biases = tuple(m.weight for m in modules), tuple(m.bias for m in modules)
    return weights, None if biases[0] is None else biases


def _whole(module: Any, dtype: torch.dtype) -> Any:
    """The module that holds the whole weight of draft rows, or None where a delta is more than that."""
    if not isinstance(module, RoutedLinear):
        return module
    delta: Any = module.delta
    same = getattr(delta, "is_linear", False) and delta.weight.dtype == dtype
    return delta if same and (delta.bias is None) == (module.base.bias is None) else None
