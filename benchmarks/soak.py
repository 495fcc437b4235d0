"""Random arrivals and cancellations for minutes: no memory growth, no stuck request, no wrong text.

python benchmarks/soak.py --minutes 30                                   # a tiny random model on the CPU
python benchmarks/soak.py --minutes 8 --device cuda --model smollm2-135m-instruct --dtype bfloat16 --json soak.json

Ends with exit code 1 if a request got stuck, if memory grew by more than --growth MiB between the end of the first
fifth and the end, if the budget was exceeded, or (in float32 and float64) if a finished answer is not what the same
prompt got before.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import SelfSpecModel
from selfspec.adapters import MaskPathConfig, MaskPathModel
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


def memory(device: torch.device) -> int:
    """Bytes that this process holds: on the GPU and off it."""
    gc.collect()
    used = psutil.Process().memory_info().rss
    return used + (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


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
    shown, first, ends, sizes = began, None, began + 60 * args.minutes, []
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
            sizes.append((round(now - began), memory(device)))
            if first is None and now - began > 12 * args.minutes:
                first = sizes[-1][1]
            ended = Counter(engine.metrics.reasons)
            print(f"{now - began:6.0f} s  {sizes[-1][1] / 2**20:8.1f} MiB  {dict(ended)}", flush=True)
        if wrong and exact and len(wrong) > 20:
            break
    grown = (memory(device) - first) / 2**20 if first else 0.0
    if grown > args.growth:
        wrong.append(f"memory grew by {grown:.1f} MiB")
    if live:
        wrong.append(f"{len(live)} requests never ended")
    data = {**vars(args), "grown_mib": grown, "sizes": sizes, "wrong": wrong[:50], "engine": snapshot(engine)}
    reasons, moved = dict(engine.metrics.reasons), engine.metrics.preemptions
    print(f"memory grew by {grown:.1f} MiB; {reasons}; {moved} preemptions; {len(wrong)} faults")
    for fault in wrong[:10]:
        print("FAULT", fault)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(data, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
