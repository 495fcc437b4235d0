"""Mask paths: what draft rows change in a model."""

from selfspec.adapters.config import MaskPathConfig
from selfspec.adapters.path import MaskPathModel

__all__ = ["MaskPathConfig", "MaskPathModel"]
