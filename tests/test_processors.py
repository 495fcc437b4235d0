"""Greedy decoding through transformers' processors is token for token transformers' own, in every mode."""

from functools import partial

import pytest
import torch
from tiny import PROMPT, RAGGED, VOCAB, path_of, shallow
from transformers import LogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

from selfspec import SelfSpecModel

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
ONE = torch.tensor([PROMPT])
N, EOS = 12, 7


def halve_even(ids, scores):
    """A processor that is a plain function of both arguments."""
    scores = scores.clone()
    scores[:, ids[:, -1] % 2 :: 2] -= 1.5
    return scores


model_of = partial(shallow, seed=6)
# without any of these the answer to PROMPT begins 7 20 20 10 20 21 20
ARGUMENTS = {
    "repetition_penalty": dict(repetition_penalty=1.4),
    "a reward of repetition": dict(repetition_penalty=0.7),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.3),
    "no_repeat_ngram_size 1": dict(no_repeat_ngram_size=1),
    "no_repeat_ngram_size 2": dict(no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
    "bad words": dict(bad_words_ids=[[10], [20, 20]]),
    "bad words and eos": dict(bad_words_ids=[[21], [20]], eos_token_id=21),
    "sequence_bias": dict(sequence_bias={(3,): 0.7, (7, 20): -9.0}),
    "suppress_tokens": dict(suppress_tokens=[7, 19]),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[7, 4]),
    "min_new_tokens": dict(min_new_tokens=7, eos_token_id=[EOS, 19]),
    "min_length": dict(min_length=len(PROMPT) + 6, eos_token_id=[EOS, 19]),
    "both minima": dict(min_length=14, min_new_tokens=6, eos_token_id=EOS),
    "forced_eos_token_id": dict(forced_eos_token_id=5),
    "exponential_decay": dict(exponential_decay_length_penalty=(3, 1.6), eos_token_id=11),
    "renormalize_logits": dict(renormalize_logits=True, repetition_penalty=1.2),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "a processor": dict(logits_processor=LogitsProcessorList([halve_even])),
    "a processor and settings": dict(logits_processor=[halve_even], repetition_penalty=1.3, suppress_tokens=[4]),
    "a processor instead of a setting": dict(
        logits_processor=[SuppressTokensLogitsProcessor([19])], suppress_tokens=[7], repetition_penalty=1.1
    ),
    "allowed tokens": dict(prefix_allowed_tokens_fn=lambda batch, ids: [int(ids[-1] + k) % VOCAB for k in (1, 3, 8)]),
    "watermark": dict(watermarking_config=dict(bias=3.0, seeding_scheme="lefthash")),
    "warpers without sampling": dict(temperature=0.2, top_k=2, top_p=0.3, min_p=0.5, repetition_penalty=1.2),
    "many": dict(
        repetition_penalty=1.2, no_repeat_ngram_size=3, bad_words_ids=[[4]], min_new_tokens=5, eos_token_id=[EOS, 3]
    ),
}


def own(model, prompts, **kwargs):
    """transformers' greedy answers, one prompt at a time."""
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **kwargs)
        out.append(text[0, len(prompt) :].tolist())
    return out


def padded(prompts, width=12):
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = torch.tensor(prompt), 1
    return ids, mask


