"""`looplab retrofit CHECKPOINT`: layers of a dense model become prelude, looped core and coda of a looped one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from looplab.cli import exit_codes
from looplab.cli.device import check_device
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import DataError, read_documents
from looplab.data.tokenizers import SPECIALS, load_tokenizer
from looplab.interop.checkpoint import DTYPES
from looplab.interop.dense_source import DenseSource, open_dense
from looplab.interop.layer_distance import LayerDistance, calibration_tokens, measure_layers
from looplab.interop.retrofit import (
    INJECTIONS,
    Auto,
    Record,
    Run,
    cut_layers,
    looped_config,
    make_record,
    refuse_full,
    retrofit,
    save_retrofit,
)
from looplab.records import dump_json
from looplab.recurrence.boundary import EndNorm, NoBoundary, OwnNorm, PlainRMS
from looplab.recurrence.depth import Depth, FixedDepth, PoissonDepth, PoissonLognormal, UniformDepth, Unknown
from looplab.recurrence.halting import HazardGate, NoHalt
from looplab.recurrence.state_init import FromEmbeds, Normal, Zeros

BOUNDARIES = {"none": NoBoundary(), "own-norm": OwnNorm(), "plain-rms": PlainRMS(), "end-norm": EndNorm()}
HALTS = {"none": NoHalt(), "hazard": HazardGate()}
STARTS = {"embeds": FromEmbeds(), "skip-adapter": FromEmbeds(), "normal": Normal(std="like_init"), "zeros": Zeros()}
LAWS: dict[str, Callable[..., Depth]] = {
    "fixed": lambda n: FixedDepth(num_steps=n),
    "uniform": lambda low, high: UniformDepth(low=low, high=high),
    "poisson": lambda rate, most: PoissonDepth(rate=float(rate), max_steps=most),
    "poisson-lognormal": lambda rate, most: PoissonLognormal(rate=float(rate), max_steps=most),
    "unknown": lambda: Unknown(),
}
LAW_FORMS = "fixed:N, uniform:LOW:HIGH, poisson:RATE:MAX, poisson-lognormal:RATE:MAX or unknown"
LONGEST = 512
"""Tokens of one calibration text."""
LISTED = 5
"""Runs of layers that are printed, those that change the stream least; retrofit.json has them all."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make a looped model out of a dense one: first layers, a run of layers that loops, last layers.

    Layers between these are dropped, and listed. At one iteration (concat-identity or add-zero, no boundary) the model
    is the source without the dropped layers. OUT opens with looplab.load and the other commands. Try --dry-run first.

    Published cuts: TinyLlama 22 layers --prelude 4 --core 10:18 --coda 4; Llama-3.2-1B and OLMo-2-1B 16 layers, cores
    of 6 with --prelude 4 --coda 4 or of 4 with 2 and 2.
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder of a llama, mistral, olmo2, qwen2, qwen3 or smollm3 model or our dense one; built in: text-dense."""
    core: str
    """Layers that loop: A:B for A to B-1, or auto:N for the run of N layers that turns the stream least."""
    prelude: int | None = None
    """Number of first layers to keep. Default: all before the core."""
    coda: int | None = None
    """Number of last layers to keep. Default: all after the core."""
    out: Path | None = None
    """A new or empty folder for the model, retrofit.json and report.html."""
    init: str = "copy"
    """copy: core layers are copies. average:N: N core layers, each the mean of every N-th layer of the core's range."""
    injection: Literal["concat-identity", "concat-normal", "add-zero"] = "concat-identity"
    """How the prelude enters each iteration: W [s ; e] that starts by passing e, or as noise; or s + 0 norm(e)."""
    state_init: Literal["embeds", "skip-adapter", "normal", "zeros"] = "embeds"
    """The first state: the prelude's output (skip-adapter: and no injection at iteration 0), noise, or zeros."""
    boundary: Literal["none", "own-norm", "plain-rms", "end-norm"] = "none"
    """What happens to the state after each iteration. All but none change the source's logits."""
    halt: Literal["none", "hazard"] = "none"
    """A new stopping gate, untrained."""
    num_steps: int | None = None
    """Iterations that the model runs by itself. Default: what the source ran, 1; with average, layers per mean."""
    trained_depth: str | None = None
    """The law to note as trained: fixed:N, uniform:LOW:HIGH, poisson:RATE:MAX, poisson-lognormal:RATE:MAX or unknown.
    Default: what the source ran. Give the law that you will train with."""
    text: Path | None = None
    """A .txt, .jsonl or .parquet file to measure the layers on. Default: the built-in corpus."""
    tokens: int = 4096
    """Tokens to measure the layers on. 0: do not measure (with --core A:B only)."""
    tokenizer: str | None = None
    """A tokenizer.json to keep with the model, or bytes. Default: that of CHECKPOINT."""
    dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Type of the weights."""
    device: str = "cpu"
    """Device that the layers are measured on."""
    seed: int = 0
    """Of the parameters that the source does not have."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure and print everything, write nothing."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """No progress."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print retrofit.json instead of tables."""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=argv, prog="looplab retrofit")
    core, average = _core(options.core), _average(options.init)
    law = None if options.trained_depth is None else _law(options.trained_depth)
    _check(options, core)
    with exit_codes.user_error(exit_codes.MODEL, (KeyError, ValueError, FileNotFoundError)):
        source = open_dense(options.checkpoint)
    with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
        make_cut = partial(
            cut_layers, source.config.layers, core, prelude=options.prelude, coda=options.coda, average=average
        )
        make_cut()  # wrong ranges are told before the layers are measured
    distance = _measured(options, source)
    dtype = None if options.dtype == "source" else DTYPES[options.dtype]
    with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
        cut = make_cut(distance=distance)
        config = looped_config(
            source.config,
            cut,
            injection=INJECTIONS[options.injection],
            state_init=STARTS[options.state_init],
            skip_first=options.state_init == "skip-adapter",
            boundary=BOUNDARIES[options.boundary],
            halt=HALTS[options.halt],
            num_steps=options.num_steps,
            trained_depth=law,
        )
    record = make_record(
        source,
        cut,
        config,
        injection=options.injection,
        seed=options.seed,
        dtype=dtype,
        distance=distance,
        sha256={} if options.dry_run else source.hashes(),
    )
    if not options.dry_run:
        assert options.out is not None
        tokenizer, ids = _tokenizer(options, source)
        with exit_codes.user_error(exit_codes.MODEL, (ValueError,)):
            model = retrofit(source.tensors, cut, config, seed=options.seed, dtype=dtype)
        save_retrofit(options.out, model, record, tokenizer=tokenizer, token_ids=ids)
        from looplab.report.retrofit import write_retrofit  # draws

        write_retrofit(record, options.out)
    if options.json:
        print(dump_json(record))
    else:
        show(record, Console(), out=None if options.dry_run else options.out)
    return exit_codes.DONE


