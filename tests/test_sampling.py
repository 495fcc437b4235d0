"""Sampled text: the same seed gives the same text with and without speculation, in any batch, block size and mode."""

import pytest
import torch
from tiny import PROMPT, RAGGED, VOCAB, path_of, shallow
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, logits_process

from selfspec import SelfSpecModel, sampling
from selfspec.backbone import Backbone
from selfspec.choose import _draft_scores, _light
from selfspec.plan import Plan
from selfspec.request import Request
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Session

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
ONE = torch.tensor([PROMPT])
N = 14
SETTINGS = {
    "bare": dict(top_k=0),
    "transformers' defaults": {},
    "temperature": dict(temperature=0.6, top_k=0),
    "top_k": dict(top_k=3),
    "top_p": dict(top_p=0.8, temperature=1.2),
    "top_h": dict(top_h=0.5),
    "min_p": dict(min_p=0.2),
    "typical_p": dict(typical_p=0.7, top_k=None),
    "cutoffs": dict(epsilon_cutoff=0.05, eta_cutoff=0.05),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, temperature=0.8, presence_penalty=0.5),
    "a processor": dict(logits_processor=[lambda ids, scores: scores.roll(int(ids[0, -1]), 1)]),
    "suppressed": dict(suppress_tokens=[7, 3], renormalize_logits=True),
    "eos": dict(eos_token_id=[3, 7], min_new_tokens=4, temperature=1.5),
}


def decoder(dtype=torch.float64, noise=0.2):
    model = shallow(dtype)
    return SelfSpecModel(model, path_of(model, noise))


def padded(prompts, width=12):
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = torch.tensor(prompt), 1
    return ids, mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_changes_no_token(name, dtype):
    """Against plain decoding of each prompt alone: all modes, several blocks and trees, a ragged batch."""
    arguments = dict(do_sample=True, max_new_tokens=N, **SETTINGS[name])
    spec = decoder(dtype)
    seeds, truth = [11, 5, 2**63 + 9], []
    for prompt, seed in zip(RAGGED, seeds, strict=True):
        out = spec.generate(torch.tensor([prompt]), seed=seed, mode="ar", **arguments)
        truth.append(out[0, len(prompt) :].tolist())
    assert len({tuple(t) for t in truth}) == 3
    ids, mask = padded(RAGGED)
    turn = list(SETTINGS).index(name)  # every mode meets every kind of pipeline in one of the two dtypes
    modes = MODES if dtype == torch.float64 else (MODES[turn % 6], MODES[(turn + 2) % 6])
    for mode, block, nodes in [*((m, 5, 8) for m in modes), ("sequential", 2, 1), ("overlap+tree", 3, 3)]:
        size = {"tree_nodes": nodes} if "tree" in mode else {}
        out = spec.generate(ids, attention_mask=mask, seed=seeds, mode=mode, block_size=block, **size, **arguments)
        for row, answer in zip(out[:, 12:].tolist(), truth, strict=True):
            assert row[: len(answer)] == answer, (mode, block, nodes)
    alone = spec.generate(ONE, seed=11, mode="tree", **arguments)
    assert alone[0, len(PROMPT) :].tolist() == truth[0]


def test_coupling_helps_the_drafter():
    """A drafter that is the model itself in the first slot guesses every second token at least."""
    model = shallow()
    spec = SelfSpecModel(model, path_of(model, 0.0, shift=True, causal=True))
    spec.generate(ONE, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=40, seed=3)
    assert all(k >= 2 for k in sorted(spec.stats.accepted.elements())[1:])


def test_seeds():
    spec, many = decoder(), dict(do_sample=True, max_new_tokens=N, top_k=0)
    two = torch.tensor([PROMPT, PROMPT])
    first = spec.generate(ONE, seed=8, **many)
    assert torch.equal(first, spec.generate(ONE, seed=8, **many))
    assert not torch.equal(first, spec.generate(ONE, seed=9, **many))
    assert torch.equal(spec.generate(two, seed=8, **many)[0], first[0])  # an integer is the first prompt's
    assert torch.equal(spec.generate(two, seed=7, **many)[1], first[0])  # and the next one's is one more
    assert torch.equal(spec.generate(two, seed=[3, 8], **many)[1], first[0])
    same = spec.generate(two, seed=[8, 8], **many)
    assert torch.equal(same[0], same[1])
    several = spec.generate(ONE, seed=7, num_return_sequences=3, **many)
    assert several.shape[0] == 3 and torch.equal(several[1], first[0])
    assert torch.equal(spec.generate(ONE, seed=[7], num_return_sequences=3, **many), several)
    for bad, message in (([1], "1 seeds for 2"), (1.5, "seed=1.5"), (True, "seed=True")):
        with pytest.raises(ValueError, match=message):
            spec.generate(two, seed=bad, **many)


