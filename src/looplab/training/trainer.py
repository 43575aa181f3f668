"""The trainer: steps, metrics, evaluation, checkpoints, in one folder.

    depth -> rows -> loss of every micro-batch -> backward -> clip -> optimizer -> metrics
    clip:   g <- g * min(1, clip_norm / |g|),  |g| over all parameters

Everything random is a function of (seed, stream, step, row): there is no generator to save, and a run that is killed
and started again ends with the same bits as one that was not. In metrics and names of folders `step` counts steps done,
so it begins at 1; streams, schedules and the loader count from 0.
"""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplab.data.packing import Batch, load_packed
from looplab.data.tokenizers import load_tokenizer
from looplab.objectives.base import LossParts
from looplab.records import RunRecord, dump_json, write_atomic
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Plan
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.trace import Recorder
from looplab.training.checkpoint import (
    Checkpoint,
    Progress,
    newest_checkpoint,
    remove_partial,
    restore,
    save_checkpoint,
    save_model,
)
from looplab.training.config import RunConfig
from looplab.training.display import Display
from looplab.training.divergence import DivergedError, first_non_finite
from looplab.training.evaluation import HeldOut, choose_depths
from looplab.training.folder import METRICS, MODEL, RECORD, claimed, finished, locked
from looplab.training.metrics import MetricsFile
from looplab.training.record import run_record
from looplab.training.step import StepOutput, TrainingStep, draw_depth, draw_noise, split, to_device


def train(
    config: RunConfig, folder: str | os.PathLike[str], *, device: str = "cpu", display: Display | None = None
) -> RunRecord:
    """Runs `config` to its end in `folder`, from the newest checkpoint if there is one, and returns the record.

    A finished run is not run again.

    Raises:
        FolderError: The folder holds something else, or a run with another configuration, or is being written to.
        DataError: The data cannot be used, or changed since the checkpoint.
        DivergedError: `config.max_skips` steps in a row gave no finite loss or gradient.
    """
    run = Path(folder)
    with locked(run):
        with claimed(run, config):
            record = finished(run, config)
            if record is not None:
                return record
            trainer = Trainer(config, run, device=device, display=display)
        return trainer.run()


