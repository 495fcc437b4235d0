"""Fused layers: close to the layers that they replace, and bit-equal for a row whatever runs beside it."""

from functools import cache

import pytest
import torch
from tiny import PROMPT, build, path_of

pytest.importorskip("triton")

from selfspec import rows
from selfspec.attention import triton as kernel
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.fused import EXACT, FusedLayer
from selfspec.shadow import UnsupportedModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
SHAPES = dict(
    num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16
)
BIASED = dict(attention_bias=True)
FAMILIES = {
    "Llama": BIASED | SHAPES,
    "Qwen2": dict(use_sliding_window=True, sliding_window=21, layer_types=["sliding_attention", "full_attention"])
    | SHAPES,
    "Qwen3": SHAPES,
    "Mistral": dict(sliding_window=21) | SHAPES,
}
TEXT = (PROMPT * 5)[:34]
B = 2  # rows of a draft group


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short texts cross several tiles and stretches."""
    monkeypatch.setattr(kernel, "SPLIT", 32)
    monkeypatch.setattr(kernel, "BLOCK_N", 16)


@cache
def bodies(family, dtype, tuning="copy"):
    """A plain backbone and a fused one over the same model and mask path."""
    model = build(family, dtype, **FAMILIES[family]).to(DEVICE)
    path = path_of(model, tuning=tuning, noise=0.05).to(DEVICE)
    plain, fused = Backbone(model, path, "triton"), Backbone(model, path, "triton")
    said = fused.fuse(exact=True)
    assert said == "fused 2 of 2 layers, the final norm and the head"
    assert not any(isinstance(m, FusedLayer) for m in (*plain.modules(), *model.modules()))
    return plain, fused


def starts(*lengths):
    return torch.tensor(lengths, device=DEVICE)


def ids(*texts):
    return torch.tensor(texts, device=DEVICE)


def fill(body, cache, text, chunk, slot=0):
    """Commit a text in chunks. Returns its hidden states. [T, d]"""
    out = []
    while text:
        part, text = text[:chunk], text[chunk:]
        layout = rows.chain(starts(cache.lengths[slot]), len(part))
        out.append(body(layout, cache, ids(part), first=slot).clean[0])
        cache.commit([len(part)])
    return torch.cat(out)


def stored(cache, slot, begin, end):
    return [s[slot, :, begin:end].clone() for s in cache.stores]


@cache
def alone(family, dtype):
    """Plain decoding of the text's end after a prefill in one piece: hidden states, keys and values."""
    body = bodies(family, dtype)[1]
    cache = body.new_cache(1, 64, 32)
    with torch.no_grad():
        first = fill(body, cache, TEXT[:29], 29)
        rest = fill(body, cache, TEXT[29:], 1)  # crosses the end of a stretch
    return torch.cat([first, rest]), stored(cache, 0, 0, len(TEXT))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# the interpreter is slow; each thing that a family does differently is there once
CLOSE = [("Llama", HALF, "copy"), ("Qwen2", torch.float32, "lora"), ("Qwen3", HALF, "lora"), ("Mistral", HALF, "copy")]
EXACTLY = [("Llama", HALF), ("Mistral", torch.float32)]
if DEVICE == "cuda":
    CLOSE = [(f, d, t) for f in FAMILIES for d in (HALF, torch.float32) for t in ("copy", "lora")]
    EXACTLY = [(f, d) for f in FAMILIES for d in (HALF, torch.float16, torch.float32)]


@torch.no_grad()
@pytest.mark.parametrize("family,dtype,tuning", CLOSE)
def test_fused_layers_give_the_shadow_layers_logits(family, dtype, tuning):
    """Clean rows and draft rows, which ride along or are alone."""
    out = []
    for body in bodies(family, dtype, tuning):
        cache = body.new_cache(2, 16, 16)
        body(rows.chain(starts(0, 0), 5), cache, ids(TEXT[:5], TEXT[1:6]))
        cache.commit([5, 3])
        tree = rows.tree(starts(5, 3), ids([-1, 0, 0], [-1, 0, 1]))
        layout = rows.overlapped(tree, ids([2], [1]), B)
        slots = torch.arange(B, device=DEVICE).repeat(2, 1)
        masks = DraftRows(torch.full_like(slots, MASK), slots)
        both = body(layout, cache, ids([3, 1, 4], [1, 5, 9]), masks)
        draft = body(rows.block(starts(5, 3), B), cache, draft=masks).draft
        out.append([body.logits(x).float() for x in (both.clean, both.draft, draft)])
    for plain, fused in zip(*out, strict=True):
        assert (plain - fused).norm() / plain.norm() < (1e-5 if dtype == torch.float32 else 0.04)