def test_without_a_seed_torchs_own_generator_decides():
    spec, many = decoder(), dict(do_sample=True, max_new_tokens=N, top_k=0)
    torch.manual_seed(4)
    first, second = spec.generate(ONE, **many), spec.generate(ONE, **many)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(spec.generate(ONE, mode="tree", **many), first)
    state = torch.get_rng_state()
    spec.generate(ONE, do_sample=False, max_new_tokens=3)
    spec.generate(ONE, **many, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_several_answers_a_prompt():
    spec = decoder()
    ids, mask = padded(RAGGED)
    arguments = dict(do_sample=True, max_new_tokens=6, num_return_sequences=2, logits_processor=[lambda i, s: s * 1.1])
    out = spec.generate(ids, attention_mask=mask, seed=[1, 2, 3], **arguments)
    assert out.shape == (6, 18) and torch.equal(out[:, :12], ids.repeat_interleave(2, 0))
    again = spec.generate(torch.tensor([RAGGED[1]]), seed=2, **arguments)
    assert torch.equal(again[:, 3:], out[2:4, 12:]) and len(spec.request_stats) == 2


def test_a_model_that_samples_by_default_samples():
    """The model's own configuration is read, transformers' default top-k of 50 among it."""
    from tiny import build

    model = build(vocab_size=80)
    model.generation_config = GenerationConfig(do_sample=True, temperature=3.0, pad_token_id=0)
    spec = SelfSpecModel(model)
    got = spec.generate(ONE, max_new_tokens=9, seed=2)
    arguments = dict(max_new_tokens=9, seed=2, do_sample=True, temperature=3.0)
    assert torch.equal(got, spec.generate(ONE, top_k=50, **arguments))
    assert any(not torch.equal(spec.generate(ONE, top_k=0, **{**arguments, "seed": s}),
                               spec.generate(ONE, **{**arguments, "seed": s})) for s in range(9))  # fmt: skip


def test_scores_of_sampled_tokens():
    """What was drawn from: transformers' processed scores, cuts at minus infinity."""
    model, spec = shallow(), decoder()
    out = spec.generate(
        ONE, do_sample=True, temperature=0.7, top_k=4, seed=1, max_new_tokens=N,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    assert torch.equal(
        out.sequences, spec.generate(ONE, do_sample=True, temperature=0.7, top_k=4, seed=1, max_new_tokens=N)
    )
    with torch.no_grad():
        logits = model(out.sequences).logits[0, len(PROMPT) - 1 : -1].float()
    assert torch.allclose(torch.cat(out.logits), logits, atol=1e-5)
    for score, raw, token in zip(out.scores, logits / 0.7, out.sequences[0, len(PROMPT) :], strict=True):
        kept = raw.topk(4).indices
        assert set(score[0].isfinite().nonzero()[:, 0].tolist()) == set(kept.tolist()) and token in kept
        assert torch.allclose(score[0, kept], raw[kept], atol=1e-5)


def test_requests_of_all_kinds_share_a_session():
    """Greedy, sampled, penalised, each with settings of its own, run together as they run alone."""
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

    def kinds():
        cold = Pipeline(LogitsProcessorList([TemperatureLogitsWarper(0.5)]))
        strict = Pipeline(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]))
        return [None, Sampling(Pipeline(), True, 3), Sampling(cold, True, 4), Sampling(cold, True, 5),
                Sampling(strict), Sampling(strict, True, 6), Sampling(cold)]  # fmt: skip

    model = shallow()
    body = Backbone(model, path_of(model, 0.2))

    def run(requests, mode, slots):
        session = Session(body, Plan(mode, 5, 8), slots, 40)
        waiting = list(requests)
        while waiting or session.active:
            free = slots - len(session.active)
            if free and waiting:
                session.add([waiting.pop(0) for _ in range(min(free, len(waiting)))])
            session.step() if session.active else None
        return [r.output for r in requests]

    make = lambda: [Request(RAGGED[i % 3], 9 + i, sampling=s) for i, s in enumerate(kinds())]  # noqa: E731
    truth = [run([r], "ar", 1)[0] for r in make()]
    for mode in MODES:
        assert run(make(), mode, 7) == truth
        assert run(make(), mode, 3) == truth


