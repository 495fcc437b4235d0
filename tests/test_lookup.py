"""Prompt lookup: drafts from the text itself, for any model without an adapter."""

import pytest
import torch
from tiny import model_of, reference

from selfspec import SelfSpecModel
from selfspec.draft.lookup import lookup


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
