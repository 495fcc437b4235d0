"""Decoder layers, final norm and head of the plain dense shape, run by our own row-invariant kernels.

A layer is fused only where it is a Llama, Qwen2, Qwen3 or Mistral layer in structure and a few random rows agree with
it; weights, norms and rotary factors stay the shadow layer's own, none is copied. All other layers run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.attention import AttentionRule, backend
from selfspec.backbone import Backbone, Route, RoutedLinear
from selfspec.cache import KVCache, SlotLayer
from selfspec.kernels.linear import TICKETS, Span, linear
from selfspec.kernels.norm import rmsnorm
from selfspec.kernels.rotary import rotary
from selfspec.rows import chain
from selfspec.shadow import UnsupportedModel

EXACT = ("llama", "qwen2", "qwen3", "mistral")  # model types that exact mode is tested on
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
}
OPTIONAL = {"q_norm", "k_norm", "act_fn", "rotary_emb"}


class FusedLayer(nn.Module):
    """A decoder layer in seven launches, called as `Backbone` calls a shadow layer.

    Args:
        layer: the shadow layer; its parameters are read at every call.
        window: its sliding window in positions, or None.
        tickets: [TICKETS] int32 zeros, shared by the layers of one backbone.
        exact: refuse whatever is not row-invariant.
    """

    def __init__(self, layer: nn.Module, window: int | None, tickets: Tensor, exact: bool = False):
        super().__init__()
        self.layer, self.window, self.exact = layer, window, exact
        self.tickets = tickets

    def forward(
        self,
        x: Tensor,
        attention_mask: AttentionRule,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """[N, R, d] -> [N, R, d]; `kwargs` holds the layer's part of the cache, under the name of the release."""
        cache = next((v for v in kwargs.values() if isinstance(v, SlotLayer)), None)
        if cache is None or not self._known(attention_mask):
            if self.exact:
                raise ValueError("exact mode decodes over a KVCache and rows in order; training needs a plain backbone")
            return self.layer(
                x, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )  # training's packed forwards
        a, mlp = self.layer.self_attn, self.layer.mlp
        x = x.contiguous()
        heads = self._project(x, (a.q_proj, a.k_proj, a.v_proj), norm=_norm(self.layer.input_layernorm))
        place = cache.place
        assert place.slot is not None and place.requests is not None and cache.keys is not None
        assert cache.values is not None
        own = slice(place.first, place.first + place.n)
        q_norm, k_norm = (_norm(m) if (m := getattr(a, n, None)) is not None else None for n in ("q_norm", "k_norm"))
        q = rotary(
            heads, *position_embeddings, cache.keys, cache.values, place.requests, place.slot, q_norm, k_norm
        )  # [N, H, R, D]
        keys, values = (t[own, :, : place.n_keys] for t in (cache.keys, cache.values))
        seen = attention_mask.run(q, keys, values, self.window, a.scaling, None, None)
        seen = seen.transpose(1, 2).reshape(*x.shape[:2], -1)  # [N, R, H * D]
        x = self._project(seen, (a.o_proj,), residual=x)
        y = self._project(x, (mlp.gate_proj, mlp.up_proj), norm=_norm(self.layer.post_attention_layernorm), swiglu=True)
        return self._project(y, (mlp.down_proj,), residual=x)

    def _known(self, rule: AttentionRule) -> bool:
        return rule.layout.segments is None and rule.layout.key_positions is None

    def _project(
        self,
        x: Tensor,
        modules: tuple[nn.Module, ...],
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        swiglu: bool = False,
    ) -> Tensor:
        """One product of all rows: one launch where they share their weights, else one each for clean and draft rows.

        A delta that is no more than another weight takes the base's place; any other is applied to the draft rows'
        product by torch.
        """
        base = [m.base if isinstance(m, RoutedLinear) else m for m in modules]
        route = next((m.route for m in modules if isinstance(m, RoutedLinear)), None)
        n, r, _ = x.shape
        c = r if route is None else min(route.n_clean, r)
        widths = [m.weight.shape[0] for m in base]
        out = x.new_empty(n, r, widths[0] if swiglu else sum(widths))
        how = dict(norm=norm, residual=residual, swiglu=swiglu, out=out, tickets=self.tickets)
        if c:
            linear(x, *_weights(base), span=Span(0, c), **how)
        if c == r:
            return out
        drafts = [_draft_weights(m, x.dtype) for m in modules]
        if all(m is not None for m in drafts):
            linear(x, *_weights(drafts), span=Span(c, r - c), **how)
            return out
        rows = x[:, c:].contiguous()
        rows = rows if norm is None else rmsnorm(rows, *norm)
        ys = [self._delta(m, rows) for m in modules]
        y = nn.functional.silu(ys[0]) * ys[1] if swiglu else torch.cat(ys, -1)
        out[:, c:] = y if residual is None else residual[:, c:] + y
        return out

    def _delta(self, module: nn.Module, rows: Tensor) -> Tensor:
        """A draft product by the mask path's own module, over a base that runs in our kernel."""
        if isinstance(module, RoutedLinear):
            return module.delta(rows, FusedLinear(module.base, self.tickets))
        return FusedLinear(module, self.tickets)(rows)


