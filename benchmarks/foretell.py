"""The simulator against reality, and policies where there is no machine: from a report of `benchmarks/concurrency.py`.

python benchmarks/foretell.py concurrency_h200.json --json foretold_h200.json
python benchmarks/foretell.py concurrency_h200.json --latency benchmarks/forward_times_qwen3-8b_h200.json --layers 36

Without `--latency`: the speed-up of every fixed plan at every number of requests, as forwards alone foretell it, as
forwards and what rounds took beside them at the fewest and the most requests do, as the rounds that were timed at each
number do, and as it was measured while decoding. Every measured run is simulated for itself: the same texts of the
queue to the same ends, as many tokens, those that wait held back as a session does.
With it: what plain decoding, the best fixed plans and the planner do at another latency table, with the acceptance that
was recorded; rounds are taken to cost their forwards.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from selfspec.arena import AUTO
from selfspec.joining import Door
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import Estimator, families
from selfspec.plan.latency import Latency
from selfspec.plan.named import read
from selfspec.plan.planner import Planner
from selfspec.plan.policy import Fixed
from selfspec.plan.record import Priced, Record, foretold, replayed, usable
from selfspec.plan.table import LatencyTable


def ran(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of fixed plans, in the order in which they were made."""
    every = [r for point in report["points"] for r in point["runs"]]
    runs = [r for r in every if r["name"] != AUTO and read(r["name"]).lengths is None]
    if not report["record"].get("queue") or any("start" not in r for r in runs):
        raise SystemExit("the report does not say what its runs decoded: measure again with benchmarks/concurrency.py")
    return [r | {"plan": next(iter(r["plans"]))} for r in runs if r["plans"]]


def measured(report: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Median speed-up of decoding over plain decoding: plan and requests -> ratio."""
    return _gains([(r["plan"], r["slots"], r["decode_rate"]) for r in ran(report)])


def told(report: dict[str, Any], seen: Callable[[int], bool]) -> dict[tuple[str, int], float]:
    """The same as the simulator has it.

    Args:
        report: of the runs.
        seen: whether rounds of so many requests may be looked at.
    """
    record = Record.of(report["record"])
    costs = Priced(record.table, record.entries, [r for r in record.rounds if seen(r[1])])
    plans, rates = {str(p): p for p, *_ in record.rounds}, list[tuple[str, int, float]]()
    for r in ran(report):
        if r["plan"] in plans and usable(record.traces, [plans[r["plan"]]]):
            tokens = r["tokens"] - r["joined"]  # by rounds; whoever joined has a token of its prompt's
            out = replayed(record, costs, plans[r["plan"]], r["slots"], r["start"], tokens, Door())
            rates.append((r["plan"], r["slots"], (out.tokens + len(out.latency)) / out.ms))  # as many joined as ended
    return _gains(rates)


def _gains(rates: list[tuple[str, int, float]]) -> dict[tuple[str, int], float]:
    by_point: dict[tuple[str, int], list[float]] = defaultdict(list)
    for plan, slots, rate in rates:
        by_point[plan, slots].append(rate)
    return {(p, n): median(r) / median(by_point["ar", n]) for (p, n), r in by_point.items() if p != "ar"}


def compared(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Foretold and measured, point by point."""
    sizes = sorted({n for _, n, *_ in report["record"]["rounds"]})
    ends = {1 << (sizes[i] - 1).bit_length() for i in (0, -1)}  # of forwards: powers of two
    ways: dict[str, Callable[[int], bool]] = {
        "forwards": lambda n: False,
        "rounds": lambda n: 1 << (n - 1).bit_length() in ends,
        "all_rounds": lambda n: True,
    }
    real, found = measured(report), {way: told(report, seen) for way, seen in ways.items()}
    out = []
    for plan, slots in sorted(found["rounds"], key=lambda at: (at[1], at[0])):
        row = {"plan": plan, "slots": slots, "measured": real[plan, slots], "used": slots in ends}
        row |= {way: gains[plan, slots] for way, gains in found.items()}
        out.append(row | {"error": row["rounds"] / row["measured"] - 1})
    return out


def elsewhere(record: Record, points: tuple[Latency, ...], layers: int, entry: int, sizes: list[int]) -> list[dict]:
    """Plain decoding, the best fixed plan and the planner with another model's forwards."""
    table, out = LatencyTable(points, layers), []
    entries = tuple(round(e * layers / record.table.n_layers) for e in record.entries) if entry < 0 else (entry,)
    costs = Costs(table, entries)
    known = {f for t in record.traces for f in t.accepted}
    plans = list(dict.fromkeys(p for p, *_ in record.rounds if p.nodes == 1 or set(families(p)) <= known))
    traces = usable(record.traces, plans)
    for slots in sizes:
        rates = {str(p): foretold(Fixed(p), costs, traces, slots).rate for p in plans}
        # two shapes at a time need two forwards; a session runs one
        told = {split: Planner(costs, plans, _estimator(plans, len(entries)), split=split) for split in (False, True)}
        auto = {split: foretold(planner, costs, traces, slots).rate for split, planner in told.items()}
        best = max(rates, key=lambda name: rates[name])
        row = {"slots": slots, "ar": rates["ar"], "best": best, "best_over_ar": rates[best] / rates["ar"]}
        row |= {"auto_over_best": auto[False] / rates[best], "auto_over_ar": auto[False] / rates["ar"]}
        out.append(row | {"split_over_best": auto[True] / rates[best], "rates": rates})
    return out


def _estimator(plans, adapters: int) -> Estimator:
    return Estimator([f for p in plans for f in families(p)], [0.7] * adapters)


def main() -> None:
    """Predicts, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report")
    parser.add_argument("--latency", help="forward times of another model (benchmarks/forward_times.py)")
    parser.add_argument("--layers", type=int, help="of that model")
    parser.add_argument("--entry", type=int, default=-1, help="layer of its drafts; by default in proportion")
    parser.add_argument("--slots", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--json")
    args = parser.parse_args()
    with open(args.report) as file:
        report = json.load(file)
    if args.latency:
        if not args.layers:
            parser.error("--latency needs --layers")
        with open(args.latency) as file:
            points = tuple(Latency(**p) for p in json.load(file)["points"])
        sizes = [int(s) for s in args.slots.split(",")]
        rows = elsewhere(Record.of(report["record"]), points, args.layers, args.entry, sizes)
        print(f"{'slots':>5} {'best fixed':32} {'x ar':>6} {'auto x ar':>9} {'auto/best':>9} {'split/best':>10}")
        for r in rows:
            print(f"{r['slots']:5} {r['best']:32} {r['best_over_ar']:6.2f} {r['auto_over_ar']:9.2f} ", end="")
            print(f"{r['auto_over_best']:9.3f} {r['split_over_best']:10.3f}")
    else:
        rows = compared(report)
        ways = ("measured", "forwards", "rounds", "all_rounds")
        print(f"{'plan':36} {'slots':>5} {' '.join(f'{w:>10}' for w in ways)} {'error':>7}")
        for r in rows:
            print(f"{r['plan']:36} {r['slots']:5} {' '.join(f'{r[w]:10.2f}' for w in ways)} {r['error']:+7.1%}", end="")
            print(" (its rounds were used)" if r["used"] else "")
        fair = [abs(r["error"]) for r in rows if not r["used"]]
        if fair:
            print(f"{sum(e <= 0.1 for e in fair)} of {len(fair)} within 10 % that were foretold from other numbers")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
