"""Mask paths as folders: `selfspec.json`, and the weights, as a plain PEFT folder where they are a LoRA.

A PEFT folder can be read by anything that reads LoRA; what PEFT has no word for (mask embeddings, projections, whole
copies) stands in a file of its own, so that nobody loads half of it un-gated. Heads have a third one, so that a head
trained for a path that is there already is added without another copy of the path:

    selfspec.json               what the path is, and the fingerprint of its base model
    mask_path.safetensors       its weights, but for a LoRA's and the heads'
    adapter_model.safetensors   a LoRA's, with PEFT's adapter_config.json
    heads.safetensors           the heads', where it has any
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from selfspec import hub
from selfspec.adapters.config import MaskPathConfig
from selfspec.adapters.lora import LoraDelta
from selfspec.adapters.path import MaskPathModel
from selfspec.shadow import inner_decoder, layers_of, table_of

log = logging.getLogger(__name__)

CONFIG, WEIGHTS, PEFT_WEIGHTS = "selfspec.json", "mask_path.safetensors", "adapter_model.safetensors"
HEADS_WEIGHTS = "heads.safetensors"
FORMAT = 1
ZOO = Path(__file__).parent / "zoo"


class AdapterError(ValueError):
    """The adapter cannot be used as asked; the message says why and what to do."""


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """What a mask path remembers of the model that it was trained on.

    Returns:
        Architecture, shapes, a hash over a few weights as bfloat16 (equal for bfloat16, float32 and float64 copies of
        one checkpoint), and a few of them as numbers, for float16.
    """
    layers, table = layers_of(inner_decoder(model)), table_of(model)
    probes = [table] + [next(p for p in layers[i].parameters() if p.dim() > 1) for i in (0, len(layers) // 2, -1)]
    parts = [p.detach().reshape(-1)[:4096].to("cpu", torch.bfloat16) for p in probes]
    digest = hashlib.sha256(b"".join(p.view(torch.int16).numpy().tobytes() for p in parts)).hexdigest()
    return {
        "architecture": type(model).__name__,
        "vocab_size": table.shape[0],
        "hidden_size": table.shape[1],
        "n_layers": len(layers),
        "dtype": str(table.dtype).removeprefix("torch."),
        "weights": digest,
        "sample": [round(x, 6) for p in parts for x in p[:4].float().tolist()],
    }


def save(path: MaskPathModel, folder: str | Path, model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a mask path.

    Args:
        path: the trained path.
        folder: made if missing; files of the same names are replaced.
        model: the base model it was trained on, for the fingerprint and the module names.
        dtype: of the stored weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # without its configuration a folder is no adapter: a kill half-way leaves none rather than a mixed one
    for stale in (CONFIG, PEFT_WEIGHTS, "adapter_config.json", HEADS_WEIGHTS):
        (folder / stale).unlink(missing_ok=True)
    state = {k: v.detach().to("cpu", dtype).contiguous() for k, v in path.state_dict().items()}
    if path.config.tuning == "lora":
        names = _peft_names(path, model)
        save_file({names[k]: v for k, v in state.items() if k in names}, folder / PEFT_WEIGHTS, {"format": "pt"})
        _peft_config(path.config, names, model).save_pretrained(str(folder))
        state = {k: v for k, v in state.items() if k not in names}
    if heads := {k: state.pop(k) for k in list(state) if k.startswith("heads.")}:
        save_file(heads, folder / HEADS_WEIGHTS, {"format": "pt"})
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    write_config(folder, replace(path.config, fingerprint=fingerprint(model)))
    return folder


def write_config(folder: Path, config: MaskPathConfig) -> None:
    """Write an adapter's configuration, whole or not at all."""
    part = folder / f"{CONFIG}.part"
    part.write_text(json.dumps({"format": FORMAT, **config.to_dict()}, indent=1) + "\n")
    part.replace(folder / CONFIG)


def load(
    folder: str | Path, model: PreTrainedModel, finetuned_base: bool = False, dtype: torch.dtype | None = None
) -> MaskPathModel:
    """Read a mask path for a model, onto its device and in its dtype.

    Args:
        folder: a folder that `save` wrote, or the name of a shipped adapter.
        model: the base model.
        finetuned_base: accept a model of the same shape with other weights (a fine-tune of the trained base).
        dtype: of the loaded parameters; the model's own by default.

    Raises:
        AdapterError: no such adapter, a damaged one, or one of another model.
    """
    folder = find(folder)
    config = read_config(folder)
    reason = mismatch(config.fingerprint, model, finetuned_base)
    if reason:
        raise AdapterError(f"the adapter in {folder} does not fit this model: {reason}")
    try:
        path = MaskPathModel(model, config, dtype)
        state = load_file(folder / WEIGHTS)
        if config.tuning == "lora":
            stored = load_file(folder / PEFT_WEIGHTS)
            state |= {k: stored.pop(v) for k, v in _peft_names(path, model).items() if v in stored}
            state |= stored  # names that the path does not have
        state |= _heads(folder, config, state)
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"the adapter in {folder} is damaged ({error}); copy or train it again") from error
    _fill(path, state, folder)
    return path.requires_grad_(False).eval()


