"""Attention backends behind one signature, and the function that transformers' layers call.

A backend is a module in this folder with two functions. `attention(query [N, H, R, D], key [N, Hkv, K, D], value [N,
Hkv, K, Dv], rule, window, scale, softcap, sinks)` returns [N, H, R, Dv], where `rule` is the forward's `AttentionRule`.
`prepare(rule, window)` builds on the rule what `attention` will read from it, and returns it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from selfspec.rows import RowLayout, attention_rule, paths, row_to_row

BACKENDS = ("sdpa", "flex", "triton", "flash", "grouped")  # each a module here, imported when it is first asked for
NAME = "selfspec"  # this package's entry in transformers' AttentionInterface


@cache
def backend(name: str) -> ModuleType:
    """A backend by name.

    Raises:
        ValueError: there is none of that name, or its library is not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: expected one of {', '.join(BACKENDS)}")
    try:
        return import_module(f"selfspec.attention.{name}")
    except ImportError as error:
        raise ValueError(f"attention backend {name!r} cannot be loaded here ({error})") from error


@dataclass(frozen=True)
class Compact:
    """The rule of a decoding layout without a mask over the prefix. A clean row reads its own path.

    Attributes:
        start: [N] long
        positions: [N, R] long
        limit: [N, D] long, the prefix slots below it are visible to a draft row; None without draft rows.
        seen: uint8 [N, R, R], which rows see which; None without draft rows.
        path: int32 [N, C, C], the row at each depth of a row's path, -1 past its end; None for a chain.
    """

    start: Tensor
    positions: Tensor
    limit: Tensor | None
    seen: Tensor | None
    path: Tensor | None


def best(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest backend for decoding; the reference takes what kernels do not (float64, the CPU).

    flash-attn is not among them: its kernels are compiled in every process, so it has to be asked for.
    """
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return "triton" if device.type == "cuda" and known and find_spec("triton") else "sdpa"


def decoding(name: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The backend to decode with: the one of that name, or the best.

    Raises:
        ValueError: it is for training alone.
    """
    if name == "grouped":
        raise ValueError("attention='grouped' is for training's draft groups; decoding takes sdpa, triton or flash")
    return name or best(device, dtype)


def by_triton(name: str) -> bool:
    """Whether a backend of that name leaves a decoding round to the Triton kernel."""
    return name in ("triton", "flash")


def stands_in(name: str, layout: RowLayout, n_keys: int) -> ModuleType:
    """The backend of that name, or the one that runs a layout in its place: flash-attn takes long plain chains alone,
    grouped attention a training step's draft groups.

    Args:
        name: of the backend.
        layout: the forward.
        n_keys: K, length of the slot axis.
    """
    chosen = backend(name)
    if name not in ("flash", "grouped") or chosen.serves(layout, n_keys):
        return chosen
    if layout.positions.device.type != "cuda":
        return backend("sdpa")
    packed = name == "grouped" or layout.segments is not None or layout.key_positions is not None
    return backend("flex" if packed else "triton")


class AttentionRule:
    """The attention rule of one forward, handed to the layers in place of a mask tensor.

    Args:
        layout: the forward.
        n_keys: K, length of the slot axis that attention reads.
        name: of the backend.
        asked: collects the windows that layers ask for, in their order, where that is not known yet.

    Attributes:
        backend: module that runs this layout.
        window: stands in for the window that a layer asks for, where its model says so in the mask alone.
        base: [N] long, each request's slot, where keys and values are those of all slots (`by_triton` only).
        kernel: options of FlexAttention's kernels, or None.
    """

    kernel: dict[str, Any] | None = None

    def __init__(self, layout: RowLayout, n_keys: int, name: str = "sdpa", asked: list[int | None] | None = None):
        self.layout, self.n_keys, self.asked = layout, n_keys, asked
        self.backend = stands_in(name, layout, n_keys)
        self.window: int | None = None
        self.base: Tensor | None = None
        self._masks: dict[int | None, Tensor] = {}
        self._blocks: dict[int | None, Any] = {}
        self._compact: Compact | None = None
        self._lengths: Any = None

    def prepare(self, windows: Iterable[int | None]) -> AttentionRule:
        """Build all that the layers will read, before they run: compiled layers then find it there."""
        for window in windows:
            self.backend.prepare(self, window)
        return self

    def within(self, window: int) -> AttentionRule:
        """The same rule for layers that have a window and do not ask for it."""
        rule = copy.copy(self)
        rule.window = window
        return rule

    def run(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, *how) -> Tensor:
        """Attention of the forward's rows by the chosen backend. Returns [N, H, R, Dv]."""
        if self.asked is not None:
            self.asked.append(window)
        window = self.window or window
        return self.backend.attention(query, key, value, self, window, *how)

    def mask(self, window: int | None) -> Tensor:
        """The dense mask, built once per window. bool [N, R, K]"""
        if window not in self._masks:
            self._masks[window] = attention_rule(self.layout, self.n_keys, window)
        return self._masks[window]

    def blocks(self, window: int | None):
        """The rule as FlexAttention's `BlockMask`, built once per window."""
        if window not in self._blocks:
            self._blocks[window] = backend("flex").block_mask(self.layout, self.n_keys, window)
        return self._blocks[window]

    def ranges(self):
        """What the rule's groups see of the prefix (`grouped.Ranges`), built once."""
        if self._lengths is None:
            self._lengths = backend("grouped").ranges(self.layout)
        return self._lengths

    def lengths(self):
        """How far the rule's chains reach (`flash.Lengths`), built once."""
        if self._lengths is None:
            self._lengths = backend("flash").lengths(self.layout)
        return self._lengths

    def compact(self) -> Compact:
        """The rule of a decoding layout without a mask over the prefix, built once."""
        layout = self.layout
        if layout.segments is not None or layout.key_positions is not None:
            raise ValueError("packed layouts have no compact rule: use the sdpa or the flex backend")
        if self._compact is None:
            seen = row_to_row(layout).to(torch.uint8) if layout.n_draft else None
            path = paths(layout.parents, layout.paths) if layout.parents is not None and layout.n_clean else None
            self._compact = Compact(layout.start, layout.positions, layout.limit, seen, path)
        return self._compact


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionRule,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface over an `AttentionRule`. Returns ([N, R, H, Dv], None)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_mask.run(query, key, value, sliding_window, scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
