"""Tree rules against enumeration of every prefix-closed tree, of every prefix, and against counting by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from selfspec.draft import DraftTree, cut
from selfspec.draft.trees import ENDS, TAPS, TREES, Bastion, CaDDTree, DDTree, OPTTree
from selfspec.draft.trees.bastion import MOST, Roofline
from selfspec.draft.trees.domino import DominoTree, over_candidates
from selfspec.draft.trees.taps import BINS
from selfspec.paced import Paced
from selfspec.plan import RULES
from selfspec.rows import ancestors
from selfspec.verify.greedy import walk

ANCHOR = torch.tensor([1, 2])


def logits_of(seed, depth=3, vocab=4, scale=1.5):
    return scale * torch.randn(2, depth, vocab, generator=torch.Generator().manual_seed(seed))


def nodes_of(tree, row):
    """Token path of every node but the anchor -> its score."""
    out, paths = {}, {0: ()}
    for node in range(1, int(tree.sizes[row])):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node
        paths[node] = (*paths[parent], int(tree.tokens[row, node]))
        out[paths[node]] = float(tree.scores[row, node])
    assert len(out) == int(tree.sizes[row]) - 1  # no path twice
    return out


def closed_trees(vocab, depth):
    """Every prefix-closed set of paths."""
    if not depth:
        return [frozenset()]
    below = closed_trees(vocab, depth - 1)
    out = []
    for choice in itertools.product([None, *below], repeat=vocab):
        out.append(frozenset(p for t, s in enumerate(choice) if s is not None for p in [(t,), *((t, *q) for q in s)]))
    return out


def staircase(rows):
    """A measured table's shape: flat, then steps."""
    return 1.0 + 0.35 * (rows > 2) + 0.5 * (rows > 4) + 1.5 * (rows > 8)


def costs(latency, fixed, budget):
    """Ms of rounds that verify 1..budget + 1 rows."""
    return torch.tensor([fixed + latency(m + 1) for m in range(budget + 1)])


def ended(rule, table):
    """Best-first trees that end where a rule says."""

    def build(anchor, logits, budget):
        tree = DDTree()(anchor, logits, budget)
        return cut(tree, rule(tree.scores, table))

    return build


def check(tree, budget):
    assert tree.tokens.shape == tree.parents.shape == tree.scores.shape == (2, budget + 1)
    assert torch.equal(tree.tokens[:, 0], ANCHOR)
    padding = torch.arange(budget + 1) >= tree.sizes[:, None]
    assert (tree.tokens[padding] == -1).all() and (tree.parents[padding] == -1).all()
    assert (tree.scores[padding] == -math.inf).all() and (tree.depths[padding] == 0).all()
    assert torch.equal(tree.ancestors, ancestors(tree.parents))
    assert torch.equal(tree.depths, ancestors(tree.parents).sum(-1) - 1)


BUILT = {
    "ddtree": DDTree,
    "caddtree": lambda: ended(CaDDTree(), costs(staircase, 0.5, 12)),
    "bastion": lambda: ended(Bastion(2, 1), costs(lambda r: 1 + 0.2 * r, 0.5, 12)),
    "taps": lambda: TAPS(3),
    "opt-tree": OPTTree,
    "dominotree": lambda: DominoTree(lambda tokens, d: torch.zeros(*tokens.shape, 4)),
}


@pytest.mark.parametrize("name", BUILT)
def test_every_rule_gives_a_whole_tree_and_bans_what_is_banned(name):
    assert set(BUILT) - {"dominotree"} == {*TREES, *ENDS} == set(RULES) and not TREES.keys() & ENDS.keys()
    logits = logits_of(3)
    logits[..., 2] = -math.inf
    tree = BUILT[name]()(ANCHOR, logits, 12)
    check(tree, 12)
    assert not (tree.tokens[:, 1:] == 2).any()


def test_cutting_keeps_the_first_nodes_and_pads_the_rest():
    whole = DDTree()(ANCHOR, logits_of(0), 9)
    short = cut(whole, torch.tensor([1, 6]))
    check(short, 9)
    assert short.sizes.tolist() == [1, 6]
    assert torch.equal(short.tokens[1, :6], whole.tokens[1, :6])
    given = cut(DraftTree(whole.tokens, whole.parents, None, whole.scores, whole.ancestors, whole.depths), short.sizes)
    assert torch.equal(given.paths, ancestors(given.parents))


@pytest.mark.parametrize("seed", range(4))
def test_caddtree_is_the_fastest_of_all_trees(seed):
    logits = logits_of(seed, depth=2, vocab=3)
    fixed = 0.5 * seed
    tree = ended(CaDDTree(), costs(staircase, fixed, 12))(ANCHOR, logits, 12)
    check(tree, 12)
    q = logits.double().softmax(-1)
    for row in range(2):
        values = {}
        for shape in closed_trees(3, 2):
            gain = 1 + sum(math.prod(float(q[row, i, t]) for i, t in enumerate(path)) for path in shape)
            values[shape] = gain / (fixed + staircase(len(shape) + 1))
        assert values[frozenset(nodes_of(tree, row))] == pytest.approx(max(values.values()), rel=1e-6)


