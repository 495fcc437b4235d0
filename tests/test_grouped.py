"""Grouped attention of training against the dense mask: outputs and gradients, over random packs."""

import pytest
import torch
from draws import sampled

pytest.importorskip("triton")

from tiny import build, model_of, path_of

from selfspec import attention
from selfspec.attention import AttentionRule, backend
from selfspec.backbone import Backbone
from selfspec.training import anchors as anchoring
from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer
from selfspec.training.pack import Packer
from selfspec.training.step import backbone_of, compile_layers, run_clean, run_draft

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies no bfloat16


def pack_of(length, rows, seed=0):
    """Documents of different lengths, several to a row."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(4, length // 3, (12, 2), generator=random).tolist()
    docs = [Answer(str(i), [7] * p, [5] * a) for i, (p, a) in enumerate(sizes)]
    return Packer(docs, length, rows).batch(0)


def layout_of(size, causal, anchors=5, length=96, rows=2, seed=0):
    pack = pack_of(length, rows, seed)
    drawn = sampled(pack, anchors, seed, 0)
    return anchoring.groups(pack.to(DEVICE), drawn.to(DEVICE), size, causal=causal).layout, length


def run(name, layout, length, heads, kv_heads, width, dtype):
    """Output and gradients of queries, and of the rows' own keys and values."""
    n, r = layout.n_requests, layout.n_rows
    random = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(DEVICE, dtype)  # noqa: E731
    q = draw(n, heads, r, width).requires_grad_()
    fixed, own = (draw(2, n, kv_heads, length, width), draw(2, n, kv_heads, r, width).requires_grad_())
    rule = AttentionRule(layout, length + r, name)
    assert rule.backend is backend(name)
    key, value = torch.cat([fixed, own], 3)
    out = rule.run(q, key, value, None, width**-0.5, None, None)
    weight = draw(*out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [q, own])]


@pytest.mark.parametrize("size, causal", [(16, False), (5, False), (4, True)])
@pytest.mark.parametrize("heads, kv_heads, width", [(6, 2, 16), (2, 2, 24)])
def test_outputs_and_gradients_are_those_of_the_dense_mask(size, causal, heads, kv_heads, width):
    layout, length = layout_of(size, causal)
    got = run("grouped", layout, length, heads, kv_heads, width, torch.float32)
    want = run("sdpa", layout, length, heads, kv_heads, width, torch.float32)
    near = (
        dict(rtol=1e-4, atol=1e-5) if DEVICE.type == "cpu" else dict(rtol=2e-2, atol=2e-2)
    )  # tensor cores round to tf32
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **near)


def test_half_precision():
    layout, length = layout_of(16, False)
    got = run("grouped", layout, length, 6, 2, 16, HALF)
    want = run("sdpa", layout, length, 6, 2, 16, torch.float32)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() / b.norm() < 1e-2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the reference would need a model in float32 without tf32")
def test_a_backbone_trains_the_same_by_it():
    model = model_of(dtype=torch.float32)
    pack = pack_of(48, 2)
    drawn = sampled(pack, 3, 3, 0)
    found = []
    for name in ("sdpa", "grouped"):
        path = path_of(model, 0.2).requires_grad_(True)
        body = Backbone(model, path, name)
        groups = anchoring.groups(pack, drawn, 4)
        cache, *_ = run_clean(body, pack)
        loss = run_draft(body, groups, cache, None).square().sum()
        found.append([loss.detach(), *torch.autograd.grad(loss, list(path.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family, dtype, chosen",
    [("Llama", HALF, "grouped"), ("Llama", torch.float32, "flex"), ("Mistral", HALF, "flex"), ("GptOss", HALF, "flex")],
)
def test_training_chooses_it_by_itself_where_it_can(family, dtype, chosen):
    model = build(family, dtype=dtype).to(DEVICE)
    for path in (path_of(model, 0.2), path_of(model, 0.2, taps=[1]).requires_grad_(True)):
        assert backbone_of(model, path, "auto").backend == chosen
        assert all(p.grad is None for p in path.parameters())
    assert backbone_of(model, path_of(model, 0.2), "sdpa").backend == "sdpa"


@pytest.mark.parametrize("fault", ["no triton", "a GPU that is too small"])
def test_training_goes_on_where_its_kernels_do_not(fault, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of resource: shared memory")

    real = attention.backend
    if fault == "no triton":
        missing = lambda name: broken() if name == "grouped" else real(name)  # noqa: E731
        monkeypatch.setattr(attention, "backend", missing)
    else:
        monkeypatch.setattr(real("grouped"), "attend", broken)
    model = build(dtype=HALF).to(DEVICE)
    assert backbone_of(model, path_of(model, 0.2), "auto").backend == "flex"
    monkeypatch.undo()
    assert backbone_of(model, path_of(model, 0.2), "auto").backend == "grouped"


def test_on_a_gpu_the_choice_is_left_open():
    config = TrainConfig()
    assert config.backend(cuda=True, compiled=True) == "auto" and config.backend(cuda=False, compiled=False) == "sdpa"
    assert TrainConfig(attention="flex").backend(cuda=True, compiled=True) == "flex"


def test_what_it_does_not_know_is_refused():
    layout, length = layout_of(4, False)
    rule = AttentionRule(layout, length + layout.n_rows, "grouped")
    x = torch.zeros(2, 2, layout.n_rows, 16, device=DEVICE)
    key = torch.zeros(2, 2, length + layout.n_rows, 16, device=DEVICE)
    with pytest.raises(ValueError, match="attention=flex"):
        rule.run(x, key, key, 8, 0.25, None, None)
    with pytest.raises(ValueError, match="attention=flex"):
        rule.run(x, key, key, None, 0.25, 30.0, None)
    with pytest.raises(ValueError, match="one width"):  # it read them as if they were
        rule.run(x, key, key[..., :8], None, 0.25, None, None)


@pytest.mark.gpu
def test_it_is_the_compiled_flex_on_a_gpu():
    layout, length = layout_of(16, False, anchors=64, length=512)
    got = run("grouped", layout, length, 9, 3, 64, torch.bfloat16)
    want = run("flex", layout, length, 9, 3, 64, torch.bfloat16)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 2e-2


@pytest.mark.gpu
def test_compiled_layers_train_by_it():
    losses = []
    for name in ("flex", "grouped"):
        torch.manual_seed(0)
        model = build(hidden_size=64, dtype=torch.float32).to(DEVICE)  # compiled FlexAttention wants heads of 16
        body = Backbone(model, path_of(model, 0.2).requires_grad_(True), name)
        compile_layers(body)
        pack = pack_of(48, 2).to(DEVICE)
        drawn = sampled(pack_of(48, 2), 6, 3, 0).to(DEVICE)
        groups = anchoring.groups(pack, drawn, 4)
        cache, *_ = run_clean(body, pack)
        loss = run_draft(body, groups, cache, None).square().mean()
        loss.backward()
        losses.append((float(loss), float(sum(p.grad.norm() for p in body.path.parameters() if p.grad is not None))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
