import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["selfspec", "adapters", "training", "serving"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_of_code_will_be_packaged(folder):
    """setup.py finds a subpackage by its __init__.py; without one it works here and is missing from the wheel."""
    for file in (ROOT / folder).rglob("*.py"):
        assert (file.parent / "__init__.py").is_file(), file


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_the_top_level_folders_are_one_package(folder):
    module = importlib.import_module(f"selfspec.{folder}")
    assert Path(module.__file__).parent.name == folder
