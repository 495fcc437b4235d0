"""FlexAttention compiled on CUDA against the reference, forward and backward; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from selfspec.attention import AttentionRule, backend
from selfspec.rows import RowLayout
from selfspec.training import anchors as anchoring
from selfspec.training.data import Answer
from selfspec.training.pack import Packer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ["draft", "chain"])
def test_flex_and_its_gradients(kind: str) -> None:
    device, s, n = torch.device("cuda"), 512, 2
    random = torch.Generator().manual_seed(0)
    docs = [
        Answer(str(i), torch.randint(9, 60, (20 + i,), generator=random).tolist(), [5] * (70 + 9 * i)) for i in range(8)
    ]
    pack = Packer(docs, s, n).batch(0).to(device)
    drawn = anchoring.sample(Packer(docs, s, n).batch(0), 32, anchoring.generator(0, 0)).to(device)
    layout = anchoring.groups(pack, drawn, 16).layout
    if kind == "chain":
        layout = RowLayout(pack.positions, torch.zeros(n, dtype=torch.long, device=device), s, segments=pack.segments)
    prefix = s if kind == "draft" else 0
    k = prefix + layout.n_rows
    rule = AttentionRule(layout, k)

    def run(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q = torch.randn(n, 9, layout.n_rows, 64, device=device).to(dtype).requires_grad_()
        fixed = [torch.randn(n, 3, prefix, 64, device=device).to(dtype) for _ in range(2)]
        new = [torch.randn(n, 3, layout.n_rows, 64, device=device).to(dtype).requires_grad_() for _ in range(2)]
        key, value = (torch.cat([a, b], 2) for a, b in zip(fixed, new, strict=True))
        out = backend(name).attention(q, key, value, rule, None, 0.125)
        grads = torch.autograd.grad((out.float() * torch.randn_like(out.float())).sum(), [q, *new])
        return [x.double() for x in (out, *grads)]

    for ours, want in zip(run("flex", torch.bfloat16), run("sdpa", torch.float32), strict=True):
        assert (ours - want).norm() / want.norm() < 2e-2
