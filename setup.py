"""Maps the four top-level folders to one package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

packages = find_packages(include=["selfspec", "selfspec.*"])
for folder in ("adapters", "training", "serving"):
    packages += [f"selfspec.{name}" for name in find_packages(include=[folder, f"{folder}.*"])]

setup(packages=packages)