def trimmed(row, eos):
    """An answer without its padding."""
    eos = [eos] if isinstance(eos, int) else eos or []
    end = next((i for i, t in enumerate(row) if t in eos), len(row) - 1)
    return row[: end + 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_prompt(name, dtype):
    model, arguments = model_of(dtype), ARGUMENTS[name]
    truth = own(model, [PROMPT], max_new_tokens=N, **arguments)[0]
    decoder, turn = SelfSpecModel(model, path_of(model)), list(ARGUMENTS).index(name)
    for mode in MODES if dtype == torch.float64 else (MODES[turn % 6], MODES[(turn + 4) % 6]):
        got = decoder.generate(
            ONE, do_sample=False, max_new_tokens=N, mode=mode, tree_nodes=7 if "tree" in mode else None, **arguments
        )
        assert got[0, len(PROMPT) :].tolist() == truth, mode


def test_the_arguments_above_change_something():
    for name, arguments in ARGUMENTS.items():
        plain = own(model_of(), [PROMPT], max_new_tokens=N, eos_token_id=arguments.get("eos_token_id"))
        same = own(model_of(), [PROMPT], max_new_tokens=N, **arguments) == plain
        assert same == (name == "remove_invalid_values"), name  # there are none


@pytest.mark.parametrize("name", ARGUMENTS)
def test_ragged_batches(name):
    """Every row answers as its prompt does alone: no processor sees padding or a neighbour."""
    model, arguments = model_of(), dict(ARGUMENTS[name])
    alone = arguments.copy()
    if name in ("min_length", "both minima"):
        alone = {**arguments, "min_length": 0}
        alone = [{**alone, "min_length": arguments["min_length"] - 12 + len(p)} for p in RAGGED]
    else:
        alone = [alone] * len(RAGGED)
    truth = [own(model, [p], max_new_tokens=N, **a)[0] for p, a in zip(RAGGED, alone, strict=True)]
    ids, mask = padded(RAGGED)
    decoder = SelfSpecModel(model, path_of(model))
    turn = list(ARGUMENTS).index(name)
    for mode in (MODES[turn % 6], MODES[(turn + 2) % 6]):
        got = decoder.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=N,
            mode=mode,
            tree_nodes=7 if "tree" in mode else None,
            **arguments,
        )
        assert [trimmed(r, arguments.get("eos_token_id")) for r in got[:, 12:].tolist()] == truth, mode


