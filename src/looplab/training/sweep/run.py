"""Runs a list of configurations on an executor, each once, whatever dies on the way.

    runs/<hash>/         the run, named by the hash of its configuration: studies in the same folder share it
    runs/<hash>.claim    who works on it, while somebody does (`claim`)
    runs/<hash>.log      what it said, attempt by attempt

A finished run is read back, one that was cut short goes on from its newest checkpoint, and one that another sweep or
study works on is waited for. A worker that exits, is killed, runs out of memory, loses its machine or is silent for
`heartbeat` seconds costs one attempt; a run that has lost all its attempts is failed, and the others go on.

The heartbeat comes from a thread of the worker: it says that the process lives and reaches the folder, not that the
step at hand will end. A step or an evaluation may take as long as it needs.
"""

import contextlib
import os
import socket
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from looplab._config import config_hash
from looplab.executors import Executor, LocalPool, RayPool
from looplab.models.base import build
from looplab.records import RunRecord
from looplab.training.config import RunConfig
from looplab.training.display import Display, line
from looplab.training.divergence import DivergedError
from looplab.training.folder import FolderInUse, finished
from looplab.training.memory import memory_line
from looplab.training.sweep.claim import Claim, Seen, Watch, claim_path, drop, look, take
from looplab.training.trainer import train

RUNS = "runs"
"""Folder of the runs, below that of a sweep or of studies."""
HEARTBEAT = 120.0
"""Seconds of silence after which a worker counts as dead."""
BEAT = 2.0
"""Most seconds between two heartbeats."""
LAST_LINES = 5
OUT_OF_MEMORY, LOST_CLAIM = 12, 13
"""Exit codes of workers."""
STARVED = "out of memory: "
"""Begins the line that a worker leaves which could not allocate."""

