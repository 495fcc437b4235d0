"""The command line's functions: options and their help. What they run is imported when it runs, so that `--help` is
there at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from selfspec import options
from selfspec.options import FAST, Chosen, Sizes, chosen
from selfspec.terminal import refuse


@chosen
def bench(
    where: Chosen = FAST,
    suite: Annotated[Literal["builtin"] | None, typer.Option(help="Prompts that come along; the default.")] = None,
    files: options.Prompts = None,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 256,
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
        list[Path], typer.Argument(metavar="RUN.json...", help="What bench --json wrote; latency tables.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="The plots as pictures too.")] = None,
) -> int:
    """Draw the figures of bench runs and latency tables on one page that needs nothing else."""
    from selfspec.report import run

    return run(files, output, png)
