"""Linears whose weights depend on the kind of row: the base model's for clean rows, the mask path's for draft rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Route:
    """Where draft rows begin in the row axis of the running forward; shared by all routed modules of a backbone."""

    def __init__(self) -> None:
        self.n_clean = 0


class RoutedLinear(nn.Module):
    """The base Linear for clean rows, the mask path's for draft rows, which stand last in the row axis."""

    def __init__(self, base: nn.Module, delta: nn.Module, route: Route):
        super().__init__()
        self.base, self.delta, self.route = base, delta, route

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, in] -> [N, R, out]"""
        c = self.route.n_clean
        if c == x.shape[1]:
            return self.base(x)
        if c == 0:
            return self.delta(x, self.base)
        return torch.cat([self.base(x[:, :c]), self.delta(x[:, c:], self.base)], 1)
