"""Each kernel against its torch reference over random shapes, and its rows against themselves in other company."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("triton")

from selfspec import cache, decode, kernels, rows, sampling
from selfspec.adapters import path as mask_path
from selfspec.draft import DraftTree, lookup
from selfspec.kernels import compact, copies, enter, noise, norm, paths, rotary, settle, walk
from selfspec.kernels import linear as linears
from selfspec.kernels.linear import Span, linear
from selfspec.kernels.tiles import TILES, Tile, guess, tile
from selfspec.verify import greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
CLOSE = {torch.float32: dict(rtol=1e-4, atol=1e-4), HALF: dict(rtol=2e-2, atol=2e-2)}


def draw(generator, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def draws(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return generator, lambda *shape, scale=1.0: draw(generator, *shape, dtype=dtype, scale=scale)


LINEARS = {  # n_i, K, bias, norm, residual, swiglu, tile
    "three weights": ((40, 24, 16), 48, False, True, False, False, Tile(16, 16, 32)),
    "biases": ((33, 16), 20, True, False, False, False, Tile(16, 32, 16)),
    "residual": ((50,), 64, True, False, True, False, Tile(16, 16, 32)),
    "swiglu": ((24, 24), 40, False, True, False, True, Tile(16, 16, 16)),
    "swiglu with biases": ((20, 20), 32, True, False, False, True, Tile(16, 32, 32)),
    "split": ((40,), 72, True, False, True, False, Tile(16, 16, 16, split=3)),
    "norm and split": ((20, 18), 64, False, True, False, False, Tile(16, 16, 32, split=2)),
    "tall": ((30,), 32, False, True, True, False, Tile(32, 32, 32)),
}


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_linear_agrees_with_torch(name, dtype):
    widths, k, bias, normed, added, swiglu, how = LINEARS[name]
    _, make = draws(len(name), dtype)
    n, r = 2, 9
    x = make(n, r, k)
    weights = tuple(make(w, k, scale=k**-0.5) for w in widths)
    biases = tuple(make(w) for w in widths) if bias else None
    scale = (make(k), 1e-5) if normed else None
    residual = make(n, r, sum(widths)) if added else None
    tickets = torch.zeros(linears.TICKETS, dtype=torch.int32, device=DEVICE)
    got = linear(x, weights, biases, scale, residual, swiglu, tickets=tickets, how=how)
    torch.testing.assert_close(got, linears.reference(x, weights, biases, scale, residual, swiglu), **CLOSE[dtype])
    assert not tickets.any()  # ready for the next launch


def products_keep_rows():
    """Whether numpy, which multiplies for the interpreter, gives a row the same product at every place of a tile."""
    left, right = numpy.random.default_rng(0).standard_normal((2, 32, 32), dtype=numpy.float32)
    moved = [numpy.roll(numpy.roll(left, j, 0) @ right, -j, 0) for j in range(32)]
    return all((m == moved[0]).all() for m in moved)


# so it is with AVX-512; on a GPU the kernels' own products are tried
@pytest.mark.skipif(
    DEVICE == "cpu" and not products_keep_rows(), reason="numpy's products here depend on a row's place"
)
@pytest.mark.parametrize("name", ["three weights", "swiglu", "norm and split"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_rows_product_does_not_depend_on_its_company(name, dtype):
    """Alone, among others, at another place of a tile, in a span of its request; to the last bit."""
    widths, k, _, normed, _, swiglu, how = LINEARS[name]
    _, make = draws(3, dtype)
    x, weights = make(3, 7, k), tuple(make(w, k) for w in widths)
    scale = (make(k), 1e-5) if normed else None
    every = linear(x, weights, norm=scale, swiglu=swiglu, how=how)
    for n, r in ((0, 0), (1, 5), (2, 6)):
        alone = linear(x[n : n + 1, r : r + 1].contiguous(), weights, norm=scale, swiglu=swiglu, how=how)
        assert torch.equal(alone[0, 0], every[n, r])
    out = torch.full_like(every, -7.0)
    linear(x, weights, norm=scale, swiglu=swiglu, how=how, span=Span(2, 3), out=out)
    assert torch.equal(out[:, 2:5], every[:, 2:5]) and (out[:, :2] == -7).all() and (out[:, 5:] == -7).all()


def test_tiles_are_chosen_by_the_weights_shape_alone():
    for (n, k), how in TILES.items():
        assert tile(n, k) == how
    for n, k in ((960, 576), (4096, 4096), (151936, 4096), (24576, 4096), (48, 20), (1, 1)):
        how = guess(n, k)
        assert how.m % 16 == 0 and all(x & (x - 1) == 0 and x >= 16 for x in (how.m, how.n, how.k))
        assert tile(n, k) == tile(n, k)


def test_linear_says_what_it_cannot_read():
    x, w = torch.zeros(1, 2, 16), torch.zeros(32, 16)
    with pytest.raises(ValueError, match="must be contiguous"):
        linear(torch.zeros(1, 4, 16)[:, ::2], (w,))
    with pytest.raises(ValueError, match="gate and up"):
        linear(x, (w,), swiglu=True)


@pytest.mark.parametrize("k", [20, 576, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rmsnorm_agrees_with_torch(k, dtype):
    _, make = draws(k, dtype)
    x, weight = make(2, 3, k), make(k)
    got = norm.rmsnorm(x, weight, 1e-5)
    torch.testing.assert_close(got, norm.reference(x, weight, 1e-5), **CLOSE[dtype])
    assert torch.equal(norm.rmsnorm(x[1:, 2], weight, 1e-5)[0], got[1, 2])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("d,p,dtype", [(16, 16, HALF), (20, 12, torch.float32)])
def test_rotary_agrees_with_torch_and_fills_the_cache(normed, d, p, dtype):
    generator, make = draws(d + normed, dtype)
    n, r, h, hkv, slots = 2, 3, 3, 2, 11
    qkv = make(n, r, (h + 2 * hkv) * d)
    angle = torch.rand(n, r + 1, p, generator=generator).to(DEVICE)
    cos, sin = (f(angle).to(dtype)[:, :r] for f in (torch.cos, torch.sin))
    norms = [(make(d), 1e-6), (make(d), 1e-6)] if normed else [None, None]
    cache = torch.zeros(2, n + 2, hkv, slots, d, dtype=dtype, device=DEVICE)
    where = torch.tensor([[1], [3]], device=DEVICE), torch.tensor([[0, 1, 2, 9], [7, 8, 9, 10]], device=DEVICE)
    got = rotary.rotary(qkv, cos, sin, *cache, *where, *norms)
    q, k, v = rotary.reference(qkv, cos, sin, h, hkv, *norms)
    torch.testing.assert_close(got, q, **CLOSE[dtype])
    for i, first in ((0, 0), (1, 7)):
        request = int(where[0][i])
        torch.testing.assert_close(cache[0, request, :, first : first + r], k[i], **CLOSE[dtype])
        assert torch.equal(cache[1, request, :, first : first + r], v[i])
    written = torch.zeros(n + 2, slots, dtype=torch.bool)
    written[1, 0:3] = written[3, 7:10] = True
    assert torch.equal(cache[1].abs().sum((1, 3)).cpu() > 0, written)


@pytest.mark.parametrize("vocab", [1, 5, 1024, 3000])
def test_drawn_tokens_are_the_references(vocab):
    """Seeds and positions of all sizes; noise to the last bits of a logarithm, and the first of equal sums."""
    generator, make = draws(vocab, torch.float32)
    scores = make(40, vocab, scale=3.0)
    scores[1:3] = -torch.inf
    scores[3, : vocab // 2] = -torch.inf
    seed = torch.randint(-(1 << 62), 1 << 62, (40,), generator=generator).to(DEVICE)
    at = torch.randint(1 << 20, (40,), generator=generator).to(DEVICE)
    want = sampling.perturbed(scores, seed, at, lambda s: s.argmax(-1))
    got = noise.draw(scores, seed, at)
    assert torch.equal(got, want) and not got[1:3].any()
    if vocab > 1:
        assert not torch.equal(noise.draw(scores, seed + 1, at), want)
        assert not torch.equal(noise.draw(scores, seed, at + 1), want)
    sums = sampling.perturbed(scores, seed, at, lambda s: s.float())
    torch.testing.assert_close(noise.noisy(scores, seed, at), sums, rtol=3e-7, atol=1e-7)
    assert torch.equal(noise.draw(scores[7:8], seed[7:8], at[7:8]), got[7:8])


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("vocab,k", [(1, 1), (30, 8), (3000, 128), (3000, 5)])
def test_noise_of_a_few_tokens_is_theirs_in_the_vocabulary(vocab, k, served, monkeypatch):
    """It was made for the whole vocabulary, 120 rows of it a round, to rank 8 tokens of each."""
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE} if served else set())
    generator, make = draws(vocab, torch.float32)
    scores = make(9, vocab, scale=3.0)
    seed = torch.randint(-(1 << 62), 1 << 62, (9,), generator=generator).to(DEVICE)
    at = torch.randint(1 << 20, (9,), generator=generator).to(DEVICE)
    ids = torch.rand(9, vocab, generator=generator).topk(k).indices.to(DEVICE)
    few = scores.gather(1, ids)
    assert torch.equal(sampling.noisy_among(few, ids, seed, at), sampling.noisy(scores, seed, at).gather(1, ids))
    alone = torch.full_like(scores, -torch.inf).scatter(1, ids, few)
    assert torch.equal(sampling.draw_among(few, ids, seed, at), sampling.draw(alone, seed, at))
    twice = torch.cat([few, few.new_full((9, 1), -torch.inf)], 1), torch.cat([ids, 0 * ids[:, :1]], 1)
    assert torch.equal(sampling.draw_among(*twice, seed, at), sampling.draw(alone, seed, at))


@pytest.mark.parametrize("m", [1, 2, 7, 33])
def test_walks_are_the_references(m):
    """Random trees and chains over few tokens, with siblings of one token and padding at the end."""
    generator, n = torch.Generator().manual_seed(m), 24
    deep = 0
    for _ in range(4):
        tokens, targets = torch.randint(3, (2, n, m), generator=generator).unbind()
        parents = (torch.rand(n, m, generator=generator) * torch.arange(m)).long()
        parents[:, 0] = -1
        gone = torch.arange(m) > torch.randint(m, (n, 1), generator=generator)
        for how in (parents.masked_fill(gone, -1), None):
            tree = DraftTree(tokens.masked_fill(gone, -1).to(DEVICE), None if how is None else how.to(DEVICE))
            want = greedy.reference(tree, targets.to(DEVICE))
            rows, count, emitted = walk.walk(tree.tokens, tree.parents, targets.to(DEVICE))
            assert torch.equal(count, want.count) and torch.equal(emitted, want.tokens)
            assert rows is None or torch.equal(rows, want.rows)
            deep = max(deep, int(count.max()))
    assert deep >= min(m, 3)


@pytest.mark.parametrize("m", [1, 2, 17, 33])
def test_rows_of_every_path_are_the_references(m):
    """Random trees with padding at the end."""
    generator = torch.Generator().manual_seed(m)
    parents = (torch.rand(3, m, generator=generator) * torch.arange(m)).long()
    parents[:, 0] = -1
    parents[0, m // 2 + 1 :] = -1
    up = rows.ancestors(parents).to(DEVICE)
    assert torch.equal(paths.paths(up), rows.paths_by_torch(up))


@pytest.mark.parametrize("ready", [None, torch.tensor([True, False, True])])
@pytest.mark.parametrize("depth", [1, 5])
def test_what_is_emitted_is_written_as_by_torch(depth, ready):
    """Budgets that run out, and one that is spent; of the text's last column nothing is expected."""
    generator = torch.Generator().manual_seed(depth)
    for left in ([9, 2, 0], [1, 0, 7]):
        tokens = torch.randint(99, (3, depth + 2), generator=generator)[:, :depth].to(DEVICE)
        count = torch.randint(1, depth + 1, (3,), generator=generator).to(DEVICE)
        saved = None if ready is None else ready.to(DEVICE)
        states = [[torch.zeros(3, 20), torch.tensor([4, 0, 9]), torch.tensor(left)] for _ in range(2)]
        states = [[t.long().to(DEVICE) for t in state] for state in states]
        got = settle.move_on(*states[0], count, tokens, saved)
        want = decode.torch_move_on(*states[1], count, tokens, saved)
        assert torch.equal(got, want)
        assert torch.equal(states[0][0][:, :-1], states[1][0][:, :-1])
        assert all(torch.equal(a, b) for a, b in zip(states[0][1:], states[1][1:], strict=True))


