"""Random arrivals and cancellations for minutes: no memory growth, no stuck request, no wrong text.

python benchmarks/soak.py --minutes 30                                   # a tiny random model on the CPU
python benchmarks/soak.py --minutes 8 --device cuda --model smollm2-135m-instruct --dtype bfloat16 --json soak.json

Ends with exit code 1 if a request got stuck, if memory grew by more than --growth MiB between the end of the first
fifth and the end, if the budget was exceeded, if more graphs are kept than may be, or (in float32 and float64) if a
finished answer is not what the same prompt got before.

What a shape's first calls take (kernels that are compiled and loaded, a CUDA graph) is set-up: it is measured around
just these calls and told apart, and only what grows beside it is held against the limit. Set-up has a bound of its own:
the number of graphs that may be kept. Memory on the host is the resident set, on the GPU what tensors hold; what the
allocator reserves beyond that, and what the driver takes for kernels and graphs ("other"), is shown.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import SelfSpecModel
from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.graphs import Graphs
from selfspec.memory import slot_bytes
from selfspec.sampling import Pipeline, Sampling
from selfspec.serving.engine import Engine
from selfspec.serving.metrics import snapshot
from selfspec.session import Request

STUCK = 120.0  # seconds that a request may take on its way, waiting apart, before it counts as stuck


def tiny(dtype: torch.dtype, device: str) -> SelfSpecModel:
    """A random Llama of two layers with a random adapter."""
    torch.manual_seed(0)
    shape = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.3)
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    return SelfSpecModel(model, MaskPathModel(model, MaskPathConfig(block_size=4, layouts=("known", "hidden"))))


def held(device: torch.device) -> dict[str, int]:
    """Bytes that this process holds, on the host and in tensors on the GPU."""
    cuda = device.type == "cuda"
    tensors = torch.cuda.memory_allocated(device) if cuda else 0
    return {"host": psutil.Process().memory_info().rss, "tensors": tensors}


class SetUp:
    """What first calls of shapes, and the lanes that they belong to, have added to each kind of memory so far.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device):
        self.device, self.added, self.shapes = device, Counter[str](), 0

    def around(self, owner: type, name: str, known: Callable[..., bool] = lambda *_: False) -> None:
        """Measure calls of a method, but for those of a shape that is known."""
        method = getattr(owner, name)

        def measured(this: Any, *args: Any, **kwargs: Any) -> Any:
            if known(this, *args):
                return method(this, *args, **kwargs)
            before = held(self.device)
            out = method(this, *args, **kwargs)
            self.shapes += 1
            self.added.update({k: n - before[k] for k, n in held(self.device).items()})
            return out

        setattr(owner, name, measured)


def sample(engine: Engine, setup: SetUp, seconds: float) -> dict[str, Any]:
    """All figures of memory now, in bytes, and the graphs that are kept, and that may be."""
    gc.collect()
    device = engine.backbone.device
    out = {"s": round(seconds), **held(device), "reserved": 0, "other": 0}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        out["reserved"] = torch.cuda.memory_reserved(device)
        out["other"] = total - free - out["reserved"]  # other programs' too
    graphs = [g for lane in engine.lanes.values() if (g := lane.open.graphs).enabled]
    out |= {f"setup_{k}": setup.added[k] for k in ("host", "tensors")}
    out |= dict(
        graphs=sum(map(len, graphs)), most=sum(g.most for g in graphs), captured=sum(g.captures for g in graphs)
    )
    return out


