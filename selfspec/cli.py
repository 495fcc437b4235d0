"""The `selfspec` command: a table of subcommands, each imported only when it is run."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from selfspec import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand that lives elsewhere.

    Args:
        summary: one line for `selfspec --help`.
        target: `module:function`; the function's parameters are typer's options, and it returns an exit code or None.
    """

    summary: str
    target: str

    def load(self) -> Callable[..., int | None]:
        """Imports the target; nothing heavy is imported before this."""
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


# One line a command:  "chat": Command("talk to a model in the terminal", "selfspec.commands:chat"),
COMMANDS: dict[str, Command] = {
    "generate": Command("answer one prompt", "selfspec.commands:generate"),
    "chat": Command("talk to a model in the terminal", "selfspec.commands:chat"),
    "demo": Command("see self-speculation at work, measured and proved", "selfspec.commands:demo"),
    "info": Command("what is installed, and whether a model and an adapter fit", "selfspec.commands:info"),
    "check": Command("prove that answers are the model's own, token for token", "selfspec.commands:check"),
    "batch": Command("answer a file of prompts", "selfspec.serving.command:batch"),
    "bench": Command("measure tau, time per token and speed-ups", "selfspec.commands:bench"),
    "report": Command("draw the figures of bench runs on one page", "selfspec.commands:report"),
    "answer": Command("let a model answer prompts, to train on its answers", "selfspec.commands:answer"),
    "profile": Command("measure what forwards cost here, for the planner", "selfspec.commands:profile"),
    "explain": Command("show what the planner expects and chooses for a prompt", "selfspec.commands:explain"),
    "train": Command("train an adapter on answers", "selfspec.training.command:main"),
}


ADDRESS = re.compile(r"auto|local|ray://.+|[\w.-]+:\d+")  # what an option takes that may stand without a value


class Subcommand(TyperCommand):
    """A command whose list options take several values at once: `--prompts A B` for `--prompts A --prompts B`.

    An option whose metavar is `[ADDRESS]` may stand without a value, which is `auto` then.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeats the option before each further value, but not where a command takes arguments too."""
        arguments = any(p.param_type_name == "argument" for p in self.params)
        lists = {name for p in self.params if getattr(p, "multiple", False) and not arguments for name in p.opts}
        bare = {name for p in self.params if getattr(p, "metavar", None) == "[ADDRESS]" for name in p.opts}
        spread: list[str] = []
        option = ""
        for arg in args:
            if spread and spread[-1] in bare and not ADDRESS.fullmatch(arg):
                spread.append("auto")
            if option and not arg.startswith("-") and spread[-1] != option:
                spread.append(option)
            option = (arg if arg in lists else "") if arg.startswith("-") else option
            spread.append(arg)
        spread += ["auto"] if spread and spread[-1] in bare else []
        once = {name: p for p in self.params if not getattr(p, "multiple", True) for name in p.opts}
        given: set[int] = set()
        for name in (arg.partition("=")[0] for arg in spread[: spread.index("--") if "--" in spread else None]):
            if name in once and id(once[name]) in given:  # the last would win, and the others be forgotten
                several = str(once[name].metavar or "").endswith("...")
                ctx.fail(f"{name} is given twice" + ("; separate its values by commas" if several else ""))
            given |= {id(once[name])} if name in once else set()
        return super().parse_args(ctx, spread)


class Commands(TyperGroup):
    """Lists `COMMANDS` by their summaries, and imports the one that is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.load(str(name)), rest

    def load(self, name: str) -> Any:
        """Import a command and read its options."""
        alone = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        target = COMMANDS[name].load()

        def run(**options: Any) -> None:
            raise typer.Exit(target(**options) or 0)

        run.__signature__ = inspect.signature(target, eval_str=True)  # type: ignore[attr-defined]
        run.__doc__ = target.__doc__
        alone.command(name, cls=Subcommand)(run)
        return typer.main.get_command(alone)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command line. Panels and colours are for terminals."""
        look = self.rich_markup_mode = "rich" if sys.stdout.isatty() and sys.stderr.isatty() else None
        # stand-ins that know their summaries; enough for the list of commands
        self.commands = {n: TyperCommand(n, help=c.summary, rich_markup_mode=look) for n, c in COMMANDS.items()}
        return super().main(*args, **extra)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"selfspec {__version__}")
        raise typer.Exit()


app = typer.Typer(name="selfspec", cls=Commands, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Faster, lossless answers from a causal language model that drafts for itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        The exit code: 0, 1 where something was found wrong, 2 where nothing could be run.
    """
    try:
        app(sys.argv[1:] if argv is None else list(argv), prog_name="selfspec")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
