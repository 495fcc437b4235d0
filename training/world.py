"""The processes of a run, as `accelerate launch` or torchrun started them: who they are, and what they add up.

Data parallel (DDP): every process has the whole model; trained gradients are summed once a step, after the last micro-
batch. That is done here rather than by torch's wrapper, whose hooks would leave the others waiting when one process
runs out of memory in the middle of a step. Sharded (FSDP): torch's `fully_shard` splits every layer, trained parts
included, and gathers it while it runs; the walk over the layers is the sharded module's own forward. What stands
outside the layers (embedding, norm, head, mask embeddings, input projections) is whole on every process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from selfspec.backbone import Backbone
from selfspec.shadow import inner_decoder, layers_of

HOURS = 2  # that a process waits for the others: the first one may compile, read or evaluate


class World:
    """One process among others.

    Args:
        device: "auto", or a torch device; several processes of one machine take one GPU each.
        shard: split the layers over the processes; None does what the launcher was told (`--use_fsdp`).

    Raises:
        ValueError: layers to split, and one process; or options of the launcher that the trainer does not act on.

    Attributes:
        rank, size: of this process, and how many there are.
        device: where it computes.
        sharded: layers are split.
    """

    def __init__(self, device: str = "auto", shard: bool | None = None):
        self.rank, self.size = 0, 1
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(auto if device == "auto" else device)
        self._host = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            from accelerate import PartialState

            _refuse_ignored()
            state = PartialState(cpu=self.device.type == "cpu", timeout=timedelta(hours=HOURS))
            self.rank, self.size, self.device = state.process_index, state.num_processes, state.device
            # numbers that the hosts decide by go between the hosts, and wait for no device
            self._host = dist.new_group(backend="gloo", timeout=timedelta(hours=HOURS))
        asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if shard and self.size == 1:
            raise ValueError(
                "shard=true splits layers over processes, and there is one: start several with accelerate launch "
                "--num_processes N -m selfspec.training, or leave it out"
            )
        self.sharded = (asked if shard is None else shard) and self.size > 1

    @property
    def main(self) -> bool:
        """This process writes files and speaks."""
        return self.rank == 0

    def gather(self, *values: float) -> list[float]:
        """A host's numbers of every process, in order of their ranks."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self._host is None:
            return numbers.tolist()
        every = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(every, numbers, group=self._host)
        return torch.cat(every).tolist()

    def sum(self, values: Sequence[float] | Tensor) -> list[float]:
        """Numbers of the hosts, added up over all processes in one order: the same on all of them."""
        mine = torch.as_tensor(values, dtype=torch.float64).reshape(-1)
        return torch.tensor(self.gather(*mine.tolist()), dtype=torch.float64).view(self.size, -1).sum(0).tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        return self.sum([float(flag)])[0] > 0

    def wait(self) -> None:
        """Until every process has come here."""
        if self._host is not None:
            dist.barrier(group=self._host)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors of the device up over all processes, in place and in one transfer."""
        parts = list(tensors)
        if self.size == 1 or not parts:
            return
        flat = torch.cat([t.reshape(-1) for t in parts])
        dist.all_reduce(flat)
        for t, new in zip(parts, flat.split([t.numel() for t in parts]), strict=True):
            t.copy_(new.view_as(t))

    def reduce_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Sum gradients over all processes: losses are divided by global counts, so gradients add up.

        Those of split parameters were averaged when they were scattered, and only lack the number of processes. A
        parameter that this process's rows did not touch gets a gradient of zeros first, as another's may have.
        """
        if self.size == 1:
            return
        whole = [p for p in params if not isinstance(p, DTensor)]
        for p in whole:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.sum_(p.grad for p in whole if p.grad is not None)
        if split := [local(p.grad) for p in params if isinstance(p, DTensor) and p.grad is not None]:
            torch._foreach_mul_(split, float(self.size))

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _refuse_ignored() -> None:
    """The launcher's options that this trainer would not act on."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16", ""):
        raise ValueError(
            f"accelerate was told mixed precision {precision!r}; the trainer's own dtype decides (dtype=bfloat16, "
            "trained weights in float32): launch with --mixed_precision bf16 or no"
        )
    if int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) > 1:
        raise ValueError("set accumulate=N instead of accelerate's gradient accumulation steps")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ValueError("sharded layers stay on their devices: launch without --fsdp_offload_params")


def shard(backbone: Backbone, path: nn.Module, model: PreTrainedModel, world: World) -> None:
    """Split every layer of a backbone over the processes, its trained parts with it.

    The layers are taken from the base model: its own weights of them go to host memory, where what is left of them to
    do (names and fingerprint of a saved adapter) finds them.

    Args:
        backbone: on any device; its layers may be compiled, as the gathering stands around each.
        path: its mask path.
        model: whose layers they are.
        world: the processes.
    """
    from torch.distributed.fsdp import fully_shard

    inside = {id(p) for layer in backbone.layers for p in layer.parameters()}
    outside = {p for module in (backbone, path) for p in module.parameters() if id(p) not in inside}
    mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.size,))
    for layer in backbone.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # the root holds no parameter of its own: the path's parts in the layers are split by now, and found here once more
    fully_shard(backbone, mesh=mesh, reshard_after_forward=True, ignored_params=set(backbone.parameters()))
    # rows are handed out as slices, which nothing writes to
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for p in outside:
        p.data = p.data.to(world.device)
    for p in layers_of(inner_decoder(model)).parameters():
        p.data = p.data.cpu()


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x):
    """A nest of dicts and lists with every sharded tensor gathered. Every process has to call it."""
    if isinstance(x, dict):
        return {k: whole(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [whole(v) for v in x]
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, other: Tensor) -> Tensor:
    """A whole tensor split as another one is."""
    return (
        distribute_tensor(x.to(other.device), other.device_mesh, other.placements) if isinstance(other, DTensor) else x
    )
