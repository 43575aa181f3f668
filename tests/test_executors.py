import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from looplab.executors import LocalPool, Outcome, RayPool, Serial, WorkerDied, executor

PATIENCE = 60  # seconds: the machine may be busy


# What workers run. Each is imported by name, so it stands at the top level.


def power(shared, task):
    return shared**task


def pid(shared, task):
    return os.getpid()


def raise_coded(shared, task):
    note(shared, task)
    raise Coded(f"task {task} is wrong", code=4)


def raise_one_way(shared, task):
    raise OneWay("left", "right")


def raise_unpicklable(shared, task):
    error = ValueError("holds a lock")
    error.lock = threading.Lock()
    raise error


def kill_own_worker(folder, task):
    note(folder, task)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_own_worker_once(folder, task):
    """Task 2 does not survive its first attempt."""
    note(folder, task)
    if task == 2 and Path(folder, "2").read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    return task * 10


def exit_own_worker(shared, task):
    os._exit(7)


def wait_for_the_next(folder, task):
    """Task 0 ends when the caller has seen the result of task 1."""
    if task == 0:
        appear(Path(folder, "seen"))
    return task


def sleep_long(folder, task):
    note(folder, f"running-{os.getpid()}")
    time.sleep(600)


def thread_counts(shared, task):
    import torch

    seen = os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"], torch.get_num_threads()
    torch.set_num_threads(3)  # the next task must not notice
    return seen


def torch_threads(shared, task):
    return sys.modules["torch"].get_num_threads()


def make_lock(shared, task):
    return threading.Lock()


def where_it_ran(folder, task):
    """Tasks 0 and 1 wait for each other, so they run on two nodes of one CPU each; from 2 on tasks wait for a sign."""
    import ray

    note(folder, f"{task}-{os.getpid()}")
    note(folder, task)
    appear(Path(folder, str(1 - task) if task < 2 else "go"))
    return ray.get_runtime_context().get_node_id()


def everything_at_once(shared, task):
    """What `shared` computes, the process, and its threads."""
    appear(Path(shared.folder, str(1 - task))) if note(shared.folder, task) and task < 2 else None
    return shared.base**task, os.getpid(), os.environ["OMP_NUM_THREADS"]


class Coded(Exception):
    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code


class OneWay(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


class CountedWhenRead:
    """Leaves a mark in a folder whenever it is unpickled."""

    def __init__(self, folder, base=3):
        self.folder, self.base = folder, base

    def __setstate__(self, state):
        self.__dict__ = state
        note(self.folder, f"read-{os.getpid()}")


def note(folder, name):
    """One more letter in the file `name`."""
    with open(Path(folder, str(name)), "a") as file:
        return file.write("x")


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def appear(path):
    wait_until(path.exists, path)


def pids(folder, pattern):
    """From files that are named ...-PID."""
    return {int(path.name.rpartition("-")[2]) for path in Path(folder).glob(pattern)}


def attempts(folder):
    return {path.name: len(path.read_text()) for path in Path(folder).iterdir()}


# In this process and on local processes.


@pytest.mark.parametrize("pool", [Serial(), LocalPool(1), LocalPool(2)], ids=["serial", "one", "two"])
def test_every_task_comes_back_once_with_its_index(pool):
    with pool:
        outcomes = list(pool.run(power, range(9), shared=3))
    assert sorted(outcomes) == [Outcome(index, 3**index) for index in range(9)]


def test_no_tasks_no_outcomes():
    with LocalPool(2) as pool:
        assert list(pool.run(power, [], shared=3)) == []


def test_results_come_as_they_finish(tmp_path):
    order = []
    with LocalPool(2) as pool:
        for index, _ in pool.run(wait_for_the_next, [0, 1], shared=tmp_path):
            order.append(index)
            (tmp_path / "seen").touch()
    assert order == [1, 0]


def test_shared_is_sent_once_per_worker(tmp_path):
    with LocalPool(2) as pool:
        pids = {value[1] for _, value in pool.run(everything_at_once, range(12), shared=CountedWhenRead(tmp_path))}
    reads = {name: count for name, count in attempts(tmp_path).items() if name.startswith("read")}
    assert reads == {f"read-{pid}": 1 for pid in pids} and len(pids) == 2


def test_workers_stay_for_the_next_run_with_another_shared_object():
    with LocalPool(1) as pool:
        first, second = [next(iter(pool.run(pid, [0]))).value for _ in range(2)]
        assert first == second != os.getpid()
        assert [next(iter(pool.run(power, [2], shared=base))).value for base in (3, 5)] == [9, 25]


@pytest.mark.parametrize("pool", [Serial(), LocalPool(2)], ids=["serial", "two"])
def test_tasks_are_read_only_as_workers_become_free(pool):
    read = []
    tasks = (read.append(task) or task for task in range(50))
    with pool:
        for done, _ in enumerate(pool.run(power, tasks, shared=1), start=1):
            assert len(read) <= done + 2, "a slow caller must find at most one task per worker under way"
    assert len(read) == 50


def test_a_run_can_be_left_early(tmp_path):
    with LocalPool(1) as pool:
        run = pool.run(wait_then_sleep, [0, 1], shared=tmp_path)
        worker = next(run).value
        run.close()
        assert not psutil.pid_exists(worker), "still at a task that nobody waits for"
        assert sorted(pool.run(power, range(4), shared=2)) == [(0, 1), (1, 2), (2, 4), (3, 8)]


@pytest.mark.parametrize("pool", [Serial(), LocalPool(1)], ids=["serial", "one"])
def test_an_exception_keeps_its_type_and_is_not_tried_again(pool, tmp_path):
    with pool, pytest.raises(Coded, match="task 5 is wrong") as caught:
        list(pool.run(raise_coded, [5], shared=tmp_path))
    assert caught.value.code == 4
    assert attempts(tmp_path) == {"5": 1}


def test_the_workers_traceback_is_the_cause(tmp_path):
    with LocalPool(1) as pool, pytest.raises(Coded) as caught:
        list(pool.run(raise_coded, [5], shared=tmp_path))
    assert "in raise_coded" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("function", "message"),
    [(raise_one_way, "OneWay: left and right"), (raise_unpicklable, "ValueError: holds a lock")],
)
def test_an_exception_that_cannot_travel_is_named(function, message):
    with LocalPool(1) as pool:
        with pytest.raises(RuntimeError, match=message):
            list(pool.run(function, [0]))
        assert [value for _, value in pool.run(power, [1], shared=3)] == [3], "the pool still works"


