"""Chooses the tokens of a round for requests of all kinds, and drafts what the verifier can use.

Requests whose scores need nothing but logits are chosen all at once, on the device. The others are walked lazily on the
host: one call of their processors for every token that is emitted, on the true text, as plain decoding would make it.
Either way the outcome is a target token after each node, and one walk of the tree for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft import DraftTree, chain_of
from selfspec.draft.drawn import drawn
from selfspec.draft.tree import best_first
from selfspec.request import Request
from selfspec.sampling import Pipeline, draw, perturbed
from selfspec.verify import DRAWN, VERIFIERS, Accepted, Noise
from selfspec.verify.greedy import best, walk

NEVER = -2  # the target of a node that was not visited; padding of a tree is -1


class Chooser:
    """How a session accepts and drafts.

    Args:
        verify: a name in `selfspec.verify.VERIFIERS`.

    Raises:
        ValueError: there is no such verifier.
    """

    def __init__(self, verify: str = "coupled"):
        if verify not in VERIFIERS:
            raise ValueError(f"verify={verify!r}: expected {', '.join(VERIFIERS)}")
        self.verify = verify
        self.draws = verify in DRAWN

    def check(self, request: Request) -> None:
        """Refuse a request that this verifier would decode wrongly.

        Raises:
            ValueError: says why.
        """
        if not self.draws:
            return
        s = request.sampling
        if s is None or not s.sample:
            raise ValueError(f"verify={self.verify!r} is for do_sample=True")
        if s.keep_scores or s.keep_logits:
            raise ValueError(f"output_scores and output_logits need verify='coupled', not {self.verify!r}")
        if not s.pipeline.stateless:
            raise ValueError(
                f"verify={self.verify!r} asks for the distribution after every draft token, and a logits processor "
                "that selfspec does not know may not be asked about texts that never come; use verify='coupled'"
            )

    def accept(self, requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor) -> Accepted:
        """The accepted path of every request.

        Args:
            requests: N; those that are walked lazily take their tokens here.
            tree: their candidates; node 0 is the last token of the text so far.
            logits: [N, M, V] after each node.
            start: [N] long, position of node 0.
        """
        if not self.draws:
            return walk(tree, targets(requests, tree, logits, start))
        noise = Noise(_seeds(requests, start.device), start)
        return VERIFIERS[self.verify](tree, node_scores(requests, tree, logits), noise)

    def tree(
        self, requests: list[Request], anchor: Tensor, start: Tensor, logits: Tensor, nodes: int | None
    ) -> DraftTree:
        """The candidates of a round: a tree of `nodes` beside the anchor, or a chain.

        Args:
            requests: N.
            anchor: [N] long.
            start: [N] long.
            logits: [N, T, V] the drafter's.
            nodes: None asks for a chain.
        """
        if self.draws:
            return drawn(anchor, _draft_scores(requests, logits), _seeds(requests, start.device), start, nodes)
        if any(r.sampling is not None and r.sampling.sample for r in requests):
            logits = _coupled_drafts(requests, start, logits)
        return chain_of(anchor, logits) if nodes is None else best_first(anchor, logits, nodes)


def targets(requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor) -> Tensor:
    """The token that each request emits after each node, as far as it is known. [N, M] long"""
    if all(r.sampling is None for r in requests):
        return best(logits)
    n, m, v = logits.shape
    out = logits.new_full((n, m), NEVER, dtype=torch.long)
    for index in _alike(requests):
        sampling = requests[index[0]].sampling
        some, at = (logits, slice(None)) if len(index) == n else (logits[index], index)
        if sampling is None:
            out[at] = best(some)
            continue
        scores = sampling.pipeline(None, some.reshape(-1, v))  # [n * M, V]
        if not sampling.sample:
            out[at] = scores.argmax(-1).view(-1, m)
            continue
        seed = _seeds([requests[i] for i in index], logits.device)
        noise = Noise(seed, start[at])
        positions = noise.positions(tree if len(index) == n else _part(tree, index))
        out[at] = draw(scores, seed.repeat_interleave(m), positions.reshape(-1)).view(-1, m)
    lazy = [i for i, r in enumerate(requests) if r.lazy]
    if lazy:
        tokens = tree.tokens.tolist()
        parents = [list(range(-1, m - 1))] * n if tree.parents is None else tree.parents.tolist()
        for i in lazy:
            out[i] = torch.tensor(_walk_lazily(requests[i], tokens[i], parents[i], logits[i]), device=out.device)
    return out


def _walk_lazily(request: Request, tokens: list[int], parents: list[int], logits: Tensor) -> list[int]:
    """Targets of the nodes on the path that the request takes, up to its end. logits: [M, V]"""
    out, at = [NEVER] * len(tokens), 0
    while True:
        token = out[at] = request.next_token(logits[at : at + 1])
        children = (j for j in range(at + 1, len(tokens)) if parents[j] == at and tokens[j] == token)
        child = None if request.finish_reason else next(children, None)
        if child is None:
            return out
        at = child


def node_scores(requests: list[Request], tree: DraftTree, logits: Tensor) -> Tensor:
    """Target scores after every node, whether or not it will be reached. [N, M, V] float32"""
    n, m, v = logits.shape
    out = torch.empty(n, m, v, device=logits.device)
    for index in _alike(requests, every=True):
        sampling = requests[index[0]].sampling
        assert sampling is not None
        if sampling.pipeline.pure:
            out[index] = sampling.pipeline(None, logits[index].reshape(-1, v)).view(-1, m, v)
            continue
        for i in index:
            out[i] = _on_paths(sampling.pipeline, requests[i].text(), _part(tree, [i]), logits[i])
    return out


def _on_paths(pipeline: Pipeline, text: Tensor, tree: DraftTree, logits: Tensor) -> Tensor:
    """Scores of each node, given the text and the node's path. text: [1, t], logits: [M, V]. Returns [M, V]"""
    m, rows = tree.n_nodes, []
    texts = [text]  # of the nodes so far; node 0 is the text's own last token
    parents = range(-1, m - 1) if tree.parents is None else tree.parents[0].tolist()
    for node, parent in zip(range(1, m), list(parents)[1:]):
        before = texts[max(parent, 0)]
        texts.append(torch.cat([before, tree.tokens[:, node : node + 1].clamp(min=0)], 1))
    for node, prefix in enumerate(texts):
        rows.append(pipeline(prefix, logits[node : node + 1]))
    return torch.cat(rows)


