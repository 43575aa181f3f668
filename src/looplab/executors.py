"""Run independent tasks in this process, on local processes, or on Ray: one interface, the same results.

    with executor("local", workers=4, threads=1) as pool:
        for index, value in pool.run(function, tasks, shared=model):
            ...                                        # function(model, tasks[index]) came back

Results arrive in the order in which tasks finish; a caller that needs another order sorts by index. A task that lost
its worker runs again elsewhere, an exception of the function goes to the caller. At most one task per worker is under
way, and a result waits in its worker until the caller asks for it, so a slow caller slows the workers down.

A caller that wants to go on without a task whose workers keep dying passes `died`; one that finds a worker silent calls
`kill`.

Sums in floating point depend on the number of threads, so every worker has a fixed one. Other settings of a process,
such as PyTorch's deterministic mode, are not carried over: a function that needs them sets them itself.
"""

import importlib.util
import itertools
import logging
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple, TypeVar

from looplab._registry import did_you_mean

Task = TypeVar("Task")

Died = Callable[[int, str, bool], Any]
"""Called with a task's index, how its worker died, and whether the task is tried again."""

NAMES = ("local", "ray")
"""What `executor` takes as a name."""


class Outcome(NamedTuple):
    """What came back for `tasks[index]`."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    value: Any


class WorkerDied(RuntimeError):
    """The workers of one task kept dying: killed by the system, out of memory, or their machine went away."""


class WorkerTraceback(Exception):
    """The cause of an exception that a worker sent back: where it was raised there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Executor(ABC):
    """A place where tasks run. Used in a `with` statement, whose end stops the workers at once."""

    _open = False

    def __enter__(self) -> "Executor":
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self.close()

    @abstractmethod
    def run(
        self,
        function: Callable[[Any, Task], Any],
        tasks: Iterable[Task],
        *,
        shared: Any = None,
        describe: Callable[[Task], str] | None = None,
        died: Died | None = None,
    ) -> Iterator[Outcome]:
        """Calls `function(shared, task)` once per task and yields each result as it comes. One run at a time.

        Args:
            function: defined at the top level of a module. Must not depend on which worker calls it.
            tasks: read one by one, as workers become free.
            shared: sent to each worker once. A worker's changes to it stay there, and reach its later tasks.
            describe: names a task in errors; its index is always named.
            died: told of every death. What it returns at the last one is then the task's outcome, and others go on.

        Raises:
            WorkerDied: a task's worker died in all its attempts, and there is no `died`.
            TypeError: function, shared, a task or a result cannot be pickled (not `Serial`, which pickles nothing).
            Exception: what the function raised, of the same type where it can be pickled, not tried again. Its cause
                holds the worker's traceback. `sys.exit` in a function counts as a dead worker.
        """

    @abstractmethod
    def kill(self, index: int) -> None:
        """Ends the worker of `tasks[index]`, if it is under way, as if it had died. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Stops all workers at once, whatever they are doing. Leaving the `with` statement does it."""

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"executor: run must be called inside `with {type(self).__name__}(...) as pool`.")


class Serial(Executor):
    """Tasks run in order in the calling process; nothing is pickled.

    Args:
        threads: of BLAS, OpenMP and PyTorch during a task. None leaves them as they are.
    """

    def __init__(self, threads: int | None = None):
        self.threads = None if threads is None else _positive("threads", threads)

    def run(
        self,
        function: Callable[[Any, Task], Any],
        tasks: Iterable[Task],
        *,
        shared: Any = None,
        describe: Callable[[Task], str] | None = None,
        died: Died | None = None,
    ) -> Iterator[Outcome]:
        """See `Executor.run`. `describe` and `died` are not needed: no worker can die."""
        self._check_open()
        for index, task in enumerate(tasks):
            with _environment(_thread_variables(self.threads)), _torch_threads(self.threads):
                value = function(shared, task)
            yield Outcome(index, value)

    def kill(self, index: int) -> None:
        """Nothing to end: the worker is the caller."""

    def close(self) -> None:
        """Nothing to stop."""


