"""What each part is worth: trees, groups, calibrator, branches, loops, length rules, at 1, 8 and 64 requests at a time.

python benchmarks/ablation.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --device cuda --seconds 150 \
    --json benchmarks/ablation_h200.json --markdown ablation.md

Runs as `benchmarks/concurrency.py` does. A row's figures are its speed-ups over plain decoding, prompts included; it
wins where it is the fastest of its kind, and one that is nowhere faster than its kind's plainest by 1 % says that it
never wins. What the adapters were not trained for is left out and named.
"""

import json
import time
from operator import attrgetter
from typing import Any

from concurrency import loaded, parser_of, queue_of

from selfspec import SelfSpecModel, options
from selfspec.arena import Arena, Run, contest, data_of, policy_of, verdict

# kind -> names; the first of each is what the others have to beat
KINDS = {
    "trees": ("sequential", "tree/nodes=15", "tree/nodes=63", "tree/nodes=255"),
    "tree rules": (
        "tree/nodes=63",
        "tree/nodes=63/rule=caddtree",
        "tree/nodes=63/rule=bastion",
        "tree/nodes=63/rule=taps",
        "tree/nodes=63/rule=opt-tree",
    ),
    "groups": ("sequential/b=8", "overlap/b=8/groups=1", "overlap/b=8/groups=2", "overlap/b=8/groups=4", "overlap/b=8"),
    "branches": ("overlap/b=8/groups=4", "overlap/b=8/groups=branches"),
    "overlapped trees": ("tree/nodes=15", "overlap+tree/nodes=15/groups=2", "overlap+tree/nodes=15/groups=4"),
    "loop": ("sequential", "loop", "loop/passes=3", "loop+tree/nodes=15"),
    "lengths": (
        "sequential",
        "sequential/b=2",
        "sequential/b=4",
        "sequential/b=8",
        "sequential/verify=4",
        "sequential/verify=8",
        "sequential/verify=12",
        "sequential/lengths=product",
        "sequential/lengths=product:threshold=0.1",
        "sequential/lengths=product:threshold=0.1:by=certainty",
        "sequential/lengths=product:threshold=0.1:by=margin",
        "sequential/lengths=libraspec",
        "sequential/lengths=scan",
        "sequential/lengths=adaflash",
    ),
    "lookup": ("ar", "lookup"),
}
PLAINLY = " without calibrator"


def possible(
    model: SelfSpecModel, adapter: int, slots: int, wanted: list[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """What an adapter can run of the wanted kinds, by kind, and what it can not; so many slots at most."""
    found: dict[str, list[str]] = {}
    refused = []
    for kind, names in ((k, v) for k, v in KINDS.items() if k in wanted):
        for name in names:
            full = f"{name}@{adapter}" if adapter and name not in ("ar", "lookup") else name
            try:
                policy_of(model, full, slots)
                found.setdefault(kind, []).append(full)
            except ValueError:
                refused.append(full)
    return {k: v for k, v in found.items() if len(v) > 1}, list(dict.fromkeys(refused))


def table(kinds: dict[str, list[str]], over_ar: dict[int, dict[str, float]]) -> list[str]:
    """Markdown: a row a setting, a column a number of requests."""
    sizes = sorted(over_ar)
    lines = [
        "| kind | setting | " + " | ".join(f"x ar at {n}" for n in sizes) + " | |",
        "|---|---|" + "---|" * (len(sizes) + 1),
    ]
    for kind, names in kinds.items():
        for name in names:
            mine = [over_ar[n].get(name) for n in sizes]
            base = [over_ar[n].get(names[0]) for n in sizes]
            best = [max((over_ar[n][m] for m in names if m in over_ar[n]), default=None) for n in sizes]
            wins = [str(n) for n, x, b in zip(sizes, mine, best, strict=True) if x is not None and x == b]
            never = name != names[0] and not any(
                x is not None and y is not None and x > 1.01 * y for x, y in zip(mine, base, strict=True)
            )
            said = "never wins" if never else f"best at {', '.join(wins)}" if wins else ""
            shown = ["" if x is None else f"{x:.2f}" for x in mine]
            lines.append(f"| {kind} | {name} | {' | '.join(shown)} | {said} |")
    return lines


def main() -> None:
    """Measures, prints Markdown, writes JSON after every number of requests."""
    parser = parser_of(__doc__, slots="1,8,64", tokens=128, repeats=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--markdown")
    args = parser.parse_args()
    began, model = time.perf_counter(), loaded(args)
    kinds: dict[str, list[str]] = {}
    refused: list[str] = []
    sizes = [int(s) for s in args.slots.split(",")]
    for i in range(len(model.bodies)):
        found, not_able = possible(model, i, max(sizes), args.kinds.split(","))
        kinds |= {f"{k}{f', adapter {i}' if i else ''}": v for k, v in found.items()}
        refused += not_able
    names = list(dict.fromkeys(["ar", *(n for v in kinds.values() for n in v)]))
    overlaps = [n for n in names if "overlap" in n]
    calibrated = any(getattr(b.path, "calibrate", lambda _: None)(b) is not None for b in model.bodies if b.path)
    prompts = queue_of(model, args.prompts, args.longest)
    arena = Arena(model, names, prompts, max(sizes), tuple(args.cap))
    bare = (
        Arena(model, ["ar", *overlaps], prompts, max(sizes), tuple(args.cap), calibrated=False) if calibrated else None
    )
    if calibrated:
        for kind in [k for k in kinds if "group" in k]:
            kinds[f"{kind},{PLAINLY}"] = [kinds[kind][0], *(n + PLAINLY for n in kinds[kind] if n in overlaps)]
    data: dict[str, Any] = {"settings": vars(args), **options.setting(model), "refused": refused, "points": []}
    over_ar: dict[int, dict[str, float]] = {}
    decoding: dict[int, dict[str, float]] = {}

    def late() -> bool:
        return time.perf_counter() - began > args.seconds

    for slots in sizes:
        tokens, runs = max(args.least, args.tokens * slots), list[Run]()
        for where, who, suffix in ((arena, names, ""), (bare, ["ar", *overlaps], PLAINLY)):
            if where is None or late():
                continue
            some = list(contest(where, who, slots, tokens, args.repeats, args.warm, late))
            if some:
                for told, rate in ((over_ar, "rate"), (decoding, "decode_rate")):
                    ratios = verdict(some, attrgetter(rate))["over_ar"]
                    told.setdefault(slots, {}).update(
                        {n + suffix: x for n, x in ratios.items() if not suffix or n != "ar"}
                    )
                runs += some
        if not runs:
            break
        point = {"slots": slots, "over_ar": over_ar[slots], "decoding_over_ar": decoding[slots]}
        data["points"].append({**point, "runs": [data_of(r) for r in runs]})
        print(f"{slots} at a time: {time.perf_counter() - began:.0f} s", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(data, file)
        lines = table(kinds, over_ar)
        if args.markdown:
            with open(args.markdown, "w") as file:
                file.write("\n".join(lines) + "\n")
    print("\n".join(table(kinds, over_ar)))
    if refused:
        print(f"not trained for: {', '.join(refused)}")


if __name__ == "__main__":
    main()
