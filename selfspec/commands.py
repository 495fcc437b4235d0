"""The command line's functions: options and their help. What they run is imported when it runs, so that `--help` is
there at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from selfspec import options
from selfspec.options import (
    EXACT,
    FAST,
    MODEL,
    PLAIN,
    Chosen,
    DtypeName,
    MaxNewTokens,
    Mode,
    Sampled,
    Seed,
    ShowStats,
    Sizes,
    System,
    chosen,
)
from selfspec.terminal import refuse, refusing
from selfspec.training.options import AnswerOptions, Mix, mix

ASKED = AnswerOptions()
SizeList = Annotated[Sizes | None, typer.Option(parser=options.sizes, metavar="N,...", show_default="many")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@chosen
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")],
    where: Chosen = FAST,
    system: System = None,
    mode: Mode = None,
    max_new_tokens: MaxNewTokens = 256,
    drawn: Sampled = PLAIN,
    seed: Seed = None,
    stats: ShowStats = False,
) -> int:
    """Answer one prompt, on stdout."""
    from selfspec.chat import generate as run

    return run(prompt, where, system, mode, max_new_tokens, drawn, seed, stats)


@chosen
def chat(
    where: Chosen = FAST,
    system: System = None,
    mode: Mode = None,
    max_new_tokens: MaxNewTokens = 256,
    drawn: Sampled = PLAIN,
    seed: Seed = None,
    stats: ShowStats = False,
) -> int:
    """Talk to a model; /reset forgets, /exit or end-of-file ends."""
    from selfspec.chat import chat as run

    return run(where, system, mode, max_new_tokens, drawn, seed, stats)


@chosen
def demo(
    where: Chosen = FAST,
    mode: Mode = None,
    max_new_tokens: MaxNewTokens = 96,
    repeats: options.Repeats = 2,
) -> int:
    """Self-speculation at work: answers as they are written, their speed against plain decoding, and the proof in
    float32 that the text is the model's own. Exits with 1 if that fails, or where no adapter fits."""
    from selfspec.demo import run

    return run(where, mode, max_new_tokens, repeats)


def info(
    model: options.ModelName = MODEL,
    adapter: options.Adapter = "auto",
    dtype: Annotated[DtypeName | None, typer.Option(help="Of the weights; by default the checkpoint's.")] = None,
    device: options.Device = "cpu",
    as_json: AsJson = False,
) -> int:
    """What is installed, whether a model is supported, and whether an adapter fits it."""
    from selfspec.info import run

    return run(model, adapter, dtype, device, as_json)


@chosen
def check(
    where: Chosen = EXACT,
    files: options.Prompts = None,
    limit: options.Limit = 40,
    max_new_tokens: MaxNewTokens = 128,
    batch: options.Batches = None,
    mode: options.Modes = None,
    drawn: Sampled = PLAIN,
    seed: Seed = None,
    report_to: options.Report = None,
) -> int:
    """The lossless audit: compare every answer, token for token, with plain Hugging Face generate, or sampled ones with
    plain decoding of the same seed. Exits with 1 if any answer differs without proof of a tie."""
    from selfspec.check import run

    with refusing():
        choice, seed = drawn.choice(seed)
    return run(where, files, limit, max_new_tokens, batch or (1,), mode, choice, seed, report_to)


@chosen
def bench(
    where: Chosen = FAST,
    suite: Annotated[Literal["builtin"] | None, typer.Option(help="Prompts that come along; the default.")] = None,
    files: options.Prompts = None,
    limit: options.Limit = None,
    max_new_tokens: MaxNewTokens = 256,
    concurrency: Annotated[
        Sizes | None, typer.Option(parser=options.sizes, metavar="N,...", show_default="1", help="Requests at a time.")
    ] = None,
    mode: options.Modes = None,
    baseline: Annotated[
        options.Names | None,
        typer.Option(
            parser=options.names,
            metavar="NAME,...",
            show_default="hf",
            help="transformers' generate: hf, hf-compile (static cache), hf-lookup, each also with -DTYPE; all; none.",
        ),
    ] = None,
    repeats: options.Repeats = 3,
    report_to: options.Report = None,
) -> int:
    """Measure tau, time per token and speed-ups, all settings in turn in one process. `--modes all` is every mode that
    the adapter can run. Exits with 1 if one of them failed."""
    if suite and files:
        refuse("give either --suite or --prompts")
    from selfspec.bench import run

    sizes = concurrency or Sizes((1,))
    return run(where, files, limit, max_new_tokens, sizes, mode, baseline or ("hf",), repeats, report_to)


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.json...", help="What bench --json or benchmarks/concurrency.py wrote; latency tables."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="The plots as pictures too.")] = None,
) -> int:
    """Draw the figures of bench runs, contests and latency tables on one page that needs nothing else."""
    from selfspec.report import run

    return run(files, output, png)


