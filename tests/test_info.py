import json

import pytest
import tiny_chat
import torch
from transformers import MambaConfig, MambaForCausalLM

from selfspec import info
from selfspec.adapters import io


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    return tiny_chat.save_adapter(tmp_path_factory.mktemp("adapter"), model, layouts=("known", "hidden"))


def facts(*argv):
    result = tiny_chat.run("info", *argv, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_a_model_and_its_adapter(model, adapter):
    found = facts("--model", model, "--adapter", adapter, "--dtype", "bfloat16")
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]["device"]
    hf = tiny_chat.LlamaForCausalLM.from_pretrained(model)
    expected = {"architecture": "LlamaForCausalLM", "layers": 2, "hidden": 32, "vocabulary": 64, "max_positions": 256}
    expected |= {"windows": [], "dtype": "bfloat16", "parameters": sum(p.numel() for p in hf.parameters())}
    assert found["model"] == {"name": model, **expected, "supported": True, "reason": None}
    path = io.load(adapter, hf)
    assert found["adapter"]["fits"] and found["adapter"]["reason"] is None
    assert found["adapter"]["layouts"] == ["known", "hidden"] and found["adapter"]["block_size"] == 4
    assert found["adapter"]["parameters"] == sum(p.numel() for p in path.parameters())
    assert found["adapter"]["bytes"] > 2 * found["adapter"]["parameters"]
    assert found["adapter"]["config"]["tuning"] == "copy"
    assert [a["name"] for a in found["shipped"]] == ["smollm2-135m-instruct", "smollm2-135m-instruct-late"]
    assert not any(a["fits"] for a in found["shipped"])
    assert found["attention"]["sdpa"] == "available" and set(found["attention"]) == {
        "sdpa",
        "flex",
        "triton",
        "flash",
        "grouped",
    }


def test_windows_are_those_that_the_layers_ask_for(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=6)
    MistralForCausalLM(MistralConfig(**shape, **heads)).save_pretrained(tmp_path)
    assert facts("--model", tmp_path)["model"]["windows"] == [6]


def test_an_adapter_of_another_model_says_why(tmp_path, model, adapter):
    other = tiny_chat.save_model(tmp_path / "other", edit=lambda m: m.lm_head.weight.mul_(2), tie_word_embeddings=True)
    found = facts("--model", other, "--adapter", adapter)["adapter"]
    assert not found["fits"] and "weights are not those" in found["reason"]
    found = facts("--model", model, "--adapter", "smollm2-135m-instruct")["adapter"]
    assert not found["fits"] and "vocab_size 49152" in found["reason"]
    assert facts("--model", model)["adapter"] is None


def test_a_damaged_adapter_says_so(tmp_path, model):
    folder = tiny_chat.save_adapter(tmp_path / "adapter", model)
    (tmp_path / "adapter" / io.WEIGHTS).write_bytes(b"half")
    found = facts("--model", model, "--adapter", folder)["adapter"]
    assert not found["fits"] and found["reason"].startswith("damaged")


def test_an_unsupported_model_says_why(tmp_path, adapter):
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    found = facts("--model", tmp_path, "--adapter", adapter)
    assert not found["model"]["supported"] and "MambaForCausalLM" in found["model"]["reason"]
    assert found["model"]["layers"] == 2 and not found["adapter"]["fits"]


def test_people_read_lines(model, adapter):
    result = tiny_chat.run("info", "--model", model, "--adapter", adapter)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and result.stdout.isascii()
    for part in ("versions", "machine", "model", "adapter", "shipped", "attention"):
        assert part in lines
    assert "  supported      yes" in lines and "  layouts        known, hidden" in lines
    assert "drafting needs one" in tiny_chat.run("info", "--model", model, "--adapter", "none").stdout


@pytest.mark.parametrize(
    "argv, words", [(["--model", "no-such"], "no-such"), (["--adapter", "no-such"], "no adapter at")]
)
def test_what_is_not_there_is_refused(model, argv, words):
    result = tiny_chat.run("info", *(argv if "--model" in argv else ["--model", model, *argv]))
    assert result.exit_code == 2 and words in result.stderr and not result.stdout


def test_backends_name_what_is_missing(monkeypatch):
    def missing(name):
        raise ValueError(f"attention backend {name!r} cannot be loaded here")

    monkeypatch.setattr(info.attention, "backend", missing)
    assert all("cannot be loaded" in why for why in info.backends().values())