def show(record: Record, console: Console, *, out: Path | None) -> None:
    """Prints what is kept and dropped, the parameters as announced, the table, and what to do next."""
    from looplab.report.retrofit import looped, sentence, spans

    console.print(Text(record.source, style="bold"), soft_wrap=True)
    console.print(Text(sentence(record)), soft_wrap=True)
    core = tuple(layer for group in record.cut.core for layer in group)
    about = _table("", "")
    for label, value in (
        ("prelude", spans(record.cut.prelude)),
        ("core", spans(core)),
        ("coda", spans(record.cut.coda)),
        ("dropped", spans(record.cut.dropped)),
        ("parameters", f"{record.parameters:,} (source {record.source_parameters:,})"),
        *((f"  {name}", f"{count:,}") for name, count in record.groups.items()),
        ("weights", f"{size(record.model_bytes)} in {record.dtype}"),
        ("memory", f"{size(record.peak_bytes)} of weights at once, at most"),
    ):
        about.add_row(label, value)
    console.print(about)
    if record.distance is not None:
        start, length = looped(record)
        _show_distance(record.distance, start, length, console)
    if out is None:
        console.print("Dry run: nothing was written.")
    else:
        console.print(Text(f"wrote {out}\nnext: looplab audit {out} --num-steps 4"), soft_wrap=True)


