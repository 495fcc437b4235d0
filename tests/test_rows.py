"""The attention rule against nested loops that know nothing of its implementation, and the layout constructors."""

import random
from dataclasses import replace

import pytest
import torch

from selfspec import rows
from selfspec.rows import RowLayout, ancestors, attention_rule, block, chain, depths, overlapped, tree


def path_to(parents: list[int], node: int) -> set[int]:
    """Clean rows from a root to a node."""
    path = set()
    while node >= 0:
        path.add(node)
        node = parents[node]
    return path


def brute_force(layout: RowLayout, n_keys: int, window: int | None) -> torch.Tensor:
    """The rule, one cell at a time, from the sentence in the documentation."""
    n, r, c = layout.n_requests, layout.n_rows, layout.n_clean
    out = torch.zeros(n, r, n_keys, dtype=torch.bool)
    for b in range(n):
        start = int(layout.start[b])
        parents = list(range(-1, c - 1)) if layout.parents is None else layout.parents[b].tolist()
        for i in range(r):
            at = int(layout.positions[b, i])
            for t in range(n_keys):
                if t >= start + r:
                    continue  # stale
                j = t - start
                if j < 0:
                    key_at = t if layout.key_positions is None else int(layout.key_positions[b, t])
                    yes = i < c or key_at < int(layout.limit[b, i - c])
                else:
                    key_at = int(layout.positions[b, j])
                    if i < c:
                        yes = j < c and j in path_to(parents, i)
                    elif j < c:
                        yes = j in path_to(parents, int(layout.attach[b, i - c]))
                    else:
                        mine, its = int(layout.group[b, i - c]), int(layout.group[b, j - c])
                        yes = i == j or (mine == its and mine >= 0 and (j <= i or not layout.causal))
                if layout.segments is not None:
                    theirs = layout.key_segments[b, t] if j < 0 else layout.segments[b, j]
                    yes = yes and int(layout.segments[b, i]) == int(theirs)
                if window is not None:
                    yes = yes and at - key_at < window
                out[b, i, t] = yes
    return out


def random_layout(draw: random.Random) -> RowLayout:
    n, c, d = draw.randint(1, 3), draw.randint(0, 6), draw.randint(0, 7)
    if c + d == 0:
        c = 1
    start = torch.tensor([draw.randint(0, 9) for _ in range(n)])
    parents = None
    if draw.random() < 0.7 and c:
        parents = torch.tensor([[draw.randint(-1, i - 1) if i else -1 for i in range(c)] for _ in range(n)])
    clean = chain(start, c) if parents is None else tree(start, parents)
    longest = int(start.max())
    extra = {}
    if draw.random() < 0.4:
        extra["key_positions"] = torch.tensor([[draw.randint(0, 12) for _ in range(longest + 1)] for _ in range(n)])
    if draw.random() < 0.4:
        extra["segments"] = torch.tensor([[draw.randint(0, 1) for _ in range(c + d)] for _ in range(n)])
        extra["key_segments"] = torch.tensor([[draw.randint(0, 1) for _ in range(longest + 1)] for _ in range(n)])
    if d == 0:
        return replace(clean, **extra)
    grid = [[None] * d for _ in range(n)]
    return replace(
        clean,
        positions=torch.cat([clean.positions, torch.tensor([[draw.randint(0, 14) for _ in g] for g in grid])], 1),
        attach=torch.tensor([[draw.randint(-1, c - 1) for _ in g] for g in grid]),
        group=torch.tensor([[draw.randint(-1, 2) for _ in g] for g in grid]),
        limit=torch.tensor([[draw.randint(0, 10) for _ in g] for g in grid]),
        causal=draw.random() < 0.5,
        **extra,
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_rule_is_what_the_loops_say(seed):
    draw = random.Random(seed)
    layout = random_layout(draw)
    stale = draw.randint(0, 4)
    n_keys = int(layout.start.max()) + layout.n_rows + stale
    for window in (None, 1, draw.randint(2, 6)):
        assert torch.equal(attention_rule(layout, n_keys, window), brute_force(layout, n_keys, window))


@pytest.mark.parametrize("seed", range(5))
def test_the_layers_below_the_entry_see_the_same_clean_rows(seed):
    draw = random.Random(1000 + seed)
    layout = random_layout(draw)
    while not layout.n_clean or not layout.n_draft:
        layout = random_layout(draw)
    c, n_keys = layout.n_clean, int(layout.start.max()) + layout.n_rows
    whole, lower = attention_rule(layout, n_keys)[:, :c], attention_rule(layout.clean(), n_keys)
    assert torch.equal(whole, lower)


def test_no_row_is_left_without_a_key():
    """A softmax over nothing is nan, and nan in one row's value spreads through 0 * nan."""
    for seed in range(40):
        layout = random_layout(random.Random(seed))
        layout = replace(layout, segments=None, key_segments=None)
        assert attention_rule(layout, int(layout.start.max()) + layout.n_rows, 1).any(-1).all()


def test_positions_of_a_chain_and_a_block():
    start = torch.tensor([0, 7])
    assert chain(start, 3).positions.tolist() == [[0, 1, 2], [7, 8, 9]]
    drafts = block(start, 3)
    assert drafts.n_clean == 0 and drafts.positions.tolist() == [[0, 1, 2], [7, 8, 9]]
    assert drafts.limit.tolist() == [[0] * 3, [7] * 3] and drafts.attach.unique().tolist() == [-1]


def test_positions_of_tree_nodes_are_start_plus_depth():
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, -1]])
    assert depths(parents).tolist() == [[0, 1, 1, 2, 3, 2, 0]]
    assert tree(torch.tensor([5]), parents).positions.tolist() == [[5, 6, 6, 7, 8, 7, 5]]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 33])
