"""`selfspec bench`: what speculation does and what it saves, in one process, all settings in turn.

Per setting: tau (sum over sum, and the mean over answers), tokens per forward, accepted lengths, acceptance by
position, time per token decode-only and end to end, the speed-up over this package's own plain decoding ("ar", always
measured) and over Hugging Face `generate`. Times are medians over the repeats, with the least and the most. How the
clock runs is said in `selfspec.measure`. At a batch above 1, time per token is the batch's time over its tokens.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec import check, hub, options, prompts
from selfspec.measure import (
    Measured,
    Runner,
    conditional_acceptance,
    engine_runner,
    hf_runner,
    interleave,
    match_rate,
    ratio,
    spread,
)
from selfspec.model import SelfSpecModel
from selfspec.prompts import Prompt
from selfspec.stats import mean_tau, total


@dataclass(frozen=True)
class Bench:
    """What a bench runs.

    Attributes:
        model: decodes in every mode.
        runners: "ar" first, the other modes, the baselines.
        sets: prompts by the name of their set.
    """

    model: SelfSpecModel
    runners: list[Runner]
    sets: dict[str, list[Prompt]]


def baselines(names: list[str], model: SelfSpecModel, source: str) -> list[Runner]:
    """Hugging Face `generate` in the dtypes that are asked for.

    Args:
        names: such as "hf-float32".
        model: its own transformers model serves the baseline of its dtype.
        source: where to load the model from in the others.

    Raises:
        ValueError: a name of another form.
    """
    known = [f"hf-{d}" for d in options.DTYPES]
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ValueError(f"baseline {unknown[0]!r} is unknown: expected {', '.join(known)}")
    out = []
    for name in names:
        dtype = name.removeprefix("hf-")
        hf = model.model
        if dtype != options.dtype_name(model.backbone.dtype):
            hf, _ = hub.load(source, dtype=getattr(torch, dtype), device=model.backbone.device)
        out.append(hf_runner(hf, name))
    return out


def result(m: Measured, all_of_them: list[Measured]) -> dict[str, Any]:
    """One setting's figures, in plain JSON types."""
    by_name = {other.runner.name: other for other in all_of_them}
    stats, ceiling = total(m.stats), m.runner.block_size
    decode, whole = m.seconds_per_token(), m.seconds_per_token(end_to_end=True)
    out: dict[str, Any] = {
        "name": m.runner.name,
        "answers": len(m.outputs),
        "tokens": sum(map(len, m.outputs)),
        "match_rate_to_ar": match_rate(m.outputs, by_name["ar"].outputs),
        "ms_per_token": {k: 1e3 * v for k, v in spread(decode).items()},
        "ms_per_token_end_to_end": {k: 1e3 * v for k, v in spread(whole).items()},
        "tokens_per_second": spread([1 / s if s else 0.0 for s in whole]),
        "tokens_per_second_decode": spread([1 / s if s else 0.0 for s in decode]),
        "prefill_seconds": spread([sum(t.prefill for t in r) for r in m.repeats]),
        "speedup": {n: ratio(o.seconds_per_token(), decode) for n, o in by_name.items() if _compared(n)},
        "speedup_end_to_end": {n: ratio(o.seconds_per_token(True), whole) for n, o in by_name.items() if _compared(n)},
        "peak_memory": m.memory,
    }
    if ceiling is not None:
        accepted = {str(k): stats.accepted[k] for k in sorted({*stats.accepted, ceiling})}  # an empty ceiling shows too
        out |= {
            "tau": stats.tau,
            "mean_tau": mean_tau(m.stats),
            "tpf": stats.tpf,
            "rounds": stats.rounds,
            "drafts": stats.drafts,
            "accepted": accepted,
            "ceiling": ceiling,
            "at_ceiling": stats.accepted[ceiling] / stats.rounds if stats.rounds else 0.0,
            "conditional_acceptance": conditional_acceptance(stats),
        }
    return out


def _compared(name: str) -> bool:
    return name == "ar" or name.startswith("hf-")


