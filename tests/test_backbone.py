"""The walk over sixteen families, the draft path against the model's own logits, the user's model left untouched."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import (
    EXPERTS,
    FAMILIES,
    LAYERS,
    POSITIONS,
    PROMPT,
    RAGGED,
    StatesPath,
    backbone,
    build,
    model_of,
    path_of,
    reference,
)

from selfspec import SelfSpecModel, rows
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.cache import PrefixCache
from selfspec.routed import RoutedLinear
from selfspec.shadow import UnsupportedModel

LONG = (PROMPT * 3)[:23]  # several times the windows


TOLERANCE = dict.fromkeys(FAMILIES, 1e-9) | {"Gemma2": 1e-6}  # whose own softmax runs in float32


def own(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def off(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_gives_the_models_own_logits(family):
    """A full prefill, then a prefix in the cache and a tail of rows, then a second tail; windows are crossed."""
    model = model_of(family)
    body, ids = Backbone(model), torch.tensor([LONG, LONG[::-1]])
    wanted = own(model, ids)
    whole = body(rows.chain(torch.tensor([0, 0]), 23), PrefixCache(LAYERS), ids)
    assert off(body.logits(whole.clean), wanted) < TOLERANCE[family]
    cache = body.new_cache(2, 23, 16)
    body(rows.chain(torch.tensor([0, 0]), 9), cache, ids[:, :9])
    cache.commit([9, 7])  # ragged from here on
    at = torch.tensor(cache.lengths)
    for width in (1, 6):
        tail = torch.stack([ids[i, s : s + width] for i, s in enumerate(at.tolist())])
        got = body.logits(body(rows.chain(at, width), cache, tail).clean)
        for i, s in enumerate(at.tolist()):
            assert off(got[i], wanted[i, s : s + width]) < TOLERANCE[family]
        cache.commit([width, width])
        at = at + width


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_of_a_tree_gives_the_logits_of_its_own_text(family):
    model = model_of(family)
    body = Backbone(model)
    cache = body.new_cache(1, 20, 20)
    prefix, tokens = LONG[:8], [3, 5, 5, 7, 1, 2]
    parents = [-1, 0, 0, 1, 2, 3]
    body(rows.chain(torch.tensor([0]), 8), cache, torch.tensor([prefix]))
    cache.commit([8])
    layout = rows.tree(torch.tensor([8]), torch.tensor([parents]))
    got = body.logits(body(layout, cache, torch.tensor([tokens])).clean)
    for node in range(6):
        path, at = [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        assert off(got[0, node], own(model, torch.tensor([prefix + path]))[0, -1]) < TOLERANCE[family]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tuning", ["lora", "copy"])
def test_a_neutral_path_drafts_what_the_model_says(family, tuning):
    """Real tokens in a causal group, weights untouched: draft rows then are the model's own rows."""
    model, ids = model_of(family), torch.tensor([LONG, LONG[::-1]])
    path = path_of(model, noise=0.0, tuning=tuning, causal=True, shift=True, block_size=8)
    body = Backbone(model, path)
    cache = body.new_cache(2, 23, 16)
    body(rows.chain(torch.tensor([0, 0]), 9), cache, ids[:, :9])
    cache.commit([9, 7])
    at = torch.tensor(cache.lengths)
    tokens = torch.stack([ids[i, s : s + 8] for i, s in enumerate(at.tolist())])
    rows_in = DraftRows(tokens, torch.arange(8).expand(2, 8))
    got = body.logits(body(rows.block(at, 8, causal=True), cache, draft=rows_in).draft)
    wanted = own(model, ids)
    for i, s in enumerate(at.tolist()):
        assert off(got[i], wanted[i, s : s + 8]) < TOLERANCE[family]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_late_draft_rows_run_through_the_last_layers_only(family):
    """Fed with the model's own hidden states at layer 2 they end in its own logits, alone and beside clean rows."""
    model, ids = model_of(family), torch.tensor([LONG])
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    path = StatesPath(2, out.hidden_states[2][:, 12:20])
    body = Backbone(model, path)
    cache = body.new_cache(1, 23, 16)
    body(rows.chain(torch.tensor([0]), 12), cache, ids[:, :12])
    cache.commit([12])
    drafts = DraftRows(ids[:, 12:20], torch.arange(8)[None])
    alone = body(rows.block(torch.tensor([12]), 8, causal=True), cache, draft=drafts).draft
    assert off(body.logits(alone), out.logits[:, 12:20]) < TOLERANCE[family]
    cache.crop(10)  # the same rows hung on a clean chain of two
    layout = rows.overlapped(rows.chain(torch.tensor([10]), 2), torch.tensor([[1]]), 8, causal=True)
    both = body(layout, cache, ids[:, 10:12], drafts)
    assert off(body.logits(both.draft), out.logits[:, 12:20]) < TOLERANCE[family]
    assert off(body.logits(both.clean), out.logits[:, 10:12]) < TOLERANCE[family]


