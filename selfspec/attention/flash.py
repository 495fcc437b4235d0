"""flash-attn 4: long causal chains, which is prefill and the clean pass of a training step.

It takes plain chains alone, so `selfspec.attention.stands_in` hands every other layout (trees, draft groups, short
verifications) to the backend that would run without it. Its kernels are compiled at first use, some seconds for each
kind of call, and add in an order that depends on what else runs: exact mode never uses them.

A request's rows stand at the end of the keys that it may read, so causality is counted from the end ("bottom-right"):
row i of R reads the first `start + i + 1` slots of `start + R`. Packed documents are told apart by cumulative lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.rows import RowLayout

try:
    from flash_attn.cute import flash_attn_varlen_func
except Exception as error:  # a beta on top of betas: versions that do not fit one another fail in any way
    raise ImportError(f"{error}: pip install 'selfspec[flash]' brings what it needs") from error

LEAST = 64  # rows of a request; fewer are for kernels that split the keys
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 256  # head size
DOCUMENTS = 64  # packed documents are counted up to a power of two, from this on: few shapes for a compiler


class Lengths(NamedTuple):
    """How far each chain reaches.

    Attributes:
        used: int32 [N], slots that a request's last row reads; None for packed documents.
        ends: int32 [M + 1], where packed documents begin in N * R rows, then N * R to the end; None without packing.
    """

    used: Tensor | None
    ends: Tensor | None


def serves(layout: RowLayout, n_keys: int) -> bool:
    """Whether a forward's rows are chains that flash-attn takes; packed ones only without a prefix.

    Args:
        layout: the forward.
        n_keys: K, length of the slot axis.
    """
    if layout.n_draft or layout.n_rows < LEAST or layout.parents is not None:
        return False
    if layout.key_positions is not None or layout.key_segments is not None:
        return False
    return layout.straight if layout.segments is None else n_keys == layout.n_rows


def lengths(layout: RowLayout) -> Lengths:
    """Lengths of a layout's chains. Counting packed documents waits for the device, once a forward."""
    if layout.segments is None:
        return Lengths((layout.start + layout.n_rows).int(), None)
    segments = layout.segments
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    begins = first.flatten().nonzero()[:, 0]
    size = max(DOCUMENTS, 1 << (len(begins) - 1).bit_length())
    return Lengths(None, pad(begins, (0, size + 1 - len(begins)), value=segments.numel()).int())


def prepare(rule, window: int | None) -> Lengths:
    """Build the lengths; they serve all windows."""
    return rule.lengths()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The backend's signature (`selfspec.attention`), for the layouts of `serves`; it has no gradient.

    Args:
        query: [N, H, R, D] in bfloat16 or float16.
        key: [N, Hkv, K, D]; a view of the cache is read in place.
        value: [N, Hkv, K, Dv]
        rule: the forward's `AttentionRule`.
        window: sliding window in positions, or None.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [H] one extra logit per head in the denominator.

    Returns:
        [N, H, R, Dv], a view of [N, R, H, Dv]

    Raises:
        ValueError: flash-attn does not take tensors of this kind.
    """
    _check(query, key, value)
    n, _, r, _ = query.shape
    used, ends = rule.lengths()
    if rule.base is not None:  # keys of all slots, and only the device knows which: a copy, small beside the products
        key, value = key.index_select(0, rule.base), value.index_select(0, rule.base)
        used = None if used is None else used.clamp(max=key.shape[2])  # of those that only fill the batch
    rows = [x.transpose(1, 2) for x in (query, key, value)]  # each [N, R or K, heads, D]
    if ends is not None:
        rows = [x.flatten(0, 1) for x in rows]
    out = _flash(*rows, used, ends, r, scale, window or 0, softcap or 0.0, sinks)
    return out.view(n, r, *out.shape[-2:]).transpose(1, 2)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    wanted = " and ".join(str(d).removeprefix("torch.") for d in DTYPES)
    if query.device.type not in DEVICES or query.dtype not in DTYPES:
        here = f"{str(query.dtype).removeprefix('torch.')} on {query.device.type}"
        raise ValueError(f"flash-attn takes {wanted} on CUDA, not {here}: choose another attention backend")
    sizes = query.shape[3], value.shape[3]
    if any(d % 8 or d > WIDEST for d in sizes):
        raise ValueError(
            f"flash-attn takes head sizes that are multiples of 8 up to {WIDEST}, and this model's are {sizes}: "
            "choose another attention backend"
        )
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError("attention by flash-attn has no gradient here: it serves prefill and clean passes")


@torch.library.custom_op(
    "selfspec::flash",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? used, Tensor? ends, int rows, float scale, int window, "
    "float softcap, Tensor? sinks) -> Tensor",
)
def _flash(q, k, v, used, ends, rows, scale, window, softcap, sinks):
    """One opaque operator, which a compiler leaves alone. window: 0 for none, softcap likewise. Returns q's shape."""
    reach = {"seqused_k": used}
    if ends is not None:
        reach = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": rows, "max_seqlen_k": rows}
    out, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (None, None),
        learnable_sink=sinks,
        softcap=softcap,
        **reach,
    )
    return out


@_flash.register_fake
def _shape(q, k, v, used, ends, rows, scale, window, softcap, sinks):
    return q.new_empty(*q.shape[:-1], v.shape[-1])
