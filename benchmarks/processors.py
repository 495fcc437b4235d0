"""What logits processors cost: time per token with all of them on, by plain decoding and by speculation, at batch 1.

python benchmarks/processors.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --json processors.json

A speed-up is tau (tokens a round) times the ratio of a plain step to a round, and processors touch both: they take
time, and they make another text, which may be harder to draft. So what they cost is told in two ways, each as the share
of a mode's greedy speed-up over `ar` that is left where both decode under the same arguments:

  kept           after all that they cost: speed-up of the kind / speed-up of "greedy"
  kept_by_round  after what they cost in time alone: kept * tau of "greedy" / tau of the kind

The kinds named "faint" have every processor on at strengths that leave nearly every token as greedy decoding has it, so
that what they cost is time alone; of the others kept_by_round tells that. `tau_error` is tau's standard error over
prompts: a difference of kept below kept * tau_error / tau, of either kind, says nothing. Modes take turns prompt by
prompt; the first repeat, in which graphs are captured, is not counted.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from selfspec import SelfSpecModel, options, prompts

CUTS = dict(do_sample=True, temperature=0.7, top_k=50, top_p=0.95, min_p=0.02, typical_p=0.98)
PENALTIES = dict(
    repetition_penalty=1.05, presence_penalty=0.1, frequency_penalty=0.1, no_repeat_ngram_size=8, min_new_tokens=16,
    bad_words_ids=[[11, 12, 13]], suppress_tokens=[7, 9], exponential_decay_length_penalty=(400, 1.01),
)  # fmt: skip
FAINT = dict(
    repetition_penalty=1.0001, presence_penalty=1e-4, frequency_penalty=1e-4, no_repeat_ngram_size=64, min_new_tokens=1,
    bad_words_ids=[[11, 12, 13]], suppress_tokens=[7, 9], exponential_decay_length_penalty=(400, 1.0001),
)  # fmt: skip
KINDS = {
    "greedy": dict(do_sample=False),
    "faint penalties": dict(do_sample=False, **FAINT),
    "faint, everything": CUTS | FAINT | dict(temperature=0.01),
    "greedy, penalties": dict(do_sample=False, **PENALTIES),
    "sampled": dict(do_sample=True, temperature=0.7, top_k=0),
    "sampled, cuts": CUTS,
    "sampled, everything": CUTS | PENALTIES,
}


@dataclass
class Sum:
    """Of a mode's answers under one kind: by repeat seconds and tokens, by prompt tokens and rounds."""

    seconds: list[float]
    made: list[int]
    told: dict[int, tuple[int, int]] = field(default_factory=dict)

    def row(self, kind: str, mode: str) -> dict:
        """Its figures, but for those that compare."""
        times = [1e3 * s / m for s, m in zip(self.seconds[1:], self.made[1:], strict=True)]
        tokens, rounds = map(sum, zip(*self.told.values(), strict=True))
        tau, n = tokens / rounds, len(self.told)
        off = math.sqrt(sum((t - tau * r) ** 2 for t, r in self.told.values()) * n / max(n - 1, 1)) / rounds
        ms = statistics.median(times)
        row = {"kind": kind, "mode": mode, "ms_per_token": ms, "low": min(times), "high": max(times)}
        return row | {"ms_per_round": ms * tau, "tau": tau, "tau_error": off, "rounds": rounds, "tokens": tokens}


def measured(model: SelfSpecModel, ids: list[list[int]], settings: dict, modes: list[str], args) -> dict[str, Sum]:
    """All answers of one kind. The first repeat's times are there as well."""
    sums = {mode: Sum([], []) for mode in modes}
    for _ in range(args.repeats + 1):
        for one in sums.values():
            one.seconds.append(0.0)
            one.made.append(0)
        for i, prompt in enumerate(ids):
            how = {"seed": i} if settings["do_sample"] else {}
            for mode, one in sums.items():
                begin = time.perf_counter()
                text = model.generate([prompt], mode=mode, max_new_tokens=args.max_new_tokens, **settings, **how)
                one.seconds[-1] += time.perf_counter() - begin - model.stats.seconds["prefill"]
                one.made[-1] += text.shape[1] - len(prompt) - 1
                one.told[i] = model.stats.tokens, model.stats.rounds
    return sums


def compared(row: dict, rows: list[dict]) -> dict:
    """Its speed-up over `ar` of the same kind, and its shares of greedy decoding's. rows: up to this one"""
    plain = next(r for r in rows if (r["kind"], r["mode"]) == (row["kind"], "ar"))
    greedy = next(r for r in rows if (r["kind"], r["mode"]) == ("greedy", row["mode"]))
    row["speedup"] = plain["ms_per_token"] / row["ms_per_token"]
    row["kept"] = row["speedup"] / greedy["speedup"]
    row["kept_by_round"] = row["kept"] * greedy["tau"] / row["tau"]
    return row


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=options.MODEL)
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", nargs="+", help="JSONL files, all of them read; by default the built-in suite")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--modes", default="ar,sequential", help="names with commas, such as ar,sequential,auto")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="beside greedy, which always runs")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model = SelfSpecModel.from_pretrained(
        args.model, args.adapter, dtype=getattr(torch, args.dtype), device=args.device
    )
    sets = prompts.read_sets(args.prompts, args.limit)
    ids = [prompts.encode(model.tokenizer, p.messages) for rows in sets.values() for p in rows]
    modes = list(dict.fromkeys(["ar", *args.modes.split(",")]))
    rows: list[dict] = []
    for kind in (k for k in KINDS if k == "greedy" or k in args.kinds):
        for mode, one in measured(model, ids, KINDS[kind], modes, args).items():
            rows.append(one.row(kind, mode))
            compared(rows[-1], rows)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
            if args.json:  # after every row: a run that is cut off leaves what it has
                head = {"setting": options.setting(model), "settings": KINDS, "prompts": len(ids), "sets": [*sets]}
                Path(args.json).write_text(json.dumps(head | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
