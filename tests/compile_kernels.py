"""Compiles every kernel for an sm_90 GPU, with the arguments of real calls and without a GPU: run by test_kernels.py.

python tests/compile_kernels.py bfloat16 [all]    # all: more sizes and layouts, a minute

Prints one line a compiled kernel: its name, bytes of shared memory, instructions on tensor cores, 16-byte loads.
"""

import functools
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

LIMIT = 227 * 1024  # of one block on an H200


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
        asm, shared = kernel.asm["ptx"], kernel.metadata.shared
        assert shared <= LIMIT, f"{self.__name__} needs {shared} bytes of shared memory"
        products = asm.count("mma.sync") + asm.count("wgmma.mma")
        wide = sum(asm.count(x) for x in ("ld.global.v4", "ld.global.b128", "cp.async.cg.shared.global"))
        print(f"{self.__name__} shared {shared} tensor-core products {products} wide loads {wide}", flush=True)
        return kernel

    return wrapped


def rand(*shape, dtype):
    return torch.zeros(*shape, dtype=dtype)


def linears(dtype, every):
    from selfspec.kernels.linear import TICKETS, linear
    from selfspec.kernels.norm import rmsnorm

    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    for hidden, kv, ffn, bias in ((576, 192, 1536, False), (4096, 1024, 12288, True))[: 1 + every]:
        x, wide = rand(1, 2, hidden, dtype=dtype), rand(1, 2, ffn, dtype=dtype)
        shapes = [(hidden, hidden), (kv, hidden), (kv, hidden)]
        norm = (rand(hidden, dtype=dtype), 1e-5)
        biases = tuple(rand(n, dtype=dtype) for n, _ in shapes) if bias else None
        linear(x, tuple(rand(*s, dtype=dtype) for s in shapes), biases, norm=norm, tickets=tickets)
        linear(x, (rand(hidden, hidden, dtype=dtype),), residual=x, tickets=tickets)
        linear(x, (rand(ffn, hidden, dtype=dtype), rand(ffn, hidden, dtype=dtype)), norm=norm, swiglu=True)
        rmsnorm(x, *norm)
        linear(wide, (rand(hidden, ffn, dtype=dtype),), residual=x, tickets=tickets)


def rotaries(dtype, every):
    from selfspec.kernels.rotary import rotary

    cos = rand(1, 2, 64, dtype=dtype)
    cache = rand(2, 3, 32, 64, dtype=dtype)
    qkv = rand(1, 2, 15 * 64, dtype=dtype)
    where = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)
    for norm in ((rand(64, dtype=dtype), 1e-6), None)[: 1 + every]:
        rotary(qkv, cos, cos, cache, cache, *where, norm, norm)


def noises(dtype, every):
    from selfspec.kernels import noise

    one = torch.zeros(2, dtype=torch.long)
    for scores in (rand(2, 49152, dtype=torch.float32), rand(2, 49152, dtype=dtype))[: 1 + every]:
        noise.draw(scores, one, one)
        noise.noisy(scores, one, one)
        few = torch.zeros(2, 8, dtype=torch.long)
        noise.noisy_among(scores[:, :8], few, one, one)
        noise.draw_among(scores[:, :8], few, one, one)


def tops(dtype, every):
    from selfspec.kernels import pairs, topk
    from selfspec.kernels.among import among
    from selfspec.kernels.copies import copies

    few = torch.zeros(1, 2, 8, dtype=torch.long)
    for vocab, k in ((49152, 32), (151936, 64))[: 1 + every]:
        for logits in (rand(1, 2, vocab, dtype=dtype), rand(1, 2, vocab, dtype=torch.float32)):
            topk.ranked(logits, k)
            topk.best(logits)
            topk.best(logits, torch.zeros(1, dtype=torch.long))
            among(logits, few)
    states, ids, top = rand(1, 2, 8, 576, dtype=dtype), torch.zeros(1, 2, 32, dtype=torch.long), torch.zeros(1, 2, 32)
    pairs.best(states, rand(49152, 576, dtype=dtype), ids[..., :8])
    pairs.near(states, rand(49152, 576, dtype=dtype), ids, top, rand(1, 2, dtype=dtype))
    copies(torch.zeros(1, 300, dtype=torch.long), torch.zeros(1, dtype=torch.long), 16, 3, 2)


