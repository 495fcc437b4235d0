"""FlexAttention: the attention rule as a function of indices, so that whole blocks of keys nobody sees cost nothing.

Meant for training, where thousands of draft rows read packed prefixes. Layouts of draft rows alone and plain chains get
a rule of a few integer comparisons; every other layout looks its dense mask up. What draft rows read of a prefix is a
constant of the loss (`PrefixCache` detaches it), so the backward pass leaves the prefix's keys and values out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from selfspec.rows import RowLayout, attention_rule

BLOCK = 128
SPAN = 1 << 20  # positions of one packed document; a key's code is `segment * SPAN + position`
NOBODY = -1  # code of a key that no row's range holds


def prepare(rule, window: int | None) -> BlockMask:
    """Build the block mask."""
    return rule.blocks(window)


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
    """Grouped-query attention through `torch.nn.attention.flex_attention`; arguments as in `attention.sdpa.sdpa`."""

    def capped(score, batch, head, row, slot):
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    run: Any = _compiled(flex_attention) if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
    kwargs = dict(
        score_mod=None if softcap is None else capped,
        block_mask=rule.blocks(window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=rule.kernel,
    )
    if sinks is None:
        return run(query, key, value, **kwargs)
    out, aux = run(query, key, value, return_aux=AuxRequest(lse=True), **kwargs)
    return out * torch.sigmoid(aux.lse - sinks[:, None]).to(out.dtype)[..., None]


def block_mask(layout: RowLayout, n_keys: int, window: int | None = None) -> BlockMask:
    """The rule of a forward as a `BlockMask`; its tensors have the same shapes in every forward of the same size.

    Args:
        layout: the forward.
        n_keys: K, length of the slot axis.
        window: sliding window in positions, or None.
    """
    kind, tensors = _tensors(layout, n_keys, window)
    allow = _KINDS[kind]
    count = _compiled(_visible_pairs) if layout.positions.is_cuda else _visible_pairs
    counts = count(kind, tensors, layout.n_rows, n_keys)  # [N, Rb, Kb]
    full = counts == BLOCK * BLOCK
    some = (counts > 0) & ~full

    def visible(batch, head, row, slot):
        return allow(tensors, batch, row, slot)

    # which rows read a block of keys is asked for the gradient of the keys alone; nobody does where there is none
    constant = (n_keys - layout.n_rows) // BLOCK if kind == "draft" else 0
    wanted = torch.arange(counts.shape[2], device=counts.device)[:, None] >= constant
    (n_some, i_some), (n_full, i_full) = (_ordered(x.transpose(1, 2) & wanted) for x in (some, full))
    mask = BlockMask.from_kv_blocks(
        *_ordered(some),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(layout.n_rows, n_keys),
        compute_q_blocks=False,
    )
    mask.q_num_blocks, mask.q_indices = n_some, i_some
    mask.full_q_num_blocks, mask.full_q_indices = n_full, i_full
    return mask


def _tensors(layout: RowLayout, n_keys: int, window: int | None) -> tuple[str, tuple[Tensor, ...]]:
    """What the rule of a layout looks up, as [N, ...] tensors, and the kind of rule that reads them."""
    c, d = layout.n_clean, layout.n_draft
    if window is not None or (d and (c or layout.causal)) or layout.parents is not None:
        return "dense", (attention_rule(layout, n_keys, window),)
    device, n = layout.positions.device, layout.n_requests
    slot = torch.arange(n_keys, device=device).expand(n, n_keys)
    row = slot - layout.start[:, None]  # [N, K], below 0: a prefix slot
    prefix, at = row < 0, row.clamp(0, layout.n_rows - 1)

    def on_slots(values: Tensor | None, rows: Tensor, fill: Tensor) -> Tensor:
        fill = fill if values is None else values.gather(1, slot.clamp(max=values.shape[1] - 1))
        return torch.where(prefix, fill, rows.gather(1, at))

    zeros = torch.zeros_like(layout.positions)
    segments = zeros if layout.segments is None else layout.segments
    nowhere = torch.full_like(slot, 0 if layout.segments is None else -1)
    key_segments = on_slots(layout.key_segments, segments, nowhere)
    if d == 0:
        last = layout.start[:, None] + torch.arange(c, device=device)  # [N, R], the last slot that a row sees
        return "chain", tuple(t.int() for t in (segments, last, key_segments))
    assert layout.group is not None and layout.limit is not None
    # a draft key's code names its group (below -1), a prefix key's its document and position; padding is its own group
    alone = layout.n_rows + torch.arange(layout.n_rows, device=device)
    group = torch.where(layout.group < 0, alone, layout.group)
    own = -2 - group * 1024 - segments % 1024
    key_positions = on_slots(layout.key_positions, zeros, slot)
    code = torch.where(key_segments < 0, NOBODY, key_segments * SPAN + key_positions)
    code = torch.where(prefix, code, own.gather(1, at))
    code = torch.where(row >= layout.n_rows, NOBODY, code)
    first = segments * SPAN
    return "draft", tuple(t.int() for t in (own, first, first + layout.limit, code))


def _chain(t: tuple[Tensor, ...], batch: Tensor, row: Tensor, slot: Tensor) -> Tensor:
    segments, last, key_segments = t
    return (slot <= last[batch, row]) & (segments[batch, row] == key_segments[batch, slot])


def _draft(t: tuple[Tensor, ...], batch: Tensor, row: Tensor, slot: Tensor) -> Tensor:
    own, first, limit, codes = t
    code = codes[batch, slot]
    return (code == own[batch, row]) | ((code >= first[batch, row]) & (code < limit[batch, row]))


def _dense(t: tuple[Tensor, ...], batch: Tensor, row: Tensor, slot: Tensor) -> Tensor:
    return t[0][batch, row, slot]


_KINDS: dict[str, Callable[[tuple[Tensor, ...], Tensor, Tensor, Tensor], Tensor]] = {
    "chain": _chain,
    "draft": _draft,
    "dense": _dense,
}


def _visible_pairs(kind: str, tensors: tuple[Tensor, ...], n_rows: int, n_keys: int) -> Tensor:
    """How many pairs of each block of rows and keys are visible. [N, Rb, Kb]"""
    if kind == "dense":
        allow = tensors[0]
    elif kind == "chain":
        segments, last, key_segments = (t[:, :, None] for t in tensors)
        slot = torch.arange(n_keys, device=last.device)
        allow = (slot <= last) & (segments == key_segments.transpose(1, 2))
    else:
        own, first, limit, code = (t[:, :, None] for t in tensors)
        code = code.transpose(1, 2)
        allow = (code == own) | ((code >= first) & (code < limit))
    allow = pad(allow, (0, -n_keys % BLOCK, 0, -n_rows % BLOCK))
    n, r, k = allow.shape
    return allow.view(n, r // BLOCK, BLOCK, k // BLOCK, BLOCK).sum((2, 4), dtype=torch.int32)


@functools.cache
def _compiled(fn: Callable) -> Callable:
    return torch.compile(fn, dynamic=False)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of the set blocks of every row of blocks. bool [N, Rb, Kb] -> [N, 1, Rb], [N, 1, Rb, Kb]"""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()