def _heads(folder: Path, config: MaskPathConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an adapter's heads; none where they stand among the others' (`state`), as they once did.

    Raises:
        ValueError: there is no file of heads, or heads stand in two places.
    """
    among = any(k.startswith("heads.") for k in state)
    if not (folder / HEADS_WEIGHTS).is_file():
        if config.heads and not among:
            raise ValueError(f"{CONFIG} names the heads {config.heads}, and there is no {HEADS_WEIGHTS}")
        return {}
    if among:
        raise ValueError(f"heads stand in {WEIGHTS} and in {HEADS_WEIGHTS}")
    return load_file(folder / HEADS_WEIGHTS)


def read_config(folder: Path) -> MaskPathConfig:
    """The configuration of an adapter folder.

    Raises:
        AdapterError: it is missing or damaged.
    """
    try:
        data = json.loads((folder / CONFIG).read_text())
        if not isinstance(data, dict) or data.pop("format") != FORMAT:
            raise ValueError(f"written in another format than {FORMAT}")
        if not isinstance(data.get("fingerprint"), dict):
            raise ValueError("no fingerprint of the base model")
        return MaskPathConfig.from_dict(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"{folder / CONFIG} is missing or damaged ({error}); copy or train the adapter again"
        ) from error


def find(name: str | Path) -> Path:
    """The folder of an adapter: a path, or the name of a shipped one.

    Raises:
        AdapterError: there is neither.
    """
    for folder in (Path(name), ZOO / str(name)):
        if (folder / CONFIG).is_file():
            return folder
    shipped = sorted(p.parent.name for p in ZOO.glob(f"*/{CONFIG}"))
    raise AdapterError(f"no adapter at {str(name)!r}: expected a folder with {CONFIG}, or one of {shipped}")


def shipped_for(model: PreTrainedModel) -> Path | None:
    """Of the shipped adapters that were trained on exactly this model the one that promises most, or None."""
    found = {p.parent: read_config(p.parent) for p in sorted(ZOO.glob(f"*/{CONFIG}"))}
    fitting = {f: c for f, c in found.items() if mismatch(c.fingerprint, model) is None}
    return max(fitting, key=lambda f: promise(fitting[f]), default=None)


def promise(config: MaskPathConfig) -> float:
    """Tokens that a chain emits per whole forward, by the acceptance that training saw; drafts cost (L - e) / L."""
    layers = config.fingerprint.get("n_layers", 1)
    rates = config.acceptance or (0.0,)
    emitted = 1 + sum(math.prod(rates[: j + 1]) for j in range(len(rates)))
    return emitted / (2 - config.entry / layers)


def mismatch(wanted: dict[str, Any], model: PreTrainedModel, finetuned_base: bool = False) -> str | None:
    """Why an adapter with this fingerprint does not fit a model, or None."""
    found = fingerprint(model)
    for key in ("architecture", "vocab_size", "hidden_size", "n_layers"):
        if wanted.get(key) != found[key]:
            return f"it was trained on {key} {wanted.get(key)}, this model has {found[key]}"
    if finetuned_base or wanted.get("weights") == found["weights"]:
        return None
    half = "float16" in (found["dtype"], wanted.get("dtype"))  # rounds twice, so the hash may differ
    a, b = torch.tensor(wanted.get("sample", [])), torch.tensor(found["sample"])
    if half and a.shape == b.shape and torch.allclose(a, b, rtol=2**-6, atol=1e-6):
        return None
    return "its weights are not those it was trained on (for a fine-tuned base, pass finetuned_base=True)"


def _name(model: PreTrainedModel) -> str | None:
    """What the model was loaded as; None for one that was converted into this machine's cache."""
    name = model.config.name_or_path
    return None if not name or Path(name).is_relative_to(hub.cache_root()) else name


def _fill(path: MaskPathModel, state: dict[str, Tensor], folder: Path) -> None:
    """Copy stored weights into the path, which is already where the model is; say what had to be converted."""
    own = dict(path.named_parameters())
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    wrong = [k for k in own if k in state and own[k].shape != state[k].shape]
    if missing or extra or wrong:
        raise AdapterError(
            f"the adapter in {folder} is damaged or does not match its {CONFIG}: "
            f"missing {missing[:3]}, unknown {extra[:3]}, other shapes {wrong[:3]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])
    stored, first = next(iter(state.values())), next(iter(own.values()))
    if stored.dtype != first.dtype or first.device.type != "cpu":
        log.info("adapter %s: stored as %s, moved to %s as %s", folder, stored.dtype, first.device, first.dtype)


def _peft_names(path: MaskPathModel, model: PreTrainedModel) -> dict[str, str]:
    """Names of the LoRA parameters: in our state dict -> in a PEFT file."""
    layers = layers_of(inner_decoder(model))
    prefix = next(name for name, module in model.named_modules() if module is layers)
    names = {}
    for key, delta in path.deltas.items():
        if isinstance(delta, LoraDelta):
            layer, name = key.split(":", 1)
            target = f"base_model.model.{prefix}.{layer}.{name.replace(':', '.')}"
            names[f"deltas.{key}.A"], names[f"deltas.{key}.B"] = f"{target}.lora_A.weight", f"{target}.lora_B.weight"
    return names


def _peft_config(config: MaskPathConfig, names: dict[str, str], model: PreTrainedModel) -> Any:
    from peft import LoraConfig  # slow to import, and only LoRA paths need it

    modules = {n.removeprefix("base_model.model.").rpartition(".lora_")[0] for n in names.values()}
    # servers (SGLang's and vLLM's UNO) know projections by their last names, in all layers; say it so where it is so
    short = {m.rpartition(".")[2] for m in modules}
    if {n for n, _ in model.named_modules() if n.rpartition(".")[2] in short} == modules:
        modules = short
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=int(config.alpha),
        target_modules=sorted(modules),
        bias="none",
        inference_mode=True,
        base_model_name_or_path=_name(model),
    )
