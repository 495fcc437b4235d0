"""Decoding is token for token what transformers answers, whatever is drafted, and the counts are the true ones."""

import pytest
import torch
from decoding import MODES, B, N, Rounds, decoded, oracle, outputs
from tiny import (
    FAMILIES,
    LAYERS,
    PROMPT,
    RAGGED,
    VOCAB,
    model_of,
    path_of,
    propose,
    reference,
    run,
)

from selfspec import rows
from selfspec.backbone import Backbone
from selfspec.draft.block import draft_inputs
from selfspec.draft.overlap import attach, hidden
from selfspec.plan import Plan
from selfspec.session import Request, Session
from selfspec.stats import total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_mode(family, mode):
    """Batch of three ragged prompts; the kind of adapter goes round with family and mode, so that each meets each."""
    model, turn = model_of(family), list(FAMILIES).index(family) + MODES.index(mode)
    shift = turn % 2 == 0
    path = path_of(
        model,
        entry=(0, 2)[turn // 2 % 2],
        tuning=("lora", "copy")[turn // 4 % 2],
        shift=shift,
        causal=shift or turn % 3 == 0,
        mask_embedding=("one", "per_slot")[turn % 2],
    )
    requests = decoded(Backbone(model, path), Plan(mode, B, 8), RAGGED, N)
    assert outputs(requests) == reference(model, RAGGED, N)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shift, causal", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("tuning", ["lora", "copy"])
@pytest.mark.parametrize("entry", [0, 3])
def test_every_kind_of_adapter(entry, tuning, shift, causal, batch):
    model = model_of("Ministral")
    body = Backbone(model, path_of(model, entry=entry, tuning=tuning, shift=shift, causal=causal))
    truth = reference(model, RAGGED[:batch], N)
    for mode in MODES[1:]:
        assert outputs(decoded(body, Plan(mode, B, 8), RAGGED[:batch], N)) == truth


@pytest.mark.parametrize("mode", ["sequential", "tree"])
@pytest.mark.parametrize("taps", [(4,), (0, 2, 4)])
def test_features(mode, taps):
    model = model_of()
    body = Backbone(model, path_of(model, 0.3, entry=2, taps=taps))
    requests = decoded(body, Plan(mode, B, 8), [*RAGGED, [1, 2]], N, slots=2)
    assert outputs(requests) == reference(model, [*RAGGED, [1, 2]], N)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["sequential", "tree"])
def test_features_belong_to_the_last_committed_position(mode):
    model = model_of()
    body = Backbone(model, path_of(model, 0.3, entry=2, taps=(1, 4)))
    session = Session(body, Plan(mode, B, 8), 3, 40)
    requests = [Request(p, 20) for p in RAGGED]
    session.add(requests)
    session.step()
    for _ in range(3):
        for request, got in zip(requests, session.slots.features, strict=True):
            text = torch.tensor([request.prompt + request.output[:-1]])
            states = model(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states
            assert torch.allclose(got, torch.cat([states[1][0, -1], states[4][0, -1]]), atol=1e-12)
        session.step()


def test_overlap_refuses_features_it_cannot_have_before_any_work():
    model = model_of()
    body = Backbone(model, path_of(model, entry=2, taps=(1, 3)))
    with pytest.raises(ValueError, match="features"):
        Session(body, Plan("overlap", B), 1, 20)


@pytest.mark.parametrize("mode", ["overlap", "overlap+tree"])
@pytest.mark.parametrize("taps", [(2,), (0, 1)])
def test_overlapped_groups_with_features(mode, taps):
    model = model_of()
    body = Backbone(model, path_of(model, 0.3, entry=2, taps=taps))
    requests = decoded(body, Plan(mode, B, 8), [*RAGGED, [1, 2]], N, slots=2)
    assert outputs(requests) == reference(model, [*RAGGED, [1, 2]], N)
    assert any(r.stats.saved for r in requests)


@torch.no_grad()
def test_a_group_reads_the_features_of_its_node():
    """It drafts what a group does that is given the features of that position once it is committed."""
    model = model_of()
    path = path_of(model, 0.3, entry=2, taps=(0, 2))
    body = Backbone(model, path)
    ids = torch.tensor([PROMPT])
    cache = body.new_cache(1, ids.shape[1], 40)
    chain = rows.chain(torch.tensor([0]), ids.shape[1])
    nodes = torch.tensor([[4, 2, -1]])
    layout, inputs = attach(chain, hidden(nodes), B, reads=True)
    drafts = body(layout, cache, ids, inputs).draft.unflatten(1, (3, B))
    for group, node in enumerate((4, 2)):
        short = ids[:, : node + 1]
        cache = body.new_cache(1, 10, 40)
        taps = body(rows.chain(torch.tensor([0]), node + 1), cache, short).taps[:, -1:]
        cache.commit([node + 1])
        given = draft_inputs(None, 1, B, 1, ids.device, taps)
        alone = body(rows.block(torch.tensor([node + 1]), B), cache, draft=given).draft
        assert torch.allclose(drafts[:, group], alone, atol=1e-12)


def test_blocks_of_one_are_plain_decoding():
    model = model_of()
    body = Backbone(model, path_of(model))
    plain = decoded(body, Plan("ar", 1), RAGGED, N)
    for mode in MODES[1:]:
        requests = decoded(body, Plan(mode, 1), RAGGED, N)
        assert outputs(requests) == outputs(plain)
        assert [r.stats for r in requests] == [r.stats for r in plain]
    assert all(r.stats.tau == r.stats.tpf == 1 and r.stats.rounds == N - 1 for r in plain)


# ---- drafters that are always, never and sometimes right


@pytest.mark.parametrize("right", range(B))
@pytest.mark.parametrize("mode", ["sequential", "overlap"])
@pytest.mark.parametrize("shift", [False, True])
def test_tau_of_a_drafter_of_known_quality(right, mode, shift):
    """The first token comes from the prefill; every round emits the right guesses and the bonus, trimmed at the cap."""
    n = 1 + 4 * (right + 1)
    requests, truth = oracle(right, n, mode=mode, shift=shift)
    for request, answer in zip(requests, truth, strict=True):
        assert request.output == answer[:n]
        assert request.stats.rounds == 4 and request.stats.tokens == n - 1
        assert request.stats.accepted == {right + 1: 4}
        assert request.stats.tau == right + 1


def test_tau_is_trimmed_at_the_cap():
    requests, _ = oracle(4, n=9)  # 1 + 5 + 3
    for request in requests:
        assert dict(request.stats.accepted) == {5: 1, 3: 1} and request.stats.tau == 4


def test_tau_is_trimmed_at_eos():
    [answer] = reference(model_of(), RAGGED[2:], 20)
    end = next(i for i in range(2, 20) if answer[i] not in answer[:i])
    [request], _ = oracle(4, n=20, prompts=RAGGED[2:], eos=[answer[end]])
    assert request.output == answer[: end + 1] and request.finish_reason == "stop"
    assert request.stats.tokens == end and sum(k * v for k, v in request.stats.accepted.items()) == end
    assert request.stats.rounds == -(-end // 5)


def test_sometimes_right():
    """Three true guesses, then none, then two, by the number of tokens emitted."""
    right = {1: 3, 5: 0, 6: 2, 9: 4}
    requests, truth = oracle(lambda emitted: right.get(emitted, 0), n=15)
    for request, answer in zip(requests, truth, strict=True):
        assert request.output == answer[:15]
        # 1 | 4 -> 5 | 1 -> 6 | 3 -> 9 | 5 -> 14 | the cap cuts the block to its root -> 15
        assert dict(request.stats.accepted) == {4: 1, 1: 2, 3: 1, 5: 1}


@pytest.mark.parametrize("entry", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_forwards_are_counted(mode, entry):
    """A verify counts one whatever rides in it, a draft (L - e) / L; the histogram sums to the rounds."""
    model = model_of()
    body, calls = Backbone(model, path_of(model, entry=entry)), {"verify": 0, "draft": 0.0}
    inner = body.forward

    def counted(layout, cache, tokens=None, draft=None, first=0, n_keys=None):
        if layout.n_clean:
            calls["verify"] += 1
        else:
            calls["draft"] += 1 - entry / LAYERS
        return inner(layout, cache, tokens, draft, first)

    body.forward = counted
    [request] = decoded(body, Plan(mode, B, 8), [PROMPT], N)
    stats = request.stats
    assert stats.rounds == calls["verify"] - 1  # one prefill
    assert stats.drafts == pytest.approx(calls["draft"])
    assert sum(stats.accepted.values()) == stats.rounds
    assert sum(k * v for k, v in stats.accepted.items()) == stats.tokens == N - 1
    assert stats.tpf == pytest.approx((N - 1) / (calls["verify"] - 1 + calls["draft"]))
    assert stats.prompt_tokens == len(PROMPT)


def test_sums_of_stats():
    requests, _ = oracle(2, n=11)
    whole = total([r.stats for r in requests])
    assert whole.rounds == sum(r.stats.rounds for r in requests)
    assert whole.tau == sum(r.stats.tokens for r in requests) / whole.rounds
    assert whole.accepted.total() == whole.rounds


# ---- what is drafted


@torch.no_grad()
@pytest.mark.parametrize("mode", ["sequential", "tree", "overlap", "overlap+tree"])
def test_the_mask_id_is_never_drafted_but_may_be_emitted(mode):
    """The mask's vocabulary id is the first token that the model itself emits."""
    model = model_of()
    [answer] = reference(model, [PROMPT], N)
    for mask_id in answer[1], answer[2]:
        body = Backbone(model, path_of(model, mask_id=mask_id, noise=0.0))
        session = Session(body, Plan(mode, B, 30), 1, 40)
        request, drawn, build_tree = Request(PROMPT, N), [], session.chooser.tree

        def watched(*args, drawn=drawn, build_tree=build_tree):
            drawn.append(build_tree(*args))
            return drawn[-1]

        session.chooser.tree = watched
        run(session, [request])
        assert request.output == answer
        assert not any((tree.tokens[:, 1:] == mask_id).any() for tree in drawn)
        assert any(tree.n_nodes > 1 for tree in drawn)


@torch.no_grad()
@pytest.mark.parametrize("shift", [False, True])
def test_a_draft_hung_on_the_anchor_is_a_draft_of_the_next_positions(shift):
    """Overlap's marginals for the outcome that came equal those of a group drafted alone after the same text."""
    model = model_of()
    path = path_of(model, 0.1, shift=shift, causal=True)
    body = Backbone(model, path)
    session = Session(body, Plan("overlap", B), 1, 40)
    session.add([Request(PROMPT, 20)])
    session.step()
    session.step()
    [request] = session.active
    saved = session.slots.saved
    # the same group, its slot 0 masked, behind a committed text
    cache, text = body.new_cache(1, 40, 40), request.prompt + request.output[:-1]
    body(rows.chain(torch.tensor([0]), len(text)), cache, torch.tensor([text]))
    cache.lengths = [len(text)]
    masks = draft_inputs(None, 1, B, 1, torch.device("cpu"))
    alone = body.logits(body(rows.block(torch.tensor([len(text)]), B, True), cache, draft=masks).draft)
    # slot 0 stands on the bonus; drafts are for the positions after it
    wanted = alone[:, :-1] if shift else alone[:, 1:]
    assert saved.shape == wanted.shape and torch.allclose(saved, wanted, atol=1e-10)


@torch.no_grad()
def test_hand_made_trees():
    """No drafter at all: trees written down here, around the model's true continuation."""
    model = model_of()
    [answer] = reference(model, [PROMPT], 8)
    wrong = [(t + 1) % VOCAB for t in answer]
    body = Backbone(model)
    cases = {  # tokens after the anchor, parents, tokens emitted
        "nothing drafted": ([], [-1], 1),
        "never": (wrong[1:4], [-1, 0, 1, 2], 1),
        "always": (answer[1:4], [-1, 0, 1, 2], 4),
        "second branch": ([wrong[1], answer[1], answer[2], wrong[3]], [-1, 0, 0, 2, 3], 3),
        "right token, wrong parent": ([wrong[1], answer[2]], [-1, 0, 1], 1),
        "padding": ([answer[1], -1, -1], [-1, 0, -1, -1], 2),
        "interleaved": ([wrong[1], answer[1], wrong[2], answer[2], answer[3]], [-1, 0, 0, 1, 2, 4], 4),
    }
    for name, (tokens, parents, count) in cases.items():
        play = Rounds(body, PROMPT)
        assert play(tokens, parents) == answer[1 : 1 + count], name
        for i in range(1 + count, 8):  # go on plainly: what was committed is the right text
            assert play() == [answer[i]], name


@torch.no_grad()
def test_drafting_leaves_the_committed_text_alone():
    model = model_of()
    body = Backbone(model, path_of(model, 0.3))
    play = Rounds(body, PROMPT)
    before = [s[:, :, : len(PROMPT)].clone() for s in play.cache.stores]
    propose(body, play.cache, play.anchor, play.slots.start, B, body.path.config)
    assert play.cache.lengths == [len(PROMPT)]
    for old, new in zip(before, play.cache.stores, strict=True):
        assert torch.equal(old, new[:, :, : len(PROMPT)])
