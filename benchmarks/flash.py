"""flash-attn beside our Triton kernel, torch's attention and FlexAttention: prefill, attention alone, clean passes.

python benchmarks/flash.py --json flash.json          # a minute on one GPU, and as much for compilation

Random weights of SmolLM2-135M's shape: what is computed is what prefill and training compute. Backends take turns, and
what cannot run is a row that says why. The file is written anew after every row.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from train_speed import answers

from selfspec import rows
from selfspec.attention import AttentionRule, backend
from selfspec.backbone import Backbone
from selfspec.cache import PrefixCache
from selfspec.clock import Clock
from selfspec.joining import CHUNK
from selfspec.machine import device_name, versions
from selfspec.model import SelfSpecModel
from selfspec.plan.latency import captured
from selfspec.rows import RowLayout
from selfspec.shapes import random_model
from selfspec.training.pack import Packer
from selfspec.training.step import compile_layers, run_clean

INSIDE = 20  # attention calls in one graph
HEADS = {"smollm2-135m": (9, 3, 64), "qwen3-8b": (32, 8, 128)}  # query heads, key heads, head size


class Table:
    """Rows on their way to a screen and a file."""

    def __init__(self, path: str | None, head: dict):
        self.path, self.head, self.rows = path, head, []

    def add(self, part: str, where: dict, found: dict) -> None:
        """One row."""
        self.rows.append({"part": part, **where, **found})
        print(part, *where.values(), *(f"{k}={v}" for k, v in found.items()), flush=True)
        if self.path:
            Path(self.path).write_text(json.dumps(self.head | {"rows": self.rows}, indent=1) + "\n")


def graph(run, device):
    """One replay of the run on a GPU, the run itself elsewhere."""
    return captured(run) if device.type == "cuda" else run


def seconds(run, device) -> float:
    """Of one run, on the device's clock."""
    clock = Clock(device)
    run()
    clock.lap("run")
    return clock.read()["run"]


