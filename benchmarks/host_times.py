"""What the host spends on each token, round and joining request, apart from the forwards: a tiny model on the CPU.

python benchmarks/host_times.py --json benchmarks/host_times_cpu.json

Forwards run where a GPU would replay its graphs, and their time is taken out: what remains is what a GPU may have to
wait for. `steady` decodes as many requests as there are slots, all alike, and looks at nothing but rounds; `mixed` runs
four times as many with caps of all kinds, so that requests end and join all the time. As on a GPU, rounds are started
ahead of what is read.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import SelfSpecModel, options
from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.graphs import Graphs
from selfspec.serving.engine import Engine
from selfspec.session import Request, Session

CAPACITY = 1024


class Apart(Graphs):
    """Graphs as far as a session can tell; what they do is timed."""

    forwards, seconds = 0, 0.0

    def __init__(self, device: torch.device, *_: Any):
        super().__init__(device)
        self.enabled = True

    def __contains__(self, key: Any) -> bool:
        return True

    def __call__(self, key: Any, fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        began = time.perf_counter()
        out = fn(*inputs)
        Apart.seconds += time.perf_counter() - began
        Apart.forwards += 1
        return out


def tiny() -> SelfSpecModel:
    """A random Llama of one layer with a random adapter."""
    torch.manual_seed(0)
    shape = dict(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    config = LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=CAPACITY, initializer_range=0.3)
    model = LlamaForCausalLM(config).eval()
    return SelfSpecModel(model, MaskPathModel(model, MaskPathConfig(block_size=4, entry=0, layouts=("known",))))


def by_session(model: SelfSpecModel, mode: str, slots: int) -> Callable[[list[Request]], Iterator[None]]:
    """Steps of one session that is kept full."""
    session = Session(model.bodies, model.policy(mode), slots, CAPACITY)

    def run(waiting: list[Request]) -> Iterator[None]:
        while waiting or session.active:
            if waiting and session.free:
                batch, waiting = waiting[: session.free], waiting[session.free :]
                session.add(batch)
            session.step()
            yield

    return run


def by_engine(model: SelfSpecModel, mode: str, slots: int) -> Callable[[list[Request]], Iterator[None]]:
    """Steps of an engine."""
    engine = Engine(model, model.policy(mode), slots, memory=1 << 30, reuse=False)

    def run(waiting: list[Request]) -> Iterator[None]:
        for request in waiting:
            engine.add(request)
        while engine.busy:
            engine.step()
            yield

    return run


WHO = {"session": by_session, "engine": by_engine}


def measure(model: SelfSpecModel, who: str, mode: str, slots: int, load: str, tokens: int) -> dict[str, Any]:
    """One row of the table."""
    draw = random.Random(0)
    step = WHO[who](model, mode, slots)

    def asked(n: int) -> list[Request]:
        caps = [tokens if load == "steady" else draw.choice([8, 16, 32, tokens]) for _ in range(n)]
        return [Request([draw.randrange(128) for _ in range(draw.randint(4, 60))], c) for c in caps]

    for _ in step(asked(2)):
        pass
    requests = asked(slots if load == "steady" else 4 * slots)
    running = step(requests)
    if load == "steady":  # until everybody has joined
        while not all(r.output for r in requests):
            next(running)
    count = lambda: (sum(len(r.output) for r in requests), sum(r.stats.rounds for r in requests))  # noqa: E731
    (emitted, shares), forwards, inside, steps, began = count(), Apart.forwards, Apart.seconds, 0, time.perf_counter()
    for _ in running:
        steps += 1
        if load == "steady" and any(r.finish_reason for r in requests):
            break
    seconds, inside = time.perf_counter() - began, Apart.seconds - inside
    running.close()
    emitted, shares, host = count()[0] - emitted, count()[1] - shares, seconds - inside
    row = dict(who=who, mode=mode, slots=slots, load=load, tokens=emitted, steps=steps)
    row |= dict(forwards=Apart.forwards - forwards, host_seconds=host, forward_seconds=inside)
    return row | dict(us_per_token=1e6 * host / emitted, us_per_step=1e6 * host / steps, tau=emitted / max(shares, 1))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,128,256")
    parser.add_argument("--modes", default="ar,sequential")
    parser.add_argument("--tokens", type=int, default=64, help="of a request, at most")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = tiny(), []
    print(f"{'who':8} {'mode':11} {'load':7} {'slots':>5} {'us/token':>9} {'us/step':>8} {'forwards':>8}")
    with mock.patch("selfspec.session.Graphs", Apart):
        for mode in args.modes.split(","):
            for load in ("steady", "mixed"):
                for slots in map(int, args.slots.split(",")):
                    for who in WHO:
                        found = [measure(model, who, mode, slots, load, args.tokens) for _ in range(args.repeats)]
                        row = min(found, key=lambda r: r["us_per_token"])
                        rows.append(row)
                        print(
                            f"{who:8} {mode:11} {load:7} {slots:5} {row['us_per_token']:9.2f} "
                            f"{row['us_per_step']:8.0f} {row['forwards']:8}",
                            flush=True,
                        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), **options.setting(model), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
