"""What logits processors cost: time per token with all of them on, by plain decoding and by speculation, at batch 1.

python benchmarks/processors.py --json benchmarks/processors_h200.json

A speed-up is tau times the ratio of a plain step to a round, and processors touch both: they take time, and they make
another text, which may be harder to draft. The kinds named "faint" have every processor on at strengths that leave
nearly every token as greedy decoding has it, so that what they cost is time alone; `kept` says how much of greedy
decoding's speed-up is left, `kept_by_round` the same at greedy decoding's tau.
"""

import argparse
import json
import statistics
import time
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


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=options.MODEL)
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=Path, action="append")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--modes", default="ar,sequential")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model = SelfSpecModel.from_pretrained(
        args.model, args.adapter, dtype=getattr(torch, args.dtype), device=args.device
    )
    rows = next(iter(prompts.read_sets(args.prompts, args.limit).values()))
    ids = [prompts.encode(model.tokenizer, p.messages) for p in rows]
    out: list[dict] = []
    for name, settings in KINDS.items():
        times: dict[str, list[float]] = {}
        taus: dict[str, float] = {}
        for repeat in range(args.repeats + 1):  # the first captures
            for mode in args.modes.split(","):
                spent, made, rounds, emitted = 0.0, 0, 0, 0
                for i, prompt in enumerate(ids):
                    how = {} if not settings["do_sample"] else {"seed": i}
                    begin = time.perf_counter()
                    text = model.generate(
                        [prompt], mode=mode, max_new_tokens=args.max_new_tokens, **settings, **how
                    )  # fmt: skip
                    spent += time.perf_counter() - begin - model.stats.seconds["prefill"]
                    made += text.shape[1] - len(prompt) - 1
                    rounds, emitted = rounds + model.stats.rounds, emitted + model.stats.tokens
                if repeat:
                    times.setdefault(mode, []).append(1e3 * spent / made)
                taus[mode] = emitted / rounds
        ms = {m: statistics.median(t) for m, t in times.items()}
        base = ms.get("ar", float("nan"))
        for mode, t in times.items():
            row = dict(kind=name, mode=mode, ms_per_token=ms[mode], low=min(t), high=max(t), tau=taus[mode])
            row["speedup"] = base / ms[mode]
            greedy = next((r for r in out if r["mode"] == mode), row)
            row["kept"] = row["speedup"] / greedy["speedup"]
            row["kept_by_round"] = row["kept"] * greedy["tau"] / row["tau"]
            out.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in out[-1].items()}, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"setting": options.setting(model), "settings": KINDS, "rows": out}, file, indent=1)


if __name__ == "__main__":
    main()
