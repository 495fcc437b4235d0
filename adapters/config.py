"""What a mask path is: block, entry layer, tuned projections, mask embeddings, the layouts that it was trained for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "dense")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
GROUPS = {"attention": ATTENTION, "all": ATTENTION + MLP}
LAYOUTS = ("known", "hidden")
NOISES = ("mask", "masked", "uniform")
HEADS = ("calibrator", "confidence", "length", "markov", "sampler")
CONDITIONERS = ("markov", "sampler")  # forms of the head that knows the token before a slot
STYLES: dict[str, dict[str, Any]] = {  # published settings as a whole; fields beside `style` override them
    "uno": dict(  # arXiv 2609.04010; UNO's own alpha is 16 times its rank
        seed_row=True, noise="uniform", causal=True, shift=True, tuning="lora", targets="all", rank=128, alpha=2048.0
    ),
}


@dataclass(frozen=True)
class MaskPathConfig:
    """Configuration of a mask path; saved beside its weights.

    Attributes:
        block_size: rows of a group, slot 0 included; the largest block that may be asked for.
        entry: first layer that draft rows run through.
        targets: "attention", "all", or names of Linear modules to tune.
        tuning: "lora" (low-rank deltas) or "copy" (attention-tuned copies of the weights).
        rank: LoRA rank.
        alpha: LoRA scale; deltas are multiplied by alpha / rank.
        layers: tuned layers; None means every layer from `entry` on.
        mask_embedding: "one" vector for every mask, or one "per_slot".
        taps: hidden states of the last clean position fed to the group, as indices into transformers' `hidden_states`.
        layouts: layouts trained for: "known" (slot 0 is the bonus token), "hidden" (slot 0 is a mask).
        prefix_splits: trained to take known draft tokens in slots 1..s (a loop's second pass).
        causal: attention inside a group is causal rather than bidirectional.
        shift: a row predicts the token one ahead rather than the one at its own position.
        mask_id: vocabulary id whose embedding the mask starts from; never drafted. None starts from the mean embedding.
        noise: what unknown slots hold: "mask"; "masked", which trains with some of them known (BD3LM's schedule) and
            drafts from masks; or "uniform", random tokens of the vocabulary instead of masks (UNO).
        seed_row: the anchor rides as a clean row, whose output is the first draft, and groups hold the rows after it.
        heads: of "calibrator", "confidence", "length", and "markov" or "sampler" (`selfspec.adapters.heads`).
        head_rank: hidden units of each head.
        acceptance: where a planner starts from: the share of drafts 1, 2, ... that verification accepted of those whose
            predecessors it accepted, bonus known, on texts like those to come. Empty: not measured.
        acceptance_of: the same of other kinds of draft by their names, "block=4" (a smaller block), "tree=31" (by any
            branch of so many nodes): what `selfspec profile --tell` measures.
    """

    block_size: int = 16
    entry: int = 0
    targets: str | tuple[str, ...] = "attention"
    tuning: str = "copy"
    rank: int = 64
    alpha: float = 64.0
    layers: tuple[int, ...] | None = None
    mask_embedding: str = "one"
    taps: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ("known",)
    prefix_splits: bool = False
    causal: bool = False
    shift: bool = False
    mask_id: int | None = None
    noise: str = "mask"
    seed_row: bool = False
    heads: tuple[str, ...] = ()
    head_rank: int = 256
    acceptance: tuple[float, ...] = ()
    acceptance_of: dict[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    fingerprint: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("layers", "taps", "layouts", "heads", "acceptance"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))
        object.__setattr__(self, "acceptance_of", {k: tuple(v) for k, v in self.acceptance_of.items()})
        for name, told in {"acceptance": self.acceptance, **self.acceptance_of}.items():
            _check(all(0 <= a <= 1 for a in told), name, told, "shares between 0 and 1")
        kinds = all(k.startswith(("block=", "tree=")) and told for k, told in self.acceptance_of.items())
        _check(kinds, "acceptance_of", self.acceptance_of, 'names such as "block=4" and "tree=31", and shares of each')
        _check(self.block_size >= 2, "block_size", self.block_size, "at least 2 (slot 0 and one draft)")
        _check(self.entry >= 0, "entry", self.entry, "a layer index, 0 or more")
        _check(self.tuning in ("lora", "copy"), "tuning", self.tuning, "'lora' or 'copy'")
        _check(self.rank >= 1, "rank", self.rank, "1 or more")
        whole = self.alpha > 0 and float(self.alpha).is_integer()  # PEFT's configuration holds an integer
        _check(whole, "alpha", self.alpha, "a whole number above 0")
        _check(self.mask_embedding in ("one", "per_slot"), "mask_embedding", self.mask_embedding, "'one' or 'per_slot'")
        _check(
            not isinstance(self.targets, str) or self.targets in GROUPS,
            "targets",
            self.targets,
            f"one of {sorted(GROUPS)} or a list of module names",
        )
        _check(
            bool(self.layouts) and set(self.layouts) <= set(LAYOUTS), "layouts", self.layouts, f"a subset of {LAYOUTS}"
        )
        long = not self.prefix_splits or self.block_size >= 3
        _check(long, "block_size", self.block_size, "at least 3 for prefix splits (a slot to know, one to draft)")
        _check(self.noise in NOISES, "noise", self.noise, f"one of {NOISES}")
        _check(set(self.heads) <= set(HEADS), "heads", self.heads, f"a subset of {HEADS}")
        once = len(set(CONDITIONERS) & set(self.heads)) <= 1
        _check(once, "heads", self.heads, f"one of {CONDITIONERS}, as both condition a slot on the token before it")
        _check(self.head_rank >= 1, "head_rank", self.head_rank, "1 or more")
        known = self.layouts == ("known",) and not self.prefix_splits
        _check(self.noise != "uniform" or known, "noise", self.noise, "masks where the bonus or a prefix is hidden")
        _check(
            self.noise != "masked" or not self.shift, "noise", self.noise, "a path without shift (rows see the rest)"
        )
        seeded = self.shift and known and self.block_size >= 3
        _check(not self.seed_row or seeded, "seed_row", True, "shift, a block of 3 or more, only the layout 'known'")
        hidden = "hidden" in self.layouts or "calibrator" not in self.heads
        _check(hidden, "heads", self.heads, "the layout 'hidden' for a calibrator")

    @property
    def target_names(self) -> tuple[str, ...]:
        """Last names of the Linear modules that are tuned."""
        return GROUPS[self.targets] if isinstance(self.targets, str) else self.targets

    def rows(self, block_size: int) -> int:
        """Rows of a group that drafts a block: slot 0 stands for the anchor unless the path is shifted past it."""
        return block_size - self.shift - self.seed_row

    def tuned_layers(self, n_layers: int) -> tuple[int, ...]:
        """Indices of the layers whose projections are tuned.

        Raises:
            ValueError: when `entry` or `layers` do not fit a model of n_layers.
        """
        if self.entry >= n_layers:
            raise ValueError(f"entry layer {self.entry} is past the model's last layer ({n_layers - 1})")
        layers = range(self.entry, n_layers) if self.layers is None else self.layers
        if any(not self.entry <= i < n_layers for i in layers):
            raise ValueError(f"layers {tuple(layers)} must lie between entry {self.entry} and {n_layers - 1}")
        return tuple(layers)

    def require(self, layout: str, block_size: int | None = None) -> None:
        """Refuse what the path was not trained for: it would run, and only be slow.

        Raises:
            ValueError: unknown layout, or a block larger than the trained one.
        """
        if layout not in self.layouts:
            raise ValueError(
                f"this adapter was trained for the layouts {self.layouts}, not for {layout!r}; "
                "train it for that layout or choose another mode"
            )
        if block_size is not None and not 1 <= block_size <= self.block_size:
            raise ValueError(
                f"block size {block_size} is outside 1..{self.block_size}, the block that this adapter was trained for"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MaskPathConfig:
        """The inverse of `to_dict`. A `style` ("uno") stands for the fields of a published setting.

        Raises:
            ValueError: for a field or a style that does not exist.
        """
        style = data.get("style")
        if style is not None:
            _check(style in STYLES, "style", style, f"one of {sorted(STYLES)}")
            data = STYLES[style] | {k: v for k, v in data.items() if k != "style"}
        unknown = sorted(set(data) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"unknown fields in the adapter's configuration: {', '.join(unknown)}")
        return cls(**data)


def _check(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: expected {wanted}")
