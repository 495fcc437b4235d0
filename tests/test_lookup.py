"""Prompt lookup: drafts from the text itself, for any model without an adapter."""

import random

import numpy as np
import pytest
import torch
from tiny import model_of, path_of, reference, shallow
from transformers import LogitsProcessor

from selfspec import SelfSpecModel
from selfspec.draft.lookup import Copied, lookup
from selfspec.plan import Plan
from selfspec.plan.estimate import COPY, Estimator, Family
from selfspec.plan.heard import POOL, Heard
from selfspec.plan.value import Values
from selfspec.plan.views import View, Views
from selfspec.request import Request
from selfspec.seats import Seats


def naive(tokens: list[int], n: int) -> list[int]:
    """The definition: the longest ending (3, then 2 tokens) that stood before, at its last place."""
    for size in (3, 2):
        ending = tokens[-size:]
        for at in range(len(tokens) - 1, size - 1, -1):
            if len(ending) == size and tokens[at - size : at] == ending:
                return tokens[at : at + n]
    return []


def test_guesses_equal_the_definition():
    """Ragged texts; what stands behind their ends (older, longer texts of the same slots) is never read."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 3, (4, 64), generator=generator)
    hits = 0
    for end in range(56):
        lengths = [end + 1, max(1, end - 7), 1, end // 2 + 1]
        tree = lookup(text, torch.tensor(lengths) - 1, 5)
        assert tree.parents is None
        for row, length, got in zip(text.tolist(), lengths, tree.tokens.tolist(), strict=True):
            want = naive(row[:length], 4)
            assert got == [row[length - 1], *want, *[-1] * (4 - len(want))]
            hits += bool(want)
    assert hits > 100


@pytest.mark.parametrize("slots", [None, 1, 2])
def test_lookup_is_exact_and_the_default_without_an_adapter(slots):
    model = model_of()
    prompts = [[3, 4, 5, 3, 4], [5, 6, 7, 5, 6, 7, 5], [9, 3]]
    engine = SelfSpecModel(model)
    assert [p.mode for p in engine.policy().plans] == ["lookup"]
    out = engine.generate(prompts, max_new_tokens=30, eos_token_id=None, pad_token_id=0, slots=slots)
    width = max(map(len, prompts))
    assert out[:, width:].tolist() == reference(model, prompts, 30)
    assert engine.stats.tau > 1.05  # greedy text of a small random model repeats itself
    assert engine.stats.drafts == 0 and engine.stats.rounds == sum(s.rounds for s in engine.request_stats)


def decoded(text: list[int], start: int, block: int = 16) -> list[int]:
    """What the rounds of a decode by lookup accept that has to write a text, but for one that the text's end cuts."""
    out, row = [], torch.tensor([text])
    while True:
        guesses = lookup(row, torch.tensor([start]), block).tokens[0, 1:].tolist()
        rest = text[start + 1 :]
        right = next((i for i, (g, t) in enumerate(zip(guesses, rest, strict=False)) if g != t), None)
        right = min(len(rest), len(guesses)) if right is None else right
        if right == len(rest):
            return out
        out.append(right)
        start += right + 1


def pieces(draws: random.Random, tokens: list[int], most: int) -> list[list[int]]:
    """A text as rounds may emit it."""
    out = []
    while tokens:
        n = draws.randrange(1, most + 1)
        out, tokens = [*out, tokens[:n]], tokens[n:]
    return out


def repetitive(draws: random.Random, length: int, kinds: int = 30) -> list[int]:
    """Tokens, and passages of up to 40 of them that are said again."""
    text = [draws.randrange(kinds) for _ in range(8)]
    while len(text) < length:
        at = draws.randrange(len(text))
        again = draws.random() < 0.2
        text += text[at : at + draws.randrange(1, 40)] if again else [draws.randrange(kinds) for _ in range(4)]
    return text[:length]


