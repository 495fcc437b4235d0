"""Kernels that give the same numbers every time, for as long as a run lasts.

Our own of training (`selfspec.kernels.groups`) do so anyway: a program writes what no other one does, and nothing is
added up by atomics. FlexAttention's are alike. torch's are asked for here, compiled ones included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Let torch take deterministic kernels alone; afterwards everything is as it was.

    It goes around all of a run, the loading too: cuBLAS looks for its workspace when the first product is computed.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    import torch._inductor.config as inductor

    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    compiled, tries = inductor.deterministic, torch.backends.cudnn.benchmark
    ours = WORKSPACE not in os.environ
    try:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)  # the compiler's too
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        inductor.deterministic, torch.backends.cudnn.benchmark = compiled, tries
        if ours:
            os.environ.pop(WORKSPACE, None)
