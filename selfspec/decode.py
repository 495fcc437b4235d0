"""The one round: draft a tree, verify it in one forward, commit the path that the base model itself would have taken.

Plain decoding is a round whose tree is the anchor alone. An overlapped round hangs draft groups on the tree's nodes, so
that the next draft comes out of the same forward. Pure tensor functions; what the host has to know leaves in one
transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec import rows
from selfspec.backbone import Backbone, Hidden
from selfspec.cache import KVCache
from selfspec.draft import DraftTree
from selfspec.draft.block import ban_mask, draft_inputs
from selfspec.verify import Accept, Accepted
from selfspec.verify.greedy import best, greedy


@dataclass(frozen=True)
class State:
    """What a round knows of its N requests.

    Attributes:
        anchor: [N] long, the last emitted token (the bonus); its keys and values are not in the cache yet.
        start: [N] long, committed positions; also the anchor's position.
        features: [N, F] of position start - 1, where the mask path wants them.
    """

    anchor: Tensor
    start: Tensor
    features: Tensor | None = None


def prefill(
    backbone: Backbone,
    cache: KVCache,
    prompts: list[list[int]],
    first: int = 0,
    chunk: int = 512,
    accept: Accept | None = None,
    known: list[int] | None = None,
) -> State:
    """Commit prompts and emit each one's first token.

    Args:
        backbone: the model.
        cache: slots `first`... are free, and empty but for what is known.
        prompts: token ids, ragged, none empty.
        first: cache slot of the first prompt.
        chunk: positions a forward, so that memory does not grow with the square of the prompt.
        accept: chooses the first tokens; None is greedy. It sees a tree of nothing but each prompt's last token.
        known: positions of each prompt that its slot holds already, fewer than the prompt has.
    """
    device, n = backbone.device, len(prompts)
    done = [0] * n if known is None else list(known)
    last: list[Tensor | None] = [None] * n
    taps: list[Tensor | None] = [None] * n
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        width = min(chunk, max(len(p) - d for d, p in zip(done, prompts, strict=True)))
        parts = [p[d : d + width] for d, p in zip(done, prompts, strict=True)]
        ids = torch.tensor([p + [0] * (width - len(p)) for p in parts], device=device)
        hidden = backbone(rows.chain(torch.tensor(done, device=device), width), cache, ids, first=first)
        cache.commit([len(p) for p in parts])
        for i, part in enumerate(parts):
            done[i] += len(part)
            if part and done[i] == len(prompts[i]):
                last[i] = hidden.clean[i, len(part) - 1]
                taps[i] = None if hidden.taps is None else hidden.taps[i, len(part) - 1]
    logits = backbone.logits(torch.stack([h for h in last if h is not None])[:, None])  # [N, 1, V]
    features = [t for t in taps if t is not None]
    start = torch.tensor(done, device=device)
    if accept is None:
        anchor = best(logits[:, 0])
    else:
        ends = DraftTree(torch.tensor([[p[-1]] for p in prompts], device=device))
        anchor = accept(ends, logits, start - 1).tokens[:, 0]
    return State(anchor, start, torch.stack(features) if features else None)


def verify(
    backbone: Backbone,
    cache: KVCache,
    state: State,
    tree: DraftTree,
    group_size: int = 0,
    causal: bool = False,
    accept: Accept | None = None,
) -> tuple[Accepted, Hidden]:
    """One forward over the tree, with a draft group of `group_size` masks on every node when that is not 0.

    Args:
        backbone: the model.
        cache: committed up to the anchor's position.
        state: of the requests.
        tree: their candidates.
        group_size: masks of a group.
        causal: groups are causal.
        accept: chooses the path; None is greedy.

    Returns:
        The accepted path, and the hidden states of the forward.
    """
    clean = rows.chain(state.start, tree.n_nodes)
    if tree.parents is not None:
        clean = rows.tree(state.start, tree.parents)
    layout, inputs = clean, None
    if group_size:
        n, m = tree.tokens.shape
        nodes = torch.arange(m, device=state.start.device).expand(n, m)
        layout = rows.overlapped(clean, nodes, group_size, causal)
        inputs = draft_inputs(None, n, group_size, m, state.start.device)
    hidden = backbone(layout, cache, tree.tokens.clamp(min=0), inputs)
    logits = backbone.logits(hidden.clean)  # [N, M, V]
    return greedy(tree, logits) if accept is None else accept(tree, logits, state.start), hidden


def commit(
    cache: KVCache, state: State, tree: DraftTree, accepted: Accepted, hidden: Hidden
) -> tuple[State, list[list[int]]]:
    """Keep the accepted rows and move on to the bonus token.

    Returns:
        The next round's state, and the tokens that each request emits in this one.
    """
    host = torch.cat([accepted.count[:, None], accepted.tokens], 1).tolist()  # the round's one transfer
    counts = [r[0] for r in host]
    emitted = [r[1 : 1 + c] for r, c in zip(host, counts, strict=True)]
    cache.commit(counts, None if tree.parents is None else accepted.rows[:, : max(counts)])
    features = None if hidden.taps is None else _at(hidden.taps, accepted.last)
    return State(accepted.bonus, state.start + accepted.count, features), emitted


def saved_draft(backbone: Backbone, accepted: Accepted, hidden: Hidden, group_size: int, path) -> Tensor:
    """The marginals drafted beside the verification, for the outcome that really came.

    A group's slot 0 stands on the bonus; a shifted path's slot 0 therefore guesses the first position after it.

    Returns:
        [N, group_size - 1, V] logits of the positions after the bonus; the mask's own vocabulary id is banned.
    """
    n, _, d = hidden.draft.shape
    groups = hidden.draft.reshape(n, -1, group_size, d)  # one group a node
    chosen = groups[torch.arange(n, device=groups.device), accepted.last]  # [N, B, d]
    return ban_mask(backbone.logits(chosen[:, :-1] if path.shift else chosen[:, 1:]), path.mask_id)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [N, C, F], index [N] -> [N, F]"""
    return values[torch.arange(len(index), device=index.device), index]
