"""Packed weights: the same products, in a shadow that leaves the user's model alone."""

import pytest
import torch
from tiny import FAMILIES, RAGGED, build, path_of

from selfspec import SelfSpecModel, options, packed, rows
from selfspec.adapters.attention import CopyDelta
from selfspec.backbone import Backbone
from selfspec.packed import PackedLinear, packable

pytestmark = pytest.mark.usefixtures("chains")

CPU = torch.device("cpu")
packs = pytest.mark.skipif(not packable(CPU, torch.bfloat16, 0), reason="oneDNN packs no bfloat16 here")


@packs
@pytest.mark.parametrize("n_rows", [1, 5, 16, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_are_the_linears(n_rows, bias):
    torch.manual_seed(n_rows)
    base = torch.nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(2, n_rows + 3, 48, dtype=torch.bfloat16)[:, :n_rows]  # rows of a routed forward are a slice
    with torch.no_grad():
        want, got = base(x).float(), PackedLinear(base.weight, base.bias)(x).float()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


@packs
@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Phi3", "Qwen3Moe", "Cohere2"])
@pytest.mark.parametrize("tuning", ["copy", "lora"])
def test_a_packed_backbone_gives_the_same_logits(family, tuning):
    assert family in FAMILIES
    model = build(family, torch.bfloat16)
    path = path_of(model, tuning=tuning)
    plain, laid = Backbone(model, path), Backbone(model, path)
    laid.pack()
    assert any(isinstance(m, PackedLinear) for m in laid.layers.modules()) and isinstance(
        laid.head.lm_head, PackedLinear
    )
    assert not any(isinstance(m, PackedLinear) for m in (*plain.modules(), *model.modules(), *path.modules()))
    ids = torch.tensor([RAGGED[0]])
    start = torch.zeros(1, dtype=torch.long)
    a, b = (x.logits(x(rows.chain(start, ids.shape[1]), x.new_cache(1, 16, 16), ids).clean) for x in (plain, laid))
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@packs
def test_a_folded_weight_in_the_place_of_another_is_not_taken_for_it():
    """Two adapters' folded weights are packed and dropped one after the other, and memory is used again."""
    done: dict = {}
    for seed in range(40):
        torch.manual_seed(seed)
        box = torch.nn.ModuleDict({"copy": CopyDelta(torch.nn.Linear(48, 80, bias=False, dtype=torch.bfloat16))})
        x = torch.randn(1, 48, dtype=torch.bfloat16)
        want = box["copy"](x, None)
        packed.pack(box, done)
        torch.testing.assert_close(box["copy"](x), want, rtol=2**-7, atol=2**-7)


def test_models_in_other_dtypes_are_left_as_they_are():
    engine = SelfSpecModel(build(dtype=torch.float32))
    assert not any(isinstance(m, PackedLinear) for m in engine.backbone.modules())


def test_a_processor_without_bfloat16_instructions_decodes_with_plain_linears(monkeypatch):
    def refuse(self, weight, bias):
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    packed._packs.cache_clear()
    try:
        engine = SelfSpecModel(build(dtype=torch.bfloat16))
        assert engine.generate([RAGGED[0]], max_new_tokens=3).shape[1] == len(RAGGED[0]) + 3
    finally:
        packed._packs.cache_clear()


@pytest.mark.parametrize(
    "packs, device, want", [(True, "cpu", "bfloat16"), (False, "cpu", "float32"), (False, "cuda", "bfloat16")]
)
def test_commands_take_the_dtype_that_is_fast_here(monkeypatch, packs, device, want):
    monkeypatch.setattr(packed, "_packs", lambda: packs)
    assert options.settled(options.Chosen(device=device)).dtype == want
    assert options.settled(options.Chosen(device=device, dtype="float16")).dtype == "float16"