@torch.no_grad()
@pytest.mark.parametrize("family,dtype", EXACTLY)
def test_a_row_is_the_same_in_every_chunking_of_its_prefill(family, dtype):
    body = bodies(family, dtype)[1]
    hidden, kv = alone(family, dtype)
    cache = body.new_cache(1, 64, 32)
    assert torch.equal(fill(body, cache, TEXT, 17), hidden)
    assert same(stored(cache, 0, 0, len(TEXT)), kv)


@torch.no_grad()
@pytest.mark.parametrize("family,dtype", EXACTLY)
def test_a_row_is_the_same_in_a_chain_and_beside_other_requests_and_draft_groups(family, dtype):
    body = bodies(family, dtype)[1]
    hidden, kv = alone(family, dtype)
    cache = body.new_cache(4, 64, 64)
    fill(body, cache, TEXT[:28], 28, slot=1)
    fill(body, cache, TEXT[3:12], 9, slot=2)
    cache.lengths[3] = 1
    at = starts(*cache.lengths[1:])
    tokens = ids(TEXT[28:34], [2] * 6, [5] * 6)
    got = body(rows.chain(at, 6), cache, tokens, first=1)
    assert torch.equal(got.clean[0], hidden[28:])
    assert same(stored(cache, 1, 28, 34), [t[:, 28:] for t in kv])
    nodes = torch.tensor([[0, 4]], device=DEVICE).expand(3, -1)
    slots = torch.arange(B, device=DEVICE).repeat(3, 2)
    layout = rows.overlapped(rows.chain(at, 5), nodes, B)
    got = body(layout, cache, tokens[:, :5], DraftRows(torch.full_like(slots, MASK), slots), first=1)
    assert torch.equal(got.clean[0], hidden[28:33])
    assert same(stored(cache, 1, 28, 33), [t[:, 28:33] for t in kv])


@torch.no_grad()
@pytest.mark.parametrize("family,dtype", EXACTLY)
@pytest.mark.parametrize("groups", [False, True])
def test_a_row_is_the_same_inside_a_tree(family, dtype, groups):
    """The text's next five tokens stand in a tree in between others; committed, they are what plain decoding stored."""
    body = bodies(family, dtype)[1]
    hidden, kv = alone(family, dtype)
    cache = body.new_cache(2, 64, 32)
    fill(body, cache, TEXT[:29], 29, slot=1)
    cache.lengths[0] = 12
    parents = [-1, 0, 0, 1, 2, 4, 4, 3, 6]
    mine = [0, 2, 4, 6, 8]
    tokens = [7] * 9
    for node, token in zip(mine, TEXT[29:], strict=False):
        tokens[node] = token
    layout, draft = rows.tree(starts(12, 29), ids(parents, parents)), None
    if groups:
        layout = rows.overlapped(layout, ids([0, 8], [4, 6]), B)
        slots = torch.arange(B, device=DEVICE).repeat(2, 2)
        draft = DraftRows(torch.full_like(slots, MASK), slots)
    got = body(layout, cache, ids([1] * 9, tokens), draft)
    assert torch.equal(got.clean[1, mine], hidden[29:34])
    cache.commit([1, 5], ids([0, 0, 0, 0, 0], mine))
    assert same(stored(cache, 1, 29, 34), [t[:, 29:] for t in kv])


def test_exact_mode_refuses_what_it_cannot_promise():
    with pytest.raises(UnsupportedModel, match="gemma2 is not among the families"):
        Backbone(build("Gemma2", torch.float32), backend="triton").fuse(exact=True)
    with pytest.raises(UnsupportedModel, match="'sdpa' adds in an order of its own"):
        Backbone(build("Llama", torch.float32)).fuse(exact=True)
    with pytest.raises(UnsupportedModel, match="not float64"):
        Backbone(build("Llama"), backend="triton").fuse(exact=True)
    with pytest.raises(UnsupportedModel, match="llama, qwen2, qwen3, mistral"):
        Backbone(build("Llama"), backend="triton").fuse(exact=True)
    assert EXACT == ("llama", "qwen2", "qwen3", "mistral")
