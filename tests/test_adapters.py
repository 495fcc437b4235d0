"""Adapters: configurations, folders, the models they fit and the ones they refuse."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LAYERS, PROMPT, RAGGED, VOCAB, build, model_of, path_of, reference

from selfspec import SelfSpecModel, rows
from selfspec.adapters import MaskPathConfig, MaskPathModel, io
from selfspec.adapters.io import AdapterError
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.cache import PrefixCache

pytestmark = pytest.mark.usefixtures("chains")

ONE = torch.tensor([PROMPT])


def drafted(model, path):
    """Draft logits of a block of masks behind the prompt."""
    body, cache = Backbone(model, path), PrefixCache(LAYERS)
    with torch.no_grad():
        taps = body(rows.chain(torch.tensor([0]), 10), cache, ONE).taps
        cache.freeze()
        tokens = torch.tensor([[PROMPT[-1], MASK, MASK]])
        drafts = DraftRows(tokens, torch.arange(3)[None], None if taps is None else taps[:, -1:])
        return body.logits(body(rows.block(torch.tensor([10]), 3), cache, draft=drafts).draft)


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("block_size", 1, "at least 2"),
        ("entry", -1, "0 or more"),
        ("tuning", "prefix", "'lora' or 'copy'"),
        ("rank", 0, "1 or more"),
        ("mask_embedding", "two", "per_slot"),
        ("targets", "mlps", "attention"),
        ("layouts", (), "subset"),
        ("layouts", ("known", "secret"), "subset"),
    ],
)
def test_a_configuration_says_what_it_expects(field, value, expected):
    with pytest.raises(ValueError, match=f"{field}=.*expected.*{expected}"):
        MaskPathConfig(**{field: value})


def test_a_configuration_survives_json():
    config = MaskPathConfig(8, 2, ("q_proj",), "lora", 3, 6.0, (2, 3), "per_slot", (1, 4), ("hidden",), True, True)
    again = MaskPathConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and isinstance(again.layers, tuple) and isinstance(again.targets, tuple)
    with pytest.raises(ValueError, match=r"unknown fields.*blocksize"):
        MaskPathConfig.from_dict({"blocksize": 4})


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(entry=4), "past the model's last layer"),
        (dict(layers=(0, 4)), "between entry 0 and 3"),
        (dict(entry=2, layers=(1,)), "between entry 2 and 3"),
        (dict(targets=("no_proj",)), "no Linear named"),
        (dict(taps=(5,)), "taps"),
        (dict(taps=(-1,)), "taps"),
        (dict(mask_id=VOCAB), "mask_id"),
        (dict(mask_id=-1), "mask_id"),
    ],
)
def test_a_configuration_has_to_fit_the_model(config, message):
    with pytest.raises(ValueError, match=message):
        MaskPathModel(model_of(), MaskPathConfig(**config))


def test_what_was_not_trained_is_refused():
    config = MaskPathConfig(block_size=4, layouts=("known",))
    config.require("known", 4)
    config.require("known", 1)
    for layout, block in (("hidden", 4), ("known", 5), ("known", 0), ("no such", None)):
        with pytest.raises(ValueError, match="trained for"):
            config.require(layout, block)


KINDS = {
    "copy": dict(tuning="copy"),
    "lora": dict(tuning="lora"),
    "late copy with features": dict(tuning="copy", entry=2, taps=(1, 4), mask_embedding="per_slot"),
    "late lora with features": dict(tuning="lora", entry=2, taps=(4,), layers=(3,), mask_id=5),
    "some modules": dict(tuning="lora", targets=("q_proj", "down_proj")),
    "copy with heads": dict(tuning="copy", heads=("calibrator", "confidence", "length", "markov"), head_rank=6),
    "lora with heads": dict(tuning="lora", heads=("length", "sampler"), head_rank=6),
}


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])  # without and with biases
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_comes_back_as_it_was(kind, family, tmp_path):
    model = model_of(family)
    path = path_of(model, 0.3, **KINDS[kind])
    io.save(path, tmp_path / "there", model, dtype=torch.float64)
    again = io.load(tmp_path / "there", model)
    assert again.config == path.config
    assert not any(p.requires_grad for p in again.parameters()) and not again.training
    ours, theirs = path.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(drafted(model, path), drafted(model, again))
    files = {p.name for p in (tmp_path / "there").iterdir()}
    peft = {"adapter_model.safetensors", "adapter_config.json"} if "lora" in kind or "some" in kind else set()
    heads = {"heads.safetensors"} if "heads" in kind else set()
    assert files == {"selfspec.json", "mask_path.safetensors"} | peft | heads


def test_the_stored_dtype_is_bfloat16_and_the_loaded_one_the_models(tmp_path, caplog):
    model = model_of()
    io.save(path_of(model, 0.3), tmp_path, model)
    assert {t.dtype for t in load_file(tmp_path / "mask_path.safetensors").values()} == {torch.bfloat16}
    with caplog.at_level(logging.INFO):
        path = io.load(tmp_path, model)
    assert {p.dtype for p in path.parameters()} == {torch.float64}
    assert "bfloat16" in caplog.text and "float64" in caplog.text  # said, not silently done
    assert {p.dtype for p in io.load(tmp_path, model, dtype=torch.float32).parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["Llama", "Phi3", "Qwen2"])
def test_a_lora_folder_is_a_plain_peft_folder(family, tmp_path):
    """PEFT applies it to all rows; our draft rows, fed with real tokens in a causal group, then say the same."""
    peft = pytest.importorskip("peft")
    model = build(family)
    path = path_of(model, 0.3, tuning="lora", causal=True, shift=True, block_size=12)
    io.save(path, tmp_path, model, dtype=torch.float64)
    body, cache = Backbone(model, path), PrefixCache(LAYERS)
    cache.freeze()
    for layer, (heads, d, _) in zip(cache.layers, body.kv_shapes, strict=True):
        layer.keys = layer.values = torch.empty(1, heads, 0, d).double()
    drafts = DraftRows(ONE, torch.arange(10)[None])
    with torch.no_grad():
        ours = body.logits(body(rows.block(torch.tensor([0]), 10, causal=True), cache, draft=drafts).draft)
        plain = model(ONE).logits
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)(ONE).logits
    assert (theirs - plain).norm() / plain.norm() > 0.01
    assert torch.allclose(ours, theirs, atol=1e-6)


def other_weights():
    return build(seed=5)


def other_attention_only():
    model = build()
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] += 0.5
    return model


WRONG = {
    "weights": (other_weights, "finetuned_base=True"),
    "one weight": (other_attention_only, "finetuned_base=True"),
    "family": (lambda: build("Qwen3"), "architecture"),
    "vocabulary": (lambda: build(vocab_size=VOCAB + 1), "vocab_size"),
    "width": (lambda: build(hidden_size=16), "hidden_size"),
    "depth": (lambda: build(num_hidden_layers=3), "n_layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_model_is_refused(name, tmp_path):
    make, message = WRONG[name]
    io.save(path_of(model_of()), tmp_path, model_of())
    with pytest.raises(AdapterError, match=message):
        io.load(tmp_path, make())
    if "finetuned" in message:
        assert io.load(tmp_path, make(), finetuned_base=True).config.block_size == 5
    else:  # no override for another shape
        with pytest.raises(AdapterError, match=message):
            io.load(tmp_path, make(), finetuned_base=True)


def test_a_finetuned_base_decodes_its_own_text(tmp_path):
    io.save(path_of(model_of(), tuning="lora"), tmp_path, model_of())
    model = other_weights()
    decoder = SelfSpecModel(model, io.load(tmp_path, model, finetuned_base=True))
    out = decoder.generate(ONE, max_new_tokens=9)
    assert out[0, 10:].tolist() == reference(model, [PROMPT], 9)[0]


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_copies_of_one_checkpoint_in_other_dtypes_are_accepted(saved, used, tmp_path):
    """The checkpoint is in the dtype it was trained with; whoever uses it casts it."""
    checkpoint = build(dtype=torch.float32)
    trained = copy.deepcopy(checkpoint).to(saved)
    io.save(path_of(trained), tmp_path, trained)
    model = copy.deepcopy(checkpoint).to(used)
    path = io.load(tmp_path, model)
    assert {p.dtype for p in path.parameters()} == {used}
    assert torch.isfinite(drafted(model, path)).all()
    with pytest.raises(AdapterError, match="weights"):
        io.load(tmp_path, other_weights().to(used))


def cut(file):
    file.write_bytes(file.read_bytes()[:-50])


def without_a_tensor(file):
    state = load_file(file)
    state.pop(next(iter(sorted(state))))
    save_file(state, file)


def with_another_tensor(file):
    save_file({**load_file(file), "stowaway": torch.zeros(2)}, file)


def with_another_shape(file):
    state = load_file(file)
    name = next(iter(sorted(state)))
    save_file({**state, name: torch.zeros(1, 3)}, file)


def edited(**fields):
    def edit(file):
        data = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))

    return edit


def without_fingerprint_weights(file):
    data = json.loads(file.read_text())
    del data["fingerprint"]["weights"]
    file.write_text(json.dumps(data))


W, P, C, H = "mask_path.safetensors", "adapter_model.safetensors", "selfspec.json", "heads.safetensors"
DAMAGES = {
    "weights cut": (W, cut),
    "weights gone": (W, lambda f: f.unlink()),
    "weights empty": (W, lambda f: f.write_bytes(b"")),
    "weights scribbled": (W, lambda f: f.write_bytes(b"\x00" * 400)),
    "lora cut": (P, cut),
    "lora gone": (P, lambda f: f.unlink()),
    "tensor missing": (W, without_a_tensor),
    "lora tensor missing": (P, without_a_tensor),
    "tensor too many": (W, with_another_tensor),
    "lora tensor too many": (P, with_another_tensor),
    "other shape": (W, with_another_shape),
    "heads cut": (H, cut),
    "heads gone": (H, lambda f: f.unlink()),
    "heads' tensor missing": (H, without_a_tensor),
    "heads' tensor too many": (H, with_another_tensor),
    "heads' other shape": (H, with_another_shape),
    "heads not named": (C, edited(heads=[])),
    "config gone": (C, lambda f: f.unlink()),
    "config cut": (C, cut),
    "config empty": (C, lambda f: f.write_text("")),
    "config a list": (C, lambda f: f.write_text("[]")),
    "config a string": (C, lambda f: f.write_text('"selfspec"')),
    "config null": (C, lambda f: f.write_text("null")),
    "config binary": (C, lambda f: f.write_bytes(b"\xff\xfe\x00")),
    "unknown field": (C, edited(blok_size=4)),
    "no format": (C, edited(format=...)),
    "future format": (C, edited(format=99)),
    "field of another type": (C, edited(block_size="5")),
    "no fingerprint": (C, edited(fingerprint=...)),
    "fingerprint null": (C, edited(fingerprint=None)),
    "fingerprint without weights": (C, without_fingerprint_weights),
    "entry past the end": (C, edited(entry=9)),
    "other rank": (C, edited(rank=2)),
    "other tuning": (C, edited(tuning="copy")),
    "mask id past the vocabulary": (C, edited(mask_id=VOCAB)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_adapter_is_a_clear_error(name, tmp_path):
    model = model_of()
    io.save(path_of(model, 0.1, tuning="lora", heads=("markov",), head_rank=6), tmp_path, model)
    io.load(tmp_path, model)
    file, damage = DAMAGES[name]
    damage(tmp_path / file)
    with pytest.raises(AdapterError, match="adapter"):
        io.load(tmp_path, model)


def test_a_converted_models_folder_is_not_written_into_a_lora(tmp_path, monkeypatch):
    """The shipped late adapter named the cache of the machine that it was trained on as its base model."""
    model = build()
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    for name, written in ((str(tmp_path / "cache" / "a"), None), ("some/model", "some/model")):
        model.config.name_or_path = name
        folder = io.save(path_of(model, tuning="lora"), tmp_path / "out", model)
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == written


def test_an_adapter_that_does_not_exist(tmp_path):
    with pytest.raises(AdapterError, match=r"no adapter at 'no-such-adapter'.*selfspec\.json"):
        io.load("no-such-adapter", model_of())
    with pytest.raises(AdapterError, match="no adapter"):
        io.load(tmp_path, model_of())


def test_saving_over_an_adapter_of_another_kind_leaves_nothing_of_it(tmp_path):
    model = model_of()
    io.save(path_of(model, tuning="lora"), tmp_path, model)
    io.save(path_of(model, tuning="copy"), tmp_path, model)
    assert io.load(tmp_path, model).config.tuning == "copy"
    assert not (tmp_path / P).exists() and not (tmp_path / "adapter_config.json").exists()


def test_from_pretrained_and_save_pretrained(tmp_path):
    model = build(dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    path = path_of(model, 0.1, tuning="lora")
    SelfSpecModel(model, path).save_pretrained(tmp_path / "adapter")
    base = tmp_path / "base"  # without a tokenizer: generate needs none
    decoder = SelfSpecModel.from_pretrained(base, adapter=tmp_path / "adapter")
    assert decoder.path.config.tuning == "lora"
    assert decoder.generate(ONE, max_new_tokens=8)[0, 10:].tolist() == reference(model, [PROMPT], 8)[0]
    assert SelfSpecModel.from_pretrained(base, adapter=None).path is None
    assert SelfSpecModel.from_pretrained(base).path is None  # nothing shipped fits it
    with pytest.raises(ValueError, match="no adapter to save"):
        SelfSpecModel.from_pretrained(base, adapter=None).save_pretrained(tmp_path / "x")


def test_a_new_lora_path_drafts_like_the_base():
    model = model_of()
    fresh, copies = (MaskPathModel(model, MaskPathConfig(tuning=t, targets="all")) for t in ("lora", "copy"))
    assert torch.allclose(drafted(model, fresh), drafted(model, copies), atol=1e-12)


def test_experts_and_routers_are_left_alone():
    path = path_of(model_of("Qwen3Moe"), targets="all")
    assert path.deltas and not any("expert" in key or "gate:" in key for key in path.deltas)
    assert {key.partition(":")[0] for key in path.deltas} == set("0123")


def test_decoding_with_an_adapter_of_another_dtype_still_is_exact(tmp_path):
    """Adapter in float32, model in float64: the deltas run in the rows' dtype."""
    model = model_of()
    io.save(path_of(model, 0.1), tmp_path, model)
    path = io.load(tmp_path, model, dtype=torch.float32)
    requests = SelfSpecModel(model, path)
    for prompt in RAGGED:
        out = requests.generate(torch.tensor([prompt]), max_new_tokens=8)
        assert out[0, len(prompt) :].tolist() == reference(model, [prompt], 8)[0]


def test_an_adapter_in_another_dtype_follows_its_model_and_says_so(caplog):
    model = model_of()
    path = path_of(model).to(torch.float32)
    with caplog.at_level("WARNING"):
        SelfSpecModel(model, path)
    assert {p.dtype for p in path.parameters()} == {torch.float64}
    assert "moved to cpu as torch.float64" in caplog.text


@pytest.mark.parametrize("alpha", [0, -1, 6.5])
def test_alpha_that_peft_could_not_hold_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        MaskPathConfig(tuning="lora", alpha=alpha)


def test_a_save_that_is_killed_leaves_no_mixed_adapter(tmp_path):
    model = model_of()
    io.save(path_of(model), tmp_path, model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(io, "save_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        io.save(path_of(model, seed=2), tmp_path, model)
    with pytest.raises(AdapterError, match="no adapter"):
        io.load(tmp_path, model)


def test_a_model_folder_without_a_tokenizer_loads(tmp_path):
    build().save_pretrained(tmp_path)
    engine = SelfSpecModel.from_pretrained(tmp_path, adapter=None)
    assert engine.tokenizer is None and engine.generate([PROMPT], max_new_tokens=2).shape == (1, len(PROMPT) + 2)
