import subprocess
import sys

import pytest

from selfspec import __version__, cli


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"selfspec {__version__}"


def test_help_lists_every_command(capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("say hello", "no.such.module:main"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in out and command.summary in out


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_a_wrong_command_line_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "selfspec" in capsys.readouterr().err


def greet(argv):
    if argv == ["interrupt"]:
        raise KeyboardInterrupt
    return len(argv) or None


def test_the_command_gets_its_own_arguments(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("say hello", f"{__name__}:greet"))
    assert cli.main(["greet"]) == 0
    assert cli.main(["greet", "--help", "--version"]) == 2  # both passed on, not taken
    assert cli.main(["greet", "interrupt"]) == 130


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_target_exists(name):
    assert callable(cli.COMMANDS[name].load())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_torch(flag):
    code = f"""
import sys
from selfspec.cli import main
try:
    main([{flag!r}])
except SystemExit as stop:
    assert stop.code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
