"""Checkpoints that a kill at any moment leaves whole, and the adapter folder; the one place that knows their form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FILE = "checkpoint.pt"
WEIGHTS = "adapter.safetensors"


def save(folder: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint beside the old one and put it in its place."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (FILE + ".part")
    with open(part, "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, folder / FILE)


def load(folder: str | Path, device: torch.device) -> dict[str, Any] | None:
    """The checkpoint of a folder, or None."""
    file = Path(folder) / FILE
    return torch.load(file, map_location=device, weights_only=True) if file.exists() else None


def save_adapter(path: nn.Module, folder: str | Path, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Write the adapter as the decoder loads it.

    Args:
        path: a `MaskPathModel`.
        folder: made if missing.
        model: the base model.
        dtype: of the weights; None takes the model's own.
    """
    try:
        from selfspec.adapters import io
    except ImportError:
        pass
    else:
        io.save(path, folder, model)
        return
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.get_input_embeddings().weight.dtype
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in path.state_dict().items()}
    save_file(tensors, folder / (WEIGHTS + ".part"))
    os.replace(folder / (WEIGHTS + ".part"), folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(path.config.to_dict(), indent=1))


def load_weights(path: nn.Module, source: str | Path) -> None:
    """Start a path from a saved adapter of the same configuration."""
    from safetensors.torch import load_file

    source = Path(source)
    file = source / WEIGHTS if source.is_dir() else source
    tensors: dict[str, Tensor] = load_file(file)
    path.load_state_dict(tensors)
