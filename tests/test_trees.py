"""Best-first trees against enumeration of every prefix, and the walk on trees and chains."""

import itertools
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from selfspec import rows
from selfspec.draft import DraftTree, chain_of, repeat_parents
from selfspec.draft.tree import best_first, by_heap, ranked
from selfspec.verify import Accepted
from selfspec.verify.greedy import greedy, walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def candidates(kind: str, generator: torch.Generator, n: int, t: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranked log-probabilities and tokens. [N, T, K]"""
    logits = torch.randn(n, t, 3 * k, generator=generator) * 2
    if kind == "ties":
        logits = logits.round()
    if kind == "certain":  # log-probabilities of exactly 0: children tie with their parents
        logits[..., 0] += 40 * torch.randint(0, 2, (n, t), generator=generator)
    if kind == "banned":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -math.inf
        logits[..., 0] = 0
    return ranked(logits, k)


@pytest.mark.parametrize(
    "kind,t,k,budget",
    [
        *(
            (kind, *sizes)
            for kind in ("plain", "ties", "certain", "banned")
            for sizes in ((1, 1, 1), (4, 3, 7), (15, 16, 40))
        ),
        ("ties", 6, 40, 256),
    ],
)
def test_the_kernel_grows_the_reference_to_the_bit(kind, t, k, budget):
    pytest.importorskip("triton")
    from selfspec.draft import grow

    generator = torch.Generator().manual_seed(t * budget + len(kind))
    top, ids = candidates(kind, generator, 1 if budget > 100 else 2, t, k)
    anchor = torch.tensor([5, 0, 9])[: len(top)]
    want = by_heap(anchor, top, ids, budget)
    got = grow.grow(*(x.to(DEVICE) for x in (anchor, top, ids)), budget)
    for name in ("tokens", "parents", "scores", "levels"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert got.paths is not None and torch.equal(got.paths.cpu(), rows.ancestors(want.parents))
    assert torch.equal(want.depths, rows.depths(want.parents))


def test_of_equal_scores_the_lower_parent_goes_first_then_the_lower_rank():
    top = torch.log(torch.tensor([[[0.5, 0.5], [0.5, 0.25]]]))
    ids = torch.tensor([[[10, 11], [20, 21]]])
    tree = by_heap(torch.tensor([1]), top, ids, 6)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 1, 2]]
    assert tree.tokens.tolist() == [[1, 10, 11, 20, 20, 21, 21]]
    half = torch.log(torch.tensor(0.5))
    assert torch.equal(tree.scores[0, [1, 3]], torch.stack([half, half + half]))  # a float32 sum along the path


def test_scores_are_summed_in_float32_along_the_path():
    top, ids = candidates("plain", torch.Generator().manual_seed(3), 1, 9, 4)
    tree = by_heap(torch.tensor([0]), top, ids, 40)
    for node in range(1, 41):
        parent, depth = int(tree.parents[0, node]), int(tree.depths[0, node])
        rank = ids[0, depth - 1].tolist().index(int(tree.tokens[0, node]))
        own = np.float32(tree.scores[0, parent]) + np.float32(top[0, depth - 1, rank])
        assert np.float32(tree.scores[0, node]) == own


def test_sums_that_float32_cannot_tell_apart_are_ties():
    below = float(np.nextafter(np.float32(-8), np.float32(-9)))
    top, ids = torch.tensor([[[-8.0, below], [-6e-7, -9.0]]]), torch.tensor([[[10, 11], [20, 21]]])
    assert below < -8.0 - 6e-7  # float64 would put the child first
    tree = by_heap(torch.tensor([1]), top, ids, 2)
    assert tree.tokens.tolist() == [[1, 10, 11]]


def walk_step_by_step(tree: DraftTree, targets: torch.Tensor) -> Accepted:
    """The walk as a loop: one child at a time, the first of equal siblings."""
    n, m = tree.tokens.shape
    at = torch.zeros(n, dtype=torch.long)
    count, alive, path = at + 1, at == 0, [at]
    for _ in range(m - 1):
        want = targets.gather(1, at[:, None])
        child = (tree.parents == at[:, None]) & (tree.tokens == want)
        alive = alive & child.any(1)
        at = torch.where(alive, child.int().argmax(1), at)
        count = count + alive
        path.append(at)
    kept = torch.stack(path, 1)
    return Accepted(kept, count, targets.gather(1, kept))


@pytest.mark.parametrize("seed", range(30))
def test_the_walk_at_once_is_the_walk_step_by_step(seed):
    """Equal siblings, padding, and targets that a lazily walked request leaves open off its path."""
    generator = torch.Generator().manual_seed(seed)
    n, m, vocab = 16, 1 + seed % 12, 2 + seed % 3
    tokens = torch.randint(0, vocab, (n, m), generator=generator)
    draws = torch.rand(n, m, generator=generator)
    parents = (draws * torch.arange(m)).long().index_fill(1, torch.tensor([0]), -1)  # each some earlier node
    padding = torch.arange(m) >= torch.randint(1, m + 1, (n, 1), generator=generator)
    tokens, parents = tokens.masked_fill(padding, -1), parents.masked_fill(padding, -1)
    targets = torch.randint(0, vocab, (n, m), generator=generator)
    want = walk_step_by_step(DraftTree(tokens, parents), targets)
    lazy = torch.full_like(targets, -2).scatter(1, want.rows, targets.gather(1, want.rows))
    for known in (targets, lazy):
        got = walk(DraftTree(tokens, parents), known)
        assert torch.equal(got.rows, want.rows)
        assert torch.equal(got.count, want.count) and torch.equal(got.tokens, want.tokens)


def test_a_built_trees_ancestors_serve_the_forward():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    tree = best_first(torch.tensor([1, 2]), logits, 12)
    start = torch.tensor([4, 9])
    plain, given = rows.tree(start, tree.parents), rows.tree(start, tree.parents, tree.ancestors)
    assert torch.equal(given.positions, plain.positions) and torch.equal(given.positions, start[:, None] + tree.depths)
    assert torch.equal(rows.row_to_row(given), rows.row_to_row(plain))
    wrong = rows.tree(start, tree.parents, torch.eye(13, dtype=torch.bool).expand(2, -1, -1))
    assert not torch.equal(rows.row_to_row(wrong), rows.row_to_row(plain))  # it is what is read


def test_the_kernels_compile_for_a_hopper_gpu():
    """Ahead of time, in a process that doesn't run Triton's interpreter."""
    pytest.importorskip("triton")
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from selfspec.draft import grow

pointers = dict(top="*fp32", ids="*i64", order="*i64", anchor="*i64", token_out="*i64", parent_out="*i64",
                depth_out="*i64", score_out="*fp32", n_nodes="i32", n_depth="i32", n_ranks="i32", BLOCK="constexpr",
                LINKED="constexpr")
chain = dict(ids="*i64", best="*i64", anchor="*i64", out="*i64", n_depth="i32", n_ranks="i32")
for kernel, types, fixed in (
    (grow._grow, pointers, dict(BLOCK=512, LINKED=False)),
    (grow._grow, pointers, dict(BLOCK=512, LINKED=True)),
    (grow._follow, chain, {}),
    (grow._paths, dict(parents="*i64", out="*u8", n_nodes="i32", n_depth="i32", BLOCK="constexpr", ROWS="constexpr"),
     dict(BLOCK=512, ROWS=grow.ROWS)),
):
    made = triton.compile(ASTSource(kernel, types, fixed), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1))
    print(len(made.asm["cubin"]))
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(int(size) > 0 for size in done.stdout.split())


@pytest.mark.gpu
def test_a_graph_replays_growth_and_walk():
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(4, 7, 50, device=DEVICE, generator=generator)
    anchor, targets = torch.arange(4, device=DEVICE), torch.zeros(4, 41, dtype=torch.long, device=DEVICE)

    def run():
        tree = best_first(anchor, logits, 40)
        return tree.tokens, tree.parents, tree.ancestors, walk(tree, targets).rows

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        logits.copy_(torch.randn(4, 7, 50, device=DEVICE, generator=generator))
        targets.copy_(torch.randint(0, 50, (4, 41), device=DEVICE, generator=generator))
        graph.replay()
        for got, want in zip(out, run()):
            assert torch.equal(got, want)
