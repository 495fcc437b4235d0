"""Tiny random models of sixteen families, adapters for them, and what transformers itself answers."""

from functools import cache

import torch
import transformers
from torch import nn

from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.backbone import Backbone
from selfspec.draft.block import guesses, states
from selfspec.session import Request, Session

torch.set_num_threads(1)  # models this small gain nothing from a second thread, and lose much when cores are busy
LAYERS, VOCAB, WINDOW, POSITIONS = 4, 24, 5, 64
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=POSITIONS,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,  # tied random models repeat their input
)
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")  # grouped products know no float64
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=POSITIONS // 2)
FAMILIES = {
    "Llama": {},
    "Qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "Qwen3": dict(head_dim=8),
    "Qwen3Moe": dict(num_experts=4, moe_intermediate_size=16, head_dim=8, **EXPERTS),
    "Mistral": dict(sliding_window=WINDOW),
    "Ministral": dict(sliding_window=WINDOW, layer_types=MIXED, head_dim=8),
    "Gemma2": dict(  # transformers 5.17's sdpa, its default then, drops the soft-cap
        sliding_window=WINDOW, layer_types=MIXED, head_dim=8, query_pre_attn_scalar=8, attn_implementation="eager"
    ),
    "Gemma3": dict(sliding_window=WINDOW, layer_types=MIXED, head_dim=8, query_pre_attn_scalar=8),
    "Phi3": dict(sliding_window=WINDOW),
    "Olmo2": {},
    "Granite": dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3),
    "GptOss": dict(
        sliding_window=WINDOW, layer_types=MIXED, head_dim=8, num_local_experts=4, rope_parameters=YARN, **EXPERTS
    ),
    "SmolLM3": dict(no_rope_layers=[1, 0] * (LAYERS // 2)),
    "Cohere2": dict(sliding_window=WINDOW, layer_types=MIXED, logit_scale=0.5),
    "Glm4": dict(head_dim=8),
    "Exaone4": dict(sliding_window=WINDOW, layer_types=MIXED),
}
SLIGHT = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)  # interpreted kernels are slow
_SHARED: set = set()  # models of `model_of`
_ANSWERS: dict = {}  # model, prompt, eos -> tokens asked for, and the answer
PROMPT = [3, 7, 1, 9, 4, 4, 11, 2, 15, 6]
RAGGED = [PROMPT, [5, 8, 10], [13, 1, 1, 20, 6, 19]]


def build(family: str = "Llama", dtype: torch.dtype = torch.float64, seed: int = 0, **overrides):
    """A fresh random model in evaluation mode; every parameter that starts as a constant is drawn too."""
    stem = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{stem}Config")(**{**COMMON, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval()


@cache
def model_of(family: str = "Llama", dtype: torch.dtype = torch.float64, **overrides):
    """A shared model that no test may change."""
    model = build(family, dtype, **overrides)
    _SHARED.add(model)
    return model


def shallow(dtype: torch.dtype = torch.float64, seed: int = 0):
    """A shared Llama of half the layers, for tests of what becomes of logits."""
    return model_of("Llama", dtype, num_hidden_layers=LAYERS // 2, seed=seed)


def path_of(model, noise: float = 0.02, seed: int = 1, **config) -> MaskPathModel:
    """A mask path whose every parameter is moved off its start by `noise`, so that nothing in it is neutral."""
    config = {"block_size": 5, "rank": 4, "alpha": 8.0, "targets": "all", "layouts": ("known", "hidden"), **config}
    torch.manual_seed(seed)
    path = MaskPathModel(model, MaskPathConfig(**config))
    with torch.no_grad():
        for parameter in path.parameters():
            parameter += noise * torch.randn_like(parameter)
    return path.requires_grad_(False).eval()


def reference(model, prompts, n: int, eos=None) -> list[list[int]]:
    """What transformers answers greedily, one prompt at a time; of a shared model it is asked once."""
    if model not in _SHARED:
        return [_answer(model, prompt, n, eos) for prompt in prompts]
    out = []
    for prompt in prompts:
        key = (model, tuple(prompt), repr(eos))
        asked, text = _ANSWERS.get(key, (0, []))
        if asked < n:
            asked, text = _ANSWERS[key] = n, _answer(model, prompt, n, eos)
        out.append(text[:n])
    return out


@torch.no_grad()
def _answer(model, prompt, n: int, eos) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False, eos_token_id=eos)
    return text[0, len(prompt) :].tolist()


