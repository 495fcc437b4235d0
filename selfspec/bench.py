"""`selfspec bench`: what speculation does and what it saves, in one process, all settings in turn.

Per setting: tau (sum over sum, and the mean over answers), tokens per forward, tokens a round, acceptance by position,
the parts of a round, time per token decode-only and end to end, the speed-up over this package's own plain decoding
("ar", always measured) and over Hugging Face `generate`. Times are medians over the repeats, with the least and the
most. How the clock runs is said in `selfspec.measure`. With several requests at a time, time per token is the run's
time over all its tokens.
"""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec import check, options, prompts
from selfspec.measure import Measured, interleave, match_rate, ratio, spread
from selfspec.model import SelfSpecModel
from selfspec.options import Chosen
from selfspec.plan import MODES
from selfspec.runners import FORMS, baselines, engine_runner
from selfspec.stats import mean_tau, total
from selfspec.terminal import Progress, refusing, show_table

EVERY = (*MODES, "overlap+tree", "auto")


def possible(model: SelfSpecModel, where: Chosen) -> list[str]:
    """Every mode that the model's adapter can run."""
    found = []
    for mode in EVERY:
        try:
            if mode != "auto":
                model.plan(mode, where.block_size, where.tree_nodes)
            elif where.block_size is not None:
                continue
        except ValueError:
            continue
        found.append(mode)
    return found


def result(m: Measured, all_of_them: list[Measured]) -> dict[str, Any]:
    """One setting's figures, in plain JSON types; of one that failed, why."""
    if m.error is not None:
        return {"name": m.runner.name, "error": m.error}
    by_name = {other.runner.name: other for other in all_of_them if other.error is None}
    against = {n: o for n, o in by_name.items() if n == "ar" or n.startswith("hf")}
    stats, ceiling = total(m.stats), m.runner.block_size
    decode, whole = m.seconds_per_token(), m.seconds_per_token(end_to_end=True)
    out: dict[str, Any] = {
        "name": m.runner.name,
        "answers": len(m.outputs),
        "tokens": sum(map(len, m.outputs)),
        "match_rate_to_ar": match_rate(m.outputs, by_name["ar"].outputs) if "ar" in by_name else None,
        "ms_per_token": {k: 1e3 * v for k, v in spread(decode).items()},
        "ms_per_token_end_to_end": {k: 1e3 * v for k, v in spread(whole).items()},
        "tokens_per_second": spread([1 / s if s else 0.0 for s in whole]),
        "tokens_per_second_decode": spread([1 / s if s else 0.0 for s in decode]),
        "tokens_per_second_request": spread(m.tokens_per_second_request()),
        "prefill_seconds": spread([sum(t.prefill for t in r) for r in m.repeats]),
        "speedup": {n: ratio(o.seconds_per_token(), decode) for n, o in against.items()},
        "speedup_end_to_end": {n: ratio(o.seconds_per_token(True), whole) for n, o in against.items()},
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
            "overlap": stats.overlap,
            "accepted": accepted,
            "ceiling": ceiling,
            "at_ceiling": stats.accepted[ceiling] / stats.rounds if stats.rounds else 0.0,
            "conditional_acceptance": stats.acceptance,
            "round_ms": {part: spread(ms) for part, ms in m.round_ms().items()},
        }
    return out


