"""What the host spends on each token and round, apart from forwards: none runs, and a CPU does.

python benchmarks/host_times.py --json benchmarks/host_times_cpu.json

Where a GPU would replay a graph of a round or a prefill, its answer is made up, so all that is left is what a GPU may
have to wait for. `steady` decodes as many requests as there are slots, all alike; `mixed` runs four times as many with
caps of all kinds, so that requests end and join all the time. With `auto` a planner chooses among all plans of two
adapters of blocks of 16, and always the same: its table says that plain decoding wins. Times are of the thread,
whatever else the machine does. `most` is the longest step after the first 8, as a planner's work comes in bursts: that
long a GPU may have to wait.
"""

import argparse
import gc
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import SelfSpecModel, options
from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.graphs import Graphs
from selfspec.plan.latency import Latency
from selfspec.plan.planner import Planner
from selfspec.plan.policy import Policy
from selfspec.plan.table import LatencyTable
from selfspec.planners import planner_for
from selfspec.serving.engine import Engine
from selfspec.session import Request, Session

CAPACITY, HIDDEN = 1024, 16


class Made(Graphs):
    """Graphs as far as a session can tell; whatever they are asked, they answer the same."""

    prefills = rounds = 0
    answers: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}

    def __init__(self, device: torch.device, *_: Any):
        super().__init__(device)
        self.enabled = True

    def __contains__(self, key: Any) -> bool:
        return True

    def __call__(self, key: Any, fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        kind, frame, what = key[:3]
        if kind == "prefill":
            Made.prefills += 1
            return torch.zeros(frame.n, HIDDEN), None
        Made.rounds += 1
        depth = what.nodes if not what.tree else what.block_size
        if (frame.n, depth) not in Made.answers:
            Made.answers[frame.n, depth] = torch.full((frame.n, 2 + depth), 1 + depth // 2)
        return Made.answers[frame.n, depth]


def tiny() -> SelfSpecModel:
    """A random Llama of one layer with two random adapters."""
    torch.manual_seed(0)
    shape = dict(vocab_size=128, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    config = LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=CAPACITY, initializer_range=0.3)
    model = LlamaForCausalLM(config).eval()
    able = MaskPathConfig(block_size=16, entry=0, layouts=("known", "hidden"), prefix_splits=True)
    return SelfSpecModel(model, [MaskPathModel(model, able) for _ in range(2)])


def planner(model: SelfSpecModel) -> Planner:
    """A planner whose table says that plain decoding wins: rows cost nearly all."""
    points = []
    for n, rows, kind in itertools.product((1, 16, 256), (1, 4, 64), ("clean", "draft")):
        times = [0.1 + 0.1 * n * rows] * 3
        points.append(Latency(kind, n, rows, 0, 512, True, *times))
    table = LatencyTable(tuple(points), 1)
    return planner_for(model.bodies, table=table)


def policy(model: SelfSpecModel, mode: str) -> Policy:
    """What a mode stands for; a planner of its own every time."""
    return planner(model) if mode == "auto" else model.policy(mode)


def by_session(model: SelfSpecModel, mode: str, slots: int) -> Callable[[list[Request]], Iterator[None]]:
    """Steps of one session that is kept full."""
    session = Session(model.bodies, policy(model, mode), slots, CAPACITY)

    def run(waiting: list[Request]) -> Iterator[None]:
        while waiting or session.active:
            if n := session.room(len(waiting)):
                batch, waiting = waiting[:n], waiting[n:]
                session.add(batch)
            session.step()
            yield

    return run


def by_engine(model: SelfSpecModel, mode: str, slots: int) -> Callable[[list[Request]], Iterator[None]]:
    """Steps of an engine."""
    engine = Engine(model, policy(model, mode), slots, memory=1 << 30, reuse=False)
    engine.ahead = True  # as on a GPU: no lane is made anew as requests come

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
        caps = [tokens if load == "steady" else draw.choice([tokens // 4, tokens // 2, tokens]) for _ in range(n)]
        return [Request([draw.randrange(128) for _ in range(draw.randint(4, 60))], c) for c in caps]

    for _ in step(asked(2)):
        pass
    requests = asked(slots if load == "steady" else 4 * slots)
    running = step(requests)
    if load == "steady":  # until everybody has joined
        while not all(r.output for r in requests):
            next(running)

    def emitted() -> int:
        return sum(len(r.output) for r in requests)

    tokens, prefills, rounds = emitted(), Made.prefills, Made.rounds
    began = last = time.thread_time()
    steps = []
    for _ in running:
        now = time.thread_time()
        steps.append(now - last)
        last = now
        if load == "steady" and any(r.finish_reason for r in requests):
            break
    seconds = time.thread_time() - began
    running.close()
    tokens, rounds = emitted() - tokens, Made.rounds - rounds
    row = dict(who=who, mode=mode, slots=slots, load=load, tokens=tokens, rounds=rounds, seconds=seconds)
    row |= dict(prefills=Made.prefills - prefills, us_per_token=1e6 * seconds / tokens, us_most=1e6 * max(steps[8:]))
    return row | dict(us_per_round=1e6 * seconds / rounds)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="1,64,256")
    parser.add_argument("--modes", default="ar,sequential,auto")
    parser.add_argument("--tokens", type=int, default=128, help="of a request, at most")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = tiny(), []
    gc.freeze()  # or a search for garbage among all that was imported falls into this row or that
    print(f"{'who':8} {'mode':11} {'load':7} {'slots':>5} {'us/token':>9} {'us/round':>8} {'most':>6} {'prefills':>8}")
    triton = mock.patch("selfspec.joining.by_triton", lambda name: True)  # as on a GPU, for which no backend is asked
    with mock.patch("selfspec.session.Graphs", Made), triton:
        for mode in args.modes.split(","):
            for load in ("steady", "mixed"):
                for slots in map(int, args.slots.split(",")):
                    for who in WHO:
                        found = [measure(model, who, mode, slots, load, args.tokens) for _ in range(args.repeats)]
                        row = min(found, key=lambda r: r["us_per_token"])
                        rows.append(row)
                        print(
                            f"{who:8} {mode:11} {load:7} {slots:5} {row['us_per_token']:9.2f} "
                            f"{row['us_per_round']:8.0f} {row['us_most']:6.0f} {row['prefills']:8}",
                            flush=True,
                        )
    gc.unfreeze()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), **options.setting(model), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