def test_rounds_heard_along_a_text_are_those_of_lookup_however_it_is_written():
    draws, counts = random.Random(0), []
    for kinds in (2, 3, 30, 500):
        for _ in range(6):
            text, start = repetitive(draws, 200, kinds), draws.randrange(40)
            want = decoded(text, start)
            for most in (1, 4, 40):
                copied = Copied(text[: start + 1] if most == 1 else text[:start])
                if most > 1:
                    copied.write([text[start]])  # as a prefill does
                told = [copied.follow(piece) for piece in pieces(draws, text[start + 1 :], most)]
                assert [x for some in told for x in some] == want and copied.text == text
            counts += want
    assert counts.count(0) > 100 and counts.count(15) > 20 and len(set(counts)) == 16


def promised(estimator: Estimator, key: str, block: int) -> float:
    """Tokens a round that a planner expects of lookup."""
    values = Values([Plan("lookup", block)], estimator.index, None)
    survival = estimator.all([key]).cumprod(2)
    return float(values.tokens(survival, np.array([1 << 20]), 15)[0][0, 0])


def learn(heard: Heard) -> None:
    """As a planner does, every few rounds."""
    heard.tell()
    heard.estimator.settle()


def hear_all(heard: Heard, key: str, text: list[int], start: int, most: int, plan: Plan) -> None:
    """A text that rounds of a plan write, told every four rounds."""
    draws, copied = random.Random(0), Copied(text[: start + 1])
    for n, piece in enumerate(pieces(draws, text[start + 1 :], most)):
        heard.add(plan, Views.of([View(key, 50)]).heard({id(key): copied.follow(piece)}), [len(piece)])
        if n % 4 == 3:
            learn(heard)
    learn(heard)


@pytest.mark.parametrize("block", [4, 8, 16])
def test_lookup_is_not_praised_for_a_copied_passage_that_others_take_in_many_rounds(block):
    """Each of ten trees inside it counted as a round of lookup, which would have taken it in three, and 1.9 tokens a
    round of 4 were still promised twenty tokens later: a first guess was taken to be as good as those behind it.
    """
    text = list(range(400))
    text[300:340] = text[100:140]
    for end in (360, 400):
        true = 1 + np.mean(decoded(text[:end], 0, block))
        assert 1.05 < true < 1.15
        for most, plan in ((7, Plan("tree", 16, 31)), (1, Plan("ar", 1))):
            heard = Heard(Estimator([Family("lookup"), Family("known", 0, 31)], [0.6]))
            hear_all(heard, "text", text[:end], 0, most, plan)
            near = pytest.approx(true, rel=0.05 if end == 400 else 0.25)  # what was copied just now may go on
            assert promised(heard.estimator, "text", block) == near


def test_a_passage_longer_than_its_block_is_gone_on_with():
    """A small block takes it in several rounds, not the first drafts of it in one."""
    draws, rounds = random.Random(0), {4: [], 8: [], 16: []}
    for _ in range(20):
        text = repetitive(draws, 400)
        for block, found in rounds.items():
            found += decoded(text, 0, block)
    survival = (np.array(rounds[16]) > np.arange(15)[:, None]).mean(1)[None, None]
    values = Values([Plan("lookup", block) for block in rounds], {Family("lookup"): 0}, None)
    tokens = values.tokens(survival, np.array([99]), np.array([15]))[0][0]
    assert tokens == pytest.approx([1 + np.mean(found) for found in rounds.values()], rel=0.05)
    assert tokens[0] > 1.2 * (1 + survival[0, 0, :3].sum())
    assert (values.tokens(survival, np.array([99]), np.array([0]))[0] == 1).all()  # nothing was found