def test_a_killed_workers_task_runs_again_and_only_that(tmp_path):
    with LocalPool(2) as pool:
        outcomes = list(pool.run(kill_own_worker_once, range(8), shared=tmp_path))
    assert sorted(outcomes) == [(task, task * 10) for task in range(8)]
    assert attempts(tmp_path) == {str(task): 2 if task == 2 else 1 for task in range(8)}


def test_a_task_that_always_kills_its_worker_is_named(tmp_path):
    with LocalPool(2) as pool:
        with pytest.raises(WorkerDied, match=r"task 1 \(shard b\) lost 3 workers \(last: killed by SIGKILL.*If memory"):
            list(pool.run(kill_own_worker_or_not, "ab", shared=tmp_path, describe=lambda task: f"shard {task}"))
        assert attempts(tmp_path)["b"] == 3
        assert [value for _, value in pool.run(power, [1], shared=3)] == [3], "the pool still works"


def kill_own_worker_or_not(folder, task):
    return kill_own_worker(folder, task) if task == "b" else task


def test_a_caller_may_go_on_without_a_task_whose_workers_keep_dying(tmp_path):
    deaths = []

    def died(index, how, again):
        deaths.append((index, how.split(",")[0], again))
        return "lost"

    with LocalPool(2) as pool:
        outcomes = list(pool.run(kill_own_worker_or_not, "abc", shared=tmp_path, died=died))
    assert sorted(outcomes) == [(0, "a"), (1, "lost"), (2, "c")]
    assert deaths == [(1, "killed by SIGKILL", again) for again in (True, True, False)]


def freeze_once(folder, task):
    note(folder, task)
    if task == 1 and Path(folder, "1").read_text() == "x":
        os.kill(os.getpid(), signal.SIGSTOP)
    return task


def test_a_frozen_worker_can_be_ended_from_another_thread(tmp_path):
    def end():
        appear(tmp_path / "1")
        pool.kill(1)
        pool.kill(7)  # not under way: nothing happens

    with LocalPool(2) as pool:
        thread = threading.Thread(target=end)
        thread.start()
        assert sorted(pool.run(freeze_once, range(3), shared=tmp_path)) == [(0, 0), (1, 1), (2, 2)]
        thread.join()
    assert attempts(tmp_path)["1"] == 2
    Serial().kill(0)


def test_no_retries_is_one_attempt(tmp_path):
    with LocalPool(1, retries=0) as pool, pytest.raises(WorkerDied, match=r"task 0 lost 1 workers"):
        list(pool.run(kill_own_worker, [0], shared=tmp_path))
    assert attempts(tmp_path) == {"0": 1}


def test_a_worker_that_leaves_by_itself_is_told_from_a_killed_one():
    with LocalPool(1, retries=0) as pool, pytest.raises(WorkerDied, match="ended with code 7"):
        list(pool.run(exit_own_worker, [0]))


