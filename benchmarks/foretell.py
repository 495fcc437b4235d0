"""The simulator against reality, and policies where there is no machine: from a report of `benchmarks/concurrency.py`.

python benchmarks/foretell.py concurrency_h200.json --json foretold_h200.json
python benchmarks/foretell.py concurrency_h200.json --latency benchmarks/forward_times_qwen3-8b_h200.json --layers 36

Without `--latency`: the speed-up of every fixed plan at every number of requests, as forwards alone foretell it, as
forwards and what rounds took beside them at the fewest and the most requests do, and as it was measured while decoding.
With it: what plain decoding, the best fixed plans and the planner do at another latency table, with the acceptance that
was recorded; rounds are taken to cost their forwards.
"""

import argparse
import json
from collections import defaultdict
from statistics import median
from typing import Any

from selfspec.plan.cost import Costs
from selfspec.plan.estimate import Estimator, families
from selfspec.plan.latency import Latency
from selfspec.plan.planner import Fixed, Planner
from selfspec.plan.record import PLAIN, Record, foretold, speed_up, usable
from selfspec.plan.table import LatencyTable


def measured(report: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Median speed-up of decoding over plain decoding: plan and requests -> ratio."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for point in report["points"]:
        for run in point["runs"]:
            if len(run["plans"]) == 1:
                rates[next(iter(run["plans"])), point["slots"]].append(run["decode_rate"])
    return {(p, n): median(r) / median(rates["ar", n]) for (p, n), r in rates.items() if p != "ar"}


def compared(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Foretold and measured, point by point."""
    record, out = Record.of(report["record"]), []
    plans = {str(p): p for p, *_ in record.rounds}
    sizes = sorted({n for _, n, *_ in record.rounds})
    for (name, slots), real in sorted(measured(report).items(), key=lambda item: (item[0][1], item[0][0])):
        if name not in plans or not usable(record.traces, [plans[name]]):
            continue
        plan = plans[name]
        row = {"plan": name, "slots": slots, "measured": real, "used": slots in (sizes[0], sizes[-1])}
        row |= {
            "forwards": speed_up(record, plan, slots),
            "rounds": speed_up(record, plan, slots, sizes[:1] + sizes[-1:]),
        }
        out.append(row | {"error": row["rounds"] / real - 1})
    return out


def elsewhere(record: Record, points: tuple[Latency, ...], layers: int, entry: int, sizes: list[int]) -> list[dict]:
    """Plain decoding, the best fixed plan and the planner with another model's forwards."""
    table, out = LatencyTable(points, layers), []
    entries = tuple(round(e * layers / record.table.n_layers) for e in record.entries) if entry < 0 else (entry,)
    costs = Costs(table, entries)
    known = {f for t in record.traces for f in t.accepted}
    plans = list(dict.fromkeys(p for p, *_ in record.rounds if p == PLAIN or set(families(p)) <= known))
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
        print(f"{'plan':32} {'slots':>5} {'measured':>8} {'forwards':>8} {'rounds':>7} {'error':>7}")
        for r in rows:
            print(
                f"{r['plan']:32} {r['slots']:5} {r['measured']:8.2f} {r['forwards']:8.2f} {r['rounds']:7.2f} ", end=""
            )
            print(f"{r['error']:+7.1%}{' (its rounds were used)' if r['used'] else ''}")
        fair = [abs(r["error"]) for r in rows if not r["used"]]
        if fair:
            print(f"{sum(e <= 0.1 for e in fair)} of {len(fair)} within 10 % that were foretold from other numbers")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
