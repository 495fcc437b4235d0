"""Times of the best tokens of a vocabulary: torch's top-k with log-sum-exp, and argmax, beside the kernels.

Microseconds of one call, captured many times in one CUDA graph. All calls read the same logits, which then lie in the
cache, as they do in a round, where the head has just written them.

python benchmarks/kernel_topk.py --json benchmarks/kernel_topk_h200.json
"""

import argparse
import json

import torch
from kernel_times import timed

from selfspec import tops

ROWS, RANKS = (1, 15, 64, 480), (16, 32, 64)


def by_torch(x: torch.Tensor, k: int) -> torch.Tensor:
    """What a tree needs, by torch."""
    x = x.float()
    return x.topk(k, -1).values - x.logsumexp(-1, keepdim=True)


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name()
    print(f"{args.vocab} tokens, {args.dtype}, {machine}, torch {torch.__version__}; us")
    out: list[dict] = []
    for rows in ROWS:
        x = 3 * torch.randn(1, rows, args.vocab, device="cuda").to(getattr(torch, args.dtype))
        runs = {("argmax", 1): (lambda i, x=x: x.argmax(-1), lambda i, x=x: tops.best(x))}
        for k in RANKS:
            runs["ranked", k] = (lambda i, x=x, k=k: by_torch(x, k), lambda i, x=x, k=k: tops.ranked(x, k))
        for (name, k), (theirs, ours) in runs.items():
            row = {"name": name, "rows": rows, "k": k, "torch_us": timed(theirs, 5), "kernel_us": timed(ours, 5)}
            out.append(row)
            print(f"{name:8} rows {rows:4} k {k:3} torch {row['torch_us']:8.1f} kernels {row['kernel_us']:8.1f}")
    if args.json:
        head = {"machine": machine, "torch": torch.__version__, "vocab": args.vocab, "dtype": args.dtype}
        with open(args.json, "w") as file:
            json.dump(head | {"times": out}, file, indent=1)


if __name__ == "__main__":
    main()
