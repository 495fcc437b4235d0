"""Lossless self-speculation for causal language models."""

__version__ = "0.1.0"
