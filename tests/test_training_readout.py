"""What objectives read of a forward, against the model's own forward; replay; heads that learn."""

from __future__ import annotations

import itertools

import pytest
import torch
from draws import draw, sampled
from test_training_anchors import documents, tiny
from test_training_trainer import answered, config
from test_training_trainer import tiny as tiny_float32
from tiny import propose
from torch.nn.functional import silu

from selfspec.adapters import MaskPathConfig, MaskPathModel, heads
from selfspec.backbone import Backbone
from selfspec.draft.block import draft_inputs, states
from selfspec.rows import block, chain
from selfspec.training import anchors as anchoring
from selfspec.training import noise
from selfspec.training.anchors import IGNORE
from selfspec.training.evaluate import judge
from selfspec.training.head import Head
from selfspec.training.objectives.kl import forward_kl
from selfspec.training.objectives.rkl import reverse_kl
from selfspec.training.pack import Packer
from selfspec.training.readout import read
from selfspec.training.replay import failures
from selfspec.training.step import run_clean, verifier_of
from selfspec.training.trainer import Trainer

OTHERS = ("calibrator", "confidence", "length")
B = 5
KINDS = {
    "known": dict(),
    "hidden and splits": dict(layouts=("known", "hidden"), prefix_splits=True, heads=(*OTHERS, "markov"), head_rank=6),
    "hidden, sampler": dict(layouts=("known", "hidden"), heads=(*OTHERS, "sampler"), head_rank=6),
    "shift": dict(shift=True, heads=("markov",), head_rank=6),
    "shift, sampler": dict(shift=True, heads=("sampler",), head_rank=6),
    "uno": dict(seed_row=True, shift=True, causal=True, noise="uniform", heads=("markov",), head_rank=6),
}


class Case:
    """A random path over packed documents, and where each of its groups stands in which text."""

    def __init__(self, kind: str):
        self.model = tiny()
        self.path = MaskPathModel(self.model, MaskPathConfig(block_size=B, **KINDS[kind]))
        with torch.no_grad():
            for parameter in self.path.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        self.backbone = Backbone(self.model, self.path)
        self.head = Head(self.backbone, chunk=7)
        self.pack = Packer(documents(8, seed=2), 40, 2).batch(0)
        self.anchors = sampled(self.pack, 6, 0, 1)
        hidden = splits = None
        if "hidden" in kind:
            hidden = torch.arange(6).expand(2, 6) % 3 == 0
        if kind == "hidden and splits":
            splits = torch.where(torch.arange(6) % 3 == 1, 2, 0).expand(2, 6)
        groups = anchoring.path_groups(self.path.config, self.pack, self.anchors, B, hidden, splits)
        seeds = torch.arange(12).view(2, 6)
        self.groups = noise.fill(groups, self.pack, self.path.config.noise, 61, None, seeds)
        self.slots = read(self.backbone, self.head, self.pack, self.groups, 0.5, verifier_of(self.model))

    def __iter__(self):
        """(group, slot, tokens up to the anchor, tokens of the document) of every slot with a label."""
        steps = self.slots.steps.tolist()
        for g, j in self.slots.valid.nonzero().tolist():
            n, slot = g // 6, int(self.anchors.flatten()[g])
            own = (self.pack.segments[n] == self.pack.segments[n, slot]).nonzero()[:, 0]
            text = self.pack.tokens[n, own].tolist()
            yield g, j, steps[j], slot - int(own[0]), text

    def logits(self, text: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([text])).logits[0, -1]


