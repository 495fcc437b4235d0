"""The training loop: fits its schedule to a budget of minutes, logs, validates, and can stop and go on at any step."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec import hub
from selfspec.adapters import MaskPathModel
from selfspec.training import checkpoint, fit, report, schedule
from selfspec.training.anchors import Groups
from selfspec.training.batches import Batches, Micro, Shape
from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer, hold_out, load_answers
from selfspec.training.deterministic import deterministic
from selfspec.training.evaluate import Batching, evaluate
from selfspec.training.flops import Work, mfu, total
from selfspec.training.head import Head
from selfspec.training.log import Log, Window, profiled
from selfspec.training.objectives import Slots, dbloom
from selfspec.training.optim import clip, freeze, lerp_, optimizer_of, swapped
from selfspec.training.pack import Pack, Packer
from selfspec.training.readout import read
from selfspec.training.replay import failures
from selfspec.training.step import backbone_of, compile_layers, verifier_of
from selfspec.training.turn import Turn
from selfspec.training.world import World, shard

WARM_STEPS = 2  # of every call and shape; compilation is no training, and its time isn't charged to the schedule
KEPT = ("step", "steps", "elapsed", "cursor", "fitted", "downs", "zero_loss", "best")  # of a checkpoint
IN_FLIGHT = 3  # steps that the host may be ahead of the device, so that the clock it reads is the device's


class Trainer:
    """Trains one mask path on the answers of one model.

    Args:
        config: everything else.
        model: the base model, frozen here; None loads it as the configuration says. Where layers are split over
            processes (FSDP) it is taken apart, and is of no other use afterwards.
        answers: training data; None reads it as the configuration says.
        valid: validation data, likewise.

    Attributes:
        step, elapsed: optimizer steps, and seconds of training, over all calls.
        steps: of the whole schedule; 0 where the minutes end it.
        cursor: row of the data's stream that the next step begins with.
        shape: what a step is made of; out of memory lowers it.
        downs: the shapes that memory ran out for, each with its step.
        stop: end after the running step, and save.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel | None = None,
        answers: list[Answer] | None = None,
        valid: list[Answer] | None = None,
    ):
        self.config, self.mix = config, config.mix
        self.world = World(config.device, config.shard)
        self.device = self.world.device
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = Log(self.out, config.tensorboard, silent=not self.world.main)
        cuda = self.device.type == "cuda"
        compiled = cuda if config.compile is None else config.compile
        backend = config.backend(cuda, compiled)

        answers = load_answers(config.data) if answers is None else answers
        if valid is None and config.valid:
            valid = load_answers(config.valid, config.valid_docs)
        if valid is None:
            answers, valid = hold_out(answers, config.valid_docs)
        self.valid = valid

        if model is None:
            model = hub.load_model(config.model, dtype=config.precision(cuda))
        self.model = model.eval().requires_grad_(False)
        if not self.world.sharded:
            self.model.to(self.device)
        self.path_config = config.path
        if self.path_config.shift and "hidden" in self.path_config.layouts:
            raise ValueError("a shifted path has no hidden bonus: its first row is the bonus")
        torch.manual_seed(config.seed)  # the same starting weights on every process
        wide = torch.promote_types(torch.float32, model.dtype)
        self.path = MaskPathModel(model, self.path_config, wide)
        if config.init:
            checkpoint.load_weights(self.path, config.init, model)
        freeze(self.path, self.mix)
        self.backbone = backbone_of(model, self.path, backend)
        if self.mix.on_policy and self.world.sharded:
            raise ValueError("on-policy terms run the base model's own layers, which are split here: leave out FSDP")
        self.verifier = verifier_of(model, self.backbone.backend) if self.mix.on_policy else None
        self.packer = Packer(answers, config.length, config.rows, config.seed, self.backbone.max_positions)
        if compiled:
            compile_layers(self.backbone, config.flex or None, mode=config.compile_mode)
        if self.world.sharded:
            shard(self.backbone, self.path, model, self.world)
        self.head = Head(self.backbone, compiled, forget=config.logits == "forget")
        self.optimizer = optimizer_of(self.path, config, fused=cuda)
        self.params = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.ema = [p.detach().clone() for p in self.params] if config.ema else []
        self.batches = Batches(
            self.packer, config, self.mix, self.backbone.vocab_size, self.world.rank, self.world.size, pin=cuda
        )
        self.step, self.elapsed, self.cursor, self.zero_loss = 0, 0.0, 0, 0
        self.fitted, self.best, self.steps = False, -1.0, config.max_steps
        self.downs: list[dict[str, int]] = []
        self.stop = False
        self.turn = Turn(config.turn if self.world.main else "")
        self.reshape(Shape(config.rows * config.accumulate, config.rows, config.anchors, self.block))
        if config.resume:
            self._resume()

    def reshape(self, shape: Shape) -> None:
        """Go on with steps of another shape."""
        self.shape, self._warm = shape, 0
        self.batching = Batching(self.config.length, shape.micro, shape.anchors)
        self._runner = self._run
        if self.config.graph:
            from selfspec.training.graph import Captured

            self._runner = Captured(self._run, self.params)

    # one step

    def slots(self, pack: Pack, groups: Groups, progress: float | Tensor | None = None) -> Slots:
        """Run a micro-batch. Returns what the objectives read."""
        at = self.progress if progress is None else progress
        return read(self.backbone, self.head, pack, groups, at, self.verifier)

    def _run(self, pack: Pack, groups: Groups, given: Tensor) -> dict[str, Tensor]:
        """Forward and backward of a micro-batch; gradients add up. Returns what may be logged, on the device."""
        slots = self.slots(pack, groups, given[-1])
        loss, parts = self.mix.loss(slots, given[:-1])
        loss.backward()
        return parts | {"loss": loss.detach(), "run": slots.taken.sum(), "groups": slots.valid.any(1).sum()}

    def attempt(self, batches: Sequence[Micro], divisors: Tensor) -> dict[str, Tensor] | None:
        """Gradients of a step's micro-batches on this process; None where its memory ran out.

        Args:
            batches: of this process.
            divisors: [terms] of the whole step, over all processes; 0 where nothing is predicted.
        """
        logs: dict[str, Tensor] = {}
        # what changes from step to step goes in as one tensor, so that a graph can hold the rest
        given = torch.cat([divisors.clamp(min=1e-6), torch.tensor([self.progress])]).float().to(self.device)
        try:
            for micro in batches:
                there = micro.to(self.device)
                parts = self._runner(there.pack, there.groups, given)
                logs = {k: v + logs.get(k, 0) for k, v in parts.items()}
        except torch.OutOfMemoryError as error:
            if self.world.sharded:
                raise torch.OutOfMemoryError(
                    f"out of memory in a step of {self.shape}; processes that share layers wait for one another in the "
                    "middle of a step, so the run cannot go on: start it with fewer rows and more accumulate"
                ) from error
            return None
        return logs

    def clear(self, drop: bool = False) -> None:
        """Drop the gradients, or zero them in place where a graph adds to them; `drop` gives all memory back."""
        self.optimizer.zero_grad(set_to_none=drop or not self.config.graph)
        if drop:
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without CUDA

    def train_step(self) -> dict[str, Tensor]:
        """One optimizer step. Returns what may be logged, this process's part, still on the device."""
        c, world = self.config, self.world
        while True:
            if self.block != self.shape.block:
                self.reshape(dataclasses.replace(self.shape, block=self.block))
            batches = [self._replayed(b) for b in self.batches.step(self.cursor, self.shape)]
            *sums, labels = world.sum([*sum(b.divisors for b in batches).tolist(), sum(b.labels for b in batches)])  # type: ignore[union-attr]
            logs = self.attempt(batches, torch.tensor(sums))
            if not world.any(logs is None):
                break
            self.clear(drop=True)
            had = self.turn.mine
            self._take_turn()
            if world.any(self.turn.mine and not had):  # another run's memory is no reason to take smaller steps
                continue
            self.downs.append({"step": self.step, "micro": self.shape.micro, "anchors": self.shape.anchors})
            self.reshape(fit.lower(self.shape))
            self.log({"event": "out_of_memory", "step": self.step, **dataclasses.asdict(self.shape)})
            if c.deterministic:  # whoever goes on may have the memory, and would add in another order
                self.save()
        assert logs is not None
        self.cursor += self.shape.rows * world.size
        self.step += 1
        self.done = total([b.work for b in batches])
        if not labels:  # nothing to learn from: the optimizer's averages would move the weights all the same
            self.zero_loss += 1
            self.clear()
            return logs
        world.reduce_gradients(self.params)
        logs["norm"] = clip(self.params, c.clip, world)
        factor = schedule.rate(c, self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = c.lr * group["scale"] * factor
        self.optimizer.step()
        self.clear()
        if self.ema:
            lerp_(self.ema, self.params, 1 - min(c.ema, (1 + self.step) / (10 + self.step)))
        return logs

    def _replayed(self, micro: Micro) -> Micro:
        """Let some groups start where the present weights' drafts fail instead (`selfspec.training.replay`)."""
        if micro.choices.replayed is None:
            return micro
        anchors = micro.choices.anchors
        failed = failures(self.backbone, self.head, micro.pack.to(self.device), anchors.to(self.device)).cpu()
        return self.batches.with_anchors(micro, torch.where(micro.choices.replayed, failed, anchors), self.shape)

    @property
    def block(self) -> int:
        """Block size of the groups at this point of the schedule."""
        return dbloom.block(self.progress, self.config.growth, self.path_config.block_size)

    @property
    def progress(self) -> float:
        """Share of the schedule that is done."""
        return schedule.progress(self.config, self.step, self.elapsed, self.steps)

    # the loop

    def train(self) -> dict[str, Any]:
        """Train until the schedule, this call's time or the process is told to end. Returns the report."""
        data, world = self.packer, self.world
        self.log({"event": "start", "step": self.step, "docs": len(data), "empty": data.empty, "over": data.over,
                  "cut": data.cut, "params": sum(p.numel() for p in self.params), "processes": world.size,
                  "sharded": world.sharded, "attention": self.backbone.backend,
                  "setup_s": self.log.since()})  # fmt: skip
        try:
            with deterministic(self.config.deterministic):
                return self._train()
        finally:
            self.turn.give()
            self.batches.close()
            self.log.close()

    def _train(self) -> dict[str, Any]:
        c, wait = self.config, []
        if c.init and not self.step:
            report.before(self)
        if c.fit and not self.fitted:
            self._take_turn()
        if c.fit and not self.fitted and not self.world.any(self.stop):
            self.log(found := fit.fit(self))
            self.fitted = True
            if c.deterministic:  # no clock goes twice alike
                self.steps = self.step + max(1, found["steps"])
                self.save()
        last_eval = last_save = time.perf_counter()
        window = Window()
        while True:
            if self._warm >= WARM_STEPS and not self.turn.mine:  # until then it mostly compiles
                self._take_turn()
                last_eval = last_save = time.perf_counter()
            now = time.perf_counter()
            due = (
                c.eval_every and now - last_eval > 60 * c.eval_every,
                c.save_every and now - last_save > 60 * c.save_every,
                c.stop_after and self.log.since() > 60 * c.stop_after,
            )
            # the first process's clock and any process's wish to end, so that all do the same
            mine = [self.elapsed, *map(bool, due)] if self.world.main else [0.0] * 4
            self.elapsed, evaluates, saves, late, stop = self.world.sum([*mine, float(self.stop)])
            if self.progress >= 1 or stop or late:  # a signal from now on counts next time
                break
            if evaluates:
                self.validate()
                last_eval = time.perf_counter()
            if saves:
                self.save()
                last_save = time.perf_counter()
            before = time.perf_counter()
            logs = self.train_step()
            self._warm += 1
            warm = self._warm <= WARM_STEPS
            if self.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                wait.append(event)
                if warm or len(wait) > IN_FLIGHT:
                    (wait[-1] if warm else wait.pop(0)).synchronize()
            seconds = time.perf_counter() - before
            if warm:
                self.log({"event": "warm", "step": self.step, "seconds": round(seconds, 2)})
                if c.profile and self._warm == WARM_STEPS:
                    self._take_turn()
                    if not self.world.any(not self.turn.mine):
                        table = profiled(self.train_step, c.profile, self.device)
                        (self.out / f"profile{self.world.rank or ''}.txt").write_text(table)
                window = Window()
                continue
            self.elapsed += seconds
            window.add(seconds, self.done)
            if self.step % c.log_every == 0:
                self._log_step(logs, window)
                window = Window()
        self.save()
        self.turn.give()
        if self.progress < 1:
            self.save_adapter("adapter", self.ema)
            self.log({"event": "stopped", "step": self.step, "progress": round(self.progress, 5)})
            return {"finished": False, "step": self.step, "progress": self.progress}
        return report.finish(self)

    def _take_turn(self) -> None:
        """The first process's; the others wait for it at their next sum."""
        end = 60 * self.config.stop_after
        self.turn.take(lambda: self.stop or 0 < end < self.log.since())

    def _log_step(self, logs: dict[str, Tensor], window: Window) -> None:
        norm = logs.pop("norm", None)
        sums = self.world.sum([*(float(v) for v in logs.values()), *window.work.values])
        values = {k: round(v, 5) for k, v in zip(logs, sums)}
        values["run"] = round(values["run"] / max(1.0, values.pop("groups")), 4)
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(f"the loss is {values['loss']} at step {self.step}; try a lower lr")
        everyone = Work(*map(int, sums[len(logs) :]))
        share = mfu(self.backbone, window.work, window.seconds)
        self.log({"event": "step", "step": self.step, "progress": round(self.progress, 5),
                  "elapsed_s": round(self.elapsed, 2), "lr": self.config.lr * schedule.rate(self.config, self.progress),
                  **values, **({} if norm is None else {"norm": round(float(norm), 5)}),
                  "ms": round(1000 * window.seconds / window.steps, 2),
                  "anchors_s": round(everyone.groups / window.seconds),
                  **({} if share is None else {"mfu": round(share, 4)}), "zero_loss": self.zero_loss,
                  "out_of_memory": len(self.downs), "memory_gib": self._memory()})  # fmt: skip

    def evaluate(self, answers: Sequence[Answer]) -> dict[str, dict]:
        """Teacher-forced tau with the present weights; every process looks at the same few answers."""
        return evaluate(self.backbone, self.head, answers, self.batching, self.path_config.layouts)

    def validate(self, which: str = "ema") -> dict[str, dict]:
        """Look at the validation answers; the best weights so far stand in `best/`."""
        began = time.perf_counter()
        use = self.ema if which == "ema" else []
        with swapped(self.params, use):
            out = self.evaluate(self.valid)
            tau = out.get(self.path_config.layouts[0], {}).get("tau", 0.0)
            if tau > self.best:
                self.best = tau
                self.save_adapter("best", [])
        self.log({"event": "valid", "step": self.step, "weights": which if use else "last", **out, "best": self.best,
                  "seconds": round(time.perf_counter() - began, 2)})  # fmt: skip
        return out

    # what is kept

    def save(self) -> None:
        """Write the checkpoint: with the data and the configuration, all that the rest of the run depends on."""
        state = checkpoint.weights(self.path, self.ema, self.optimizer) | {name: getattr(self, name) for name in KEPT}
        state |= {
            "shape": dataclasses.asdict(self.shape),
            "schedule": schedule.kept(self.config),
            "adapter": json.dumps(self.path_config.to_dict()),
        }
        if self.world.main:
            checkpoint.save(self.out, state)
        self.world.wait()

    def _resume(self) -> None:
        state = checkpoint.load(self.out, self.device)
        if state is None:
            return
        if state["adapter"] != json.dumps(self.path_config.to_dict()):
            raise ValueError(f"the checkpoint in {self.out} is of another adapter configuration: {state['adapter']}")
        schedule.check(self.config, state["schedule"])
        checkpoint.restore(state, self.path, self.ema, self.optimizer)
        for name in KEPT:
            setattr(self, name, state.get(name, getattr(self, name)))  # older checkpoints lack the steps
        self.reshape(Shape(**state["shape"]))

    def save_adapter(self, name: str, weights: list[Tensor]) -> None:
        """Write an adapter folder, of the present weights or those given."""
        with swapped(self.params, weights):
            checkpoint.save_adapter(self.path, self.out / name, self.model, self.world.main)

    def _memory(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else 0.0
