"""Many requests at once: engine, batch files, Ray, metrics."""

from typing import TYPE_CHECKING

__all__ = ["Engine", "run_batch"]

if TYPE_CHECKING:
    from selfspec.serving.batch import run_batch
    from selfspec.serving.engine import Engine


def __getattr__(name: str):
    """Public names, imported when they are first asked for."""
    if name == "Engine":
        from selfspec.serving.engine import Engine

        return Engine
    if name == "run_batch":
        from selfspec.serving.batch import run_batch

        return run_batch
    raise AttributeError(f"module 'selfspec.serving' has no attribute {name!r}")
