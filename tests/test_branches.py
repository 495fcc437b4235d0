"""RecGuide's branches at work: what a draft is corrected to is in a group of its own, which then is the next draft."""

import numpy as np
import pytest
import torch
from decoding import B
from test_replay import Replayed
from tiny import RAGGED, VOCAB, OraclePath, model_of, path_of, reference, run

from selfspec.backbone import Backbone
from selfspec.model import SelfSpecModel
from selfspec.plan import BRANCHES, CORRECTIONS, Plan, menu
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import DEPTH, Family, families
from selfspec.plan.policy import Fixed
from selfspec.plan.table import LatencyTable
from selfspec.plan.value import SECOND, Values
from selfspec.pruning import Pruning
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session

PLAN = Plan("overlap", B, groups=BRANCHES)
N = 21


class Unsure(OraclePath):
    """Its first wrong guess is unsure, with the true token as second candidate (or another one, if it is `misled`)."""

    misled = drafted = False

    def embed(self, rows, backbone):
        n, d = rows.tokens.shape
        right, block = self.right(0), self.config.block_size
        out = []
        for i, request in enumerate(self.session.active):
            last = block - 1 if self.drafted or self.session.slots.ready[i] else 0  # a miss leaves the anchor alone
            emitted = int(self.session.slots.start[i]) - len(request.prompt) + 1  # of which some may be on their way
            for j in range(d):
                group, slot = divmod(j, block)
                node = -1 if d <= block else (right, 0, last)[group]  # of the correction, of padding, the last one
                true = self.truth[request][emitted + node + slot]
                wrong, second = (true + 1) % VOCAB, (true + 2) % VOCAB if self.misled else true
                doubt = self.states[wrong] + 0.95 * self.states[second]
                out.append(self.states[true] if slot <= right else doubt if slot == right + 1 else self.states[wrong])
        self.drafted = d <= block
        return torch.stack(out).view(n, d, -1).to(backbone.device, backbone.dtype)


def unsure(right, misled=False, n=N, prompts=RAGGED, graphs=False):
    """Requests decoded with it."""
    model = model_of()
    truth = reference(model, prompts, n + 4 * B)
    path = Unsure(model, {}, right, B)
    path.misled, capacity = misled, max(map(len, prompts)) + n
    session = Session(Backbone(model, path), PLAN, len(prompts), capacity, graphs=graphs)
    requests = [Request(p, n) for p in prompts]
    path.session, path.truth = session, dict(zip(requests, truth, strict=True))
    run(session, requests)
    assert [r.output for r in requests] == [t[:n] for t in truth]
    return requests


@pytest.fixture
def sharp(monkeypatch):
    """One-hot states of a tiny model are not very sure of themselves: what counts as risky lies lower."""
    monkeypatch.setattr("selfspec.draft.overlap.RISKY", 0.2)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_correction_that_comes_true_is_the_next_draft(right, sharp):
    """Every round but the last leaves a draft, and one draft pass serves the whole text."""
    for r in unsure(right, n=1 + 5 * (right + 1)):
        assert dict(r.stats.accepted) == {right + 1: 5} and r.stats.saved >= 4
        assert r.stats.drafts == pytest.approx(0.25)  # of four layers one


@pytest.mark.parametrize("right", [0, 2])
def test_another_token_than_the_second_candidate_is_a_miss(right, sharp):
    """A draft pass follows: the next round accepts as much as any."""
    for r in unsure(right, misled=True, n=1 + 5 * (right + 1)):
        assert dict(r.stats.accepted) == {right + 1: 5} and r.stats.saved <= 1  # at the end nothing is left to miss
        assert r.stats.drafts in (4 * 0.25, 5 * 0.25)