Status = Literal["finished", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """What became of one configuration."""

    config: RunConfig
    folder: Path
    status: Status
    record: RunRecord | None = None
    """Of a finished run."""
    message: str = ""
    """Why there is none."""


class Watcher:
    """What a sweep tells while it runs, by the index of the configuration. This one keeps it to itself."""

    def ended(self, index: int, run: SweptRun, *, earlier: bool) -> None:
        """A run has come to its end; `earlier`: before this sweep, or in the hands of another."""

    def advanced(self, index: int, seen: Seen) -> None:
        """Where a run stands, whoever works on it. Called from another thread."""

    def died(self, index: int, how: str, *, again: bool) -> None:
        """The worker of a run died; `again`: it is tried again."""

    def waiting(self, index: int, holder: str) -> None:
        """Another process works on a run, which is left to it for now."""


def run_all(
    configs: Sequence[RunConfig],
    runs: Path,
    pool: Executor,
    *,
    device: str = "cpu",
    heartbeat: float = HEARTBEAT,
    watcher: Watcher | None = None,
) -> list[SweptRun]:
    """What became of every configuration, in their order.

    Args:
        configs: All different.
        runs: Folder of the runs, which every worker must reach under this path.
        pool: An open executor of processes, such as that of `sweep_pool`; its `retries` are the further attempts.
        heartbeat: Seconds of silence after which a worker counts as dead.

    Raises:
        ValueError: Equal configurations, or a heartbeat that is not positive.
    """
    if heartbeat <= 0:
        raise ValueError(f"heartbeat must be positive seconds. Got {heartbeat:g}. 120 is usual.")
    if len({config_hash(config) for config in configs}) < len(configs):
        raise ValueError("configurations must differ. Got equal ones. Remove the doubles.")
    return _Sweep(configs, runs.resolve(), pool, device, heartbeat, watcher or Watcher()).run()


def sweep_pool(
    name: str,
    configs: Sequence[RunConfig],
    *,
    workers: int | None = None,
    address: str | None = None,
    max_retries: int = 2,
) -> Executor:
    """The executor for these runs: every worker has as many threads as the run that has most.

    Args:
        name: "local": processes, also for a single worker, so that one that dies takes nobody along; "ray".
        workers: Runs at once. None: as many as the cores hold, or as the Ray cluster has room for.
        address: Of a Ray cluster.

    Raises:
        ValueError: Workers that the cores do not hold; threads that are not known beforehand; retries below 0.
    """
    threads = max(_threads(config) for config in configs)
    if name == "ray":
        return RayPool(workers, threads, address, cpus_per_worker=threads, retries=max_retries)
    return LocalPool(min(workers_for(workers, threads, cores()), len(configs)), threads, max_retries)


def _threads(config: RunConfig) -> int:
    if isinstance(config.threads, str):
        raise ValueError(
            "RunConfig.threads must be a number in a sweep, so that workers x threads <= cores. "
            f"Got {config.threads!r}. Use --threads 1."
        )
    return config.threads


def workers_for(asked: int | None, threads: int, number: int) -> int:
    """The workers that `number` cores hold, or those asked for if they do.

    Raises:
        ValueError: They do not.
    """
    most = max(1, number // threads)
    if asked is None:
        return most
    if not 1 <= asked <= most:
        got = f"{asked} workers of {threads} threads" if threads > 1 else f"{asked}"
        raise ValueError(
            f"--workers must be from 1 to {most}, so that workers x threads <= cores ({number}). Got {got}. Use auto."
        )
    return asked


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def log_path(run: Path) -> Path:
    """What a run said."""
    return run.with_name(f"{run.name}.log")


def last_lines(path: Path, number: int = LAST_LINES) -> list[str]:
    """The end of a log; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-number:]
    except FileNotFoundError:
        return []


class _Reply(NamedTuple):
    """What came back from a worker: HELD, or the end of a run."""

    status: str
    record: RunRecord | None = None
    message: str = ""


HELD = "held"


class _Job(NamedTuple):
    """What all runs of a sweep have in common."""

    runs: Path
    home: Path
    """Where paths of data begin that are not absolute."""
    sweep: str
    device: str
    heartbeat: float


class _Task(NamedTuple):
    config: RunConfig
    silent: Seen | None
    """A claim that may be taken over."""


class _Sweep:
    """One call of `run_all`."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        runs: Path,
        pool: Executor,
        device: str,
        heartbeat: float,
        watcher: Watcher,
    ):
        self.configs, self.pool, self.watcher, self.heartbeat = configs, pool, watcher, heartbeat
        self.folders = [runs / config_hash(config) for config in configs]
        self.job = _Job(runs, Path.cwd(), uuid.uuid4().hex, device, heartbeat)
        self.done: dict[int, SweptRun] = {}
        self.watch = Watch()
        self.given: dict[int, int] = {}  # runs under way -> their index in the executor
        self.order: list[int] = []  # the other way round
        self.deaths: Counter[int] = Counter()

    def run(self) -> list[SweptRun]:
        left = list(range(len(self.configs)))
        with self._observed():
            while left := [index for index in left if not self._finished(index)]:
                ended = len(self.done)
                if any(self._task(index) is not None for index in left):
                    left = self._round(left)
                if len(self.done) == ended:
                    time.sleep(min(1.0, self.heartbeat / 4))
        return [self.done[index] for index in range(len(self.configs))]

    def _round(self, left: Sequence[int]) -> list[int]:
        """Runs what is free, and returns what others hold."""
        tasks, held = _Free(self, left), list[int]()
        self.order, self.given = [], {}
        outcomes = self.pool.run(_work, tasks, shared=self.job, died=self._died)
        try:
            for place, reply in outcomes:
                index = self.order[place]
                del self.given[index]
                if reply.status == HELD:
                    self._leave(index, held)
                else:
                    self._end(index, reply)
        finally:
            outcomes.close()  # type: ignore[attr-defined]  # the workers end here, if an interrupt leads out
            for index in self.given:
                drop(claim_path(self.folders[index]), self.job.sweep)
        return sorted([*held, *tasks.held])

    def _task(self, index: int) -> _Task | None:
        """A run for a worker, unless somebody else works on it."""
        path = claim_path(self.folders[index])
        seen = look(path)
        if seen is None or seen.dead:
            return _Task(self.configs[index], None)
        if self.watch.silence(path, seen) > self.heartbeat:
            return _Task(self.configs[index], seen)
        return None

    def _leave(self, index: int, held: list[int]) -> None:
        """Leaves a run to whoever has it, for now."""
        held.append(index)
        seen = look(claim_path(self.folders[index]))
        self.watcher.waiting(index, "another process" if seen is None else seen.holder)

    def _finished(self, index: int) -> bool:
        """Whether a run is at its end, perhaps by somebody else."""
        if index in self.done:
            return True
        record = finished(self.folders[index], self.configs[index])
        if record is not None:
            self._end(index, _Reply("finished", record), earlier=True)
        return record is not None

    def _end(self, index: int, reply: _Reply, *, earlier: bool = False) -> None:
        status: Any = reply.status
        run = SweptRun(
            config=self.configs[index],
            folder=self.folders[index],
            status=status,
            record=reply.record,
            message=reply.message,
        )
        self.done[index] = run
        self.watcher.ended(index, run, earlier=earlier)

    def _died(self, place: int, how: str, again: bool) -> _Reply | None:
        """Frees the run of a dead worker; what has become of it after the last attempt."""
        index = self.order[place]
        self.deaths[index] += 1
        drop(claim_path(self.folders[index]), self.job.sweep)
        self.watcher.died(index, how, again=again)
        return None if again else _Reply("failed", None, self._obituary(index, how))

    def _obituary(self, index: int, how: str) -> str:
        config, log = self.configs[index], log_path(self.folders[index])
        said = last_lines(log)
        number = self.deaths[index]
        text = f"its worker died {number} times (last: {how})." if number > 1 else f"its worker died ({how})."
        if "memory" in how.lower() or any(STARVED in each for each in said):
            text += f" One step by the formula: {memory_line(config, build(config.model, device='meta'))}."
            text += " Use fewer workers, more micro_batches, fewer rows, or a machine with more memory."
        return "\n".join([text, f"Last lines of {log}:", *(f"  {each}" for each in said)]) if said else text

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """A thread looks at the claims: it tells how far runs are, and ends workers that are silent."""
        over = threading.Event()
        thread = threading.Thread(target=self._observe, args=(over,), daemon=True, name="looplab-sweep")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _observe(self, over: threading.Event) -> None:
        watch = Watch()
        while not over.wait(min(1.0, self.heartbeat / 4)):
            for index, folder in enumerate(self.folders):
                place = self.given.get(index)
                seen = None
                with suppress(OSError):
                    seen = None if index in self.done else look(claim_path(folder))
                if seen is None or not seen.facts:
                    continue
                self.watcher.advanced(index, seen)
                ours = place is not None and seen.facts.get("sweep") == self.job.sweep
                if ours and watch.silence(claim_path(folder), seen) > self.heartbeat:
                    self.pool.kill(place)  # type: ignore[arg-type]


class _Free:
    """The runs that nobody works on, asked one by one as workers become free; the others are in `held`."""

    def __init__(self, sweep: _Sweep, left: Sequence[int]):
        self.sweep, self.left, self.held = sweep, [*reversed(left)], list[int]()

    def __length_hint__(self) -> int:
        return len(self.left)

    def __iter__(self) -> Iterator[_Task]:
        sweep = self.sweep
        while self.left:
            index = self.left.pop()
            if sweep._finished(index):
                continue
            task = sweep._task(index)
            if task is None:
                sweep._leave(index, self.held)
                continue
            sweep.given[index] = len(sweep.order)
            sweep.order.append(index)
            yield task


# What runs in a worker.


class _Logged(Display):
    """Appends what a run says to its log, and remembers where it stands."""

    def __init__(self, path: Path, every: int):
        self._path, self._every = path, every
        self._begun = False
        self.facts: dict[str, Any] = {}

    def step(self, record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> None:
        self.facts = {"step": record["step"], "steps": steps, "loss": record["loss"]}
        self._begin()
        if record["step"] % self._every == 0 or record["step"] == steps:
            self.say(line(record, steps=steps, tokens_per_second=tokens_per_second, seconds_left=seconds_left))

    def say(self, line: str) -> None:
        self._begin()
        self._write(line)

    def _begin(self) -> None:
        """Says who works on the run, once it does: a run that somebody else has leaves no trace."""
        if not self._begun:
            self._begun = True
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._write(f"{now} process {os.getpid()} on {socket.gethostname()}")

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            print(line, file=file)


@contextmanager
def _beating(claim: Claim, display: _Logged, heartbeat: float) -> Iterator[None]:
    """Heartbeats while the run is under way; the process ends if somebody else has taken the claim."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(min(BEAT, heartbeat / 8)):
            if not claim.held:
                os._exit(LOST_CLAIM)  # it was silent for so long that it counts as dead: another writes the folder
            with suppress(OSError):
                claim.beat(**display.facts)

    thread = threading.Thread(target=beat, daemon=True, name="looplab-heartbeat")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        claim.release()


def _work(job: _Job, task: _Task) -> _Reply:
    """Trains one configuration, from its newest checkpoint if there is one."""
    run = job.runs / config_hash(task.config)
    claim = take(claim_path(run), job.sweep, silent=task.silent)
    if claim is None:
        return _Reply(HELD)
    display = _Logged(log_path(run), task.config.log_every)
    home = job.home if job.home.is_dir() else Path.cwd()
    with _beating(claim, display, job.heartbeat), contextlib.chdir(home):
        try:
            return _Reply("finished", train(task.config, run, device=job.device, display=display))
        except FolderInUse:
            return _Reply(HELD)
        except DivergedError as error:
            return _Reply("diverged", None, str(error))
        except Exception as error:
            if _starved(error):
                display.say(f"{STARVED}{error}")
                os._exit(OUT_OF_MEMORY)  # a new process begins with all the memory there is
            display.say("".join(traceback.format_exception(error)).rstrip())
            return _Reply("failed", None, f"{type(error).__name__}: {error}")


def _starved(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
