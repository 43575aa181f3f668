"""`looplab sweep RECIPE --over FIELD=VALUES`: many runs of one recipe, each once, and one table."""

import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from looplab._config import config_hash
from looplab.cli import exit_codes
from looplab.cli.device import check_device
from looplab.cli.exit_codes import UserError, user_error
from looplab.cli.train import parsed
from looplab.executors import Executor
from looplab.report.sweep import write_sweep
from looplab.training.config import RunConfig
from looplab.training.display import clock
from looplab.training.folder import CONFIG, finished
from looplab.training.sweep.claim import Seen, claim_path, look
from looplab.training.sweep.points import (
    Axis,
    Point,
    SweepError,
    configurations,
    grid_points,
    label,
    random_points,
    read_points,
)
from looplab.training.sweep.run import HEARTBEAT, RUNS, SweptRun, Watcher, run_all, sweep_pool
from looplab.training.sweep.table import CSV, PARQUET, sweep_table, table_paths

EPILOGUE = """
Values: seed=0..2 (both ends), optimizer.lr=1e-3,3e-3, model.order.num-steps=[2,2],[4,4], precision=fp32,bf16,
gradient=FullBPTT,TruncatedBPTT(window=2). To draw from with --random: optimizer.lr=log(1e-4..1e-2), clip-norm=0.5..2.0.
Put values with brackets into quotes. A file for --from is a JSON or YAML list of mappings from fields to values.

A run is named by the hash of its configuration and lies in OUT/runs; studies and sweeps in the same OUT share runs. The
same command skips finished runs and goes on with others, after a kill too; several at once, on any machine that reaches
OUT, share the work. OUT/NAME holds table.csv, table.parquet, results.json, tables.tex, figures/ and report.html.
"""
EXAMPLES = """
  looplab sweep text-core --over seed=0..2 --over optimizer.lr=1e-3,3e-3 --out sweeps --steps 500
  looplab sweep text-core --zip optimizer.lr=1e-3,2e-3 --zip data.packing.rows=8,16 --dry-run
  looplab sweep text-core --over 'optimizer.lr=log(1e-4..1e-2)' --random 12 --out sweeps
  looplab sweep text-core --over seed=0..9 --executor ray --address HEAD_ADDRESS:6379 --out /shared/sweeps
"""
Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command, and of the recipe."""

    over: Repeated = ()
    """FIELD=VALUES: every combination of all of these; may be given several times."""
    zip: Repeated = ()
    """FIELD=VALUES that go side by side, first with first; may be given several times."""
    random: int | None = None
    """Draw so many runs instead of every combination. A larger number begins with the same draws."""
    random_seed: int = 0
    """Decides the draws."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """JSON or YAML list of runs, each a mapping from fields to values; crossed with --over and --zip."""
    executor: Literal["local", "ray"] = "local"
    """Where runs run: processes of this machine, or a Ray cluster whose machines all reach OUT. The numbers are the
    same."""
    workers: str = "auto"
    """Runs at once; "auto": as many as the cores hold, or the cluster has room for."""
    address: str = ""
    """Address of a running Ray cluster; default: one is started here."""
    max_retries: int = 2
    """Further attempts of a run whose worker died."""
    heartbeat: float = HEARTBEAT
    """Seconds of silence after which a worker counts as dead."""
    out: Path = Path("sweep-out")
    """Folder of sweeps and studies."""
    name: str = "sweep"
    """Folder of the table, below OUT."""
    device: str = "cpu"
    """Device of PyTorch: cpu, cuda, cuda:1."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Name the runs and how they stand, and stop."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Say nothing until the end."""
    run: RunConfig
    """The recipe with its changes."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        raise SystemExit(exit_codes.DONE if argv else exit_codes.USAGE)
    options = parsed(Options, "sweep", argv, EPILOGUE)
    with user_error(exit_codes.USAGE, (SweepError,)):
        asked, points = _points(options)
        configs = configurations(options.run, points)
    check_device(options.device)
    _check_out(options)
    paths = table_paths(configs, asked)
    labels = [label(config, paths) for config in configs]
    with user_error(exit_codes.USAGE, (ValueError, ImportError)):
        pool = sweep_pool(
            options.executor,
            configs,
            workers=_workers(options.workers),
            address=options.address or None,
            max_retries=_retries(options.max_retries),
        )
        if options.heartbeat <= 0:
            raise ValueError(f"--heartbeat must be positive seconds. Got {options.heartbeat:g}. 120 is usual.")
        if options.executor == "local" and options.address:
            raise ValueError(f"--address must be left out for local. Got {options.address!r}. Use --executor ray.")
    if options.dry_run:
        print("\n".join(dry_run_lines(configs, labels, options.out / RUNS)))
        return exit_codes.DONE
    command = shlex.join(["looplab", "sweep", *argv])
    try:
        with Progress(labels, quiet=options.quiet) as watcher, _opened(pool) as opened:
            found = run_all(
                configs,
                options.out / RUNS,
                opened,
                device=options.device,
                heartbeat=options.heartbeat,
                watcher=watcher,
            )
    except KeyboardInterrupt:
        print(f"Interrupted. To go on: {command}", file=sys.stderr)
        raise
    table = sweep_table(found, asked=asked, command=command)
    folder = options.out / options.name
    table.write(folder)
    page = write_sweep(table, folder)
    print(f"{table}\n\nTable: {folder / CSV}, {folder / PARQUET}\nReport: {page}")
    return exit_codes.DONE if all(run.record for run in found) else exit_codes.MODEL


