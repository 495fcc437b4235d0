"""Checkpoints that a kill at any moment leaves whole, and the adapter folder; the one place that knows their form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from selfspec.adapters import MaskPathModel, io
from selfspec.training.world import like, whole

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


def weights(path: MaskPathModel, ema: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that is learned, whole, however it is split over processes; every process has to call this."""
    return whole({"path": path.state_dict(), "ema": list(ema), "optimizer": optimizer.state_dict()})


@torch.no_grad()
def restore(
    state: dict[str, Any], path: MaskPathModel, ema: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Fill in what `weights` returned, split as it is here."""
    own = path.state_dict()
    if set(own) != set(state["path"]) or any(own[k].shape != v.shape for k, v in state["path"].items()):
        raise ValueError("the checkpoint holds other weights than this adapter configuration has")
    for name, value in own.items():
        value.copy_(like(state["path"][name], value))
    for mean, stored in zip(ema, state["ema"], strict=True):
        mean.copy_(like(stored, mean))
    scales = [g["scale"] for g in optimizer.param_groups]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    moments = {
        i: {k: like(v, params[i]) if v.shape == params[i].shape else v for k, v in values.items()}
        for i, values in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict(state["optimizer"] | {"state": moments})
    for group, scale in zip(optimizer.param_groups, scales, strict=True):
        group["scale"] = scale


def save_adapter(path: MaskPathModel, folder: str | Path, model: PreTrainedModel, write: bool = True) -> None:
    """Write the adapter as the decoder loads it.

    Args:
        path: the mask path; where it is split over processes, every one of them has to call this.
        folder: made if missing.
        model: the base model.
        write: this process writes; the others only help to gather.
    """
    if any(isinstance(p, DTensor) for p in path.parameters()):
        state = whole(path.state_dict())
        if write:
            path = MaskPathModel(model, path.config, next(iter(state.values())).dtype)
            path.load_state_dict(state)
    if write:
        io.save(path, folder, model)


def load_weights(path: MaskPathModel, source: str | Path, model: PreTrainedModel) -> None:
    """Start a path from a saved adapter of the same shapes; the base may have been tuned since.

    Heads that the saved one lacks stay as they are, and new ones are neutral.

    Raises:
        ValueError: the saved adapter has other weights beside its heads, or heads that this path lacks.
    """
    dtype = next(path.parameters()).dtype
    state = io.load(source, model, finetuned_base=True, dtype=dtype).state_dict()
    own = path.state_dict()
    missing = [k for k in own if k not in state and not k.startswith("heads.")]
    extra = [k for k in state if k not in own]
    other = [k for k in own if k in state and own[k].shape != state[k].shape]
    if missing or extra or other:
        raise ValueError(
            f"init={str(source)!r} is an adapter of another configuration: "
            f"missing {missing[:3]}, unknown {extra[:3]}, other shapes {other[:3]}"
        )
    path.load_state_dict(state, strict=False)
