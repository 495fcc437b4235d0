"""Exact mode: share of texts that are token for token those of this engine's plain decoding at batch 1, and its cost.

python benchmarks/exact.py --prompts gsm8k.jsonl --prompts mt_bench.jsonl --json benchmarks/exact_h200.json
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers

from selfspec import SelfSpecModel, options, prompts
from selfspec.reference import answers
from selfspec.session import Request


def decode(model: SelfSpecModel, ids: list[list[int]], cap: int, mode: str, batch: int, nodes: int):
    """Texts, milliseconds per token and tau."""
    requests = [Request(p, cap) for p in ids]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in model.run(requests, model.plan(mode, None, nodes), slots=batch):
        pass
    torch.cuda.synchronize()
    seconds, made = time.perf_counter() - begin, sum(len(r.output) for r in requests)
    rounds = sum(r.stats.rounds for r in requests)
    return [r.output for r in requests], 1e3 * seconds / made, sum(r.stats.tokens for r in requests) / max(rounds, 1)


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=options.MODEL)
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL; by default the built-in suite")
    parser.add_argument("--limit", type=int, default=200, help="prompts in all")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--modes", default="ar,sequential,tree")
    parser.add_argument("--tree-nodes", type=int, default=31)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exact", default="yes,no", help="which engines: yes, no")
    parser.add_argument("--control", type=int, default=16, help="prompts of Hugging Face generate, batch 8 against 1")
    parser.add_argument("--control-tokens", type=int, default=128)
    parser.add_argument("--json")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    sets = prompts.read_sets(args.prompts, None)
    some = [p for rows in zip(*(s[: args.limit] for s in sets.values())) for p in rows][: args.limit]
    out: list[dict] = []
    facts: dict | None = None

    def note(row: dict) -> None:
        """Print a row and keep it, so that a run that is cut off leaves what it has."""
        out.append(row)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "first_difference"}
        print(shown, flush=True)
        if args.json:
            data = {"setting": facts, "max_new_tokens": args.max_new_tokens, "runs": out}
            Path(args.json).write_text(json.dumps(data, indent=1))

    for exact in [word == "yes" for word in args.exact.split(",")]:
        model = SelfSpecModel.from_pretrained(args.model, args.adapter, getattr(torch, args.dtype), "cuda", exact=exact)
        facts = facts or options.setting(model)
        print(model.kernels, flush=True)
        ids = [prompts.encode(model.tokenizer, p.messages) for p in some]
        truth: list[list[int]] = []
        for batch in map(int, args.batches.split(",")):
            for mode in args.modes.split(","):
                decode(model, ids[: 2 * batch], 24, mode, batch, args.tree_nodes)  # captures its graphs
                texts, ms, tau = decode(model, ids, args.max_new_tokens, mode, batch, args.tree_nodes)
                truth = truth or texts
                same = sum(a == b for a, b in zip(texts, truth, strict=True)) / len(ids)
                first = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), -1) for a, b in zip(texts, truth)]
                row = dict(exact=exact, mode=mode, batch=batch, prompts=len(ids), match=same, ms_per_token=ms, tau=tau)
                note(row | {"first_difference": [f for f in first if f >= 0][:20]})
    hf = model.model
    if args.control:
        some_ids = ids[: args.control]
        alone = [answers(hf, hf, [p], args.control_tokens)[0] for p in some_ids]
        parts = [some_ids[i : i + 8] for i in range(0, len(some_ids), 8)]
        eight = [t for part in parts for t in answers(hf, hf, part, args.control_tokens)]
        same = sum(a == b for a, b in zip(alone, eight, strict=True)) / len(alone)
        note(dict(exact=False, mode="hf", batch=8, prompts=len(alone), match=same, tokens=args.control_tokens))


if __name__ == "__main__":
    main()
