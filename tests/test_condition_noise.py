"""Conditioned drafts of sampled texts: the noise, and the temperature, that they are made with."""

import dataclasses
import math

import pytest
import torch
from conditioned import K, V, given_of, paths_of, told_by
from decoding import N
from tiny import PROMPT
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as hf

from selfspec import choose, kernels
from selfspec.choose import Chooser
from selfspec.draft import condition
from selfspec.draft.condition import Scored
from selfspec.sampling import Pipeline, Sampling, draw
from selfspec.session import Request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows_at_once", [None, 1024, 16])  # of the vocabulary's width; None reads those asked for
def test_coupled_drafts_are_draws_from_the_head(rows_at_once, monkeypatch):
    """With all tokens as candidates a drafted chain is what the head's law and the noise of each position give."""
    monkeypatch.setattr(condition, "CANDIDATES", V)
    monkeypatch.setattr(condition, "ROWS", rows_at_once or 1024)
    table, plain, given = given_of(3, 5, read=rows_at_once is None)
    requests = [Request(PROMPT, N, sampling=Sampling(Pipeline(), i < 2, 40 + i)) for i in range(3)]
    start = torch.tensor([4, 9, 2])
    chain = Chooser().tree(requests, torch.arange(3), start, plain, None, given=given).tokens
    tree = Chooser().tree(requests, torch.arange(3), start, plain, 40, given=given)
    for row in range(3):
        token, path = row, ()
        for d in range(5):
            scores, at = table[token][None], start[row, None] + 1 + d
            token = int(draw(scores, torch.tensor([40 + row]), at) if row < 2 else scores.argmax())
            assert int(chain[row, d + 1]) == token
            path = (*path, token)
            assert d > 1 or path in paths_of(tree, row)  # the likeliest first steps


@pytest.mark.parametrize("served", [False, True])
def test_a_chain_asks_for_the_noise_of_its_candidates_alone(served, monkeypatch):
    """A sampled round made noise for every candidate's whole vocabulary, and drafted what it drafts now."""
    if served:
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE} if served else set())
    table, plain, given = given_of(3, 5)
    table, plain = table.to(DEVICE), plain.to(DEVICE)
    given = dataclasses.replace(
        given, condition=told_by(table), states=given.states.to(DEVICE), before=given.before.to(DEVICE)
    )
    cuts = LogitsProcessorList([hf.SuppressTokensLogitsProcessor([4, 9]), hf.TemperatureLogitsWarper(0.7)])
    requests = [Request(PROMPT, N, sampling=Sampling(Pipeline(cuts), i < 2, 40 + i)) for i in range(3)]
    start, seed = torch.tensor([4, 9, 2], device=DEVICE), torch.arange(40, 43, device=DEVICE)
    made, noise = [], choose.noisy
    monkeypatch.setattr(choose, "noisy", lambda scores, *key: made.append(len(scores)) or noise(scores, *key))
    chain = Chooser().tree(requests, torch.arange(3, device=DEVICE), start, plain, None, given=given).tokens
    assert made == [2 * 5]  # of the marginals: two requests' five positions
    banned = torch.isin(torch.arange(V), torch.tensor([4, 9])).to(DEVICE)
    for row in range(3):
        token = row
        for d in range(5):
            key = seed[row, None], start[row, None] + 1 + d
            both = [(x / 0.7).masked_fill(banned, -math.inf)[None] for x in (plain[row, d], table[token])]
            if row < 2:
                both = [noise(x, *key) for x in both]
            few = both[0].topk(K).indices[0]
            token = int(few[both[1][0, few].argmax()])
            assert int(chain[row, d + 1]) == token


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_low_temperature_leaves_a_tree_its_branches(conditioned):
    """Divided by 0.05, the drafter's scores seemed sure of every token: trees were chains and accepted less."""
    _, plain, given = given_of(2, 5)

    def tree(temperature):
        cuts = LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
        requests = [Request(PROMPT, N, sampling=Sampling(Pipeline(cuts), True, 40 + i)) for i in range(2)]
        return Chooser().tree(
            requests, torch.arange(2), torch.tensor([4, 9]), plain, 15, None, given if conditioned else None
        )

    still = Chooser().tree(
        [Request(PROMPT, N)] * 2, torch.arange(2), torch.tensor([4, 9]), plain, 15, None, given if conditioned else None
    )
    cold, cool = tree(1e-4), tree(0.5)
    assert torch.equal(cold.tokens, still.tokens) and torch.equal(cold.parents, still.parents)
    torch.testing.assert_close(cold.scores, still.scores, atol=1e-2, rtol=0)
    assert not torch.equal(cool.tokens, still.tokens)


def test_trees_of_other_temperatures_stand_side_by_side():
    _, plain, given = given_of(2, 5)
    kinds = [LogitsProcessorList([hf.TemperatureLogitsWarper(t)]) for t in (0.3, 0.9)]
    requests = [Request(PROMPT, N, sampling=Sampling(Pipeline(k), True, 40 + i)) for i, k in enumerate(kinds)]
    both = Chooser().tree(requests, torch.arange(2), torch.tensor([4, 9]), plain, 15, None, given)
    for i, r in enumerate(requests):
        alone = dataclasses.replace(given, states=given.states[i : i + 1], before=given.before[i : i + 1])
        one = Chooser().tree([r], torch.tensor([i]), torch.tensor([4, 9])[i : i + 1], plain[i : i + 1], 15, None, alone)
        assert torch.equal(one.tokens[0], both.tokens[i]) and torch.equal(one.parents[0], both.parents[i])


def test_a_trees_scores_count_the_vocabulary_beside_the_candidates():
    """Without noise they are the head's log-probabilities; with it a candidate's share of what could win."""
    table, plain, given = given_of(2, 3)
    ids = plain.topk(K).indices
    asked = condition.transitions(given, ids)
    still = condition.transitions(given, ids, Scored(noised=lambda scores, *_: scores))
    torch.testing.assert_close(still[0], asked[0])
    assert torch.equal(still[1], asked[1])
    loud = condition.transitions(given, ids, Scored(noised=lambda scores, tokens, _: scores + (tokens % 3).float()))
    law = table.log_softmax(-1)
    for t in range(1, 3):
        own = law[ids[0, t - 1, 2], ids[0, t]]
        rest = 1 - own.exp().sum()
        wanted = own + (ids[0, t] % 3)
        wanted = wanted - (wanted.exp().sum() + rest).log()
        torch.testing.assert_close(loud[0][0, t, 2], wanted.sort(descending=True).values)
        assert torch.equal(loud[1][0, t, 2], wanted.argsort(descending=True))


@pytest.mark.parametrize("nodes", [None, 9])
@pytest.mark.parametrize("verify", ["rejection", "multi"])
def test_drawn_drafts_know_no_head(verify, nodes):
    _, plain, given = given_of(2, 4)
    requests = [Request(PROMPT, N, sampling=Sampling(Pipeline(), True, i)) for i in range(2)]
    where = requests, torch.arange(2), torch.tensor([4, 9]), plain, nodes
    one, other = Chooser(verify).tree(*where), Chooser(verify).tree(*where, given=given)
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.probs, other.probs)
