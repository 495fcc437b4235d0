"""Chooses the tokens of a round for requests of all kinds, and drafts what the verifier can use.

Requests whose processors have a batched form are chosen all at once, on the device, group by group of equal recipes.
The others are walked lazily on the host: one call of their processors for every token that is emitted, on the true
text, as plain decoding would make it. Either way the outcome is a target token after each node, and one walk for all.

The device path reads nothing from the host, so that a CUDA graph may hold it: `graph_key` says for which requests one
is valid, and all else that changes comes in tensors, `Text` among them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.draft import Builder, DraftTree, chain_of, condition
from selfspec.draft.drawn import drawn
from selfspec.draft.loop import prefix_of
from selfspec.draft.trees import DDTree
from selfspec.nodes import Nodes, Text, part_of, pick
from selfspec.plan import RULES, Plan
from selfspec.recipe import Recipe
from selfspec.request import Request
from selfspec.rows import steps
from selfspec.sampling import draw, noisy, noisy_among
from selfspec.tops import best
from selfspec.verify import CHAINS, DRAWN, VERIFIERS, Accepted, Noise
from selfspec.verify.greedy import walk

if TYPE_CHECKING:
    from selfspec.growth import Growth

Chosen = tuple[list[int], Tensor | None, Tensor]
"""Numbers of a group's requests, their scores where somebody keeps them, and their targets."""

DEFAULT = DDTree()
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

    def require(self, plan: Plan, growth: Growth | None = None) -> None:
        """Refuse drafts that this verifier does not take, and trees by a rule that nobody runs.

        Args:
            plan: whose rounds they are.
            growth: the tree rule that goes with it.

        Raises:
            ValueError: says why.
        """
        if plan.rule != RULES[0] and (growth is None or growth.rule != plan.rule):
            raise ValueError(
                f"rule={plan.rule!r} of mode={plan.mode!r} learns or weighs costs, which a plan alone does not hold; "
                "take the policy of SelfSpecModel.policy, or pass one with a selfspec.growth.Growth"
            )
        if plan.tree and self.verify in CHAINS:
            raise ValueError(f"verify={self.verify!r} is for chains; trees take 'coupled' or 'multi'")
        if plan.lookup and self.draws:
            raise ValueError(f"verify={self.verify!r} needs drafts that the model draws; looked-up ones take 'coupled'")
        if plan.loop:
            prefix_of(plan.prefix)
        if plan.loop and self.draws:
            raise ValueError(
                f"verify={self.verify!r} weighs drafts against what they were drawn from, and a loop's later passes "
                "know the draws; loops take 'coupled'"
            )

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
        if request.keeps:
            raise ValueError(f"output_scores and output_logits need verify='coupled', not {self.verify!r}")
        if request.recipe is None:
            raise ValueError(
                f"verify={self.verify!r} asks for the distribution after every draft token, and a logits processor "
                "that selfspec does not know may not be asked about texts that never come; use verify='coupled'"
            )

    def accept(
        self, requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor, text: Text | None = None
    ) -> Accepted:
        """The accepted path of every request.

        Args:
            requests: N; those that are walked lazily take their tokens here.
            tree: their candidates; node 0 is the last token of the text so far.
            logits: [N, M, V] after each node.
            start: [N] long, position of node 0.
            text: of the requests; None gathers it from them.
        """
        text = text_of(requests, start.device) if text is None else text
        if self.draws:
            scores = node_scores(requests, tree, logits, start, text)
            return VERIFIERS[self.verify](tree, scores, Noise(text.seed, start))
        chosen = _chosen(requests, tree, logits, start, text)
        rows = _by_request(chosen)
        rows |= {i: _walk_lazily(r, tree, i, logits[i]) for i, r in enumerate(requests) if r.lazy}
        accepted = walk(tree, _in_order(rows, chosen[0][2] if chosen else None))
        if any(r.lazy for r in requests):  # one that has ended may lead on to a node that was not visited
            accepted = replace(accepted, tokens=accepted.tokens.clamp(min=0))
        for index, kept, _ in chosen:
            for k, i in enumerate(index):
                if kept is not None and requests[i].keeps:
                    requests[i].see(kept[k, accepted.rows[i]], logits[i, accepted.rows[i]])
        return accepted

    def tree(
        self,
        requests: list[Request],
        anchor: Tensor,
        start: Tensor,
        logits: Tensor,
        nodes: int | None,
        seed: Tensor | None = None,
        given: condition.Given | None = None,
        build: Builder = DEFAULT,
    ) -> DraftTree:
        """The candidates of a round: a tree of `nodes` beside the anchor, or a chain.

        Guesses are made with the noise that will choose the tokens, and may be conditioned on one another. Drafts that
        are drawn, for verifiers that weigh them, come from the marginals alone, which are then exactly their law.

        Args:
            requests: N.
            anchor: [N] long.
            start: [N] long.
            logits: [N, T, V] the drafter's.
            nodes: None asks for a chain.
            seed: [N] long; None takes the requests'.
            given: conditions the drafts, where a head can; none that is drawn.
            build: grows a tree that is not conditioned.
        """
        sampled = [i for i, r in enumerate(requests) if r.sampling is not None and r.sampling.sample]
        scores, how = logits, condition.PLAIN
        if sampled:
            seed = seeds_of(requests, start.device) if seed is None else seed
            scores = _draft_scores(requests, logits, (lambda r: r.cuts) if self.draws else _light)
            if self.draws:
                return drawn(anchor, scores, seed, start, nodes, build)
            if nodes is None and given is None:
                return DraftTree(torch.cat([anchor[:, None], _guesses(sampled, scores, seed, start)], 1))
            scores, how = _coupled(sampled, scores, seed, start), _scored(requests, sampled, seed, start)
            if nodes is not None:
                scores = condition.heated(scores, how.temperatures)
        if given is not None:
            return condition.propose(anchor, scores, given, nodes, how)
        return chain_of(anchor, scores) if nodes is None else build(anchor, scores, nodes)