class Trainer:
    """One run in its folder, which the caller has claimed."""

    def __init__(self, config: RunConfig, folder: Path, *, device: str = "cpu", display: Display | None = None):
        self.config, self.folder, self.device = config, folder, device
        self.display = display or Display()
        torch.set_num_threads(config.threads)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        model = config.build_model().to(device)
        self.spec = model.spec
        self.loader = load_packed(config.data, seed=config.seed, vocab_size=self.spec.vocab[0])
        self.held_out = _held_out(config, self.spec, device)
        self.step = TrainingStep(model, config.objective, config.gradient, precision=config.precision)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = config.optimizer.build(model)
        self.progress = Progress()
        checkpoint = newest_checkpoint(folder)
        if checkpoint is not None:
            self._resume(checkpoint)
        remove_partial(folder)
        self.metrics = MetricsFile(folder / METRICS, length=self.progress.metrics_bytes)

    def run(self) -> RunRecord:
        """Trains to the end and writes the model and the record."""
        config, progress = self.config, self.progress
        losses: dict[int, float] = {}
        start, first = time.perf_counter(), progress.step
        try:
            while progress.step < config.steps:
                record = self._train_step()
                done = progress.step - first
                left = (time.perf_counter() - start) / done * (config.steps - progress.step)
                rate = record["tokens"] / progress.step / record["seconds"]
                self.display.step(record, steps=config.steps, tokens_per_second=rate, seconds_left=left)
                if progress.step % config.evaluation.every == 0 or progress.step == config.steps:
                    losses = self._evaluate()
                if progress.step % config.save_every == 0 or progress.step == config.steps:
                    self._save()
            return self._finish(losses or self.held_out.losses(self.step.model))
        finally:
            self.metrics.close()
            self.display.close()

    def _train_step(self) -> dict[str, Any]:
        """One optimizer step, or a skipped one; returns its line of the metrics."""
        config, progress, began = self.config, self.progress, time.perf_counter()
        batch = self.loader.batch(progress.step)
        depth, plan = draw_depth(self.spec, config.seed, progress.step)
        ledger = Ledger()
        outputs = self._backward(batch, plan, ledger)
        parts = outputs[0].parts
        for output in outputs[1:]:
            parts = parts + output.parts
        norm = self._gradient_norm()
        lr = config.optimizer.lr * config.schedule.factor(progress.step, config.steps)
        problem = _problem(parts, norm)
        if problem is None:
            self._update(norm, lr)
        gradient = config.gradient.gradient_count(len(plan))
        seconds = time.perf_counter() - began
        progress.add(
            tokens=batch.tokens.numel(),
            depth=depth,
            window=gradient * depth / len(plan),
            skipped=problem is not None,
            seconds=seconds,
            ledger=ledger,
        )
        record = {
            "kind": "train",
            "step": progress.step,
            "tokens": progress.tokens,
            "epoch": batch.start.epoch,
            "document": batch.start.document,
            "offset": batch.start.offset,
            "T": depth,
            "n0": len(plan) - gradient,
            "g": gradient,
            "loss": parts.total,
            "parts": parts.means(),
            "lr": lr,
            "grad_norm": norm,
            "rms_first": _rms([o.first_squares for o in outputs], len(batch.rows)),
            "rms_last": _rms([o.last_squares for o in outputs], len(batch.rows)),
            "skipped": problem is not None,
            "ledger": ledger.to_dict(times=False),
            "seconds": seconds,
        }
        self.metrics.write(record)
        if problem is not None:
            self._report_skip(problem, batch, plan)
        self.optimizer.zero_grad(set_to_none=True)
        return record

    def _backward(self, batch: Batch, plan: Plan, ledger: Ledger) -> list[StepOutput]:
        """Forward and backward of every micro-batch; gradients add up in the parameters."""
        outputs = []
        for output in self._forward(batch, plan, self.progress.step, ledger=ledger):
            output.share.backward()
            outputs.append(output._replace(share=output.share.detach()))
        return outputs

    def _forward(
        self,
        batch: Batch,
        plan: Plan,
        index: int,
        *,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
    ) -> Iterator[StepOutput]:
        """The micro-batches of step `index` (from 0), one after another."""
        counts = self.config.objective.counts(batch.labels)
        for piece in split(batch, self.config.micro_batches):
            piece = to_device(piece, self.device)
            noise = draw_noise(self.spec, self.config.seed, index, piece)
            yield self.step(piece, plan, noise, counts, ledger=ledger, recorder=recorder)

    def _gradient_norm(self) -> float:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _update(self, norm: float, lr: float) -> None:
        clip = self.config.clip_norm
        if clip is not None and norm > clip:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _report_skip(self, problem: str, batch: Batch, plan: Plan) -> None:
        """Says which step was skipped and why; ends the run if it was one too many."""
        progress, limit = self.progress, self.config.max_skips

        def rerun(recorder: Recorder) -> None:
            for _ in self._forward(batch, plan, progress.step - 1, recorder=recorder):
                pass

        found = first_non_finite(self.step.model, rerun, len(plan))
        message = (
            f"step {progress.step}: {problem}. First non-finite tensor: {found}. "
            f"Step skipped ({progress.skips_in_row} of {limit})."
        )
        self.display.say(message)
        if progress.skips_in_row >= limit:
            path = self._save(mark="_diverged")
            raise DivergedError(f"{message} Stopped. The batch starts at {batch.start}; saved {path}.")

    def _evaluate(self) -> dict[int, float]:
        ledger = Ledger()
        began = time.perf_counter()
        losses = self.held_out.losses(self.step.model, ledger=ledger)
        self.metrics.write(
            {
                "kind": "eval",
                "step": self.progress.step,
                "losses": losses,
                "ledger": ledger.to_dict(times=False),
                "seconds": time.perf_counter() - began,
            }
        )
        row = "  ".join(f"{depth}: {loss:.4f}" for depth, loss in losses.items())
        self.display.say(f"step {self.progress.step}  held-out loss by applications  {row}")
        return losses

    def _save(self, *, mark: str = "") -> Path:
        progress = self.progress
        progress.metrics_bytes = self.metrics.flushed_length()
        data = self.loader.state(progress.step)
        return save_checkpoint(
            self.folder, self.config, self.step.model, self.optimizer, progress, data, self.tokenizer, mark=mark
        )

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.loader.check(checkpoint.data)
        restore(checkpoint, self.step.model, self.optimizer)
        self.progress = checkpoint.progress
        self.display.say(f"Resuming {self.folder} at step {checkpoint.progress.step}.")

    def _finish(self, losses: dict[int, float]) -> RunRecord:
        config, progress, spec = self.config, self.progress, self.spec
        loss = losses[len(spec.plan())]
        save_model(self.folder / MODEL, config, self.step.model, progress, self.tokenizer, final_loss=loss)
        record = run_record(
            config,
            spec,
            progress,
            run_id=self.folder.name,
            loss=loss,
            data=self.loader,
            held_out=self.held_out.loader,
            device=self.device,
        )
        write_atomic(self.folder / RECORD, dump_json(record))
        return record


def _held_out(config: RunConfig, spec: LoopSpec, device: str) -> HeldOut:
    """The same text in the same order for every run (seed 0), so that their losses compare."""
    evaluation = config.evaluation
    depths, plan = choose_depths(spec, evaluation.depths)
    loader = load_packed(replace(config.data, sources=evaluation.sources), seed=0, vocab_size=spec.vocab[0])
    return HeldOut(
        loader=loader,
        num_batches=evaluation.batches,
        depths=depths,
        plan=plan,
        precision=config.precision,
        device=device,
    )


def _problem(parts: LossParts, norm: float) -> str | None:
    """What is not finite in a step, if anything."""
    if not math.isfinite(parts.total):
        return f"loss is {parts.total}"
    return None if math.isfinite(norm) else f"gradient norm is {norm}"


def _rms(squares: list[Tensor], rows: int) -> float:
    return math.sqrt(sum(float(s) for s in squares) / rows)