def show(suite: str, concurrency: int, results: list[dict[str, Any]]) -> None:
    """Print one suite's results as a person reads them."""
    good = [r for r in results if "error" not in r]
    against = list(good[0]["speedup"]) if good else []
    rows = []
    for r in good:
        taus = [f"{r[k]:.2f}" if k in r else "" for k in ("tau", "mean_tau", "tpf")]
        ms = r["ms_per_token"]
        times = [f"{ms['median']:.2f}", f"{ms['min']:.2f}-{ms['max']:.2f}"]
        times += [f"{r['ms_per_token_end_to_end']['median']:.2f}", f"{r['tokens_per_second']['median']:.1f}"]
        times += [f"{r['tokens_per_second_request']['median']:.1f}"]
        same = r["match_rate_to_ar"]
        gains = [f"{r['speedup'][n]['median']:.2f}" for n in against]
        rows.append([r["name"], *taus, *times, "" if same is None else f"{same:.3f}", *gains])
    heading = ["", "tau", "mean", "TPF", "ms/token", "min-max", "end to end", "tokens/s", "each", "= ar"]
    print(f"{suite}, {concurrency} at a time" + (f", {good[0]['answers']} answers" if good else ""))
    show_table([*heading, *(f"x {n}" for n in against)], rows)
    for r in results:
        if "error" in r:
            print(f"{r['name']}: FAILED: {r['error']}")
        if r.get("ceiling", 1) > 1:
            bins = [f"{k}{'*' if int(k) == r['ceiling'] else ''}:{n}" for k, n in r["accepted"].items()]
            print(f"{r['name']}: tokens a round (* the ceiling, {r['at_ceiling']:.1%}): {'  '.join(bins)}")
            shares = "  ".join(f"{p:.2f}" for p in r["conditional_acceptance"])
            print(f"{r['name']}: acceptance by position: {shares}")
        if r.get("round_ms"):
            parts = "  ".join(f"{k} {ms['median']:.2f}" for k, ms in r["round_ms"].items())
            print(f"{r['name']}: ms a round: {parts}")
        if r.get("peak_memory"):
            print(f"{r['name']}: peak memory beyond the weights {r['peak_memory'] / 2**20:.0f} MiB")
    print(flush=True)


def run(
    where: Chosen,
    files: list[str] | None,
    limit: int | None,
    max_new_tokens: int,
    concurrency: Sequence[int],
    modes: tuple[str, ...] | None,
    baseline: Sequence[str],
    repeats: int,
    report_to: Path | None,
) -> int:
    """Measure, print, and write the report. Returns 1 if one of this package's own modes failed."""
    with refusing():
        sets = prompts.read_sets(files, limit)
        model = options.load_model(where)
        asked = tuple(possible(model, where)) if modes and "all" in modes else modes
        names = ["ar", *(m for m in options.check_modes(model, asked, where) if m != "ar")]
        against = (
            [] if "none" in baseline else [f"hf-{f}".rstrip("-") for f in FORMS] if "all" in baseline else baseline
        )
        rivals = baselines(against, model, where.model)
        options.require_fit(model, sets, max_new_tokens)
    runners = [engine_runner(model, m, **options.sizes_of(model, m, where)) for m in names] + rivals
    settings = {
        **asdict(where),
        "prompts": files or ["builtin"],
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "concurrency": list(concurrency),
        "modes": names,
        "baseline": [r.name for r in rivals],
        "repeats": repeats,
    }
    command = shlex.join(["selfspec", *sys.argv[1:]])
    data: dict[str, Any] = {"kind": "bench", "command": command, "complete": False, "settings": settings}
    data |= {**options.setting(model), "suites": []}
    progress = Progress(sum(map(len, sets.values())) * repeats * len(runners) * len(concurrency))
    warm_up = None if model.backbone.device.type == "cuda" else 8  # on a GPU, graphs are captured and code is compiled
    failed = False
    for name, rows in sets.items():
        ids = [prompts.encode(model.tokenizer, p.messages) for p in rows]
        for size in concurrency:
            measured: list[Measured] = []
            gc.collect()
            with progress:
                for so_far, n, tokens in interleave(runners, ids, size, max_new_tokens, repeats, warm_up):
                    measured = so_far
                    progress.add(n, tokens)
            results = [result(m, measured) for m in measured]
            failed |= any(m.error is not None for m in measured[: len(names)])
            data["suites"].append({"suite": name, "concurrency": size, "results": results})
            show(name, size, results)
            if report_to:
                check.write(report_to, data)
    if report_to:
        check.write(report_to, {**data, "complete": True})
    return int(failed)
