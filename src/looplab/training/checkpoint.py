"""Checkpoints: folders that appear whole or not at all, and from which a run continues bit for bit.

    step_400/config.json, model.safetensors, tokenizer.json    the model; opens by itself (models/folder.py)
    step_400/optimizer.safetensors                             state of the optimizer, by parameter name; ..
    step_400/optimizer/                                        .. of a sharded run, a file per process (`spread`)
    step_400/ema.safetensors                                   average of the weights, where the run keeps one
    step_400/carry.safetensors                                 what the objective keeps between steps, if anything
    step_400/state.json                                        run configuration, progress, sizes and sums of the others
    latest                                                     name of the newest

A folder is written as step_400.partial, flushed to the disk, renamed; then `latest` is replaced. Nothing is unpickled.
Any number of processes goes on from the folder that any number wrote; they must see the same file system.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import looplab
from looplab._config import config_hash, from_dict, to_dict
from looplab.data.packing import DataState
from looplab.data.tokenizers import FILE as TOKENIZER_FILE
from looplab.data.tokenizers import SPECIALS, Tokenizer
from looplab.models.base import LoopedLM
from looplab.models.folder import NAMED, load_tensors, read_tensors, save_folder, save_tensors
from looplab.records import dump_json, encode_json, write_atomic
from looplab.recurrence.ledger import Ledger
from looplab.tasks.rows import TaskRows
from looplab.training.config import RunConfig
from looplab.training.optimizer import load_state, state_tensors, trained
from looplab.training.ranks import Ranks
from looplab.training.spread import is_spread, model_tensors, read_pieces, save_pieces, whole

OPTIMIZER, CARRY, STATE, LATEST = "optimizer.safetensors", "carry.safetensors", "state.json", "latest"
PIECES = "optimizer"
AVERAGE = "ema.safetensors"
SCHEMA = 1


class CheckpointError(ValueError):
    """A checkpoint that a run cannot go on from."""


@dataclass(kw_only=True)
class Progress:
    """Where a run stands, apart from weights and optimizer."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Input tokens processed."""
    depth_sum: int | float = 0
    """Sum of the drawn depths; of depths per row their means."""
    window_sum: float = 0.0
    """Sum of the iterations with gradient, in the unit of the depth."""
    skips: int = 0
    skips_in_row: int = 0
    seconds: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    depth_law: dict[str, list[float]] = field(default_factory=dict)
    """What has become of a learned law (`DepthLearner.state_dict`)."""
    threads: int = 0
    """CPU threads that the run began with; 0 where the configuration says."""
    spikes: int = 0
    """Steps that stood out from those before them (`training.spikes`)."""
    findings: list[str] = field(default_factory=list)
    """Kinds of the findings so far; each is raised once."""

    def add(
        self,
        *,
        tokens: int,
        depth: int | float,
        window: int | float,
        skipped: bool,
        seconds: float,
        ledger: Ledger,
        spike: bool = False,
    ) -> None:
        """One more step."""
        self.step += 1
        self.tokens += tokens
        self.depth_sum += depth
        self.window_sum += window
        self.skips += skipped
        self.skips_in_row = self.skips_in_row + 1 if skipped else 0
        self.seconds += seconds
        self.spikes += spike
        self.ledger = self.ledger + ledger


@dataclass(frozen=True)
class Checkpoint:
    """A verified folder and what its state.json says."""

    path: Path
    config: RunConfig
    progress: Progress
    data: DataState


