"""Where answers end, and what streamers see: nothing past the end, wherever in a block it lies."""

import threading

import pytest
import torch
from tiny import PROMPT, RAGGED, OraclePath, build, model_of, path_of, reference
from transformers import AsyncTextIteratorStreamer, PreTrainedTokenizerFast, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation import MaxLengthCriteria

from selfspec import SelfSpecModel, request, session

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
ONE = torch.tensor([PROMPT])
N = 14


def words():
    """A tokenizer whose tokens are the first 24 letters."""
    from tokenizers import Tokenizer, decoders, models

    inner = Tokenizer(models.BPE({chr(97 + i): i for i in range(24)}, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def own(model, prompt, **kwargs):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **kwargs})


def oracle(model, prompt, n, monkeypatch, right=4):
    """A decoder that is right in `right` guesses of every round, so that ends lie inside accepted blocks."""
    [answer] = reference(model, [prompt], n + 8)

    class Anyone(dict):
        def __missing__(self, key):
            return answer

    path = OraclePath(model, Anyone(), right)
    real = session.Session.add

    def add(self, requests):
        path.session = self
        return real(self, requests)

    monkeypatch.setattr(session.Session, "add", add)
    return SelfSpecModel(model, path), answer


class After:
    """Stops behind a token; remembers the texts that it was asked about."""

    def __init__(self, token, at_least=0):
        self.token, self.at_least, self.seen = token, at_least, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        done = input_ids.shape[1] > self.at_least and input_ids[0, -1] == self.token
        return torch.tensor([bool(done)])


@pytest.mark.parametrize("end", range(1, 12))
def test_a_criterion_ends_the_answer_at_every_offset_of_a_block(end, monkeypatch):
    model = model_of()
    decoder, answer = oracle(model, PROMPT, N, monkeypatch)
    criterion, theirs = (After(answer[end], len(PROMPT) + end) for _ in range(2))
    got = decoder.generate(ONE, max_new_tokens=N, stopping_criteria=[criterion])
    wanted = own(model, PROMPT, max_new_tokens=N, stopping_criteria=StoppingCriteriaList([theirs]))
    assert got.tolist() == wanted.tolist() and got.shape[1] == len(PROMPT) + end + 1
    assert criterion.seen == theirs.seen == [PROMPT + answer[:i] for i in range(1, end + 2)]
    assert decoder.stats.tokens == end


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lazy", [False, True])
def test_criteria_beside_eos_caps_and_processors(mode, lazy):
    model = model_of()
    decoder = SelfSpecModel(model, path_of(model, 0.2))
    extra = dict(repetition_penalty=1.1) if lazy else {}
    answer = own(model, PROMPT, max_new_tokens=N, **extra)[0, len(PROMPT) :].tolist()
    for eos, stop, cap in ((answer[6], answer[4], N), (answer[2], answer[7], N), (None, answer[9], 5), (None, None, N)):
        arguments = dict(max_new_tokens=cap, eos_token_id=eos, **extra)
        got = decoder.generate(ONE, stopping_criteria=[After(stop)], mode=mode, **arguments)
        assert torch.equal(got, own(model, PROMPT, stopping_criteria=[After(stop)], **arguments))


def test_criteria_in_a_batch_end_one_answer_each():
    model = model_of()
    answers = reference(model, RAGGED, N)
    stop = answers[1][3]
    ids = torch.zeros(3, 12, dtype=torch.long)
    for i, p in enumerate(RAGGED):
        ids[i, 12 - len(p) :] = torch.tensor(p)
    out = SelfSpecModel(model, path_of(model)).generate(ids, max_new_tokens=N, stopping_criteria=[After(stop)])
    for row, answer in zip(out[:, 12:].tolist(), answers, strict=True):
        kept = answer[: answer.index(stop) + 1] if stop in answer else answer
        assert row[: len(kept)] == kept and not any(row[len(kept) :])


def test_criteria_get_the_scores_so_far_when_they_are_kept():
    lengths = []

    def criterion(input_ids, scores, **kwargs):
        lengths.append(None if scores is None else len(scores))
        return torch.tensor([False])

    decoder = SelfSpecModel(model_of(), path_of(model_of()))
    decoder.generate(ONE, max_new_tokens=4, stopping_criteria=[criterion])
    arguments = dict(return_dict_in_generate=True, output_scores=True)
    decoder.generate(ONE, max_new_tokens=4, stopping_criteria=[criterion], **arguments)
    assert lengths == [None] * 4 + [1, 2, 3, 4]


def test_a_length_criterion_of_the_callers_own():
    model = model_of()
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + 5)])
    got = SelfSpecModel(model, path_of(model)).generate(ONE, max_new_tokens=N, stopping_criteria=criteria)
    assert torch.equal(got, own(model, PROMPT, max_new_tokens=5))


@pytest.mark.parametrize("right", [0, 2, 4])
def test_stop_strings_that_straddle_tokens_and_rounds(right, monkeypatch):
    """Every three neighbouring tokens of the answer are a stop string once, across all offsets of a block."""
    model, tokenizer = model_of(), words()
    decoder, answer = oracle(model, PROMPT, N, monkeypatch, right)
    ends = set()
    for i in range(1, 11):
        stop = tokenizer.decode(answer[i : i + 3])
        wanted = own(model, PROMPT, max_new_tokens=N, stop_strings=[stop, "no such"], tokenizer=tokenizer)
        got = decoder.generate(ONE, max_new_tokens=N, stop_strings=[stop, "no such"], tokenizer=tokenizer)
        assert torch.equal(got, wanted)
        ends.add(got.shape[1])
    assert len(ends) > 4