# ---- on the device


def on_device(request: Request) -> bool:
    """Whether `device_targets` chooses its tokens: all its processors have a batched form."""
    return request.recipe is not None


def graph_key(requests: list[Request]) -> Hashable | None:
    """What a captured `device_targets` is valid for: requests with this key, whatever their prompts and seeds.

    Returns:
        None where no graph may hold the choice: a request is walked lazily, or keeps its scores or logits. Whoever
        keeps a graph has to keep its key: the recipes in it hold the tensors that the graph reads.
    """
    if not all(on_device(r) and not r.keeps for r in requests):
        return None
    return tuple((_kind(r), r.cuts) for r in requests)  # drafts pass through the cuts, whose tensors it holds as well


def device_targets(requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor, text: Text) -> Tensor:
    """The token that each request emits after each node, if it comes that far. No host reads, static shapes.

    Args:
        requests: N, all `on_device`; only what `graph_key` tells of them is read.
        tree: their candidates.
        logits: [N, M, V] after each node.
        start: [N] long, position of node 0.
        text: of the requests.

    Returns:
        [N, M] long
    """
    chosen = _chosen(requests, tree, logits, start, text)
    return _in_order(_by_request(chosen), chosen[0][2])


def node_scores(requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor, text: Text) -> Tensor:
    """Target scores after every node, whether or not it will be reached. [N, M, V] float32. See `device_targets`."""
    rows: dict[int, Tensor] = {}
    scores = None
    for group in _groups(requests, tree, logits, start, text):
        scores = group.scores().float()
        rows |= dict(zip(group.index, scores))
    return _in_order(rows, scores)


@dataclass(frozen=True)
class _Group:
    """Requests of one kind, and what stands behind their nodes.

    Attributes:
        index: their numbers.
        recipe: theirs; None is greedy decoding on bare logits.
        sample: draw, rather than take the best.
        nodes: n trees.
        logits: [n, M, V]
    """

    index: list[int]
    recipe: Recipe | None
    sample: bool
    nodes: Nodes
    logits: Tensor

    def scores(self) -> Tensor:
        """[n, M, V] float32; bare logits as they are, whose best is the same"""
        return self.logits if self.recipe is None else self.recipe(self.nodes, self.logits)

    def targets(self, scores: Tensor | None) -> Tensor:
        """The tokens that these scores give, or the group's own where there are none. [n, M] long"""
        if not self.sample or self.recipe is None:
            return best(self.scores() if scores is None else scores)
        if scores is None:
            return self.recipe.draw(self.nodes, self.logits)
        return draw(scores.flatten(0, 1), *self.nodes.keys).view(scores.shape[:2])


def _chosen(requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor, text: Text) -> list[Chosen]:
    """Every group's; requests that are walked lazily are in none."""
    out = []
    for group in _groups(requests, tree, logits, start, text):
        scores = group.scores() if any(requests[i].keeps for i in group.index) else None
        out.append((group.index, scores, group.targets(scores)))
    return out


def _groups(requests: list[Request], tree: DraftTree, logits: Tensor, start: Tensor, text: Text) -> Iterator[_Group]:
    kinds: dict[Hashable, list[int]] = {}
    for i, r in enumerate(requests):
        if on_device(r):
            kinds.setdefault(_kind(r), []).append(i)
    for index in kinds.values():
        one = requests[index[0]]
        nodes = Nodes(part_of(tree, index), pick(start, index), text.part(index))
        sample = one.sampling is not None and one.sampling.sample
        yield _Group(index, one.recipe if one.sampling else None, sample, nodes, pick(logits, index))


def _kind(request: Request) -> Hashable:
    """What requests have in common that are chosen together."""
    return None if request.sampling is None else (request.recipe, request.sampling.sample)


