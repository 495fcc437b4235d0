"""Scores of every node at once are, to the last bit, what transformers' own classes give on each node's true text."""

import random

import pytest
import torch
from tiny import PROMPT, model_of, path_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from selfspec import SelfSpecModel, kernels
from selfspec.choose import device_targets, graph_key, on_device, text_of
from selfspec.draft import DraftTree
from selfspec.nodes import Nodes, Text, part_of
from selfspec.penalties import PresenceFrequencyPenalty
from selfspec.recipe import Few, cuts_of, recipe_of
from selfspec.request import Request
from selfspec.runs import Run
from selfspec.sampling import Pipeline, Sampling, draw
from selfspec.steps import Decay, Force

pytestmark = pytest.mark.usefixtures("chains")

V = 30
EOS = torch.tensor([3, 7])

# a maker of processors from the prompt's ids: transformers' own, as `generate` builds them
KINDS = {
    "temperature": lambda p: [hf.TemperatureLogitsWarper(0.7)],
    "top_k": lambda p: [hf.TopKLogitsWarper(4)],
    "top_p": lambda p: [hf.TopPLogitsWarper(0.8)],
    "top_h": lambda p: [hf.TopHLogitsWarper(0.5)],
    "min_p": lambda p: [hf.MinPLogitsWarper(0.1)],
    "typical": lambda p: [hf.TypicalLogitsWarper(0.6)],
    "epsilon": lambda p: [hf.EpsilonLogitsWarper(0.03)],
    "eta": lambda p: [hf.EtaLogitsWarper(0.3)],
    "suppress": lambda p: [hf.SuppressTokensLogitsProcessor([4, 9, V + 5])],
    "begin_suppress": lambda p: [hf.SuppressTokensAtBeginLogitsProcessor([4, 9], len(p) + 2)],
    "normalise": lambda p: [hf.TopKLogitsWarper(5), hf.LogitNormalization()],
    "finite": lambda p: [hf.SuppressTokensLogitsProcessor([4]), hf.InfNanRemoveLogitsProcessor()],
    "min_length": lambda p: [hf.MinLengthLogitsProcessor(len(p) + 3, EOS)],
    "min_new_tokens": lambda p: [hf.MinNewTokensLengthLogitsProcessor(len(p), 4, EOS)],
    "forced_eos": lambda p: [hf.ForcedEOSTokenLogitsProcessor(len(p) + 4, EOS)],
    "forced_bos": lambda p: [hf.ForcedBOSTokenLogitsProcessor(5)],
    "decay": lambda p: [hf.ExponentialDecayLengthPenalty((2, 1.3), EOS, len(p))],
    "decay after a ban": lambda p: [*KINDS["min_new_tokens"](p), *KINDS["decay"](p)],
    "repetition": lambda p: [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "repetition from a place on": lambda p: [hf.RepetitionPenaltyLogitsProcessor(0.8, prompt_ignore_length=len(p) - 1)],
    "repetition of the prompt": lambda p: [hf.EncoderRepetitionPenaltyLogitsProcessor(1.4, torch.tensor([p]))],
    "presence, frequency": lambda p: [PresenceFrequencyPenalty(0.3, 0.7, len(p))],
    **{f"{n}-grams": lambda p, n=n: [hf.NoRepeatNGramLogitsProcessor(n)] for n in (1, 2, 3, 4, 9)},
    **{
        f"{n}-grams of the prompt": lambda p, n=n: [hf.EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor([p]))]
        for n in (1, 2, 3)
    },
    "bad words": lambda p: [hf.NoBadWordsLogitsProcessor([[0], [1, 2], [2, 2, 0], [3]], EOS)],
    "bias": lambda p: [
        hf.SequenceBiasLogitsProcessor({(2,): 0.7, (0, 1): -1.3, (2, 0, 1): 0.9, (1, 1): 0.4, (0, 0, 2, 1): 3.1})
    ],
    "everything": lambda p: [
        *(x for k in ("bias", "repetition", "2-grams", "bad words", "min_new_tokens", "suppress") for x in KINDS[k](p)),
        *(x for k in ("presence, frequency", "temperature", "top_k", "top_p", "normalise") for x in KINDS[k](p)),
    ],
    "generate's order": lambda p: [
        *(
            x
            for k in ("repetition", "3-grams", "bad words", "min_new_tokens", "decay", "suppress")
            for x in KINDS[k](p)
        ),
        *(x for k in ("presence, frequency", "temperature", "top_k", "top_p", "min_p", "typical") for x in KINDS[k](p)),
    ],
    "another order": lambda p: [
        *(x for k in ("presence, frequency", "2-grams", "repetition", "forced_eos", "decay") for x in KINDS[k](p)),
        *(x for k in ("temperature", "bad words", "presence, frequency", "suppress") for x in KINDS[k](p)),
    ],
}