def text(suite: str, batch: int, results: list[dict[str, Any]]) -> str:
    """One suite's results as a person reads them."""
    against = list(results[0]["speedup"])
    heading = ["", "tau", "mean", "TPF", "ms/token", "min-max", "end to end", "tokens/s", "= ar"]
    rows = [[*heading, *(f"x {n}" for n in against)]]
    for r in results:
        taus = [f"{r[k]:.2f}" if k in r else "" for k in ("tau", "mean_tau", "tpf")]
        ms = r["ms_per_token"]
        times = [f"{ms['median']:.2f}", f"{ms['min']:.2f}-{ms['max']:.2f}"]
        times += [f"{r['ms_per_token_end_to_end']['median']:.2f}", f"{r['tokens_per_second']['median']:.1f}"]
        gains = [f"{r['speedup'][n]['median']:.2f}" for n in against]
        rows.append([r["name"], *taus, *times, f"{r['match_rate_to_ar']:.3f}", *gains])
    lines = [f"{suite}, batch {batch}, {results[0]['answers']} answers", options.table(rows)]
    for r in results:
        if r.get("ceiling", 1) > 1:
            bins = [f"{k}{'*' if int(k) == r['ceiling'] else ''}:{n}" for k, n in r["accepted"].items()]
            lines.append(f"{r['name']}: tokens a round (* the ceiling): {'  '.join(bins)}")
            shares = "  ".join(f"{p:.2f}" for p in r["conditional_acceptance"])
            lines.append(f"{r['name']}: acceptance by position: {shares}")
        if r["peak_memory"]:
            lines.append(f"{r['name']}: peak memory beyond the weights {r['peak_memory'] / 2**20:.0f} MiB")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="selfspec bench", description=(__doc__ or "").partition("\n")[0])
    options.add_model_options(parser, "bfloat16")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--suite", choices=["builtin"], default="builtin", help="prompts that come along (%(default)s)")
    source.add_argument("--prompts", nargs="+", metavar="FILE", help="JSON Lines files (.gz too)")
    parser.add_argument("--limit", type=options.positive, help="prompts of each set (all)")
    parser.add_argument("--max-new-tokens", type=options.positive, default=256, help="per answer (%(default)s)")
    parser.add_argument("--batch", type=options.positives, default=[1], help="sizes, as 1,8 (1)")
    parser.add_argument("--modes", "--mode", type=options.names, help="modes, as ar,sequential (ar and the default)")
    parser.add_argument("--baseline", type=options.names, default=[], help="as hf-float32,hf-bfloat16 (none)")
    parser.add_argument("--repeats", type=options.positive, default=3, help="of every answer (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report; partial ones after each set")
    return parser


def prepare(args: argparse.Namespace) -> Bench:
    """Load what the options name; everything that cannot run is refused here."""
    sets = prompts.read_sets(args.prompts, args.limit)
    model = options.load_model(args)
    modes = options.check_modes(model, args.modes, args.block_size, args.tree_nodes)
    hf = baselines(args.baseline, model, args.model)
    options.require_fit(model, sets, args.max_new_tokens)
    modes = ["ar", *(m for m in modes if m != "ar")]  # speed-ups and match rates need it
    mine = [engine_runner(model, mode, args.block_size, args.tree_nodes) for mode in modes]
    return Bench(model, mine + hf, sets)


def main(argv: list[str]) -> int:
    """Run the bench."""
    args = build_parser().parse_args(argv)
    bench = options.refuse_unready("bench", lambda: prepare(args))
    settings = {k: v if isinstance(v, int | list | None) else str(v) for k, v in vars(args).items()}
    data: dict[str, Any] = {"complete": False, "settings": settings, **options.machine(bench.model), "suites": []}
    answers = args.repeats * len(bench.runners) * len(args.batch)
    progress = options.Progress(sum(map(len, bench.sets.values())), answers)
    for suite, rows in bench.sets.items():
        ids = [prompts.encode(bench.model.tokenizer, p.messages) for p in rows]
        for batch in args.batch:
            measured: list[Measured] = []
            gc.collect()
            for done, n, tokens in interleave(bench.runners, ids, batch, args.max_new_tokens, args.repeats):
                measured = done
                progress.add(n, tokens)
            results = [result(m, measured) for m in measured]
            data["suites"].append({"suite": suite, "batch": batch, "results": results})
            progress.close()
            print(text(suite, batch, results), end="\n\n", flush=True)
            if args.json:
                check.write(args.json, data)
    if args.json:
        check.write(args.json, {**data, "complete": True})
    return 0
