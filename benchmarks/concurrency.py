"""Every mode and the planner at 1, 2, 4, ... requests at a time: is auto the best of them everywhere?

python benchmarks/concurrency.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --device cuda --seconds 150 \
    --json benchmarks/concurrency_h200.json

Slots are kept full from a queue of all files' prompts in turn. Entrants take turns on the same texts; the best fixed
one is chosen on the even repeats and compared on the odd ones. The report also holds what `benchmarks/foretell.py`
needs: the latency table, acceptance, and what rounds took, recorded off the clock. Written after every point; points
are measured in an order that leaves a coarse picture if time is up early.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from typing import Any

import torch

from selfspec import SelfSpecModel, options, prompts
from selfspec.arena import AUTO, Arena, Run, contest, data_of, verdict

MODES = ("sequential/b=4", "sequential/b=8", "sequential", "tree/nodes=15", "tree/nodes=31", "tree/nodes=63")
MORE = ("overlap/b=4", "overlap/b=8/groups=4", "loop")  # where the adapter was trained for them


def entrants(model: SelfSpecModel, asked: str | None) -> list[str]:
    """Names of what runs: as asked, or all of the usual that the adapters can do. Plain decoding comes first."""
    if asked:
        return ["ar", *(n for n in asked.split(",") if n != "ar")]
    found = ["ar"]
    for i, name in itertools.product(range(len(model.bodies)), (*MODES, *MORE)):
        try:
            model.plan(f"{name}@{i}")
        except ValueError:
            continue
        found.append(f"{name}@{i}" if i else name)
    return [*found, AUTO]


def queue_of(model: SelfSpecModel, files: list[str] | None, longest: int) -> list[list[int]]:
    """All files' prompts in turn, but for long ones."""
    sets = prompts.read_sets(files, None).values()
    ids = [[prompts.encode(model.tokenizer, p.messages) for p in rows] for rows in sets]
    mixed = [p for row in itertools.zip_longest(*ids) for p in row if p is not None and len(p) <= longest]
    if not mixed:
        raise SystemExit(f"no prompt has {longest} tokens or fewer")
    return mixed


def line(name: str, runs: list[Run], ratio: float | None) -> str:
    """An entrant's figures for a person."""
    if not runs:
        return f"{name:24} no time"
    cold, plans = sum(r.cold for r in runs), sum((r.plans for r in runs), Counter[str]())
    rate, decoding, each = (statistics.median(getattr(r, k) for r in runs) for k in ("rate", "decode_rate", "each"))
    text = f"{name:24} {rate:9.1f} {decoding:9.1f} {each:8.1f} "
    text += f"{'' if ratio is None else format(ratio, '.3f'):>6}" + (f"  {cold} cold rounds" if cold else "")
    return text + (f"  {dict(plans.most_common(3))}" if len(plans) > 1 else "")


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that everything measured in an arena has. defaults: of slots, tokens and repeats."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default="auto", help="one, or several with commas between them")
    parser.add_argument("--prompts", nargs="*", help="by default the built-in suite")
    parser.add_argument("--longest", type=int, default=128, help="tokens; longer prompts are left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", help="in this order")
    parser.add_argument("--cap", type=int, nargs=2, default=(32, 192), help="new tokens at least and at most")
    parser.add_argument("--tokens", type=int, help="of a run, for each slot")
    parser.add_argument("--least", type=int, default=512, help="tokens of a run")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins later")
    parser.add_argument("--json")
    parser.set_defaults(**defaults)
    return parser


def loaded(args: argparse.Namespace) -> SelfSpecModel:
    """The model with its adapters."""
    exact = getattr(args, "exact", False)
    dtype = getattr(torch, args.dtype)
    return SelfSpecModel.from_pretrained(args.model, options.adapters(args.adapter), dtype, args.device, exact=exact)


def main() -> None:
    """Measures, prints a table, writes JSON after every point."""
    # a run lasts several mean answers
    parser = parser_of(__doc__, slots="1,32,8,128,2,4,16,64", tokens=256, repeats=4)
    parser.add_argument("--entrants", help="names as in selfspec.plan.named, and auto")
    args = parser.parse_args()
    began = time.perf_counter()
    model = loaded(args)
    who, sizes = entrants(model, args.entrants), [int(s) for s in args.slots.split(",")]
    arena = Arena(model, who, queue_of(model, args.prompts, args.longest), max(sizes), tuple(args.cap))
    data: dict[str, Any] = {"settings": vars(args), "names": who, **options.setting(model), "points": []}
    print(
        f"ready after {time.perf_counter() - began:.1f} s; tokens/s in all, decoding alone, each; ratio to ar",
        flush=True,
    )

    def late() -> bool:
        return time.perf_counter() - began > args.seconds

    for slots in sizes:
        tokens = max(args.least, args.tokens * slots)
        runs = [] if late() else list(contest(arena, who, slots, tokens, args.repeats, args.warm, late))
        if not runs:
            break
        found = verdict(runs)
        data["points"].append(
            {
                "slots": slots,
                **found,
                "decoding": verdict(runs, lambda r: r.decode_rate),
                "runs": [data_of(r) for r in runs],
            }
        )
        data["record"] = arena.recorded().data()
        print(f"\n{slots} at a time, {tokens} tokens a run, {len(runs)} runs, {time.perf_counter() - began:.0f} s")
        for name in who:
            print(line(name, [r for r in runs if r.name == name], found["over_ar"].get(name)))
        if AUTO in who:
            of_best, of_ar = found["auto_over_best"], found["auto_over_ar"]
            print(f"auto: {of_best:.3f} of {found['best']}, {of_ar:.3f} of ar", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(data, file)


if __name__ == "__main__":
    main()
