"""`selfspec info`: what is installed, what a model and an adapter are, and whether they fit one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from selfspec import attention, hub
from selfspec.adapters import io
from selfspec.backbone import Backbone
from selfspec.machine import versions
from selfspec.options import dtype_name, machine
from selfspec.shadow import UnsupportedModel, table_of
from selfspec.terminal import console, refusing


def model_facts(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """What a model is, and whether selfspec can run it; where it can't, `reason` says why."""
    config = model.config.get_text_config(decoder=True)
    facts: dict[str, Any] = {
        "name": name,
        "architecture": type(model).__name__,
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": getattr(config, "hidden_size", None),
        "vocabulary": table_of(model).shape[0],
        "max_positions": getattr(config, "max_position_embeddings", None),
        "windows": None,
        "dtype": dtype_name(model.dtype),
        "parameters": sum(p.numel() for p in model.parameters()),
        "supported": True,
        "reason": None,
    }
    try:
        backbone = Backbone(model)
    except UnsupportedModel as error:
        return facts | {"supported": False, "reason": str(error)}
    windows = sorted({w for w in backbone.windows if w is not None})  # of the sliding layers; the others see everything
    return facts | {"max_positions": backbone.max_positions, "windows": windows}


def adapter_facts(folder: Path, model: PreTrainedModel) -> dict[str, Any]:
    """What an adapter is, and whether it fits a model; where it doesn't, `reason` says why."""
    facts: dict[str, Any] = {"name": folder.name, "folder": str(folder), "fits": False, "reason": None}
    files = sorted(folder.glob("*.safetensors"))
    facts["bytes"] = sum(f.stat().st_size for f in files)
    try:
        facts["parameters"] = sum(map(_parameters, files))
        config = io.read_config(folder)
    except (io.AdapterError, OSError, SafetensorError) as error:
        return facts | {"reason": f"damaged: {error}"}
    shown = {k: v for k, v in config.to_dict().items() if k != "fingerprint"}
    facts |= {"layouts": config.layouts, "block_size": config.block_size, "config": shown}
    facts["trained_on"] = {k: v for k, v in config.fingerprint.items() if k != "sample"}
    try:
        facts["reason"] = io.mismatch(config.fingerprint, model)
    except UnsupportedModel:
        facts["reason"] = "the model is not supported"
    return facts | {"fits": facts["reason"] is None}


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header alone."""
    with safe_open(file, "pt") as tensors:
        return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118


def backends() -> dict[str, str]:
    """Attention backends; "available", or why one isn't here."""
    found = {}
    for name in attention.BACKENDS:
        try:
            attention.backend(name)
            found[name] = "available"
        except ValueError as error:
            found[name] = str(error)
    for name in ("triton", "flash", "grouped"):
        if found.get(name) == "available" and not torch.cuda.is_available():
            found[name] = "installed, but there is no CUDA device"
    return found


def show(facts: dict[str, Any]) -> None:
    """Print the facts, a heading and indented lines for each part."""
    out = console()
    for part, values in facts.items():
        if part == "shipped":
            values = {a["name"]: _in_one_line(a) for a in values}
        out.print(part, style="bold")
        for key, value in (values or {"none": "drafting needs one"}).items():
            out.print(f"  {key:14} {_text(value)}")


def _in_one_line(adapter: dict[str, Any]) -> str:
    size = f"{adapter['bytes'] / 1e6:.1f} MB"
    return f"{size}, {'fits this model' if adapter['fits'] else adapter['reason']}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def run(model: str, adapter: str, dtype: str | None, device: str, as_json: bool) -> int:
    """Gather the facts and print them."""
    transformers.utils.logging.disable_progress_bar()
    with refusing():
        named = None if adapter in ("auto", "none") else io.find(adapter)
        loaded = hub.load_model(model, dtype=dtype, device=device)
    shipped = [adapter_facts(p.parent, loaded) for p in sorted(io.ZOO.glob(f"*/{io.CONFIG}"))]
    used = io.shipped_for(loaded) if adapter == "auto" else named
    facts = {
        "versions": versions(),
        "machine": machine(loaded.device),
        "model": model_facts(loaded, model),
        "adapter": None if used is None else adapter_facts(used, loaded),
        "shipped": shipped,
        "attention": backends(),
    }
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        show(facts)
    return 0