def _points(options: Options) -> tuple[list[str], list[Point]]:
    """Paths that are to be varied, and the points."""
    over, zipped = ([Axis.parse(text) for text in texts] for texts in (options.over, options.zip))
    paths = [axis.path for axis in (*zipped, *over)]
    if options.random is not None:
        if options.from_ is not None:
            raise SweepError("--random must be left out beside --from, whose runs are given. Got both. Drop one.")
        return paths, random_points(over, zipped, options.random, options.random_seed)
    if options.from_ is None:
        if not paths:
            raise SweepError(
                "a sweep must vary something. Got no --over, --zip or --from. Add, for instance, --over seed=0..2."
            )
        return paths, grid_points(over, zipped)
    listed = read_points(options.from_)
    named = dict.fromkeys(path for point in listed for path in point)
    if twice := next((path for path in paths if path in named), None):
        raise SweepError(f"a field must be varied once. Got {twice} in {options.from_} and as an option. Drop one.")
    return [*named, *paths], grid_points(over, zipped, listed)


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--workers must be a number or auto. Got {text!r}. Use auto for all cores.") from None


def _retries(number: int) -> int:
    if number < 0:
        raise ValueError(f"--max-retries must be 0 or more. Got {number}. Use 0 to try every run once.")
    return number


def _check_out(options: Options) -> None:
    """Refuses what is no folder of sweeps, before anything is written."""
    for folder in (options.out, options.out / options.name):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} must be a folder. Got a file. Choose another --out.", exit_codes.BUSY)
    if (options.out / CONFIG).exists():
        raise UserError(
            f"{options.out} holds a run ({CONFIG}). Give --out a folder of sweeps, or a new one.", exit_codes.BUSY
        )
    if options.name in ("", ".", "..", RUNS) or Path(options.name).name != options.name:
        raise UserError(
            f"--name must be the name of a folder, and not {RUNS}. Got {options.name!r}. Choose another.",
            exit_codes.USAGE,
        )


@contextmanager
def _opened(pool: Executor) -> Iterator[Executor]:
    """The workers; a cluster that cannot be reached is the user's to mend."""
    with user_error(exit_codes.USAGE, (ValueError, ImportError, ConnectionError)):
        pool.__enter__()
    try:
        yield pool
    finally:
        pool.__exit__(None, None, None)


def usage() -> str:
    """What `looplab sweep --help` prints."""
    lines = ["usage: looplab sweep RECIPE --over FIELD=VALUES [options] [--FIELD VALUE ...]", ""]
    lines += ["Train many runs of one recipe, each once, and put them into one table.", EPILOGUE, "Options:"]
    for name, meaning in _OPTIONS.items():
        lines.append(f"  {name:<26}{meaning}")
    lines += [
        "",
        "All fields of a recipe, as --FIELD VALUE: looplab sweep text-core --help",
        "",
        f"Examples:{EXAMPLES}",
    ]
    return "\n".join(lines).rstrip()


