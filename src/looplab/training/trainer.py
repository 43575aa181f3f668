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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplab.data.packing import Batch, PackedText, load_packed
from looplab.data.tokenizers import load_tokenizer
from looplab.objectives.base import LossParts, Objective, scored_positions
from looplab.records import RunRecord, dump_json, write_atomic
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.trace import Recorder
from looplab.tasks.rows import TaskRows
from looplab.training.average import WeightAverage
from looplab.training.checkpoint import (
    Checkpoint,
    Progress,
    newest_checkpoint,
    read_average,
    read_carry,
    remove_partial,
    restore,
    save_checkpoint,
    save_model,
)
from looplab.training.config import Evaluation, RunConfig, TaskEvaluation
from looplab.training.display import Display
from looplab.training.divergence import DivergedError, first_non_finite
from looplab.training.evaluation import HeldOut, Scores, choose_depths
from looplab.training.folder import METRICS, MODEL, RECORD, claimed, finished, locked
from looplab.training.memory import memory_line
from looplab.training.metrics import MetricsFile
from looplab.training.record import run_record
from looplab.training.step import At, Drawn, StepOutput, TrainingStep, draw_depths, draw_noise, split, to_device
from looplab.training.task_evaluation import Graded, graded


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
        of_task = isinstance(config.data, TaskRows)
        self.tokenizer = None if of_task else load_tokenizer(config.data.tokenizer)
        checkpoint = newest_checkpoint(folder)
        model = config.build_model(resumed=checkpoint is not None).to(device)
        self.spec = model.spec
        read = self.spec.vocab[0] if self.spec.token_ids is None else self.spec.token_ids
        self.loader: Any = config.data.load(seed=config.seed, vocab_size=read)
        self.held_out = _held_out(config, self.spec, device)
        self.step = TrainingStep(model, config.objective, config.gradient, precision=config.precision)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = config.optimizer.build(model)
        self.tables = None if config.optimizer.tables is None else config.optimizer.tables.build(model)
        self.average = None if config.ema is None else WeightAverage(model, config.ema)
        self.learner = self.spec.trained_depth.learner()  # type: ignore[attr-defined]
        self.progress = Progress()
        self.carry: dict[str, Tensor] = {}
        if checkpoint is not None:
            self._resume(checkpoint)
        remove_partial(folder)
        self.metrics = MetricsFile(folder / METRICS, length=self.progress.metrics_bytes)

    def run(self) -> RunRecord:
        """Trains to the end and writes the model and the record."""
        config, progress = self.config, self.progress
        scores: Scores | None = None
        if not self.display.silent and progress.step < config.steps:
            self.display.say(memory_line(config, self.step.model))
        start, first = time.perf_counter(), progress.step
        try:
            while progress.step < config.steps:
                record = self._train_step()
                done = progress.step - first
                left = (time.perf_counter() - start) / done * (config.steps - progress.step)
                rate = record["tokens"] / progress.step / record["seconds"]
                self.display.step(record, steps=config.steps, tokens_per_second=rate, seconds_left=left)
                if progress.step % config.evaluation.every == 0 or progress.step == config.steps:
                    scores = self._evaluate()
                if progress.step % config.save_every == 0 or progress.step == config.steps:
                    self._save()
            return self._finish(scores or self._scores())
        finally:
            self.metrics.close()
            self.display.close()

    def _train_step(self) -> dict[str, Any]:
        """One optimizer step, or a skipped one; returns its line of the metrics."""
        config, progress, began = self.config, self.progress, time.perf_counter()
        batch = self.loader.batch(progress.step)
        pieces = split(batch, config.micro_batches)
        drawn = draw_depths(self.spec, config.seed, progress.step, pieces, config.depth_per, self.learner)
        depth = _mean([d.depth for d in drawn])
        ledger = Ledger()
        outputs = self._backward(pieces, drawn, ledger)
        parts = outputs[0].parts
        for output in outputs[1:]:
            parts = parts + output.parts
        norm = self._gradient_norm()
        lr = config.optimizer.lr * config.schedule.factor(progress.step, config.steps)
        problem = _problem(parts, norm)
        if problem is None:
            self._update(norm, lr)
            if self.learner is not None:
                self.learner.update(drawn[0].depth, parts.total)
        strategy = config.gradient.at(progress.step)
        lengths = [n for d, output in zip(drawn, outputs, strict=True) for n in d.lengths(output.plan)]
        ran, gradient = _mean(lengths), _mean([strategy.gradient_count(n) for n in lengths])
        if problem is None:
            self.carry = {name: tensor.detach() for name, tensor in outputs[0].carry.items()}
        seconds = time.perf_counter() - began
        progress.add(
            tokens=batch.tokens.numel(),
            depth=depth,
            window=gradient * depth / ran,
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
            "n0": ran - gradient,
            "g": gradient,
            "beyond": self.spec.trained_depth.beyond(progress.step - 1),  # type: ignore[attr-defined]
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
            self._report_skip(problem, pieces, drawn)
        self.optimizer.zero_grad(set_to_none=True)
        if self.tables is not None:
            self.tables.zero_grad(set_to_none=True)
        return record

    def _backward(self, pieces: Sequence[Batch], drawn: Sequence[Drawn], ledger: Ledger) -> list[StepOutput]:
        """Forward and backward of every micro-batch; gradients add up in the parameters."""
        outputs = []
        for output in self._forward(pieces, drawn, self.progress.step, ledger=ledger):
            output.share.backward()
            outputs.append(output._replace(share=output.share.detach()))
        return outputs

    def _forward(
        self,
        pieces: Sequence[Batch],
        drawn: Sequence[Drawn],
        index: int,
        *,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
    ) -> Iterator[StepOutput]:
        """The micro-batches of step `index` (from 0), one after another."""
        config = self.config
        counts = _counts(config.objective, pieces, drawn)
        at = At(index, config.steps, config.seed, self.carry, getattr(self.loader, "numbered", None))
        for piece, (_, plan, depths) in zip(pieces, drawn, strict=True):
            piece = to_device(piece, self.device)
            noise = draw_noise(self.spec, config.seed, index, piece)
            here = at._replace(depths=depths, row_bucket=config.row_bucket)
            yield self.step(piece, plan, noise, counts, at=here, ledger=ledger, recorder=recorder)

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
        if self.tables is not None:
            for group in self.tables.param_groups:
                group["lr"] = self.tables.defaults["lr"] * lr / self.config.optimizer.lr
            self.tables.step()
        if self.average is not None:
            self.average.update()

    def _report_skip(self, problem: str, pieces: Sequence[Batch], drawn: Sequence[Drawn]) -> None:
        """Says which step was skipped and why; ends the run if it was one too many."""
        progress, limit = self.progress, self.config.max_skips

        def rerun(recorder: Recorder) -> None:
            for _ in self._forward(pieces, drawn, progress.step - 1, recorder=recorder):
                pass

        found = first_non_finite(self.step.model, rerun, max(len(d.plan) for d in drawn))
        message = (
            f"step {progress.step}: {problem}. First non-finite tensor: {found}. "
            f"Step skipped ({progress.skips_in_row} of {limit})."
        )
        self.display.say(message)
        if progress.skips_in_row >= limit:
            path = self._save(mark="_diverged")
            raise DivergedError(f"{message} Stopped. The batch starts at {pieces[0].start}; saved {path}.")

    def _scores(self, ledger: Ledger | None = None) -> Scores:
        with self._averaged():
            return self.held_out.evaluate(self.step.model, ledger=ledger)

    def _averaged(self) -> AbstractContextManager[None]:
        """The model as it is evaluated: with averaged weights where the run keeps them."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _evaluate(self) -> Scores:
        ledger = Ledger()
        began = time.perf_counter()
        scores = self._scores(ledger)
        self.metrics.write(
            {
                "kind": "eval",
                "step": self.progress.step,
                **scores.record,
                "ledger": ledger.to_dict(times=False),
                "seconds": time.perf_counter() - began,
            }
        )
        self.display.say(f"step {self.progress.step}  {scores.line}")
        return scores

    def _save(self, *, mark: str = "") -> Path:
        progress = self.progress
        progress.metrics_bytes = self.metrics.flushed_length()
        if self.learner is not None:
            progress.depth_law = self.learner.state_dict()
        data = self.loader.state(progress.step)
        return save_checkpoint(
            self.folder,
            self.config,
            self.step.model,
            self.optimizer,
            progress,
            data,
            self.tokenizer,
            carry=self.carry,
            average=None if self.average is None else self.average.tensors,
            mark=mark,
        )

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.loader.check(checkpoint.data)
        restore(checkpoint, self.step.model, self.optimizer)
        self.progress, self.carry = checkpoint.progress, read_carry(checkpoint)
        if self.learner is not None:
            self.learner.load_state_dict(checkpoint.progress.depth_law)
        if self.average is not None:
            self.average.load(read_average(checkpoint))
        self.display.say(f"Resuming {self.folder} at step {checkpoint.progress.step}.")

    def _finish(self, scores: Scores) -> RunRecord:
        config, progress, spec = self.config, self.progress, self.spec
        loss = scores.loss
        with self._averaged():
            save_model(
                self.folder / MODEL,
                config,
                self.step.model,
                progress,
                self.tokenizer,
                final_loss=loss,
                averaged=self.average is not None,
            )
        record = run_record(
            config,
            spec,
            progress,
            run_id=self.folder.name,
            loss=loss,
            data=self.loader,
            held_out=self.held_out.hash,
            device=self.device,
        )
        write_atomic(self.folder / RECORD, dump_json(record))
        return record


def _held_out(config: RunConfig, spec: LoopSpec, device: str) -> HeldOut | Graded:
    """The same text in the same order for every run (seed 0), or the same problems, so that their numbers compare."""
    evaluation = config.evaluation
    if isinstance(config.data, TaskRows) and isinstance(evaluation, TaskEvaluation):
        return graded(config.data.task, config.data.drawn, evaluation)
    assert isinstance(config.data, PackedText) and isinstance(evaluation, Evaluation)
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


def _counts(objective: Objective, pieces: Sequence[Batch], drawn: Sequence[Drawn]) -> dict[str, int]:
    """Scored terms of the whole batch, whose micro-batches may have depths of their own."""
    lengths = {len(d.plan) for d in drawn if d.depths is None}
    if len(lengths) < 2:
        return objective.counts(torch.cat([piece.labels for piece in pieces]), max(len(d.plan) for d in drawn))
    total: dict[str, int] = {}
    for piece, (_, plan, _) in zip(pieces, drawn, strict=True):
        if scored_positions(piece.labels):
            for name, count in objective.counts(piece.labels, len(plan)).items():
                total[name] = total.get(name, 0) + count
    return total or objective.counts(pieces[0].labels)


def _mean(values: Sequence[int | float]) -> int | float:
    """The mean, and the number itself where all are alike."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def _problem(parts: LossParts, norm: float) -> str | None:
    """What is not finite in a step, if anything."""
    if not math.isfinite(parts.total):
        return f"loss is {parts.total}"
    return None if math.isfinite(norm) else f"gradient norm is {norm}"


def _rms(squares: list[Tensor], rows: int) -> float:
    return math.sqrt(sum(float(s) for s in squares) / rows)
