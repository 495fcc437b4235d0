"""Rules of trees, by name: how they are grown, or where they end.

A builder (`TREES`) is called with the anchor [N], the drafter's logits [N, T, V] and a budget of nodes, and returns a
`DraftTree` of budget + 1 nodes, which it always fills while there are prefixes. An end (`ENDS`) cuts a tree that was
grown best-first, over marginals or over what a head conditions: it is called with the tree's scores [N, M] and with
what rounds cost that verify 1..M rows, [M] float32 ms, and returns how many nodes are kept, [N] long with the anchor.
None reads a tensor on the host, and none looks at anything but marginals and earlier rounds. `selfspec.growth` puts
them to work.
"""

from __future__ import annotations

from selfspec.draft.trees.bastion import Bastion
from selfspec.draft.trees.caddtree import CaDDTree
from selfspec.draft.trees.ddtree import DDTree
from selfspec.draft.trees.opt import OPTTree
from selfspec.draft.trees.taps import TAPS

__all__ = ["ENDS", "TAPS", "TREES", "Bastion", "CaDDTree", "DDTree", "OPTTree"]

TREES: dict[str, type] = {"ddtree": DDTree, "taps": TAPS, "opt-tree": OPTTree}
ENDS: dict[str, type] = {"caddtree": CaDDTree, "bastion": Bastion}
