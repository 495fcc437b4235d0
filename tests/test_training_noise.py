"""Noise of a block, and the UNO layout: trained, decoded, and saved as what other engines read."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from draws import sampled
from safetensors.torch import load_file
from test_training_anchors import documents
from tiny import PROMPT, VOCAB, build, model_of, propose, reference

from selfspec import SelfSpecModel
from selfspec.adapters import MaskPathConfig, MaskPathModel, io
from selfspec.backbone import MASK, Backbone
from selfspec.draft.block import noise as drawn_noise
from selfspec.rows import attention_rule, chain
from selfspec.training import anchors as anchoring
from selfspec.training import noise
from selfspec.training.anchors import IGNORE
from selfspec.training.pack import Pack, Packer
from selfspec.training.step import draft_states, run_clean

UNO = MaskPathConfig.from_dict({"style": "uno", "block_size": 6, "rank": 4, "alpha": 8})
SEEDS = torch.randint(1 << 62, (3, 25), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pack() -> Pack:
    return Packer(documents(12), 40, 3, seed=1).batch(0)


def moved(model, config: MaskPathConfig) -> MaskPathModel:
    """A path whose every parameter is off its start."""
    torch.manual_seed(1)
    path = MaskPathModel(model, config)
    with torch.no_grad():
        for parameter in path.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return path.requires_grad_(False).eval()


def drawn(pack: Pack) -> torch.Tensor:
    return sampled(pack, 25, 0, 0)


def test_masked_noise_shows_tokens_that_are_then_not_charged(pack: Pack) -> None:
    anchors = drawn(pack)
    hidden = torch.arange(25).expand(3, 25) % 3 == 0
    plain = anchoring.groups(pack, anchors, 8, hidden)
    got = noise.fill(plain, pack, "masked", 61, None, SEEDS)
    before, after = (g.rows.tokens.view(3, 25, 8) for g in (plain, got))
    shown = before != after
    assert torch.equal(after[shown], plain.labels[shown]) and (got.labels[shown] == IGNORE).all()
    assert torch.equal(got.labels[~shown], plain.labels[~shown])
    assert not shown[:, :, 0].any()  # neither the anchor nor a hidden bonus
    drafts = plain.labels[:, :, 1:] >= 0
    assert ((got.labels[:, :, 1:] >= 0).any(-1) == drafts.any(-1)).all()  # something is left to predict
    share = (shown[:, :, 1:] & drafts).sum(-1) / drafts.sum(-1).clamp(min=1)
    few, many = share[got.level > 0.8], share[(got.level < 0.2) & (drafts.sum(-1) > 3)]
    assert few.mean() < 0.25 and many.mean() > 0.6
    assert torch.equal(noise.fill(plain, pack, "masked", 61, None, SEEDS).rows.tokens, got.rows.tokens)
    assert noise.fill(plain, pack, "masked", 61, None, None) is plain  # decoded from masks alone
    assert noise.fill(plain, pack, "mask", 61, None, SEEDS) is plain


def test_uniform_noise_stands_in_every_masks_place(pack: Pack) -> None:
    plain = anchoring.groups(pack, drawn(pack), 8)
    got = noise.fill(plain, pack, "uniform", 61, 17, SEEDS)
    masks = plain.rows.tokens == MASK
    tokens = got.rows.tokens[masks]
    assert torch.equal(got.rows.tokens[~masks], plain.rows.tokens[~masks]) and torch.equal(got.labels, plain.labels)
    assert tokens.min() >= 0 and tokens.max() <= 60 and not (tokens == 17).any()
    counts = tokens.bincount(minlength=61)
    assert (counts > 0).sum() == 60 and counts.max() < 5 * len(tokens) / 60
    assert not torch.equal(noise.fill(plain, pack, "uniform", 61, 17, SEEDS + 1).rows.tokens, got.rows.tokens)


def test_evaluation_sees_the_noise_of_decoding(pack: Pack) -> None:
    anchors = drawn(pack)
    got = noise.fill(anchoring.path_groups(UNO, pack, anchors), pack, "uniform", 61, None, None)
    tokens = got.rows.tokens.view(3, 25, -1)
    for n, a in ((0, 0), (1, 3), (2, 1)):
        slot = anchors[n, a]
        start = int(pack.positions[n, slot])
        want = drawn_noise(pack.tokens[n, slot][None], torch.arange(start + 1, start + 5)[None], 61)
        assert torch.equal(tokens[n, a], want[0])


def test_groups_behind_a_seed_row(pack: Pack) -> None:
    """Rows stand after the anchor, see it as a clean row, are causal, and predict one ahead of themselves."""
    anchors = drawn(pack)
    g = anchoring.path_groups(UNO, pack, anchors)
    size = UNO.rows(6)
    assert size == 4 and g.steps.tolist() == [2, 3, 4, 5] and g.first == 0
    mask = attention_rule(g.layout, 40 + 25 * size)
    for n in range(3):
        for a, slot in enumerate(anchors[n].tolist()):
            if slot < 0:
                continue
            for j in range(size):
                r = a * size + j
                assert g.layout.positions[n, r] == pack.positions[n, slot] + 1 + j
                at = slot + 2 + j
                inside = at < 40 and pack.segments[n, at] == pack.segments[n, slot] and pack.answer[n, at]
                assert g.labels[n, a, j] == (int(pack.tokens[n, at]) if inside else IGNORE)
                same = pack.segments[n] == pack.segments[n, slot]
                assert torch.equal(mask[n, r, :40], same & (torch.arange(40) <= slot))
                own = torch.arange(25 * size)
                assert torch.equal(mask[n, r, 40:], (own >= a * size) & (own <= r))


@pytest.mark.parametrize(
    "fields",
    [
        dict(seed_row=True, shift=True, causal=True, noise="uniform"),
        dict(noise="uniform", mask_id=5),
        dict(noise="uniform", shift=True),
        dict(noise="masked"),
    ],
)
def test_training_and_decoding_draft_alike(fields: dict) -> None:
    model = model_of()
    path = moved(model, MaskPathConfig(block_size=6, tuning="lora", rank=4, alpha=8, **fields))
    body = Backbone(model, path)
    text = torch.tensor([PROMPT + PROMPT])
    pack = Pack(text, torch.arange(20)[None], torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    anchors = torch.tensor([[9, 4, 12]])
    with torch.no_grad():
        groups = anchoring.path_groups(path.config, pack, anchors)
        groups = noise.fill(groups, pack, path.config.noise, VOCAB, path.config.mask_id, None)
        cache, clean, taps = run_clean(body, pack)
        trained = body.logits(draft_states(body, groups, cache, clean, taps)[0])
        for a, slot in enumerate(anchors[0].tolist()):
            for size in (6, 4, 2) if path.config.causal else (6,):
                kv = body.new_cache(1, 32, 16)
                body(chain(torch.tensor([0]), slot), kv, text[:, :slot])
                kv.commit([slot])
                got = propose(body, kv, text[:, slot], torch.tensor([slot]), size, path.config)
                finite = got[0].isfinite()
                assert got.shape == (1, size - 1, VOCAB)
                torch.testing.assert_close(got[0][finite], trained[a, : size - 1][finite])


def test_the_first_draft_behind_a_seed_row_is_the_base_models_own() -> None:
    model = model_of()
    path = moved(model, UNO)
    body = Backbone(model, path)
    with torch.no_grad():
        kv = body.new_cache(1, 32, 16)
        body(chain(torch.tensor([0]), 9), kv, torch.tensor([PROMPT[:9]]))
        kv.commit([9])
        got = propose(body, kv, torch.tensor(PROMPT[9:]), torch.tensor([9]), 5, path.config)
        torch.testing.assert_close(got[0, 0], model(torch.tensor([PROMPT])).logits[0, -1])


@pytest.mark.parametrize("mode", ["sequential", "tree"])
def test_text_behind_seed_rows_is_the_base_models(mode: str) -> None:
    """Every round emits two tokens at least: the seed row's draft is always right."""
    model = model_of()
    decoder = SelfSpecModel(model, moved(model, UNO))
    prompts = torch.tensor([PROMPT, PROMPT[::-1]])
    out = decoder.generate(prompts, max_new_tokens=12, mode=mode)
    assert out[:, 10:].tolist() == reference(model, prompts.tolist(), 12)
    assert decoder.stats.tau >= 1.8


