"""What a person sees: tables, progress, errors. Rich in a terminal, plain lines where output is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

WIDE = 1000  # columns of a pipe: nothing is folded that another program may read


def console(stderr: bool = False) -> Console:
    """A console on stdout or stderr as they are now; brackets in its text are text."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True, width=None if terminal else WIDE
    )


def show_table(heading: list[str], rows: list[list[str]]) -> None:
    """Print a table on stdout; the first column is left-aligned, the others right."""
    target = console()
    table = Table(box=box.SIMPLE if target.is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(heading):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    target.width = WIDE  # a narrow terminal breaks the lines, and no figure is left out
    target.print(table)


def say(message: str) -> None:
    """A line on stderr."""
    console(stderr=True).print(message)


def refuse(message: str, code: int = 2) -> NoReturn:
    """Say on stderr why nothing is done, and end the command."""
    target = console(stderr=True)
    if target.is_terminal:
        target.print(Panel(message, title="Error", title_align="left"), soft_wrap=False)
    else:
        target.print(f"selfspec: {message}")
    raise typer.Exit(code)


@contextmanager
def refusing() -> Iterator[None]:
    """Around set-up: what the user can put right ends the command in a message, without a traceback."""
    try:
        yield
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        refuse(str(error))


class Progress:
    """Answers done, tokens a second and time left, on stderr: a bar in a terminal, else a line now and then.

    Use as a context manager. It draws only when something is booked, so that no thread of it disturbs a measurement.

    Args:
        total: answers that are to be written.
        done: answers that were there before.
        quiet: show nothing.
    """

    def __init__(self, total: int, done: int = 0, quiet: bool = False):
        self.total, self.done, self.quiet = total, done, quiet
        self.answered = self.tokens = 0  # in this run
        self.note = ""  # what else is worth showing
        self.console = console(stderr=True)
        self.every = 0.2 if self.console.is_terminal else 20.0  # seconds between two views
        self.began = self.shown = time.monotonic()
        self.bar: Bar | None = None
        if self.console.is_terminal and not quiet:
            left, rate = TimeRemainingColumn(), TextColumn("{task.fields[rate]}")
            columns = BarColumn(), MofNCompleteColumn(), TextColumn("answers"), rate, left
            # stdout is left alone: it may be a file while stderr is a terminal
            how = {"auto_refresh": False, "transient": True, "redirect_stdout": False}
            self.bar = Bar(*columns, console=self.console, **how)  # type: ignore[arg-type]
            self.task = self.bar.add_task("", total=total, completed=done, rate="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def skip(self, answers: int) -> None:
        """Answers that will not be written."""
        self.total -= answers

    def add(self, answers: int, tokens: int) -> None:
        """Book answers and tokens, and show them if it is time."""
        self.done, self.answered, self.tokens = self.done + answers, self.answered + answers, self.tokens + tokens
        if not self.quiet and time.monotonic() - self.shown > self.every:
            self.show()

    def show(self) -> None:
        """Show how far it is."""
        self.shown = time.monotonic()
        seconds = max(self.shown - self.began, 1e-9)
        rate = f"{self.tokens / seconds:,.0f} tokens/s" + f", {self.note}" * bool(self.note)
        if self.bar is not None:
            self.bar.update(self.task, total=self.total, completed=self.done, rate=rate, refresh=True)
        else:
            left = (self.total - self.done) * seconds / self.answered if self.answered else None
            clock = "?" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}"
            self.console.print(f"{self.done:,} of {self.total:,} answers, {rate}, {clock} left")