def compare(table: Table, part: str, where: dict, makers: dict, device, repeats: int, inside: int = 1) -> None:
    """Rows of several backends whose runs take turns.

    Args:
        table: where the rows go.
        part: of the benchmark.
        where: what is measured.
        makers: by backend, a function that sets up and returns `(run, facts)`.
        device: of the clock.
        repeats: timed runs of each.
        inside: calls that one run holds.
    """
    runs, found, times = {}, {}, {}
    for name, make in makers.items():
        began = time.perf_counter()
        try:
            runs[name], found[name] = make()
            runs[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found[name] |= {"setup_s": round(time.perf_counter() - began, 2)}
            times[name] = []
        except Exception as error:  # the other backends are still worth their time
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    for _ in range(repeats):
        for name in times:
            times[name].append(1e3 * seconds(runs[name], device) / inside)
    for name, facts in found.items():
        if name in times:
            t = times[name]
            facts = {"ms": round(statistics.median(t), 4), "low": round(min(t), 4), "high": round(max(t), 4)} | facts
        table.add(part, {**where, "backend": name}, facts)
    runs.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attention(name: str, shape: str, n: int, context: int, chunk: int, device, dtype):
    """The last chunk of prompts of so many tokens: attention of one layer, and its error against float64."""
    h, hkv, d = HEADS[shape]
    chunk = min(chunk, context)
    generator = torch.Generator(device).manual_seed(context)
    make = dict(generator=generator, device=device, dtype=dtype)
    q = torch.randn(n, chunk, h, d, **make).transpose(1, 2)
    k, v = torch.randn(2, n, hkv, context + 64, d, **make)[..., :context, :]
    layout = rows.chain(torch.full((n,), context - chunk, device=device), chunk)
    rule = AttentionRule(layout, context, name).prepare([None])
    call = partial(rule.run, q, k, v, None, d**-0.5, None, None)
    alone = AttentionRule(rows.chain(layout.start[:1], chunk), context)  # float64 scores of all would be many gigabytes
    exact = alone.run(*(x[:1].double() for x in (q, k, v)), None, d**-0.5, None, None)
    error = float((call()[:1] - exact).norm() / exact.norm())

    def run() -> None:
        for _ in range(INSIDE):
            call()

    return graph(run, device), {"error": round(error, 6)}


def prefill(body: Backbone, n: int, context: int, chunk: int):
    """The forward of the last chunk of prompts of so many tokens, as a graph."""
    device, chunk = body.device, min(chunk, context)
    cache = body.new_cache(n, context, chunk)
    cache.lengths = [context - chunk] * n
    ids = torch.randint(body.vocab_size, (n, chunk), device=device)
    layout = rows.chain(torch.full((n,), context - chunk, device=device), chunk)
    return graph(lambda: body(layout, cache, ids), device), {"forward_rows": n * chunk}


def first_token(model, name: str, n: int, context: int):
    """Prompts of so many tokens in, the first token of each out, the engine's whole way."""
    body = SelfSpecModel(model, attention=name)

    def run() -> None:  # prompts are new each time: the engine still holds the last ones
        prompts = torch.randint(10, body.backbone.vocab_size, (n, context - 8), device=model.device)
        body.generate(prompts, max_new_tokens=1, mode="ar", do_sample=False, pad_token_id=0)

    for _ in range(2):  # graphs are captured in the second
        run()
    return run, {}


def clean_pass(model, name: str, n: int, length: int, compiled: bool):
    """Packed documents through the untouched model, as a training step runs them."""
    body = Backbone(model, backend=name, verify=False)
    pack = Packer(answers(400, body.vocab_size), length, n).batch(0).to(body.device)
    if compiled:
        compile_layers(body)
    run = partial(run_clean, body, pack)
    for _ in range(3):
        run()
    return run, {"documents": int(((pack.positions == 0) & (pack.segments >= 0)).sum())}


def error_of_clean_pass(model, name: str, n: int, length: int) -> float:
    """Relative error of the last hidden states against the reference backend's."""
    pack = Packer(answers(400, model.config.vocab_size), length, n).batch(0).to(model.device)
    start = torch.zeros(n, dtype=torch.long, device=model.device)
    layout = RowLayout(pack.positions, start, length, segments=pack.segments)
    wanted, ours = (
        Backbone(model, backend=b, verify=False)(layout, PrefixCache(model.config.num_hidden_layers), pack.tokens).clean
        for b in ("sdpa", name)
    )
    real = (pack.segments >= 0)[..., None]
    return float(((ours - wanted) * real).float().norm() / (wanted * real).float().norm())


@torch.no_grad()
def main() -> None:
    """Measures, prints rows, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="attention,prefill,first,clean")
    parser.add_argument(
        "--backends", default="triton,sdpa,flash", help="of all parts but clean, which has flex and flash"
    )
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--pack", default="12x1024", help="rows and length of the clean pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plain", action="store_true", help="clean passes of layers that are not compiled")
    parser.add_argument("--tiny", action="store_true", help="two layers in float32 on a CPU, to try this script")
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = random_model("smollm2-135m", dtype, device)
    if args.tiny:
        model.config.num_hidden_layers, model.model.layers = 2, model.model.layers[:2]
    head = {"machine": device_name(device), **versions()}
    table = Table(args.json, head)
    began, names = time.perf_counter(), []
    for name in args.backends.split(","):
        try:
            at = time.perf_counter()
            backend(name)
            names.append(name)
            head[f"import_{name}_s"] = round(time.perf_counter() - at, 2)
        except ValueError as error:
            table.add("import", {"backend": name}, {"error": str(error)})
    grid = list(itertools.product(*([int(x) for x in getattr(args, k).split(",")] for k in ("requests", "contexts"))))
    parts, repeats = args.parts.split(","), args.repeats
    if "attention" in parts:
        for shape, (n, context) in itertools.product(HEADS, grid):
            makers = {b: partial(attention, b, shape, n, context, CHUNK, device, dtype) for b in names}
            where = {"shape": shape, "requests": n, "context": context}
            compare(table, "attention", where, makers, device, repeats, INSIDE)
    if "prefill" in parts:
        bodies = {b: Backbone(model, backend=b, verify=False) for b in names}
        head["kernels"] = {b: body.fuse() for b, body in bodies.items()}  # the same layers around each attention
        for n, context in grid:
            makers = {b: partial(prefill, body, n, context, CHUNK) for b, body in bodies.items()}
            compare(table, "prefill", {"requests": n, "context": context}, makers, device, repeats)
    if "first" in parts:
        for n, context in grid:
            makers = {b: partial(first_token, model, b, n, context) for b in names if b != "sdpa"}
            compare(table, "first token", {"requests": n, "context": context}, makers, device, min(repeats, 5))
    if "clean" in parts:
        n, length = map(int, args.pack.split("x"))
        makers = {
            b: partial(clean_pass, model, b, n, length, not args.plain)
            for b in ("flex", *(b for b in names if b == "flash"))
        }
        where = {"rows": n, "length": length, "compiled": not args.plain}
        compare(table, "clean pass", where, makers, device, repeats)
        if "flash" in names:
            error = error_of_clean_pass(model, "flash", n, length)
            table.add("clean pass", where | {"backend": "flash"}, {"error": round(error, 6)})
    head["seconds"] = round(time.perf_counter() - began, 1)
    table.add("done", {}, {"seconds": head["seconds"]})


if __name__ == "__main__":
    main()
