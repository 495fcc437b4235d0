"""The training loop: fits its schedule to a budget of minutes, logs, validates, and can stop and go on at any step."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from selfspec import hub
from selfspec.adapters import MaskPathModel
from selfspec.backbone import Backbone
from selfspec.terminal import refusing
from selfspec.training import anchors as anchoring
from selfspec.training import checkpoint, noise
from selfspec.training.anchors import Groups
from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer, load_answers
from selfspec.training.evaluate import Batching, evaluate
from selfspec.training.head import Head
from selfspec.training.objectives import Slots, dbloom, dloop
from selfspec.training.pack import Pack, Packer, send
from selfspec.training.readout import read
from selfspec.training.replay import failures
from selfspec.training.step import compile_layers, verifier_of

WARM_STEPS = 2  # of every call; compilation is no training, and its time isn't charged to the schedule
IN_FLIGHT = 3  # steps that the host may be ahead of the device, so that the clock it reads is the device's


class Trainer:
    """Trains one mask path on the answers of one model.

    Args:
        config: everything else.
        model: the base model, frozen here; None loads it as the configuration says.
        answers: training data; None reads it as the configuration says.
        valid: validation data, likewise.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel | None = None,
        answers: list[Answer] | None = None,
        valid: list[Answer] | None = None,
    ):
        self.began = time.perf_counter()
        self.config, self.mix = config, config.mix
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(auto if config.device == "auto" else config.device)
        cuda = self.device.type == "cuda"
        compiled = cuda if config.compile is None else config.compile
        backend = ("flex" if cuda else "sdpa") if config.attention == "auto" else config.attention

        answers = load_answers(config.data) if answers is None else answers
        if valid is None and config.valid:
            valid = load_answers(config.valid, config.valid_docs)
        if valid is None:  # hold out evenly spaced answers
            every = max(2, len(answers) // max(1, config.valid_docs))
            valid = answers[::every][: config.valid_docs]
            answers = [a for i, a in enumerate(answers) if i % every or i // every >= config.valid_docs]
        self.valid = valid
        self.packer = Packer(answers, config.length, config.rows, config.seed)

        if model is None:
            model = hub.load_model(config.model, dtype=getattr(torch, config.dtype))
        self.model = model.to(self.device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.path_config = config.path
        if self.path_config.shift and "hidden" in self.path_config.layouts:
            raise ValueError("a shifted path has no hidden bonus: its first row is the bonus")
        torch.manual_seed(config.seed)
        wide = torch.promote_types(torch.float32, model.dtype)
        self.path = MaskPathModel(model, self.path_config, wide)
        if config.init:
            checkpoint.load_weights(self.path, config.init, model)
        self.backbone = Backbone(model, self.path, backend)
        self.head = Head(self.backbone, compiled)
        self.verifier = verifier_of(self.model, backend) if self.mix.on_policy else None
        if compiled:
            compile_layers(self.backbone)
        self.params = [p for p in self.path.parameters() if p.requires_grad]
        self.ema = [p.detach().clone() for p in self.params] if config.ema else []
        rest = [p for p in self.params if p is not self.path.mask]
        groups = [{"params": [self.path.mask], "scale": config.mask_lr}, {"params": rest, "scale": 1.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            fused=cuda or None,
        )
        self.batching = Batching(config.length, config.rows, config.anchors)
        self.step, self.elapsed = 0, 0.0
        self.stop = False
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        if config.resume:
            self._resume()

    # one step

    def draw(self, index: int) -> tuple[Pack, Groups]:
        """A micro-batch and its draft groups, drawn from the seed and its index alone."""
        c, p = self.config, self.path_config
        random = anchoring.generator(c.seed, index)
        pack = self.packer.batch(index)
        anchors = anchoring.sample(pack, c.anchors // 2 if c.complement else c.anchors, random)
        size = dbloom.block(self.progress, c.growth, p.block_size)
        hidden = splits = ends = None
        if c.complement:
            anchors, splits, ends = dloop.views(anchors, size, torch.rand(anchors.shape, generator=random))
        if "hidden" in p.layouts:
            hidden = torch.rand(anchors.shape, generator=random) < (c.hidden_share if "known" in p.layouts else 1.0)
            if splits is not None:
                hidden &= splits == 0
        if p.prefix_splits and splits is None:
            splits = torch.randint(1, size - 1, anchors.shape, generator=random)
            splits = splits.masked_fill(torch.rand(anchors.shape, generator=random) >= c.split_share, 0)
            splits = splits if hidden is None else splits.masked_fill(hidden, 0)
        replayed = torch.rand(anchors.shape, generator=random) < c.replay_share if c.replay_share else None
        seeds = torch.randint(1 << 62, anchors.shape, generator=random)
        hidden, splits, ends, replayed = (
            None if x is None else send(x, self.device) for x in (hidden, splits, ends, replayed)
        )
        anchors, seeds, pack = send(anchors, self.device), send(seeds, self.device), pack.to(self.device)
        if replayed is not None:
            anchors = torch.where(replayed, failures(self.backbone, self.head, pack, anchors), anchors)
        groups = anchoring.path_groups(p, pack, anchors, size, hidden, splits, ends)
        return pack, noise.fill(groups, pack, p.noise, self.backbone.vocab_size, p.mask_id, seeds)

    def slots(self, pack: Pack, groups: Groups) -> Slots:
        """Run a micro-batch. Returns what the objectives read."""
        return read(self.backbone, self.head, pack, groups, self.progress, self.verifier)

    def train_step(self) -> dict[str, Tensor]:
        """One optimizer step. Returns what may be logged, still on the device."""
        c = self.config
        first = self.step * c.accumulate
        batches = [self.draw(first + i) for i in range(c.accumulate)]
        divisors = torch.zeros(len(self.mix.terms), device=self.device)
        for _, groups in batches:
            steps, labels = groups.charged()
            divisors = divisors + self.mix.divisors(steps, labels >= 0)
        logs: dict[str, Tensor] = {}
        for pack, groups in batches:
            slots = self.slots(pack, groups)
            loss, parts = self.mix.loss(slots, divisors)
            loss.backward()
            run = slots.taken.sum()
            parts |= {"loss": loss.detach(), "run": run, "groups": slots.valid.any(1).sum()}
            logs = {k: v + logs.get(k, 0) for k, v in parts.items()}
        logs["norm"] = torch.nn.utils.clip_grad_norm_(self.params, c.clip or math.inf)
        factor = self.rate(self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = c.lr * group["scale"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.ema:
            decay = min(c.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.ema, [p.detach() for p in self.params], 1 - decay)
        return logs

    # schedule

    @property
    def progress(self) -> float:
        """Share of the schedule that is done."""
        if self.config.max_steps:
            return min(1.0, self.step / self.config.max_steps)
        return min(1.0, self.elapsed / (60 * self.config.minutes))

    def rate(self, progress: float) -> float:
        """Learning rate as a share of the peak: a linear rise, then a cosine."""
        c = self.config
        if progress < c.warmup:
            # the first step has a rate, too
            return max(progress, 0.05 * c.warmup) / c.warmup
        at = (progress - c.warmup) / max(1e-9, 1 - c.warmup)
        return c.final_lr + (1 - c.final_lr) * 0.5 * (1 + math.cos(math.pi * at))

    # the loop

    def train(self) -> dict[str, Any]:
        """Train until the schedule, this call's time or the process is told to end. Returns the report."""
        c, wait = self.config, []
        size = sum(p.numel() for p in self.params)
        data = {"docs": len(self.packer), "skipped": self.packer.skipped, "cut": self.packer.cut}
        self._log({"event": "start", "step": self.step, **data, "params": size, "setup_s": self._since()})
        last_eval = last_save = time.perf_counter()
        begin_step, counted = self.step, self.step
        mark_elapsed, groups = self.elapsed, torch.zeros((), device=self.device)
        while self.progress < 1 and not self.stop:
            before = time.perf_counter()
            logs = self.train_step()
            groups += logs["groups"]
            done = self.step - begin_step
            if self.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                wait.append(event)
                if done <= WARM_STEPS or len(wait) > IN_FLIGHT:
                    (wait[-1] if done <= WARM_STEPS else wait.pop(0)).synchronize()
            now = time.perf_counter()
            if done <= WARM_STEPS:
                self._log({"event": "warm", "step": self.step, "seconds": round(now - before, 2)})
                if c.profile and done == WARM_STEPS:
                    self._profile(c.profile)
                counted, mark_elapsed = self.step, self.elapsed
                groups.zero_()
            else:
                self.elapsed += now - before
            if self.step % c.log_every == 0 and done > WARM_STEPS:
                n = float(groups)
                seconds = max(1e-9, self.elapsed - mark_elapsed)
                values = {k: round(float(v), 5) for k, v in logs.items()}
                values["run"] = round(values["run"] / max(1.0, values.pop("groups")), 4)
                if not math.isfinite(values["loss"]):
                    raise FloatingPointError(f"the loss is {values['loss']} at step {self.step}; try a lower lr")
                self._log({"event": "step", "step": self.step, "progress": round(self.progress, 5),
                           "elapsed_s": round(self.elapsed, 2), "lr": c.lr * self.rate(self.progress), **values,
                           "ms": round(1000 * seconds / max(1, self.step - counted), 2),
                           "anchors_s": round(n / seconds), "memory_gib": self._memory()})  # fmt: skip
                groups.zero_()
                counted, mark_elapsed = self.step, self.elapsed
            now = time.perf_counter()
            if c.eval_every and now - last_eval > 60 * c.eval_every and self.progress < 1:
                self._validate()
                last_eval = time.perf_counter()
            if c.save_every and now - last_save > 60 * c.save_every:
                self.save()
                last_save = time.perf_counter()
            if c.stop_after and self._since() > 60 * c.stop_after:
                self.stop = True
        self.save()
        if self.progress < 1:
            self._save_adapter(self.ema)
            self._log({"event": "stopped", "step": self.step, "progress": round(self.progress, 5)})
            return {"finished": False, "step": self.step, "progress": self.progress}
        return self._finish()

    def _finish(self) -> dict[str, Any]:
        """Keep the better of the last and the averaged weights, and measure it on the evaluation sets."""
        report: dict[str, Any] = {"finished": True, "step": self.step, "elapsed_s": round(self.elapsed, 1)}
        layout = self.path_config.layouts[0]
        last = self._validate("last")
        if self.ema:
            mean = self._validate("ema")
            if mean.get(layout, {}).get("tau", 0) >= last.get(layout, {}).get("tau", 0):
                self._swap(self.ema)
                last, report["weights"] = mean, "ema"
        report["valid"] = last
        self._save_adapter([])
        report["eval"] = {}
        for name, files in self.config.eval.items():
            report["eval"][name] = self.evaluate(load_answers(files))
            self._log({"event": "eval", "set": name, **report["eval"][name]})
        (self.out / "report.json").write_text(json.dumps(report | {"config": self.config.to_dict()}, indent=1))
        return report

    def evaluate(self, answers: Sequence[Answer]) -> dict[str, dict]:
        """Teacher-forced tau with the present weights."""
        return evaluate(self.backbone, self.head, answers, self.batching, self.path_config.layouts)

    def _validate(self, which: str = "ema") -> dict[str, dict]:
        began = time.perf_counter()
        use = self.ema if which == "ema" else []
        self._swap(use)
        out = self.evaluate(self.valid)
        self._swap(use)
        self._log({"event": "valid", "step": self.step, "weights": which if use else "last", **out,
                   "seconds": round(time.perf_counter() - began, 2)})  # fmt: skip
        return out

    @torch.no_grad()
    def _swap(self, other: list[Tensor]) -> None:
        """Exchange the path's weights with another set's."""
        for p, q in zip(self.params, other, strict=False):
            kept = p.detach().clone()
            p.copy_(q)
            q.copy_(kept)

    # what is kept

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "path": self.path.state_dict(),
            "ema": self.ema,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
            "adapter": json.dumps(self.path_config.to_dict()),
        }
        checkpoint.save(self.out, state)

    def _resume(self) -> None:
        state = checkpoint.load(self.out, self.device)
        if state is None:
            return
        if state["adapter"] != json.dumps(self.path_config.to_dict()):
            raise ValueError(f"the checkpoint in {self.out} is of another adapter configuration: {state['adapter']}")
        self.path.load_state_dict(state["path"])
        if self.ema and state["ema"]:
            self.ema = state["ema"]
        scales = [g["scale"] for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, scale in zip(self.optimizer.param_groups, scales, strict=True):
            group["scale"] = scale
        self.step, self.elapsed = state["step"], state["elapsed"]

    def _save_adapter(self, weights: list[Tensor]) -> None:
        self._swap(weights)
        checkpoint.save_adapter(self.path, self.out / "adapter", self.model)
        self._swap(weights)

    def _profile(self, steps: int) -> None:
        """Train some steps under the profiler; the table of kernels stands beside the log."""
        from torch.profiler import profile

        with profile() as profiler:
            for _ in range(steps):
                self.train_step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        key = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90)
        (self.out / "profile.txt").write_text(table)

    def _since(self) -> float:
        """Seconds since this call began."""
        return round(time.perf_counter() - self.began, 2)

    def _memory(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else 0.0

    def _log(self, record: dict[str, Any]) -> None:
        line = json.dumps({"t": self._since(), **record})
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as f:
            f.write(line + "\n")


def main(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Fields of TrainConfig, as lr=3e-4 adapter.block_size=16."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON file with such fields.")] = None,
) -> int:
    """Train an adapter on a model's own answers."""
    with refusing():
        settings = TrainConfig.load(config, overrides or ())
        if not settings.model or not settings.data:
            raise ValueError("name a model and data: model=FOLDER data=ANSWERS")
        trainer = Trainer(settings)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stop", True))
    trainer.train()
    return 0
