"""Drawn trees of other shapes keep plain decoding's law; a shape that has seen a draw does not."""

import pytest
import torch
from test_tree_rules import costs, ended
from test_verifiers import PIPELINES, Model, filled, off, tree_law

from selfspec.draft import cut, first
from selfspec.draft.drawn import drawn, replay
from selfspec.draft.trees import TAPS, Bastion, CaDDTree, DDTree, OPTTree


def by(rule):
    return lambda anchor, log_q, budget, order: replay(rule(anchor, log_q.float(), budget), order)


def crooked():
    """Estimates far from the marginals, that put later ranks and depths first."""
    rule = TAPS(2)
    rule.trials += 90
    rule.hits += 90 * torch.rand(rule.hits.shape, generator=torch.Generator().manual_seed(0))
    return rule


SHAPES = {
    "caddtree": ended(CaDDTree(), costs(lambda rows: 1 + 0.15 * rows, 0.0, 4)),
    "bastion": ended(Bastion(2, 1), costs(lambda rows: 1 + 0.1 * rows, 0.5, 4)),
    "taps": crooked(),
    "opt-tree": OPTTree(),
}


@pytest.mark.parametrize("name", ["bare", "top_k"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_all_rules_have_plain_decodings_law(shape, name, monkeypatch):
    model = Model(PIPELINES[name], 2)
    assert off(tree_law(model, 4, monkeypatch, by(SHAPES[shape])), model.law()) < 1e-12


def test_a_shape_that_has_seen_a_draw_breaks_the_law(monkeypatch):
    def peeking(anchor, log_q, budget, order):
        tree = filled(anchor, log_q, budget, order)
        return cut(tree, torch.where(tree.tokens[:, 1] == 0, 1, tree.n_nodes))  # drops the tree if the draw was 0

    worst = 0.0
    for seed in range(2):
        model = Model([], 2, seed)
        worst = max(worst, off(tree_law(model, 4, monkeypatch, peeking), model.law()))
    assert worst > 1e-3


def test_places_are_filled_in_the_order_of_drawing():
    shape = DDTree()(torch.tensor([3]), torch.log(torch.tensor([[[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]])), 6)
    order = torch.tensor([[[2, 0, 1], [1, 2, 0]]])
    tree = replay(shape, order)
    assert torch.equal(tree.parents, shape.parents) and torch.equal(tree.scores, shape.scores)
    seen = {}
    for node in range(1, 7):
        parent, depth = int(tree.parents[0, node]), int(tree.depths[0, node])
        children = seen.setdefault(parent, [])
        assert int(tree.tokens[0, node]) == order[0, depth - 1, len(children)]
        children.append(node)
    assert max(map(len, seen.values())) > 1


def test_drawn_trees_take_any_shape():
    scores, at = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 9])
    for rule in (DDTree(), OPTTree(), TAPS(3)):
        tree, shape = drawn(torch.tensor([1, 2]), scores, at, at, 6, rule), rule(torch.tensor([1, 2]), scores, 6)
        assert torch.equal(tree.parents, shape.parents) and torch.allclose(tree.scores, shape.scores)
        assert not torch.equal(tree.tokens, shape.tokens) and tree.probs.shape == scores.shape
        short = first(tree, 4)
        assert short.sizes.tolist() == [4, 4] and torch.equal(short.ancestors, tree.ancestors[:, :4, :4])
