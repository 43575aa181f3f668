"""`looplab gate CHECKPOINT`: trains gates beside a finished model, so that an engine knows early who will stop."""

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, open_checkpoint
from looplab.cli.config_file import FromFile, output_folder, parsed, resolved
from looplab.cli.exit_codes import UserError, user_error

if TYPE_CHECKING:
    from looplab.data.documents import DocumentSet
    from looplab.data.tokenizers import Tokenizer
    from looplab.engine.gates import Gate, Kind
    from looplab.interop import LoadedModel
    from looplab.training.gates import GateResult, GateTraining

HELD_OUT = 5
"""One document in so many is kept for the comparison, chosen by its content."""
LONGEST = 1024
"""Tokens of a row where the model names no longest context."""
EPILOGUE = """
The model is frozen. Teacher is its own gate, or a threshold rule for models without one. Writes KIND.safetensors and
KIND.json for every gate (the second names the weights it belongs to), gates.json and report.html. Serve with them by
--gate OUT/KIND.json, or put them into a folder named gates inside the checkpoint: --out CHECKPOINT/gates.
"""


@dataclass(frozen=True, kw_only=True)
class Options(FromFile, ReadAs):
    """Train lookahead and pre-loop gates beside a finished model, and compare their depths with the teacher's."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint folder, or name of a built-in one; looped, and able to stop early."""
    kind: str = "lookahead,preloop"
    """Gates to train, with commas: lookahead (and beside it its control, same_step), preloop, same_step."""
    out: Path
    """Folder for gates and report."""
    text: Path | None = None
    """A .txt, .jsonl or .parquet file; a fifth of its documents is held out. Default: the built-in corpus."""
    teacher: Literal["auto", "hazard", "latent", "kl"] = "auto"
    """The model's own gate (hazard), or the score of a threshold rule. Default: hazard, else latent."""
    threshold: float | None = None
    """Of a threshold teacher: the depths that a preloop gate learns."""
    updates: int = 300
    """Updates of every gate. Published gates took 20,000."""
    tokens: int = 4096
    """Tokens of an update."""
    lr: float = 1e-3
    """Peak learning rate."""
    documents: int = 64
    """Held-out documents of the comparison, at most."""
    replicates: int = 2000
    """Bootstrap replicates over documents."""
    tokenizer: str = ""
    """A folder with tokenizer.json, or "bytes". Default: the model's own."""
    seed: int = 0
    """Of the order of documents, of noise and of draws."""
    device: str = "cpu"
    """Device of PyTorch: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the weights are cast to; gates belong to the weights as they are cast."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """No progress."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print gates.json instead of a summary."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parsed(Options, "gate", argv, EPILOGUE)
    from looplab.cli.device import check_device
    from looplab.engine.gates import save_gate
    from looplab.records import dump_json, write_atomic
    from looplab.report.gates import sentences, write_gates
    from looplab.training.gates import check_teacher

    check_device(options.device)
    output_folder(options.out)
    loaded = open_checkpoint(options.checkpoint, options, dtype=options.dtype, device=options.device)
    config = _config(options, loaded)
    with user_error(exit_codes.MODEL, (ValueError,)):
        check_teacher(loaded.model, config)
    result, gates = _trained(options, loaded, config, shlex.join(["looplab", "gate", *argv]))
    for gate in gates.values():
        save_gate(options.out, gate)
    write_atomic(options.out / "gates.json", dump_json(result))
    write_atomic(options.out / "options.json", dump_json(resolved(options)))
    write_gates(result, options.out)
    if options.json:
        print(dump_json(result), end="")
        return exit_codes.DONE
    print("\n".join([f"Gates of {result.model}", *sentences(result), f"Report: {options.out / 'report.html'}"]))
    return exit_codes.DONE


def _config(options: Options, loaded: "LoadedModel") -> "GateTraining":
    from looplab.engine.gates import KINDS
    from looplab.training.gates import GateTraining

    asked = [word.strip() for word in options.kind.split(",") if word.strip()]
    wrong = [word for word in asked if word not in KINDS]
    if wrong or not asked:
        raise UserError(
            f"gate: --kind must be of {', '.join(KINDS)}. Got {options.kind!r}. Give one or several, with commas.",
            exit_codes.USAGE,
        )
    for name, least in (("updates", 1), ("tokens", 2), ("documents", 2), ("replicates", 1)):
        if getattr(options, name) < least:
            raise UserError(
                f"gate: --{name} must be at least {least}. Got {getattr(options, name)}. Raise it.", exit_codes.USAGE
            )
    halt = loaded.model.spec.halt
    own = halt is not None and (halt.layout, halt.per, halt.horizon) == ("hazard", "token", 0)
    teacher = ("hazard" if own else "latent") if options.teacher == "auto" else options.teacher
    with user_error(exit_codes.USAGE, (ValueError,)):
        return GateTraining(
            gates=tuple(kind for kind in KINDS if kind in asked),
            teacher=teacher,
            threshold=options.threshold,
            updates=options.updates,
            lr=options.lr,
            seed=options.seed,
        )


