"""Tokens a second over mixed prompts: our modes against our own plain decoding and Hugging Face's generate.

python benchmarks/throughput.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --device cuda --dtype bfloat16 \
    --modes ar,sequential,tree --slots 1,4,16,64,128,256 --json benchmarks/throughput_h200.json

Prompts are taken in turn from all files, with caps that are mixed too, and repeated until there are enough: `--count`
of them at `--full` slots and more, fewer below, so that each setting takes about as long. As some come twice, no keys
and values are taken from prompts before. Hugging Face decodes them sorted by length in static batches of the same size,
each until its longest answer is whole; its tokens are counted up to each answer's own end. It is slow, so it may get
fewer of the same prompts (`--hf-count`): rates are compared. Every setting runs once on some prompts first (`--warm`),
off the clock: what is compiled and captured then is there later, as in a server. What still is within the measurement
is told: `phase_seconds` "rest" are rounds that were not replayed, `idle_seconds` what no round or prefill accounts for,
`captured` the graphs. The GPU's busy share is sampled by NVML, as nvidia-smi shows it, ten times a second; it says for
how much of the time some kernel ran.
"""

import argparse
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from selfspec import SelfSpecModel, options, prompts
from selfspec.reference import eos_ids, left_padded, until_eos
from selfspec.serving.engine import Engine
from selfspec.serving.metrics import snapshot
from selfspec.session import Request

Asked = list[tuple[list[int], int]]  # prompt and cap


class Busy:
    """Samples how busy the GPU is, in a thread."""

    def __init__(self, device: torch.device):
        self.shares: list[float] = []
        self.device, self.stop = device, threading.Event()

    def __enter__(self) -> "Busy":
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _sample(self) -> None:
        while not self.stop.wait(0.1):
            try:
                self.shares.append(torch.cuda.utilization(self.device) / 100)
            except Exception:  # no NVML here: the share stays unknown
                return

    @property
    def share(self) -> float | None:
        return sum(self.shares) / len(self.shares) if self.shares else None


@contextmanager
def measured(device: torch.device, out: dict[str, Any]):
    """Seconds, peak memory and busy share of what runs inside."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    with Busy(device) as busy:
        yield
        if cuda:
            torch.cuda.synchronize(device)
    out["seconds"] = time.perf_counter() - began
    out["gpu_busy"] = busy.share if cuda else None
    out["peak_memory"] = torch.cuda.max_memory_allocated(device) if cuda else None


def captures(engine: Engine) -> int:
    """Graphs that the engine's lanes have captured."""
    return sum(lane.open.graphs.captures for lane in engine.lanes.values())


def ours(model: SelfSpecModel, mode: str, slots: int, memory: int | None) -> Callable[[Asked, dict], list[list[int]]]:
    """One engine in one mode, kept from the warm-up to the measurement with all that it captured."""
    plan, eos = model.policy(mode), eos_ids(model.model)
    engine = Engine(model, plan, slots, memory, reuse=False)

    def run(asked: Asked, out: dict[str, Any]) -> list[list[int]]:
        before, captured = engine.metrics.stats, captures(engine)
        requests = [Request(p, cap, eos) for p, cap in asked]
        with measured(model.backbone.device, out):
            for request in requests:
                engine.add(request)
            for _ in engine.run():
                assert engine.reserved <= engine.memory, "over the memory budget"
        after = engine.metrics.stats
        rounds = after.rounds - before.rounds
        out["tau"] = (after.tokens - before.tokens) / rounds if rounds else 0.0
        out["phase_seconds"] = {k: s - before.seconds[k] for k, s in after.seconds.items()}
        out["idle_seconds"] = out["seconds"] - sum(out["phase_seconds"].values())
        out["captured"] = captures(engine) - captured
        out["engine"] = snapshot(engine)
        return [r.output for r in requests]

    return run


