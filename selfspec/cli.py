"""The `selfspec` command: a table of subcommands, each imported only when it is run."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand that lives elsewhere.

    Args:
        summary: one line for `selfspec --help`.
        target: `module:function`; the function takes the remaining arguments (a list of strings), parses them itself
            and returns an exit code or None.
    """

    summary: str
    target: str

    def load(self) -> Callable[[list[str]], int | None]:
        """Imports the target; nothing heavy is imported before this."""
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


# One line a command:  "chat": Command("talk to a model in the terminal", "selfspec.chat:main"),
COMMANDS: dict[str, Command] = {
    "answer": Command("let a model answer prompts, to train on its answers", "selfspec.training.answer:main"),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the first argument only; `selfspec NAME --help` belongs to the command."""
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="selfspec",
        description="Faster, lossless answers from a causal language model that drafts for itself.",
        usage="selfspec [-h] [--version] COMMAND ...",
        epilog="\n".join(["commands:", *lines]) if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"selfspec {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to do")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = build_parser().parse_args(argv[:1]).command
    try:
        return COMMANDS[name].load()(argv[1:]) or 0
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell reports it


if __name__ == "__main__":
    sys.exit(main())