@pytest.mark.slow
def test_threads_are_pinned_before_and_after_torch_is_loaded():
    with LocalPool(1, threads=2) as pool:
        assert [value for _, value in pool.run(thread_counts, range(2))] == [("2", "2", 2)] * 2
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_threads_of_the_calling_process_are_pinned_for_the_task_only():
    before = torch_threads(None, None)
    with Serial(threads=2) as pool:
        assert [value for _, value in pool.run(torch_threads, [0])] == [2]
        assert torch_threads(None, None) == before != 2


@pytest.mark.parametrize(
    ("function", "tasks", "shared", "what"),
    [
        (lambda shared, task: task, [0], None, "the function or its shared object"),
        (power, [0], threading.Lock(), "the function or its shared object"),
        (power, [1, threading.Lock()], 2, "task 1"),
        (make_lock, [0], None, "the result of a task"),
    ],
    ids=["function", "shared", "task", "result"],
)
def test_what_cannot_be_pickled_is_named(function, tasks, shared, what):
    with (
        LocalPool(1) as pool,
        pytest.raises(TypeError, match=f"executor: {what} must be picklable.*Got .*Use functions"),
    ):
        list(pool.run(function, tasks, shared=shared))


def test_a_pool_runs_inside_its_with_statement_one_run_at_a_time():
    for pool in (Serial(), LocalPool(1)):
        with pytest.raises(RuntimeError, match=r"inside `with (Serial|LocalPool)\(\.\.\.\) as pool`"):
            list(pool.run(power, [0], shared=1))
    with LocalPool(1) as pool:
        first = pool.run(power, range(3), shared=1)
        next(first)
        with pytest.raises(RuntimeError, match="only one run at a time"):
            next(pool.run(power, range(3), shared=1))
        assert len(list(first)) == 2


def test_leaving_the_with_statement_stops_busy_workers(tmp_path):
    with LocalPool(1) as pool:
        run = pool.run(wait_then_sleep, [0, 1], shared=tmp_path)
        worker = psutil.Process(next(run).value)
        appear(tmp_path / "1")
    assert not worker.is_running()
    run.close()  # finds its workers gone already


def wait_then_sleep(folder, task):
    note(folder, task)
    if task == 1:
        time.sleep(600)
    return os.getpid()


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell ignores it
from looplab.executors import LocalPool
from test_executors import note, sleep_long

if __name__ == "__mp_main__":  # as a worker loads it
    note(sys.argv[1], f"loading-{os.getpid()}")
    time.sleep(2)

if __name__ == "__main__":
    with LocalPool(2) as pool:
        for outcome in pool.run(sleep_long, range(4), shared=sys.argv[1]):
            print(outcome)
