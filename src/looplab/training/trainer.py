"""The trainer: steps, metrics, evaluation, checkpoints, in one folder.

    depth -> rows -> loss of every micro-batch -> backward -> clip -> optimizer -> metrics
    clip:   g <- g * min(1, clip_norm / |g|),  |g| over all parameters

Everything random is a function of (seed, stream, step, row): there is no generator to save, and a run that is killed
and started again ends with the same bits as one that was not. In metrics and names of folders `step` counts steps done,
so it begins at 1; streams, schedules and the loader count from 0.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplab._types import Float
from looplab.data.packing import Batch, PackedText, load_packed
from looplab.data.tokenizers import load_tokenizer
from looplab.objectives.base import LossParts
from looplab.objectives.jacobian_penalty import JacobianPenalty
from looplab.records import Finding, RunRecord, dump_json, write_atomic
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.trace import Recorder
from looplab.tasks.rows import TaskRows
from looplab.training.average import WeightAverage
from looplab.training.checkpoint import (
    Checkpoint,
    Progress,
    agreed_checkpoint,
    read_average,
    read_carry,
    remove_partial,
    restore_optimizer,
    restore_weights,
    save_checkpoint,
    save_model,
)
from looplab.training.compiled import CompiledParts, wanted
from looplab.training.config import Evaluation, RunConfig, TaskEvaluation
from looplab.training.display import Display
from looplab.training.distributed import Alone
from looplab.training.divergence import DivergedError, first_non_finite, growth
from looplab.training.evaluation import HeldOut, Scores, choose_depths
from looplab.training.folder import METRICS, MODEL, RECORD, claimed, finished, locked
from looplab.training.gradients import StateGradients, part_norms
from looplab.training.memory import memory_line
from looplab.training.metrics import MetricsFile, Unwritten, peak_bytes, read_metrics
from looplab.training.ranks import Ranks
from looplab.training.record import run_record
from looplab.training.spikes import Spikes
from looplab.training.spread import model_tensors, norm, whole
from looplab.training.step import At, Drawn, StepOutput, TrainingStep, draw_depths, draw_noise, split, to_device
from looplab.training.task_evaluation import Graded, graded
from looplab.training.threads import fastest_threads
from looplab.training.trackers import Trackers, check_trackers


def train(
    config: RunConfig,
    folder: str | os.PathLike[str],
    *,
    device: str = "cpu",
    display: Display | None = None,
    parallel: Alone | None = None,
    track: Sequence[str] = (),
) -> RunRecord:
    """Runs `config` to its end in `folder`, from the newest checkpoint if there is one, and returns the record.

    A finished run is not run again.

    Args:
        parallel: How several processes, all of which call this, train one model together; `device` is then theirs.
        track: Names of trackers that are told the numbers of the run (`trackers`).

    Raises:
        FolderError: The folder holds something else, or a run with another configuration, or is being written to.
        DataError: The data cannot be used, or changed since the checkpoint.
        DivergedError: `config.max_skips` steps in a row gave no finite loss or gradient.
        LeaderFailed: On other ranks than the first, where that one has an error of this list.
    """
    run, parallel = Path(folder), parallel or Alone(ranks=Ranks(device=device))
    parallel.check(config)
    check_trackers(track)
    with ExitStack() as lock:
        with ExitStack() as claim:

            def begin() -> str:
                lock.enter_context(locked(run))
                claim.enter_context(claimed(run, config))
                record = finished(run, config)
                return "" if record is None else dump_json(record)

            written = parallel.ranks.led(begin)
            if written:
                return RunRecord.from_dict(json.loads(written))
            trainer = Trainer(config, run, display=display, parallel=parallel, track=track)
        return trainer.run()


class Trainer:
    """One run in its folder, which the caller has claimed."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        device: str = "cpu",
        display: Display | None = None,
        parallel: Alone | None = None,
        track: Sequence[str] = (),
    ):
        self.config, self.folder, self.track = config, folder, track
        self.parallel = parallel or Alone(ranks=Ranks(device=device))
        self.ranks, self.device = self.parallel.ranks, self.parallel.ranks.device
        self.display = display if display is not None and self.ranks.leads else Display()
        of_task = isinstance(config.data, TaskRows)
        self.tokenizer = None if of_task else load_tokenizer(config.data.tokenizer)
        checkpoint = agreed_checkpoint(folder, self.ranks)
        self.progress = Progress() if checkpoint is None else checkpoint.progress
        self._settle()
        model = config.build_model(resumed=checkpoint is not None)
        law = model.spec.trained_depth.over(config.steps)  # type: ignore[attr-defined]
        self.spec = replace(model.spec, trained_depth=law)
        read = self.spec.vocab[0] if self.spec.token_ids is None else self.spec.token_ids
        self.loader: Any = config.data.load(seed=config.seed, vocab_size=read)
        if skipped := getattr(self.loader, "skipped", 0):  # text has such lines, tasks have none
            self.display.say(f"{skipped:,} lines of the data left out (on_bad_line='skip').")
        self.held_out = _held_out(config, self.spec, self.device)
        if checkpoint is not None:
            self.loader.check(checkpoint.data)
            restore_weights(checkpoint, model)
        self.step = TrainingStep(model, config.objective, config.gradient, precision=config.precision)
        self.called = self.parallel.place(self.step, self._some_row)
        compiles = wanted(config.compile, device=self.device, twice=isinstance(config.objective, JacobianPenalty))
        self.compiled = CompiledParts(model) if compiles and self.parallel.compiles else None
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = config.optimizer.build(model)
        self.tables = None if config.optimizer.tables is None else config.optimizer.tables.build(model)
        self.average = None if config.ema is None else WeightAverage(model, config.ema)
        self.learner = self.spec.trained_depth.learner()  # type: ignore[attr-defined]
        self.spikes = Spikes()
        self.carry: dict[str, Tensor] = {}
        if checkpoint is not None:
            self._resume(checkpoint)
        self.metrics: MetricsFile = Unwritten()
        self.ranks.led(self._open_metrics)
        self.spikes.reread(read_metrics(folder / METRICS))

    def _open_metrics(self) -> str:
        remove_partial(self.folder)
        trackers = Trackers(self.track, self.folder, self.config, step=self.progress.step)
        self.metrics = MetricsFile(self.folder / METRICS, length=self.progress.metrics_bytes, trackers=trackers)
        return ""

    def _some_row(self) -> tuple[Batch, Float[Tensor, "batch seq noise"] | None]:
        """The first row of the run, and its noise."""
        batch = self.loader.batch(0, rows=torch.zeros(1, dtype=torch.long))
        return batch, draw_noise(self.spec, self.config.seed, 0, batch)

    def _settle(self) -> None:
        """What decides bits for the whole process: threads, and whether operations may vary."""
        config, progress = self.config, self.progress
        if config.threads == "auto" and not progress.threads:
            progress.threads = int(self.ranks.led(lambda: str(fastest_threads())))
            self.display.say(f"Fastest here: {progress.threads} thread{'s' * (progress.threads > 1)}.")
        torch.set_num_threads(progress.threads if config.threads == "auto" else config.threads)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
        if config.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports a compiler
            torch.use_deterministic_algorithms(config.deterministic)

    def run(self) -> RunRecord:
        """Trains to the end and writes the model and the record."""
        config, progress = self.config, self.progress
        scores: Scores | None = None
        if not self.display.silent and progress.step < config.steps and self.ranks.size == 1:
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
        rows = torch.arange(config.data.rows).chunk(config.micro_batches)
        drawn = draw_depths(self.spec, config.seed, progress.step, rows, config.depth_per, self.learner)
        own, mine = self.parallel.deal(rows, drawn, self.spec)
        batch = self.loader.batch(progress.step) if own is None else self.loader.batch(progress.step, rows=own)
        pieces = split(batch, config.micro_batches)
        depth = _mean([d.depth for d in drawn])
        ledger = Ledger()
        recorder = StateGradients() if config.state_norms else None
        outputs = self._backward(pieces, mine, ledger, recorder)
        parts = outputs[0].parts
        for output in outputs[1:]:
            parts = parts + output.parts
        parts, ledger = self.parallel.parts(parts), self.parallel.ledger(ledger)
        norm = self._gradient_norm()
        lr = config.optimizer.lr * config.schedule.factor(progress.step, config.steps)
        norms = part_norms(self.step.model.named_parameters())
        problem = _problem(parts, norm)
        spike = problem is None and self.spikes.add(parts.total, norm)
        if problem is None:
            self._update(norm, lr)
            if self.learner is not None:
                self.learner.update(drawn[0].depth, parts.total)
        strategy = config.gradient.at(progress.step)
        lengths = [(n, output.free) for d, output in zip(drawn, outputs, strict=True) for n in d.lengths(output.plan)]
        ran, gradient = (
            _mean([n for n, _ in lengths]),
            _mean([strategy.gradient_count(n - free) for n, free in lengths]),
        )
        if problem is None:
            self.carry = {name: tensor.detach() for name, tensor in outputs[0].carry.items()}
        seconds = time.perf_counter() - began
        progress.add(
            tokens=batch.tokens.numel() * self.ranks.size,
            depth=depth,
            window=gradient * depth / ran,
            skipped=problem is not None,
            seconds=seconds,
            ledger=ledger,
            spike=spike,
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
            "grad_norms": norms,
            **({} if recorder is None else {"state_grad_norms": recorder.norms()}),
            "rms_first": self._rms([o.first_squares for o in outputs]),
            "rms_last": self._rms([o.last_squares for o in outputs]),
            "skipped": problem is not None,
            "spike": spike,
            "ledger": ledger.to_dict(times=False),
            "peak_bytes": peak_bytes(self.device),
            "seconds": seconds,
        }
        self.metrics.write(record)
        self._find(growth(record["rms_first"], record["rms_last"], step=progress.step))
        if problem is not None:
            self._report_skip(problem, pieces, mine)
        self.optimizer.zero_grad(set_to_none=True)
        if self.tables is not None:
            self.tables.zero_grad(set_to_none=True)
        return record

    def _find(self, finding: Finding | None) -> None:
        """Says and records a finding, the first time that a run has it."""
        if finding is not None and finding.kind not in self.progress.findings:
            self.progress.findings.append(finding.kind)
            self.metrics.write({**finding.to_dict(), "kind": "finding", "finding": finding.kind})
            self.display.say(str(finding))

    def _backward(
        self, pieces: Sequence[Batch], drawn: Sequence[Drawn], ledger: Ledger, recorder: Recorder | None
    ) -> list[StepOutput]:
        """Forward and backward of every micro-batch; gradients add up in the parameters."""
        outputs = []
        for output in self._forward(pieces, drawn, self.progress.step, ledger=ledger, recorder=recorder):
            self.parallel.backward(output.share)
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
        counts = self.parallel.counts(config.objective, pieces, drawn)
        at = At(index, config.steps, config.seed, self.carry, getattr(self.loader, "numbered", None))
        at = at._replace(row_bucket=config.row_bucket, all_rows=config.data.rows)
        for number, (piece, (_, plan, depths)) in enumerate(zip(pieces, drawn, strict=True), 1):
            piece = to_device(piece, self.device)
            noise = draw_noise(self.spec, config.seed, index, piece)
            with self.parallel.accumulating(self.called, last=number == len(pieces)):
                yield self.called(
                    piece, plan, noise, counts, at=at._replace(depths=depths), ledger=ledger, recorder=recorder
                )

    def _gradient_norm(self) -> float:
        return norm([p.grad for p in self.parameters if p.grad is not None])

    def _rms(self, squares: list[Tensor]) -> float:
        return math.sqrt(self.ranks.total([sum(float(s) for s in squares)])[0] / self.config.data.rows)

    def _update(self, norm: float, lr: float) -> None:
        clip = self.config.clip_norm
        if clip is not None and norm > clip:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("share", 1.0)
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

        with nullcontext() if self.compiled is None else self.compiled.eager():
            found = first_non_finite(self.step.model, rerun, max(len(d.plan) for d in drawn), agree=self.ranks.first)
        message = (
            f"step {progress.step}: {problem}. First non-finite tensor: {found}. "
            f"Step skipped ({progress.skips_in_row} of {limit})."
        )
        self.display.say(message)
        if progress.skips_in_row >= limit:
            path = self._save(mark="_diverged")
            raise DivergedError(f"{message} Stopped. The batch starts at {pieces[0].start}; saved {path}.")

    def _scores(self, ledger: Ledger | None = None) -> Scores:
        with self._averaged(), self.parallel.gathered(self.step):
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
            ranks=self.ranks,
        )

    def _resume(self, checkpoint: Checkpoint) -> None:
        restore_optimizer(checkpoint, self.step.model, self.optimizer)
        self.carry = read_carry(checkpoint)
        if self.learner is not None:
            self.learner.load_state_dict(checkpoint.progress.depth_law)
        if self.average is not None:
            self.average.load(read_average(checkpoint))
        self.display.say(f"Resuming {self.folder} at step {checkpoint.progress.step}.")

    def _finish(self, scores: Scores) -> RunRecord:
        config, progress, spec = self.config, self.progress, self.spec
        loss = scores.loss
        record = run_record(
            config,
            spec,
            progress,
            run_id=self.folder.name,
            loss=loss,
            data=self.loader,
            held_out=self.held_out.hash,
            device=self.device,
            processes=self.parallel.name,
        )
        with self._averaged():
            tensors = whole(model_tensors(self.step.model), keep=self.ranks.leads)

            def write() -> str:
                save_model(
                    self.folder / MODEL,
                    config,
                    self.step.model,
                    progress,
                    self.tokenizer,
                    final_loss=loss,
                    averaged=self.average is not None,
                    tensors=tensors,
                )
                write_atomic(self.folder / RECORD, dump_json(record))
                return ""

            self.ranks.led(write)
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


def _mean(values: Sequence[int | float]) -> int | float:
    """The mean, and the number itself where all are alike."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def _problem(parts: LossParts, norm: float) -> str | None:
    """What is not finite in a step, if anything."""
    if not math.isfinite(parts.total):
        return f"loss is {parts.total}"
    return None if math.isfinite(norm) else f"gradient norm is {norm}"