def _draft_scores(requests: list[Request], logits: Tensor) -> Tensor:
    """The drafter's logits through every request's temperature and cuts. [N, T, V] float32"""
    n, t, v = logits.shape
    out = torch.empty(n, t, v, device=logits.device)
    for index in _alike(requests, every=True):
        sampling = requests[index[0]].sampling
        some = logits[index].reshape(-1, v)
        out[index] = (some.float() if sampling is None else sampling.pipeline.of_drafts(some)).view(-1, t, v)
    return out


def _coupled_drafts(requests: list[Request], start: Tensor, logits: Tensor) -> Tensor:
    """The drafter's scores, perturbed with the very noise that will choose the tokens. [N, T, V]"""
    scores = _draft_scores(requests, logits)
    n, t, v = scores.shape
    drawn = [i for i, r in enumerate(requests) if r.sampling is not None and r.sampling.sample]
    seed = _seeds([requests[i] for i in drawn], start.device).repeat_interleave(t)
    positions = (start[drawn, None] + 1 + torch.arange(t, device=start.device)).reshape(-1)
    scores[drawn] = perturbed(scores[drawn].view(-1, v), seed, positions, lambda s: s.float()).view(-1, t, v)
    return scores


def _alike(requests: list[Request], every: bool = False) -> list[list[int]]:
    """Groups of requests that share a pipeline; those that are walked lazily are left out unless all are wanted."""
    groups: dict[tuple, list[int]] = {}
    for i, r in enumerate(requests):
        if every or not r.lazy:
            key = (None, False) if r.sampling is None else (id(r.sampling.pipeline), r.sampling.sample)
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def _seeds(requests: list[Request], device: torch.device) -> Tensor:
    return torch.tensor([0 if r.sampling is None else r.sampling.seed for r in requests], device=device)


def _part(tree: DraftTree, index: list[int]) -> DraftTree:
    parents = None if tree.parents is None else tree.parents[index]
    return DraftTree(tree.tokens[index], parents, None if tree.probs is None else tree.probs[index])
