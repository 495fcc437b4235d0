"""`selfspec demo`: the shipped adapter at work on the embedded model, unattended, in about two minutes on two cores.

It shows answers as they are written, measures them against plain decoding in the same run, and proves in float32 that
the text is the model's own.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from selfspec import hub, options, prompts, suite
from selfspec.adapters import io
from selfspec.chat import Settings, respond
from selfspec.measure import Measured, engine_runner, hf_runner, interleave, match_rate, ratio
from selfspec.model import SelfSpecModel
from selfspec.reference import Finding, Judge, answers
from selfspec.stats import total

QUESTIONS = (suite.CHAT[0], suite.PYTHON[0])
BASELINES = ("float32", "bfloat16")


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="selfspec demo", description=(__doc__ or "").partition("\n")[0])
    options.add_model_options(parser, "bfloat16")
    parser.add_argument("--mode", default="sequential", help="how to speculate (%(default)s)")
    parser.add_argument("--max-new-tokens", type=options.positive, default=96, help="per answer (%(default)s)")
    parser.add_argument("--repeats", type=options.positive, default=2, help="of every measurement (%(default)s)")
    return parser


def load(args: argparse.Namespace) -> tuple[SelfSpecModel, SelfSpecModel] | None:
    """The model as it is shown, and in float32 (the same one if that is what is shown); None without an adapter."""
    fast = options.load_model(args)
    if fast.path is None:
        return None
    options.check_modes(fast, [args.mode], args.block_size, args.tree_nodes)
    if args.dtype == "float32":
        return fast, fast
    return fast, options.load_model(argparse.Namespace(**{**vars(args), "dtype": "float32"}))


def heading(args: argparse.Namespace, model: SelfSpecModel) -> str:
    """What runs where."""
    facts = options.machine(model)
    adapter = io.shipped_for(model.model) if args.adapter == "auto" else args.adapter
    where = f"{args.dtype} on {model.backbone.device}"
    return (
        f"machine: {facts['device']}, {facts['threads']} threads of {facts['cores']} cores; "
        f"torch {facts['torch']}, transformers {facts['transformers']}\n"
        f"model:   {args.model} in {where}, adapter {getattr(adapter, 'name', adapter)}; "
        f"the baseline in {' and '.join(BASELINES)}, the proof in float32"
    )


def compared(done: list[Measured], mode: str) -> str:
    """The speed-up table: plain Hugging Face, our plain decoding, self-speculation."""
    times = {m.runner.name: m.seconds_per_token() for m in done}
    medians = {name: ratio(t, [1.0] * len(t))["median"] for name, t in times.items()}
    fastest = min((n for n in times if n.startswith("Hugging Face")), key=lambda n: medians[n])
    rows = [["decoding", "tau", "ms/token", "tokens/s", "x faster Hugging Face", "x plain"]]
    plain, drafted = (next(m for m in done if m.runner.name.startswith(f"selfspec {x} ")) for x in ("ar", mode))
    for m in done:
        own = times[m.runner.name]
        gains = [f"{ratio(times[other], own)['median']:.2f}" for other in (fastest, plain.runner.name)]
        tau = f"{total(m.stats).tau:.2f}" if m.stats else ""
        ms = 1e3 * medians[m.runner.name]
        rows.append([m.runner.name, tau, f"{ms:.1f}", f"{1e3 / ms:.1f}" if ms else "", *gains])
    same = match_rate(drafted.outputs, plain.outputs)
    return "\n".join(
        [
            options.table(rows),
            f"the faster Hugging Face dtype here is {fastest.rpartition(' ')[2]}; times are without the prefill, "
            f"medians of {len(plain.repeats)} repeats",
            f"{same:.0%} of these answers equal plain decoding's in the same dtype; what is exact is said next",
        ]
    )


def proof(found: list[Finding | None]) -> tuple[str, bool]:
    """What the float32 comparison says, and whether it holds."""
    ties, n = sum(f is not None and f.tie for f in found), len(found)
    wrong = [f for f in found if f is not None and not f.tie]
    if wrong:
        return f"MISMATCH in float32: {len(wrong)} of {n} answers are not Hugging Face's, first {wrong[0]}", False
    same = f"in float32 {n - ties} of {n} answers equal Hugging Face's generate(), token for token"
    return same + (f"; {ties} differ in a tie that float64 proves" if ties else ""), True


def main(argv: list[str]) -> int:
    """Run the demo. Returns 1 without an adapter, or if the proof fails."""
    args = build_parser().parse_args(argv)
    models = options.refuse_unready("demo", lambda: load(args))
    if models is None:
        print(
            f"selfspec demo: no shipped adapter fits {args.model}, so there is nothing to show; pass --adapter FOLDER, "
            "or decode plainly with selfspec generate",
            file=sys.stderr,
        )
        return 1
    fast, exact = models
    print(heading(args, fast), flush=True)
    settings = Settings(args.max_new_tokens, args.mode, args.block_size, args.tree_nodes)
    for question in QUESTIONS:
        print(f"\n> {question}\n", flush=True)
        print(f"[{respond(fast, [prompts.user(question)], settings).line()}]", flush=True)

    print("\nmeasuring plain decoding and self-speculation in turn ...", flush=True)
    ids = [prompts.encode(fast.tokenizer, [prompts.user(q)]) for q in QUESTIONS]
    done = measured(args, fast, exact, ids)
    print(f"\n{compared(done, args.mode)}\n")

    expected = next(m for m in done if m.runner.name == "Hugging Face float32").outputs
    how: dict[str, Any] = {"mode": args.mode, "block_size": args.block_size, "tree_nodes": args.tree_nodes}
    ours = [answers(exact, exact.model, [p], args.max_new_tokens, **how)[0] for p in ids]
    judge = Judge(exact.model)
    words, holds = proof([judge.compare(p, a, b) for p, a, b in zip(ids, expected, ours)])
    print(words)
    return 0 if holds else 1


def measured(
    args: argparse.Namespace, fast: SelfSpecModel, exact: SelfSpecModel, ids: list[list[int]]
) -> list[Measured]:
    """Hugging Face in its dtypes, our plain decoding and self-speculation on the same prompts, interleaved."""
    by_dtype = {options.dtype_name(m.backbone.dtype): m.model for m in (fast, exact)}
    for d in BASELINES:
        if d not in by_dtype:
            by_dtype[d], _ = hub.load(args.model, dtype=d, device=fast.backbone.device)
    runners = [hf_runner(by_dtype[d], f"Hugging Face {d}") for d in BASELINES]
    for mode in dict.fromkeys(["ar", args.mode]):
        name = f"selfspec {mode} {args.dtype}"
        runners.append(engine_runner(fast, mode, args.block_size, args.tree_nodes, name))
    progress = options.Progress(len(ids), args.repeats * len(runners))
    done: list[Measured] = []
    for so_far, n, tokens in interleave(runners, ids, 1, args.max_new_tokens, args.repeats):
        done = so_far
        progress.add(n, tokens)
    progress.close()
    return done