def processors(dtype, every):
    from selfspec.kernels import processors as kernels
    from selfspec.kernels.cuts import cut

    one, deep = torch.zeros(1, dtype=torch.long), torch.arange(2).expand(1, 2)
    growth, logits = torch.zeros(9), rand(1, 2, 49152, dtype=dtype)
    place = kernels.Place(torch.zeros(1, 300, dtype=torch.long), one, one, torch.zeros(1, 2, dtype=torch.long), deep)
    for how in (
        kernels.Scaling(temperature=0.7),
        kernels.Scaling((1.1, 0), (one, growth, 3), (0.1, 0.1, 0), 0.7),
        *(kernels.Scaling((1.1, None)), kernels.Scaling((1.1, 4)), kernels.Scaling(counted=(0.1, 0.1, 0)))[: 3 * every],
    ):
        scores = kernels.scale(logits, how, None if how.repetition is how.counted is None else place)
    table = torch.zeros(3, 5, dtype=torch.long)
    for in_prompt in (False, True)[: 1 + every]:
        kernels.grams(scores, place, 64, in_prompt)
        kernels.strike(scores, table, None if in_prompt else place)
    few = torch.zeros(1, 2, 128), torch.zeros(1, 2, 128, dtype=torch.long)
    cuts = {"TopKLogitsWarper": (50, 1), "TopPLogitsWarper": (0.9, 1), "MinPLogitsWarper": (0.02, 1)}
    for more in ({"TypicalLogitsWarper": (0.9, 1)}, {})[: 1 + every]:
        cut(scores, *few, cuts | more)


def entries(dtype, every):
    from selfspec.kernels.enter import enter

    tokens, x, square = torch.zeros(1, 4, dtype=torch.long), rand(1, 4, 576, dtype=dtype), rand(576, 576, dtype=dtype)
    for weight, extra in ((square, None), (None, x[:, :1]), (square, x[:, :1]))[: 1 + 2 * every]:
        enter(tokens, tokens, x, square[:16], weight, extra)
    enter(tokens, tokens, square, square[:16], square, None)


def groups(dtype, every):
    from selfspec.kernels.groups import attend

    q, k = (rand(1, h, r, 64, dtype=dtype).requires_grad_() for h, r in ((9, 32), (3, 96)))
    ranges = torch.zeros(1, 2, dtype=torch.int32)
    for causal in (False, True)[: 1 + every]:
        out, _ = attend(q, k, k, ranges, ranges, 16, 0.125, causal)
        out.sum().backward()


def walks(dtype, every):
    from selfspec.kernels.compact import compact
    from selfspec.kernels.paths import paths
    from selfspec.kernels.settle import move_on
    from selfspec.kernels.walk import walk

    nodes = torch.zeros(2, 33, dtype=torch.long)
    walk(nodes, nodes, nodes)
    walk(nodes, None, nodes)
    paths(torch.zeros(2, 33, 33, dtype=torch.bool))
    compact(rand(2, 2, 3, 64, 64, dtype=dtype), nodes[:, :17], nodes[:, 0], 0)
    for ready in (None, nodes[:, 0] > 0):
        move_on(nodes, nodes[:, 0], nodes[:, 1], nodes[:, 2], nodes[:, :17], ready)


def attentions(dtype, every):
    from selfspec import rows
    from selfspec.attention import AttentionRule

    start = torch.zeros(1, dtype=torch.long)
    tree = rows.tree(start, torch.tensor([[-1, 0, 0]]))
    cases = [
        (rows.chain(start, 2), None, None, 64),
        (rows.overlapped(tree, torch.tensor([[0, 1]]), 2), 7, 5.0, 64),
        (rows.block(start, 2), None, None, 64),
        (tree, None, None, 128),
    ]
    for layout, window, softcap, d in cases[: 4 if every else 2]:
        q, k = (rand(1, h, t, d, dtype=dtype) for h, t in ((6, layout.n_rows), (3, 192)))
        AttentionRule(layout, 192, "triton").run(q, k, k, window, 0.125, softcap, None)


if __name__ == "__main__":
    driver.set_active(Device())
    jit.JITFunction.run = compile_only(jit.JITFunction.run)
    for compile_all in (linears, rotaries, noises, tops, processors, entries, groups, walks, attentions):
        compile_all(getattr(torch, sys.argv[1]), sys.argv[2:] == ["all"])
