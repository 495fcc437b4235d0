"""Cuts behind a top-k, made over each row's few best columns: what transformers keeps of the whole vocabulary."""

import pytest
import torch
from tiny import PROMPT, model_of, path_of
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from selfspec import SelfSpecModel, kernels, recipe
from selfspec.draft import DraftTree
from selfspec.nodes import Nodes, Text
from selfspec.recipe import Few, recipe_of
from selfspec.sampling import draw

FEW = {
    "top_k": [hf.TopKLogitsWarper(20)],
    "top_p": [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.8)],
    "all": [
        *(
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(64),
            hf.TopPLogitsWarper(0.95),
            hf.MinPLogitsWarper(0.02),
        ),
        *(hf.TypicalLogitsWarper(0.9), hf.EpsilonLogitsWarper(0.01), hf.LogitNormalization()),
    ],
    "all that a kernel makes": [
        hf.TemperatureLogitsWarper(0.7),
        *(hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.95), hf.MinPLogitsWarper(0.02), hf.TypicalLogitsWarper(0.9)),
    ],
    "typical": [hf.TopKLogitsWarper(30), hf.TypicalLogitsWarper(0.3, min_tokens_to_keep=4)],
    "some are kept": [hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.1, min_tokens_to_keep=3)],
}


def few_scores(vocab: int, seed: int) -> torch.Tensor:
    """Plain rows, rows with ties at every rank, and rows of fewer possible tokens than columns, token 0 among them."""
    x = 3 * torch.randn(3, 2, vocab, generator=torch.Generator().manual_seed(seed))
    x[1] = (8 * x[1]).round() / 8
    x[2, :, 1:-30] = -torch.inf
    return x


def cuts_agree(name: str, x: torch.Tensor) -> None:
    """What is kept is what transformers keeps, and its scores are to the bit where nothing normalises them."""
    processors = FEW[name]
    recipe = recipe_of(processors, [1], 9)
    (some,) = (p for p in recipe.parts(x.shape[-1]) if isinstance(p, Few))
    assert len(some.steps) == len(processors) - {"all": 2, "all that a kernel makes": 1}.get(name, 0)
    assert (some.known is None) == (name == "all")
    got = recipe(None, x)
    for i, row in enumerate(x.flatten(0, 1).cpu()):
        wanted = LogitsProcessorList(processors)(None, row[None])[0]
        mine = got.flatten(0, 1)[i].cpu()
        if i // 2 == 1:  # of equal scores transformers' sort, which is not stable, takes any
            mine, wanted = mine.sort().values, wanted.sort().values
        assert torch.equal(mine == -torch.inf, wanted == -torch.inf), i
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5 if name == "all" else 0)


@pytest.mark.parametrize("name", FEW)
def test_cuts_behind_a_top_k_keep_the_same_among_few_columns(name, monkeypatch):
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    for seed in range(2):
        cuts_agree(name, few_scores(300, seed).to("cuda" if torch.cuda.is_available() else "cpu"))


def test_tokens_drawn_among_few_columns_are_those_of_the_whole_vocabulary(monkeypatch):
    """Which is then never written."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(kernels, "DEVICES", {device})
    logits = few_scores(300, 0).to(device)
    start = torch.tensor([3, 9, 4], device=device)
    tree = DraftTree(torch.zeros(3, 2, dtype=torch.long, device=device))
    for seed in range(3):
        text = Text(torch.zeros(3, 20, dtype=torch.long, device=device), start, start + seed)
        nodes, recipe = Nodes(tree, start, text), recipe_of(FEW["all that a kernel makes"], [1], 9)
        wanted = draw(recipe(nodes, logits).flatten(0, 1), *nodes.keys)
        with monkeypatch.context() as patch:
            patch.setattr(Few, "__call__", lambda *a: pytest.fail("written in the vocabulary's width"))
            assert torch.equal(recipe.draw(nodes, logits).flatten(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEW)
def test_cuts_among_few_columns_of_a_real_vocabulary(name):
    cuts_agree(name, few_scores(49152, 3).cuda())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("mode", ["ar", "sequential", "tree"])
def test_text_is_the_same_by_kernels(mode, monkeypatch):
    """Every processor at once, drawn and drafted under a head: in one pass each, and by transformers' own classes."""
    pytest.importorskip("triton")
    model = model_of(vocab_size=40)
    decoder = SelfSpecModel(model, path_of(model, 0.3, heads=("sampler",), head_rank=6))
    how = dict(
        repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, no_repeat_ngram_size=3, min_new_tokens=4,
        bad_words_ids=[[5, 6], [7]], suppress_tokens=[9], exponential_decay_length_penalty=(3, 1.2), eos_token_id=2,
        temperature=1.3, top_k=12, top_p=0.95, min_p=0.02, typical_p=0.97,
    )  # fmt: skip
    monkeypatch.setattr(recipe, "COLUMNS", 32)

    def text(devices):
        monkeypatch.setattr(kernels, "DEVICES", devices)
        ids = torch.tensor([PROMPT])
        return [decoder.generate(ids, max_new_tokens=7, mode=mode, do_sample=True, seed=s, **how) for s in range(2)]

    assert [t.tolist() for t in text({"cpu"})] == [t.tolist() for t in text(set())]
