"""What the commands share: model options, lists on the command line, a progress line, what a machine is."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from selfspec import __version__, hub, prompts
from selfspec.model import SelfSpecModel
from selfspec.prompts import Prompt

DTYPES = ("float32", "float64", "bfloat16", "float16")
MODEL = next(iter(hub.EMBEDDED))


def add_model_options(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Add the options that choose a model, its adapter and where it runs.

    Args:
        parser: gets the options.
        dtype: the default of `--dtype`.
    """
    parser.add_argument("--model", default=MODEL, help="folder, hub name, .gguf file or embedded model (%(default)s)")
    parser.add_argument(
        "--adapter", default="auto", help="folder or shipped name, auto (the shipped one that fits), none"
    )
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="of the weights (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where to run (%(default)s)")
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's own choice)")
    parser.add_argument("--block-size", type=positive, help="tokens verified per round in a chain (the adapter's)")
    parser.add_argument("--tree-nodes", type=positive, default=16, help="nodes of a tree (%(default)s)")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    """Whole numbers with commas between them, each once, in the order given."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def names(text: str) -> list[str]:
    """Names with commas between them, each once, in the order given."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; separate names by commas")
    return found


def load_model(args: argparse.Namespace) -> SelfSpecModel:
    """The model and adapter that the options name.

    Raises:
        ValueError: they do not fit one another, or the model's own generation settings cannot be decoded exactly.
        FileNotFoundError: there is no such model.
        ModuleNotFoundError: the package that carries or reads it isn't installed.
    """
    transformers.utils.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    adapter = None if args.adapter == "none" else args.adapter
    model = SelfSpecModel.from_pretrained(args.model, adapter, dtype=getattr(torch, args.dtype), device=args.device)
    # one token, so that settings which `generate` refuses (a repetition penalty) are refused before any work
    model.generate(torch.zeros(1, 1, dtype=torch.long), do_sample=False, max_new_tokens=1)
    return model


def check_modes(model: SelfSpecModel, modes: list[str] | None, block_size: int | None, tree_nodes: int) -> list[str]:
    """The modes to run, each one known and possible with the model's adapter.

    Args:
        model: with or without an adapter.
        modes: as asked; None means the model's default.
        block_size: as asked.
        tree_nodes: as asked.

    Raises:
        ValueError: a mode that cannot run, before any work is done.
    """
    modes = modes or [model.plan().mode]
    for mode in modes:
        plan = model.plan(mode, block_size, tree_nodes)
        if plan.mode != "ar" and model.path is None:
            raise ValueError(f"mode {mode!r} needs an adapter, and none fits this model; pass --adapter or --mode ar")
        for layout in plan.layouts:
            assert model.path is not None
            model.path.config.require(layout, plan.block_size)
    return modes


def require_fit(model: SelfSpecModel, sets: dict[str, list[Prompt]], cap: int) -> None:
    """Refuse a prompt that leaves no room for its answer, before any work is done."""
    limit = model.backbone.max_positions
    for prompt in (p for rows in sets.values() for p in rows):
        n = len(prompts.encode(model.tokenizer, prompt.messages))
        if n == 0 or (limit is not None and n + cap > limit):
            raise ValueError(
                f"prompt {prompt.id} has {n} tokens; with {cap} new ones it has to have 1..{limit}: leave it out, or "
                "lower --max-new-tokens"
            )


def refuse_unready(command: str, build: Callable[[], Any]) -> Any:
    """Run a command's set-up; what the user can put right ends in one line and exit code 2, without a traceback."""
    try:
        return build()
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"selfspec {command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def machine(model: SelfSpecModel | None = None) -> dict[str, Any]:
    """What ran where: for reports."""
    device = torch.device("cpu") if model is None else model.backbone.device
    facts: dict[str, Any] = {
        "selfspec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if model is not None:
        facts["dtype"] = dtype_name(model.backbone.dtype)
    return facts


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> float32"""
    return str(dtype).removeprefix("torch.")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


class Progress:
    """One line on stderr: prompts done, tokens a second, time left. Rewritten in a terminal, else printed rarely.

    Args:
        prompts: how many there are.
        answers: answers written per prompt, over all settings.
    """

    def __init__(self, prompts: int, answers: int):
        self.prompts, self.answers = prompts, answers
        self.done = self.tokens = 0
        self.terminal = sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def add(self, answers: int, tokens: int) -> None:
        """Book answers and show the line if it is time."""
        self.done += answers
        self.tokens += tokens
        now = time.monotonic()
        if now - self.shown > (0.5 if self.terminal else 20):
            self.shown = now
            elapsed = now - self.began
            left = elapsed * (self.prompts * self.answers / self.done - 1)
            line = (
                f"{self.done / self.answers:.1f} of {self.prompts} prompts, {self.tokens / elapsed:.0f} tokens/s, "
                f"{left // 60:.0f} min {left % 60:.0f} s left"
            )
            if self.terminal:
                line = f"\r{line:78}"
            print(line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave an empty line behind."""
        if self.terminal:
            print(f"\r{'':78}\r", end="", file=sys.stderr, flush=True)


def table(rows: list[list[str]]) -> str:
    """Plain columns, the first row as heading; the first column is left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))) for r in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
