"""Key/value storage; each layer sees its own part of it behind transformers' `Cache` interface.

`KVCache` serves decoding: static slots per request, so that slot s of a request holds its position s, and a scratch
tail for the rows of the running forward. A row becomes permanent when its request's start moves past it, and only clean
rows ever do.
`PrefixCache` serves training: the clean rows' keys and values of one forward, which later draft rows read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from selfspec import kernels
from selfspec.rows import RowLayout, steps
from selfspec.transfer import onto


@dataclass
class _Place:
    """Where the running forward's rows go. Shared by a cache and its layers, so that neither has to know the other:
    a reference cycle would keep device memory until Python's collector happens to run."""

    requests: Tensor | None = None  # [n, 1]
    slot: Tensor | None = None  # [n, R]
    base: Tensor | None = None  # [n], each request's slot where only the device knows it
    first: int = 0
    n: int = 0
    n_keys: int = 0
    recording: bool = True


class _Layer(Cache):
    """One layer's part of a cache, handed to that layer; it knows no index, so that layers share compiled code."""

    def __init__(self, place: _Place, keys: Tensor | None = None, values: Tensor | None = None):
        super().__init__(layers=[])
        self.place, self.keys, self.values = place, keys, values


class SlotLayer(_Layer):
    """A layer of a `KVCache`: keys [slots, Hkv, S, D], values [slots, Hkv, S, Dv]."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write this forward's rows into the tail and hand back views of prefix plus tail.

        Args:
            key_states: [n, Hkv, R, D]
            value_states: [n, Hkv, R, Dv]
            args: what else transformers' interface passes (the layer's index), not needed here.
            kwargs: likewise.
        """
        place = self.place
        assert place.slot is not None
        slot = place.slot[:, : key_states.shape[2]]  # layers below the entry have no draft rows
        out = []
        for full, new in ((self.keys, key_states), (self.values, value_states)):
            assert full is not None
            full.transpose(1, 2)[place.requests, slot] = new.transpose(1, 2)  # [n, R, Hkv, D]
            out.append(full[place.first : place.first + place.n, :, : place.n_keys])
        return out[0], out[1]