@pytest.mark.parametrize("slope,smallest,bucket", [(0.02, 1, 1), (0.1, 3, 1), (0.4, 4, 4), (0.0, 2, 8)])
def test_bastion_grows_while_the_next_node_pays(slope, smallest, bucket):
    table = costs(lambda rows: 1 + slope * rows + 0.002 * rows**2, 0.7, 40)
    logits = logits_of(7, depth=4)
    tree, whole = ended(Bastion(smallest, bucket), table)(ANCHOR, logits, 40), DDTree()(ANCHOR, logits, 40)
    check(tree, 40)
    c = table.tolist()
    for row in range(2):
        p = whole.scores[row].exp().tolist()
        m, total = 1, 1.0
        while m <= 40 and (m < smallest or p[m] * c[m - 1] > total * (c[m] - c[m - 1])):
            total += p[m]
            m += 1
        assert int(tree.sizes[row]) == max(m // bucket * bucket, min(m, smallest))


def test_the_roofline_learns_the_machine_from_what_it_sees():
    ideal = dict(weight_bytes=3e8, kv_bytes=5e4, flops_per_row=3e8, bandwidth=4e9, throughput=6e11, width=2e4)
    truth, model = Roofline(**ideal, fit=(1.7, 0.2, 3.0, 0.05)), Roofline(**ideal)
    noise = np.random.default_rng(0)
    for rows in (1, 4, 16, 64, 256, 512, 1024):
        for context in (128, 1024, 4096):
            for _ in range(5):
                model.observe(rows, context, float(truth(rows, context)) * noise.normal(1, 0.01))
    before = abs(model(200, 2048) / truth(200, 2048) - 1)
    model.calibrate()
    for rows in (1, 8, 32, 200, 800):
        assert model(rows, 2048) == pytest.approx(float(truth(rows, 2048)), rel=0.05)
    assert before > 0.2
    assert all(x >= 0 for x in model.fit)


def test_a_table_says_how_time_grows_and_rounds_how_fast_the_machine_is():
    """It was measured on a quiet machine: rounds of one size, twice as slow, say so of all sizes and requests."""
    model, rows = Roofline(1e6, 1e2, 1e6, 1e6, 1e6, 1e2), np.arange(1, 65)
    paced = Paced(model)
    for n in (1, 4):
        paced.begin(n, 256, False, 1 + 0.1 * n * rows, 0.5)
    assert model(24, 256) == pytest.approx(3.4, rel=0.05) and model(24, 256, 4) == pytest.approx(10.6, rel=0.05)
    assert paced.times(1, 256, False, 24)[-1] == pytest.approx(3.9, rel=0.05)
    assert not paced.observe(1, 16, 256, False, 2 * 2.6, 0.9)  # the first of a shape sets up
    assert [paced.observe(1, 16, 256, False, 2 * 2.6, 0.9) for _ in range(5)] == [True, True, False, True, False]
    assert model(24, 256) == pytest.approx(6.8, rel=0.05) and model(24, 256, 4) == pytest.approx(21.2, rel=0.05)
    for size in (1, 3, 7, 32, 64) * 8:  # and as many sizes say that rows cost more than was thought
        paced.observe(1, size, 256, False, 1.0 + size, 0.9)
    assert paced.times(1, 256, False, 64)[[6, 31, 63]].tolist() == pytest.approx([8.9, 33.9, 65.9], rel=0.15)
    for i in range(2 * MOST):
        model.observe(i, 512, 1.0)
    assert len(model.seen) == MOST and (2 * MOST - 1, 512, 1) in model.seen


def test_taps_counts_only_nodes_whose_parent_was_accepted():
    logits = torch.log(torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]]))
    tokens, parents = torch.tensor([[2, 0, 1, 0, 0]]), torch.tensor([[-1, 0, 0, 1, 2]])
    q = torch.tensor([[1, 0.5, 0.3, 0.6, 0.6]])
    tree = DraftTree(tokens, parents, marginals=q.log())
    rule, live = TAPS(2, weight=2.0, decay=1.0), torch.tensor([True])
    own = rule(ANCHOR[:1], logits, 5)
    wanted = [float(logits[0, d - 1, t]) for d, t in zip(own.depths[0, 1:], own.tokens[0, 1:])]
    assert own.marginals[0, 1:].tolist() == pytest.approx(wanted)
    for _ in range(3):
        rule.observe(tree, walk(tree, torch.tensor([[1, 0, 2, 0, 0]])).rows, live)  # accepts node 2, refuses its child
    rule.observe(tree, walk(tree, torch.tensor([[1, 0, 2, 0, 0]])).rows, ~live)  # of a text that has ended
    none = DraftTree(torch.tensor([[2, -1, -1, -1, -1]]), parents, marginals=q.log())
    rule.observe(none, walk(none, torch.tensor([[1, 0, 2, 0, 0]])).rows, live)  # of one that no draft was left
    cells = {d: {} for d in range(2)}
    for i in rule.trials.nonzero().flatten().tolist():
        cells[i // BINS][i % BINS] = (float(rule.hits[i]), float(rule.trials[i]))
    assert cells == {0: {1: (0.0, 3.0), 2: (3.0, 3.0)}, 1: {1: (0.0, 3.0)}}  # -log 0.5, 0.3 and 0.6 over 0.5
    rates = rule.rates(torch.tensor([[[0.5, 0.3], [0.6, 0.05]]]).log())
    assert rates.flatten().tolist() == pytest.approx([1 / 5, 3.6 / 5, 1.2 / 5, 0.05])


@pytest.mark.parametrize("seed", range(3))
def test_taps_takes_the_best_tree_of_the_budget_under_its_estimates(seed):
    """Also where the estimates turn the drafter's order around."""
    logits, budget = logits_of(seed, depth=2, vocab=3), 4
    rule = TAPS(2)
    generator = torch.Generator().manual_seed(seed)
    rule.trials += torch.randint(50, 100, rule.trials.shape, generator=generator)
    rule.hits += rule.trials * torch.rand(rule.hits.shape, generator=generator)
    tree = rule(ANCHOR, logits, budget)
    check(tree, budget)
    a = rule.rates(logits.log_softmax(-1)).double()
    for row in range(2):
        value = {
            shape: sum(math.prod(float(a[row, i, t]) for i, t in enumerate(path)) for path in shape)
            for shape in closed_trees(3, 2)
            if len(shape) <= budget
        }
        assert value[frozenset(nodes_of(tree, row))] == pytest.approx(max(value.values()), rel=1e-5)


@pytest.mark.parametrize("budget", [1, 6, 30, 90])
def test_an_opt_tree_is_the_best_first_tree(budget):
    logits = logits_of(budget)
    levels, heap = OPTTree()(ANCHOR, logits, budget), DDTree()(ANCHOR, logits, budget)
    check(levels, budget)
    for row in range(2):
        assert nodes_of(levels, row) == pytest.approx(nodes_of(heap, row), abs=1e-6)


@pytest.mark.parametrize("budget", [4, 30])
def test_candidates_with_their_transitions_give_the_conditioned_tree(budget):
    depth, vocab = 3, 4
    logits, head = logits_of(1), 2 * torch.randn(depth, vocab, vocab, generator=torch.Generator().manual_seed(2))
    want = DominoTree(lambda tokens, d: head[d][tokens], budget)(ANCHOR, logits, budget)
    candidates = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(i)) for i in range(6)])
    candidates = candidates.view(2, depth, vocab)
    before = torch.cat([ANCHOR[:, None, None].expand(2, 1, vocab), candidates[:, :-1]], 1)
    log_q = torch.stack([(logits[:, d, None] + head[d][before[:, d]]).log_softmax(-1) for d in range(depth)], 1)
    table = log_q.gather(3, candidates[:, :, None].expand(-1, -1, vocab, -1))
    tree = over_candidates(ANCHOR, candidates, table, budget)
    check(tree, budget)
    for row in range(2):
        assert nodes_of(tree, row) == pytest.approx(nodes_of(want, row), abs=1e-6)


