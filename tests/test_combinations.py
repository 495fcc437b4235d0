"""Twenty-five combinations of arguments: greedy text is transformers' own, sampled text that of plain decoding.

float32, batch 1 and ragged batches of 8. `SELFSPEC_WHOLE=1` takes 100 prompts and every mode for each combination;
without it each one meets 8 prompts in two modes, and every mode meets every kind of argument over the 25.
"""

import os
import random

import pytest
import torch
from tiny import VOCAB, path_of, shallow

from selfspec import SelfSpecModel

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
WHOLE = os.environ.get("SELFSPEC_WHOLE") == "1"
N, WIDTH = 12, 16
SAMPLE = dict(do_sample=True)
COMBINATIONS = [
    {},
    dict(repetition_penalty=1.3),
    dict(repetition_penalty=0.8, no_repeat_ngram_size=3),
    dict(no_repeat_ngram_size=2),
    dict(encoder_repetition_penalty=1.2, encoder_no_repeat_ngram_size=2),
    dict(bad_words_ids=[[7], [15, 0], [3, 3]]),
    dict(sequence_bias={(3,): 0.9, (7, 16): -5.0, (1, 2, 3): 2.0}),
    dict(suppress_tokens=[7, 19], begin_suppress_tokens=[23, 4]),
    dict(min_new_tokens=6, eos_token_id=[3, 7, 15]),
    dict(forced_eos_token_id=5, eos_token_id=5, repetition_penalty=1.1),
    dict(exponential_decay_length_penalty=(3, 1.4), eos_token_id=11),
    dict(eos_token_id=[2, 8, 19], repetition_penalty=1.2, min_new_tokens=3, bad_words_ids=[[1]]),
    {**SAMPLE},
    dict(**SAMPLE, temperature=0.7),
    dict(**SAMPLE, temperature=1.3, top_k=0),
    dict(**SAMPLE, top_k=5),
    dict(**SAMPLE, top_p=0.9, top_k=0),
    dict(**SAMPLE, temperature=0.8, top_p=0.95, top_k=10),
    dict(**SAMPLE, min_p=0.1, top_k=0),
    dict(**SAMPLE, typical_p=0.8, top_k=0),
    dict(**SAMPLE, epsilon_cutoff=0.02, eta_cutoff=0.05, top_k=0),
    dict(**SAMPLE, temperature=0.7, repetition_penalty=1.2, eos_token_id=[3, 7]),
    dict(**SAMPLE, top_p=0.9, no_repeat_ngram_size=2, min_new_tokens=4, eos_token_id=7),
    dict(**SAMPLE, presence_penalty=0.5, frequency_penalty=0.4, temperature=0.9),
    dict(**SAMPLE, bad_words_ids=[[4], [2, 2]], sequence_bias={(5,): 1.0}, min_p=0.05, renormalize_logits=True),
]


def prompts(n):
    rng = random.Random(3)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, WIDTH + 1))] for _ in range(n)]


def trimmed(row, eos):
    eos = [eos] if isinstance(eos, int) else eos or []
    return row[: next((i for i, t in enumerate(row) if t in eos), len(row) - 1) + 1]


@pytest.mark.parametrize("turn", range(len(COMBINATIONS)))
@torch.no_grad()
def test_all_modes_alone_and_in_ragged_batches(turn):
    model, arguments = shallow(torch.float32), dict(max_new_tokens=N, **COMBINATIONS[turn])
    sampled, eos = "do_sample" in arguments, arguments.get("eos_token_id")
    arguments.setdefault("do_sample", False)
    texts = prompts(100 if WHOLE else 8)
    decoder, truth = SelfSpecModel(model, path_of(model, 0.1)), []
    for i, prompt in enumerate(texts):
        ids = torch.tensor([prompt])
        if sampled:
            out = decoder.generate(ids, mode="ar", seed=100 + i, **arguments)
        else:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        truth.append(out[0, len(prompt) :].tolist())
    modes = MODES if WHOLE else (MODES[turn % 6], MODES[(turn + 3 + turn // 6) % 6])
    for mode in modes:
        for batch in (1, 8):
            for at in range(0, len(texts) if WHOLE or batch == 8 else 2, batch):
                part = texts[at : at + batch]
                seed = dict(seed=[100 + at + i for i in range(len(part))]) if sampled else {}
                out = decoder.generate(part, mode=mode, tree_nodes=8 if "tree" in mode else None, **seed, **arguments)
                width = max(map(len, part))
                for got, wanted in zip(out[:, width:].tolist(), truth[at : at + batch], strict=True):
                    assert trimmed(got, eos) == wanted, (mode, batch, at)
