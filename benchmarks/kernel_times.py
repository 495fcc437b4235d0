"""Times of every kernel at real shapes, with several tiles; the best are printed as lines of selfspec/kernels/tiles.py.

python benchmarks/kernel_times.py                       # SmolLM2-135M
python benchmarks/kernel_times.py --shape qwen3-8b
"""

import argparse
import itertools
import json
import statistics
from dataclasses import astuple, dataclass

import torch

from selfspec import rows
from selfspec.attention import AttentionRule
from selfspec.kernels.linear import TICKETS, linear
from selfspec.kernels.norm import rmsnorm
from selfspec.kernels.rotary import rotary
from selfspec.kernels.tiles import Tile, tile

INSIDE = 50  # launches in one graph, each over weights of its own so far as memory goes: no weight stays in the L2


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder."""

    hidden: int
    heads: int
    kv: int
    dim: int
    ffn: int
    vocab: int


SHAPES = {
    "smollm2": Shape(576, 9, 3, 64, 1536, 49152),
    "qwen3-1.7b": Shape(2048, 16, 8, 128, 6144, 151936),
    "qwen3-8b": Shape(4096, 32, 8, 128, 12288, 151936),
}


def timed(run, repeats: int = 10) -> float:
    """Microseconds of one launch: `run(i)` captured INSIDE times in one graph, median of the replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(INSIDE):
            run(i)
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / INSIDE)
    return statistics.median(times[2:])


def grid(n: int, k: int, swiglu: bool) -> list[Tile]:
    """Tiles worth trying, the table's own first."""
    large = n * k >= 1 << 23
    ms, ns, ks = ((16, 64), (64, 128), (64, 128)) if large else ((16, 64), (16, 32), (64, 128))
    splits = (1,) if swiglu or n * k >= 1 << 21 else (1, 2)
    out = [tile(n, k)]
    for m, bn, bk, warps, stages, split in itertools.product(ms, ns, ks, (4, 8) if large else (2, 4), (4,), splits):
        shared = (m + bn * (2 if swiglu else 1)) * bk * 2 * stages
        if shared <= 200 * 1024 and split * bk <= k:
            out.append(Tile(m, bn, bk, warps, stages, split))
    return list(dict.fromkeys(out))


def products(s: Shape) -> dict:
    """name: (widths, inputs, normed, residual, swiglu)"""
    q, kv = s.heads * s.dim, s.kv * s.dim
    return {
        "q,k,v": ((q, kv, kv), s.hidden, True, False, False),
        "o": ((s.hidden,), q, False, True, False),
        "gate,up": ((s.ffn, s.ffn), s.hidden, True, False, True),
        "down": ((s.hidden,), s.ffn, False, True, False),
        "head": ((s.vocab,), s.hidden, False, False, False),
    }


def launch(x, weights: list, **fixed):
    """The product of x with the i-th of some weights, as a function of i."""
    return lambda i: linear(x, weights[i % len(weights)], **fixed)


def linear_times(s: Shape, counts: list[int], quick: bool, top: int) -> list[dict]:
    """Every product with every tile; prints the best by the mean over the row counts, each relative to its best."""
    found, lines = [], []
    tickets = torch.zeros(TICKETS, dtype=torch.int32, device="cuda")
    make = dict(device="cuda", dtype=torch.bfloat16)
    for name, (widths, k, normed, added, swiglu) in products(s).items():
        n = sum(widths)
        copies = max(1, min(INSIDE, int(2e9 / (n * k * 2))))
        weights = [tuple(torch.randn(w, k, **make) * k**-0.5 for w in widths) for _ in range(copies)]
        norm = (torch.ones(k, **make), 1e-5) if normed else None
        xs = {r: torch.randn(1, r, k, **make) for r in counts}
        adds = {r: torch.randn(1, r, n, **make) if added else None for r in counts}
        times: dict[Tile, list[float]] = {}
        for how in grid(n, k, swiglu)[: 1 if quick else None]:
            try:
                fixed = dict(norm=norm, swiglu=swiglu, tickets=tickets, how=how)
                times[how] = [timed(launch(xs[r], weights, residual=adds[r], **fixed)) for r in counts]
            except Exception as error:  # a tile that does not compile or fit is not a candidate
                print(f"    {astuple(how)}: {type(error).__name__}")
        fastest = [min(t[i] for t in times.values()) for i in range(len(counts))]
        order = sorted(times, key=lambda h: sum(a / b for a, b in zip(times[h], fastest)))
        now = tile(n, k)
        bound = n * k * 2 / 4.8e12 * 1e6
        print(f"{name}: {n} x {k}, weights alone {bound:.1f} us at 4.8 TB/s; us for {counts} rows")
        for how in list(dict.fromkeys([*order[:top], *([now] if now in times else [])])):
            mark = " <- the table's" if how == now else ""
            print(f"    {astuple(how)!s:28}", " ".join(f"{x:8.2f}" for x in times[how]), mark)
        lines.append(f"    ({n}, {k}): Tile{astuple(order[0])},")
        found.append({"name": name, "n": n, "k": k, "rows": counts, "tiles": [[*astuple(h), times[h]] for h in order]})
    print("\n".join(["best:", *lines]))
    return found


def other_times(s: Shape, counts: list[int], context: int) -> list[dict]:
    """Norm, rotary and attention, of a chain and of a tree."""
    make = dict(device="cuda", dtype=torch.bfloat16)
    out = []
    start = torch.tensor([context], device="cuda")
    for r in counts:
        x, weight = torch.randn(1, r, s.hidden, **make), torch.ones(s.hidden, **make)
        qkv = torch.randn(1, r, (s.heads + 2 * s.kv) * s.dim, **make)
        cos = torch.randn(1, r, s.dim, **make)
        keys, values = torch.randn(2, 1, s.kv, context + r, s.dim, **make)
        slots = start[:, None] + torch.arange(r, device="cuda")
        request = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        parents = torch.arange(r, device="cuda")[None].sub(1) // 2
        parents[:, 0] = -1
        q = torch.randn(1, r, s.heads, s.dim, **make).transpose(1, 2)
        runs = {
            "norm": lambda i, x=x, w=weight: rmsnorm(x, w, 1e-5),
            "rotary": lambda i, a=(qkv, cos, cos, keys, values, request, slots): rotary(*a),
        }
        for name, layout in {"chain": rows.chain(start, r), "tree": rows.tree(start, parents)}.items():
            rule = AttentionRule(layout, context + r, "triton").prepare([None])
            runs[f"attention, {name}"] = lambda i, rule=rule, q=q, k=keys, v=values: rule.run(
                q, k, v, None, s.dim**-0.5, None, None
            )
        out += [{"name": name, "rows": r, "us": timed(run)} for name, run in runs.items()]
    for name in dict.fromkeys(x["name"] for x in out):
        print(f"{name:32}", " ".join(f"{x['us']:8.2f}" for x in out if x["name"] == name))
    return out


def main() -> None:
    """Measures, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--rows", default="1,16,64,512")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="only the table's own tiles")
    parser.add_argument("--top", type=int, default=5, help="tiles printed a product")
    parser.add_argument("--json")
    args = parser.parse_args()
    counts, shape = [int(x) for x in args.rows.split(",")], SHAPES[args.shape]
    print(f"{args.shape} bfloat16 on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = {"other": other_times(shape, counts, args.context)}
    found["linear"] = linear_times(shape, counts, args.quick, args.top)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"shape": args.shape, "machine": torch.cuda.get_device_name()} | found, file, indent=1)


if __name__ == "__main__":
    main()