def theirs(model: SelfSpecModel, slots: int) -> Callable[[Asked, dict], list[list[int]]]:
    """Hugging Face's generate in static batches, the prompts sorted by length."""
    eos, pad = eos_ids(model.model), min(eos_ids(model.model), default=0)

    @torch.no_grad()
    def run(asked: Asked, out: dict[str, Any]) -> list[list[int]]:
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i][0]), asked[i][1]))
        answers: list[list[int]] = [[] for _ in asked]
        with measured(model.backbone.device, out):
            for start in range(0, len(order), slots):
                part = order[start : start + slots]
                inputs = left_padded([asked[i][0] for i in part], pad, model.backbone.device)
                cap = max(asked[i][1] for i in part)
                text = model.model.generate(**inputs, do_sample=False, max_new_tokens=cap, pad_token_id=pad)  # type: ignore[operator]
                for i, row in zip(part, text[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                    answers[i] = until_eos(row, eos)[: asked[i][1]]
        return answers

    return run


def main() -> None:
    """Measures, prints a table, writes JSON after every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--prompts", nargs="*", help="by default the built-in suite")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--modes", default="ar,sequential")
    parser.add_argument("--slots", default="1,4,16,64,128,256")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--warm", type=int, default=500, help="prompts before; two per slot at least, all at most")
    parser.add_argument("--full", type=int, default=64, help="slots from which on all prompts are used")
    parser.add_argument("--caps", default="32,64,128,256")
    parser.add_argument("--memory", type=float, help="GiB of keys and values")
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--hf-count", type=int, help="prompts for Hugging Face; by default as many as for the others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    model = SelfSpecModel.from_pretrained(
        args.model, options.adapters(args.adapter), dtype=getattr(torch, args.dtype), device=args.device
    )
    caps, draw = [int(c) for c in args.caps.split(",")], random.Random(args.seed)
    files = prompts.read_sets(args.prompts, None).values()
    sets = [[prompts.encode(model.tokenizer, p.messages) for p in file] for file in files]
    mixed = [p for row in itertools.zip_longest(*sets) for p in row if p is not None]
    asked: Asked = [(p, draw.choice(caps)) for p in itertools.islice(itertools.cycle(mixed), args.count)]
    draw.shuffle(asked)
    memory = None if args.memory is None else int(args.memory * 2**30)
    data: dict[str, Any] = {"settings": vars(args), **options.setting(model), "results": []}
    print(f"{'slots':>5} {'prompts':>7} {'mode':14} {'tokens/s':>9} {'x ar':>6} {'x hf':>6} ", end="")
    print(f"{'tau':>5} {'busy':>5} {'peak MiB':>9} {'rest s':>6} {'idle s':>6} {'captured':>8}")
    for slots in [int(s) for s in args.slots.split(",")]:
        part = asked[: max(4 * slots, args.count * min(slots, args.full) // args.full)][: args.count]
        rates: dict[str, float] = {}
        answers: dict[str, list[list[int]]] = {}
        for name in [*(() if args.no_hf else ("hf",)), *args.modes.split(",")]:
            run = theirs(model, slots) if name == "hf" else ours(model, name, slots, memory)
            few = len(part) if name != "hf" or args.hf_count is None else max(slots, args.hf_count)
            mine = part[:few]
            run(mine[: slots if name == "hf" else max(2 * slots, args.warm * len(part) // len(asked))], {})
            out: dict[str, Any] = {"slots": slots, "prompts": len(mine), "mode": name}
            answers[name] = run(mine, out)
            out["tokens"] = sum(map(len, answers[name]))
            rates[name] = out["tokens_per_second"] = out["tokens"] / out["seconds"]
            for base in ("ar", "hf"):
                out[f"speedup_over_{base}"] = rates[name] / rates[base] if base in rates else None
                if base in answers:
                    same = [a == b for a, b in zip(answers[name], answers[base])]
                    out[f"same_as_{base}"] = sum(same) / len(same)
            del run  # its engine's memory
            data["results"].append(out)
            shown = [out[k] if out.get(k) is not None else float("nan") for k in ("speedup_over_ar", "speedup_over_hf")]
            shown += [out.get("tau", float("nan")), out["gpu_busy"] if out["gpu_busy"] is not None else float("nan")]
            peak = (out["peak_memory"] or 0) / 2**20
            print(
                f"{slots:5} {len(mine):7} {name:14} {rates[name]:9.1f} {shown[0]:6.2f} {shown[1]:6.2f} {shown[2]:5.2f} "
                f"{shown[3]:5.2f} {peak:9.0f} {out.get('phase_seconds', {}).get('rest', 0.0):6.2f} "
                f"{out.get('idle_seconds', 0.0):6.2f} {out.get('captured', 0):8}",
                flush=True,
            )
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(data, file, indent=1)


if __name__ == "__main__":
    main()
