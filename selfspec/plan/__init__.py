"""Plan: the static shape of a round, which mode, block and tree it runs with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

MODES = ("ar", "lookup", "sequential", "loop", "overlap", "tree")
ALONE = {"ar", "lookup"}  # modes that combine with no other
BLOCKS = (2, 4, 8, 16)  # sizes that planners choose from: each is a bucket of graphs
TREES = (15, 31, 63, 127, 255)  # with the anchor as many rows as fill tiles of 16
NODES = 31  # of a tree, where nobody says: two such tiles
CUTS = (4, 8)  # verify lengths of whole blocks: an adapter may draft worse in blocks that it was not trained for
GROUPS = (1, 2, 4, None)
BRANCHES, CORRECTIONS = "branches", 2  # as groups: RecGuide's, so many corrections and a continuation
RULES = ("ddtree", "caddtree", "bastion", "taps", "opt-tree")
MOST_TREE_NODES = 1024  # masks grow with the square, and no tree this wide was ever worth its rows


@dataclass(frozen=True)
class Plan:
    """The static shape of a round. Hashable: rounds of one plan share their CUDA graphs.

    Attributes:
        mode: "ar", "lookup", "sequential", "loop", "tree", "overlap", or loop, overlap and tree joined by "+".
        block_size: nodes of a chain, the anchor included; 1 is plain decoding.
        tree_nodes: nodes of a tree beside the anchor.
        groups: overlap only, draft groups kept per request; None hangs one on every node; "branches", for chains, one
            where each of the first risky drafts is wrong and its second candidate right, and one after the last.
        verify_length: nodes of a chain that are verified, the anchor included; None verifies the whole block.
        passes: loop only, draft passes a round.
        rule: trees only, how they are grown and where they end, of `RULES` (`selfspec.draft.trees`).
        prefix: loops only, how many tokens a later pass takes as known: "product", "expected" or "fixed", settings as
            in "product:threshold=0.6" (`selfspec.draft.loop`).
        adapter: index among the adapters that are loaded; each has an entry layer of its own.
    """

    mode: str = "sequential"
    block_size: int = 16
    tree_nodes: int = NODES
    groups: int | str | None = None
    verify_length: int | None = None
    passes: int = 2
    adapter: int = 0
    rule: str = RULES[0]
    prefix: str = "product"

    def __post_init__(self) -> None:
        parts = self.mode.split("+")
        unknown = [p for p in parts if p not in MODES]
        if unknown or len(set(parts)) < len(parts) or (ALONE & set(parts) and len(parts) > 1):
            raise ValueError(f"mode={self.mode!r}: expected {', '.join(MODES)}, auto, or several as in overlap+tree")
        if self.block_size < 1 or self.tree_nodes < 1:
            raise ValueError(f"block_size={self.block_size} and tree_nodes={self.tree_nodes} must be at least 1")
        if self.tree_nodes > MOST_TREE_NODES:
            raise ValueError(f"tree_nodes={self.tree_nodes}: expected at most {MOST_TREE_NODES}")
        if isinstance(self.groups, str) and (self.groups != BRANCHES or "tree" in parts):
            raise ValueError(f"groups={self.groups!r}: expected a number, or {BRANCHES!r} for chains")
        if self.groups is not None and ("overlap" not in parts or (self.kept or 0) < 1):
            raise ValueError(f"groups={self.groups}: expected 1 or more, and mode='overlap'")
        if self.verify_length is not None and not ("tree" not in parts and 1 <= self.verify_length <= self.block_size):
            raise ValueError(f"verify_length={self.verify_length}: expected 1..block_size={self.block_size}, no tree")
        if self.rule not in RULES or (self.rule != RULES[0] and "tree" not in parts):
            raise ValueError(f"rule={self.rule!r}: expected {', '.join(RULES)}, and a mode with trees")
        if self.prefix != "product" and "loop" not in parts:
            raise ValueError(f"prefix={self.prefix!r}: mode={self.mode!r} has no second pass; choose a loop")
        if self.passes < 2 or self.adapter < 0:
            raise ValueError(f"passes={self.passes} must be at least 2 and adapter={self.adapter} at least 0")

    @cached_property
    def drafts(self) -> bool:
        """Whether rounds draft with a mask path."""
        return self.mode not in ALONE and self.block_size > 1

    @cached_property
    def lookup(self) -> bool:
        """Whether drafts are looked up in the text."""
        return self.mode == "lookup" and self.block_size > 1

    @cached_property
    def overlap(self) -> bool:
        """Whether the next draft is computed inside the verify forward."""
        return self.drafts and "overlap" in self.mode

    @cached_property
    def kept(self) -> int | None:
        """Groups of a request; None where every node has one."""
        return CORRECTIONS + 1 if isinstance(self.groups, str) else self.groups

    @cached_property
    def branches(self) -> bool:
        """Whether groups hold the tokens that drafts may be corrected to."""
        return self.groups == BRANCHES

    @cached_property
    def loop(self) -> bool:
        """Whether further draft passes regenerate what follows a prefix of the first."""
        return self.drafts and "loop" in self.mode

    @cached_property
    def tree(self) -> bool:
        """Whether drafts are trees rather than chains."""
        return self.drafts and "tree" in self.mode

    @property
    def chain(self) -> bool:
        """Whether drafts are chains that a mask path drafts: what length rules prune."""
        return self.drafts and not self.tree

    @cached_property
    def rows(self) -> int:
        """Rows of a request in the largest forward."""
        return max(self.nodes + self.group_rows, self.block_size if self.drafts else 1)

    @cached_property
    def nodes(self) -> int:
        """Clean rows that a request verifies in a round, the anchor included."""
        if not self.drafts and not self.lookup:
            return 1
        return self.tree_nodes + 1 if self.tree else self.verify_length or self.block_size

    @cached_property
    def group_rows(self) -> int:
        """Draft rows that ride in a request's verify forward."""
        if not self.overlap:
            return 0
        groups = self.nodes if self.kept is None else self.kept
        return self.block_size * (groups if self.branches else min(groups, self.nodes))

    def __str__(self) -> str:
        if not self.drafts and not self.lookup:
            return "ar"
        words = [self.mode, f"B={self.block_size}"]
        words += [f"nodes={self.tree_nodes}"] if self.tree else []
        words += [f"rule={self.rule}"] if self.rule != RULES[0] else []
        words += [f"groups={self.groups or 'all'}"] if self.overlap else []
        words += [f"passes={self.passes}"] if self.loop and self.passes != 2 else []
        words += [f"prefix={self.prefix}"] if self.prefix != "product" else []
        words += [f"verify={self.verify_length}"] if self.verify_length else []
        words += [f"adapter={self.adapter}"] if self.adapter else []
        return " ".join(words)

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
        if self.loop and not path.prefix_splits:
            raise ValueError(
                "this adapter was not trained to go on from a drafted prefix (prefix_splits), which a loop's second "
                "pass asks of it; choose mode='sequential' or train it with prefix_splits"
            )
        if self.overlap and any(tap > path.entry for tap in path.taps):
            raise ValueError(
                f"this adapter enters at layer {path.entry} and reads features {path.taps} of the last clean position, "
                "some of which an overlapped forward computes too late; choose mode='sequential' or 'tree', or train "
                "it with taps up to its entry layer"
            )

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that the mask path must have been trained for."""
        if not self.drafts:
            return ()
        return ("known", "hidden") if self.overlap else ("known",)


def menu(paths: list[Any], modes: tuple[str, ...] | None = None) -> list[Plan]:
    """Every plan that a planner may choose: few, since each is a bucket of graphs. Plain decoding comes first.

    Args:
        paths: a `MaskPathConfig` per loaded adapter.
        modes: only these modes, combined ones named in full; by default all that the adapters were trained for.
    """
    plans = [Plan("ar", 1), *(Plan("lookup", b) for b in BLOCKS[1:])]
    for i, path in enumerate(paths):
        for b in [b for b in BLOCKS if b <= path.block_size]:
            plans += [Plan(m, b, adapter=i) for m in ("sequential", "loop")]
            plans += [Plan("overlap", b, groups=g, adapter=i) for g in GROUPS if g is None or g < b]
        widest = max((b for b in BLOCKS if b <= path.block_size), default=1)
        plans += [Plan("sequential", widest, verify_length=v, adapter=i) for v in CUTS if v < widest]
        plans += [Plan("overlap", widest, groups=BRANCHES, adapter=i)] if widest > 1 else []
        for nodes in TREES if widest > 1 else ():
            plans += [Plan(m, widest, nodes, adapter=i) for m in ("tree", "loop+tree")]
            plans += [Plan("overlap+tree", widest, nodes, g, adapter=i) for g in GROUPS if nodes <= 32 or g]
    allowed = [p for p in plans if modes is None or p.mode in modes or p.mode == "ar"]
    return [p for p in allowed if not p.drafts or _able(p, paths[p.adapter])]


def _able(plan: Plan, path: Any) -> bool:
    try:
        plan.require(path)
    except ValueError:
        return False
    return True