def _trained(
    options: Options, loaded: "LoadedModel", config: "GateTraining", command: str
) -> tuple["GateResult", Mapping["Kind", "Gate"]]:
    from looplab.data.documents import DataError
    from looplab.data.packing import PackedLoader, Packing
    from looplab.intervals import document_draws
    from looplab.models.folder import weight_hash
    from looplab.recurrence.exit import exit_points
    from looplab.training.gates import GateResult, compare_gates, train_gates

    spec = loaded.model.spec
    longest = min(options.tokens, spec.max_positions or LONGEST)
    with user_error(exit_codes.DATA, (DataError,)):
        tokenizer = tokenizer_of(loaded, options.tokenizer, "gate")
        learned, held = _texts(options.text)
        packing = Packing(seq_len=longest, rows=max(1, options.tokens // longest))
        vocab = spec.vocab[0] if spec.token_ids is None else spec.token_ids
        loader = PackedLoader([learned], tokenizer, packing, seed=options.seed, vocab_size=vocab)
        ids = [tokenizer.encode(document.text)[:longest] for document in held.documents]  # type: ignore[union-attr]
        ids = [text for text in ids if len(text) > 1][: options.documents]
        if len(ids) < 2:
            raise DataError(f"gate: {held.name} must hold 2 documents at least. Got {len(ids)}. Give more text.")
    with _progress(options.quiet, "training gates", config.updates) as moved:
        gates, losses = train_gates(
            loaded.model, loader.batch, config, name=Path(loaded.name).name, advanced=lambda done, _: moved(done)
        )
    with _progress(options.quiet, "comparing depths", len(ids)) as moved:
        rows = compare_gates(
            loaded.model,
            ids,
            gates,
            config,
            lambda count: document_draws(count, options.replicates, seed=options.seed, domain="gate", split="held"),
            advanced=moved,
        )
    result = GateResult(
        model=Path(loaded.name).name,
        weights=weight_hash(loaded.model),
        teacher=config.teacher,
        threshold=config.threshold,
        steps=len(exit_points(spec)),
        text=Path(learned.name).name,
        text_hash=loader.hash,
        held_out=Path(held.name).name,
        documents=len(ids),
        tokens=sum(map(len, ids)),
        updates=config.updates,
        losses={gate: losses[gate] for gate in losses},
        rows=rows,
        command=command,
    )
    return result, gates


def tokenizer_of(loaded: "LoadedModel", asked: str, command: str) -> "Tokenizer":
    """The tokenizer that was asked for, or the model's own.

    Raises:
        UserError: There is none.
    """
    from looplab.data.tokenizers import load_tokenizer

    if asked:
        return load_tokenizer(asked)
    if loaded.tokenizer is None:
        raise UserError(
            f"{command}: --tokenizer must be given where CHECKPOINT has none. Got none. Name a folder, or bytes.",
            exit_codes.DATA,
        )
    return loaded.tokenizer


def _texts(path: Path | None) -> tuple["DocumentSet", "DocumentSet"]:
    """Documents to learn from, and held-out ones."""
    from looplab.data.corpus import builtin_corpus
    from looplab.data.documents import DataError, Document, DocumentSet, read_documents

    if path is None:
        return builtin_corpus("train"), builtin_corpus("heldout")
    found = read_documents(path, option=f"--text {path}")
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in found.documents:
        if not isinstance(document, Document):
            raise DataError(f"gate: --text {path} must hold texts. Got a grid at line {document.line}. Give a text.")
        digest = hashlib.blake2b(document.content_key.encode(), digest_size=8).digest()
        sides[int.from_bytes(digest, "big") % HELD_OUT == 0].append(document)
    learned, held = (
        DocumentSet(f"{found.name}{side}", tuple(documents), found.hash)
        for side, documents in zip(("", ", held out"), sides, strict=True)
    )
    return learned, held


@contextmanager
def _progress(quiet: bool, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), disable=quiet, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