OTHERS = {
    "GPTNeoX": dict(rotary_pct=0.5),
    "Phi": {},
    "StableLm": {},
    "Mixtral": dict(num_local_experts=4, sliding_window=5, experts_implementation="eager"),
    "Nemotron": {},
    "DeepseekV3": dict(
        num_key_value_heads=4,
        **dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=4),
        **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager"),
        **dict(n_group=1, topk_group=1, first_k_dense_replace=1),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("family", OTHERS)
def test_further_families(family):
    """Other names for things, parallel residuals, partial rotary, keys and values of different width."""
    model, ids = build(family, **OTHERS[family]), torch.tensor([LONG])
    body = Backbone(model)
    cache = body.new_cache(1, 23, 16)
    body(rows.chain(torch.tensor([0]), 9), cache, ids[:, :9])
    cache.commit([9])
    got = body.logits(body(rows.chain(torch.tensor([9]), 14), cache, ids[:, 9:]).clean)
    assert off(got, own(model, ids)[:, 9:]) < 1e-6


@torch.no_grad()
def test_features_are_the_models_hidden_states():
    model, ids = model_of("Gemma3"), torch.tensor([LONG])
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    taps = (0, 2, 4)
    body = Backbone(model, path_of(model, taps=taps))
    got = body(rows.chain(torch.tensor([0]), 23), PrefixCache(LAYERS), ids).taps
    assert off(got, torch.cat([out.hidden_states[t] for t in taps], -1)) < 1e-9


def picture(model):
    """All that could have changed on a user's model."""
    modules = {name: id(module) for name, module in model.named_modules()}
    inside = {name: list(map(id, m._modules.values())) for name, m in model.named_modules()}
    fields = {name: set(vars(m)) for name, m in model.named_modules()}
    hooks = {
        name: [len(h) for k, h in vars(m).items() if k.endswith("_hooks") and h is not None]
        for name, m in model.named_modules()
    }
    training = {name: m.training for name, m in model.named_modules()}
    forwards = {name: type(m).forward for name, m in model.named_modules() if "forward" not in vars(m)}
    tensors = {
        n: (id(t), t._version, t.requires_grad, t.grad is None, t.clone())
        for n, t in [*model.named_parameters(), *model.named_buffers()]
    }
    configs = {name: id(m.config) for name, m in model.named_modules() if hasattr(m, "config")}
    settings = copy.deepcopy(model.config.to_dict()), model.config._attn_implementation
    return (
        (modules, inside, fields, hooks, training, forwards, configs, settings),
        tensors,
        (model.generation_config.to_dict()),
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "Gemma3", "GptOss"])
def test_the_users_model_is_left_as_it_was(family, training):
    model = build(family).train(training)
    model.model.layers[1].eval()  # a mixture, as a user with frozen layers has it
    before = picture(model)
    path = path_of(model, 0.2, taps=(1, 4))
    SelfSpecModel(model, path).generate(torch.tensor([PROMPT]), max_new_tokens=6)
    path = path_of(model, 0.2, entry=2)
    SelfSpecModel(model, path).generate(torch.tensor([PROMPT]), max_new_tokens=6, mode="overlap+tree")
    after = picture(model)
    assert before[0] == after[0] and before[2] == after[2]
    assert before[1].keys() == after[1].keys()
    for name, (*facts, values) in before[1].items():
        *now, current = after[1][name]
        assert facts == now and torch.equal(values, current), name
    assert not any(isinstance(m, RoutedLinear) for m in model.modules())


def test_the_shadow_shares_every_parameter():
    model = model_of()
    body = Backbone(model)
    theirs = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in body.layers.parameters()} <= theirs
    assert body.norm is model.model.norm and body.embeddings is model.model.embed_tokens
    with torch.no_grad():  # a change of the user's weights is seen at once
        ids, start = torch.tensor([PROMPT]), torch.tensor([0])
        fresh = build()
        body = Backbone(fresh)
        fresh.model.layers[3].mlp.down_proj.weight.mul_(2)
        got = body.logits(body(rows.chain(start, 10), PrefixCache(LAYERS), ids).clean)
        assert off(got, own(fresh, ids)) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tuning", ["lora", "copy"])