@dataclass
class _Attempt:
    """A task under way: pickled, and how often its worker died."""

    index: int
    task: Any
    packed: bytes
    deaths: int = 0


class _Death(Exception):
    """A worker died; the text says how."""


class _Pool(Executor):
    """What pools have in common: one task per worker, retries, back-pressure. A handle stands for a task under way."""

    _dumps: Callable[[Any], bytes]

    def __init__(self, retries: int):
        if retries < 0:
            raise ValueError(f"executor: retries must be 0 or more. Got {retries}. Use 0 to try every task once.")
        self.retries = retries
        self._busy = False
        self._running: dict[Any, _Attempt] = {}

    @abstractmethod
    def _begin(self, job: bytes, expected: int | None) -> None:
        """Takes the pickled (function, shared) that the next tasks are run with, and their number, if known."""

    @abstractmethod
    def _capacity(self) -> int:
        """How many tasks may be under way now."""

    @abstractmethod
    def _start(self, packed: bytes) -> Any:
        """Gives a pickled task to a worker and returns its handle."""

    @abstractmethod
    def _wait(self, handles: list[Any]) -> Any:
        """Blocks until one of the tasks has ended, well or not."""

    @abstractmethod
    def _collect(self, handle: Any) -> bytes:
        """The reply of an ended task. Raises _Death."""

    @abstractmethod
    def _abandon(self, handle: Any) -> None:
        """Stops a task whose result nobody wants."""

    @abstractmethod
    def _kill(self, handle: Any) -> None:
        """Ends the worker of a task, which `_collect` then finds dead."""

    @abstractmethod
    def _end(self) -> None:
        """Lets go of the job."""

    def kill(self, index: int) -> None:
        """See `Executor.kill`."""
        for handle, attempt in list(self._running.items()):
            if attempt.index == index:
                self._kill(handle)

    def run(
        self,
        function: Callable[[Any, Task], Any],
        tasks: Iterable[Task],
        *,
        shared: Any = None,
        describe: Callable[[Task], str] | None = None,
        died: Died | None = None,
    ) -> Iterator[Outcome]:
        """See `Executor.run`."""
        self._check_open()
        if self._busy:
            raise RuntimeError(
                "executor: only one run at a time. Read the first to its end, or open a second executor."
            )
        job = _packed((function, shared), "the function or its shared object", self._dumps)
        running = self._running = {}
        again: list[_Attempt] = []
        self._busy = True
        try:
            self._begin(job, operator.length_hint(tasks, 0) or None)
            del job  # the pool has it
            queue, outcome = enumerate(tasks), None
            while True:
                # Before the result is handed out, so the worker does not wait for the caller.
                while len(running) < self._capacity() and (attempt := self._upcoming(again, queue)):
                    running[self._start(attempt.packed)] = attempt
                if outcome is not None:
                    yield outcome
                if not running:
                    return
                outcome = self._next_outcome(running, again, describe, died)
        finally:
            self._busy = False
            for handle in running:
                self._abandon(handle)
            self._end()

    def _upcoming(self, again: list[_Attempt], queue: Iterator[tuple[int, Any]]) -> _Attempt | None:
        """A task that lost its worker, or the next new one."""
        if again:
            return again.pop()
        for index, task in queue:
            return _Attempt(index, task, _packed(task, f"task {index}", self._dumps))
        return None

    def _next_outcome(
        self,
        running: dict[Any, _Attempt],
        again: list[_Attempt],
        describe: Callable[[Any], str] | None,
        died: Died | None,
    ) -> Outcome | None:
        """Waits for a task to end. None if its worker died; the task then stands in `again`."""
        handle = self._wait(list(running))
        attempt = running[handle]  # stays there until its worker has been dealt with
        try:
            reply = self._collect(handle)
        except _Death as death:
            del running[handle]
            attempt.deaths += 1
            last = attempt.deaths > self.retries
            found = died(attempt.index, str(death), not last) if died else None
            if last and died:
                return Outcome(attempt.index, found)
            if last:
                name = f"task {attempt.index}" + (f" ({describe(attempt.task)})" if describe else "")
                raise WorkerDied(
                    f"executor: a worker must live until its task is done. {name} lost {attempt.deaths} workers"
                    f" (last: {death}). If memory ran out, make tasks smaller or use fewer workers; else run this"
                    " task alone with one worker to see what ends it."
                ) from death.__cause__
            again.append(attempt)
            return None
        del running[handle]
        value, error, where = pickle.loads(reply)
        if error is not None:
            raise error from WorkerTraceback(where)
        return Outcome(attempt.index, value)


