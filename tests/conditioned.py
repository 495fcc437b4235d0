"""Drafts that a table conditions, for tests of conditioned drafts."""

import torch

from selfspec.draft.condition import Condition, Given

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


def told_by(table, read=True):
    """A head that knows nothing but the token before: its state is that token, and logits are a table's row.

    With `read` the table is the readout, and only the rows that are asked for are read.
    """
    one = torch.eye(len(table), dtype=table.dtype, device=table.device)
    return Condition(
        lambda _, before: one[before], lambda states: states @ table, table.T.contiguous() if read else None
    )


def given_of(n, t, seed=0, banned=None, read=True):
    """Heads of a table."""
    table = 2 * torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed))
    plain = torch.randn(n, t, V, generator=torch.Generator().manual_seed(seed + 1))
    return table, plain, Given(told_by(table, read), torch.zeros(n, t, 2), torch.arange(n), banned)
