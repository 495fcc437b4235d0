"""The trainer's configuration: typed, every unknown field an error, `key=value` overrides."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from selfspec.adapters import io
from selfspec.adapters.config import CONDITIONERS, MaskPathConfig
from selfspec.training import fused, limits
from selfspec.training.objectives import Mix, dbloom, term_of


@dataclass
class TrainConfig:
    """What to train on what, and for how long.

    Attributes:
        model: the base model: a folder, a hub name, a `.gguf` file or an embedded one (`selfspec.hub`).
        data: answer files or folders.
        out: folder of checkpoints, the log and the adapter.
        valid: answer files of the validation set; empty takes `valid_docs` answers off the training data.
        valid_docs: answers that are looked at during training.
        eval: evaluation sets by name, answer files each; looked at once at the end.
        adapter: fields of `MaskPathConfig`.
        init: an adapter folder, or a shipped adapter's name, to start from; `load` takes fields of `adapter` that are
            not given from it, and its tau stands in the report as `before`. Where objectives train other heads alone,
            its own stay as they are.
        objectives: `{name: weight}` or `{name: {"weight": w, option: value}}`; where none are given, `load` adds those
            of the adapter's heads.
        length: tokens of a packed row.
        rows: packed rows of a forward, on each process.
        anchors: draft groups of a packed row.
        accumulate: forwards of a step.
        fit: seconds of the dry run that chooses rows and anchors for the machine, starting from those above; 0 keeps
            them.
        groups: draft groups of a step, over all processes, that the dry run doesn't go beyond: a larger step is faster
            by the group, but the budget then holds fewer of them.
        hidden_share: share of groups whose bonus is hidden, where the adapter is trained for both layouts; an adapter
            of one layout has all groups in it, whatever stands here.
        split_share: share of groups with known tokens in slots 1..s, where the adapter is trained for prefix splits; it
            counts for nothing where it is not, nor under `complement`, where every anchor has a split.
        complement: give every anchor both views of one split instead, each charged where it is used (D-Loop).
        replay_share: share of groups that start where a draft of theirs was rejected instead (Draft-OPD).
        growth: block sizes of equal stages of the schedule, up to the adapter's own (DBloom); empty has one stage.
        lr: peak learning rate.
        mask_lr: factor on it for mask embeddings.
        betas: of AdamW, two.
        weight_decay: of AdamW.
        clip: largest gradient norm; 0 leaves gradients alone.
        warmup: share of the schedule in which the rate rises.
        final_lr: share of the peak at the schedule's end.
        ema: decay of the averaged weights; 0 keeps none.
        minutes: training time that the schedule is fitted to, over all calls; an estimate under `deterministic`.
        max_steps: steps that the schedule is fitted to instead, when not 0.
        stop_after: minutes after which this call saves and ends, the schedule unfinished; 0 never does.
        seed: of everything random.
        deterministic: kernels that give the same numbers every time; resuming is then bit-exact on a GPU too, on as
            many of the same kind. The schedule goes by steps: `max_steps`, or as many as the dry run finds `minutes`
            to hold, which the checkpoint keeps. Without flash-attn and autotuned kernels.
        attention: backend; "auto" is "sdpa" without CUDA, else the faster of "grouped" and "flex" that runs there (see
            `step.backbone_of`); "flash" runs clean rows by flash-attn, and draft rows by FlexAttention; "grouped" runs
            draft rows by kernels of their own, and clean rows by FlexAttention.
        compile: compile layers and losses; None does so on CUDA.
        compile_mode: of `torch.compile` ("default", "max-autotune-no-cudagraphs").
        flex: options of FlexAttention's kernels, such as `{"BLOCK_M": 64, "BLOCK_N": 64}`.
        graph: run forward and backward as one CUDA graph; shapes are fixed, and steps leave no gaps on the device.
        prefetch: steps drawn ahead on a thread; 0 draws each when it is run.
        shard: split the layers over the processes (FSDP), of which true wants several; None does so under
            `accelerate launch --use_fsdp`.
        dtype: of the base model and the activations; "auto" is bfloat16 on CUDA and float32 elsewhere, as most CPUs
            are many times slower in bfloat16.
        device: "auto" is CUDA where there is one.
        log_every: steps between log records.
        eval_every: minutes between validations; 0 validates at the end only.
        save_every: minutes between checkpoints.
        resume: go on from the checkpoint in `out` if there is one.
        tensorboard: write TensorBoard's events beside the log; None does so where it is installed.
        logits: "keep" those of labels for the backward pass, or "forget" them and make them again, by liger-kernel on
            CUDA: slower, in less memory, and not in a graph.
        profile: steps to run under torch's profiler first; the table is written to `profile.txt`.
        turn: a lock file of runs that share a GPU: one of them trains at a time, while others load, compile and
            evaluate; empty waits for nobody.
    """

    model: str = ""
    data: tuple[str, ...] = ()
    out: str = "adapter"
    valid: tuple[str, ...] = ()
    valid_docs: int = 64
    eval: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=lambda: {"mask_embedding": "per_slot"})
    init: str = ""
    objectives: dict[str, Any] = field(default_factory=lambda: {"ce": 1.0, "dpace": 0.3})
    length: int = 1024
    rows: int = 12
    anchors: int = 128
    accumulate: int = 1
    fit: float = 30.0
    groups: int = 4096
    hidden_share: float = 0.5
    split_share: float = 0.25
    complement: bool = False
    replay_share: float = 0.0
    growth: tuple[int, ...] = ()
    lr: float = 6e-4
    mask_lr: float = 5.0
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: float = 0.04
    final_lr: float = 0.02
    ema: float = 0.998
    minutes: float = 25.0
    max_steps: int = 0
    stop_after: float = 0.0
    seed: int = 0
    deterministic: bool = False
    attention: str = "auto"
    compile: bool | None = None
    compile_mode: str = "default"
    flex: dict[str, Any] = field(default_factory=dict)
    graph: bool = False
    prefetch: int = 2
    shard: bool | None = None
    dtype: str = "auto"
    device: str = "auto"
    log_every: int = 50
    eval_every: float = 2.0
    save_every: float = 4.0
    resume: bool = False
    tensorboard: bool | None = None
    logits: str = "keep"
    profile: int = 0
    turn: str = ""

    def __post_init__(self) -> None:
        for name in ("data", "valid"):
            value = getattr(self, name)
            setattr(self, name, (value,) if isinstance(value, str) else tuple(value))
        self.betas, self.growth = tuple(self.betas), tuple(self.growth)
        path, mix = self.path, self.mix  # both raise where something is wrong
        if self.graph and self.attention == "flash":
            raise ValueError(
                "attention=flash counts the documents of every step, which graph=true cannot: leave one out"
            )
        if self.logits not in ("keep", "forget") or (self.logits == "forget" and self.graph):
            raise ValueError(f"logits={self.logits!r}: expected keep or forget, the latter without graph=true")
        mix.require(path.heads, _settings_of(self.init).get("heads", ()) if self.init else ())
        first = dbloom.block(0.0, self.growth, path.block_size)
        if first < 3 and (path.seed_row or path.prefix_splits):
            raise ValueError(f"growth={self.growth}: a seed row and prefix splits need blocks of 3 or more")
        if self.complement and not path.prefix_splits:
            raise ValueError("complement=True trains prefix splits: set adapter.prefix_splits")
        limits.check(self)

    @property
    def path(self) -> MaskPathConfig:
        """The adapter's configuration."""
        return MaskPathConfig.from_dict(self.adapter)

    @property
    def mix(self) -> Mix:
        """The objectives."""
        return Mix.from_config(self.objectives)

    def precision(self, cuda: bool) -> torch.dtype:
        """The dtype, on CUDA or elsewhere."""
        auto = "bfloat16" if cuda else "float32"
        return getattr(torch, auto if self.dtype == "auto" else self.dtype)

    def backend(self, cuda: bool, compiled: bool) -> str:
        """The attention backend; "auto" leaves the choice to `step.backbone_of`.

        Args:
            cuda: the device is one.
            compiled: layers are compiled.

        Raises:
            ValueError: options that ask for a device or for compiled layers which are not there.
        """
        name = "sdpa" if self.attention == "auto" and not cuda else self.attention
        if self.logits == "forget" and not cuda:
            raise ValueError("logits=forget runs kernels of CUDA, and the device is none: leave it out")
        if self.logits == "forget":
            fused.require()
        if self.graph and not cuda:
            raise ValueError("graph=true captures a CUDA graph, and the device is none: leave it out")
        if self.flex and not (compiled and name in ("auto", "flex", "flash", "grouped")):
            raise ValueError("flex= sets options of compiled FlexAttention: use attention=flex compile=true")
        return name

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def load(
        cls, file: str | Path | None = None, overrides: typing.Sequence[str] = (), start: dict[str, Any] | None = None
    ) -> TrainConfig:
        """From a YAML or JSON file, or a start, and `key=value` overrides; `a.b=value` sets a field of a nested one.

        Raises:
            ValueError: a field that doesn't exist, or a value of the wrong type.
        """
        data = read_file(Path(file)) if file is not None else copy.deepcopy(start or {})
        defaults, whole = cls(), "adapter" in data
        for item in overrides:
            key, eq, text = item.partition("=")
            if not eq:
                raise ValueError(f"{item!r}: expected key=value")
            head, *rest = key.split(".")
            if not rest:
                data[head] = _value(text)
                whole |= head == "adapter"
                continue
            at = data.setdefault(head, {} if head == "adapter" else dict(getattr(defaults, head, None) or {}))
            for name in rest[:-1]:
                at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ValueError(f"{item!r}: {head} holds no fields")
            at[rest[-1]] = _value(text)
        adapter = data.get("adapter", {})
        if isinstance(adapter, dict):
            inherits = data.get("init") and "style" not in adapter
            under = _settings_of(data["init"]) if inherits else {} if whole else defaults.adapter
            data["adapter"] = under | adapter
            heads = data["adapter"].get("heads", ())
            if "objectives" not in data and heads:
                data["objectives"] = _taught(heads, defaults.objectives)
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field that doesn't exist, or a value of the wrong type.
        """
        kinds = typing.get_type_hints(cls)
        fields = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - fields):
            raise ValueError(f"unknown fields: {', '.join(unknown)}; expected some of {', '.join(sorted(fields))}")
        return cls(**{name: _typed(name, value, kinds[name]) for name, value in data.items()})


def _settings_of(adapter: str | Path) -> dict[str, Any]:
    """What an adapter folder's configuration says beside the defaults; nothing that was measured."""
    plain, found = MaskPathConfig().to_dict(), io.read_config(io.find(adapter)).to_dict()
    measured = ("acceptance", "acceptance_of", "fingerprint")
    return {k: v for k, v in found.items() if v != plain[k] and k not in measured}


def _taught(heads: typing.Sequence[str], plain: dict[str, float]) -> dict[str, float]:
    """Objectives of a path with heads: each head's term, and half of the plain ones beside a head that drafts."""
    drafts = any(h in CONDITIONERS for h in heads)
    terms = {term_of(h): 1.0 for h in heads}
    return {name: weight * (0.5 if drafts else 1.0) for name, weight in plain.items()} | terms


def _typed(name: str, value: Any, kind: Any) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if origin is tuple and isinstance(value, list | tuple | str):
            return value
        if origin is int and isinstance(value, bool):
            continue
        if isinstance(value, origin):
            return value
    raise ValueError(f"{name}={value!r}: expected {kind if len(options) > 1 else options[0]}")


def _value(text: str) -> Any:
    """A value of the command line: JSON where it is, a string otherwise."""
    special = {"None": None, "True": True, "False": False}
    if text in special:
        return special[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def read_file(file: Path) -> dict[str, Any]:
    """A YAML or JSON file's mapping.

    Raises:
        ValueError: there is no such file.
    """
    if not file.is_file():
        raise ValueError(f"no file at {file}")
    if file.suffix == ".json":
        return json.loads(file.read_text())
    import yaml

    return yaml.safe_load(file.read_text()) or {}