class LocalPool(_Pool):
    """Processes of this machine, started afresh ("spawn"): a fork of a process with PyTorch threads can hang.

    A script that uses it needs the `if __name__ == "__main__":` guard, because every worker imports the script.

    Args:
        workers: number of processes. They live from the first run to the end of the `with` statement.
        threads: of BLAS, OpenMP and PyTorch in each worker; None is 1. Keep workers x threads within the cores.
        retries: how often a task whose worker died is tried again.
    """

    _dumps = staticmethod(pickle.dumps)

    def __init__(self, workers: int, threads: int | None = None, retries: int = 2):
        super().__init__(retries)
        self.workers = _positive("workers", workers)
        self.threads = 1 if threads is None else _positive("threads", threads)
        self._all: list[_LocalWorker] = []
        self._idle: list[_LocalWorker] = []
        self._job: tuple[int, bytes] = (0, b"")

    def _begin(self, job: bytes, expected: int | None) -> None:
        self._job = (next(_RUNS), job)
        # All at once: each takes a moment to come up, and the first task of each waits for that.
        while len(self._all) < min(self.workers, expected or self.workers):
            self._idle.append(self._hire())

    def _hire(self) -> "_LocalWorker":
        worker = _LocalWorker(self.threads)
        self._all.append(worker)
        return worker

    def _capacity(self) -> int:
        return self.workers

    def _start(self, packed: bytes) -> "_LocalWorker":
        worker = self._idle.pop() if self._idle else self._hire()
        worker.give(*self._job, packed)
        return worker

    def _wait(self, handles: list["_LocalWorker"]) -> "_LocalWorker":
        workers = {worker.connection: worker for worker in handles}
        return workers[connection.wait(list(workers))[0]]  # type: ignore[index]

    def _collect(self, handle: "_LocalWorker") -> bytes:
        try:
            reply = handle.connection.recv_bytes()
        except (EOFError, OSError):
            how = handle.how_it_ended()
            self._abandon(handle)
            raise _Death(how) from None
        self._idle.append(handle)
        return reply

    def _abandon(self, handle: "_LocalWorker") -> None:
        if handle in self._all:  # `close` may have come first
            self._all.remove(handle)
            handle.stop()

    def _kill(self, handle: "_LocalWorker") -> None:
        with suppress(ValueError):  # it was stopped in this moment
            handle.process.kill()

    def _end(self) -> None:
        self._job = (0, b"")

    def close(self) -> None:
        """Kills the workers."""
        self._idle.clear()
        while self._all:
            self._all.pop().stop()


class _LocalWorker:
    """A process and the pipe to it."""

    def __init__(self, threads: int):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, threads), name="looplab-worker")
        # Libraries read the number of threads when they are loaded, which can be before any code of ours runs there.
        with _environment(_thread_variables(threads)), _interrupts_held():
            self.process.start()
        theirs.close()
        self._run = 0

    def give(self, run: int, job: bytes, packed: bytes) -> None:
        """Sends a task, before the first of a run the job too."""
        with suppress(OSError):  # a dead worker: collecting the reply finds out
            self.connection.send((run, packed) if run == self._run else (run, job, packed))
        self._run = run

    def how_it_ended(self) -> str:
        """Of a worker whose pipe broke."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, often because memory ran out"
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with code {code}; its last words are on stderr"

    def stop(self) -> None:
        """Kills the process and waits until it is gone."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


