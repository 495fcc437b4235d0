"""Trees by other rules than plain best-first, by name.

A builder is called with the anchor [N], the drafter's logits [N, T, V] and a budget of nodes, and returns a `DraftTree`
of budget + 1 nodes; a rule that stops earlier pads, and `DraftTree.sizes` says what it used. None reads a tensor on the
host, and none looks at anything but marginals and earlier rounds.
"""

from __future__ import annotations

from selfspec.draft.trees.bastion import Bastion
from selfspec.draft.trees.caddtree import CaDDTree
from selfspec.draft.trees.ddtree import DDTree
from selfspec.draft.trees.domino import DominoTree
from selfspec.draft.trees.opt import OPTTree
from selfspec.draft.trees.taps import TAPS

__all__ = ["TAPS", "TREES", "Bastion", "CaDDTree", "DDTree", "DominoTree", "OPTTree"]

TREES: dict[str, type] = {
    "ddtree": DDTree,
    "caddtree": CaDDTree,
    "bastion": Bastion,
    "taps": TAPS,
    "opt-tree": OPTTree,
    "dominotree": DominoTree,
}
