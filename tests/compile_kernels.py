"""Compiles every kernel for an sm_90 GPU, with the arguments of real calls and without a GPU: run by test_kernels.py.

Prints one line a compiled kernel: its name, registers, bytes spilled, 16-byte loads.
"""

import functools
import itertools

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class Device:
    """What a launch asks the driver for before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_only(run):
    @functools.wraps(run)
    def wrapped(self, *args, warmup=False, **kwargs):
        kernel = run(self, *args, warmup=True, **kwargs)
        asm = kernel.asm["ptx"]
        # a static launch limit: more than this does not load on an H200
        assert kernel.metadata.shared <= 227 * 1024, (
            f"{self.__name__} needs {kernel.metadata.shared} bytes of shared memory"
        )
        wide = asm.count("ld.global.v4") + asm.count("ld.global.b128") + asm.count("cp.async.cg.shared.global")
        print(
            self.__name__,
            f"shared {kernel.metadata.shared}",
            f"mma {asm.count('mma.sync')}+{asm.count('wgmma.mma')}",
            f"wide loads {wide}",
            flush=True,
        )
        return kernel

    return wrapped


def rand(*shape, dtype):
    return torch.zeros(*shape, dtype=dtype)


def linears(dtype):
    from selfspec.kernels.linear import TICKETS, linear

    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    for hidden, kv, ffn, bias in ((576, 192, 1536, False), (4096, 1024, 12288, True)):
        x, wide = rand(1, 2, hidden, dtype=dtype), rand(1, 2, ffn, dtype=dtype)
        shapes = [(hidden, hidden), (kv, hidden), (kv, hidden)]
        norm = (rand(hidden, dtype=dtype), 1e-5)
        biases = tuple(rand(n, dtype=dtype) for n, _ in shapes) if bias else None
        linear(x, tuple(rand(*s, dtype=dtype) for s in shapes), biases, norm=norm, tickets=tickets)
        linear(x, (rand(hidden, hidden, dtype=dtype),), residual=x, tickets=tickets)
        linear(x, (rand(ffn, hidden, dtype=dtype), rand(ffn, hidden, dtype=dtype)), norm=norm, swiglu=True)
        linear(wide, (rand(hidden, ffn, dtype=dtype),), residual=x, tickets=tickets)


def rotaries(dtype):
    from selfspec.kernels.rotary import rotary

    cos = rand(1, 2, 64, dtype=dtype)
    cache = rand(2, 3, 32, 64, dtype=dtype)
    qkv = rand(1, 2, 15 * 64, dtype=dtype)
    where = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)
    for norm in (None, (rand(64, dtype=dtype), 1e-6)):
        rotary(qkv, cos, cos, cache, cache, *where, norm, norm)


def attentions(dtype):
    from selfspec import rows
    from selfspec.attention import AttentionRule

    start = torch.zeros(1, dtype=torch.long)
    tree = rows.tree(start, torch.tensor([[-1, 0, 0]]))
    layouts = (rows.chain(start, 2), rows.block(start, 2), tree, rows.overlapped(tree, torch.tensor([[0, 1]]), 2))
    for layout, (window, softcap), d in itertools.product(layouts, ((None, None), (7, 5.0)), (64, 128)):
        if d == 128 and window:
            continue
        q, k = (rand(1, h, t, d, dtype=dtype) for h, t in ((6, layout.n_rows), (3, 192)))
        AttentionRule(layout, 192, "triton").run(q, k, k, window, 0.125, softcap, None)


if __name__ == "__main__":
    driver.set_active(Device())
    jit.JITFunction.run = compile_only(jit.JITFunction.run)
    for dtype in (torch.bfloat16, torch.float32):
        linears(dtype)
        rotaries(dtype)
        attentions(dtype)
