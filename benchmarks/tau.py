"""tau by really decoding, and teacher-forced on the same answers; the two have to agree.

python benchmarks/tau.py --model smollm2-135m-instruct --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl \
    --limit 40 --max-new-tokens 256 --dtype bfloat16 --device cuda --json benchmarks/tau.json
"""

import argparse
import json
import time
from pathlib import Path

import torch

from selfspec import SelfSpecModel
from selfspec.backbone import Backbone
from selfspec.prompts import encode, read
from selfspec.session import Request
from selfspec.stats import mean_tau, total
from selfspec.training.data import Answer
from selfspec.training.evaluate import Batching, evaluate
from selfspec.training.head import Head


def main() -> None:
    """Decodes, replays, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--mode", default="sequential")
    parser.add_argument("--json")
    args = parser.parse_args()
    engine = SelfSpecModel.from_pretrained(
        args.model, args.adapter, dtype=getattr(torch, args.dtype), device=args.device
    )
    assert engine.path is not None, "no adapter"
    packed = Backbone(engine.model, engine.path, "sdpa")  # what decodes takes no packed documents
    eos = engine.model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [eos])
    out = {}
    for file in args.prompts:
        prompts = [encode(engine.tokenizer, p.messages) for p in read(file, limit=args.limit)]
        requests = [Request(p, args.max_new_tokens, ends) for p in prompts]
        began = time.perf_counter()
        for _ in engine.run(requests, engine.plan(args.mode), slots=args.batch):
            pass
        seconds = time.perf_counter() - began
        stats = total([r.stats for r in requests])
        answers = [Answer(str(i), r.prompt, r.output) for i, r in enumerate(requests)]
        length = max(len(a) for a in answers) + 1
        forced = evaluate(packed, Head(packed, False), answers, Batching(length, 4, 64))["known"]
        out[Path(file).stem] = row = {
            "tau": stats.tau,
            "mean_tau": mean_tau([r.stats for r in requests]),
            "tpf": stats.tpf,
            "teacher_forced_tau": forced["tau"],
            "rounds": stats.rounds,
            "tokens": stats.tokens,
            "accepted": dict(sorted(stats.accepted.items())),
            "seconds": round(seconds, 2),
        }
        print(Path(file).stem, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if args.json:
        head = {k: v for k, v in vars(args).items() if k not in ("prompts", "json")}
        Path(args.json).write_text(json.dumps(head | {"torch": torch.__version__, "sets": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