def test_ancestors_of_long_chains_and_random_trees(n):
    draw = random.Random(n)
    trees = [list(range(-1, n - 1)), [draw.randint(-1, i - 1) if i else -1 for i in range(n)]]
    got = ancestors(torch.tensor(trees))
    for b, parents in enumerate(trees):
        for i in range(n):
            assert set(got[b, i].nonzero()[:, 0].tolist()) == path_to(parents, i)


def test_a_chain_is_a_tree_of_width_one():
    start = torch.tensor([2, 0])
    spelt = tree(start, torch.arange(-1, 4).expand(2, -1))
    assert torch.equal(attention_rule(chain(start, 5), 9, 3), attention_rule(spelt, 9, 3))


def test_overlapped_groups_stand_one_past_their_node():
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]])
    start = torch.tensor([4, 1])
    layout = overlapped(tree(start, parents), torch.tensor([[0, 3], [2, -1]]), 2, causal=True)
    assert layout.positions[:, 4:].tolist() == [[5, 6, 7, 8], [4, 5, 2, 3]]
    assert layout.attach.tolist() == [[0, 0, 3, 3], [2, 2, -1, -1]]
    assert layout.group.tolist() == [[0, 0, 1, 1], [0, 0, -1, -1]]
    assert layout.limit.tolist() == [[4] * 4, [1] * 4] and layout.causal
    n_keys = 4 + 8
    assert torch.equal(attention_rule(layout, n_keys), brute_force(layout, n_keys, None))
    seen = attention_rule(layout, n_keys)[0, 6]  # first row of the group on node 3: its path is 0, 2, 3
    assert seen.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 6, 7, 10]


def test_a_training_group_does_not_see_its_own_answer():
    """The limit is the anchor's position: packed documents and later prefix positions stay hidden."""
    layout = replace(block(torch.tensor([8]), 3), limit=torch.tensor([[5, 5, 5]]), positions=torch.tensor([[5, 6, 7]]))
    assert attention_rule(layout, 11)[0, 0, :8].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_paths_of_known_ancestors_are_the_same():
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, -1], [-1, 0, 1, 2, 3, 4, 5]])
    assert torch.equal(rows.paths(parents, ancestors(parents)), rows.paths(parents))
    wrong = torch.eye(7, dtype=torch.bool).expand(2, 7, 7)
    assert not torch.equal(rows.paths(parents, wrong), rows.paths(parents))  # it is what is read


def test_shared_constants_hold_what_they_say_at_every_size():
    cpu = torch.device("cpu")
    for n in (0, 1, 2, 3, 8, 9, 100):
        assert rows.steps(n, cpu).tolist() == list(range(n))
        assert rows.filled(-1, n, cpu).tolist() == [-1] * n
    with torch.inference_mode():
        assert not rows.steps(1 << 12, cpu).is_inference()  # training may come later


def test_a_block_knows_which_rows_see_which():
    for causal in (False, True):
        layout = rows.block(torch.tensor([3, 5]), 4, causal)
        assert torch.equal(rows.row_to_row(layout), rows.row_to_row(replace(layout, seen=None)))
