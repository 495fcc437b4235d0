"""Key/value storage behind transformers' `Cache` interface.

`KVCache` serves decoding: static slots per request, so that slot s of a request holds its position s, and a scratch tail
for the rows of the running forward. Only `commit` makes rows permanent, and only clean rows are ever committed.
`PrefixCache` serves training: the clean rows' keys and values of one forward, which later draft rows read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from selfspec.rows import RowLayout


class KVCache(Cache):
    """Static per-request slots, written in place; layers allocate on their first update.

    The n requests of a forward always stand in neighbouring slots (`move` fills gaps), so what attention reads is a view.

    Args:
        n_layers: layers of the backbone.
        slots: requests that fit.
        capacity: committed positions that fit per request.
        tail: rows of one forward that fit behind the committed positions.
    """

    def __init__(self, n_layers: int, slots: int, capacity: int, tail: int):
        super().__init__(layers=[])
        self.slots, self.capacity, self.tail = slots, capacity, tail
        self.keys: list[Tensor | None] = [None] * n_layers  # each [slots, Hkv, capacity + tail, D]
        self.values: list[Tensor | None] = [None] * n_layers
        self.lengths = [0] * slots  # committed positions, known to the host
        self._write: tuple[Tensor, ...] = ()
        self._first = self._n_keys = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None)

    def bind(self, layout: RowLayout, first: int = 0, n_keys: int | None = None) -> int:
        """Point the next forward's writes behind each request's committed positions.

        Args:
            layout: the forward.
            first: cache slot of the layout's first request; the others follow it.
            n_keys: K where the caller fixes it (a graph replays one K at many lengths): no row of a running request may
                stand at or past it. None takes it from the lengths that the host knows.

        Returns:
            K, the slots that attention has to read: up to the longest request's last row, or `n_keys`.

        Raises:
            ValueError: when a request or the forward's rows do not fit.
        """
        n, r = layout.n_requests, layout.n_rows
        if n_keys is None:
            longest = max(self.lengths[first : first + n], default=0)
            fits = longest <= self.capacity and r <= self.tail
        else:
            longest = n_keys - r
            fits = n_keys <= self.capacity + self.tail
        if not fits:
            raise ValueError(
                f"the KV cache holds {self.capacity} positions and {self.tail} rows a forward; asked for {longest} and {r}"
            )
        device = layout.positions.device
        slot = layout.start[:, None] + torch.arange(r, device=device)
        self._write = (torch.arange(first, first + n, device=device)[:, None], slot)
        self._first, self._n_keys = first, longest + r
        return self._n_keys

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write this forward's rows into the tail and hand back views of prefix plus tail.

        Args:
            key_states: [n, Hkv, R, D]
            value_states: [n, Hkv, R, Dv]
            layer_idx: the layer.
        """
        out = []
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if store[layer_idx] is None:
                _, h, _, d = new.shape
                # zeros, not empty: a masked slot's weight is 0, and 0 * nan is nan
                store[layer_idx] = new.new_zeros(self.slots, h, self.capacity + self.tail, d)
            full = store[layer_idx]
            assert full is not None
            n, r = new.shape[0], new.shape[2]
            requests, slot = self._write
            full.transpose(1, 2)[requests, slot[:, :r]] = new.transpose(1, 2)  # [n, R, Hkv, D]
            out.append(full[self._first : self._first + n, :, : self._n_keys])
        return out[0], out[1]

    def commit(self, counts: list[int], rows: Tensor | None = None) -> None:
        """Make the accepted rows of the last forward permanent.

        Args:
            counts: rows to keep of each request, in order.
            rows: [n, A] long, the accepted path: row indices in order (a tree), padded past `counts`. None when the rows
                already stand in order (a chain), and nothing has to move.
        """
        if rows is not None:
            requests, slot = self._write
            src = slot[:, :1] + rows
            dst = slot[:, :1] + torch.arange(rows.shape[1], device=rows.device)
            for store in (self.keys, self.values):
                for full in store:
                    if full is not None:
                        by_slot = full.transpose(1, 2)
                        by_slot[requests, dst] = by_slot[requests, src]  # gathered whole before it is written
        for i, count in enumerate(counts, self._first):
            self.lengths[i] += count

    def move(self, src: int | list[int], dst: int | list[int]) -> None:
        """Copy requests' committed positions to other slots, over what stood there; no slot may be in both lists."""
        sources = [src] if isinstance(src, int) else src
        targets = [dst] if isinstance(dst, int) else dst
        length = max((self.lengths[s] for s in sources), default=0)
        stores = [full for store in (self.keys, self.values) for full in store if full is not None]
        if stores and length:
            old, new = torch.tensor([sources, targets], device=stores[0].device)
            for full in stores:
                full[new, :, :length] = full[old, :, :length]
        for s, t in zip(sources, targets, strict=True):
            self.lengths[t] = self.lengths[s]

    def crop(self, length: int, slot: int = 0) -> None:  # type: ignore[override]
        """Forget a request's positions from `length` on."""
        self.lengths[slot] = min(self.lengths[slot], length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed positions of the first slot (transformers' interface for one sequence)."""
        return self.lengths[0]


class PrefixCache(Cache):
    """Detached keys and values of one clean forward; draft rows append theirs by concatenation, with gradient.

    Args:
        n_layers: layers of the backbone.
    """

    def __init__(self, n_layers: int):
        super().__init__(layers=[])
        self.keys: list[Tensor | None] = [None] * n_layers  # each [N, Hkv, S, D]
        self.values: list[Tensor | None] = [None] * n_layers
        self.recording = True

    def bind(self, layout: RowLayout, first: int = 0, n_keys: int | None = None) -> int:
        """Returns K: the rows alone while recording, afterwards the prefix and the rows."""
        prefix = 0 if self.recording else next(k.shape[2] for k in self.keys if k is not None)
        return prefix + layout.n_rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Record the clean rows, or append draft rows to what was recorded."""
        if self.recording:
            self.keys[layer_idx], self.values[layer_idx] = key_states.detach(), value_states.detach()
            return key_states, value_states
        k, v = self.keys[layer_idx], self.values[layer_idx]
        assert k is not None and v is not None
        return torch.cat([k, key_states], 2), torch.cat([v, value_states], 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Recorded positions."""
        k = self.keys[layer_idx]
        return 0 if k is None else k.shape[2]
