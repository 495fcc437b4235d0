"""How a round is put together from its parts: what is drafted, verified and kept under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from selfspec import decode
from selfspec.backbone import Backbone
from selfspec.cache import KVCache
from selfspec.choose import Chooser
from selfspec.clock import Clock
from selfspec.decode import Frame
from selfspec.draft import DraftTree
from selfspec.draft.lookup import lookup
from selfspec.plan import Plan
from selfspec.request import Request
from selfspec.slots import Slots


@dataclass(frozen=True)
class Rounds:
    """What all rounds of a session share.

    Attributes:
        backbone: with a mask path if a plan drafts.
        cache: of the requests.
        slots: of the requests.
        chooser: of drafts.
        fixed: shapes may not depend on data, as in a CUDA graph.
    """

    backbone: Backbone
    cache: KVCache
    slots: Slots
    chooser: Chooser
    fixed: bool

    def play(
        self,
        plan: Plan,
        frame: Frame,
        size: int,
        redraft: bool,
        requests: list[Request],
        run: Callable[..., Any],
        clock: Clock | None,
    ) -> Tensor:
        """The round itself.

        Args:
            plan: what it does.
            frame: its requests.
            size: nodes of a chain.
            redraft: draft in a pass of its own; otherwise the last verification has drafted already.
            requests: of its rows.
            run: runs the parts that need no host, as `Graphs` does.
            clock: marks the parts.

        Returns:
            [n, 1 + depth] long, see `decode.settle`.
        """
        backbone, slots, config, key = (
            self.backbone,
            self.slots,
            getattr(self.backbone.path, "config", None),
            (frame, size),
        )
        start, anchor = slots.start[: frame.n], slots.anchor(frame.n)
        tree = DraftTree(anchor[:, None])
        if plan.lookup and size > 1:
            tree = lookup(slots.text[: frame.n], start, size)
            if not self.fixed:  # rows that nobody guessed cost for nothing
                tree = DraftTree(tree.tokens[:, : int((tree.tokens >= 0).any(0).sum())])
        elif plan.drafts and size > 1:
            if redraft:
                draft = partial(decode.draft, backbone, self.cache, slots, frame, size, config)
                logits = run(("draft", *key), draft)
            else:
                assert slots.saved is not None
                logits = slots.saved[: frame.n, : size - 1]
            nodes = plan.tree_nodes if plan.tree else None
            tree = self.chooser.tree(requests, anchor, start, logits, nodes, slots.seed[: frame.n])
        if clock is not None:
            clock.lap("draft")
        group = plan.block_size if plan.overlap else 0

        def forward(tokens: Tensor, parents: Tensor | None = None, paths: Tensor | None = None) -> decode.Hidden:
            candidates = DraftTree(tokens, parents, paths=paths)
            return decode.verify(backbone, self.cache, slots.start[: frame.n], candidates, frame, group, config)

        parts = (tree.tokens,) if tree.parents is None else (tree.tokens, tree.parents, tree.ancestors)
        hidden = run(("verify", *key, tree.tokens.shape, len(parts), group), forward, *parts)
        logits = backbone.logits(hidden.clean)  # [n, M, V]
        if clock is not None:
            clock.lap("verify")
        accepted = self.chooser.accept(requests, tree, logits, start, slots.view(frame.n))
        if group:
            assert slots.saved is not None
            slots.saved[: frame.n, : group - 1] = decode.saved_draft(backbone, accepted, hidden, group, config)
        depth = min(tree.n_nodes, size)
        return decode.settle(self.cache, slots, frame, tree, accepted, hidden.taps, depth)


def plainly(key: Any, fn: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run as it is; what `Graphs` does inside a capture."""
    return fn(*inputs)