def test_a_text_that_repeats_itself_is_copied_without_a_probe():
    """A loop was found when a probe came by: texts of 3 x plain decoding's speed ran at 1.2 x."""
    copies = Family("lookup")
    heard = Heard(Estimator([copies, Family("known"), Family("known", 0, 31)], [0.6]))

    def hear(plan: Plan, key: str, copied: list[int], rounds: int) -> float:
        for _ in range(rounds):
            heard.add(plan, Views.of([View(key, 50)]).heard({id(key): copied}), [1])
            learn(heard)
        return float(1 + heard.estimator.curves([key], copies)[0].cumprod().sum())

    before = heard.estimator.tau(Family("known"))
    assert hear(Plan("ar", 1), "loops", [15], 8) > 6 and heard.estimator.tau(Family("known")) == before
    assert hear(Plan("ar", 1), "ends", [0, 0], 24) < 2
    assert hear(Plan("tree", 16, 31), "partly", [0, 3, 0], 12) == pytest.approx(2, rel=0.2)
    assert hear(Plan("ar", 1), "unknown", [], 4) == 1 + heard.estimator.curves(["new"], copies)[0].cumprod().sum()
    assert hear(Plan("lookup", 4), "tried", [15], 8) > 6  # its own rounds, which are cut short, are not booked beside


def test_small_blocks_of_lookup_are_not_taken_to_be_large_ones():
    """Their rounds begin inside a passage more often: booked as they are, they promise a fifth too much."""
    text = repetitive(random.Random(0), 1600)
    copied, heard, found = Copied(text[:1]), Heard(Estimator([Family("lookup")], [0.6])), []
    at = 0
    for right in decoded(text, 0, 4):
        told = copied.follow(text[at + 1 : at + right + 2])
        heard.add(Plan("lookup", 4), Views.of([View("text", 50)]).heard({id("text"): told}), [right + 1])
        at += right + 1
        learn(heard)
        found.append(promised(heard.estimator, "text", 4))
    assert np.mean(found) == pytest.approx(1 + np.mean(decoded(text, 0, 4)), rel=0.1)


def test_a_batch_of_texts_that_are_taken_as_one_is_as_many_as_it_is():
    """However many rounds of lookup end in a round of theirs."""
    heard, keys = Heard(Estimator([Family("lookup"), Family("known", 0, 31)], [0.6])), list("abcdefgh")
    views = Views.of([View(k, 50) for k in keys])
    for copied in ({id("a"): [0, 0, 2]}, {id(k): [0] * 5 for k in keys}):
        heard.add(Plan("tree", 16, 31), views.heard({id(k): copied.get(id(k), []) for k in keys}), [6] * 8, None, True)
    heard.tell()
    assert heard.estimator.tau(Family("lookup")) < 1.5
    assert heard.estimator.own[POOL[0]].bounds[1:] == pytest.approx(COPY**2 / 8)


@pytest.mark.parametrize("mode", ["auto", "sequential"])
def test_a_planner_hears_of_copies_and_nobody_else_looks(mode, monkeypatch):
    told = []
    real = Copied.follow
    monkeypatch.setattr(Copied, "follow", lambda self, new: told.append(list(new)) or real(self, new))
    hf = shallow()
    model = SelfSpecModel(hf, path_of(hf, 0.2))
    out = model.generate([[3, 4, 5, 3, 4]], max_new_tokens=20, eos_token_id=None, mode=mode)
    assert [t for some in told for t in some] == (out[0, 6:].tolist() if mode == "auto" else [])  # the prefill's apart


def test_the_first_token_of_one_chosen_by_one_is_heard_once(monkeypatch):
    """It stood in the output before the text was followed, and was appended again; and texts were kept for good."""
    made, real = [], Copied.__init__
    monkeypatch.setattr(Copied, "__init__", lambda self, text: (made.append(self), real(self, text))[1])

    class Custom(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    hf = shallow()
    model = SelfSpecModel(hf, path_of(hf, 0.2))
    out = model.generate(
        [[3, 4, 5, 3, 4]], max_new_tokens=8, eos_token_id=None, mode="auto", logits_processor=[Custom()]
    )
    assert made[0].text == out[0].tolist()


def test_what_followed_a_text_goes_with_its_slot():
    request = Request([3, 4, 5], 4)
    seats = Seats(1)
    seats.take(request, 0)
    seats.start(request, copies=True)
    assert request.copied is not None
    seats.leave(request)
    assert request.copied is None