class FusedNorm(nn.Module):
    """An RMSNorm by our kernel. Args: norm: the module whose weight is used."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        return rmsnorm(x, *_norm(self.norm))


class FusedLinear(nn.Module):
    """A Linear by our kernel.

    Args:
        base: the module whose weight and bias are used.
        tickets: see `FusedLayer`.
    """

    def __init__(self, base: nn.Module, tickets: Tensor):
        super().__init__()
        self.base, self.tickets = base, tickets

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        rows = x.reshape(1, -1, x.shape[-1]).contiguous()
        return linear(rows, *_weights([self.base]), tickets=self.tickets).view(*x.shape[:-1], -1)


def fuse(backbone: Backbone, exact: bool = False) -> str:
    """Put fused layers, norm and head in the place of the shadow's, wherever they give the same.

    Args:
        backbone: changed in place; the user's model is not.
        exact: every row's bits must depend on that row's own text alone.

    Returns:
        What was fused, and why the rest was not.

    Raises:
        UnsupportedModel: exact, and something that touches a row is not row-invariant; the message says what.
    """
    reason = _unfit(backbone)
    kind = backbone.config.model_type
    if exact and kind not in EXACT:
        reason = f"{kind} is not among the families that it is tested on"
    elif exact and backbone.backend != "triton":
        reason = f"the attention backend {backbone.backend!r} adds in an order of its own; choose backend='triton'"
    if reason:
        return _refuse(exact, reason)
    layers, tickets = [], torch.zeros(TICKETS, dtype=torch.int32, device=backbone.device)
    reasons: dict[str, int] = {}
    for i, layer in enumerate(backbone.layers):
        why = fusable(layer) or _differs(backbone, i, tickets)
        layers.append(layer if why else FusedLayer(layer, backbone.windows[i], tickets, exact))
        if why:
            reasons.setdefault(f"layer {i}: {why}", i)
    head = getattr(backbone.head, "lm_head", None)
    norm = None if _is_norm(backbone.norm) else "its final norm is no RMSNorm with a weight of its own"
    ends = norm or (None if _is_linear(head) else "its head is no Linear named lm_head")
    ends = ends or _ends_differ(backbone, tickets)
    if exact and (reasons or ends):
        return _refuse(exact, "; ".join([*reasons, *([ends] if ends else [])]))
    backbone.layers = nn.ModuleList(layers)
    if not ends:
        assert isinstance(head, nn.Module)
        backbone.norm = FusedNorm(backbone.norm)
        backbone.head._modules["lm_head"] = FusedLinear(head, tickets)
    n = sum(isinstance(m, FusedLayer) for m in layers)
    said = f"fused {n} of {len(layers)} layers" + ("" if ends else ", the final norm and the head")
    return "; ".join([said, *reasons, *([f"ends: {ends}"] if ends else [])])


def fusable(layer: nn.Module) -> str | None:
    """Why a layer has not the plain dense shape, or None."""
    for name, wanted in PARTS.items():
        part = layer.get_submodule(name) if not name or name in layer._modules else None
        have = set() if part is None else {k for k, m in part._modules.items() if m is not None}
        if wanted - have or have - wanted - OPTIONAL:
            odd = ", ".join(sorted(wanted - have) + sorted(have - wanted - OPTIONAL))
            return f"{name or type(layer).__name__} is not of the plain dense shape ({odd})"
        assert part is not None
        for leaf in sorted(have):
            module = part._modules[leaf]
            if leaf.endswith("norm") and not _is_norm(module):
                return f"{leaf} is no RMSNorm with a weight of its own"
            if leaf.endswith("_proj") and not _is_linear(module.base if isinstance(module, RoutedLinear) else module):
                return f"{leaf} is a {type(module).__name__}, not a Linear"
        biases = [getattr(m.base if isinstance(m, RoutedLinear) else m, "bias", None) for m in part._modules.values()]
        together = biases[:3] if name == "self_attn" else biases[:2]
        if name and len({b is None for b in together}) > 1:
            return f"only some of the projections of {name} have a bias"
    if not isinstance(getattr(layer.self_attn, "scaling", None), float):
        return "its attention has no scale of its own"
    return None


def _unfit(backbone: Backbone) -> str | None:
    """Why nothing at all can run in the kernels, or None."""
    if backbone.dtype not in DTYPES:
        return f"the kernels know {', '.join(str(d)[6:] for d in DTYPES)}, not {str(backbone.dtype)[6:]}"
    import triton  # the backbone without it serves a CPU

    interpreted = triton.knobs.runtime.interpret
    if backbone.device.type != "cuda" and not interpreted:
        return f"the kernels need a CUDA device, not {backbone.device.type}"
    if interpreted and backbone.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies no bfloat16"
    return None


def _refuse(exact: bool, reason: str) -> str:
    if exact:
        raise UnsupportedModel(
            f"exact mode is not available here: {reason}. It serves {', '.join(EXACT)} models in bfloat16, float16 or "
            "float32 on a CUDA device, over the triton attention backend"
        )
    return f"fused nothing: {reason}"


def _differs(backbone: Backbone, index: int, tickets: Tensor) -> str | None:
    """Run a few random rows through a layer and its fused form: what names cannot tell (scales, other rotations)."""
    layer, window = backbone.layers[index], backbone.windows[index]
    width = backbone.embeddings.weight.shape[1]
    return _compare(backbone, index, layer, FusedLayer(layer, window, tickets), int(width))  # type: ignore[arg-type]


@torch.no_grad()
def _compare(backbone: Backbone, index: int, layer: nn.Module, fused: nn.Module, width: int) -> str | None:
    rows = 3
    layout = chain(torch.zeros(1, dtype=torch.long, device=backbone.device), rows)
    rope = backbone._rope(layout.positions)[backbone.layer_types[index] if backbone.rotary_by_type else ""]
    x = _noise(backbone, rows, width)
    ys, stores = [], []
    backbone.route.n_clean = rows
    for module in (layer, fused):
        cache = KVCache([backbone.kv_shapes[index]], 1, rows, rows, backbone.dtype, backbone.device)
        rule = AttentionRule(layout, cache.bind(layout), backbone.backend)
        if backbone.masked[index] is not None:
            rule = rule.within(backbone.masked[index])  # type: ignore[arg-type]
        try:
            y = module(
                x, attention_mask=rule, position_ids=layout.positions, position_embeddings=rope, use_cache=True,
                **{backbone.cache_name: cache.layers[0]},
            )  # fmt: skip
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            return f"it cannot be run by the kernels ({error})"
        ys.append(y[0] if isinstance(y, tuple) else y)
        stores.append(torch.cat([s.flatten() for s in cache.stores]))
    return _off(ys[0] - x, ys[1] - x, backbone.dtype) or _off(*stores, backbone.dtype)


@torch.no_grad()
def _ends_differ(backbone: Backbone, tickets: Tensor) -> str | None:
    """The same for the final norm and the head's Linear."""
    x = _noise(backbone, 3, backbone.embeddings.weight.shape[1])  # type: ignore[arg-type]
    head: Callable = backbone.head.lm_head  # type: ignore[assignment]
    wanted = backbone.norm(x)
    ours = FusedNorm(backbone.norm)(x)
    return _off(wanted, ours, backbone.dtype) or _off(
        head(wanted),
        FusedLinear(head, tickets)(wanted),
        backbone.dtype,  # type: ignore[arg-type]
    )