@pytest.mark.parametrize("verify", ["rejection", "block", "multi"])
def test_other_verifiers_run_in_batches_and_repeat(verify):
    """Their text depends on drafts and block sizes; the same call gives it again. (The law is tested elsewhere.)"""
    spec = decoder()
    ids, mask = padded(RAGGED)
    modes = ["ar", "sequential", "overlap"] + (["tree", "overlap+tree"] if verify == "multi" else [])
    for mode in modes:
        arguments = dict(
            attention_mask=mask, do_sample=True, max_new_tokens=N, verify=verify, mode=mode, repetition_penalty=1.2
        )
        out = spec.generate(ids, seed=[4, 5, 6], **arguments)
        assert out.shape == (3, 12 + N) and int(out.min()) >= 0 and int(out.max()) < VOCAB
        assert torch.equal(spec.generate(ids, seed=[4, 5, 6], **arguments), out)
        assert spec.stats.tokens == 3 * (N - 1)


REFUSED = {
    "an unknown processor": (dict(logits_processor=[lambda i, s: s]), "does not know"),
    "scores": (dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
    "greedy": (dict(do_sample=False), "greedy"),
    "no such verifier": (dict(verify="typical"), "typical"),
    "looked-up drafts": (dict(mode="lookup"), "looked-up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_verifier_cannot_do_is_refused(name):
    extra, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        decoder().generate(ONE, **{"do_sample": True, "max_new_tokens": 4, "verify": "block", **extra})


# ---- the noise


def test_the_hash_is_pinned():
    """The same on every device and in every release: integers by hand."""
    m = (1 << 64) - 1

    def mixed(h):
        h = (h + 0x9E3779B97F4A7C15) & m
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & m
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & m
        return h ^ (h >> 31)

    for parts in ([0], [7, 3], [2**63 - 1, 0, 5], [-4, 9, 1]):
        h = 0
        for p in parts:
            h = mixed((h + p) & m)
        assert int(sampling.hashed(*parts)) & m == h
        assert float(sampling.uniform(*parts)) == ((h >> 12) + 0.5) / 2**52


@pytest.mark.gpu
def test_the_noise_is_the_same_on_the_gpu():
    seed, position, token = torch.arange(50)[:, None, None], torch.arange(40)[:, None], torch.arange(500)
    here = sampling.hashed(seed, position, token)
    there = sampling.hashed(seed.cuda(), position.cuda(), token.cuda())
    assert torch.equal(here, there.cpu())
    here, there = (sampling.gumbel(*(x.to(d) for x in (seed, position, token))).cpu() for d in ("cpu", "cuda"))
    assert (here - there).abs().max() < 1e-12


def test_uniforms_are_uniform_and_unrelated():
    u = sampling.uniform(torch.arange(300)[:, None], torch.arange(300))
    assert u.min() > 0 and u.max() < 1
    assert (u.flatten().sort().values - torch.linspace(0, 1, 90000)).abs().max() < 0.006  # Kolmogorov-Smirnov
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, :-1], u[:-1, 1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.015


def test_gumbel_noise_draws_from_the_softmax():
    n, scores = 100000, torch.tensor([0.1, 2.0, -1.0, 0.5, float("-inf")])
    drawn = sampling.draw(scores.expand(n, 5), torch.full((n,), 7), torch.arange(n))
    found, p = torch.bincount(drawn, minlength=5) / n, scores.softmax(-1)
    assert (found - p).abs().max() < 5 * 0.5 / n**0.5 and found[4] == 0


def test_draws_in_parts_are_the_same_draws(monkeypatch):
    scores, seed, position = torch.randn(37, 11), torch.arange(37), torch.arange(37) * 3
    whole = sampling.draw(scores, seed, position)
    monkeypatch.setattr(sampling, "CHUNK", 50)
    assert torch.equal(sampling.draw(scores, seed, position), whole)


def test_guesses_do_without_cuts_and_drawn_drafts_do_not():
    """A coupled draft keeps the temperature alone; the q that rejection weighs is the one that was cut."""
    cuts = [logits_process.TemperatureLogitsWarper(0.5), logits_process.TopKLogitsWarper(1)]
    request = Request([1], 4, sampling=Sampling(Pipeline(LogitsProcessorList(cuts)), True, 3))
    logits = torch.tensor([[[0.0, 1.0, 3.0]]])
    assert torch.equal(_draft_scores([request], logits, _light), logits / 0.5)
    assert torch.equal(
        _draft_scores([request], logits, lambda r: r.cuts)[0, 0], torch.tensor([-torch.inf, -torch.inf, 6.0])
    )
    assert request.cuts is request.recipe.cuts  # so that a graph's key keeps its constants
