"""Forward times by rows, requests, context and entry layer.

python benchmarks/forward_times.py --model smollm2-135m-instruct --device cuda --json benchmarks/forward_times.json
"""

import argparse
import dataclasses
import itertools
import json
import platform

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from selfspec import hub
from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.backbone import Backbone
from selfspec.plan.latency import measure

SMOLLM2 = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip


def load(name: str, dtype: torch.dtype, device: str):
    """A model by name; `random:smollm2-135m` is its shape with random weights, and a .json file is any shape."""
    if name == "random:smollm2-135m":
        config = LlamaConfig(**SMOLLM2)
    elif name.endswith(".json"):
        config = AutoConfig.from_pretrained(name)
    else:
        return hub.load(name, dtype=dtype, device=device)[0]
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def how(args) -> str:
    """What runs the layers, for the table's first line."""
    kinds = {"compile": ", compiled layers", "fused": ", fused layers", "exact": ", exact"}
    return "".join(text for name, text in kinds.items() if getattr(args, name))


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:smollm2-135m")
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
    model = load(args.model, getattr(torch, args.dtype), args.device)
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu"
    out = []
    print(f"{args.model} {args.dtype} on {machine}, torch {torch.__version__}, attention {args.backend}{how(args)}")
    print("kind   entry requests  rows context  graph       ms      low     high")
    for graph in [x == "graph" for x in args.launch.split(",")]:
        for entry in [None, *numbers["entries"]]:
            path = None
            if entry is not None:
                path = MaskPathModel(model, MaskPathConfig(block_size=max(numbers["rows"]), entry=entry))
            backbone = Backbone(model, path, args.backend)
            if args.fused:
                said = backbone.fuse(args.exact)
                print(said, flush=True) if entry is None else None
            if args.compile:
                backbone.compile()
            some = numbers["rows"] if entry is None else [x for x in numbers["rows"] if x > 1]
            for n, r, context in itertools.product(numbers["requests"], some, numbers["contexts"]):
                kind = "clean" if entry is None else "draft"
                point = measure(backbone, kind, n, r, context, graph, args.repeats)
                out.append(dataclasses.asdict(point))
                where = f"{kind:6} {point.entry:5} {n:8} {r:5} {context:7} {graph!s:>6}"
                print(f"{where} {point.ms:8.3f} {point.low:8.3f} {point.high:8.3f}", flush=True)
    if args.json:
        head = {
            "model": args.model,
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
