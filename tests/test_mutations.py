"""Faults planted one by one; the check named for each passes without it and has to fail with it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from decoding import Rounds
from test_backbone import TOLERANCE, off
from test_rows import brute_force
from tiny import LAYERS, PROMPT, RAGGED, VOCAB, model_of, path_of, reference, run

from selfspec import attention, decode, rows
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.cache import PrefixCache
from selfspec.draft import block
from selfspec.plan import Plan
from selfspec.routed import RoutedLinear
from selfspec.session import Request, Session
from selfspec.verify import Accepted

N, B = 12, 5


# ---- checks


def decoded(mode, n=N, **config):
    model = model_of()
    session = Session(Backbone(model, path_of(model, **config), verify=False), Plan(mode, B, 12), 3, 40)
    requests = [Request(p, n) for p in RAGGED]
    run(session, requests)
    return requests


def text_is_exact(mode="sequential"):
    """The lossless property itself."""
    assert [r.output for r in decoded(mode)] == reference(model_of(), RAGGED, N)


def trees_are_exact():
    text_is_exact("tree")


def overlap_is_exact():
    text_is_exact("overlap+tree")


NEUTRAL = dict(noise=0.0, tuning="lora", shift=True, causal=True)


def first_draft_is_right():
    """A path that changes nothing, shifted and causal: slot 0 is the anchor's own row, so its guess is always taken."""
    for request in decoded("sequential", 11, **NEUTRAL):
        *full, last = sorted(request.stats.accepted.elements(), reverse=True)
        assert all(k >= 2 for k in full) and last >= 1
        assert request.stats.tau >= 10 / 5.5


@torch.no_grad()
def walk_is_the_models_own(family="Mistral"):
    """Full prefill, then a ragged cached prefix and a tail."""
    model, ids = model_of(family), torch.tensor([(PROMPT * 2)[:16], (PROMPT * 2)[3:19]])
    body = Backbone(model, verify=False)
    cache = body.new_cache(2, 16, 16)
    wanted = model(input_ids=ids, use_cache=False).logits
    first = body.logits(body(rows.chain(torch.tensor([0, 0]), 9), cache, ids[:, :9]).clean)
    assert off(first, wanted[:, :9]) < TOLERANCE[family]
    cache.lengths = [9, 7]
    tail = torch.stack([ids[0, 9:13], ids[1, 7:11]])
    got = body.logits(body(rows.chain(torch.tensor([9, 7]), 4), cache, tail).clean)
    assert off(got[0], wanted[0, 9:13]) < TOLERANCE[family] and off(got[1], wanted[1, 7:11]) < TOLERANCE[family]


def draft_sees_what_the_rule_says():
    """A training group, whose limit is its anchor's position; the prefix goes on behind it."""
    layout = rows.block(torch.tensor([8, 6]), 3)
    layout = replace(layout, limit=torch.tensor([[5] * 3, [2] * 3]), positions=layout.positions - 3)
    assert torch.equal(attention.AttentionRule(layout, 11).mask(None), brute_force(layout, 11, None))


@torch.no_grad()
def second_branch_is_committed():
    """A tree whose true path stands at rows 0, 2, 3; plain decoding goes on from what was committed."""
    model = model_of()
    [answer] = reference(model, [PROMPT], 8)
    body = Backbone(model, verify=False)
    play = Rounds(body, PROMPT)
    output = [answer[0]]
    output += play([(answer[1] + 1) % VOCAB, answer[1], answer[2]], [-1, 0, 0, 2])
    while len(output) < 8:
        output += play()
    assert output == answer


@torch.no_grad()
def clean_rows_ignore_the_adapter():
    """Logits beside draft rows, with two adapters."""
    model, ids, seen = model_of(), torch.tensor([PROMPT]), []
    for noise in (0.0, 0.5):
        body = Backbone(model, path_of(model, noise), verify=False)
        cache = body.new_cache(1, 30, 60)
        layout = rows.overlapped(rows.chain(torch.tensor([0]), 10), torch.tensor([[9]]), B)
        drafts = DraftRows(torch.full((1, B), MASK), torch.arange(B)[None])
        seen.append(body.logits(body(layout, cache, ids, drafts).clean))
    assert torch.equal(*seen)