def save_checkpoint(
    run: Path,
    config: RunConfig,
    model: LoopedLM,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    data: DataState,
    tokenizer: Tokenizer | None,
    *,
    carry: Mapping[str, torch.Tensor] | None = None,
    average: Mapping[str, torch.Tensor] | None = None,
    mark: str = "",
    ranks: Ranks | None = None,
) -> Path:
    """Writes `step_<n><mark>` into the folder of a run, and deletes old ones that `config` does not keep.

    All ranks of the run call this; the first one writes, except for the pieces of a sharded optimizer.

    Args:
        tokenizer: None for a run on a task.
        carry: What the objective keeps for the next step.
        average: The averaged weights, by name.
        mark: "_diverged": a folder for inspection, which no run resumes from.
    """
    ranks = ranks or Ranks()
    final = run / f"step_{progress.step}{mark}"
    partial = run / f"{final.name}.partial"
    moments = state_tensors(optimizer, model)
    spread = is_spread(moments)

    def begin() -> str:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / PIECES if spread else partial).mkdir(parents=True)
        return ""

    def write() -> str:
        save_model(partial, config, model, progress, tokenizer, tensors=weights)
        files = {OPTIMIZER: None if spread else moments, CARRY: carry or None, AVERAGE: averages or None}
        for name, tensors in files.items():
            if tensors is not None:
                save_tensors(partial / name, tensors)
        _complete(run, partial, final, config, progress, data)
        if not mark:
            write_atomic(run / LATEST, f"{final.name}\n")
            for old in checkpoints(run)[config.keep :]:
                if config.keep_every is None or _step(old) % config.keep_every:
                    shutil.rmtree(old)
        return ""

    ranks.led(begin)
    weights, averages = (whole(tensors, keep=ranks.leads) for tensors in (model_tensors(model), average or {}))
    if spread:
        save_pieces(partial / PIECES, moments)
    ranks.led(write)
    return final