_OPTIONS = {
    "--over FIELD=VALUES": "every combination of all of these",
    "--zip FIELD=VALUES": "fields that go side by side",
    "--random N": "draw N runs instead (--random-seed)",
    "--from FILE": "a list of runs, JSON or YAML",
    "--executor local|ray": "where runs run (--address of a Ray cluster)",
    "--workers N|auto": "runs at once; workers x threads <= cores",
    "--max-retries N": "further attempts of a run whose worker died (2)",
    "--heartbeat SECONDS": "silence after which a worker counts as dead (120)",
    "--out DIR": "folder of sweeps and studies (--name of this one)",
    "--device DEVICE": "device of PyTorch",
    "--dry-run": "name the runs and how they stand, and stop",
    "--quiet": "say nothing until the end",
}


def dry_run_lines(configs: Sequence[RunConfig], labels: Sequence[str], runs: Path) -> list[str]:
    """One line per run: its name, how it stands, what tells it from the others."""
    states = [_state(config, runs / config_hash(config)) for config in configs]
    wide = max(map(len, states))
    lines = [
        f"{config_hash(config)}  {state:<{wide}}  {name}"
        for config, state, name in zip(configs, states, labels, strict=True)
    ]
    done = states.count("finished")
    return [*lines, f"{len(configs)} runs, {done} finished, {len(configs) - done} to do"]


def _state(config: RunConfig, run: Path) -> str:
    if finished(run, config) is not None:
        return "finished"
    seen = look(claim_path(run))
    if seen is not None and not seen.dead:
        return f"with {seen.holder}"
    steps = [int(path.name.removeprefix("step_")) for path in run.glob("step_*") if path.name[5:].isdigit()]
    return f"at step {max(steps)}" if steps else "new"


class Progress(Watcher):
    """Progress on stderr: lines that move on a terminal, elsewhere a line for every event and every ten seconds."""

    def __init__(self, labels: Sequence[str], *, quiet: bool = False, console: Console | None = None):
        self._labels = labels
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._lock = threading.Lock()
        self._done, self._here = 0, 0
        self._seen: dict[int, Seen] = {}
        self._waiting: set[int] = set()
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    def ended(self, index: int, run: SweptRun, *, earlier: bool) -> None:
        with self._lock:
            self._done += 1
            self._here += not earlier
            self._seen.pop(index, None)
            said = f"loss {run.record.loss:.4f}" if run.record else run.message.splitlines()[0]
            how = "finished earlier" if earlier else run.status
            self._say(f"[{self._done}/{len(self._labels)}] {self._labels[index]}: {how}  {said}")

    def advanced(self, index: int, seen: Seen) -> None:
        with self._lock:
            self._seen[index] = seen
            if self._live:
                self._live.update(Text("\n".join([self._summary(), *self._running()])), refresh=True)
            elif time.monotonic() - self._said >= EVERY:
                self._say("; ".join([self._summary(), *self._running()]))

    def died(self, index: int, how: str, *, again: bool) -> None:
        with self._lock:
            self._seen.pop(index, None)
            self._say(f"{self._labels[index]}: its worker died ({how}){'; tried again' if again else ''}")

    def waiting(self, index: int, holder: str) -> None:
        with self._lock:
            if index not in self._waiting:
                self._waiting.add(index)
                self._say(f"{self._labels[index]}: left to {holder}")

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self._console.print(Text(line))

    def _summary(self) -> str:
        left = len(self._labels) - self._done
        text = f"{self._done} of {len(self._labels)} runs done"
        if self._here and left:
            text += f", about {clock((time.monotonic() - self._began) / self._here * left)} left"
        return text

    def _running(self) -> list[str]:
        lines = []
        for index, seen in sorted(self._seen.items()):
            facts = seen.facts
            at = (
                f"step {facts['step']}/{facts['steps']}  loss {float(facts['loss']):.4f}"
                if "loss" in facts
                else "starting"
            )
            lines.append(f"{self._labels[index]}: {at}  {seen.holder}")
        return lines
