"""Lossless self-speculation for causal language models."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["SelfSpecModel", "__version__", "custom_generate"]

if TYPE_CHECKING:
    from selfspec.hf_generate import custom_generate
    from selfspec.model import SelfSpecModel


def __getattr__(name: str):
    """Public names, imported when they are first asked for: the command line's help needs no torch."""
    if name == "SelfSpecModel":
        from selfspec.model import SelfSpecModel

        return SelfSpecModel
    if name == "custom_generate":
        from selfspec.hf_generate import custom_generate

        return custom_generate
    raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
