"""What a machine is and what runs on it, for reports and for whatever is kept per machine."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers

from selfspec import __version__


def versions() -> dict[str, str]:
    """What runs: this package, the libraries that it stands on, Python."""
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"selfspec": __version__, **libraries, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
