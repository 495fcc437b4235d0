"""Several adapters of one model, loaded together: they share the model, and each plan names the one that drafts."""

import pytest
import torch
from tiny import PROMPT, RAGGED, model_of, path_of, reference

from selfspec import SelfSpecModel, options
from selfspec.packed import PackedLinear
from selfspec.plan import Plan
from selfspec.plan.policy import Fixed
from selfspec.session import Request, Session

N = 14


def decoder(dtype=torch.float64, **late):
    model = model_of(dtype=dtype)
    full = path_of(model, 0.2, block_size=6, layouts=("known", "hidden"))
    return SelfSpecModel(model, [full, path_of(model, 0.2, entry=2, block_size=4, tuning="copy", **late)])


def test_each_drafts_with_its_own_and_none_changes_the_text():
    spec = decoder(taps=(2, 4))
    truth = reference(spec.model, RAGGED, N)
    costs = []
    for adapter in (0, 1):
        for mode in ("sequential", "tree"):
            requests = [Request(p, N) for p in RAGGED]
            list(spec.run(requests, spec.plan(f"{mode}@{adapter}")))
            assert [r.output for r in requests] == truth
        costs.append(requests[0].stats.drafts / requests[0].stats.rounds)
    assert costs[0] > costs[1] > 0  # the late one enters in the middle
    assert spec.plan("sequential@1").block_size == 4


class Turns(Fixed):
    """Every plan in turn."""

    def __init__(self, plans):
        self.plans, self.n = plans, 0

    def round(self, active):
        self.n += 1
        return Fixed(self.plans[self.n % len(self.plans)]).round(active)


def test_plans_of_both_take_turns_within_a_text():
    spec = decoder(taps=(4,))
    plans = [Plan("overlap", 6), Plan("sequential", 4, adapter=1), Plan("tree", 4, 9, adapter=1), Plan("sequential", 3)]
    requests = [Request(p, 24) for p in RAGGED]
    list(spec.run(requests, Turns(plans)))
    assert [r.output for r in requests] == reference(spec.model, RAGGED, 24)


def test_auto_chooses_among_both(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    spec = decoder()
    policy = spec.policy("auto")
    assert {p.adapter for p in policy.plans if p.drafts} == {0, 1}
    [request] = requests = [Request(PROMPT, 30)]
    list(spec.run(requests, policy))
    assert request.output == reference(spec.model, [PROMPT], 30)[0]


def test_the_models_weights_are_packed_once():
    spec = decoder(torch.bfloat16)
    packed = [{id(m) for m in b.layers.modules() if isinstance(m, PackedLinear)} for b in spec.bodies]
    shared = packed[0] & packed[1]
    if not packed[0]:
        pytest.skip("nothing is packed here")
    assert len(shared) >= 4 * 7 - 4 * 2  # all base Linears of four layers but those that the copies replace


def test_what_cannot_be_is_said():
    spec = decoder()
    with pytest.raises(ValueError, match="2 are loaded"):
        spec.plan("sequential@2")
    with pytest.raises(ValueError, match="2 are loaded"):
        Session(spec.bodies, Plan("sequential", 4, adapter=2), 1, 30)
    with pytest.raises(ValueError, match="by itself"):
        spec.save_pretrained("nowhere")
    model = model_of()
    both = [path_of(model, entry=2, taps=(t,)) for t in (2, 4)]
    with pytest.raises(ValueError, match="only one may read features"):
        list(SelfSpecModel(model, both).run([Request(PROMPT, 2)], Plan("ar", 1)))


def test_the_command_line_names_them_with_commas_between():
    assert options.adapters("a,b/c") == ["a", "b/c"]
    assert options.adapters("auto") == "auto" and options.adapters("none") is None
