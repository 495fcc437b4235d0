"""Triton kernels of a decoding forward, each beside a plain torch reference.

All are row-invariant: what they write for a row depends on that row alone, to the last bit, however many rows and
requests share the launch. So sizes of tiles never depend on a number of rows, and every sum has one fixed order.
Numbers that change with the rows are never specialised on: Triton would compile another kernel for 1 or a multiple of
16, which may add in another order. And multiplications are not contracted with additions: a compiler may do so in one
variant of a kernel and not in another.
"""

from importlib.util import find_spec

from torch import Tensor

DEVICES = {"cuda"}  # elsewhere torch is faster than what interprets kernels


def serve(tensor: Tensor) -> bool:
    """Whether there are kernels for where a tensor lives."""
    return tensor.device.type in DEVICES and find_spec("triton") is not None
