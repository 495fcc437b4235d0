"""`selfspec batch`: a file of prompts in, a file of answers out.

    selfspec batch prompts.jsonl answers.jsonl --device cuda

Can be killed at any time and started again with the same command.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec import options
from selfspec.options import FAST, PLAIN, Chosen, MaxNewTokens, Mode, Sampled, System, chosen, load_model
from selfspec.serving.appender import OutputError
from selfspec.stats import rates
from selfspec.terminal import refuse, refusing, say


@chosen
def batch(
    source: Annotated[
        str, typer.Argument(metavar="IN", help=".jsonl[.gz], .parquet, .txt, or - for JSON Lines on stdin.")
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help=".jsonl[.gz], .parquet, or - for stdout.")],
    where: Chosen = FAST,
    mode: Mode = None,
    max_new_tokens: MaxNewTokens = 256,
    drawn: Sampled = PLAIN,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends an answer; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of sampled rows that have none.")] = 0,
    system: System = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Rows at a time, at most; by default 256 on cuda and 32 elsewhere.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="For keys and values; by default most of what is free.")
    ] = None,
    unordered: Annotated[bool, typer.Option("--unordered", help="Write answers as they come.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever is there.")] = False,
    chunk_rows: Annotated[int, typer.Option(min=1, help="Rows a write.")] = 64,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Run on a Ray cluster (without an address: the running one, or here)."),
    ] = None,
    gpus: Annotated[float | None, typer.Option(help="With --ray, GPUs an actor; by default 1 on cuda.")] = None,
    actors: Annotated[int | None, typer.Option(min=1, help="With --ray; by default one a GPU.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus endpoint while it runs; 0 takes a free port.")
    ] = None,
    report_to: options.Report = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no summary.")] = False,
) -> int:
    """Answer every row of a file. Can be killed at any time and started again with the same command."""
    from selfspec import check
    from selfspec.serving.batch import BatchOptions, run_batch
    from selfspec.serving.output import apart

    params: dict[str, Any] = {"max_new_tokens": max_new_tokens, **drawn.given, **({"stop": stop} if stop else {})}
    settings = BatchOptions(
        params,
        system,
        seed,
        mode,
        where.block_size,
        where.tree_nodes,
        slots,
        _bytes(memory),
        Path(where.model).name,
        where.lengths,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through the output's exit, which saves
    try:
        how: dict[str, Any] = {"ordered": not unordered, "overwrite": overwrite, "chunk": chunk_rows, "quiet": quiet}
        with refusing():
            apart(source, target, report_to)  # before the model is loaded
            if ray is not None:
                from selfspec.serving.ray import run_on_ray

                if metrics_port is not None:
                    raise ValueError("--metrics-port: with --ray, use the cluster's own dashboard and metrics")
                counts = run_on_ray(where, source, target, settings, address=ray, gpus=gpus, actors=actors, **how)
            elif gpus is not None or actors is not None:
                raise ValueError("--gpus and --actors go with --ray")
            else:
                counts = run_batch(load_model(where), source, target, settings, metrics_port=metrics_port, **how)
    except OutputError as error:
        refuse(str(error), 1)
    except RuntimeError as error:
        if "another process" not in str(error):
            raise
        refuse(str(error))
    if report_to:
        from selfspec.machine import versions

        check.write(report_to, {**versions(), "settings": {**asdict(where), **asdict(settings)}, **counts})
    if not quiet:
        say(summary(counts, target))
    return 0


def summary(counts: dict[str, Any], target: str) -> str:
    """A run in a line or two, for a person."""
    rows = f"{counts['rows']:,} rows in {target}"
    if "errors" in counts:  # Ray's part files are not looked into
        rows += f": {counts['errors']:,} errors, {counts['completion_tokens']:,} tokens"
    if counts["resumed"]:
        rows += f"; {counts['resumed']:,} were there before"
    e = counts["engine"]
    if not e or not e["tokens"]:
        return rows
    first = e["acceptance"][0] if e["acceptance"] else 0.0
    return (
        f"{rows}\n{e['tokens_per_second']:,.0f} tokens/s, tau {e['tau']:.2f}, acceptance {first:.2f}"
        f"{rates(e['overlap'])}, KV memory {e['memory']['peak'] / 2**20:,.0f} MiB, {e['preemptions']} preemptions, "
        f"{e['seconds']:.1f} s"
    )


def _bytes(gib: float | None) -> int | None:
    if gib is not None and not 0 < gib < float("inf"):
        refuse(f"--memory {gib}: expected a number above 0")
    return None if gib is None else int(gib * 2**30)