def test_a_uno_adapter_is_the_lora_folder_that_serving_engines_read(tmp_path) -> None:
    """PEFT alone, on the prompt's own cache and the same noise, drafts what we draft: nothing of it is elsewhere."""
    peft = pytest.importorskip("peft")
    model = build()
    path = moved(model, UNO)
    io.save(path, tmp_path, model, dtype=torch.float64)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    seven = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert config["peft_type"] == "LORA" and set(config["target_modules"]) == seven and config["bias"] == "none"
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (4, 8, True)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert len(names) == 2 * 7 * 4
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names

    anchor, start = torch.tensor(PROMPT[-1:]), torch.tensor([len(PROMPT) - 1])
    body = Backbone(model, path)
    kv = body.new_cache(1, 32, 16)
    with torch.no_grad():
        body(chain(torch.tensor([0]), 9), kv, torch.tensor([PROMPT[:9]]))
        kv.commit([9])
        ours = propose(body, kv, anchor, start, 5, path.config)[0]
        rows = drawn_noise(anchor, torch.arange(10, 13)[None], VOCAB)
        seed = model(torch.tensor([PROMPT]), use_cache=True)
        served = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
        theirs = served(rows, past_key_values=seed.past_key_values).logits[0]
    torch.testing.assert_close(ours[0], seed.logits[0, -1])
    torch.testing.assert_close(ours[1:], theirs, atol=1e-6, rtol=1e-6)


def test_the_uno_style_is_one_setting() -> None:
    config = MaskPathConfig.from_dict({"style": "uno"})
    assert (config.seed_row, config.noise, config.causal, config.shift) == (True, "uniform", True, True)
    assert (config.tuning, config.targets, config.rank, config.alpha) == ("lora", "all", 128, 2048.0)
    assert UNO.rank == 4 and MaskPathConfig.from_dict(UNO.to_dict()) == UNO
    trained = {n for n, p in MaskPathModel(model_of(), UNO).named_parameters() if p.requires_grad}
    assert trained and all(n.startswith("deltas.") for n in trained)