class RayPool(_Pool):
    """Ray tasks: Ray places them, starts and reuses their processes, and notices lost ones. We count the retries.

    looplab, in the same version, must be installed on every machine of the cluster.

    Args:
        workers: number of tasks under way at once; None is what the cluster has room for, asked again as it grows.
        threads: of BLAS, OpenMP and PyTorch in each worker; None is cpus_per_worker.
        address: of a running cluster ("host:port", or "auto" for one on this machine). None is `RAY_ADDRESS`, and
            without it a new one on this machine, reachable from nowhere else, that ends with the `with` statement. A
            connection that the process already has is used as it is; it then takes no address.
        cpus_per_worker: CPUs that Ray sets aside for each.
        retries: how often a task whose worker or machine died is tried again.
    """

    def __init__(
        self,
        workers: int | None = None,
        threads: int | None = None,
        address: str | None = None,
        cpus_per_worker: int = 1,
        retries: int = 2,
    ):
        super().__init__(retries)
        _check_ray()
        self.workers = None if workers is None else _positive("workers", workers)
        self.cpus_per_worker = _positive("cpus_per_worker", cpus_per_worker)
        self.threads = self.cpus_per_worker if threads is None else _positive("threads", threads)
        self.address = address
        self._connected_here = False
        self._run = 0
        self._job: list[Any] = []

    def __enter__(self) -> Executor:
        self._ray = _import_ray()
        self._dumps = self._ray.cloudpickle.dumps  # takes functions of the caller's script, which workers cannot import
        if not self._ray.is_initialized() or self.address is not None:
            self._connect(self.address or os.environ.get("RAY_ADDRESS"))
            self._connected_here = True
        try:
            self._check_room()
        except BaseException:
            self.close()
            raise
        self._task = self._ray.remote(
            num_cpus=self.cpus_per_worker,
            max_retries=0,
            runtime_env={"env_vars": _thread_variables(self.threads)},
        )(_reply_on_ray)
        return super().__enter__()

    def _connect(self, address: str | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}), _loopback(self._ray, only=address is None):
            if address is not None:
                self._ray.init(address=address, **quiet)
            else:
                cpus = None if self.workers is None else self.workers * self.cpus_per_worker
                self._ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)

    def _check_room(self) -> None:
        """Ray waits for ever for a machine that is large enough; say so first."""
        machines = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        if max(machines, default=0) < self.cpus_per_worker:
            raise ValueError(
                "executor: cpus_per_worker must fit on one machine of the Ray cluster. Got"
                f" {self.cpus_per_worker}, and the largest has {max(machines, default=0):g}. Lower it or add a machine."
            )

    def _begin(self, job: bytes, expected: int | None) -> None:
        self._run, self._job = next(_RUNS), [self._ray.put(job)]

    def _capacity(self) -> int:
        if self.workers is not None:
            return self.workers
        return max(1, int(self._ray.cluster_resources().get("CPU", 0) // self.cpus_per_worker))

    def _start(self, packed: bytes) -> Any:
        return self._task.remote(self._run, self._job, packed, self.threads)

    def _wait(self, handles: list[Any]) -> Any:
        return self._ray.wait(handles, num_returns=1)[0][0]

    def _collect(self, handle: Any) -> bytes:
        errors = self._ray.exceptions
        try:
            return self._ray.get(handle)
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
            errors.TaskCancelledError,  # of `kill`
        ) as error:
            raise _Death(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def _abandon(self, handle: Any) -> None:
        if self._ray.is_initialized():  # `close` may have come first
            self._ray.cancel(handle, force=True)

    def _kill(self, handle: Any) -> None:
        self._ray.cancel(handle, force=True)

    def _end(self) -> None:
        self._job = []

    def close(self) -> None:
        """Stops the cluster if it was started here, else leaves it."""
        if self._connected_here:
            self._connected_here = False
            self._ray.shutdown()


def executor(
    name: str, *, workers: int | None = None, threads: int | None = None, address: str | None = None
) -> Executor:
    """The executor of a command line's `--executor NAME`.

    Args:
        name: "local" or "ray".
        workers: local: processes, None or 1 runs in this process. ray: see `RayPool`.
        threads: of each worker. Pass it: results in floating point can depend on it.
        address: of a Ray cluster.
    """
    if name == "ray":
        return RayPool(workers, threads, address)
    if name != "local":
        raise ValueError(
            f"executor must be 'local' or 'ray'. Got {name!r}.{did_you_mean(name, NAMES)} Use 'local' for this machine."
        )
    if address is not None:
        raise ValueError(f"executor: address must be None for 'local'. Got {address!r}. Use 'ray' for a cluster.")
    return Serial(threads) if workers in (None, 1) else LocalPool(workers, threads)


_RUNS = itertools.count(1)
"""Numbers of the runs of this process."""


# What runs in a worker.

_CURRENT: dict[int, tuple[Callable[[Any, Any], Any], Any]] = {}
"""In a worker: the run it works for -> its function and shared object."""


def _reply(
    run: int, fetch: Callable[[], bytes], packed: bytes, threads: int, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """Does one task: pickled (value, None, "") or (None, exception, traceback). `fetch` gets the job, once per run."""
    try:
        if run not in _CURRENT:
            _CURRENT.clear()  # first, so that two are never in memory
            _CURRENT[run] = pickle.loads(fetch())
        function, shared = _CURRENT[run]
        task = pickle.loads(packed)
        with _torch_threads(threads):
            value = function(shared, task)
        return _packed((value, None, ""), "the result of a task", dumps)
    except Exception as error:
        where = "".join(traceback.format_exception(error))
        try:
            reply = dumps((None, error, where))
            pickle.loads(reply)  # some exceptions can be pickled but not read back
            return reply
        except Exception:
            return dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), where))