def texts(rng, sizes=((3, 4), (1, 0), (9, 2), (2, 9))):
    """Prompts and answers over few tokens, so that n-grams come again."""
    return [([rng.randrange(3) for _ in range(p)], [rng.randrange(3) for _ in range(a)]) for p, a in sizes]


def random_tree(rng, n, m, chain):
    tokens = torch.tensor([[rng.randrange(3) for _ in range(m)] for _ in range(n)])
    if chain:
        return DraftTree(tokens)
    parents = torch.tensor([[-1, *(rng.randrange(i) for i in range(1, m))] for _ in range(n)])
    for i in range(n - 1):  # padding, fewer and fewer
        tokens[i, m - i :] = parents[i, m - i :] = -1
    return DraftTree(tokens, parents)


def cases(maker, chain, seed):
    """Requests of one kind, a random tree on each, and every node's true text."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    asked = [
        Request(p, 40, output=o, sampling=Sampling(Pipeline(LogitsProcessorList(maker(p))))) for p, o in texts(rng)
    ]
    n, m = len(asked), 7
    tree = random_tree(rng, n, m, chain)
    logits = 3 * torch.randn(n, m, V, generator=g)
    start = torch.tensor([len(r.prompt) + len(r.output) - 1 for r in asked])
    for i, r in enumerate(asked):
        tree.tokens[i, 0] = (r.prompt + r.output)[-1]
    return asked, tree, logits, start


def true_texts(request, tree, i):
    """The text of each node; None for padding."""
    parents = range(-1, tree.n_nodes - 1) if tree.parents is None else tree.parents[i].tolist()
    out = [request.prompt + request.output]
    for token, parent in list(zip(tree.tokens[i].tolist(), parents))[1:]:
        out.append(None if token < 0 else [*out[parent], token])
    return out


@pytest.fixture(params=["torch", "kernels"])
def how(request, monkeypatch):
    if request.param == "kernels":
        pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels, "DEVICES", {"cpu"} if request.param == "kernels" else set())
    elif request.param == "kernels":
        pytest.skip("transformers divides otherwise on a GPU, so that last bits differ")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chain", [True, False])
def test_every_node_has_the_scores_of_its_own_text(name, chain, how):
    changed = 0
    for seed in range(3):
        requests, tree, logits, start = cases(KINDS[name], chain, seed)
        assert len({r.recipe for r in requests}) == 1 or name == "forced_bos" or "place" in name
        text = text_of(requests, start.device)
        spare = torch.full((len(requests), 5), 2)  # what stands behind a text is never read
        text = Text(torch.cat([text.tokens, spare], 1), text.prompt, text.seed)
        if text.tokens.shape[1] > 5:
            for i, r in enumerate(requests):
                text.tokens[i, len(r.prompt) + len(r.output) :] = seed % 3
        for i, r in enumerate(requests):
            nodes = Nodes(part_of(tree, [i]), start[i : i + 1], text.part([i]))
            got = r.recipe(nodes, logits[i : i + 1])[0]
            for node, true in enumerate(true_texts(r, tree, i)):
                if true is not None:
                    raw = logits[i, node : node + 1]
                    wanted = r.sampling.pipeline(torch.tensor([true]), raw)
                    assert torch.equal(got[node : node + 1], wanted), (name, seed, i, node)
                    changed += not torch.equal(wanted, raw)
    assert changed >= {"forced_bos": 1, "9-grams": 0}.get(name, 3)  # the processor does something somewhere


@pytest.mark.parametrize("chain", [True, False])
def test_requests_of_all_kinds_are_chosen_together(chain, how):
    """Mixed parameters, greedy and drawn, in one batch: each as its own pipeline and seed say."""
    names = ["everything", "top_p", "repetition", "everything", "3-grams", "generate's order"]
    makers = [KINDS[n] for n in names]
    rng = random.Random(5)
    made = texts(rng, [(3, 4), (1, 0), (9, 2), (2, 9), (4, 4), (5, 1)])
    requests = [
        Request(p, 40, output=o, sampling=Sampling(Pipeline(LogitsProcessorList(f(p))), i % 2 == 0, 70 + i))
        for i, ((p, o), f) in enumerate(zip(made, makers))
    ]
    requests.append(Request([1, 2], 40))
    n, m = len(requests), 6
    tree = random_tree(rng, n, m, chain)
    logits = torch.randn(n, m, V, generator=torch.Generator().manual_seed(1))
    start = torch.tensor([len(r.prompt) + len(r.output) - 1 for r in requests])
    got = device_targets(requests, tree, logits, start, text_of(requests, start.device))
    for i, r in enumerate(requests):
        for node, true in enumerate(true_texts(r, tree, i)):
            if true is None:
                continue
            scores = logits[i, node : node + 1]
            if r.sampling is not None:
                scores = r.sampling.pipeline(torch.tensor([true]), scores)
                if r.sampling.sample:
                    scores = draw(scores, torch.tensor([r.sampling.seed]), torch.tensor([len(true)]))
                    assert int(scores) == int(got[i, node])
                    continue
            assert int(scores.argmax()) == int(got[i, node])


class NoHostReads(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading a value, shapes that depend on values, tensors from the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(w in name for w in ("_local_scalar", "nonzero", "_unique", "masked_select", "equal.default")), (
            name
        )
        out = func(*args, **(kwargs or {}))
        flat = [t for a in (*args, out) for t in (a if isinstance(a, list | tuple) else [a])]
        assert not [t for t in flat if isinstance(t, torch.Tensor) and t.dim() and t.device.type != "meta"], name
        return out


@pytest.mark.parametrize("name", [*KINDS, "mixed"])
def test_nothing_is_read_from_the_host(name):
    """On a device without values, where reading one is an error."""
    requests, tree, logits, start = cases(KINDS["top_p" if name == "mixed" else name], False, 0)
    if name == "mixed":
        requests[1] = cases(KINDS["everything"], False, 0)[0][1]
        requests[3] = Request(requests[3].prompt, 40, output=requests[3].output)
    for r in requests[::2]:
        r.sampling = Sampling(r.sampling.pipeline, True, 3)
    text = text_of(requests, start.device)
    meta = [t.to("meta") for t in (tree.tokens, tree.parents, logits, start, text.tokens, text.prompt, text.seed)]
    arguments = requests, DraftTree(*meta[:2]), meta[2], meta[3], Text(*meta[4:])
    device_targets(*arguments)  # as before a capture: constants are made
    with NoHostReads():
        assert device_targets(*arguments).shape == tree.tokens.shape


def test_such_a_read_would_be_found():
    with NoHostReads(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        torch.zeros(3, device="meta").max().item()
    with NoHostReads(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        torch.zeros(3, device="meta")[torch.zeros(3, dtype=torch.bool, device="meta")]
    with NoHostReads(), pytest.raises(AssertionError):
        torch.zeros(3, device="meta") + torch.tensor([1, 2, 3]).to("meta")


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_cuda_graph_replays_for_other_texts(name):
    """Captured once, replayed with other texts, prompts, trees, logits and seeds: what an eager call gives."""

    def on_gpu(seed):
        requests, tree, logits, start = cases(KINDS[name], False, seed)
        for i, r in enumerate(requests):
            r.sampling = Sampling(r.sampling.pipeline, True, seed + i)
        text = text_of(requests, start.device)
        tokens = torch.zeros(len(requests), 24, dtype=torch.long)
        tokens[:, : text.tokens.shape[1]] = text.tokens
        return requests, [x.cuda() for x in (tree.tokens, tree.parents, logits, start, tokens, text.prompt, text.seed)]

    def call(requests, t):
        return device_targets(requests, DraftTree(*t[:2]), t[2], t[3], Text(*t[4:]))

    requests, held = on_gpu(0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(requests, held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(requests, held)
    for seed in range(4):
        others, new = on_gpu(seed)
        if graph_key(others) != graph_key(requests):
            continue
        for a, b in zip(held, new):
            a.copy_(b)
        graph.replay()
        assert torch.equal(out, call(others, new))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_rows_have_the_same_scores_alone_and_in_a_batch_on_a_gpu(name):
    """Over a real vocabulary: a reduction that depends on the number of rows would move a cut."""
    maker, g = KINDS[name], torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(8, 17, 49152, generator=g)).cuda()
    cuts = cuts_of(maker([1, 2]), [1, 2], 9)
    whole = cuts(None, logits)
    for i, j in ((0, 0), (3, 5), (7, 16)):
        assert torch.equal(cuts(None, logits[i : i + 1, j : j + 1]), whole[i : i + 1, j : j + 1])


def test_a_graph_is_valid_for_other_prompts_and_seeds_but_not_for_other_settings():
    def request(maker, prompt, seed=0, **keep):
        return Request(prompt, 20, sampling=Sampling(Pipeline(LogitsProcessorList(maker(prompt))), True, seed, **keep))

    for name, maker in KINDS.items():
        if name not in ("forced_bos", "repetition from a place on"):
            one, other = request(maker, [1, 2, 3]), request(maker, [4, 2, 1, 9, 9], 7)
            assert graph_key([one]) == graph_key([other]) != graph_key([one, one]), name
            assert one.recipe is other.recipe  # and so are its constants
    warm, cold = (request(lambda p, t=t: [hf.TemperatureLogitsWarper(t)], [1]) for t in (1.5, 0.5))
    assert graph_key([warm]) != graph_key([cold]) and graph_key([warm, cold]) != graph_key([cold, warm])
    assert graph_key([Request([1], 3)]) != graph_key([request(lambda p: [], [1])])
    assert graph_key([request(KINDS["top_k"], [1], keep_scores=True)]) is None
    own = request(lambda p: [lambda ids, scores: scores], [1])
    assert not on_device(own) and graph_key([own]) is None and own.lazy


def test_processors_in_generates_order_are_one_run():
    """Each took passes of its own over the vocabulary: 63 comparisons, twice, for the n-grams of one round."""
    parts = recipe_of(KINDS["generate's order"]([1, 2]), [1, 2], 9).parts(49152)
    assert [type(p) for p in parts] == [Run, Few]
    assert len(parts[0].scales) == 4 and len(parts[0].bans) == 4 and len(parts[1].known) == 4
    order = [type(p) for p in recipe_of(KINDS["another order"]([1, 2]), [1, 2], 9).parts(49152)]
    assert order == [Run, Run, Force, Run, Run]


UNKNOWN = {
    "a function": lambda p: [lambda ids, scores: scores],
    "a subclass": lambda p: [type("Mine", (hf.TemperatureLogitsWarper,), {})(0.5)],
    "a watermark": lambda p: [hf.WatermarkLogitsProcessor(V, "cpu")],
    "allowed tokens": lambda p: [hf.PrefixConstrainedLogitsProcessor(lambda i, ids: [1], 1)],
    "another prompt's n-grams": lambda p: [hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[9, *p]]))],
    "another prompt's tokens": lambda p: [hf.EncoderRepetitionPenaltyLogitsProcessor(1.4, torch.tensor([[9, *p]]))],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_batched_form_is_walked_lazily(name):
    assert recipe_of([*KINDS["top_k"]([1, 2]), *UNKNOWN[name]([1, 2])], [1, 2], 9) is None


def test_a_growth_beyond_floats_is_infinite():
    assert Decay(0, 1e200, (1,), 4).table()[2:] == [float("inf")] * 3


@pytest.mark.parametrize("mode", ["sequential", "tree", "overlap+tree"])
def test_processors_that_read_the_text_are_asked_once_a_round(mode, monkeypatch):
    """They were walked token by token, with a read from the device for each, even where scores were kept."""
    monkeypatch.setattr(Request, "next_token", lambda *a: pytest.fail("walked lazily"))
    model = model_of()
    decoder = SelfSpecModel(model, path_of(model, 0.2))
    ids = torch.tensor([PROMPT])
    arguments = dict(repetition_penalty=1.2, no_repeat_ngram_size=2, min_new_tokens=4, eos_token_id=7)
    keep = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    with torch.no_grad():
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **arguments, **keep
        )
    got = decoder.generate(ids, max_new_tokens=12, mode=mode, **arguments, **keep)
    assert torch.equal(got.sequences, wanted.sequences) and len(got.scores) == len(wanted.scores)
    for a, b in zip(got.scores + got.logits, wanted.scores + wanted.logits, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert decoder.stats.tokens == len(got.scores) - 1


def test_kept_scores_hold_on_to_no_whole_round():
    """What is kept of a token is its own row, not a view of all rows of its round; what was cut off is not kept."""
    keeping = Sampling(Pipeline(), keep_scores=True, keep_logits=True)
    request = Request([1], 9, frozenset([5]), sampling=keeping)
    scores, logits = torch.randn(4, V), torch.randn(4, V)
    request.see(scores, logits)
    assert request.take([2, 5, 3]) == [2, 5] and request.finish_reason == "stop"
    for kept, given in ((request.scores, scores), (request.logits, logits)):
        assert torch.equal(torch.cat(kept), given[:2])
        assert all(k.untyped_storage().nbytes() == 4 * V for k in kept)