class Recorder(LogitsProcessor):
    """Remembers what it was asked, and changes its mind with every call."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids)
        scores = scores.clone()
        scores[:, len(self.seen) % VOCAB] += 2.0  # its state decides
        return scores


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sample", [False, True])
def test_processors_are_called_once_per_emitted_token_on_the_true_text(mode, sample):
    model, recorder = model_of(), Recorder()
    decoder = SelfSpecModel(model, path_of(model))
    plain = SelfSpecModel(model)
    extra = dict(do_sample=True, seed=5, temperature=0.7) if sample else dict(do_sample=False)
    out = decoder.generate(
        ONE, max_new_tokens=N, logits_processor=[recorder], mode=mode, tree_nodes=9 if "tree" in mode else None, **extra
    )
    text = out[0].tolist()
    assert [s[0].tolist() for s in recorder.seen] == [text[: len(PROMPT) + i] for i in range(N)]
    assert torch.equal(out, plain.generate(ONE, max_new_tokens=N, logits_processor=[Recorder()], **extra))
    if not sample:
        assert text[len(PROMPT) :] == own(model, [PROMPT], max_new_tokens=N, logits_processor=[Recorder()])[0]


def test_no_processor_is_called_past_the_end():
    model, recorder = model_of(), Recorder()
    [answer] = own(model, [PROMPT], max_new_tokens=N, logits_processor=[Recorder()])
    eos = next(t for i, t in enumerate(answer) if i >= 2 and t not in answer[:i])
    decoder = SelfSpecModel(model, path_of(model))
    decoder.generate(ONE, max_new_tokens=N, logits_processor=[recorder], eos_token_id=eos, do_sample=False)
    assert len(recorder.seen) == answer.index(eos) + 1


def test_each_answer_has_processors_of_its_own():
    model, recorder = model_of(), Recorder()
    decoder = SelfSpecModel(model, path_of(model))
    ids, mask = padded(RAGGED)
    truth = [own(model, [p], max_new_tokens=N, logits_processor=[Recorder()])[0] for p in RAGGED]
    arguments = dict(attention_mask=mask, max_new_tokens=N, do_sample=False)
    got = decoder.generate(ids, logits_processor=[recorder], **arguments)
    assert got[:, 12:].tolist() == truth and not recorder.seen
    each = [[Recorder()] for _ in RAGGED]
    assert torch.equal(decoder.generate(ids, logits_processor=each, **arguments), got)
    assert [len(r[0].seen) for r in each] == [N] * 3
    with pytest.raises(ValueError, match="2 lists for 3 prompts"):
        decoder.generate(ids, logits_processor=each[:2], **arguments)


def test_processors_that_cannot_be_copied_are_refused_in_a_batch():
    class Locked(Recorder):
        def __deepcopy__(self, memo):
            raise TypeError("locked")

    decoder = SelfSpecModel(model_of(), path_of(model_of()))
    ids, mask = padded(RAGGED)
    with pytest.raises(ValueError, match=r"cannot be copied \(locked\)"):
        decoder.generate(ids, attention_mask=mask, max_new_tokens=3, logits_processor=[Locked()])
    assert decoder.generate(ONE, max_new_tokens=3, logits_processor=[Locked()]).shape == (1, 13)


def test_allowed_tokens_know_their_prompt():
    model = model_of()
    decoder = SelfSpecModel(model, path_of(model))
    ids, mask = padded(RAGGED)
    out = decoder.generate(
        ids, attention_mask=mask, max_new_tokens=4, do_sample=False, prefix_allowed_tokens_fn=lambda i, text: [i + 1]
    )
    assert out[:, 12:].tolist() == [[1] * 4, [2] * 4, [3] * 4]


@pytest.mark.parametrize("mode", ["ar", "sequential", "tree"])
def test_scores_and_logits_of_emitted_tokens(mode):
    """As transformers returns them, from the prefill's token on."""
    model = model_of()
    arguments = dict(
        max_new_tokens=N, do_sample=False, repetition_penalty=1.3, eos_token_id=EOS, min_new_tokens=6,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    with torch.no_grad():
        wanted = model.generate(ONE, attention_mask=torch.ones_like(ONE), **arguments)
    got = SelfSpecModel(model, path_of(model)).generate(ONE, mode=mode, **arguments)
    assert torch.equal(got.sequences, wanted.sequences)
    assert len(got.scores) == len(wanted.scores) == len(got.logits) == len(wanted.logits)
    for mine, theirs in zip((*got.scores, *got.logits), (*wanted.scores, *wanted.logits), strict=True):
        assert mine.dtype == theirs.dtype and torch.allclose(mine, theirs, atol=1e-5)


def test_scores_of_a_batch_end_with_its_longest_answer():
    model = model_of()
    ids, mask = padded(RAGGED)
    answers = own(model, RAGGED, max_new_tokens=9)
    out = SelfSpecModel(model, path_of(model)).generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=[answers[0][3]],
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert out.logits is None and all(s.shape == (3, VOCAB) for s in out.scores)
    steps = torch.stack(out.scores, 1)  # [3, steps, V]
    assert out.sequences.shape[1] == 12 + len(out.scores)
    lengths = [len(trimmed(a, answers[0][3])) for a in answers]
    for row, length in enumerate(lengths):
        assert steps[row, :length].argmax(-1).tolist() == answers[row][:length]
        assert not steps[row, length:].any()


@pytest.mark.parametrize("mode", MODES)
def test_presence_and_frequency_penalties_by_hand(mode):
    """Each token from the model's own logits; what was only drafted, or stands in the prompt, is not penalised."""
    model, text = model_of(), list(PROMPT)
    for _ in range(N):
        with torch.no_grad():
            scores = model(torch.tensor([text])).logits[0, -1].float()
        for token in set(text[len(PROMPT) :]):
            scores[token] -= 0.4 + 0.9 * text[len(PROMPT) :].count(token)
        text.append(int(scores.argmax()))
    decoder = SelfSpecModel(model, path_of(model))
    arguments = dict(max_new_tokens=N, do_sample=False, mode=mode)
    got = decoder.generate(ONE, presence_penalty=0.4, frequency_penalty=0.9, **arguments)
    assert got[0].tolist() == text != decoder.generate(ONE, **arguments)[0].tolist()
