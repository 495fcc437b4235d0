"""Forward and backward of a micro-batch as one CUDA graph: shapes never change, so the device waits for no host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from selfspec.training.anchors import Groups
from selfspec.training.batches import tensors_of
from selfspec.training.pack import Pack

WARM = 3  # runs before the capture: compilation, lazy allocations and library handles may not happen inside it


class Captured:
    """Runs a function eagerly a few times, then captures it and replays it.

    Gradients stand where the graph adds to them: they have to be set to zero in place, not dropped. A parameter that
    nothing has reached by the time of the capture has none, and needs none afterwards.

    Args:
        run: `run(pack, groups, given)`, which adds to gradients and returns tensors by name.
        params: whose gradients it may add to.

    Raises:
        RuntimeError: when called after a gradient that the graph adds to was dropped.
    """

    def __init__(self, run: Callable[[Pack, Groups, Tensor], dict[str, Tensor]], params: Sequence[nn.Parameter]):
        self.run, self.params = run, params
        self.reached: list[nn.Parameter] = []  # those that the graph adds to
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Pack, Groups, Tensor] | None = None
        self.out: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream()

    def __call__(self, pack: Pack, groups: Groups, given: Tensor) -> dict[str, Tensor]:
        """The same as `run`, on tensors of the same shapes each time."""
        if any(p.grad is None for p in self.reached):
            raise RuntimeError("a gradient was dropped under a captured step: zero it in place")
        self.calls += 1
        if self.calls <= WARM:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                out = self.run(pack, groups, given)
            torch.cuda.current_stream().wait_stream(self.stream)
            return out
        fresh = _flat(pack, groups, given)
        if self.graph is None:
            self._capture(pack, groups, given)
        else:
            assert self.inputs is not None
            for old, new in zip(_flat(*self.inputs), fresh, strict=True):
                old.copy_(new)
        assert self.graph is not None
        self.graph.replay()
        return {k: v.clone() for k, v in self.out.items()}  # the next replay writes over them

    def _capture(self, pack: Pack, groups: Groups, given: Tensor) -> None:
        """Record the function; recording computes nothing."""
        self.inputs = pack, groups, given
        graph = torch.cuda.CUDAGraph()
        # batches are laid out on another thread meanwhile, which may ask for page-locked memory
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.out = self.run(pack, groups, given)
        self.graph, self.reached = graph, [p for p in self.params if p.grad is not None]


def _flat(pack: Pack, groups: Groups, given: Tensor) -> list[Tensor]:
    return [*(pack.tokens, pack.positions, pack.segments, pack.answer), *tensors_of(groups), given]