def text_of(requests: list[Request], device: torch.device) -> Text:
    """What the requests themselves know; a session's slots know it too, and stay where they are, as a graph needs."""
    numbers = [[len(r.prompt), 0 if r.sampling is None else r.sampling.seed] for r in requests]
    prompt, seed = torch.tensor(numbers, device=device).T
    read = [r for r in requests if r.recipe is not None and r.recipe.reads_text]
    tokens = prompt.new_zeros(len(requests), max((len(r.prompt) + len(r.output) for r in read), default=0))
    for i, r in enumerate(requests):
        if r.recipe is not None and r.recipe.reads_text:
            known = r.text()
            tokens[i, : known.shape[1]] = known[0]
    return Text(tokens, prompt, seed)


# ---- on the host


def _walk_lazily(request: Request, tree: DraftTree, i: int, logits: Tensor) -> Tensor:
    """Targets of the nodes on the path that request i takes, up to its end. logits: [M, V]. Returns [M] long"""
    tokens = tree.tokens[i].tolist()
    parents = list(range(-1, len(tokens) - 1)) if tree.parents is None else tree.parents[i].tolist()
    out, at = [NEVER] * len(tokens), 0
    while True:
        token = out[at] = request.next_token(logits[at : at + 1])
        children = (j for j in range(at + 1, len(tokens)) if parents[j] == at and tokens[j] == token)
        child = None if request.finish_reason else next(children, None)
        if child is None:
            return torch.tensor(out, device=tree.tokens.device)
        at = child


# ---- drafts


def _light(request: Request) -> Recipe:
    """What a guess passes: it does without cuts, which take long, and hardly ever decide what is the likeliest."""
    return request.cuts.light


def _draft_scores(requests: list[Request], logits: Tensor, which: Callable[[Request], Recipe]) -> Tensor:
    """The drafter's logits through every request's temperature and what else `which` names. [N, T, V] float32"""
    kinds: dict[Recipe, list[int]] = {}
    for i, r in enumerate(requests):
        kinds.setdefault(which(r), []).append(i)
    rows: dict[int, Tensor] = {}
    scores = None
    for recipe, index in kinds.items():
        scores = recipe(None, pick(logits, index))
        rows |= dict(zip(index, scores))
    return _in_order(rows, scores)


def _coupled(sampled: list[int], scores: Tensor, seed: Tensor, start: Tensor) -> Tensor:
    """The drafter's scores, perturbed with the very noise that will choose the tokens. [N, T, V]"""
    perturbed = noisy(*_draws(sampled, scores, seed, start)).view(-1, *scores.shape[1:])
    return _in_order(dict(enumerate(scores)) | dict(zip(sampled, perturbed)), perturbed)


def _scored(requests: list[Request], sampled: list[int], seed: Tensor, start: Tensor) -> condition.Scored:
    """Likewise of what follows each candidate: the noise of the candidates alone."""

    def noised(scores: Tensor, tokens: Tensor, place: Tensor) -> Tensor:
        flat, key, at = _draws(sampled, scores, seed, start, place)
        ids = pick(tokens, sampled).reshape(flat.shape)
        perturbed = noisy_among(flat, ids, key, at).view(-1, *scores.shape[1:])
        return _in_order(dict(enumerate(scores)) | dict(zip(sampled, perturbed)), perturbed)

    return condition.Scored(
        lambda logits: _draft_scores(requests, logits, _light),
        lambda logits: _draft_scores(requests, logits, lambda r: r.cuts.alone),
        noised,
        tuple(r.cuts.temperature for r in requests),
    )


def _guesses(sampled: list[int], scores: Tensor, seed: Tensor, start: Tensor) -> Tensor:
    """The best of these perturbed scores. [N, T] long"""
    drawn = draw(*_draws(sampled, scores, seed, start)).view(-1, scores.shape[1])
    if len(sampled) == len(scores):
        return drawn
    return _in_order(dict(enumerate(best(scores))) | dict(zip(sampled, drawn)), None)


def _draws(
    sampled: list[int], scores: Tensor, seed: Tensor, start: Tensor, place: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [R, V], seeds and positions [R] of all rows that are drawn.

    Rows are those of the positions `place` [T] after the anchor's next one; None takes them in order.
    """
    _, t, v = scores.shape
    place = steps(t, start.device) if place is None else place
    key, at = pick(seed, sampled), pick(start, sampled)[:, None] + 1 + place
    return pick(scores, sampled).reshape(-1, v), key[:, None].expand(-1, t).reshape(-1), at.reshape(-1)


def seeds_of(requests: list[Request], device: torch.device) -> Tensor:
    """The seed of each request's noise, 0 where there is none. [N] long"""
    return torch.tensor([0 if r.sampling is None else r.sampling.seed for r in requests], device=device)


def _in_order(rows: dict[int, Tensor], group: Tensor | None) -> Tensor:
    """Rows by their numbers 0, 1, ...; `group` where one group has them all, in that order already."""
    if group is not None and list(rows) == list(range(len(group))):
        return group
    return torch.stack([rows[i] for i in range(len(rows))])


def _by_request(chosen: list[Chosen]) -> dict[int, Tensor]:
    """Targets [M] by the request's number."""
    return {i: row for index, _, targets in chosen for i, row in zip(index, targets)}
