import subprocess
import sys
from typing import Annotated

import pytest
import tiny_chat
import typer
from rich.console import Console

from selfspec import __version__, cli, hub, options, terminal
from selfspec.options import EXACT, Chosen, chosen, sizes
from selfspec.plan import Plan


def test_version():
    result = tiny_chat.run("--version")
    assert result.exit_code == 0 and result.stdout == f"selfspec {__version__}\n"


def test_help_lists_every_command(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("say hello", "no.such.module:main"))
    result = tiny_chat.run("--help")
    assert result.exit_code == 0
    for name, command in cli.COMMANDS.items():
        assert name in result.stdout and command.summary in result.stdout


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "Missing command"),
        (["no-such-command"], "No such command"),
        (["chek"], "Did you mean 'check'?"),
        (["--verbose"], "No such option"),
        (["check", "--no-such-option"], "No such option"),
        (["check", "prompts.jsonl"], "unexpected extra argument"),
        (["check", "--dtype", "int8"], "'int8' is not one of"),
        (["check", "--limit", "0"], "--limit"),
        (["check", "--limit"], "requires an argument"),
        (["generate"], "Missing argument"),
        (["answer", "prompts.jsonl", "-o", "out"], "--model"),
    ],
)
def test_a_wrong_command_line_exits_with_2(argv, words):
    result = tiny_chat.run(*argv)
    assert result.exit_code == 2 and not result.stdout
    assert words in result.stderr and result.stderr.isascii()  # no panels where no person looks


def greet(names: list[str] | None = None, twice: Annotated[list[str] | None, typer.Option()] = None):
    """Say hello."""
    if names == ["interrupt"]:
        raise KeyboardInterrupt
    print(names, twice)
    return len(names or []) or None


def test_a_command_has_its_own_options_and_exit_code(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("say hello", f"{__name__}:greet"))
    assert cli.main(["greet"]) == 0
    assert cli.main(["greet", "--names", "a", "--names", "b"]) == 2
    assert cli.main(["greet", "--names", "interrupt"]) == 130
    assert "Say hello." in tiny_chat.run("greet", "--help").stdout
    result = tiny_chat.run("greet", "--twice", "a", "b", "--names", "c", "d", "--twice", "e")
    assert result.stdout == "['c', 'd'] ['a', 'b', 'e']\n" and result.exit_code == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_describes_its_options(name):
    result = tiny_chat.run(name, "--help")
    assert result.exit_code == 0
    assert "--help" in result.stdout and cli.COMMANDS[name].load().__doc__.split()[0] in result.stdout


def test_the_shared_options_fill_one_object():
    seen = []

    @chosen
    def command(words: str, where: Chosen = EXACT) -> int:
        seen.append((words, where))
        return 0

    app = typer.Typer()
    app.command()(command)
    runner = typer.testing.CliRunner()
    assert runner.invoke(app, ["hello"], catch_exceptions=False).exit_code == 0
    argv = ["hello", "--model", "m", "--adapter", "none", "--dtype", "float64", "--block-size", "3"]
    assert runner.invoke(app, argv, catch_exceptions=False).exit_code == 0
    assert seen == [("hello", EXACT), ("hello", Chosen("m", "none", "float64", block_size=3))]


@pytest.mark.parametrize("text", ["0", "-1", "1,", "x", "1.5", "²"])
def test_sizes_are_whole_numbers(text):
    assert sizes("8, 1,8") == (8, 1)
    with pytest.raises(typer.BadParameter, match="is not a whole number"):
        sizes(text)


def test_help_and_version_import_no_torch():
    """Nor what takes as long: a command's help is there at once."""
    argvs = [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
    code = f"""
import sys
from selfspec.cli import main
for argv in {argvs!r}:
    assert main(argv) == 0
    assert not {{"torch", "transformers", "matplotlib", "pyarrow"}} & set(sys.modules), argv
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_default_model_is_one_that_comes_along():
    assert options.MODEL in hub.EMBEDDED and options.FAST.model == options.MODEL


class Terminal:
    """Stands in for a stream that is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_table_is_plain_in_a_pipe_and_whole(capsys):
    terminal.show_table(["name", "a long heading"], [["x[1]", "1.0"], ["y" * 150, "12.25"]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "a", "long", "heading"], ["x[1]", "1.0"], ["y" * 150, "12.25"]]
    assert lines[1].rstrip().endswith(" 1.0") and len(lines[1].rstrip()) == len(lines[2].rstrip())


def test_errors_and_tables_are_drawn_in_a_terminal_and_whole(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Terminal())
    terminal.show_table(["name", *["figure"] * 9], [["x", *(f"1234.{i}" for i in range(9))]])
    with pytest.raises(typer.Exit) as stop, terminal.refusing():
        raise ValueError("no [such] thing " + "word " * 20 + "end")
    assert stop.value.exit_code == 2
    assert "─" in sys.stdout.text and all(f"1234.{i}" in sys.stdout.text for i in range(9))
    assert "╭─ Error" in sys.stderr.text and "no [such] thing" in sys.stderr.text
    assert sys.stderr.text.count("word") == 20 and "end" in sys.stderr.text


def test_only_what_the_user_can_put_right_is_refused():
    with pytest.raises(KeyError), terminal.refusing():
        raise KeyError("a bug")


def test_progress_says_rate_and_time_left(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    with terminal.Progress(10, done=2) as progress:
        progress.skip(1)
        progress.add(1, 50)  # too early to show
        clock[0] = 30.0
        progress.add(2, 100)
    assert capsys.readouterr().err == "5 of 9 answers, 5 tokens/s, 0:40 left\n"
    with terminal.Progress(10, quiet=True) as progress:
        clock[0] = 100.0
        progress.add(1, 1)
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Console(stderr=True).is_terminal
    with terminal.Progress(10) as progress:
        progress.every = -1
        progress.add(4, 100)
        print("on stdout")
        progress.add(1, 20)
    assert "5/10" in sys.stderr.text and "tokens/s" in sys.stderr.text
    assert capsys.readouterr().out == "on stdout\n"


def test_an_option_given_twice_is_not_forgotten_once(capsys):
    """`--mode ar --mode tree` ran the second alone."""
    for argv, said in (
        (["check", "--mode", "ar", "--modes", "tree"], "by commas"),
        (["info", "--model=a", "--model", "b"], "twice"),
    ):
        assert cli.main(argv) == 2
        assert said in capsys.readouterr().err


def test_python_m_selfspec_is_the_command_line():
    found = subprocess.run([sys.executable, "-P", "-m", "selfspec", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"selfspec {__version__}\n")


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_a_message(device):
    found = tiny_chat.run("generate", "hi", "--device", device)
    assert found.exit_code == 2 and f"device='{device}' is not available" in found.stderr and "cpu" in found.stderr


def test_a_tree_too_wide_for_memory_is_refused():
    with pytest.raises(ValueError, match="tree_nodes=100000: expected at most 1024"):
        Plan("tree", tree_nodes=100_000)
