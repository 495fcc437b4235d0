"""Forward times by rows, requests, context and entry layer: every point of a grid, eager and as CUDA graphs.

python benchmarks/forward_times.py --shape smollm2-135m --device cuda --json benchmarks/forward_times.json

`selfspec profile` measures the same with the same code, in the way that the decoder runs, and keeps it for the planner.
"""

import argparse
import dataclasses
import itertools
import json

import torch

from selfspec.costs import bodies
from selfspec.machine import device_name
from selfspec.plan.latency import measure


def how(args) -> str:
    """What runs the layers, for the table's first line."""
    kinds = {"compile": ", compiled layers", "fused": ", fused layers", "exact": ", exact"}
    return "".join(text for name, text in kinds.items() if getattr(args, name))


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="instead of a shape: a model by name")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--requests", default="1,32")
    parser.add_argument("--entries", default="0,10,20,25")
    parser.add_argument("--contexts", default="512")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--launch", default="eager,graph" if torch.cuda.is_available() else "eager")
    parser.add_argument("--backend", default="sdpa")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fused", action="store_true", help="layers, norm and head by our own kernels")
    parser.add_argument("--exact", action="store_true", help="with --fused: row-invariant or an error")
    parser.add_argument("--json")
    args = parser.parse_args()
    numbers = {k: [int(x) for x in getattr(args, k).split(",")] for k in ("rows", "requests", "entries", "contexts")}
    dtype, shape = getattr(torch, args.dtype), None if args.model else args.shape
    entries, widest = tuple(numbers["entries"]), max(numbers["rows"])
    backbones = bodies(args.model or "", shape, "none", entries, dtype, args.device, widest, args.backend)
    machine = device_name(backbones[0].device)
    name, out = args.model or f"random:{args.shape}", []
    print(f"{name} {args.dtype} on {machine}, torch {torch.__version__}, attention {args.backend}{how(args)}")
    print("kind   entry requests  rows context  graph       ms      low     high")
    for i, backbone in enumerate(backbones):
        if args.fused:
            said = backbone.fuse(args.exact)
            print(said, flush=True) if i == 0 else None
        if args.compile:
            backbone.compile()
    for graph in [x == "graph" for x in args.launch.split(",")]:
        # clean rows take no notice of the mask path: any backbone times them
        for kind, backbone in [("clean", backbones[0]), *(("draft", b) for b in backbones)]:
            some = [r for r in numbers["rows"] if kind == "clean" or r > 1]
            for n, r, context in itertools.product(numbers["requests"], some, numbers["contexts"]):
                point = measure(backbone, kind, n, r, context, graph, args.repeats)
                out.append(dataclasses.asdict(point))
                where = f"{kind:6} {point.entry:5} {n:8} {r:5} {context:7} {graph!s:>6}"
                print(f"{where} {point.ms:8.3f} {point.low:8.3f} {point.high:8.3f}", flush=True)
    if args.json:
        head = {
            "model": name,
            "n_layers": backbones[0].n_layers,
            "backend": args.backend,
            "compile": args.compile,
            "fused": args.fused,
            "exact": args.exact,
            "dtype": args.dtype,
            "machine": machine,
            "torch": torch.__version__,
        }
        with open(args.json, "w") as file:
            json.dump(head | {"points": out}, file, indent=1)


if __name__ == "__main__":
    main()
