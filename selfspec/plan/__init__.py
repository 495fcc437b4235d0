"""Plan: which mode, block and tree a round runs with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODES = ("ar", "lookup", "sequential", "overlap", "tree")
ALONE = {"ar", "lookup"}  # modes that combine with no other


@dataclass(frozen=True)
class Plan:
    """A fixed plan.

    Attributes:
        mode: "ar", "lookup", "sequential", "tree", "overlap" or "overlap+tree".
        block_size: nodes of a chain, the anchor included; 1 is plain decoding.
        tree_nodes: nodes of a tree beside the anchor.
    """

    mode: str = "sequential"
    block_size: int = 16
    tree_nodes: int = 16

    def __post_init__(self) -> None:
        parts = self.mode.split("+")
        unknown = [p for p in parts if p not in MODES]
        if unknown or len(set(parts)) < len(parts) or (ALONE & set(parts) and len(parts) > 1):
            raise ValueError(f"mode={self.mode!r}: expected {', '.join(MODES)}, or overlap+tree")
        if self.block_size < 1 or self.tree_nodes < 1:
            raise ValueError(f"block_size={self.block_size} and tree_nodes={self.tree_nodes} must be at least 1")

    @property
    def drafts(self) -> bool:
        """Whether rounds draft with a mask path."""
        return self.mode not in ALONE and self.block_size > 1

    @property
    def lookup(self) -> bool:
        """Whether drafts are looked up in the text."""
        return self.mode == "lookup" and self.block_size > 1

    @property
    def overlap(self) -> bool:
        """Whether the next draft is computed inside the verify forward."""
        return self.drafts and "overlap" in self.mode

    @property
    def tree(self) -> bool:
        """Whether drafts are trees rather than chains."""
        return self.drafts and "tree" in self.mode

    @property
    def rows(self) -> int:
        """Rows of a request in the largest forward."""
        nodes = self.tree_nodes + 1 if self.tree else self.block_size
        return nodes * (1 + self.block_size) if self.overlap else max(nodes, self.block_size)

    def require(self, path: Any) -> None:
        """Refuse what a mask path cannot do.

        Args:
            path: a `MaskPathConfig`, or None where there is no adapter.

        Raises:
            ValueError: no adapter, or one that was not trained for this; the message says what to do.
        """
        if not self.drafts:
            return
        if path is None:
            raise ValueError(
                f"mode={self.mode!r} drafts with an adapter, and none is loaded; mode='lookup' and 'ar' need none"
            )
        for layout in self.layouts:
            path.require(layout, self.block_size)
        if self.overlap and path.taps:
            raise ValueError(
                f"this adapter reads features {path.taps} of the last clean position, which an overlapped forward "
                "computes too late; choose mode='sequential' or 'tree', or train it without taps"
            )

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that the mask path must have been trained for."""
        if not self.drafts:
            return ()
        return ("known", "hidden") if self.overlap else ("known",)
