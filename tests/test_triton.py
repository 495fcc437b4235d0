"""The Triton kernel against the dense reference, in Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from selfspec import rows
from selfspec.attention import AttentionRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_layout(kind: str, generator: torch.Generator, n: int, longest: int) -> rows.RowLayout:
    start = torch.randint(0, longest + 1, (n,), generator=generator)
    if kind == "prefill":
        return rows.chain(torch.zeros_like(start), 20)
    if kind == "chain":
        return rows.chain(start, 5)
    if kind == "block":
        return rows.block(start, 6, causal=True)
    parents = torch.stack(
        [
            torch.tensor([-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, 7)])
            for _ in range(n)
        ]
    )
    tree = rows.tree(start, parents)
    if kind == "tree":
        return tree
    nodes = torch.randint(-1, 7, (n, 3), generator=generator)
    return rows.overlapped(tree, nodes, 4)


@pytest.mark.parametrize("kind", ["prefill", "chain", "block", "tree", "overlap"])
@pytest.mark.parametrize(
    "heads,d,window,softcap,sinks",
    [((3, 1), 16, None, None, False), ((4, 2), 20, 7, None, False), ((2, 2), 16, None, 5.0, True)],
)
def test_kernel_agrees_with_the_reference(kind, heads, d, window, softcap, sinks):
    generator = torch.Generator().manual_seed(len(kind) * 100 + d)
    n, (h, hkv) = 2, heads
    layout = random_layout(kind, generator, n, longest=140)
    n_keys = int(layout.start.max()) + layout.n_rows
    q = torch.randn(n, h, layout.n_rows, d, generator=generator)
    k, v = (torch.randn(n, hkv, n_keys + 3, d, generator=generator)[:, :, :n_keys] for _ in range(2))
    sink = torch.randn(h, generator=generator) if sinks else None
    layout = rows.RowLayout(**{f: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for f, x in vars(layout).items()})
    q, k, v, sink = (None if x is None else x.to(DEVICE) for x in (q, k, v, sink))
    want, got = (
        AttentionRule(layout, n_keys, name).run(q, k, v, window, d**-0.5, softcap, sink) for name in ("sdpa", "triton")
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["prefill", "chain", "block", "tree", "overlap"])
@pytest.mark.parametrize("heads,d", [((9, 3), 64), ((32, 8), 128)])
@pytest.mark.parametrize("longest", [150, 8000])
def test_kernel_is_as_near_to_float64_as_torch_is(kind, heads, d, longest):
    generator = torch.Generator().manual_seed(longest + d)
    n, (h, hkv) = 4, heads
    layout = random_layout(kind, generator, n, longest)
    n_keys = int(layout.start.max()) + layout.n_rows
    layout = rows.RowLayout(**{f: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for f, x in vars(layout).items()})
    q = torch.randn(n, h, layout.n_rows, d, generator=generator)
    k, v = (torch.randn(n, hkv, n_keys, d, generator=generator) for _ in range(2))
    q, k, v = (x.to(DEVICE, torch.bfloat16) for x in (q, k, v))
    exact = AttentionRule(layout, n_keys).run(q.double(), k.double(), v.double(), None, d**-0.5, None, None)
    ours, torchs = (
        (AttentionRule(layout, n_keys, name).run(q, k, v, None, d**-0.5, None, None) - exact).norm()
        for name in ("triton", "sdpa")
    )
    assert ours < 1.5 * torchs


def test_a_trees_paths_are_its_rows_ancestors_in_order():
    parents = torch.tensor([[-1, 0, 0, 2, 1, 3], [-1, -1, 1, 2, 0, 0]])
    got = rows.paths(parents)
    for n, line in enumerate(parents.tolist()):
        for row in range(len(line)):
            path, at = [], row
            while at >= 0:
                path, at = [at, *path], line[at]
            assert got[n, row].tolist() == path + [-1] * (len(line) - len(path))
