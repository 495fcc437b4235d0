"""Accept: every verifier walks a `DraftTree` and says which path to keep, and the one token that follows it.

A verifier is a function of the tree, the target scores [N, M, V] after each node (processed, any constant added) and
the round's noise. `VERIFIERS` has those that sample; `DRAWN` names those whose drafts must be drawn from the drafter's
own distribution, which the tree then carries.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.verify.accepted import Accepted, Noise
from selfspec.verify.block import block
from selfspec.verify.coupled import coupled
from selfspec.verify.multi import multi
from selfspec.verify.rejection import rejection

__all__ = ["CHAINS", "DRAWN", "VERIFIERS", "Accept", "Accepted", "Noise", "Verifier"]

Verifier = Callable[[DraftTree, Tensor, Noise], Accepted]
Accept = Callable[[DraftTree, Tensor, Tensor], Accepted]  # tree, logits [N, M, V], start [N]: what a round is handed
VERIFIERS: dict[str, Verifier] = {"coupled": coupled, "rejection": rejection, "block": block, "multi": multi}
DRAWN = frozenset({"rejection", "block", "multi"})
CHAINS = frozenset({"rejection", "block"})  # the others take trees too
