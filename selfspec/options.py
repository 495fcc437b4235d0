"""What the commands share: options, the model that they choose, what a machine is.

Torch and transformers are imported when a model is wanted: a command's `--help` is there at once.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import typer

from selfspec import prompts
from selfspec.plan import NODES
from selfspec.plan.named import read
from selfspec.prompts import Prompt

if TYPE_CHECKING:
    import torch

    from selfspec.model import SelfSpecModel

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
DTYPES = get_args(DtypeName)
MODEL = "smollm2-135m-instruct"  # a key of selfspec.hub.EMBEDDED


class Sizes(tuple[int, ...]):
    """Whole numbers of an option."""


class Names(tuple[str, ...]):
    """Names of an option."""


def sizes(text: str) -> Sizes:
    """Whole numbers of at least 1 with commas between them, each once, in the order given."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isascii() or not part.isdigit() or int(part) < 1:
            raise typer.BadParameter(f"{part!r} is not a whole number of at least 1")
    return Sizes(dict.fromkeys(map(int, parts)))


def names(text: str) -> Names:
    """Names with commas between them, each once, in the order given."""
    found = Names(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise typer.BadParameter(f"{text!r} names nothing; separate names by commas")
    return found


class Layers(tuple[int, ...]):
    """Layer indices of an option."""


def layers(text: str) -> Layers:
    """Layer indices with commas between them, each once."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isascii() or not part.isdigit():
            raise typer.BadParameter(f"{part!r} is no layer: they count from 0")
    return Layers(dict.fromkeys(map(int, parts)))


ModelName = Annotated[str, typer.Option(help="Folder, hub name, .gguf file or embedded model.")]
Adapter = Annotated[
    str,
    typer.Option(help="Folder or shipped name, auto (the shipped one that fits), none; or several: A,B."),
]
Dtype = Annotated[DtypeName, typer.Option(help="Of the weights.")]
Device = Annotated[str, typer.Option(help="Where to run.")]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="FILE...",
        help="JSON Lines (.gz too), parquet or .txt files; by default the built-in suite.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="No more prompts of each file than this.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Per answer.")]
Mode = Annotated[
    str | None,
    typer.Option(
        help="ar, lookup, sequential, loop, tree, overlap, several as in overlap+tree, or auto; by default auto, but "
        "sequential where --block-size or --lengths is given, tree with --tree-nodes, lookup without adapter. Settings "
        "go with a name: b=, nodes=, rule=, groups=, verify=, passes=, prefix=, lengths=, as in overlap/b=8/groups=2."
    ),
]
Modes = Annotated[
    Names | None,
    typer.Option("--mode", "--modes", parser=names, metavar="NAME,...", help="Modes; by default the model's own."),
]
Batches = Annotated[
    Sizes | None,
    typer.Option("--batch", "--batch-size", parser=sizes, metavar="N,...", show_default="1", help="Batch sizes."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Of every measurement.")]


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses at once what could not be written after hours."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise typer.BadParameter(f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}")
    return path


Report = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="OUT", callback=_in_a_folder, help="Write the report here; partial ones while it runs."
    ),
]
ShowStats = Annotated[bool, typer.Option("--stats", help="Print tau, forwards and time after an answer, on stderr.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message; by default the chat template's.")]


@dataclass(frozen=True)
class Chosen:
    """Which model runs where, with which adapter and plan: the options that every decoding command has."""

    model: ModelName = MODEL
    adapter: Adapter = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float64", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto is bfloat16 where the device multiplies it fast, else float32."),
    ] = "auto"
    device: Device = "cpu"
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")] = None
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens verified per round in a chain; by default the adapter's.")
    ] = None
    tree_nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a tree.", show_default=str(NODES))] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="How many drafts of a chain are verified: product, libraspec, scan, adaflash or fixed:length=N, "
            "settings as in product:threshold=0.1:by=margin; by default all.",
        ),
    ] = None
    exact: Annotated[
        bool, typer.Option("--exact", help="In half precision on a GPU too: the tokens of plain decoding at batch 1.")
    ] = False


def sampled(help: str, least: float | None = None, most: float | None = None) -> Any:
    """An option that says how tokens are chosen."""
    return typer.Option(help=help, rich_help_panel="Sampling", show_default=False, min=least, max=most)


@dataclass(frozen=True)
class Sampled:
    """How tokens are chosen: the options of every command that writes answers. None is transformers' default."""

    temperature: Annotated[float | None, sampled("Sample at this temperature; 0 is greedy, the default.", 0)] = None
    top_p: Annotated[float | None, sampled("Sample from so much probability.", 0, 1)] = None
    top_k: Annotated[int | None, sampled("Sample from so many tokens (0: all; transformers' default is 50).", 0)] = None
    min_p: Annotated[float | None, sampled("Sample from tokens so probable, beside the best.", 0, 1)] = None
    repetition_penalty: Annotated[float | None, sampled("Above 1 against repetition, greedy or not.")] = None

    @property
    def given(self) -> dict[str, Any]:
        """What was asked for, under transformers' names."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    def choice(self, seed: int | None, otherwise: int = 0) -> tuple[dict[str, Any], int | None]:
        """Arguments of `generate`, and the seed to draw with; None is greedy.

        Args:
            seed: as asked for; it makes the text a sampled one.
            otherwise: where none was, and something else asks for sampling.

        Raises:
            ValueError: a greedy temperature with a seed.
        """
        given = self.given
        if self.temperature == 0:
            if seed is not None:
                raise ValueError(f"--temperature 0 is greedy, and draws nothing with --seed {seed}")
            return {k: v for k, v in given.items() if k == "repetition_penalty"}, None
        draws = seed is not None or given.keys() - {"repetition_penalty"}
        return given, otherwise if draws and seed is None else seed


Seed = Annotated[int | None, sampled("Sample, with this seed.")]
PLAIN = Sampled()
FAST, EXACT = Chosen(), Chosen(dtype="float32")  # defaults for speed, and for comparing token for token


def chosen(run: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options of `Chosen` and `Sampled`, in place of its parameters that have one as default.

    Args:
        run: the command; returns its exit code.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}  # by parameter: whose options, and which
    for p in inspect.signature(run, eval_str=True).parameters.values():
        if isinstance(p.default, Chosen | Sampled):
            hints = get_type_hints(type(p.default), include_extras=True)
            groups[p.name] = type(p.default), list(hints)
            parameters += [
                inspect.Parameter(n, p.KEYWORD_ONLY, default=getattr(p.default, n), annotation=h)
                for n, h in hints.items()
            ]
        else:
            parameters.append(p.replace(kind=p.KEYWORD_ONLY))

    @wraps(run)
    def command(**given: Any) -> int:
        made = {name: kind(**{n: given.pop(n) for n in fields}) for name, (kind, fields) in groups.items()}
        return run(**{n: settled(v) if isinstance(v, Chosen) else v for n, v in made.items()}, **given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def settled(options: Chosen) -> Chosen:
    """The same with a dtype that says which. A CPU without bfloat16 instructions is many times faster in float32."""
    if options.dtype != "auto":
        return options
    import torch

    from selfspec.packed import packable

    fast = options.device.partition(":")[0] != "cpu" or packable(torch.device("cpu"), torch.bfloat16, 0)
    return replace(options, dtype="bfloat16" if fast else "float32")


def adapters(names: str) -> str | list[str] | None:
    """What `SelfSpecModel.from_pretrained` takes as adapter: one name, several with commas between them, or "none"."""
    found = names.split(",")
    return None if names == "none" else found if len(found) > 1 else names


def load_model(options: Chosen) -> SelfSpecModel:
    """The model and adapter that the options name.

    Raises:
        ValueError: they do not fit one another, or the model's own generation settings cannot be decoded exactly.
        FileNotFoundError: there is no such model.
        ModuleNotFoundError: the package that carries or reads it isn't installed.
    """
    import torch
    import transformers

    from selfspec.model import SelfSpecModel

    transformers.utils.logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = SelfSpecModel.from_pretrained(
        options.model, adapters(options.adapter), getattr(torch, options.dtype), options.device, exact=options.exact
    )
    # one token, so that settings which `generate` refuses (a repetition penalty) are refused before any work
    model.generate([[0]], do_sample=False, max_new_tokens=1, mode="ar")
    return model


def check_modes(model: SelfSpecModel, modes: tuple[str, ...] | None, options: Chosen) -> list[str]:
    """The modes to run, each one known and possible with the model's adapter.

    Args:
        model: with or without an adapter.
        modes: as asked; None means the default.
        options: the plan's sizes.

    Raises:
        ValueError: a mode that cannot run, before any work is done.
    """
    from selfspec.planners import default_mode

    sizes = options.block_size, options.tree_nodes
    modes = modes or (default_mode(model.path is not None, "coupled", *sizes, options.lengths),)
    plans = [model.plan(m, *sizes) for m in modes if m != "auto"]
    if "auto" in modes and options.block_size is not None:
        raise ValueError(f"block_size={options.block_size}: with mode auto the planner chooses it")
    if options.tree_nodes is not None and not any("tree" in m for m in modes):
        raise ValueError(f"tree_nodes={options.tree_nodes}: mode {', '.join(modes)} builds no tree of a given size")
    if options.lengths is not None:
        chains = [p for p in plans if p.chain]
        if not chains:
            raise ValueError(f"lengths={options.lengths!r} prunes drafted chains, and mode {', '.join(modes)} has none")
        for plan in chains:
            model.pruned(plan, options.lengths)
    return list(modes)


def sizes_of(model: SelfSpecModel, mode: str, options: Chosen) -> dict[str, Any]:
    """Of what is asked for, the block size, the tree's nodes and the length rule that a mode knows: of several modes
    that run beside one another each has its own."""
    if mode == "auto":
        return {}
    chain = model.plan(mode, options.block_size, options.tree_nodes).chain
    found = {"block_size": options.block_size, "tree_nodes": options.tree_nodes if "tree" in mode else None}
    return {**found, "lengths": options.lengths if chain and read(mode).lengths is None else None}


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


def machine(device: torch.device) -> dict[str, Any]:
    """Where it runs, for reports."""
    import torch

    from selfspec.machine import device_name

    return {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def setting(model: SelfSpecModel) -> dict[str, Any]:
    """What ran where, for reports: versions, machine, dtype."""
    from selfspec.machine import versions

    device, dtype = model.backbone.device, model.backbone.dtype
    return {**versions(), **machine(device), "dtype": dtype_name(dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> float32"""
    return str(dtype).removeprefix("torch.")
