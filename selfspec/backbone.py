"""Runs any Hugging Face decoder's own layers over a `RowLayout`: clean rows at all layers, draft rows from layer e."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec import attention
from selfspec.attention import AttentionRule
from selfspec.cache import KVCache, PrefixCache
from selfspec.graphs import capturable
from selfspec.packed import pack, packable
from selfspec.routed import Route, RoutedLinear
from selfspec.rows import RowLayout, chain
from selfspec.shadow import (
    UnsupportedModel,
    embedding_scale,
    final_norm,
    head_of,
    inner_decoder,
    layers_of,
    max_positions_of,
    own_logits,
    reader_of,
    rotary,
    shadow,
    windows_of,
)
from selfspec.turns import Turn

MASK = -1  # a draft row's token when its input is the mask: no vocabulary id, so it can never be emitted


@dataclass(frozen=True)
class DraftRows:
    """What the draft rows of a forward are.

    Attributes:
        tokens: [N, D] long, `MASK` or a known token.
        slots: [N, D] long, index of each row in its group.
        features: [N, D or 1, F] hidden states of the last clean position that the group may use, or None.
        after: [N, D] long, the clean row of this forward whose features each row uses instead; for taps up to the
            entry layer, as later ones come too late.
    """

    tokens: Tensor
    slots: Tensor
    features: Tensor | None = None
    after: Tensor | None = None


class MaskPath(Protocol):
    """The trained part: how draft rows enter and what they change in the layers that they run through."""

    @property
    def entry(self) -> int:
        """First layer that draft rows run through."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states wanted as features, as indices into transformers' `hidden_states`."""

    def embed(self, rows: DraftRows, backbone: Backbone) -> Tensor:
        """Input of the draft rows at the entry layer; `backbone` embeds their tokens. Returns [N, D, d]."""

    def delta(self, layer: int, name: str) -> nn.Module | None:
        """The module that replaces a Linear for draft rows, called as `delta(x, base)`; None where nothing changes."""


@dataclass(frozen=True)
class Hidden:
    """Hidden states after the final norm.

    Attributes:
        clean: [N, C, d]
        draft: [N, D, d]
        taps: [N, C, F] the mask path's features of every clean row, or None when it wants none.
    """

    clean: Tensor
    draft: Tensor
    taps: Tensor | None = None


