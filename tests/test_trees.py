"""Best-first trees against enumeration of every prefix, and the walk on trees and chains."""

import itertools
import math
import random

import pytest
import torch

from selfspec.draft import DraftTree, chain_of, repeat_parents
from selfspec.draft.tree import best_first
from selfspec.verify.greedy import greedy, walk


def prefixes(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The token path of every node beside the root, in node order; None for padding."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    out = []
    for node in range(1, len(tokens)):
        if tokens[node] < 0:
            assert parents[node] == -1
            continue
        path = []
        while node > 0:
            path.append(tokens[node])
            assert parents[node] < node
            node = parents[node]
        assert node == 0
        out.append(tuple(reversed(path)))
    return out


def by_enumeration(logits: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Log-probability of every prefix of every length. logits: [T, V]"""
    logp = logits.double().log_softmax(-1).tolist()
    scores = {}
    for depth in range(1, len(logp) + 1):
        for path in itertools.product(range(len(logp[0])), repeat=depth):
            scores[path] = math.fsum(logp[i][t] for i, t in enumerate(path))
    return scores


@pytest.mark.parametrize("seed", range(12))
def test_best_first_takes_the_most_probable_prefixes(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    depth, vocab, budget = draw.randint(1, 4), draw.randint(2, 5), draw.randint(1, 20)
    logits = torch.randn(2, depth, vocab) * draw.choice([0.3, 2.0])
    tree = best_first(torch.tensor([1, 0]), logits, budget)
    assert tree.tokens.shape == tree.parents.shape == (2, budget + 1)
    assert tree.tokens[:, 0].tolist() == [1, 0]
    for row in range(2):
        scores = by_enumeration(logits[row])
        got = prefixes(tree, row)
        assert len(set(got)) == len(got) == min(budget, len(scores))
        wanted = sorted(scores.values(), reverse=True)[: len(got)]
        assert [scores[p] for p in got] == pytest.approx(wanted, abs=1e-5)  # the best, and best first


@pytest.mark.parametrize("budget", [3, 12, 40])
def test_a_banned_token_enters_no_tree(budget):
    logits = torch.randn(1, 3, 3)
    logits[..., 1] = float("-inf")
    tree = best_first(torch.tensor([1]), logits, budget)
    got = prefixes(tree, 0)
    assert all(1 not in path for path in got)
    assert len(got) == min(budget, 2 + 4 + 8)


def test_a_tree_of_depth_nought_is_all_padding():
    tree = best_first(torch.tensor([3]), torch.empty(1, 0, 5), 4)
    assert tree.tokens.tolist() == [[3, -1, -1, -1, -1]] and tree.parents.tolist() == [[-1] * 5]


def test_tree_and_chain_agree_on_a_tree_of_width_one():
    torch.manual_seed(0)
    for _ in range(50):
        tokens, targets = torch.randint(0, 2, (4, 6)), torch.randint(0, 2, (4, 6))
        chain, spelt = walk(DraftTree(tokens), targets), walk(DraftTree(tokens, repeat_parents(6, tokens)), targets)
        assert torch.equal(chain.count, spelt.count)
        assert torch.equal(chain.bonus, spelt.bonus) and torch.equal(chain.last, spelt.last)
        for i, count in enumerate(chain.count.tolist()):
            assert torch.equal(chain.rows[i, :count], spelt.rows[i, :count])
            assert torch.equal(chain.tokens[i, :count], spelt.tokens[i, :count])


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_is_what_plain_decoding_would_do(seed):
    """Follow children by hand; the tokens emitted are the targets along the path."""
    draw = random.Random(seed)
    m = draw.randint(1, 9)
    parents = [-1] + [draw.randint(-1, i - 1) for i in range(1, m)]
    tokens = [draw.randint(0, 2)] + [draw.randint(0, 2) for _ in range(1, m)]
    targets = [draw.randint(0, 2) for _ in range(m)]
    node, path = 0, [0]
    while True:
        node = next((j for j in range(1, m) if parents[j] == node and tokens[j] == targets[node]), None)
        if node is None:
            break
        path.append(node)
    got = walk(DraftTree(torch.tensor([tokens]), torch.tensor([parents])), torch.tensor([targets]))
    count = int(got.count)
    assert got.rows[0, :count].tolist() == path and count == len(path)
    assert got.tokens[0, :count].tolist() == [targets[i] for i in path]
    assert int(got.bonus) == targets[path[-1]] and int(got.last) == path[-1]


def test_padding_is_never_accepted():
    """Even where the verifier's token, or a padded position, would seem to match it."""
    tokens = torch.tensor([[5, 7, -1, -1]])
    parents = torch.tensor([[-1, 0, -1, -1]])
    got = walk(DraftTree(tokens, parents), torch.tensor([[7, -1, -1, -1]]))
    assert int(got.count) == 2 and got.rows[0, :2].tolist() == [0, 1]
    assert int(walk(DraftTree(torch.tensor([[5, -1, -1]])), torch.tensor([[3, 3, 3]])).count) == 1


def test_ties_go_to_the_first_index():
    logits = torch.zeros(1, 3, 6)
    logits[0, :, [2, 4]] = 1.0
    got = greedy(DraftTree(torch.tensor([[0, 2, 4]])), logits)
    assert int(got.count) == 2 and got.tokens[0, :2].tolist() == [2, 2]
    assert chain_of(torch.tensor([0]), logits[:, :2]).tokens.tolist() == [[0, 2, 2]]