@pytest.mark.parametrize("n, depth, width", [(1, 2, 4), (3, 5, 24), (2, 16, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_accepted_rows_move_as_by_torch(n, depth, width, dtype, monkeypatch):
    """Any rows, also such that are another's target, and slots on both sides that stay as they are."""
    ran, kernel = [], compact.compact
    monkeypatch.setattr(compact, "compact", lambda *args: (ran.append(args), kernel(*args)))
    generator, make = draws(n, dtype)
    here = cache.KVCache([(2, width, width), (3, width, width)], n + 2, 22, 18, dtype, torch.device(DEVICE))
    at = torch.randint(0, 22, (n,), generator=generator).to(DEVICE)
    nodes = torch.randint(0, 18, (n, depth + 2), generator=generator).to(DEVICE)
    for accepted in (nodes[:, :depth], nodes.sort(1).values[:, 2:]):  # neither is contiguous
        for pool in here.pools:
            pool.copy_(make(*pool.shape))
        before, want = ([pool.clone() for pool in here.pools] for _ in range(2))
        for pool in want:
            cache.moved(pool, accepted, at, 1)
        monkeypatch.setattr(kernels, "DEVICES", {DEVICE})
        here.compact(accepted, at, 1)
        assert ran and all(map(torch.equal, here.pools, want)) and not any(map(torch.equal, want, before))


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """For sm_90, without a device: the interpreter runs much that a compiler refuses."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = str(Path(__file__).with_name("compile_kernels.py"))
    run = subprocess.run([sys.executable, "-P", script, "bfloat16"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {
        *(
            "_linear",
            "_rmsnorm",
            "_rotary",
            "_noise",
            "_first_best",
            "_few",
            "_walk",
            "_settle",
            "_compact",
            "_partial",
            "_combine",
        ),
        *("_peaks", "_first", "_collect", "_rank", "_place", "_lines", "_enter", "_attend", "_gradients", "_pairs"),
        *("_tally", "_scale", "_grams", "_strike", "_cut", "_copies"),
    }
    products = [x for x in lines if x.startswith(("_linear", "_partial", "_pairs"))]
    assert not any("products 0 " in x or x.endswith("wide loads 0") for x in products)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_copies_are_found_as_by_torch(size, monkeypatch):
    """Texts of few words, ragged and short ones among them, over several blocks of positions."""
    monkeypatch.setattr(copies, "BLOCK", 32)
    generator, found = torch.Generator().manual_seed(size), 0
    for words, width in ((2, 7), (3, 64), (9, 100), (30, 300)):
        text = torch.randint(0, words, (24, width + 20), generator=generator)[:, :width].to(DEVICE)
        start = torch.randint(0, width, (24,), generator=generator).to(DEVICE)
        start[:4] = torch.arange(4)
        want = lookup.by_torch(text, start, size)
        assert torch.equal(copies.copies(text, start, size, lookup.LONGEST, lookup.SHORTEST), want)
        found += int((want[:, 1:] >= 0).sum())
    assert found > 20


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("extra", [None, 1, 7])
@pytest.mark.parametrize("masks", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_draft_rows_enter_as_by_torch(projected, extra, masks, dtype):
    generator, make = draws(masks + 7 * projected, dtype)
    n, d, width = 3, 7, 72
    tokens = torch.randint(-1, 9, (n, d), generator=generator).to(DEVICE)
    tokens = torch.where(torch.rand(n, d, generator=generator).to(DEVICE) < 0.5, tokens, -1)
    slots = torch.randint(0, 5, (d,), generator=generator).to(DEVICE).expand(n, d)
    inputs = (tokens, slots, make(n, d, width), make(masks, width), make(width, width, scale=width**-0.5))
    inputs = (*inputs[:4], inputs[4] if projected else None, None if extra is None else make(n, extra, width))
    table = make(9, width)
    with torch.no_grad():
        torch.testing.assert_close(enter.enter(*inputs), mask_path.enter(*inputs), **CLOSE[dtype])
        looked = enter.enter(*inputs[:2], table, *inputs[3:])
        assert torch.equal(looked, enter.enter(*inputs[:2], table[tokens.clamp(min=0)], *inputs[3:]))