@pytest.mark.parametrize("budget,width", [(5, 5), (20, 20), (100, 100), (20, 2)])
def test_dominotree_takes_the_most_probable_conditioned_paths(budget, width):
    depth, vocab = 3, 4
    logits, head = logits_of(1), 2 * torch.randn(depth, vocab, vocab, generator=torch.Generator().manual_seed(2))
    tree = DominoTree(lambda tokens, d: head[d][tokens], width)(ANCHOR, logits, budget)
    check(tree, budget)
    for row in range(2):
        scores = {}
        for n in range(1, depth + 1):
            for path in itertools.product(range(vocab), repeat=n):
                before = (int(ANCHOR[row]), *path)
                scores[path] = sum(
                    float((logits[row, d] + head[d, before[d]]).log_softmax(-1)[t]) for d, t in enumerate(path)
                )
        got = nodes_of(tree, row)
        assert all(scores[path] == pytest.approx(s, abs=1e-5) for path, s in got.items())
        best = sorted(scores.values(), reverse=True)[: min(budget, len(scores))]
        if width >= budget:
            assert sorted(got.values(), reverse=True) == pytest.approx(best, abs=1e-5)
        else:
            assert sum(map(math.exp, got.values())) <= sum(map(math.exp, best))
            assert max(got.values()) == pytest.approx(best[0], abs=1e-5)
