"""Which layers our kernels can run in the place of a backbone's own: by structure, then by a few random rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, nn

from selfspec.attention import AttentionRule
from selfspec.backbone import Backbone
from selfspec.cache import KVCache
from selfspec.fused import FusedLayer, FusedLinear, FusedNorm
from selfspec.kernels.linear import TICKETS
from selfspec.routed import RoutedLinear
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
    reason = _unfit(backbone) or (_inexact(backbone) if exact else None)
    if reason:
        return _refuse(exact, [reason])
    tickets = torch.zeros(TICKETS, dtype=torch.int32, device=backbone.device)
    layers = [FusedLayer(m, backbone.windows[i], tickets, exact) for i, m in enumerate(backbone.layers)]
    why = [fusable(m.layer) or _differs(backbone, i, m) for i, m in enumerate(layers)]
    reasons = [f"layer {i}: {text}" for i, text in enumerate(why) if text]
    norm, head = FusedNorm(backbone.norm), FusedLinear(getattr(backbone.head, "lm_head", None), tickets, exact)
    ends = _ends_differ(backbone, norm, head)
    if exact and (reasons or ends):
        return _refuse(exact, [*reasons, *filter(None, [ends])])
    for i, layer in enumerate(layers):
        if not why[i]:
            backbone.layers[i] = layer
    if not ends:
        backbone.norm, backbone.head._modules["lm_head"] = norm, head
    said = f"fused {why.count(None)} of {len(layers)} layers" + ("" if ends else ", the final norm and the head")
    return "; ".join([said, *reasons, *filter(None, [ends])])


def fusable(layer: nn.Module) -> str | None:
    """Why a layer has not the plain dense shape, or None."""
    for name, wanted in PARTS.items():
        part = layer if not name else layer._modules.get(name)
        have = {} if part is None else {k: _base(m) for k, m in part._modules.items() if m is not None}
        odd = sorted(wanted - set(have)) + sorted(set(have) - wanted - OPTIONAL)
        if odd:
            return f"{name or type(layer).__name__} is not of the plain dense shape ({', '.join(odd)})"
        for leaf, module in have.items():
            if leaf.endswith("norm") and not _is_norm(module):
                return f"{leaf} is no RMSNorm with a weight of its own"
            if leaf.endswith("_proj") and not _is_linear(module):
                return f"{leaf} is a {type(module).__name__} that the kernels cannot read"
        together = [have[leaf].bias is None for leaf in sorted(wanted - {"o_proj", "down_proj"}) if name]
        if len(set(together)) > 1 or ("q_norm" in have) != ("k_norm" in have):
            return f"only some of the projections of {name} have a bias or a norm"
    if not isinstance(getattr(layer.self_attn, "scaling", None), float):
        return "its attention has no scale of its own"
    return None


def _base(module: Any) -> Any:
    return module.base if isinstance(module, RoutedLinear) else module


def _unfit(backbone: Backbone) -> str | None:
    """Why nothing at all can run in the kernels, or None."""
    if backbone.dtype not in DTYPES:
        return f"the kernels know {', '.join(str(d)[6:] for d in DTYPES)}, not {str(backbone.dtype)[6:]}"
    interpreted = triton.knobs.runtime.interpret
    if backbone.device.type != "cuda" and not interpreted:
        return f"the kernels need a CUDA device, not {backbone.device.type}"
    if interpreted and backbone.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies no bfloat16"
    return None


def _inexact(backbone: Backbone) -> str | None:
    """Why rows of this model cannot be independent of each other, or None."""
    kind = backbone.config.model_type
    if kind not in EXACT:
        return f"{kind} is not among the families that it is tested on"
    if backbone.backend != "triton":
        return f"the attention backend {backbone.backend!r} adds in an order of its own"
    return None


def _refuse(exact: bool, reasons: list[str]) -> str:
    if exact:
        raise UnsupportedModel(
            f"exact mode is not available here: {'; '.join(reasons)}. It serves {', '.join(EXACT)} models in bfloat16, "
            "float16 or float32 on a CUDA device, with backend='triton'"
        )
    return "; ".join(["fused nothing", *reasons])


@torch.no_grad()
def _differs(backbone: Backbone, index: int, fused: FusedLayer) -> str | None:
    """Run a few random rows through a layer and its fused form: what names cannot tell (scales, other rotations)."""
    rows = 3
    layout = chain(torch.zeros(1, dtype=torch.long, device=backbone.device), rows)
    rope = backbone._rope(layout.positions)[backbone.layer_types[index] if backbone.rotary_by_type else ""]
    x, window = _noise(backbone, rows), backbone.masked[index]
    backbone.route.n_clean = rows
    ys, stores = [], []
    for module in (fused.layer, fused):
        cache = KVCache([backbone.kv_shapes[index]], 1, rows, rows, backbone.dtype, backbone.device)
        rule = AttentionRule(layout, cache.bind(layout), backbone.backend)
        held: dict[str, Any] = {backbone.cache_name: cache.layers[0], "use_cache": True}
        try:
            y = module(
                x,
                attention_mask=rule if window is None else rule.within(window),
                position_ids=layout.positions,
                position_embeddings=rope,
                **held,
            )
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            return f"the kernels cannot run it ({error})"
        ys.append((y[0] if isinstance(y, tuple) else y) - x)
        stores.append(torch.cat([s.flatten() for s in cache.stores]))
    return _off(ys[0], ys[1]) or _off(stores[0], stores[1])


@torch.no_grad()
def _ends_differ(backbone: Backbone, norm: FusedNorm, head: FusedLinear) -> str | None:
    """Why the final norm and the head's Linear cannot be fused, or None."""
    if not _is_norm(norm.norm):
        return "the final norm is no RMSNorm with a weight of its own"
    if not _is_linear(head.base):
        return "the head is no Linear named lm_head"
    x = _noise(backbone, 3)
    wanted = norm.norm(x)
    return _off(wanted, norm(x)) or _off(head.base(wanted), head(wanted))


def _noise(backbone: Backbone, rows: int) -> Tensor:
    width = backbone.embeddings.weight.shape[1]  # type: ignore[index]
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, rows, int(width), generator=generator).to(backbone.device, backbone.dtype)


def _off(wanted: Tensor, ours: Tensor) -> str | None:
    loose = 1e-3 if wanted.dtype == torch.float32 else 0.03
    error = float((wanted.float() - ours.float()).norm() / wanted.float().norm().clamp(min=1e-6))
    return None if error < loose else f"the kernels give something else (relative error {error:.1e})"


def _is_norm(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return isinstance(weight, Tensor) and weight.dim() == 1 and eps and getattr(module, "bias", None) is None


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.is_contiguous() and module.weight.dtype in DTYPES
