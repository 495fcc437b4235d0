"""Fused layers: close to the layers that they replace, and bit-equal for a row whatever runs beside it."""

from functools import cache

import pytest
import torch
from tiny import PROMPT, build, path_of

pytest.importorskip("triton")

from selfspec import rows
from selfspec.attention import triton as kernel
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.fusable import EXACT
from selfspec.fused import FusedLayer
from selfspec.shadow import UnsupportedModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
SHAPES = dict(
    num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16
)
BIASED = dict(attention_bias=True, mlp_bias=True)
TWO = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "Llama": SHAPES | BIASED,
    "Qwen2": SHAPES | TWO | dict(use_sliding_window=True, sliding_window=21),  # and biases
    "Qwen3": SHAPES,
    "Mistral": SHAPES | dict(sliding_window=3),
}
SMOLLM2 = dict(  # its sizes, six of its layers
    num_hidden_layers=6, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, vocab_size=49152, max_position_embeddings=8192, initializer_range=0.04,
)  # fmt: skip
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
    plain, fused = Backbone(model, path), Backbone(model, path)
    fused.backend = "triton"  # from here on: the interpreter need not run the backbone's own probe
    n = model.config.num_hidden_layers
    assert fused.fuse(exact=True) == f"fused {n} of {n} layers, the final norm and the head"
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
EXACTLY = [("Qwen2", HALF)]
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


def restored(body, kv, slot, length, *others):
    """A cache that holds the text's first positions in a slot, other requests' rubbish in the others."""
    cache = body.new_cache(1 + len(others), max(length, *others) + 64, 64)
    for full, text in zip(cache.stores, kv, strict=True):
        full.normal_()
        full[slot, :, :length] = text[:, :length]
    cache.lengths = list(others)
    cache.lengths.insert(slot, length)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("family,dtype", EXACTLY)
def test_a_row_is_the_same_in_a_chain_and_beside_other_requests_and_draft_groups(family, dtype):
    body = bodies(family, dtype)[1]
    hidden, kv = alone(family, dtype)
    cache = restored(body, kv, 1, 28, 40, 9, 1)
    tokens = ids(TEXT[28:], [2] * 6, [5] * 6)
    nodes = torch.tensor([[0, 4]], device=DEVICE).expand(3, -1)
    slots = torch.arange(B, device=DEVICE).repeat(3, 2)
    layout = rows.overlapped(rows.chain(starts(28, 9, 1), 6), nodes, B)
    got = body(layout, cache, tokens, DraftRows(torch.full_like(slots, MASK), slots), first=1)
    assert torch.equal(got.clean[0], hidden[28:])
    assert torch.equal(body.logits(got.clean)[:1, 3], body.logits(hidden[None, 31:32])[0])
    assert same(stored(cache, 1, 28, 34), [t[:, 28:] for t in kv])


@torch.no_grad()
@pytest.mark.parametrize("family,dtype", EXACTLY)
@pytest.mark.parametrize("groups", [False, True])
def test_a_row_is_the_same_inside_a_tree(family, dtype, groups):
    """The text's next five tokens stand in a tree in between others; committed, they are what plain decoding stored."""
    body = bodies(family, dtype)[1]
    hidden, kv = alone(family, dtype)
    cache = restored(body, kv, 1, 29, 12)
    parents = [-1, 0, 0, 1, 2, 4, 4, 3, 6]
    mine = [0, 2, 4, 6, 8]
    tokens = [7] * 9
    for node, token in zip(mine, TEXT[29:], strict=True):
        tokens[node] = token
    layout, draft = rows.tree(starts(12, 29), ids(parents, parents)), None
    if groups:
        layout = rows.overlapped(layout, ids([0, 8], [4, 6]), B)
        slots = torch.arange(B, device=DEVICE).repeat(2, 2)
        draft = DraftRows(torch.full_like(slots, MASK), slots)
    got = body(layout, cache, ids([1] * 9, tokens), draft)
    assert torch.equal(got.clean[1, mine], hidden[29:])
    cache.compact(ids([0, 0, 0, 0, 0], mine), layout.start)
    cache.commit([1, 5])
    assert same(stored(cache, 1, 29, 34), [t[:, 29:] for t in kv])


def test_exact_mode_refuses_what_it_cannot_promise():
    with pytest.raises(UnsupportedModel, match="gemma2 is not among the families"):
        Backbone(build("Gemma2", torch.float32)).fuse(exact=True)
    with pytest.raises(UnsupportedModel, match="'sdpa' adds in an order of its own"):
        Backbone(build("Llama", torch.float32)).fuse(exact=True)
    with pytest.raises(UnsupportedModel, match=r"not float64\. It serves llama, qwen2, qwen3, mistral"):
        Backbone(build("Llama")).fuse(exact=True)
    assert EXACT == ("llama", "qwen2", "qwen3", "mistral")


@torch.no_grad()
@pytest.mark.parametrize(
    "family,why", [("Granite", "something else"), ("Gemma2", "plain dense shape"), ("Phi3", "plain dense shape")]
)
def test_layers_of_another_kind_stay_as_they_are_and_it_is_said(family, why):
    body = Backbone(build(family, torch.float32, num_hidden_layers=1, layer_types=None))
    before = list(body.layers)
    said = body.fuse()
    assert said.startswith("fused 0 of 1 layers") and why in said
    assert list(body.layers) == before


def test_fused_layers_say_that_they_have_no_gradient():
    body = bodies("Qwen3", HALF, "lora")[1]
    with pytest.raises(ValueError, match="have no gradient"):
        body.norm(torch.zeros(1, 1, 32, dtype=HALF, device=DEVICE, requires_grad=True))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [500, 2040])
def test_rows_are_the_same_at_real_sizes(monkeypatch, dtype, length):
    """SmolLM2's shape and the kernels' own tiles: decoding, chains, trees, batches and chunks, to the last bit."""
    monkeypatch.undo()  # the small tiles
    body = Backbone(build("Llama", dtype, **SMOLLM2).to(DEVICE), backend="triton")
    body.fuse(exact=True)
    text = torch.randint(49152, (length + 24,), generator=torch.Generator().manual_seed(length)).tolist()
    cache = body.new_cache(1, length + 24, 512)
    hidden = torch.cat([fill(body, cache, text[:length], 512), fill(body, cache, text[length:], 1)])
    kv = stored(cache, 0, 0, length + 24)
    for chunk in (7, 100):
        assert torch.equal(fill(body, body.new_cache(1, length + 24, 512), text, chunk), hidden)
    cache = restored(body, kv, 1, length, 33, 700, 64)
    at = starts(*cache.lengths)
    other = [5] * 16
    chain = body(rows.chain(at, 16), cache, ids(other, text[length : length + 16], other, other)).clean[1]
    assert torch.equal(chain, hidden[length : length + 16])
    assert torch.equal(body.logits(chain[None])[0, 9:10], body.logits(hidden[None, length + 9 : length + 10])[0])
    parents = [-1] + [(i - 1) // 2 for i in range(1, 64)]
    mine = [0, 2, 5, 12, 25, 52]
    tokens = [9] * 64
    for node, token in zip(mine, text[length:], strict=False):
        tokens[node] = token
    got = body(rows.tree(at, ids(*[parents] * 4)), cache, ids([1] * 64, tokens, [2] * 64, [3] * 64)).clean[1, mine]
    assert torch.equal(got, hidden[length : length + 6])
    cache.compact(ids([0] * 6, mine, [0] * 6, [0] * 6), at)
    cache.commit([1, 6, 1, 1])
    assert same(stored(cache, 1, length, length + 6), [t[:, length : length + 6] for t in kv])