def test_stop_strings_need_a_tokenizer():
    decoder = SelfSpecModel(model_of(), path_of(model_of()))
    with pytest.raises(ValueError, match="tokenizer"):
        decoder.generate(ONE, max_new_tokens=4, stop_strings="a")
    decoder.tokenizer = words()
    assert decoder.generate(ONE, max_new_tokens=4, stop_strings="a").shape[1] <= 14


def test_max_time_ends_after_the_running_token(monkeypatch):
    model = model_of()
    decoder, answer = oracle(model, PROMPT, N, monkeypatch)
    assert decoder.generate(ONE, max_new_tokens=N, max_time=1e-9)[0, len(PROMPT) :].tolist() == answer[:1]
    assert decoder.generate(ONE, max_new_tokens=N, max_time=1e9)[0, len(PROMPT) :].tolist() == answer[:N]


def test_eos_ends_sampled_answers_in_the_same_place():
    model = model_of()
    decoder = SelfSpecModel(model, path_of(model, 0.2))
    arguments = dict(do_sample=True, seed=9, top_k=0, max_new_tokens=30)
    whole = decoder.generate(ONE, **arguments)[0, len(PROMPT) :].tolist()
    for eos in sorted(set(whole))[:6]:
        for mode in MODES:
            out = decoder.generate(ONE, eos_token_id=[eos, 99], mode=mode, **arguments)
            assert out[0, len(PROMPT) :].tolist() == whole[: whole.index(eos) + 1]


# ---- streamers


class Watcher:
    """At every piece, the session may not hold less than what was shown, and the end is the whole answer."""

    def __init__(self):
        self.shown, self.pieces = [], 0

    def put(self, value):
        self.shown += value.flatten().tolist()
        self.pieces += 1

    def end(self):
        self.shown.append("end")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "processors", "criteria", "sampled"])
def test_streamers_see_committed_tokens_only(mode, kind, monkeypatch):
    model = model_of()
    decoder, watcher = SelfSpecModel(model, path_of(model, 0.2)), Watcher()
    extra = {
        "plain": {},
        "processors": dict(repetition_penalty=1.2),
        "criteria": dict(stopping_criteria=[After(7, len(PROMPT) + 5)]),
        "sampled": dict(do_sample=True, seed=3),
    }[kind]
    taken, real = [], request.Request.take

    def take(self, tokens):
        assert [t for t in watcher.shown[len(PROMPT) :] if t != "end"] == taken  # all of what came before, no more
        kept = real(self, tokens)
        taken.extend(kept)
        return kept

    monkeypatch.setattr(request.Request, "take", take)
    out = decoder.generate(ONE, max_new_tokens=N, streamer=watcher, mode=mode, **extra)
    assert watcher.shown == [*out[0].tolist(), "end"]


def test_a_text_iterator_in_another_thread():
    model, tokenizer = model_of(), words()
    decoder = SelfSpecModel(model, path_of(model))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=decoder.generate, args=(ONE,), kwargs=dict(max_new_tokens=N, streamer=streamer))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(own(model, PROMPT, max_new_tokens=N)[0, len(PROMPT) :])


def test_an_async_iterator():
    import asyncio

    model, tokenizer = model_of(), words()
    decoder = SelfSpecModel(model, path_of(model))

    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        work = asyncio.get_running_loop().run_in_executor(
            None, lambda: decoder.generate(ONE, max_new_tokens=N, streamer=streamer)
        )
        text = "".join([piece async for piece in streamer])
        await work
        return text

    assert asyncio.run(read()) == tokenizer.decode(own(model, PROMPT, max_new_tokens=N)[0, len(PROMPT) :])


def test_a_character_of_several_tokens_is_never_shown_in_halves(monkeypatch):
    """Byte tokens: the answer's bytes are characters of two, three and four bytes."""

    class Bytes:
        text = "aé€😀b 漢 z".encode()

        def decode(self, ids, **kwargs):
            return bytes(self.text[(i - 1) % len(self.text)] for i in ids).decode(errors="replace")

    model = build()
    shown = []

    class Shown(TextIteratorStreamer):
        def on_finalized_text(self, text, stream_end=False):
            shown.append(text)

    n = len(Bytes.text)
    decoder = SelfSpecModel(model, path_of(model))
    decoder.generate(
        ONE, max_new_tokens=n, streamer=Shown(Bytes(), skip_prompt=True),
        prefix_allowed_tokens_fn=lambda i, ids: [len(ids) - len(PROMPT) + 1],  # token k is byte k
    )  # fmt: skip
    assert "".join(shown) == Bytes.text.decode() and not any("�" in piece for piece in shown)


def test_a_streamer_takes_one_answer():
    with pytest.raises(ValueError, match="one answer"):
        SelfSpecModel(model_of()).generate(
            ONE, max_new_tokens=3, do_sample=True, num_return_sequences=2, streamer=Watcher()
        )
