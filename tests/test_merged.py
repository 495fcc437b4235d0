"""LoRA deltas folded into whole weights: the same drafts, and nothing of the user's is touched."""

import pytest
import torch
from tiny import PROMPT, model_of, path_of

from selfspec import SelfSpecModel, rows
from selfspec.adapters.lora import LoraDelta
from selfspec.backbone import Backbone
from selfspec.draft.block import draft_inputs
from selfspec.merged import merge
from selfspec.routed import RoutedLinear

pytestmark = pytest.mark.usefixtures("chains")


def logits(body):
    """Of two clean rows and a group that rides with them."""
    start, ids = torch.tensor([0]), torch.tensor([[3, 5]])
    layout = rows.overlapped(rows.chain(start, 2), torch.tensor([[1]]), 4)
    hidden = body(layout, body.new_cache(1, 16, 16), ids, draft_inputs(None, 1, 4, 1, ids.device))
    return body.logits(hidden.clean), body.logits(hidden.draft)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Phi3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_folded_deltas_draft_the_same(family, dtype):
    model = model_of(family, dtype=dtype)
    path = path_of(model, 0.3, entry=2, tuning="lora", targets="all", layouts=("known", "hidden"))
    plain, folded = Backbone(model, path), Backbone(model, path)
    before = {k: v.clone() for k, v in path.state_dict().items()}
    assert merge(folded) > 0
    assert not any(isinstance(m.delta, LoraDelta) for m in folded.modules() if isinstance(m, RoutedLinear))
    (clean, draft), (clean_too, draft_too) = logits(plain), logits(folded)
    assert torch.equal(clean, clean_too)
    near = 1e-12 if dtype == torch.float64 else 0.05 * float(draft.abs().max())
    torch.testing.assert_close(draft_too, draft, rtol=0, atol=near)
    assert all(torch.equal(v, before[k]) for k, v in path.state_dict().items())
    assert any(isinstance(d, LoraDelta) for d in path.deltas.values())


def test_a_decoder_folds_and_leaves_the_path_trainable():
    model = model_of()
    path = path_of(model, 0.3, tuning="lora")
    spec = SelfSpecModel(model, path)
    assert not any(isinstance(m.delta, LoraDelta) for m in spec.backbone.modules() if isinstance(m, RoutedLinear))
    spec.generate([PROMPT], max_new_tokens=4)
    assert all(isinstance(d, LoraDelta) for d in path.deltas.values())


def test_without_room_deltas_stay_low_rank(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    body = Backbone(model_of(), path_of(model_of(), tuning="lora"))
    assert merge(body) == 0
    assert any(isinstance(m.delta, LoraDelta) for m in body.modules() if isinstance(m, RoutedLinear))