def run(session: Session, requests: list[Request], late=()) -> list[Request]:
    """Run requests to their end; `late` are admitted one a round, as soon as a slot is free."""
    late = list(late)
    if requests:
        session.add(requests)
    while session.active or late:
        if late and len(session.active) < session.cache.slots:
            session.add([late.pop(0)])
        else:
            session.step()
    return requests


class StatesPath(nn.Module):
    """A mask path that changes nothing: its draft rows are given hidden states of the entry layer."""

    taps = ()
    config = None

    def __init__(self, entry: int, states: torch.Tensor):
        super().__init__()
        self.entry, self.states = entry, states

    def embed(self, rows, backbone):
        return self.states.to(backbone.device, backbone.dtype)

    def delta(self, layer, name):
        return None


class OraclePath(nn.Module):
    """A drafter that knows the answers: `right` of its guesses are true in every round, the next one is wrong.

    Its rows run through the last layer with all projections silenced, so that a row leaves as it came: as the hidden
    state whose logits are one-hot. Works for chains, drafted alone or in overlap.

    Args:
        model: a Llama.
        truth: each request's answer, with a block to spare.
        right: true guesses a round, or a function of the number of tokens emitted so far.
    """

    taps = ()

    def __init__(self, model, truth: dict, right, block_size: int = 5, shift: bool = False):
        super().__init__()
        self.entry = model.config.num_hidden_layers - 1
        self.config = MaskPathConfig(
            block_size, self.entry, layouts=("known", "hidden"), shift=shift, causal=shift, fingerprint={}
        )
        head = model.lm_head.weight.double() * model.model.norm.weight.double()  # [V, d], V < d
        self.states = torch.linalg.pinv(head).T.detach()  # row t: W row = one-hot(t)
        self.truth, self.right = truth, right if callable(right) else lambda emitted: right
        self.session: Session | None = None

    def delta(self, layer, name):
        return _Silence() if name.endswith(("o_proj", "down_proj")) else None

    def embed(self, rows, backbone):
        n, d = rows.tokens.shape
        ahead = (rows.slots + self.config.shift).tolist()  # offset of the guessed token from the group's slot 0
        group = [0] * d  # which node of the chain a row's group hangs on
        for j in range(1, d):
            group[j] = group[j - 1] + (rows.slots[0, j] == 0).item()
        hidden = rows.tokens[0, 0] < 0  # overlap: slot 0 is the position after the node
        guesses = torch.zeros(n, d, dtype=torch.long)
        for i, request in enumerate(self.session.active):
            emitted = len(request.output)
            for j in range(d):
                node = emitted + group[j] if hidden else emitted - 1  # index in the answer of the group's slot 0
                guess = self.truth[request][node + ahead[i][j]]
                wrong = ahead[i][j] > self.right(node + 1)
                guesses[i, j] = (guess + 1) % VOCAB if wrong else guess
        return self.states[guesses].to(backbone.device, backbone.dtype)


class _Silence(nn.Module):
    def forward(self, x, base):
        return base(x) * 0


def propose(body: Backbone, cache, anchor, start, size: int, path, **how) -> torch.Tensor:
    """Logits [N, size - 1, V] of one draft pass; arguments as of `selfspec.draft.block.states`."""
    return guesses(body, states(body, cache, anchor, start, size, path, **how), path)


def backbone(family: str = "Llama", dtype: torch.dtype = torch.float64, path=None, **kwargs) -> Backbone:
    return Backbone(model_of(family, dtype), path, **kwargs)