@pytest.mark.parametrize("entry", [0, 2])
def test_clean_logits_do_not_know_of_the_adapter(dtype, tuning, entry):
    """Bit for bit, at the same row layout; the draft rows beside them do know."""
    model, ids = build(dtype=dtype), torch.tensor([PROMPT, PROMPT[::-1]])
    fresh = path_of(model, 0.0, tuning=tuning, entry=entry)
    changed = path_of(model, 0.5, tuning=tuning, entry=entry)
    changed.mask.data.copy_(fresh.mask)  # the deltas alone must make the difference
    if entry:
        changed.token.weight.data.copy_(fresh.token.weight)
    seen = {}
    for name, path in {"none": None, "fresh": fresh, "changed": changed}.items():
        body = Backbone(model, path)
        cache = body.new_cache(2, 30, 64)
        hidden = [body(rows.chain(torch.tensor([0, 0]), 10), cache, ids)]
        cache.commit([10, 8])
        at = torch.tensor([10, 8])
        hidden.append(body(rows.chain(at, 3), cache, ids[:, :3]))
        kept = [s[:, :, :8].clone() for s in cache.stores]
        if path is not None:
            layout = rows.overlapped(rows.chain(at, 3), torch.arange(3).expand(2, 3), 4)
            drafts = DraftRows(torch.full((2, 12), MASK), torch.arange(4).repeat(3).expand(2, 12))
            hidden.append(body(layout, cache, ids[:, :3], drafts))
        seen[name] = [body.logits(h.clean) for h in hidden], kept, body.logits(hidden[-1].draft)
    for name in ("fresh", "changed"):
        for got, wanted in zip(seen[name][0][:2], seen["none"][0], strict=True):
            assert torch.equal(got, wanted)
        assert all(map(torch.equal, seen[name][1], seen["none"][1]))
    assert torch.equal(seen["fresh"][0][2], seen["changed"][0][2])
    assert off(seen["changed"][2].float(), seen["fresh"][2].float()) > 0.01


# transformers' own masks carry the window of these families; their layers ask attention for none
MASK_ONLY = {
    "Phimoe": dict(sliding_window=12, num_local_experts=4, **EXPERTS),
    "Qwen2Moe": dict(
        use_sliding_window=True,
        sliding_window=12,
        layer_types=["sliding_attention"] * LAYERS,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        **EXPERTS,
    ),
}


@pytest.mark.parametrize("family", MASK_ONLY)
def test_a_window_that_only_the_models_mask_tells(family):
    model = build(family, **MASK_ONLY[family])
    body = Backbone(model)
    assert body.windows == [12] * LAYERS
    prompt = list(range(3, 19))
    out = SelfSpecModel(model).generate([prompt], max_new_tokens=20, mode="ar")
    assert out[0, len(prompt) :].tolist() == reference(model, [prompt], 20)[0]


def test_threads_take_turns():
    """Clean rows of one thread must not meet the adapter because another thread is drafting."""
    model = model_of()
    engine = SelfSpecModel(model, path_of(model, noise=0.3))
    want = reference(model, RAGGED, 16)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(engine.generate, [RAGGED[i % 3]], max_new_tokens=16) for i in range(12)]
            got = [j.result()[0, len(RAGGED[i % 3]) :].tolist() for i, j in enumerate(jobs)]
    finally:
        sys.setswitchinterval(interval)
    assert got == [want[i % 3] for i in range(12)]


def test_ties_below_float32_go_to_the_first_index():
    """transformers compares float64 logits in float32, so two that differ less are a tie there."""
    model = build(tie_word_embeddings=False)
    with torch.no_grad():
        weight = model.lm_head.weight
        half = weight.shape[0] // 2
        weight[half : 2 * half] = weight[:half] * (1 + 1e-10)
    out = SelfSpecModel(model).generate([PROMPT], max_new_tokens=8, mode="ar")
    assert out[0, len(PROMPT) :].tolist() == reference(model, [PROMPT], 8)[0]


@pytest.mark.parametrize("wrap", ["compile", "peft"])
def test_wrapped_models_are_told_apart(wrap):
    model = build()
    if wrap == "compile":
        wrapped = torch.compile(model)
    else:
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModel, match=r"torch\.compile|merge_and_unload"):
        Backbone(wrapped)


@pytest.mark.parametrize("family", FAMILIES)
def test_looked_up_rotary_factors_are_the_modules_own(family):
    """To the last bit, past the model's positions too."""
    body = backbone(family, torch.float32)
    table = body.new_cache(1, POSITIONS, 9).rope
    positions = torch.randint(POSITIONS + 9, (3, 5), generator=torch.Generator().manual_seed(1))
    want, got = body._rope(positions), body._rope(positions, table)
    assert table is not None and want.keys() == got.keys()
    for kind, pair in want.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, got[kind], strict=True))


def test_rotary_factors_that_depend_on_lengths_are_not_looked_up():
    model = build(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))
    assert Backbone(model).new_cache(1, 40, 4).rope is None
