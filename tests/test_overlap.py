"""Groups kept by end probability, branches, and saved drafts against drafting after the fact."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from tiny import PROMPT, backbone, model_of, path_of, propose

from selfspec import rows
from selfspec.backbone import MASK
from selfspec.draft import DraftTree
from selfspec.draft.overlap import Groups, attach, branches, corrections, ends, find, hidden, keep, saved, survival
from selfspec.draft.tree import best_first
from selfspec.tops import best
from selfspec.verify.greedy import greedy

B = 4


def random_tree(generator, m, padding):
    parents = (torch.rand(m, generator=generator) * torch.arange(m)).long()
    parents[0] = -1
    tokens = torch.arange(m)
    tokens[m - padding :], parents[m - padding :] = -1, -1
    return DraftTree(tokens[None], parents[None])


@pytest.mark.parametrize("seed", range(6))
def test_end_probabilities_are_those_of_the_walk(seed):
    """Enumerate every outcome: at each node one of its children, or none, is the verifier's token."""
    generator = torch.Generator().manual_seed(seed)
    m, padding = 8, seed % 3
    tree = random_tree(generator, m, padding)
    parents = tree.parents[0].tolist()
    children = {i: [j for j in range(1, m - padding) if parents[j] == i] for i in range(m)}
    accept = torch.ones(1, m)
    for kids in children.values():
        shares = torch.rand(len(kids) + 1, generator=generator)
        for kid, share in zip(kids, shares / shares.sum()):
            accept[0, kid] = share
    wanted = [0.0] * m

    def go(node, chance):
        wanted[node] += chance * (1 - sum(float(accept[0, k]) for k in children[node]))
        for k in children[node]:
            go(k, chance * float(accept[0, k]))

    go(0, 1.0)
    got = ends(tree, survival(tree, accept))[0]
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)
    assert float(got.sum()) == pytest.approx(1, abs=1e-6)
    for budget in (1, 3, 12):
        nodes = keep(got[None], budget)[0].tolist()
        real = [x for x in nodes if x >= 0]
        assert (
            len(nodes) == budget and len(set(real)) == len(real) and nodes[len(real) :] == [-1] * (budget - len(real))
        )
        best = max(sum(got[list(c)]) for c in itertools.combinations(range(m), len(real)))
        assert float(got[real].sum()) == pytest.approx(float(best), abs=1e-6)


def test_a_chains_end_is_where_the_next_token_fails():
    chain = DraftTree(torch.tensor([[5, 1, 2, 3], [5, 1, -1, -1]]))
    accept = torch.tensor([[1.0, 0.9, 0.5, 0.8], [1.0, 0.9, 0.5, 0.8]])
    got = ends(chain, survival(chain, accept))
    assert got[0].tolist() == pytest.approx([0.1, 0.9 * 0.5, 0.9 * 0.5 * 0.2, 0.9 * 0.5 * 0.8])
    assert got[1].tolist() == pytest.approx([0.1, 0.9, 0, 0])
    assert keep(got, 3).tolist() == [[1, 3, 0], [1, 0, -1]]


def test_a_trees_own_scores_serve_as_survival():
    tree = best_first(torch.tensor([0]), torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0)), 9)
    got = ends(tree, tree.scores.exp())
    assert float(got.sum()) == pytest.approx(1, abs=1e-6) and (got >= 0).all()


def test_branches_take_the_second_candidate_at_the_first_risky_positions():
    logits = torch.log(
        torch.tensor(
            [
                [[0.9, 0.05, 0.03, 0.02], [0.4, 0.35, 0.15, 0.1], [0.1, 0.05, 0.8, 0.05], [0.3, 0.2, 0.1, 0.4]],
                [[0.9, 0.05, 0.03, 0.02], [0.9, 0.05, 0.03, 0.02], [0.9, 0.05, 0.03, 0.02], [0.3, 0.2, 0.1, 0.4]],
            ]
        )
    )
    chain = DraftTree(torch.cat([torch.tensor([[7], [7]]), logits.argmax(-1)], 1))
    got = branches(chain, corrections(chain, logits), 2)
    assert got.nodes.tolist() == [[1, 3, 4], [3, -1, 4]]
    assert got.tokens.tolist() == [[1, 0, MASK], [0, MASK, MASK]]
    assert branches(chain, corrections(chain, logits), 1).tokens.tolist() == [[1, MASK], [0, MASK]]
    short = DraftTree(chain.tokens[:, :3].clone())
    short.tokens[1, 2] = -1  # a ragged chain: no branch past its end
    assert branches(short, corrections(short, logits[:, :2]), 2).nodes.tolist() == [[1, -1, 2], [-1, -1, 1]]
    with pytest.raises(ValueError, match="chains"):
        corrections(DraftTree(chain.tokens, chain.tokens), logits)


def test_the_outcomes_group_is_found_and_one_with_the_bonus_goes_first():
    groups = Groups(torch.tensor([[2, 2, 0, -1]]).expand(5, 4), torch.tensor([[MASK, 9, 4, MASK]]).expand(5, 4))
    last, bonus = torch.tensor([2, 2, 0, 0, 1]), torch.tensor([9, 3, 4, 5, 9])
    group, hit = find(groups, last, bonus)
    assert hit.tolist() == [True, True, True, False, False]
    assert group[hit].tolist() == [1, 0, 2]


