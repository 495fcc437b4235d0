"""Shallow copies of a model's modules that share every parameter, so that nothing changes on the user's model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

INNER_NAMES = ("model", "transformer", "gpt_neox", "decoder", "language_model")
LAYER_NAMES = ("layers", "h", "blocks")
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(ValueError):
    """The model cannot be run row by row over a rewindable cache; the message says why."""


def shadow(module: nn.Module, **attributes) -> nn.Module:
    """A copy of a module tree: new module objects, the same parameters and buffers.

    Args:
        module: left untouched.
        attributes: set on every copied module that already has an attribute of that name (`config=...`).
    """
    new = copy.copy(module)
    for slot in ("_parameters", "_buffers", "_modules"):
        object.__setattr__(new, slot, dict(getattr(module, slot)))
    for name, value in attributes.items():
        if name in new.__dict__:
            new.__dict__[name] = value
    new.training = False
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else shadow(child, **attributes)
    return new


def inner_decoder(model: PreTrainedModel) -> nn.Module:
    """The module that holds the decoder layers, or an `UnsupportedModel` error before any work is done."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModel("the model is wrapped by torch.compile; pass the model itself (model._orig_mod)")
    if hasattr(model, "peft_config"):
        raise UnsupportedModel(f"{name} carries PEFT adapters; merge_and_unload() them, or load the base model")
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; selfspec runs decoder-only causal language models")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if odd:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(odd)}: their state cannot be rewound to the accepted tokens "
            "(recurrent or hybrid models and chunked attention are not supported)"
        )
    if any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise UnsupportedModel(
            f"{name} is dispatched with accelerate hooks (device_map); load it on one device instead"
        )
    inner = next((m for n in INNER_NAMES if isinstance(m := getattr(model, n, None), nn.Module)), None)
    if inner is None or decoder_layers(inner) is None or rotary(inner) is None or final_norm(inner) is None:
        raise UnsupportedModel(
            f"{name} has no stack of decoder layers with rotary positions and a final norm under "
            f"{'/'.join(INNER_NAMES)}; recurrent models (Mamba, RWKV) and learned or ALiBi positions are not supported"
        )
    if not all("attention_mask" in inspect.signature(m.forward).parameters for m in layers_of(inner)):
        raise UnsupportedModel(f"{name}'s layers take no attention mask; selfspec needs attention layers")
    return inner


def decoder_layers(inner: nn.Module) -> nn.ModuleList | None:
    """The stack of decoder layers."""
    return next((m for n in LAYER_NAMES if isinstance(m := getattr(inner, n, None), nn.ModuleList)), None)


def layers_of(inner: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers of a decoder that was checked to have one."""
    layers = decoder_layers(inner)
    assert layers is not None
    return layers


def table_of(model: PreTrainedModel) -> Tensor:
    """The token embeddings' weight. [V, d]"""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def final_norm(inner: nn.Module) -> nn.Module | None:
    """The norm after the last layer."""
    return next((m for n in NORM_NAMES if isinstance(m := getattr(inner, n, None), nn.Module)), None)


def rotary(inner: nn.Module) -> nn.Module | None:
    """The module that turns positions into rotary factors."""
    return getattr(inner, "rotary_emb", None)


def head_of(model: PreTrainedModel, inner: nn.Module) -> nn.Module:
    """The causal-LM wrapper around a pass-through: `head(inputs_embeds=hidden).logits` applies the model's own head.

    This keeps what a family does to its logits (soft-cap, scale) without naming any family.
    """
    head = copy.copy(model)
    object.__setattr__(head, "_modules", dict(model._modules))
    head.training = False
    (name,) = [n for n, m in model._modules.items() if m is inner]
    head._modules[name] = _PassThrough()
    return head


@torch.no_grad()
def reader_of(linear: nn.Module | None, logits: Callable[[Tensor], Tensor], like: Tensor) -> tuple[nn.Linear, ...]:
    """The Linear whose product with hidden states is all that a head does, if it is.

    Tried on states so strong that a cap shows, and on nothing, which shows a bias.

    Args:
        linear: the model's output embeddings.
        logits: what the head makes of states, [1, 2, d] -> [1, 2, V].
        like: [d], dtype and device of hidden states.
    """
    weight = getattr(linear, "weight", None)
    if type(linear) is not nn.Linear or linear.bias is not None or type(weight) is not nn.Parameter:
        return ()
    if weight.dtype != like.dtype or weight.shape[1] != len(like) or not weight.is_contiguous():
        return ()
    strong = 1000 * torch.arange(len(like), device=like.device, dtype=torch.float32).cos()
    states = torch.stack([torch.zeros_like(like), strong.to(like.dtype)])[None]
    found = logits(states)
    if found.shape[-1] != len(weight) or found[0, 0].any():
        return ()
    want = nn.functional.linear(states, weight).float()
    error = (found.float() - want).norm()
    return (linear,) if error <= torch.finfo(like.dtype).eps * want.norm() else ()


class _PassThrough(nn.Module):
    """Hands its embeddings back as the last hidden state."""

    def forward(self, *args, inputs_embeds: Tensor, **kwargs) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _Output(SimpleNamespace):
    """A model output of which only one field exists; the others read as None."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def embedding_scale(model: PreTrainedModel, inner: nn.Module) -> float | Tensor | None:
    """What the model's own forward multiplies its token embeddings by (Granite, older Gemma), found by measuring.

    Raises:
        UnsupportedModel: when the first layer's input is not a multiple of the token embedding.
    """
    stem = shadow(inner)
    layers = next(n for n in LAYER_NAMES if n in inner._modules)
    norm = next(n for n in NORM_NAMES if n in inner._modules)
    stem._modules[layers], stem._modules[norm] = nn.ModuleList(), nn.Identity()
    embed, table = model.get_input_embeddings(), table_of(model)
    ids = torch.arange(min(8, len(table)), device=table.device)[None]
    with torch.no_grad():
        got, plain = stem(input_ids=ids, use_cache=False).last_hidden_state, embed(ids)
    if torch.equal(got, plain):
        return None
    config = model.config.get_text_config(decoder=True)
    numbers = [v for v in vars(config).values() if isinstance(v, float)]
    numbers += [config.hidden_size**0.5, config.hidden_size**-0.5]
    for number in numbers:
        for scale in (number, torch.tensor(number, dtype=plain.dtype, device=plain.device)):
            if torch.equal(plain * scale, got):
                return scale
    raise UnsupportedModel(
        f"{type(model).__name__} changes its token embeddings before the first layer in a way that is not a scale "
        "(learned positions, an embedding norm); such models are not supported"
    )


def windows_of(config, n_layers: int) -> list[int | None]:
    """The sliding window of every layer, as transformers' own masks have it."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window if getattr(config, "use_sliding_window", True) else None] * n_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def max_positions_of(config) -> int | None:
    """Positions up to the model's context, or to the length at which a long-context rotary embedding would rescale."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes, *(v for v in ropes.values() if isinstance(v, dict))]
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += [r.get("original_max_position_embeddings") for r in kinds if r.get("rope_type") == "longrope"]
    return min((x for x in limits if x), default=None)


def own_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's own logits without dropout, whatever mode the user left it in."""
    modes: Sequence[tuple[nn.Module, bool]] = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        return model(input_ids=ids, use_cache=False).logits
    finally:
        for module, mode in modes:
            module.training = mode
