"""Training speed of variants: anchors a second, share of the device's bf16 peak, and what the host spends on a step.

python benchmarks/train_speed.py --json train_speed.json          # under 3 minutes on one GPU
python benchmarks/train_speed.py --entries 0 --variants base,graph --set rows=24

Random weights of SmolLM2-135M's shape and synthetic answers: what is computed is what training computes. Variants are
run in the order given until the time is up; one that fails is a line with its error.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer
from selfspec.training.flops import Work, flops, mfu
from selfspec.training.log import profiled
from selfspec.training.trainer import Trainer

SMOLLM2 = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
TINY = SMOLLM2 | dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                      num_key_value_heads=2, head_dim=16)  # fmt: skip
VARIANTS = {  # changes to the configuration, whose attention is FlexAttention unless one says otherwise
    "base": {},
    "graph": {"graph": True},
    "wide": {"anchors": 192},
    "large": {"rows": 24},
    "graph_wide": {"graph": True, "anchors": 192},
    "graph_large": {"graph": True, "rows": 24},
    "grouped": {"graph": True, "attention": "grouped"},
    "flex64": {"flex": {"BLOCK_M": 64, "BLOCK_N": 64}},
    "flex128x64": {"flex": {"BLOCK_M": 128, "BLOCK_N": 64}},
    "autotune": {"compile_mode": "max-autotune-no-cudagraphs"},
    "inline": {"prefetch": 0},
    "lora64": {"adapter": {"tuning": "lora", "targets": "all", "rank": 64, "alpha": 64}},
    "plain": {"compile": False, "attention": "sdpa", "rows": 4},
}
FIRST = "base,graph,wide,large,graph_wide,graph_large"


def answers(n: int, vocabulary: int, seed: int = 0) -> list[Answer]:
    """Prompts and answers of the lengths that chat data has."""
    random = torch.Generator().manual_seed(seed)
    out = []
    for i in range(n):
        p, a = (int(x) for x in torch.randint(40, 260, (2,), generator=random))
        ids = torch.randint(10, vocabulary, (p + a,), generator=random).tolist()
        out.append(Answer(str(i), ids[:p], ids[p:]))
    return out


def measure(model, data: list[Answer], fields: dict, seconds: float, profile: int = 0) -> dict:
    """Train for some seconds after everything is compiled; then so many steps under torch's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(TrainConfig.from_dict(fields | {"out": folder}), model, data, data[:2])
        device, sync = trainer.device, torch.cuda.synchronize if trainer.device.type == "cuda" else lambda *_: None
        began = time.perf_counter()
        for _ in range(6 if device.type == "cuda" else 1):  # a graph is captured in the fourth
            trainer.train_step()
        sync(device)
        setup = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        done, host, steps, began = Work(), [], 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            at = time.perf_counter()
            for _ in range(5):
                trainer.train_step()
                done, steps = done + trainer.done, steps + 1
            host.append((time.perf_counter() - at) / 5)
            sync(device)
        spent = time.perf_counter() - began
        if profile:
            print(profiled(trainer.train_step, profile, device))
        trainer.batches.close()
        share = mfu(trainer.backbone, done, spent)
        return {
            "anchors_s": round(done.groups / spent),
            "ms": round(1e3 * spent / steps, 2),
            "host_ms": round(1e3 * statistics.median(host), 2),
            "mfu": None if share is None else round(share, 4),
            "tflops": round(flops(trainer.backbone, done) / spent / 1e12, 2),
            "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0.0,
            "setup_s": round(setup, 1),
        }


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", default="0,20")
    parser.add_argument("--variants", default=FIRST, help=f"of {','.join(VARIANTS)}")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="fields of all variants")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each variant")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which no other variant begins")
    parser.add_argument("--profile", type=int, default=0, help="steps of each variant whose kernels are listed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script")
    parser.add_argument("--json")
    args = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**(TINY if args.tiny else SMOLLM2))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shared = {"fit": 0.0, "eval_every": 0.0, "save_every": 0.0, "tensorboard": False, "max_steps": 1 << 30}
    shared |= {"adapter": {"mask_embedding": "per_slot"}, "attention": "flex" if device == "cuda" else "sdpa"}
    shared = TrainConfig.load(None, args.set, start=shared).to_dict()
    data, out = answers(2000 if device == "cuda" else 200, config.vocab_size), []
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}, torch {torch.__version__}")
    print(f"{'entry':>5} {'variant':12} {'anchors/s':>9} {'mfu':>6} {'ms':>8} {'host ms':>8} {'GiB':>6} {'setup s':>8}")
    for name in args.variants.split(","):
        for entry in map(int, args.entries.split(",")):
            if time.perf_counter() - began > args.limit:
                print(f"{entry:5} {name:12} not run: the time is up")
                continue
            changes = VARIANTS[name]
            adapter = shared["adapter"] | {"entry": entry} | changes.get("adapter", {})
            try:
                row = measure(model, data, shared | changes | {"adapter": adapter}, args.seconds, args.profile)
                share = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
                print(f"{entry:5} {name:12} {row['anchors_s']:9,} {share:>6} {row['ms']:8.2f} {row['host_ms']:8.2f} "
                      f"{row['memory_gib']:6.1f} {row['setup_s']:8.1f}", flush=True)  # fmt: skip
            except Exception as error:  # the other variants are still worth their time
                row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
                print(f"{entry:5} {name:12} {row['error']}", flush=True)
            out.append({"entry": entry, "variant": name, "fields": changes, **row})
            gc.collect()
            torch._dynamo.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
    if args.json:
        head = {"machine": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}
        Path(args.json).write_text(json.dumps(head | {"set": args.set, "rows": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