def size(count: int) -> str:
    """`1.23 GB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _show_distance(distance: LayerDistance, start: int, length: int, console: Console) -> None:
    """The runs of the looped length that turn the stream least, then every layer by itself."""
    ranked = sorted(range(distance.layers - length + 1), key=lambda s: distance.of(s, length)[0])
    shown = ranked[:LISTED] + ([start] if start not in ranked[:LISTED] else [])
    for title, runs, width in (
        (f"runs of {length} layers, least angular distance first", shown, length),
        ("single layers", range(distance.layers) if length > 1 else [], 1),
    ):
        if not runs:
            continue
        table = _table("layers", "angular distance", "block influence", "")
        for first in runs:
            angle, influence = distance.of(first, width)
            name = str(first) if width == 1 else f"{first}-{first + width - 1}"
            mark = "looped" if (first, width) == (start, length) else ""
            table.add_row(name, f"{angle:.4f}", f"{influence:.4f}", mark)
        console.print(Text(f"{title} ({distance.tokens:,} tokens of {distance.text})"), table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if index == 0 or not any(columns) else "right")
    return table


def _check(options: Options, core: Run | Auto) -> None:
    """What can be told before anything is opened."""
    check_device(options.device)
    if options.out is None and not options.dry_run:
        raise exit_codes.UserError(
            "retrofit: --out must be a folder. Got none. Name one, or add --dry-run.", exit_codes.USAGE
        )
    if options.tokens < 0 or (options.tokens == 0 and isinstance(core, Auto)):
        least = "at least 1 with --core auto:N" if isinstance(core, Auto) else "at least 0"
        raise exit_codes.UserError(
            f"retrofit: --tokens must be {least}. Got {options.tokens}. Leave it out.", exit_codes.USAGE
        )
    if options.num_steps is not None and options.num_steps < 1:
        raise exit_codes.UserError(
            f"retrofit: --num-steps must be at least 1. Got {options.num_steps}. Leave it out for what the source ran.",
            exit_codes.USAGE,
        )
    if options.out is not None and not options.dry_run:
        with exit_codes.user_error(exit_codes.BUSY, (FileExistsError,)):
            refuse_full(options.out)


def _measured(options: Options, source: DenseSource) -> LayerDistance | None:
    """The table of the source's layers; None where it was not asked for."""
    if options.tokens == 0:
        return None
    name, _ = _tokenizer(options, source)
    with exit_codes.user_error(exit_codes.DATA, (DataError,)):
        documents = (
            read_documents(options.text, option=f"--text {options.text}") if options.text else builtin_corpus("train")
        )
        if name == "task":
            raise DataError(
                "retrofit: --tokens must be 0 for a model of a task's own tokens, which no text is written in. "
                f"Got {options.tokens}. Give --tokens 0 and --core A:B."
            )
        tokenizer = load_tokenizer(name)
        if tokenizer.vocab_size > source.config.vocab:
            raise DataError(
                f"retrofit: --tokenizer must have at most {source.config.vocab} ids, as CHECKPOINT does. Got "
                f"{tokenizer.vocab_size}. Give the tokenizer that the model was trained with, or --tokens 0."
            )
        longest = min(LONGEST, source.config.max_positions or LONGEST)
        rows = calibration_tokens(documents, tokenizer, tokens=options.tokens, longest=longest)
    with exit_codes.user_error(exit_codes.MODEL, (ValueError,)):
        model = source.model(device=options.device)
    with _progress(options.quiet) as advanced, exit_codes.user_error(exit_codes.DATA, (ValueError,)):
        return measure_layers(model, rows, text=documents.name, text_hash=documents.hash, advanced=advanced)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, of calibration tokens."""
    with Progress(console=Console(file=sys.stderr), disable=quiet, transient=True) as progress:
        task = progress.add_task("measuring layers", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _tokenizer(options: Options, source: DenseSource) -> tuple[str | Path, dict[str, int]]:
    """What is kept with the model: a name or a file, and special ids."""
    with exit_codes.user_error(exit_codes.DATA, (DataError,)):
        if options.tokenizer is not None:
            given = load_tokenizer(options.tokenizer)
            ids = {name: i for name in SPECIALS if (i := getattr(given, name)) is not None}
            path = Path(options.tokenizer)
            file: str | Path = path / "tokenizer.json" if path.is_dir() else path
            return ("bytes", {}) if options.tokenizer == "bytes" else (file, ids)
        found = source.tokenizer()
    if found is None:
        raise exit_codes.UserError(
            f"retrofit: --tokenizer must be given where CHECKPOINT has no tokenizer.json. Got none, and "
            f"{source.folder} has none. Name the file, or bytes.",
            exit_codes.USAGE,
        )
    return found


def _core(text: str) -> Run | Auto:
    """`A:B` or `auto:N`."""
    left, colon, right = text.partition(":")
    if colon and left == "auto" and right.isdigit():
        return Auto(length=int(right))
    if colon and left.isdigit() and right.isdigit():
        return Run(start=int(left), stop=int(right))
    raise exit_codes.UserError(
        f"retrofit: --core must be A:B, such as 10:18 for layers 10 to 17, or auto:N. Got {text!r}. Count from 0.",
        exit_codes.USAGE,
    )


def _average(text: str) -> int | None:
    """`copy` or `average:N`."""
    kind, _, count = text.partition(":")
    if text == "copy":
        return None
    if kind == "average" and count.isdigit():
        return int(count)
    raise exit_codes.UserError(
        f"retrofit: --init must be copy or average:N, such as average:4. Got {text!r}. N is the number of core layers.",
        exit_codes.USAGE,
    )


def _law(text: str) -> Depth:
    """A depth law of `LAW_FORMS`."""
    kind, *numbers = text.split(":")
    with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
        if kind in LAWS and all(n.isdigit() for n in numbers):
            try:
                return LAWS[kind](*map(int, numbers))
            except TypeError:  # another count of numbers
                pass
        raise ValueError(f"retrofit: --trained-depth must be {LAW_FORMS}. Got {text!r}. Numbers are whole.")