class Start(NamedTuple):
    anchor: torch.Tensor
    start: torch.Tensor


def committed(body, cache, prompts):
    """Commit prompts by one forward each. Returns their next tokens and lengths."""
    anchors = []
    for slot, prompt in enumerate(prompts):
        layout = rows.chain(torch.zeros(1, dtype=torch.long), len(prompt))
        out = body(layout, cache, torch.tensor([prompt]), first=slot)
        cache.commit([len(prompt)], slot)
        anchors.append(best(body.logits(out.clean[:, -1:]))[0, 0])
    return Start(torch.stack(anchors), torch.tensor([len(p) for p in prompts]))


def prepared(shift=False):
    """A body with a committed prompt, and the state after it."""
    body = backbone(path=path_of(model_of(), block_size=B, shift=shift, causal=shift))
    cache = body.new_cache(2, 40, 80)
    return body, cache, committed(body, cache, [PROMPT, PROMPT[:4]])


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("shift", [False, True])
@torch.no_grad()
def test_a_branch_is_the_draft_that_would_follow(shift, kind):
    """A group with a known bonus, beside the verification, drafts what a sequential draft does after it."""
    body, cache, state = prepared(shift)
    logits = propose(body, cache, state.anchor, state.start, B, body.path.config)
    tree = best_first(state.anchor, logits, 6)
    if kind == "chain":
        tree = DraftTree(torch.cat([state.anchor[:, None], logits.argmax(-1)], 1))
    nodes = torch.tensor([[2, 0, -1], [1, 3, 2]])
    groups = Groups(nodes, torch.tensor([[11, 4, MASK], [MASK, 7, 5]]))
    clean = rows.chain(state.start, B) if tree.parents is None else rows.tree(state.start, tree.parents, tree.ancestors)
    layout, inputs = attach(clean, groups, B, shift)
    out = body(layout, cache, tree.tokens, inputs)
    last, bonus = torch.tensor([2, 3]), torch.tensor([11, 7])
    got, hit, *_ = saved(body, out.draft, groups, last, bonus, body.path.config, lambda h, b: h * math.nan)
    assert hit.all()
    for i in range(2):
        path = [j for j in range(tree.n_nodes) if tree.ancestors[i, last[i], j]]
        fresh = body.new_cache(1, 40, 20)
        text = (PROMPT, PROMPT[:4])[i] + tree.tokens[i, path].tolist()
        after = committed(body, fresh, [text])
        want = propose(body, fresh, bonus[i : i + 1], after.start, B, body.path.config)
        torch.testing.assert_close(got[i : i + 1], want, rtol=0, atol=1e-9)


@torch.no_grad()
def test_kept_groups_draft_what_they_would_among_all():
    body, cache, state = prepared()
    logits = propose(body, cache, state.anchor, state.start, B, body.path.config)
    tree = best_first(state.anchor, logits, 6)
    clean = rows.tree(state.start, tree.parents)
    every = hidden(torch.arange(7).expand(2, -1))
    layout, inputs = attach(clean, every, B)
    out = body(layout, cache, tree.tokens, inputs)
    accepted = greedy(tree, body.logits(out.clean))
    want, there, *_ = saved(body, out.draft, every, accepted.last, accepted.bonus, body.path.config)
    assert there.all()
    other = (accepted.last + 1) % tree.n_nodes
    for nodes, hits in ((torch.stack([other, accepted.last], 1), True), (other[:, None], False)):
        groups = hidden(nodes)
        layout, inputs = attach(clean, groups, B)
        out = body(layout, cache, tree.tokens, inputs)
        got, hit, *_ = saved(body, out.draft, groups, accepted.last, accepted.bonus, body.path.config)
        assert hit.tolist() == [hits, hits]
        if hits:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
            double, *_ = saved(
                body, out.draft, groups, accepted.last, accepted.bonus, body.path.config, lambda h, b: 2 * h
            )
            torch.testing.assert_close(double, 2 * got, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_strict_reuse_asks_for_the_groups_own_guess_of_the_bonus():
    body, cache, state = prepared()
    chain = DraftTree(torch.tensor([[5, 6], [7, 8]]))
    groups = Groups(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[MASK, 3], [MASK, 3]]))
    layout, inputs = attach(rows.chain(state.start, 2), groups, B)
    draft = body(layout, cache, chain.tokens, inputs).draft
    guess = body.logits(draft[:, :1]).argmax(-1)[:, 0]
    for last, bonus, hits in ((0, guess, True), (0, (guess + 1) % 24, False), (1, torch.tensor([3, 3]), True)):
        ends_at = torch.full_like(bonus, last)
        assert saved(body, draft, groups, ends_at, bonus, body.path.config)[1].all()
        assert (saved(body, draft, groups, ends_at, bonus, body.path.config, strict=True)[1] == hits).all()
    shifted = path_of(model_of(), block_size=B, shift=True, causal=True).config
    with pytest.raises(ValueError, match="shifted"):
        saved(body, draft, groups, ends_at, bonus, shifted, strict=True)