def _complete(run: Path, partial: Path, final: Path, config: RunConfig, progress: Progress, data: DataState) -> None:
    """Puts state.json beside the other files, and the folder in its place."""
    state = {
        "schema": SCHEMA,
        "versions": {"looplab": looplab.__version__, "torch": torch.__version__},
        "config": to_dict(config),
        "config_hash": config_hash(config),
        "progress": {**vars(progress), "ledger": progress.ledger.to_dict()},
        "data": to_dict(data),
        "files": {str(file.relative_to(partial)): _measure(file) for file in _files(partial)},
    }
    (partial / STATE).write_text(dump_json({**state, "sum": _sum(state)}))
    folders = [path for path in partial.rglob("*") if path.is_dir()]
    for file in [*_files(partial), *folders, partial]:
        _flush(file)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    _flush(run)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def save_model(
    folder: Path,
    config: RunConfig,
    model: LoopedLM,
    progress: Progress,
    tokenizer: Tokenizer | None,
    *,
    final_loss: float | None = None,
    dtype: torch.dtype | None = None,
    averaged: bool = False,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes the model of a run as a folder that opens by itself.

    Args:
        final_loss: Held-out nats per token at the trained depth.
        averaged: Its weights are averages at this moment; the folder says so.
        dtype: Type of the stored tensors; None: as they are.
        tensors: The model's, whole, where it has only pieces of them.
    """
    source = Path(config.data.tokenizer)
    trained: dict[str, Any] = {
        "recipe": config.recipe,
        "seed": config.seed,
        "steps": progress.step,
        "tokens": progress.tokens,
        "trained_depth": str(model.spec.trained_depth),
        "config_hash": config_hash(config),
    }
    if isinstance(config.data, TaskRows):
        trained["task"] = to_dict(config.data.task)
    if tokenizer is not None:
        trained["tokenizer_hash"] = tokenizer.hash
    if final_loss is not None:
        trained["final_loss"] = final_loss
    if averaged:
        trained["ema"] = config.ema
    save_folder(
        folder,
        model,
        tokenizer=config.data.tokenizer
        if config.data.tokenizer in NAMED
        else source / TOKENIZER_FILE
        if source.is_dir()
        else source,
        token_ids={name: getattr(tokenizer, name) for name in SPECIALS if getattr(tokenizer, name, None) is not None},
        trained=trained,
        dtype=dtype,
        tensors=tensors,
    )


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run, the newest first."""
    found = [path for path in run.iterdir() if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=_step, reverse=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are all as they were written; None where the run has none.

    Warns about every broken one that is passed over.

    Raises:
        CheckpointError: All are broken, or one was written by another version's schema.
    """
    paths = checkpoints(run)
    for path, older in itertools.zip_longest(paths, paths[1:]):
        fault, state = _verify(path)
        if fault is None:
            return _checkpoint(path, state)
        if older is None:
            raise CheckpointError(f"{fault} No earlier checkpoint is left. Start a new run in another folder.")
        warnings.warn(f"{fault} Falling back to {older.name}.", stacklevel=2)
    return None


def agreed_checkpoint(run: Path, ranks: Ranks) -> Checkpoint | None:
    """`newest_checkpoint` as the first rank finds it, on all ranks.

    Raises:
        LeaderFailed: On the others, where the first one raises.
    """
    if ranks.size == 1:
        return newest_checkpoint(run)
    found: list[Checkpoint | None] = []

    def look() -> str:
        found.append(newest_checkpoint(run))
        return found[0].path.name if found[0] is not None else ""

    name = ranks.led(look)
    if found or not name:
        return found[0] if found else None
    return _checkpoint(run / name, json.loads((run / name / STATE).read_bytes()))


def restore_weights(checkpoint: Checkpoint, model: LoopedLM) -> None:
    """Puts the weights back, into a model that has all of them."""
    load_tensors(model, read_tensors(checkpoint.path / "model.safetensors"))


def restore_optimizer(checkpoint: Checkpoint, model: LoopedLM, optimizer: torch.optim.Optimizer) -> None:
    """Puts the state of the optimizer back, as the model's parameters are placed."""
    pieces = checkpoint.path / PIECES
    if not pieces.is_dir():
        load_state(optimizer, model, read_tensors(checkpoint.path / OPTIMIZER))
        return
    parameters = dict(trained(model))
    load_state(optimizer, model, read_pieces(pieces, lambda entry: parameters[entry.rsplit("/", 1)[0]]))


def read_carry(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """What the objective kept."""
    path = checkpoint.path / CARRY
    return read_tensors(path) if path.is_file() else {}


def read_average(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The averaged weights."""
    return read_tensors(checkpoint.path / AVERAGE)


def remove_partial(run: Path) -> None:
    """Deletes what a killed run left unfinished."""
    for path in run.glob("step_*.partial"):
        shutil.rmtree(path)


def _verify(path: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint (None: nothing), and its state."""
    where = f"{path.name}/{STATE}"
    try:
        state = json.loads((path / STATE).read_bytes())
        recorded = state.pop("sum")
    except (OSError, ValueError, KeyError, AttributeError):
        return f"{where}: missing or not readable.", {}
    if _sum(state) != recorded:
        return f"{where}: changed since it was written.", {}
    if state["schema"] != SCHEMA:
        raise CheckpointError(
            f"{where}: schema {state['schema']}, this version reads {SCHEMA}. Resume with looplab "
            f"{state['versions']['looplab']}."
        )
    for name, expected in state["files"].items():
        if not (path / name).is_file():
            return f"{path.name}/{name}: missing.", {}
        size = (path / name).stat().st_size
        if size != expected["bytes"]:
            return f"{path.name}/{name}: {size:,} of {expected['bytes']:,} bytes.", {}
        if _measure(path / name) != expected:
            return f"{path.name}/{name}: changed since it was written.", {}
    return None, state


def _checkpoint(path: Path, state: Mapping[str, Any]) -> Checkpoint:
    counts = {**state["progress"]["ledger"]}
    counts.pop("row_applications")
    counts["applications"] = {int(block): n for block, n in counts["applications"].items()}
    progress = Progress(**{**state["progress"], "ledger": Ledger(**counts)})
    return Checkpoint(path, RunConfig.read(state["config"]), progress, from_dict(DataState, state["data"]))


def _measure(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": file.stat().st_size, "blake2b": digest}


def _sum(state: Mapping[str, Any]) -> str:
    text = json.dumps(encode_json(dict(state)), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _flush(path: Path) -> None:
    """Makes sure that a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
