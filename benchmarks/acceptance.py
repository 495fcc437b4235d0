"""Accepted length of coupled, rejection and block verification, paired by prompt, with bootstrap intervals.

Every verifier answers the same prompts with the same seeds; whole prompts are resampled, with all their answers. Beside
that, every round of the rejection run is asked how many drafts rejection and block verification keep of it on average
over their own random numbers: the same rounds for both, so that a small difference shows.

python benchmarks/acceptance.py --prompts more.jsonl --limit 24 --seeds 2 --json benchmarks/acceptance_cpu.json
"""

import argparse
import json
import random
import time
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from selfspec import SelfSpecModel, options
from selfspec.draft import DraftTree
from selfspec.prompts import encode, read_sets
from selfspec.stats import Stats, total
from selfspec.verify import VERIFIERS, Accepted, Noise
from selfspec.verify.block import accept as accept_block
from selfspec.verify.rejection import accept, rejection


def interval(draws: list[float], level: float = 0.95) -> list[float]:
    """The middle `level` of a bootstrap's draws."""
    draws = sorted(draws)
    cut = int((1 - level) / 2 * len(draws))
    return [round(draws[cut], 4), round(draws[-1 - cut], 4)]


def compare(stats: dict[str, list[list[Stats]]], n: int = 4000) -> dict:
    """tau of every verifier and the differences between them.

    Args:
        stats: by verifier, a list per prompt of its answers'.
        n: bootstrap draws.
    """
    rng, prompts = random.Random(0), len(next(iter(stats.values())))
    sums = {v: [total(answers) for answers in rows] for v, rows in stats.items()}

    def taus(index: list[int]) -> dict[str, float]:
        return {v: sum(rows[i].tokens for i in index) / sum(rows[i].rounds for i in index) for v, rows in sums.items()}

    found = taus(list(range(prompts)))
    draws = [taus(rng.choices(range(prompts), k=prompts)) for _ in range(n)]
    out: dict = {v: {"tau": round(found[v], 4), "ci95": interval([d[v] for d in draws])} for v in stats}
    for b, a in combinations(stats, 2):
        out[f"{a} - {b}"] = {
            "difference": round(found[a] - found[b], 4),
            "ci95": interval([d[a] - d[b] for d in draws]),
        }
    for v, rows in sums.items():
        out[v]["tokens"], out[v]["rounds"] = sum(s.tokens for s in rows), sum(s.rounds for s in rows)
        out[v]["by_prompt"] = [[s.tokens, s.rounds] for s in rows]
    return out


class Expected:
    """Rejection verification that notes, round by round, what both verifiers keep on average."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tree: DraftTree, scores: Tensor, noise: Noise) -> Accepted:
        if tree.probs is not None:
            p, q, tokens = scores.double().softmax(-1), tree.probs, tree.tokens[:, 1:]
            token = accept(p, q, tokens).cumprod(1).sum(1)  # sum over i of P(kept >= i)
            refused = 1 - accept_block(p, q, tokens)
            joint = (1 - refused.flip(1).cumprod(1).flip(1)).sum(1)  # the last success counts
            self.rows.append((token, joint))
        return rejection(tree, scores, noise)

    def compare(self, n: int = 4000) -> dict:
        """Means over rounds, and the difference's interval (rounds of one batch are resampled together)."""
        rng, sums = random.Random(0), [(float(a.sum()), float(b.sum()), len(a)) for a, b in self.rows]
        gain = lambda rows: sum(b - a for a, b, _ in rows) / sum(k for *_, k in rows)  # noqa: E731
        rounds = sum(k for *_, k in sums)
        return {
            "rounds": rounds,
            "kept by rejection": round(sum(a for a, *_ in sums) / rounds, 4),
            "kept by block": round(sum(b for _, b, _ in sums) / rounds, 4),
            "difference": round(gain(sums), 4),
            "ci95": interval([gain(rng.choices(sums, k=len(sums))) for _ in range(n)]),
        }


def main() -> None:
    """Answers, compares, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--prompts", nargs="*", help="files; by default the built-in suite")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--verifiers", nargs="+", default=["coupled", "rejection", "block"])
    parser.add_argument("--seeds", type=int, default=2, help="answers a prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = SelfSpecModel.from_pretrained(
        args.model, args.adapter, dtype=getattr(torch, args.dtype), device=args.device
    )
    rows = [p for found in read_sets(args.prompts or None, args.limit).values() for p in found]
    ids = [encode(model.tokenizer, p.messages) for p in rows]
    head = {k: v for k, v in vars(args).items() if k != "json"} | options.setting(model)
    head["prompts"] = [p.id for p in rows]
    head["temperatures"] = {}
    for t in args.temperatures:
        stats: dict[str, list[list[Stats]]] = {v: [[] for _ in ids] for v in args.verifiers}
        VERIFIERS["rejection"] = expected = Expected()
        began = time.perf_counter()
        for at in range(0, len(ids), args.batch):
            part = range(at, min(at + args.batch, len(ids)))
            for verify in args.verifiers:
                for seed in range(args.seeds):
                    model.generate(
                        [ids[i] for i in part], do_sample=True, temperature=t, top_k=0, verify=verify,
                        seed=[1000 * seed + i for i in part], max_new_tokens=args.max_new_tokens,
                    )  # fmt: skip
                    for i, s in zip(part, model.request_stats, strict=True):
                        stats[verify][i].append(s)
            print(f"T={t}: {part.stop} of {len(ids)} prompts, {time.perf_counter() - began:.0f} s", flush=True)
        head["temperatures"][str(t)] = found = compare(stats)
        found["the same rounds"] = expected.compare()
        for name, row in found.items():
            print(f"T={t} {name}:", {k: v for k, v in row.items() if k != "by_prompt"}, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(head) + "\n")


if __name__ == "__main__":
    main()
