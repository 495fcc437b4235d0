"""Gumbel-coupled verification: the draw is fixed before the draft, which can only guess it.

The token at a position is argmax(log p + g[seed, position, token]) with noise that knows nothing of drafts (Gumbel-max;
as a coupling of two models: Daliri et al., "Coupling without communication and drafter-invariant speculative decoding",
arXiv 2408.07978). So verification is exact matching, every choice of draft, tree or block leaves the text as it is, and
plain decoding with the same seed gives the same text. A drafter that ranks its own candidates with the same noise
matches with probability (1 - d) / (1 + d) at least, d being the total variation distance between the two.
"""

from __future__ import annotations

from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.sampling import draw
from selfspec.verify.accepted import Accepted, Noise
from selfspec.verify.greedy import walk


def coupled(tree: DraftTree, scores: Tensor, noise: Noise) -> Accepted:
    """Walk with the seed's own token after every node.

    Args:
        tree: N trees or chains of M nodes.
        scores: [N, M, V] target scores after each node.
        noise: of the round.
    """
    n, m, v = scores.shape
    seed = noise.seed[:, None].expand(n, m).reshape(-1)
    return walk(tree, draw(scores.reshape(-1, v), seed, noise.positions(tree).reshape(-1)).view(n, m))