"""


@pytest.mark.parametrize(
    ("how", "when"),
    [(signal.SIGINT, "loading"), (signal.SIGINT, "running"), (signal.SIGKILL, "running")],
    ids=["ctrl-c early", "ctrl-c", "kill"],
)
def test_no_worker_outlives_its_caller(how, when, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "started"
    script.write_text(SCRIPT)
    folder.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    caller = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(pids(folder, f"{when}-*")) == 2, "two workers")
        below = psutil.Process(caller.pid).children(recursive=True)
        assert {process.pid for process in below} > pids(folder, f"{when}-*")
        if how == signal.SIGINT:
            os.killpg(caller.pid, how)  # as the terminal does: the workers get it too
        else:
            caller.kill()
        said = caller.communicate(timeout=PATIENCE)[1]
    finally:
        caller.kill()
    assert psutil.wait_procs(below, timeout=PATIENCE)[1] == []
    if how == signal.SIGINT:
        assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt"), said


def test_names_of_executors():
    assert [type(executor("local", workers=n)) for n in (None, 1, 2)] == [Serial, Serial, LocalPool]
    assert executor("local", workers=3, threads=4).threads == 4 and executor("local", threads=4).threads == 4
    ray = executor("ray", workers=5, threads=2, address="host:1")
    assert (type(ray), ray.workers, ray.threads, ray.address) == (RayPool, 5, 2, "host:1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: executor("rai"), "executor must be 'local' or 'ray'. Got 'rai'. Did you mean 'ray'?"),
        (lambda: executor("local", address="a:1"), "executor: address must be None for 'local'. Got 'a:1'."),
        (lambda: LocalPool(0), "executor: workers must be 1 or more. Got 0."),
        (lambda: RayPool(cpus_per_worker=0), "executor: cpus_per_worker must be 1 or more. Got 0."),
        (lambda: Serial(threads=0), "executor: threads must be 1 or more. Got 0."),
        (lambda: LocalPool(1, retries=-1), "executor: retries must be 0 or more. Got -1."),
    ],
)
def test_bad_arguments_get_a_sentence(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong()


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Install it: pip install 'looplab\[cluster\]'"), RayPool():
        pass


def test_importing_the_module_loads_neither_ray_nor_torch():
    check = "import sys, looplab.executors; assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


# On Ray: a real cluster of two nodes, one CPU each.


@pytest.fixture(scope="module")
def cluster():
    from ray_cluster import two_nodes  # workers import this module, and their path lacks the tests

    with two_nodes() as started:
        yield started


@pytest.mark.slow
def test_a_ray_cluster_gives_the_results_of_one_process(cluster, tmp_path):
    """On both nodes, with `shared` sent once to each worker, threads pinned and exceptions kept."""
    both, read, raised = [tmp_path / name for name in ("both", "read", "raised")]
    for folder in (both, read, raised):
        folder.mkdir()
    with RayPool(threads=2, address=cluster.address) as pool:
        assert len({node for _, node in pool.run(where_it_ran, [0, 1], shared=str(both))}) == 2
        outcomes = list(pool.run(everything_at_once, range(12), shared=CountedWhenRead(str(read))))
        with pytest.raises(Coded, match="task 5 is wrong") as caught:
            list(pool.run(raise_coded, [5], shared=str(raised)))
        assert list(pool.run(lambda shared, task: shared + task, [1], shared=1)) == [(0, 2)], "a function of a notebook"
    assert "in raise_coded" in str(caught.value.__cause__) and attempts(raised) == {"5": 1}
    with Serial() as serial:
        assert sorted((i, v[0]) for i, v in outcomes) == list(serial.run(power, range(12), shared=3))
    workers = {value[1] for _, value in outcomes}
    reads = {name: count for name, count in attempts(read).items() if name.startswith("read")}
    assert reads == {f"read-{worker}": 1 for worker in workers} and len(workers) == 2
    assert {value[2] for _, value in outcomes} == {"2"}


@pytest.mark.slow
def test_a_ray_worker_that_dies_costs_one_attempt_of_its_task(cluster, tmp_path):
    with RayPool(address=cluster.address) as pool:
        outcomes = list(pool.run(kill_own_worker_once, range(6), shared=str(tmp_path)))
        assert sorted(outcomes) == [(task, task * 10) for task in range(6)]
        assert attempts(tmp_path) == {str(task): 2 if task == 2 else 1 for task in range(6)}
        with pytest.raises(WorkerDied, match=r"task 0 \(shard 7\) lost 3 workers \(last: WorkerCrashedError"):
            list(pool.run(kill_own_worker, [7], shared=str(tmp_path), describe=lambda task: f"shard {task}"))
    assert attempts(tmp_path)["7"] == 3


@pytest.mark.slow
def test_a_lost_ray_node_loses_no_result(cluster, tmp_path):
    lost = next(iter(cluster.worker_nodes))
    outcomes = []
    with RayPool(address=cluster.address) as pool:
        for outcome in pool.run(where_it_ran, range(6), shared=str(tmp_path)):
            outcomes.append(outcome)
            if len(outcomes) == 2:
                appear(tmp_path / "2")
                appear(tmp_path / "3")  # one task under way on each node
                cluster.remove_node(lost, allow_graceful=False)
                wait_until(lambda: sum(map(psutil.pid_exists, pids(tmp_path, "[23]-*"))) == 1, "one worker to end")
                note(tmp_path, "go")
    cluster.add_node(**cluster.small)
    assert sorted(index for index, _ in outcomes) == list(range(6))
    assert len({node for _, node in outcomes[:2]}) == 2 and len({node for _, node in outcomes[2:]}) == 1
    tries = attempts(tmp_path)
    assert sorted(tries[str(task)] for task in range(6)) == [1, 1, 1, 1, 1, 2]


@pytest.mark.slow
def test_a_cluster_of_one_machine_is_started_for_this_machine_only_and_stopped(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 32)
    import ray

    with RayPool(workers=2) as pool:
        assert sorted(pool.run(power, range(4), shared=2)) == [(0, 1), (1, 2), (2, 4), (3, 8)]
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [socket for process in processes for socket in process.net_connections("inet")]
        assert {s.laddr.ip.removeprefix("::ffff:") for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        with RayPool(cpus_per_worker=2) as inner:  # uses the connection that is there, and leaves it
            assert list(inner.run(power, [3], shared=2)) == [(0, 8)]
        with pytest.raises(ValueError, match="Got 3, and the largest has 2"), RayPool(cpus_per_worker=3):
            pass
        assert ray.is_initialized()
    assert not ray.is_initialized()