@pytest.mark.parametrize("right", [0, 2])
def test_a_miss_of_rounds_that_are_started_ahead_costs_a_round_of_the_anchor(right, sharp):
    """With graphs nobody has read of it when the next round starts."""
    for r in unsure(right, misled=True, n=1 + 4 * (right + 2), graphs=Replayed()):
        assert r.stats.accepted == ({1: 8} if not right else {right + 1: 4, 1: 4}) and r.stats.saved in (4, 5)
        assert r.stats.drafts in (0.25, 0.5)  # a second one where somebody's prompt took longer


def test_after_a_whole_chain_the_continuation_is_there(sharp):
    for r in unsure(B - 1, n=1 + 4 * B):
        assert dict(r.stats.accepted) == {B: 4} and r.stats.saved >= 3


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rule", [None, "product:threshold=0.3"])
def test_the_text_is_plain_decodings(family, graphs, rule):
    """Chains of all lengths, whole and pruned; a queue behind two slots."""
    model = model_of(family)
    body = Backbone(model, path_of(model, 0.3))
    plan = Plan("overlap", B, groups=BRANCHES)
    pruning = None if rule is None else Pruning(rule, [body])
    session = Session(body, Fixed(plan, pruning), 2, 64, graphs=Replayed() if graphs else False)
    requests = [Request(p, N) for p in RAGGED]
    run(session, requests[:2], requests[2:])
    assert [r.output for r in requests] == reference(model, RAGGED, N)
    assert sum(r.stats.saved for r in requests)


@pytest.mark.parametrize("verify", ["coupled", "rejection", "block"])
def test_sampled_texts(verify):
    """Coupled, they are plain decoding's; drawn drafts keep their law, so the text is one."""
    model, texts = model_of(), {}
    body = Backbone(model, path_of(model, 0.3))
    for plan in (Plan("ar", 1), PLAN):
        requests = [Request(p, N, sampling=Sampling(Pipeline(), True, i)) for i, p in enumerate(RAGGED)]
        run(Session(body, plan, 3, 64, verify), requests)
        texts[plan] = [r.output for r in requests]
    assert all(len(t) == N for t in texts[PLAN])
    assert verify != "coupled" or texts[PLAN] == texts[Plan("ar", 1)]


def test_which_plans_branch():
    assert PLAN.kept == CORRECTIONS + 1 and PLAN.group_rows == 3 * B and Plan("overlap", 2, groups=BRANCHES).nodes == 2
    assert str(PLAN) == "overlap B=5 groups=branches" and families(PLAN)[1] == Family("branch")
    for made in (dict(mode="overlap+tree", groups=BRANCHES), dict(mode="overlap", groups="few"), dict(groups=BRANCHES)):
        with pytest.raises(ValueError, match="groups"):
            Plan(**made)
    paths = [path_of(model_of(), layouts=("known", "hidden"), block_size=b).config for b in (4, 16)]
    assert [(p.block_size, p.adapter) for p in menu(paths) if p.branches] == [(4, 0), (16, 1)]
    decoder = SelfSpecModel(model_of(), path_of(model_of(), block_size=4))
    assert decoder.plan("overlap/b=3/groups=branches") == Plan("overlap", 3, groups=BRANCHES)
    with pytest.raises(ValueError, match="NUMBER"):
        decoder.plan("overlap/b=branches")


def test_their_chance_is_expected_and_then_learnt():
    """Of the two likeliest ends a share, and the whole chain's."""
    plans = [Plan("ar", 1), Plan("overlap", 4, groups=BRANCHES)]
    values = Values(plans, {f: 0 for p in plans for f in families(p)}, Costs(LatencyTable((), 4, {})))
    survival = np.array([0.8, 0.5, 0.4, *[0.1] * (DEPTH - 3)])[None, None]
    [[chance]] = values.kept(survival)  # ends: 0.2, 0.3, 0.1, 0.4
    assert chance == pytest.approx(SECOND * (0.4 + 0.3) + 0.4)
    for _ in range(500):
        values.saw(1, 1, 4)
    assert values.kept(survival)[0, 0] == pytest.approx(0.25, abs=0.1)
