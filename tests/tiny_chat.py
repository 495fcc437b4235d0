"""A tiny random Llama with a tiny word tokenizer and adapter, saved as folders."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from selfspec import cli
from selfspec.adapters import MaskPathConfig, MaskPathModel, io

WORDS = ["<unk>", "<s>", "</s>", "user:", "assistant:", *(f"w{i}" for i in range(59))]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def run(*argv, **options):
    """Run the command line; an exception of its own is a test's failure. Returns exit_code, stdout, stderr."""
    return CliRunner().invoke(cli.app, list(map(str, argv)), catch_exceptions=False, **options)


def tokenizer(template=True):
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE if template else None
    return fast


def save_model(folder, eos=2, edit=None, template=True, **config):
    """Save a two-layer Llama; `edit(model)` may change its weights first. Returns the folder's name."""
    torch.manual_seed(0)
    shape = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3)
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=1, eos_token_id=eos, **config)).eval()
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return str(folder)


def save_adapter(folder, model_folder, block_size=4, **config):
    """Save a random adapter that drafts a little better than chance. Returns the folder's name."""
    model = LlamaForCausalLM.from_pretrained(model_folder)
    torch.manual_seed(1)
    path = MaskPathModel(model, MaskPathConfig(block_size=block_size, **config))
    return str(io.save(path, folder, model))


def save_prompts(file, n=5):
    """Prompts of different lengths. Returns the file's name."""
    rows = [{"id": f"p{i}", "prompt": " ".join(f"w{(7 * i + j) % 59}" for j in range(2 + 3 * i))} for i in range(n)]
    Path(file).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(file)