@torch.no_grad()
def features_are_of_the_last_committed_row():
    model = model_of()
    body = Backbone(model, path_of(model, entry=2, taps=(4,)), verify=False)
    session = Session(body, Plan("tree", B, 12), 1, 40)
    session.add([request := Request(PROMPT, 20)])
    session.step()
    for _ in range(3):
        text = torch.tensor([request.prompt + request.output[:-1]])
        states = model(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states
        assert torch.allclose(session.slots.features[0], states[4][0, -1], atol=1e-12)
        session.step()


def lengths_follow_the_text():
    session = Session(Backbone(model_of(), path_of(model_of())), Plan("sequential", B), 3, 40)
    session.add(requests := [Request(p, 20) for p in RAGGED])
    for _ in range(3):
        session.step()
        wanted = [len(r.prompt + r.output) - 1 for r in requests]
        assert session.cache.lengths == session.slots.start.tolist() == wanted


def tau_is_trimmed():
    for request in decoded("sequential", 4, **NEUTRAL):
        assert request.stats.tokens == 3 == len(request.output) - 1


# ---- faults


def masked_slot_0(anchor, *args, real=block.draft_inputs, **kwargs):
    return real(None, *args, **kwargs)


def verify_without_the_anchor(body, cache, start, tree, *args, real=decode.verify):
    return real(body, cache, start, replace(tree, tokens=tree.tokens.index_fill(1, torch.tensor([0]), 0)), *args)


def moved_rule(shift, real=rows.attention_rule):
    return lambda *args: real(*args).roll(shift, -1)


def one_row_ahead(layout, n_keys, window=None, real=rows.attention_rule):
    """Every clean row also sees the one after it."""
    slot = torch.arange(n_keys) - layout.start[:, None, None] - 1 == torch.arange(layout.n_rows)[:, None]
    return real(layout, n_keys, window) | slot


def higher_limit(layout, *args, real=rows.attention_rule):
    return real(layout if layout.limit is None else replace(layout, limit=layout.limit + 1), *args)


def lower_limit(layout, *args, real=rows.attention_rule):
    return real(layout if layout.limit is None else replace(layout, limit=layout.limit - 1), *args)


def wider_window(layout, n_keys, window=None, real=rows.attention_rule):
    return real(layout, n_keys, None if window is None else window + 1)


def late_start(start, n, *args, real=rows.chain):
    layout = real(start, n, *args)
    return replace(layout, positions=layout.positions + (layout.positions > 7))


def no_compaction(self, rows, start, first=0):
    pass


def compaction_row_by_row(self, rows, start, first=0):
    """Writes before it has read everything, the last row first: right only while no source lies under a target."""
    for i, (path, at) in enumerate(zip(rows.tolist(), start.tolist())):
        for k in range(len(path) - 1, -1, -1):
            for store in self.stores:
                store[first + i, :, at + k] = store[first + i, :, at + path[k]]


def one_row_too_many(cache, slots, frame, *args, real=decode.settle):
    out = real(cache, slots, frame, *args)
    slots.start[frame.span] += 1
    return out


def adapter_on_everywhere(self, x):
    return self.delta(x, self.base)


def everything_accepted(tree, targets):
    n, m = tree.tokens.shape
    path = torch.arange(m).expand(n, m)
    tokens = torch.cat([tree.tokens[:, 1:], targets[:, -1:]], 1)
    return Accepted(path, torch.full((n,), m), tokens)


def last_of_the_forward(values, index):
    return values[:, -1]


def untrimmed(self, emitted):
    self.accepted[max(emitted, 2)] += 1


@dataclass
class Fault:
    check: Callable[[], None]
    target: str
    replacement: object


FAULTS = {
    "slot 0 masked": Fault(first_draft_is_right, "selfspec.draft.block.draft_inputs", masked_slot_0),
    "anchor not in verify": Fault(text_is_exact, "selfspec.decode.verify", verify_without_the_anchor),
    "mask one slot to the right": Fault(walk_is_the_models_own, "selfspec.attention.attention_rule", moved_rule(1)),
    "mask one slot to the left": Fault(walk_is_the_models_own, "selfspec.attention.attention_rule", moved_rule(-1)),
    "one row ahead": Fault(walk_is_the_models_own, "selfspec.attention.attention_rule", one_row_ahead),
    "one row ahead, decoding": Fault(text_is_exact, "selfspec.attention.attention_rule", one_row_ahead),
    "window one wider": Fault(walk_is_the_models_own, "selfspec.attention.attention_rule", wider_window),
    "limit one higher": Fault(draft_sees_what_the_rule_says, "selfspec.attention.attention_rule", higher_limit),
    "limit one lower": Fault(draft_sees_what_the_rule_says, "selfspec.attention.attention_rule", lower_limit),
    "limit one lower, decoding": Fault(first_draft_is_right, "selfspec.attention.attention_rule", lower_limit),
    "positions off by one": Fault(walk_is_the_models_own, "selfspec.rows.chain", late_start),
    "compaction skipped": Fault(second_branch_is_committed, "selfspec.cache.KVCache.compact", no_compaction),
    "compaction skipped, decoding": Fault(trees_are_exact, "selfspec.cache.KVCache.compact", no_compaction),
    "compaction row by row": Fault(second_branch_is_committed, "selfspec.cache.KVCache.compact", compaction_row_by_row),
    "rejected row committed": Fault(lengths_follow_the_text, "selfspec.decode.settle", one_row_too_many),
    "adapter on in verify": Fault(
        clean_rows_ignore_the_adapter, "selfspec.backbone.RoutedLinear.forward", adapter_on_everywhere
    ),
    "adapter on in verify, decoding": Fault(
        overlap_is_exact, "selfspec.backbone.RoutedLinear.forward", adapter_on_everywhere
    ),
    "adapter on in prefill": Fault(text_is_exact, "selfspec.backbone.RoutedLinear.forward", adapter_on_everywhere),
    "everything accepted": Fault(text_is_exact, "selfspec.choose.walk", everything_accepted),
    "features of the last row": Fault(
        features_are_of_the_last_committed_row, "selfspec.decode._at", last_of_the_forward
    ),
    "tau not trimmed": Fault(tau_is_trimmed, "selfspec.stats.Stats.count", untrimmed),
}


@pytest.mark.parametrize("check", list(dict.fromkeys(f.check for f in FAULTS.values())), ids=lambda c: c.__name__)
def test_the_check_passes_as_things_are(check):
    check()


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_finds_the_fault(name):
    fault = FAULTS[name]
    with mock.patch(fault.target, fault.replacement), pytest.raises(AssertionError):
        fault.check()


def test_draft_rows_are_what_the_adapter_is_for():
    """The other way round: an adapter that is never on is found too."""
    model, ids = model_of(), torch.tensor([PROMPT])

    def difference():
        seen = []
        for noise in (0.0, 0.5):
            path = path_of(model, noise, tuning="copy")
            torch.nn.init.zeros_(path.mask)
            body, cache = Backbone(model, path, verify=False), PrefixCache(LAYERS)
            body(rows.chain(torch.tensor([0]), 10), cache, ids)
            cache.freeze()
            drafts = DraftRows(torch.full((1, B), MASK), torch.arange(B)[None])
            seen.append(body(rows.block(torch.tensor([10]), B), cache, draft=drafts).draft)
        return off(*seen)

    with torch.no_grad():
        assert difference() > 0.01
        with mock.patch.object(RoutedLinear, "forward", lambda self, x: self.base(x)):
            assert difference() == 0
