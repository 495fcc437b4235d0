"""Kernels that one round launches outside the layers, by stage and function: counted on a CPU, without a GPU.

A tiny model of the plain dense shape decodes as a captured round would. An operator of torch counts as one launch, and
so does a Triton kernel (run by Triton's interpreter); views, and operators on nothing, count as none. Some operators
are several kernels on a GPU (a sort, a top-k, a log-sum-exp), so these are lower bounds. Passes are rows of the
vocabulary's width that torch's operators read and write; those of kernels are not counted.

TRITON_INTERPRET=1 python benchmarks/launches.py [--detail] [--layers]
"""

import argparse
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as hf
from triton.runtime import interpreter

from selfspec import kernels
from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.backbone import Backbone
from selfspec.graphs import Graphs
from selfspec.penalties import PresenceFrequencyPenalty
from selfspec.plan import Plan
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session

VOCAB = 160
VIEWS = {  # operators that launch nothing
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "t", "permute", "alias",
    "detach", "as_strided", "split", "split_with_sizes", "unbind", "lift_fresh", "diagonal", "unfold", "empty",
    "empty_like", "empty_strided", "new_empty", "scalar_tensor",
}  # fmt: skip
PLAIN = (hf.TemperatureLogitsWarper(0.7),)
CUTS = (
    *(*PLAIN, hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.95), hf.MinPLogitsWarper(0.02)),
    hf.TypicalLogitsWarper(0.98),
)
EOS = torch.tensor([3])
PENALTIES = (
    *(hf.RepetitionPenaltyLogitsProcessor(1.05), hf.NoRepeatNGramLogitsProcessor(8)),
    *(hf.NoBadWordsLogitsProcessor([[11, 12, 13]]), hf.MinNewTokensLengthLogitsProcessor(4, 16, EOS)),
    *(hf.ExponentialDecayLengthPenalty((400, 1.01), EOS, 4), hf.SuppressTokensLogitsProcessor([7, 9])),
    PresenceFrequencyPenalty(0.1, 0.1, 4),
)
CASES = {  # mode, processors (None decodes greedily without any), heads
    "ar, greedy": ("ar", None),
    "sequential, greedy": ("sequential", None),
    "tree, greedy": ("tree", None),
    "ar, sampled": ("ar", PLAIN),
    "sequential, sampled": ("sequential", PLAIN),
    "sequential, sampled with cuts": ("sequential", CUTS),
    "tree, sampled with cuts": ("tree", CUTS),
    "ar, everything": ("ar", PENALTIES + CUTS),
    "sequential, everything": ("sequential", PENALTIES + CUTS),
    "tree, everything": ("tree", PENALTIES + CUTS),
    "sequential with a head, greedy": ("sequential", None, ("sampler",)),
    "sequential with a head, sampled": ("sequential", PLAIN, ("sampler",)),
    "sequential with a head, everything": ("sequential", PENALTIES + CUTS, ("sampler",)),
    "tree with a head, sampled": ("tree", PLAIN, ("sampler",)),
}
ROOT = Path(sys.modules[Session.__module__].__file__ or "").resolve().parent.parent


@cache
def resolved(file: str) -> Path:
    """Where a source file really is."""
    return Path(file).resolve()


class Replayed(Graphs):
    """Runs everything as it is, but says that it replays."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.enabled = True

    def __call__(self, key, fn, *inputs):
        return fn(*inputs)


class Launches(TorchDispatchMode):
    """Counts what is launched, by place."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.found: Counter = Counter()
        self.rows = 0
        self.layers, self.inside, self.paused = layers, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sized = any(
            isinstance(t, torch.Tensor) and t.numel() for t in (out if isinstance(out, tuple | list) else [out])
        )
        if name not in VIEWS and sized:
            self.note(name)
            if not (self.paused or self.inside or name == "gather"):  # which reads what it gives
                seen = {id(t): t for t in (*args, *(kwargs or {}).values(), out) if isinstance(t, torch.Tensor)}
                wide = (t for t in seen.values() if t.dim() and VOCAB <= t.shape[-1] <= VOCAB + 1)
                self.rows += sum(t.numel() // t.shape[-1] for t in wide)
        return out

    def note(self, name: str) -> None:
        """One launch."""
        if self.paused or (self.inside and not self.layers):
            return
        frame, place, stage = sys._getframe(1), None, "rest"
        while frame is not None:
            path = resolved(frame.f_code.co_filename)
            if path.parent.name != "benchmarks" and ROOT in path.parents:
                place = place or f"{path.stem}.{frame.f_code.co_qualname}"
                at = frame.f_code.co_name
                if path.stem == "decode" and at in ("draft", "verify", "settle"):
                    stage = at
                if path.stem == "choose" and at in ("accept", "tree"):
                    stage = {"accept": "choose", "tree": "propose"}[at]
            frame = frame.f_back
        self.found[stage, place, name] += 1

    def launch(self, run):
        """A Triton kernel."""

        def wrapped(*args, **kwargs):
            self.note("triton")
            if self.inside:
                return None  # what layers compute doesn't matter here, and the interpreter is slow
            before, self.paused = self.paused, True
            try:
                return run(*args, **kwargs)
            finally:
                self.paused = before

        return wrapped


def session_of(mode: str, heads: tuple[str, ...]) -> Session:
    """A tiny model that runs fused layers, and a full-depth mask path."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).half().eval()
    path = MaskPathModel(
        model, MaskPathConfig(block_size=16, targets="attention", layouts=("known", "hidden"), heads=heads)
    )
    body = Backbone(model, path.requires_grad_(False).eval(), backend="triton", verify=False)
    body.fuse()
    return Session(body, Plan(mode, 16, 32), 1, 256, graphs=Replayed())


@torch.no_grad()
def count(layers: bool, mode: str, processors: tuple | None, heads: tuple[str, ...] = ()) -> Launches:
    """One round of one request, once all is set up."""
    session = session_of(mode, heads)
    how = None if processors is None else Sampling(Pipeline(LogitsProcessorList(processors)), True, 7)
    request = Request([3, 7, 1, 9], 200, sampling=how)
    session.add([request])
    seen = Launches(layers)
    for layer in session.backbone.layers:
        layer.register_forward_pre_hook(lambda *_: setattr(seen, "inside", seen.inside + 1))
        layer.register_forward_hook(lambda *_: setattr(seen, "inside", seen.inside - 1))
    run = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = seen.launch(run)  # type: ignore[method-assign]
    try:
        for _ in range(3):
            session.step()
        seen.found.clear()
        seen.rows = 0
        with seen:
            session._start()
    finally:
        interpreter.GridExecutor.__call__ = run  # type: ignore[method-assign]
    return seen


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detail", action="store_true", help="operators of every function")
    parser.add_argument("--layers", action="store_true", help="count what the layers launch too")
    parser.add_argument("--case", action="append", choices=CASES)
    args = parser.parse_args()
    kernels.DEVICES.add("cpu")
    for case in args.case or CASES:
        seen = count(args.layers, *CASES[case])
        found = seen.found
        print(f"{case}: {sum(found.values())} launches, {seen.rows} passes")
        stages: dict[str, Counter] = {}
        for (stage, place, name), k in found.items():
            stages.setdefault(stage, Counter())[f"{place}  {name}" if args.detail else place] += k
        for stage, places in stages.items():
            print(f"  {stage}: {sum(places.values())}")
            for place, k in places.most_common():
                print(f"    {k:4d}  {place}")


if __name__ == "__main__":
    main()