def profile(
    model: Annotated[str, typer.Argument(help="Folder, hub name, .gguf file or embedded model.")] = MODEL,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="Random weights of a size: a configuration, or one of ours.")
    ] = None,
    adapter: options.Adapter = "auto",
    entries: Annotated[
        options.Layers | None,
        typer.Option(parser=options.layers, metavar="N,...", help="Entry layers to time instead of the adapter's."),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: Threads = None,
    rows: SizeList = None,
    requests: SizeList = None,
    contexts: SizeList = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Time budget; by default none.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is known.")] = False,
    tell: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts: measure what is accepted of every kind of draft instead; the adapter keeps it."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Of those prompts.")] = 64,
    as_json: AsJson = False,
) -> int:
    """Measure what forwards cost by rows, requests, context and entry layer, and keep the table for the planner."""
    if tell:
        from selfspec import tell as telling

        return telling.run(model, adapter, tell, limit, dtype, device, threads, as_json)
    from selfspec.costs import run

    asked = {"rows": rows, "requests": requests, "contexts": contexts}
    sizes = {name: tuple(given) for name, given in asked.items() if given}
    return run(model, shape, adapter, tuple(entries or ()), dtype, device, threads, sizes, seconds, fresh, as_json)


def explain(
    model: Annotated[str, typer.Argument(help="Folder, hub name, .gguf file or embedded model.")],
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    adapter: options.Adapter = "auto",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: Threads = None,
    max_new_tokens: MaxNewTokens = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="For measuring the table, where none is stored.")] = 10.0,
    as_json: AsJson = False,
) -> int:
    """Answer a prompt under the planner, and show its table, its estimate and its choice of every round."""
    from selfspec.explain import run

    return run(model, prompt, adapter, dtype, device, threads, max_new_tokens, seconds, as_json)


def answer(
    files: Annotated[
        list[Path], typer.Argument(metavar="PROMPTS...", help=".jsonl[.gz] or .parquet (prompt, turns, messages), .txt")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="An earlier run is resumed.")],
    model: options.ModelName,
    device: Annotated[str | None, typer.Option(help="By default cuda where there is one, else cpu.")] = None,
    dtype: Annotated[
        Literal["auto", DtypeName] | None,
        typer.Option(help="By default bfloat16 on CUDA, else the checkpoint's (auto)."),
    ] = None,
    temperature_mix: Annotated[
        Mix | None, typer.Option(parser=mix, metavar="T=SHARE,...", help="Of the prompts; the others are greedy.")
    ] = None,
    max_new_tokens: MaxNewTokens = ASKED.max_new_tokens,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time; fewer where memory ends.")] = ASKED.batch,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer no more prompts than this.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of temperatures and of all draws.")] = ASKED.seed,
    format: Annotated[
        Literal["auto", "parquet", "jsonl"], typer.Option(help="Of the shards; auto is what pyarrow allows.")
    ] = "auto",
    shard_rows: Annotated[int, typer.Option(min=1, help="Answers a shard.")] = ASKED.shard_rows,
    attention: Annotated[
        Literal["sdpa", "flex", "triton", "flash"] | None,
        typer.Option(help="By default triton on CUDA where it is installed."),
    ] = None,
    no_cuda_graphs: Annotated[bool, typer.Option("--no-cuda-graphs", help="Run step by step.")] = False,
) -> int:
    """Let a model answer prompts. Can be killed at any time and started again with the same command."""
    from selfspec.training.answer import run

    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature_mix": temperature_mix or (),
        "seed": seed,
        "batch": batch,
        "attention": attention,
        "cuda_graphs": not no_cuda_graphs,
        "format": format,
        "shard_rows": shard_rows,
    }
    return run(files, output, model, device, dtype, limit, settings)
