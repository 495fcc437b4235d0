"""Checkpoints that a kill at any moment leaves whole, and the adapter folder; the one place that knows their form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.adapters import MaskPathModel, io

FILE = "checkpoint.pt"


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


def save_adapter(path: MaskPathModel, folder: str | Path, model: PreTrainedModel) -> None:
    """Write the adapter as the decoder loads it.

    Args:
        path: the mask path.
        folder: made if missing.
        model: the base model.
    """
    io.save(path, folder, model)


def load_weights(path: MaskPathModel, source: str | Path, model: PreTrainedModel) -> None:
    """Start a path from a saved adapter of the same shapes; the base may have been tuned since."""
    dtype = next(path.parameters()).dtype
    path.load_state_dict(io.load(source, model, finetuned_base=True, dtype=dtype).state_dict())
