"""`selfspec bench`: what speculation does and what it saves, in one process, all settings in turn.

Per setting: tau (sum over sum, and the mean over answers), tokens per forward, accepted lengths, acceptance by
position, time per token decode-only and end to end, the speed-up over this package's own plain decoding ("ar", always
measured) and over Hugging Face `generate`. Times are medians over the repeats, with the least and the most. How the
clock runs is said in `selfspec.measure`. At a batch above 1, time per token is the batch's time over its tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import torch
import typer

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
from selfspec.stats import mean_tau, total
from selfspec.terminal import Progress, refuse, refusing, show_table


def baselines(names: Sequence[str], model: SelfSpecModel, source: str) -> list[Runner]:
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


def show(suite: str, batch: int, results: list[dict[str, Any]]) -> None:
    """Print one suite's results as a person reads them."""
    against = list(results[0]["speedup"])
    rows = []
    for r in results:
        taus = [f"{r[k]:.2f}" if k in r else "" for k in ("tau", "mean_tau", "tpf")]
        ms = r["ms_per_token"]
        times = [f"{ms['median']:.2f}", f"{ms['min']:.2f}-{ms['max']:.2f}"]
        times += [f"{r['ms_per_token_end_to_end']['median']:.2f}", f"{r['tokens_per_second']['median']:.1f}"]
        gains = [f"{r['speedup'][n]['median']:.2f}" for n in against]
        rows.append([r["name"], *taus, *times, f"{r['match_rate_to_ar']:.3f}", *gains])
    heading = ["", "tau", "mean", "TPF", "ms/token", "min-max", "end to end", "tokens/s", "= ar"]
    print(f"{suite}, batch {batch}, {results[0]['answers']} answers")
    show_table([*heading, *(f"x {n}" for n in against)], rows)
    for r in results:
        if r.get("ceiling", 1) > 1:
            bins = [f"{k}{'*' if int(k) == r['ceiling'] else ''}:{n}" for k, n in r["accepted"].items()]
            print(f"{r['name']}: tokens a round (* the ceiling): {'  '.join(bins)}")
            shares = "  ".join(f"{p:.2f}" for p in r["conditional_acceptance"])
            print(f"{r['name']}: acceptance by position: {shares}")
        if r["peak_memory"]:
            print(f"{r['name']}: peak memory beyond the weights {r['peak_memory'] / 2**20:.0f} MiB")
    print(flush=True)


@options.chosen
def main(
    where: options.Chosen = options.FAST,
    suite: Annotated[Literal["builtin"] | None, typer.Option(help="Prompts that come along; the default.")] = None,
    files: options.Prompts = None,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 256,
    batch: options.Batches = None,
    mode: options.Modes = None,
    baseline: Annotated[
        options.Names | None,
        typer.Option(parser=options.names, metavar="NAME,...", help="As hf-float32,hf-bfloat16; by default none."),
    ] = None,
    repeats: options.Repeats = 3,
    report_to: options.Report = None,
) -> int:
    """Measure tau, time per token and speed-ups, all settings in turn in one process."""
    if suite and files:
        refuse("give either --suite or --prompts")
    with refusing():
        sets = prompts.read_sets(files, limit)
        model = options.load_model(where)
        modes = options.check_modes(model, mode, where)
        runners = baselines(baseline or (), model, where.model)
        options.require_fit(model, sets, max_new_tokens)
    modes = ["ar", *(m for m in modes if m != "ar")]  # speed-ups and match rates need it
    runners = [engine_runner(model, m, where.block_size, where.tree_nodes) for m in modes] + runners
    batches = list(batch or (1,))
    asked = {"prompts": files, "limit": limit, "max_new_tokens": max_new_tokens, "batch": batches, "modes": modes}
    settings = {**asdict(where), **asked, "baseline": baseline, "repeats": repeats}
    data: dict[str, Any] = {"complete": False, "settings": settings, **options.setting(model), "suites": []}
    answered = sum(map(len, sets.values())) * repeats * len(runners) * len(batches)
    progress = Progress(answered)
    for name, rows in sets.items():
        ids = [prompts.encode(model.tokenizer, p.messages) for p in rows]
        for size in batches:
            measured: list[Measured] = []
            gc.collect()
            with progress:
                for so_far, n, tokens in interleave(runners, ids, size, max_new_tokens, repeats):
                    measured = so_far
                    progress.add(n, tokens)
            results = [result(m, measured) for m in measured]
            data["suites"].append({"suite": name, "batch": size, "results": results})
            show(name, size, results)
            if report_to:
                check.write(report_to, data)
    if report_to:
        check.write(report_to, {**data, "complete": True})
    return 0