def corrected(path: MaskPathModel, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """A slot's state [d] once the token before it, of embedding [d], is known."""
    head = heads.conditioner(path.heads)
    inner = head.down.weight @ e if "markov" in path.heads else silu(head.down.weight @ torch.cat([e, h]))
    return h + head.up.weight @ inner


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_slots_read_what_the_model_itself_says(kind: str) -> None:
    case = Case(kind)
    slots, rows = case.slots, case.slots.rows
    kl, own, policy = rows.measure(forward_kl), rows.verifier_logp(), rows.on_policy(reverse_kl)
    guess = case.head.argmax(rows.hidden.flatten(0, 1)).view(slots.valid.shape)
    shown = case.groups.rows.tokens.view(12, -1) >= 0
    seen = 0
    for g, j, step, at, text in case:
        label = text[at + step]
        q = case.backbone.logits(rows.hidden[g : g + 1, j : j + 1])[0, 0]
        p = case.logits(text[: at + step])  # the text's tokens before the one that the slot predicts
        torch.testing.assert_close(slots.logp[g, j], q.log_softmax(-1)[label])
        torch.testing.assert_close(own[g, j], p.log_softmax(-1)[label])
        assert bool(slots.hits[g, j]) == (int(q.argmax()) == label)
        torch.testing.assert_close(kl[g, j], forward_kl(q[None], p[None])[0])
        if case.path.config.heads:
            h = corrected(case.path, rows.hidden[g, j], case.model.model.embed_tokens.weight[text[at + step - 1]])
            want = case.backbone.logits(h[None, None])[0, 0].log_softmax(-1)[label]
            torch.testing.assert_close(rows.corrected("markov", False)[g, j], want)
        if step < 1:
            continue
        block = text[: at + 1]  # then the draft's own tokens: what it was shown, guesses elsewhere
        for k in range(1, step):
            there = slots.steps.tolist().index(k) if k in slots.steps else None
            given = kind == "hidden and splits" and bool(shown[g, k])
            block.append(text[at + k] if given or there is None else int(guess[g, there]))
        torch.testing.assert_close(policy[g, j], reverse_kl(q[None], case.logits(block)[None])[0])
        seen += block != text[: at + step]
    assert seen > 5


def test_a_hidden_groups_calibrator_reads_its_bonus() -> None:
    case = Case("hidden and splits")
    got = case.slots.rows.corrected("calibrator", False)
    for g, j, step, at, text in case:
        hidden = case.slots.rows.hidden[g : g + 1, j : j + 1]
        corrected = heads.calibrated(case.path.heads, case.backbone, hidden, torch.tensor([text[at]]))
        want = case.backbone.logits(corrected)[0, 0].log_softmax(-1)[text[at + step]]
        torch.testing.assert_close(got[g, j], want)
    lengths = case.slots.rows.predicted("length", True).softmax(-1)  # of the drafts alone, as in decoding
    torch.testing.assert_close(heads.lengths(case.path.heads, case.slots.rows.hidden[:, 1:]), lengths.float())
    sure = heads.confidence(case.path.heads, case.slots.rows.hidden[:, 1:])
    torch.testing.assert_close(sure, case.slots.rows.predicted("confidence", True)[:, 1:].sigmoid().float())


@pytest.mark.parametrize("kind", ["known", "uno"])
@torch.no_grad()
def test_replay_starts_where_decoding_was_rejected(kind: str) -> None:
    case = Case(kind)
    anchors = sampled(case.pack, 9, 0, 1)
    got, moved = failures(case.backbone, case.head, case.pack, anchors), 0
    for n, a in itertools.product(range(2), range(9)):
        slot = int(anchors[n, a])
        if slot < 0:
            assert got[n, a] == -1
            continue
        own = (case.pack.segments[n] == case.pack.segments[n, slot]).nonzero()[:, 0]
        text, at = case.pack.tokens[n, own].tolist(), slot - int(own[0])
        cache = case.backbone.new_cache(1, 64, 64)
        case.backbone(chain(torch.tensor([0]), at), cache, torch.tensor([text[:at]]))
        cache.commit([at])
        anchor, start = torch.tensor([text[at]]), torch.tensor([at])
        guess = propose(case.backbone, cache, anchor, start, B, case.path.config)[0].argmax(-1).tolist()
        follows = text[at + 1 : at + B]
        first = next((k for k, (x, y) in enumerate(zip(guess, follows)) if x != y), None)
        want = slot if first is None or at + first + 2 >= len(text) else slot + first + 1
        assert got[n, a] == want
        moved += want != slot
    assert moved > 4


@pytest.mark.parametrize(
    "kind, layout",
    [("shift", "known"), ("uno", "known"), ("hidden and splits", "hidden"), ("shift, sampler", "known"),
     ("hidden, sampler", "hidden")],
)  # fmt: skip
@torch.no_grad()
def test_drafts_are_judged_as_the_heads_correct_them(kind: str, layout: str) -> None:
    """Against a forward of each text alone: the bonus calibrates, and the text's own token before a slot conditions."""
    case, k = Case(kind), 3
    heads.conditioner(case.path.heads).up.weight.mul_(5 if "sampler" not in kind else 20)
    path, table, w = case.path, case.model.model.embed_tokens.weight, case.model.lm_head.weight
    cache, clean, taps = run_clean(case.backbone, case.pack)
    head = Head(case.backbone, chunk=50)
    match, chance = judge(case.backbone, head, case.pack, cache, clean, taps, 7, B, layout, k)
    seen, moved = 0, 0
    for n, slot in anchoring.eligible(case.pack).nonzero().tolist():
        own = (case.pack.segments[n] == case.pack.segments[n, slot]).nonzero()[:, 0]
        text, at = case.pack.tokens[n, own].tolist(), slot - int(own[0])
        anchor, start = torch.tensor([text[at]]), torch.tensor([at])
        alone = case.backbone.new_cache(1, 64, 64)
        case.backbone(chain(torch.tensor([0]), at), alone, torch.tensor([text[:at]]))
        alone.commit([at])
        if layout == "known":
            h = states(case.backbone, alone, anchor, start, B, path.config)
        else:
            inputs = draft_inputs(None, 1, B, 1, anchor.device)
            h = case.backbone(block(start, B), alone, draft=inputs).draft[:, 1:]
            h = heads.calibrated(path.heads, case.backbone, h, anchor)
        plain = case.backbone.logits(h)[0]
        for j, label in enumerate(text[at + 1 : at + B]):
            scores = plain[j]
            if j or "shift" in kind:  # a seed's output is the model's own, and a calibrator knows the bonus
                scores = w @ corrected(path, h[0, j], table[text[at + j]])
            few = plain[j].topk(k).indices
            guess = int(few[scores[few].argmax()])
            assert int(match[n, slot, j]) == (guess == label)
            want = torch.minimum(scores.softmax(-1), case.logits(text[: at + j + 1]).softmax(-1)).sum()
            torch.testing.assert_close(chance[n, slot, j], want.float())
            seen, moved = seen + 1, moved + (guess != int(plain[j].argmax()))
        assert (match[n, slot, len(text[at + 1 : at + B]) :] == -1).all()
    assert seen > 40 and moved > 5


@pytest.mark.parametrize("form", ["markov", "sampler"])
def test_heads_learn_beside_the_path(form: str, tmp_path) -> None:
    """On answers seen again and again, each head comes to say more than a constant could."""
    model = tiny_float32()
    answers = answered(model, 6)
    terms = {"ce": 1.0, "markov": 1.0, "calibrator": 1.0, "confidence": 1.0, "length": 1.0}
    adapter = {"block_size": 4, "layouts": ["known", "hidden"], "heads": [*OTHERS, form], "head_rank": 16}
    fields = dict(adapter=adapter, objectives=terms, max_steps=120, lr=1e-2, log_every=1000, anchors=24, ema=0.0)
    trainer = Trainer(config(tmp_path, **fields), model, answers, answers[:1])
    for step in range(120):
        trainer.train_step()
        if step == 30:  # half learned; from here on the heads' targets stand still
            for p in (trainer.path.mask, *trainer.path.deltas.parameters()):
                p.requires_grad_(False)
    with torch.no_grad():
        pack, groups = draw(trainer)
        slots = trainer.slots(pack, groups)
        known = slots.drafts & ~slots.valid[:, :1]
        assert slots.rows.corrected("markov", False)[known].mean() > slots.logp[known].mean() + 0.1
        hidden = slots.drafts & slots.valid[:, :1]
        assert slots.rows.corrected("calibrator", False)[hidden].mean() > slots.logp[hidden].mean() + 0.1
        sure = slots.rows.predicted("confidence", False).sigmoid()
        assert sure[slots.reached & slots.hits].mean() > sure[slots.reached & ~slots.hits].mean() + 0.1
        whole = slots.drafts.sum(1) == 3
        run = (slots.reached & slots.hits).sum(1)[whole]
        constant = torch.bincount(run, minlength=4).float().div(len(run))
        chance = slots.rows.predicted("length", False)[whole].softmax(-1).gather(1, run[:, None])
        assert chance.log().mean() > constant[run].log().mean() + 0.1


RECIPES = {
    "every term": dict(
        objectives={name: 0.1 for name in ("ce", "dpace", "kl", "rkl", "tv", "lk_alpha", "lk_hybrid", "bv", "vat",
                                           "positional", "focal", "chain", "dblast", "on_policy")},
        replay_share=0.5,
    ),
    "complementary views": dict(
        adapter={"block_size": 5, "layouts": ["known", "hidden"], "prefix_splits": True}, complement=True
    ),
    "growing blocks": dict(adapter={"block_size": 8, "mask_embedding": "per_slot"}, growth=(2, 4, 8)),
    "masked noise": dict(adapter={"block_size": 5, "noise": "masked"}, objectives={"nelbo": 1.0}),
    "uno": dict(adapter={"style": "uno", "block_size": 5, "rank": 8, "alpha": 32}, objectives={"tv": 2.0, "ce": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name: str, tmp_path) -> None:
    model = tiny_float32()
    answers = answered(model, 4)
    trainer = Trainer(config(tmp_path, max_steps=30, lr=5e-3, **RECIPES[name]), model, answers, answers[:1])
    losses = [float(trainer.train_step()["loss"]) for _ in range(30)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert min(losses[-5:]) < losses[0] or name == "growing blocks"  # a larger block costs more
    if name == "growing blocks":
        assert draw(trainer)[1].labels.shape[2] == 8
    if name == "complementary views":
        _, groups = draw(trainer)
        labels, drafts = groups.labels.view(2, -1, 2, 5), torch.arange(5) >= 1
        follows = anchoring.following(draw(trainer)[0], groups.anchors, torch.arange(5)).view(labels.shape)
        charged = (labels >= 0)[..., drafts]
        both = charged[:, :, 0] ^ charged[:, :, 1]  # every token in exactly one view
        assert torch.equal(both, (follows != IGNORE)[:, :, 0, drafts])


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(objectives={"markov": 1.0}), "adapter.heads does not name"),
        (dict(adapter={"heads": ["length"]}), "no objective 'length' that trains it"),
        (dict(growth=(8, 4)), "growth="),
        (dict(adapter={"style": "uno", "block_size": 8}, growth=(2, 8)), "blocks of 3 or more"),
        (dict(complement=True), "adapter.prefix_splits"),
    ],
)
def test_a_recipe_that_cannot_train_is_refused(fields: dict, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **fields)
