"""Training on a GPU: FlexAttention compiled against the reference, both ways; steps as graphs; runs that repeat."""

from __future__ import annotations

import pytest
import torch
from draws import sampled
from test_training_resume import same
from test_training_trainer import answered, config, tiny
from tiny import build
from torch import nn

from selfspec.attention import AttentionRule, backend
from selfspec.rows import RowLayout
from selfspec.training import anchors as anchoring
from selfspec.training.data import Answer
from selfspec.training.graph import WARM, Captured
from selfspec.training.pack import Packer
from selfspec.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ["draft", "chain"])
def test_flex_and_its_gradients(kind: str) -> None:
    device, s, n = torch.device("cuda"), 512, 2
    random = torch.Generator().manual_seed(0)
    docs = [
        Answer(str(i), torch.randint(9, 60, (20 + i,), generator=random).tolist(), [5] * (70 + 9 * i)) for i in range(8)
    ]
    pack = Packer(docs, s, n).batch(0).to(device)
    drawn = sampled(Packer(docs, s, n).batch(0), 32, 0, 0).to(device)
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


def steps_of(out, answers: list[Answer], graph: bool) -> Trainer:
    """Some steps of a head alone on a path that stays."""
    terms = {"markov": {"weight": 1.0, "detach": True}}
    fields = dict(adapter={"block_size": 4, "heads": ["markov"]}, objectives=terms, graph=graph, compile=False)
    fields |= dict(device="cuda", attention="sdpa", weight_decay=0.5, max_steps=8)
    trainer = Trainer(config(out, **fields), tiny(), answers)
    trainer.train()
    return trainer


def test_a_head_alone_is_trained_in_a_graph(tmp_path) -> None:
    answers = answered(tiny(), 8)
    eager, graphed = (steps_of(tmp_path / str(graph), answers, graph) for graph in (False, True))
    start = Trainer(
        config(tmp_path / "start", adapter={"block_size": 4}, device="cuda", compile=False, attention="sdpa"),
        tiny(),
        answers,
    )
    own, want = graphed.path.state_dict(), eager.path.state_dict()
    for name, value in start.path.state_dict().items():
        assert torch.equal(value, own[name]), name
    for name, value in own.items():
        torch.testing.assert_close(value, want[name], atol=1e-5, rtol=1e-3)
    assert own["heads.markov.up.weight"].any()


def test_a_graph_knows_which_gradients_it_adds_to() -> None:
    weight, idle = (nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2))

    def run(pack, groups, given: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (weight * given).sum()
        loss.backward()
        return {"loss": loss.detach()}

    docs = [Answer("0", [5, 6], [7, 8, 9])]
    pack = Packer(docs, 8, 1).batch(0).to(torch.device("cuda"))
    drawn = sampled(Packer(docs, 8, 1).batch(0), 2, 0, 0).to(torch.device("cuda"))
    captured = Captured(run, [weight, idle])
    for step in range(WARM + 3):
        if weight.grad is not None:
            weight.grad.zero_()
        captured(pack, anchoring.groups(pack, drawn, 2), torch.full((3,), float(step), device="cuda"))
        assert idle.grad is None and weight.grad.tolist() == [float(step)] * 3
    weight.grad = None
    with pytest.raises(RuntimeError, match="dropped under a captured step"):
        captured(pack, anchoring.groups(pack, drawn, 2), torch.ones(3, device="cuda"))


@pytest.mark.parametrize("attention, graph", [("sdpa", False), ("flex", False), ("grouped", False), ("grouped", True)])
def test_a_resumed_run_is_bit_exact(attention: str, graph: bool, tmp_path) -> None:
    """Two unbroken runs are alike to the bit, and so is one that was stopped on the way."""
    docs = [Answer(str(i), [3, 4, 5 + i % 9], [6 + i % 7, 7, 8, 9 + i % 11] * 5) for i in range(16)]
    heads = [] if graph else ["markov", "confidence", "length"]
    terms = dict.fromkeys(("ce", "dpace") if graph else ("ce", "dpace", "kl", "lk_hybrid", "bv", "chain", *heads), 0.2)
    adapter = {"block_size": 4, "layouts": ["known", "hidden"], "heads": heads}
    fields = dict(adapter=adapter, objectives=terms, deterministic=True, device="cuda", attention=attention,
                  graph=graph, max_steps=16)  # fmt: skip

    def trainer(out: str, **more) -> Trainer:
        return Trainer(config(tmp_path / out, **fields, **more), build(hidden_size=64, dtype=torch.bfloat16), docs)

    whole, again, cut = trainer("whole"), trainer("again"), trainer("cut")
    whole.train()
    again.train()
    same(again, whole)
    step = cut.train_step

    def stopped() -> dict:
        cut.stop = cut.step == 6
        return step()

    cut.train_step = stopped
    assert not cut.train()["finished"]
    rest = trainer("cut", resume=True)
    assert rest.step == 7 and rest.train()["finished"]
    same(rest, whole)
