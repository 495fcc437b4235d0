"""Loops: the second pass sees the prefix in its slots, and text stays the base model's own."""

import pytest
import torch
from test_overlap import committed
from tiny import PROMPT, backbone, model_of, path_of, propose, reference

from selfspec import rows
from selfspec.backbone import MASK
from selfspec.draft import chain_of, loop
from selfspec.verify.greedy import greedy

B = 5


def prepared(shift=False, splits=True):
    body = backbone(path=path_of(model_of(), block_size=B, shift=shift, causal=shift, prefix_splits=splits))
    cache = body.new_cache(2, 60, 20)
    return body, cache, committed(body, cache, [PROMPT, PROMPT[:4]])


@pytest.mark.parametrize("shift", [False, True])
@torch.no_grad()
def test_the_second_pass_drafts_the_suffix_given_the_prefix(shift):
    body, cache, state = prepared(shift)
    where = (body, cache, state.anchor, state.start, B, body.path.config)
    first = propose(*where)
    lengths = torch.tensor([1, 3])
    got = loop.propose(*where, prefix=lambda c: lengths)
    known = first.argmax(-1)
    known[0, 1:], known[1, 3:] = MASK, MASK
    second = propose(*where, known=known)
    assert got.prefix.tolist() == [1, 3]
    for i, s in enumerate([1, 3]):
        assert torch.equal(got.logits[i, :s], first[i, :s]) and torch.equal(got.logits[i, s:], second[i, s:])
        assert not torch.allclose(first[i, s:], second[i, s:])  # the prefix tells it something
    assert torch.equal(got.tokens, got.logits.argmax(-1))


@torch.no_grad()
def test_a_prefix_token_does_not_depend_on_where_it_stands_in_the_batch():
    body, cache, state = prepared()
    both = loop.propose(body, cache, state.anchor, state.start, B, body.path.config, prefix=loop.Fixed(2))
    alone = body.new_cache(1, 60, 20)
    one = committed(body, alone, [PROMPT[:4]])
    got = loop.propose(body, alone, one.anchor, one.start, B, body.path.config, prefix=loop.Fixed(2))
    torch.testing.assert_close(got.logits[0], both.logits[1], rtol=0, atol=1e-9)


@torch.no_grad()
def test_later_passes_never_give_up_a_prefix_and_one_pass_is_the_plain_draft():
    body, cache, state = prepared()
    where = (body, cache, state.anchor, state.start, B, body.path.config)
    wanted = iter([torch.tensor([2, 3]), torch.tensor([1, 4])])
    got = loop.propose(*where, passes=3, prefix=lambda c: next(wanted))
    assert got.prefix.tolist() == [2, 4]
    assert torch.equal(got.tokens, got.logits.argmax(-1))
    assert torch.equal(loop.propose(*where, passes=1).logits, propose(*where))
    with pytest.raises(ValueError, match="passes=0"):
        loop.propose(*where, passes=0)


@torch.no_grad()
def test_drawn_prefixes_stay_as_they_were_drawn():
    """With noise fixed by depth the tokens that the suffix is conditioned on are the ones that are drafted."""
    body, cache, state = prepared()
    noise = torch.randn(2, B - 1, body.vocab_size, generator=torch.Generator().manual_seed(0)).double()
    seen = []

    def choose(logits):
        seen.append((logits + noise).argmax(-1))
        return seen[-1]

    got = loop.propose(
        body, cache, state.anchor, state.start, B, body.path.config, passes=3, prefix=loop.Fixed(2), choose=choose
    )
    assert all(torch.equal(tokens[:, :2], seen[0][:, :2]) for tokens in seen)
    assert torch.equal(got.tokens, seen[-1]) and not torch.equal(seen[0], seen[-1])


@torch.no_grad()
def test_looped_drafts_leave_the_text_as_it_is():
    body, cache, state = prepared()
    anchor, start = state
    emitted = [[t] for t in anchor.tolist()]
    while min(map(len, emitted)) < 16:
        got = loop.propose(body, cache, anchor, start, B, body.path.config, prefix=loop.Expected())
        tree = chain_of(anchor, got.logits)
        assert torch.equal(tree.tokens[:, 1:], got.tokens)
        accepted = greedy(tree, body.logits(body(rows.chain(start, B), cache, tree.tokens).clean))
        counts = accepted.count.tolist()
        cache.commit(counts)
        anchor, start = accepted.bonus, start + accepted.count
        for text, tokens, count in zip(emitted, accepted.tokens.tolist(), counts):
            text += tokens[:count]
    assert [e[:16] for e in emitted] == reference(model_of(), [PROMPT, PROMPT[:4]], 16)


def test_a_path_without_prefix_splits_is_refused():
    body, cache, state = prepared(splits=False)
    with pytest.raises(ValueError, match="prefix_splits=true"):
        loop.propose(body, cache, state.anchor, state.start, B, body.path.config)


def test_prefix_rules():
    confidence = torch.tensor([[0.9, 0.8, 0.5, 1.0], [0.1, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert loop.PREFIXES["product"](0.6)(confidence).tolist() == [2, 0, 4]
    assert loop.PREFIXES["fixed"](9)(confidence).tolist() == [4, 4, 4]
    assert loop.PREFIXES["expected"]()(confidence).tolist() == [2, 0, 4]  # 0.9 + 0.72 + 0.36 + 0.36, 0.4, 4


@torch.no_grad()
def test_a_caller_that_fixes_the_keys_gets_the_same_draft():
    """As a graph does; the known tokens once went in the place of that number."""
    body, cache, state = prepared()
    where = (body, cache, state.anchor, state.start, B, body.path.config)
    free, held = (loop.propose(*where, n_keys=k, prefix=loop.Fixed(2)) for k in (None, 40))
    torch.testing.assert_close(held.logits, free.logits, rtol=0, atol=1e-9)
    assert held.prefix.tolist() == [2, 2]
