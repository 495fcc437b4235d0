"""`selfspec demo`: the shipped adapter at work on the embedded model, unattended, in about two minutes on two cores.

It shows answers as they are written, measures them against plain decoding in the same run, and proves in float32 that
the text is the model's own.
"""

from __future__ import annotations

from dataclasses import replace

from selfspec import hub, prompts, suite
from selfspec.adapters import io
from selfspec.chat import Settings, respond
from selfspec.measure import Measured, Runner, interleave, match_rate, ratio
from selfspec.model import SelfSpecModel
from selfspec.options import (
    Chosen,
    check_modes,
    dtype_name,
    load_model,
    setting,
    settled,
    sizes_of,
)
from selfspec.reference import Finding, Judge, answers
from selfspec.runners import engine_runner, hf_runner
from selfspec.stats import total
from selfspec.terminal import Progress, refuse, refusing, show_table

QUESTIONS = (suite.CHAT[0], suite.PYTHON[0])


def baselines(options: Chosen) -> tuple[str, ...]:
    """Dtypes that Hugging Face is measured in: the faster one of this device is among them."""
    fast = settled(Chosen(device=options.device)).dtype
    return tuple(dict.fromkeys(["float32", fast, options.dtype]))


def load(options: Chosen) -> tuple[SelfSpecModel, SelfSpecModel] | None:
    """The model as it is shown, and in float32 (the same one if that is what is shown); None without an adapter."""
    fast = load_model(options)
    if fast.path is None:
        return None
    return fast, fast if options.dtype == "float32" else load_model(replace(options, dtype="float32"))


def heading(options: Chosen, model: SelfSpecModel) -> str:
    """What runs where."""
    facts = setting(model)
    adapter = io.shipped_for(model.model) if options.adapter == "auto" else options.adapter
    where = f"{options.dtype} on {model.backbone.device}"
    return (
        f"machine: {facts['device']}, {facts['threads']} threads of {facts['cores']} cores; "
        f"torch {facts['torch']}, transformers {facts['transformers']}\n"
        f"model:   {options.model} in {where}, adapter {getattr(adapter, 'name', adapter)}; "
        f"the baseline in {' and '.join(baselines(options))}, the proof in float32"
    )


def show(done: list[Measured], mode: str) -> None:
    """Print the speed-ups: plain Hugging Face, our plain decoding, self-speculation."""
    times = {m.runner.name: m.seconds_per_token() for m in done}
    medians = {name: ratio(t, [1.0] * len(t))["median"] for name, t in times.items()}
    fastest = min((n for n in times if n.startswith("Hugging Face")), key=lambda n: medians[n])
    rows = []
    plain, drafted = (next(m for m in done if m.runner.name.startswith(f"selfspec {x} ")) for x in ("ar", mode))
    for m in done:
        own = times[m.runner.name]
        gains = [f"{ratio(times[other], own)['median']:.2f}" for other in (fastest, plain.runner.name)]
        tau = f"{total(m.stats).tau:.2f}" if m.stats else ""
        ms = 1e3 * medians[m.runner.name]
        rows.append([m.runner.name, tau, f"{ms:.1f}", f"{1e3 / ms:.1f}" if ms else "", *gains])
    show_table(["decoding", "tau", "ms/token", "tokens/s", "x faster Hugging Face", "x plain"], rows)
    print(
        f"the faster Hugging Face dtype here is {fastest.rpartition(' ')[2]}; times are without the prefill, "
        f"medians of {len(plain.repeats)} repeats"
    )
    same = match_rate(drafted.outputs, plain.outputs)
    print(f"{same:.0%} of these answers equal plain decoding's in the same dtype; what is exact is said next")


def proof(found: list[Finding | None]) -> tuple[str, bool]:
    """What the float32 comparison says, and whether it holds."""
    ties, n = sum(f is not None and f.tie for f in found), len(found)
    wrong = [f for f in found if f is not None and not f.tie]
    if wrong:
        return f"MISMATCH in float32: {len(wrong)} of {n} answers are not Hugging Face's, first {wrong[0]}", False
    same = f"in float32 {n - ties} of {n} answers equal Hugging Face's generate(), token for token"
    return same + (f"; {ties} differ in a tie that float64 proves" if ties else ""), True


def run(options: Chosen, mode: str | None, max_new_tokens: int, repeats: int) -> int:
    """Show answers, measure, prove. Returns 1 if the proof fails, or where no adapter fits."""
    with refusing():
        models = load(options)
        mode = None if models is None else check_modes(models[0], (mode,) if mode else None, options)[0]
    if models is None or mode is None:
        refuse(
            f"no shipped adapter fits {options.model}, so there is nothing to show; pass --adapter FOLDER, "
            "or decode plainly with selfspec generate",
            code=1,
        )
    fast, exact = models
    print(heading(options, fast), flush=True)
    settings = Settings(max_new_tokens, mode, options.block_size, options.tree_nodes, options.lengths)
    for question in QUESTIONS:
        print(f"\n> {question}\n", flush=True)
        print(f"[{respond(fast, [prompts.user(question)], settings).line()}]", flush=True)

    print("\nmeasuring plain decoding and self-speculation in turn ...\n", flush=True)
    ids = [prompts.encode(fast.tokenizer, [prompts.user(q)]) for q in QUESTIONS]
    runners = ways(options, mode, fast, exact)
    done: list[Measured] = []
    with Progress(len(ids) * repeats * len(runners)) as progress:
        for so_far, n, tokens in interleave(runners, ids, 1, max_new_tokens, repeats):
            done = so_far
            progress.add(n, tokens)
    show(done, mode)

    expected = next(m for m in done if m.runner.name == "Hugging Face float32").outputs
    how = {k: v for k, v in settings.arguments.items() if k not in ("do_sample", "seed")}
    ours = [answers(exact, exact.model, [p], max_new_tokens, **how)[0] for p in ids]
    judge = Judge(exact.model)
    words, holds = proof([judge.compare(p, a, b) for p, a, b in zip(ids, expected, ours)])
    print(f"\n{words}")
    return 0 if holds else 1


def ways(options: Chosen, mode: str, fast: SelfSpecModel, exact: SelfSpecModel) -> list[Runner]:
    """What is measured: Hugging Face in its dtypes, our plain decoding, self-speculation."""
    by_dtype = {dtype_name(m.backbone.dtype): m.model for m in (fast, exact)}
    dtypes = baselines(options)
    for d in dtypes:
        if d not in by_dtype:
            by_dtype[d], _ = hub.load(options.model, dtype=d, device=fast.backbone.device)
    runners = [hf_runner(by_dtype[d], f"Hugging Face {d}") for d in dtypes]
    for m in dict.fromkeys(["ar", mode]):
        name = f"selfspec {m} {options.dtype}"
        runners.append(engine_runner(fast, m, name=name, **sizes_of(fast, m, options)))
    return runners