class Backbone(nn.Module):
    """A shadow of the model's decoder: the same parameters, our attention, row-routed linears.

    Args:
        model: any decoder-only causal LM of transformers; nothing on it is changed.
        path: the mask path of the draft rows; without one only clean rows run.
        backend: attention backend, a name in `selfspec.attention.BACKENDS`.
        verify: compare the walk with the model's own forward once (a few tokens), and raise where it differs.

    Raises:
        UnsupportedModel: the model's layers cannot be run this way; the message says why.
        ValueError: there is no such attention backend here.
    """

    def __init__(
        self, model: PreTrainedModel, path: MaskPath | None = None, backend: str = "sdpa", verify: bool = True
    ):
        super().__init__()
        attention.backend(backend)  # what is missing is no fault of the model
        inner = inner_decoder(model)
        self.config: PreTrainedConfig = copy.deepcopy(inner.config)  # type: ignore[assignment]
        self.config._attn_implementation = attention.NAME
        self.route = Route()
        self.path = path
        self.backend = backend
        self.embeddings = model.get_input_embeddings()
        self.scale = embedding_scale(model, inner)
        originals = layers_of(inner)
        self.n_layers = len(originals)
        self.layers = nn.ModuleList(
            # each layer gets its own part of the cache, so none needs its index, and all can share compiled code
            self._routed(shadow(layer, config=self.config, layer_idx=0), i)
            for i, layer in enumerate(originals)
        )
        norm, rope = final_norm(inner), rotary(inner)
        assert norm is not None and rope is not None
        self.norm = norm
        self.rotary = copy.deepcopy(rope)  # its own: dynamic kinds keep state
        self.rotary_by_type = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.head = head_of(model, inner)
        takes = inspect.signature(originals[0].forward).parameters
        # renamed in transformers 5.2x; "layer_past" where a family was not renamed before
        self.cache_name = next((n for n in ("cache", "past_key_values", "layer_past") if n in takes), "cache")
        self.max_positions = max_positions_of(self.config)
        self.layer_types = getattr(self.config, "layer_types", None) or ["full_attention"] * self.n_layers
        self.windows: list[int | None] = []  # of every layer
        self.masked: list[int | None] = [None] * self.n_layers  # windows that only the model's own mask would tell
        self.asked: list[int | None] | None = []  # what the layers ask attention for, while the probe runs
        self.turn = Turn()
        self.kv_shapes: list[tuple[int, int, int]] = []  # (Hkv, D, Dv) of every layer
        self._probe(model if verify else None)
        like = torch.empty(self.config.hidden_size, dtype=self.dtype, device=self.device)
        # behind `readout`; in a tuple it is no part of this module
        self.reader = reader_of(model.get_output_embeddings(), self.logits, like)

    @property
    def device(self) -> torch.device:
        return self.embeddings.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.weight.dtype  # type: ignore[return-value]

    @property
    def n_features(self) -> int:
        """Width of the mask path's features."""
        return 0 if self.path is None else len(self.path.taps) * self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embeddings.weight.shape[0]  # type: ignore[index,return-value]

    def forward(
        self,
        layout: RowLayout,
        cache: KVCache | PrefixCache,
        tokens: Tensor | None = None,
        draft: DraftRows | None = None,
        first: int | Tensor = 0,
        n_keys: int | None = None,
    ) -> Hidden:
        """One forward of the rows of a layout. Threads take turns.

        Args:
            layout: N requests, C clean rows, D draft rows.
            cache: where keys and values live; bound to the layout here.
            tokens: [N, C] long, the clean rows' tokens.
            draft: the draft rows' inputs; required when D > 0, and then the backbone needs a mask path.
            first: cache slot of the layout's first request; see `KVCache.bind`.
            n_keys: K, when it is fixed by the caller instead of the lengths of the requests (see `KVCache.bind`).

        Returns:
            Hidden states of clean and draft rows.
        """
        with self.turn:  # the route is one for all layers
            return self._forward(layout, cache, tokens, draft, first, n_keys)

    def _forward(
        self,
        layout: RowLayout,
        cache: KVCache | PrefixCache,
        tokens: Tensor | None,
        draft: DraftRows | None,
        first: int | Tensor,
        n_keys: int | None,
    ) -> Hidden:
        c, n_keys = layout.n_clean, cache.bind(layout, first, n_keys)
        entry = self.n_layers if self.path is None else self.path.entry
        rule = lower = self._rule(layout, n_keys)
        if 0 < c < layout.n_rows and entry:
            lower = self._rule(layout.clean(), n_keys)
        rule.base = lower.base = cache.place.base
        x = self.embed(tokens) if c and tokens is not None else None  # [N, C, d]
        taps = [] if x is None or self.path is None else list(self.path.taps)
        states: dict[int, Tensor] = {} if x is None or 0 not in taps else {0: x}
        self.route.n_clean = c
        rope = self._rope(layout.positions, getattr(cache, "rope", None))
        for i, layer in enumerate(self.layers):
            if i == entry and draft is not None:
                assert self.path is not None
                if draft.after is not None:
                    found = torch.cat([states[t] for t in taps], -1)  # [N, C, F]
                    after = draft.after[:, :, None].expand(-1, -1, found.shape[2])
                    draft = replace(draft, features=found.gather(1, after))
                rows = self.path.embed(draft, self)  # [N, D, d]
                x = rows if x is None else torch.cat([x, rows], 1)
            if x is None:
                continue  # a sequential draft skips the layers below its entry
            below = i < entry and draft is not None
            cos_sin = rope[self.layer_types[i] if self.rotary_by_type else ""]
            if below:
                cos_sin = cos_sin[0][:, :c], cos_sin[1][:, :c]
            mask = lower if below else rule
            window = self.masked[i]
            x = layer(
                x,
                attention_mask=mask if window is None else mask.within(window),
                position_ids=layout.positions[:, :c] if below else layout.positions,
                position_embeddings=cos_sin,
                use_cache=True,
                **{self.cache_name: cache.layers[i]},
            )
            x = x[0] if isinstance(x, tuple) else x
            if i + 1 in taps and i + 1 < self.n_layers:
                states[i + 1] = x[:, :c]
        assert x is not None
        x = self.norm(x)
        if self.n_layers in taps:
            states[self.n_layers] = x[:, :c]
        return Hidden(x[:, :c], x[:, c:], torch.cat([states[t] for t in taps], -1) if taps else None)

    def hasten(self, exact: bool = False, packed: dict[int, nn.Module] | None = None) -> str:
        """Decode with the fastest kernels there are here; training must not follow. See `fuse` and `pack`.

        Returns:
            Which kernels run, and why not the others.
        """
        from selfspec.merged import merge

        merge(self)
        said = self.fuse(exact) if exact or attention.by_triton(self.backend) else "torch's own kernels"
        self.pack(packed)
        return said

    def compile(self, **options) -> None:
        """Let torch.compile fuse each layer; alike layers share one compiled function per shape of the forward.
        Rounding differs from the uncompiled layers' in the last bits. Does not touch the user's model.

        Args:
            options: of `torch.compile`.
        """
        for i, layer in enumerate(self.layers):
            compiled: Any = torch.compile(layer, dynamic=False, **options)
            self.layers[i] = compiled

    def fuse(self, exact: bool = False) -> str:
        """Run layers, final norm and head by our own kernels, where they give the same; for decoding alone.

        Args:
            exact: a row's bits may depend on nothing but its own text, whatever runs beside it.

        Returns:
            What was fused, and why the rest was not.

        Raises:
            UnsupportedModel: exact, and this model, device or attention backend cannot be; the message says why.
        """
        try:
            from selfspec.fusable import fuse  # needs triton, which a CPU does without
        except ImportError as error:
            if exact:
                raise UnsupportedModel(f"exact mode needs triton, which cannot be loaded: {error}") from error
            return f"fused nothing: {error}"
        return fuse(self, exact)

    def pack(self, done: dict[int, nn.Module] | None = None) -> None:
        """Lay weights out for fast decoding, where that helps (bfloat16 on a CPU). Training must not follow.

        The user's model keeps its own weights; changes to them are not seen any more.

        Args:
            done: what other backbones of the model have packed already, and these share; it grows.
        """
        done = {} if done is None else done
        size = sum(p.numel() * p.element_size() for p in {*self.layers.parameters(), *self.head.parameters()})
        if packable(self.device, self.dtype, size):
            pack(self.layers, done)
            pack(self.head, done)

    def new_cache(self, slots: int, capacity: int, tail: int) -> KVCache:
        """An empty cache for this model: `slots` requests of `capacity` positions, `tail` rows a forward."""
        cache = KVCache(self.kv_shapes, slots, capacity, tail, self.dtype, self.device)
        cache.rope = self._table(capacity + tail)
        return cache

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings as the model's first layer gets them. [N, T] -> [N, T, d]"""
        if self.table is not None and not torch.is_grad_enabled():
            return self.table[tokens]  # the same rows by a kernel that is several times faster for a few of them
        x = self.embeddings(tokens)
        return x if self.scale is None else x * self.scale

    @property
    def table(self) -> Tensor | None:
        """The token embeddings [V, d], where the first layer gets them as they are; None elsewhere."""
        module: Any = self.embeddings
        plain = type(module) is nn.Embedding and module.max_norm is None and self.scale is None
        return module.weight if plain else None

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own head, soft-caps and scales included. [..., d] -> [..., V]"""
        return self.head(inputs_embeds=hidden, use_cache=False).logits

    @property
    def readout(self) -> Tensor | None:
        """The head's weight [V, d], where logits are states times it and nothing more: no bias, cap or scale."""
        return self.reader[0].weight if self.reader else None

    def part(self, name: str) -> Any:
        """What the mask path makes of this backbone by a name ("calibrate", "condition"); None without such a head."""
        make = getattr(self.path, name, None)
        return None if make is None else make(self)

    def _rule(self, layout: RowLayout, n_keys: int) -> AttentionRule:
        """The attention rule of some rows, with all that the layers will read from it."""
        return AttentionRule(layout, n_keys, self.backend, self.asked).prepare(set(self.windows))

    @torch.no_grad()
    def _table(self, n: int) -> dict[str, Tensor] | None:
        """Rotary factors of positions 0..n-1 to look up, cos and sin side by side; None if they depend on lengths."""
        if not capturable(self.config):
            return None
        every = self._rope(torch.arange(n, device=self.device)[None])
        return {kind: torch.stack(pair, 2)[0] for kind, pair in every.items()}  # each [n, 2, D]

    def _rope(self, positions: Tensor, table: dict[str, Tensor] | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary factors of all rows, by layer type where the model tells them apart. Each ([N, R, D], [N, R, D])"""
        if table is not None:
            found = {kind: values[positions] for kind, values in table.items()}  # [N, R, 2, D]
            return {kind: (both[:, :, 0], both[:, :, 1]) for kind, both in found.items()}
        probe = torch.empty(0, device=positions.device, dtype=self.dtype)  # the module reads only dtype and device
        if self.max_positions is not None:  # rows past the end are never emitted, and must not rescale a dynamic rotary
            positions = positions.clamp(max=self.max_positions - 1)
        if not self.rotary_by_type:
            return {"": self.rotary(probe, positions)}
        return {kind: self.rotary(probe, positions, kind) for kind in set(self.layer_types)}

    def _routed(self, layer: nn.Module, index: int) -> nn.Module:
        """Wrap the Linears that the mask path changes in a shadow layer."""
        if self.path is None or index < self.path.entry:
            return layer
        for name, module in list(layer.named_modules()):
            delta = self.path.delta(index, name)
            if delta is not None:
                parent, _, leaf = name.rpartition(".")
                layer.get_submodule(parent)._modules[leaf] = RoutedLinear(module, delta, self.route)
        return layer

    @torch.no_grad()
    def _probe(self, model: PreTrainedModel | None) -> None:
        """Run a few tokens: they show windows, shapes of keys and values, and have to give the model's own logits."""
        wanted, name = windows_of(self.config, self.n_layers), self.config.model_type
        shortest = min((w for w in wanted if w), default=0)
        n = shortest + 4 if 0 < shortest <= 64 else 8  # past a short window; nobody waits for a long one
        ids = torch.arange(n, device=self.device)[None] % self.vocab_size
        layout = chain(torch.zeros(1, dtype=torch.long, device=self.device), n)
        try:
            self(layout, PrefixCache(self.n_layers), ids)
            asked, self.asked = self.asked or [], None
            asked += [None] * (self.n_layers - len(asked))
            self.masked = [want if ask is None else None for want, ask in zip(wanted, asked)]
            self.windows = [ask or want for want, ask in zip(wanted, asked)]
            cache = PrefixCache(self.n_layers)
            ours = self.logits(self(layout, cache, ids).clean)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError) as cause:
            raise UnsupportedModel(f"{name}: its layers cannot be called one by one ({cause})") from cause
        for layer in cache.layers:
            if layer.keys is None or layer.values is None:
                raise UnsupportedModel(f"{name}: a layer does not use the cache that it is given")
            self.kv_shapes.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        if model is None:
            return
        own = own_logits(model, ids)
        loose = 0.1 if self.dtype in (torch.bfloat16, torch.float16) else 1e-3
        error = (own - ours).float().norm() / own.float().norm().clamp(min=1e-6)
        if not error < loose:
            raise UnsupportedModel(
                f"{name}: running its layers one by one gives other logits than its own forward "
                f"(relative error {error:.1e}); the model does something between its layers that selfspec does not know"
            )