def grown(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    """MiB by which memory grew between two samples: set-up, and the rest of each kind."""

    def between(name: str) -> float:
        return (last[name] - first[name]) / 2**20

    out = {"setup": between("setup_host") + between("setup_tensors")}
    return out | {k: between(k) - between(f"setup_{k}") for k in ("host", "tensors")}


def main() -> int:
    """Runs, prints a line every ten seconds, checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", help="by default a tiny random one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mode")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--budget", type=int, default=40, help="of KV memory, in slots of 1,024 positions")
    parser.add_argument("--growth", type=float, default=64.0, help="MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    dtype, draw = getattr(torch, args.dtype), random.Random(args.seed)
    if args.model:
        model = SelfSpecModel.from_pretrained(args.model, dtype=dtype, device=args.device)
    else:
        model = tiny(dtype, args.device)
    plan = model.policy(args.mode)
    vocabulary, device = model.backbone.vocab_size, model.backbone.device
    budget = args.budget * slot_bytes(model.backbone, plan.plans, 1024)
    setup = SetUp(device)
    setup.around(Graphs, "__call__", lambda graphs, key, *_: not graphs.enabled or key in graphs)
    setup.around(Engine, "_open")
    setup.around(Engine, "_close")
    engine = Engine(model, plan, args.slots, budget)
    # few prompts, so that each comes back and has to get the same answer
    common = [draw.randrange(vocabulary) for _ in range(40)]
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.choice([3, 30, 30, 200, 900]))] for _ in range(30)]
    prompts += [common + p for p in prompts[:10]]
    warm = Sampling(Pipeline(), sample=True, seed=1)
    known: dict[tuple[int, bool], list[int]] = {}
    live: dict = {}  # ticket -> (prompt, sampled)
    wrong: list[str] = []
    began = now = time.monotonic()
    shown, first, ends, sizes = began, 0, began + 60 * args.minutes, list[dict[str, Any]]()
    exact = args.dtype in ("float32", "float64")
    while now < ends or engine.busy:
        now = time.monotonic()
        while now < ends and engine.waiting < 8 and draw.random() < 0.5:
            which, sampled = draw.randrange(len(prompts)), draw.random() < 0.3
            request = Request(prompts[which], draw.randint(1, 96), sampling=warm if sampled else None)
            timeout = draw.uniform(0.05, 2) if draw.random() < 0.03 else None
            live[engine.add(request, draw.choice([0, 0, 0, 0, 1]), timeout)] = which, sampled
        if live and draw.random() < 0.05:
            engine.cancel(draw.choice(list(live)))
        for event in engine.step():
            if event.finish_reason is None:
                continue
            which, sampled = live.pop(event.ticket)
            output = event.ticket.request.output
            before = known.setdefault((which, sampled), output)
            same = min(len(before), len(output))
            if exact and before[:same] != output[:same]:
                wrong.append(f"prompt {which}, {'sampled' if sampled else 'greedy'}, after {same} tokens")
            if len(output) > len(before):
                known[which, sampled] = output
            if event.finish_reason == "error":
                wrong.append(str(event.error))
        if engine.reserved > engine.memory:
            wrong.append(f"{engine.reserved} bytes reserved of {engine.memory}")
        stuck = [t for t in engine.running.values() if t.admitted and now - t.admitted > STUCK]
        if stuck:
            wrong.append(f"{len(stuck)} requests are stuck")
            break
        if now - shown > 10:
            shown = now
            sizes.append(sample(engine, setup, now - began))
            if not first and now - began > 12 * args.minutes:
                first = len(sizes)
            x, ended = {k: n / 2**20 for k, n in sizes[-1].items()}, dict(engine.metrics.reasons)
            of = f"{x['setup_host']:.0f} + {x['setup_tensors']:.0f} set-up of {setup.shapes} calls"
            print(
                f"{now - began:6.0f} s  host {x['host']:7.1f}  tensors {x['tensors']:7.1f}  reserved "
                f"{x['reserved']:7.1f}  other {x['other']:7.1f} MiB  ({of})  {sizes[-1]['graphs']} graphs of "
                f"{sizes[-1]['most']}  {ended}",
                flush=True,
            )
            if sizes[-1]["graphs"] > sizes[-1]["most"]:
                wrong.append(f"{sizes[-1]['graphs']} graphs are kept of {sizes[-1]['most']}")
        if wrong and exact and len(wrong) > 20:
            break
    sizes.append(sample(engine, setup, now - began))
    more = grown(sizes[first - 1] if first else sizes[-1], sizes[-1])
    rest = more["host"] + more["tensors"]
    if rest > args.growth:
        wrong.append(f"memory grew by {rest:.1f} MiB beside set-up")
    if live:
        wrong.append(f"{len(live)} requests never ended")
    data = {**vars(args), "grown_mib": more, "sizes": sizes, "wrong": wrong[:50], "engine": snapshot(engine)}
    reasons, moved = dict(engine.metrics.reasons), engine.metrics.preemptions
    print(
        f"memory grew by {rest:.1f} MiB ({more['host']:.1f} host, {more['tensors']:.1f} tensors) and by "
        f"{more['setup']:.1f} MiB of set-up; at most {sizes[-1]['most']} graphs are kept; {reasons}; "
        f"{moved} preemptions; {len(wrong)} faults"
    )
    for fault in wrong[:10]:
        print("FAULT", fault)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(data, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
