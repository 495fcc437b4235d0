"""Accept: every verifier walks a `DraftTree` and says which path the base model itself would have taken."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Accepted:
    """The accepted path of every request.

    Attributes:
        rows: [N, A] long, nodes of the path in order, the anchor first; padded past `count` with the last one.
        count: [N] long, nodes on the path, at least 1 (the anchor).
        tokens: [N, A] long, tokens emitted: those after the anchor on the path, then the bonus; `count` of them count.
    """

    rows: Tensor
    count: Tensor
    tokens: Tensor

    @property
    def bonus(self) -> Tensor:
        """[N] long, the verifier's own token after the path."""
        return self.tokens.gather(1, self.count[:, None] - 1)[:, 0]

    @property
    def last(self) -> Tensor:
        """[N] long, the last accepted node."""
        return self.rows.gather(1, self.count[:, None] - 1)[:, 0]
