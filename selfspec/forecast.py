"""What a mask path's own heads say of a draft's fate, before it is verified.

It is made from hidden states alone, never from the drafted tokens, so that whatever is decided by it keeps the law of
drawn drafts (see `selfspec.plan.lengths`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]


class Forecast(NamedTuple):
    """Of T drafts of N requests.

    Attributes:
        sure: [N, T] float32, the chance that each is accepted once those before it are; None without such a head.
        lengths: [N, T + 1] float32, the chance of 0..T accepted drafts; None without such a head.
    """

    sure: Tensor | None = None
    lengths: Tensor | None = None

    def first(self, t: int) -> Forecast:
        """Of the first t drafts alone; longer runs end there."""
        sure, lengths = self.sure, self.lengths
        if lengths is not None:
            lengths = torch.cat([lengths[:, :t], lengths[:, t:].sum(1, keepdim=True)], 1)
        return Forecast(None if sure is None else sure[:, :t], lengths)

    def where(self, chosen: Tensor, other: Forecast) -> Forecast:
        """Of the chosen requests this one, of the rest the other. chosen: [N] bool"""
        pairs = zip(self, other, strict=True)
        return Forecast(*(None if a is None or b is None else torch.where(chosen[:, None], a, b) for a, b in pairs))

    def keep(self, place: Forecast) -> None:
        """Copy it to the beginning of larger tensors."""
        for new, old in zip(self, place, strict=True):
            if new is not None:
                assert old is not None
                old[: len(new), : new.shape[1]] = new

    def known(self, path: Any, n: int, t: int) -> Forecast:
        """What `keep` has kept of n requests and t drafts, as far as the path has heads."""
        kept = [None if p is None else p[:n, : t + more] for more, p in enumerate(self)]
        return Forecast(*(p if head else None for head, p in zip(heads_of(path), kept, strict=True)))


def heads_of(path: Any) -> tuple[Head | None, Head | None]:
    """A mask path's confidence head and its length head, both of hidden states [N, T, d] of drafts 1..T; None where it
    has none, or knows no heads."""
    confide, lengths = (getattr(path, name, None) for name in ("confide", "lengths"))
    return confide and confide(), lengths and lengths()


def forecast(path: Any, states: Tensor) -> Forecast:
    """Ask the heads of a path.

    Args:
        path: a mask path.
        states: [N, T, d] hidden states of the drafts, as the layers left them.
    """
    return Forecast(*(head and head(states) for head in heads_of(path)))
