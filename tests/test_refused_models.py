"""Models that cannot be run row by row are refused when they are loaded, with the reason."""

import pytest
import torch
import transformers
from tiny import (
    VOCAB,
    build,
)

from selfspec import SelfSpecModel
from selfspec.backbone import Backbone
from selfspec.shadow import UnsupportedModel

REFUSED = {
    "T5": (transformers.T5ForConditionalGeneration, dict(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)),
    "Mamba": (transformers.MambaForCausalLM, dict(hidden_size=32, num_hidden_layers=2, state_size=4)),
    "Qwen3Next": (
        transformers.Qwen3NextForCausalLM,
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=2,
            num_experts_per_tok=1,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "Bamba": (
        transformers.BambaForCausalLM,
        dict(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
        ),
    ),
    "Jamba": (
        transformers.JambaForCausalLM,
        dict(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            use_mamba_kernels=False,
        ),
    ),
    "GPT2": (transformers.GPT2LMHeadModel, dict(n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "Bloom": (transformers.BloomForCausalLM, dict(hidden_size=32, n_layer=2, n_head=2)),
    "OPT": (transformers.OPTForCausalLM, dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32)),
    "Falcon": (transformers.FalconForCausalLM, dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)),
    "RecurrentGemma": (
        transformers.RecurrentGemmaForCausalLM,
        dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, head_dim=16),
    ),
}
REASONS = {"T5": "encoder-decoder", "Mamba": "recurrent", "Qwen3Next": "linear_attention", "Falcon": "falcon.*alibi"}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_work_are_refused_with_the_reason(name):
    kind, settings = REFUSED[name]
    model = kind(kind.config_class(vocab_size=VOCAB, pad_token_id=0, **settings)).eval()
    with pytest.raises(UnsupportedModel, match=REASONS.get(name, kind.__name__)):
        SelfSpecModel(model)


def test_a_layer_stack_that_does_more_than_its_layers_is_refused():
    """What happens between layers is unknown to the walk; the comparison with the model's own forward finds it."""
    model = build()

    class Meddling(type(model.model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            if len(self.layers):
                out.last_hidden_state = out.last_hidden_state * torch.linspace(0.5, 2, 32)
            return out

    model.model.__class__ = Meddling
    with pytest.raises(UnsupportedModel, match="relative error"):
        Backbone(model)
