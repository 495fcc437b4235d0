"""Drafts that a table conditions, for tests of conditioned drafts."""

import torch

from selfspec.draft.condition import Given

V, K = 30, 8


def paths_of(tree, row):
    """Score of every path of tokens."""
    out, paths = {}, [()]
    for node in range(1, tree.n_nodes):
        if int(tree.parents[row, node]) < 0:
            paths.append(None)
            continue
        paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
        out[paths[-1]] = float(tree.scores[row, node])
    return out


def given_of(n, t, seed=0, banned=None):
    """Heads that know nothing but the token before: logits are a table's row."""
    table = 2 * torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed))
    plain = torch.randn(n, t, V, generator=torch.Generator().manual_seed(seed + 1))
    return table, plain, Given(lambda _, before: table[before].clone(), torch.zeros(n, t, 2), torch.arange(n), banned)