def _reply_on_ray(run: int, job: list[Any], packed: bytes, threads: int) -> bytes:
    """`job`: a reference in a list, which Ray does not resolve, so that only a worker's first task fetches it."""
    ray = _import_ray()
    return _reply(run, lambda: ray.get(job[0]), packed, threads, ray.cloudpickle.dumps)


def _serve(pipe: connection.Connection, threads: int) -> None:
    """Main function of a local worker: takes tasks from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the caller decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            run, *job, packed = pipe.recv()
            pipe.send_bytes(_reply(run, job.pop, packed, threads))  # pop, so that the pickled job is freed
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    """A caller that was killed cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _packed(value: Any, what: str, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            f"executor: {what} must be picklable, because it goes to another process. Got {type(error).__name__}:"
            f" {error}. Use functions and classes at the top level of a module, and plain data."
        ) from error


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"executor: {name} must be 1 or more. Got {value}. Use 1 for the least.")
    return value


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ImportError(
            "executor: 'ray' needs the package ray, which is not installed. Install it: pip install 'looplab[cluster]'"
        )


def _import_ray() -> Any:
    import ray

    return ray


def _thread_variables(threads: int | None) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return {} if threads is None else dict.fromkeys(names, str(threads))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables are set inside, for processes that are started there, and as before afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """PyTorch, if somebody has imported it, has so many threads inside."""
    torch = sys.modules.get("torch")
    if torch is None or threads is None or torch.get_num_threads() == threads:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits; in a process started here until that says otherwise, so none dies loudly while it loads."""
    resource_tracker.ensure_running()  # starting a process does this, and lets interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _loopback(ray: Any, *, only: bool) -> Iterator[None]:
    """`only`: a cluster started inside is out of reach of other machines, as on macOS; on Linux Ray opens all ports."""
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = before and not only
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