class PrefixLayer(_Layer):
    """A layer of a `PrefixCache`: keys [N, Hkv, S, D], values [N, Hkv, S, Dv], once they are recorded."""

    @property
    def recording(self) -> bool:
        return self.place.recording

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Record the clean rows, or append draft rows to what was recorded."""
        if self.place.recording:
            self.keys, self.values = key_states.detach(), value_states.detach()
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)


class KVCache:
    """Static per-request slots, written in place.

    The n requests of a forward always stand in neighbouring slots (`move` fills gaps), so what attention reads is a
    view.

    Args:
        shapes: (Hkv, D, Dv) of every layer.
        slots: requests that fit.
        capacity: committed positions that fit per request.
        tail: rows of one forward that fit behind the committed positions.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int, int]],
        slots: int,
        capacity: int,
        tail: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.slots, self.capacity, self.tail = slots, capacity, tail
        size = capacity + tail
        # zeros, not empty: a masked slot's weight is 0, and 0 * nan is nan
        wanted = [(h, d) for h, d, _ in shapes] + [(h, d) for h, _, d in shapes]  # keys of all layers, then values
        # stores of one size are parts of one tensor, so that moving rows is one kernel and not one a layer
        alike = {s: [i for i, w in enumerate(wanted) if w == s] for s in dict.fromkeys(wanted)}
        pools = {
            (h, d): torch.zeros(len(of), slots, h, size, d, dtype=dtype, device=device) for (h, d), of in alike.items()
        }
        self.pools = list(pools.values())  # each [stores, slots, Hkv, S, D]
        self.stores = [pools[w][alike[w].index(i)] for i, w in enumerate(wanted)]
        self.place = _Place()
        self.layers = [SlotLayer(self.place, *kv) for kv in zip(self.stores, self.stores[len(shapes) :])]
        self.lengths = [0] * slots  # committed positions, known to the host
        self.rope: dict[str, Tensor] | None = None  # cos and sin of every position, [S, 2, P]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for t in self.pools)

    def bind(self, layout: RowLayout, first: int | Tensor = 0, n_keys: int | None = None) -> int:
        """Point the next forward's writes behind each request's committed positions.

        Args:
            layout: the forward.
            first: cache slot of the layout's first request; the others follow it. A tensor [n] of all their slots
                lets one graph serve any; attention then gets every slot's keys and has to choose
                (`AttentionRule.base`).
            n_keys: K where the caller fixes it (a graph replays one K at many lengths): no row of a running request may
                stand at or past it. None takes it from the lengths that the host knows.

        Returns:
            K, the slots that attention has to read: up to the longest request's last row, or `n_keys`.

        Raises:
            ValueError: when a request or the forward's rows do not fit.
        """
        n, r = layout.n_requests, layout.n_rows
        base, first, held = (first, 0, self.slots) if isinstance(first, Tensor) else (None, first, n)
        longest = max(self.lengths[first : first + held], default=0)
        if n_keys is None:
            n_keys = longest + r
            fits = longest <= self.capacity and r <= self.tail
        else:
            fits = n_keys <= self.capacity + self.tail
        if not fits:
            raise ValueError(
                f"the KV cache holds {self.capacity} positions and {self.tail} rows a forward; "
                f"asked for {longest} and {r}, {n_keys} slots in all"
            )
        device = layout.positions.device
        slot = layout.positions if layout.straight else layout.start[:, None] + steps(r, device)
        requests = steps(self.slots, device)[first : first + n] if base is None else base
        self.place.requests, self.place.slot = requests[:, None], slot
        self.place.base, self.place.first, self.place.n, self.place.n_keys = base, first, held, n_keys
        return n_keys

    def commit(self, counts: list[int], first: int = 0) -> None:
        """Note that rows of the last forward have become permanent: so many of each request, from slot `first` on."""
        for slot, count in enumerate(counts, first):
            self.lengths[slot] += count

    def compact(self, rows: Tensor, start: Tensor, first: int = 0) -> None:
        """Move the accepted rows of a forward to the front of its tail.

        What the last `bind` noted is not asked: a forward that was replayed from a CUDA graph has noted nothing.

        Args:
            rows: [n, A] long, in order.
            start: [n] long, where each request's tail began in that forward.
            first: slot of the first request.
        """
        for pool in self.pools:
            if kernels.serve(pool):
                from selfspec.kernels.compact import compact

                compact(pool, rows, start, first)
            else:
                moved(pool, rows, start, first)

    def move(self, sources: list[int], targets: list[int], ahead: int = 0) -> None:
        """Copy requests' committed positions to other slots, over what stood there; no slot may be in both lists.

        Args:
            sources: slots.
            targets: slots.
            ahead: positions that rounds not read by the host may have committed beyond the known lengths.
        """
        length = max((self.lengths[s] for s in sources), default=0)
        if length:
            old, new = onto([sources, targets], self.stores[0].device)
            for pool in self.pools:
                pool[:, new, :, : length + ahead] = pool[:, old, :, : length + ahead]
        for s, t in zip(sources, targets, strict=True):
            self.lengths[t] = self.lengths[s]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot the first committed positions of another."""
        for pool in self.pools:
            pool[:, target, :, :length] = pool[:, source, :, :length]
        self.lengths[target] = length

    def crop(self, length: int, slot: int = 0) -> None:
        """Forget a request's positions from `length` on."""
        self.lengths[slot] = min(self.lengths[slot], length)


def moved(pool: Tensor, rows: Tensor, start: Tensor, first: int) -> None:
    """`KVCache.compact` in some stores, by torch. pool: [stores, slots, Hkv, S, D]"""
    n, depth = rows.shape
    requests = steps(pool.shape[1], rows.device)[first : first + n, None]
    src, dst = start[:, None] + rows, start[:, None] + steps(depth, rows.device)
    by_slot = pool.transpose(2, 3)  # [stores, slots, S, Hkv, D]
    by_slot[:, requests, dst] = by_slot[:, requests, src]  # gathered whole before it is written


class PrefixCache:
    """Detached keys and values of one clean forward; draft rows append theirs by concatenation, with gradient.

    Args:
        n_layers: layers of the backbone.
    """

    def __init__(self, n_layers: int):
        self.place = _Place()
        self.layers = [PrefixLayer(self.place) for _ in range(n_layers)]

    def freeze(self) -> None:
        """From now on the recorded prefix is read, and rows are appended to it."""
        self.place.recording = False

    def bind(self, layout: RowLayout, first: int | Tensor = 0, n_keys: int | None = None) -> int:
        """Returns K: the rows alone while recording, afterwards the prefix and the rows."""
        recorded = 0 if self.place.recording else next(c.keys.shape[2] for c in self.layers if c.keys is not None)
        return recorded + layout.n_rows