def _noise(backbone: Backbone, rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, rows, width, generator=generator).to(backbone.device, backbone.dtype)


def _off(wanted: Tensor, ours: Tensor, dtype: torch.dtype) -> str | None:
    loose = 1e-3 if dtype == torch.float32 else 0.03
    error = float((wanted.float() - ours.float()).norm() / wanted.float().norm().clamp(min=1e-6))
    return None if error < loose else f"the kernels give something else (relative error {error:.1e})"


def _is_norm(module: object) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 1
        and getattr(module, "bias", None) is None
        and (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
    )


def _is_linear(module: object) -> bool:
    return type(module) is nn.Linear and module.weight.is_contiguous() and module.weight.dtype in DTYPES


def _norm(module: nn.Module) -> tuple[Tensor, float]:
    eps = getattr(module, "variance_epsilon", None)
    return module.weight, float(module.eps if eps is None else eps)  # type: ignore[return-value,arg-type]


def _weights(modules: list) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    weights, biases = tuple(m.weight for m in modules), tuple(m.bias for m in modules)
    return weights, None if biases[0] is None else biases


def _draft_weights(module: nn.Module, dtype: torch.dtype) -> Any:
    """The module that holds a draft row's whole weight, or None where its delta is more than that."""
    if not isinstance(module, RoutedLinear):
        return module
    delta = module.delta
    same = getattr(delta, "is_linear", False) and delta.weight.dtype == dtype  # type: ignore[union-attr]
    return delta if same and (delta.bias is None) == (module.base.bias is None) else None


__all__ = ["FusedLayer", "FusedLinear", "FusedNorm", "Route", "backend", "fusable", "fuse"]
