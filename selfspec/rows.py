"""Rows of one forward pass and the one attention rule.

Every forward of the package (prefill, plain decoding, draft, verify, overlapped draft-and-verify, a training step) is a
`RowLayout`: for each of N requests, C clean rows followed by D draft rows, R = C + D. Keys live on one slot axis: slots
`[0, start)` hold the request's prefix (its committed cache), slot `start + i` holds row i of this forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from selfspec import kernels


@dataclass(frozen=True)
class RowLayout:
    """Who stands where, and who may see whom, in one forward of N requests.

    Attributes:
        positions: [N, R] long, absolute position of each row (rotary, windows).
        start: [N] long, slot of row 0; also the number of prefix slots.
        n_clean: C; rows `[0, C)` are clean, rows `[C, R)` are draft.
        parents: [N, C] long, the clean row that a clean row follows, -1 for the prefix; a parent stands before its
            child. None means a chain.
        attach: [N, D] long, the clean row on whose path a draft row's group hangs, -1 for the prefix alone.
        group: [N, D] long, group of a draft row; -1 is padding.
        limit: [N, D] long, a draft row sees prefix positions below it. Decoding: the committed length. Training: the
            anchor's position.
        causal: draft rows see only the rows of their group up to themselves.
        key_positions: [N, S] long, position of each prefix slot; None when slot = position.
        segments: [N, R] long, packed document of each row; None when there is one.
        key_segments: [N, S] long, packed document of each prefix slot.
        paths: [N, C, C] bool, `ancestors(parents)` where it is known already.
        seen: [N, R, R] bool, `row_to_row` of the layout, likewise.
        straight: row i stands on position start + i, so that its position is its slot.
        group_size: rows of every group, where the draft rows are groups of one size in order.
    """

    positions: Tensor
    start: Tensor
    n_clean: int
    parents: Tensor | None = None
    attach: Tensor | None = None
    group: Tensor | None = None
    limit: Tensor | None = None
    causal: bool = False
    key_positions: Tensor | None = None
    segments: Tensor | None = None
    key_segments: Tensor | None = None
    paths: Tensor | None = None
    seen: Tensor | None = None
    straight: bool = False
    group_size: int | None = None

    @property
    def n_requests(self) -> int:
        return self.positions.shape[0]

    @property
    def n_rows(self) -> int:
        return self.positions.shape[1]

    @property
    def n_draft(self) -> int:
        return self.n_rows - self.n_clean

    def clean(self) -> RowLayout:
        """The same forward without its draft rows: what the layers below the entry layer see."""
        segments = None if self.segments is None else self.segments[:, : self.n_clean]
        positions = self.positions[:, : self.n_clean]
        return replace(self, positions=positions, attach=None, group=None, limit=None, segments=segments, seen=None)


def steps(n: int, device: torch.device) -> Tensor:
    """0, 1, ..., n - 1: of one tensor for all who ask, since filling it anew costs a launch. Never written to. [n]"""
    return _steps(max(n - 1, 0).bit_length(), device)[:n]


def filled(value: int, n: int, device: torch.device) -> Tensor:
    """n times the same number; see `steps`. [n] long"""
    return _filled(value, max(n - 1, 0).bit_length(), device)[:n]


# kept for good: a CUDA graph that has read one goes on reading where it stood


@cache
@torch.inference_mode(False)
def _steps(bits: int, device: torch.device) -> Tensor:
    return torch.arange(1 << bits, device=device)


@cache
@torch.inference_mode(False)
def _filled(value: int, bits: int, device: torch.device) -> Tensor:
    return torch.full((1 << bits,), value, device=device)


@cache
@torch.inference_mode(False)
def _one_group(n: int, causal: bool, device: torch.device) -> Tensor:
    """Which rows of a group see which. bool [n, n]"""
    full = torch.ones(n, n, dtype=torch.bool, device=device)
    return full.tril() if causal else full


def chain(start: Tensor, n: int, segments: Tensor | None = None) -> RowLayout:
    """n clean rows one after another: prefill, plain decoding (n = 1), the verification of a chain.

    Args:
        start: [N] long, committed lengths.
        n: rows per request.
        segments: [N, n] long, packed documents (training).
    """
    positions = start[:, None] + steps(n, start.device)  # [N, n]
    return RowLayout(positions, start, n, segments=segments, straight=True)


def tree(start: Tensor, parents: Tensor, paths: Tensor | None = None, levels: Tensor | None = None) -> RowLayout:
    """Clean rows of a token tree; a node's position is `start` plus its depth.

    Args:
        start: [N] long, committed lengths.
        parents: [N, C] long, -1 for a root.
        paths: [N, C, C] bool, `ancestors(parents)` where the tree's builder has it.
        levels: [N, C] long, `depths(parents)` likewise.
    """
    paths = ancestors(parents) if paths is None else paths
    levels = paths.sum(-1) - 1 if levels is None else levels
    return RowLayout(start[:, None] + levels, start, parents.shape[1], parents=parents, paths=paths)


def block(start: Tensor, n: int, causal: bool = False) -> RowLayout:
    """One group of n draft rows right after the prefix: a sequential draft.

    Args:
        start: [N] long, committed lengths; slot 0 of the group stands on this position.
        n: rows of the group.
        causal: the group is causal rather than bidirectional.
    """
    positions, limit = start[:, None] + steps(n, start.device), start[:, None].expand(-1, n)
    attach, group = (filled(x, n, start.device).expand(len(start), n) for x in (-1, 0))
    seen = _one_group(n, causal, start.device).expand(len(start), n, n)
    return RowLayout(
        positions, start, 0, attach=attach, group=group, limit=limit, causal=causal, seen=seen, straight=True
    )


def overlapped(clean: RowLayout, nodes: Tensor, n: int, causal: bool = False) -> RowLayout:
    """Hang one group of n draft rows on each of the given clean rows, one position after it.

    Args:
        clean: a layout without draft rows.
        nodes: [N, G] long, the clean row of each group; -1 pads.
        n: rows of a group.
        causal: groups are causal rather than bidirectional.
    """
    row = nodes.clamp(min=0)
    first = clean.positions.gather(1, row) + 1  # [N, G]
    positions = (first[:, :, None] + torch.arange(n, device=first.device)).flatten(1)  # [N, G * n]
    ids = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
    return replace(
        clean,
        positions=torch.cat([clean.positions, positions], 1),
        attach=nodes.repeat_interleave(n, 1),
        group=torch.where(nodes >= 0, ids, -1).repeat_interleave(n, 1),
        limit=clean.start[:, None].expand(-1, positions.shape[1]),
        causal=causal,
        straight=False,
    )


def depths(parents: Tensor) -> Tensor:
    """Depth of every tree node, 0 for a root. [N, C] -> [N, C]"""
    return ancestors(parents).sum(-1) - 1


def ancestors(parents: Tensor) -> Tensor:
    """`out[n, i, j]`: clean row j is i or an ancestor of i. [N, C] -> bool [N, C, C]"""
    n, c = parents.shape
    reach = torch.eye(c, dtype=torch.bool, device=parents.device).expand(n, c, c)
    step = reach | (parents[:, :, None] == torch.arange(c, device=parents.device))
    for _ in range(max(c - 1, 0).bit_length()):  # path doubling
        step = (step.float() @ step.float()) > 0
    return step


def paths(parents: Tensor, up: Tensor | None = None) -> Tensor:
    """`out[n, i, j]`: the row at depth j on the way from the root to row i, -1 below i.

    Args:
        parents: [N, C] long.
        up: bool [N, C, C], `ancestors(parents)` where it is known already.

    Returns:
        int32 [N, C, C]
    """
    up = ancestors(parents) if up is None else up
    if kernels.serve(up) and up.numel():
        from selfspec.kernels import paths as kernel

        return kernel.paths(up)
    return paths_by_torch(up)


def paths_by_torch(up: Tensor) -> Tensor:
    """The same by torch."""
    n, c, _ = up.shape
    depth = (up.sum(-1) - 1)[:, None].expand(n, c, c)  # of each ancestor
    rows = steps(c, up.device).int().expand(n, c, c)
    out = torch.full((n, c, c + 1), -1, dtype=torch.int32, device=up.device)
    return out.scatter_(2, torch.where(up, depth, c), torch.where(up, rows, -1))[..., :c].contiguous()


def attention_rule(layout: RowLayout, n_keys: int, window: int | None = None) -> Tensor:
    """The reference mask: `out[n, i, t]` is true where row i may read key slot t.

    Same request, and: allow(clean i, cache) = yes; allow(clean i, clean j) = j is i or an ancestor of i;
    allow(clean, draft) = never; allow(draft in g, cache) = position < limit; allow(draft in g, clean j) = j on the path
    to g's clean row; allow(draft in g, draft in h) = g is h, causal if the layout says so. Windows test positions.

    Args:
        layout: the forward.
        n_keys: K, length of the slot axis; slots past the last row are never visible.
        window: sliding window in positions, None for full attention.

    Returns:
        bool [N, R, K]
    """
    n, r, c = layout.n_requests, layout.n_rows, layout.n_clean
    device = layout.positions.device
    slot = torch.arange(n_keys, device=device).expand(n, n_keys)
    row = slot - layout.start[:, None]  # [N, K], below 0: a prefix slot
    prefix, inside = row < 0, (row >= 0) & (row < r)
    row = row.clamp(0, max(r - 1, 0))

    seen = row_to_row(layout)  # [N, R, R]
    allow = seen.gather(2, row[:, None].expand(n, r, n_keys)) & inside[:, None]
    key_pos = _on_slots(layout.key_positions, layout.positions, slot, row, prefix, fill=slot)
    allow[:, :c] |= prefix[:, None]
    if layout.limit is not None:
        allow[:, c:] |= prefix[:, None] & (key_pos[:, None] < layout.limit[:, :, None])
    if layout.segments is not None:
        key_seg = _on_slots(layout.key_segments, layout.segments, slot, row, prefix, fill=torch.full_like(slot, -1))
        allow &= layout.segments[:, :, None] == key_seg[:, None]
    if window is not None:
        allow &= layout.positions[:, :, None] - key_pos[:, None] < window
    return allow


def row_to_row(layout: RowLayout) -> Tensor:
    """Which rows of this forward see which others. bool [N, R, R]"""
    if layout.seen is not None:
        return layout.seen
    n, r, c = layout.n_requests, layout.n_rows, layout.n_clean
    device = layout.positions.device
    if layout.parents is None:
        paths = torch.ones(c, c, dtype=torch.bool, device=device).tril().expand(n, c, c)
    else:
        paths = ancestors(layout.parents) if layout.paths is None else layout.paths
    if r == c:
        return paths
    assert layout.attach is not None and layout.group is not None
    out = torch.zeros(n, r, r, dtype=torch.bool, device=device)
    out[:, :c, :c] = paths
    if c:
        at = layout.attach.clamp(min=0)[:, :, None].expand(-1, -1, c)
        out[:, c:, :c] = paths.gather(1, at) & (layout.attach >= 0)[:, :, None]
    same = (layout.group[:, :, None] == layout.group[:, None]) & (layout.group >= 0)[:, :, None]
    if layout.causal:
        same = same.tril()
    # a padding row sees itself, so that no softmax runs over nothing
    out[:, c:, c:] = same | torch.eye(r - c, dtype=torch.bool, device=device)
    return out


def _on_slots(
    prefix_values: Tensor | None, row_values: Tensor, slot: Tensor, row: Tensor, prefix: Tensor, fill: Tensor
) -> Tensor:
    """A per-row quantity laid out on the slot axis: the prefix's own values, then the rows'. [N, K]"""
    if prefix_values is not None:
        fill = prefix_values.gather(1, slot.clamp(max=prefix_values.shape[1] - 1))
    return torch.where(prefix, fill, row_values.gather(1, row))
