"""Every run once, whatever dies: skipped, resumed, waited for, retried, failed; and the table stays the same."""

import dataclasses
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager

import psutil
import pytest

from looplab import executors
from looplab._config import config_hash
from looplab.executors import LocalPool, RayPool, Serial
from looplab.training import trainer
from looplab.training.folder import claimed, locked
from looplab.training.sweep import claim as claims
from looplab.training.sweep import run as sweeps
from looplab.training.sweep.claim import claim_path, look, take
from looplab.training.sweep.points import Axis, configurations, grid_points
from looplab.training.sweep.run import Watcher, last_lines, log_path, run_all, sweep_pool, workers_for
from looplab.training.sweep.table import sweep_table
from looplab.training.trainer import train
from training.tiny_run import broken_off, core, tiny_run

PATIENCE = 60
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture
def configs(tmp_path):
    """Four runs of well below a second."""
    base = tiny_run(tmp_path, model=core(), steps=4, log_every=1)
    return configurations(base, grid_points([Axis.parse("seed=0..1"), Axis.parse("optimizer.lr=1e-3,1e-2")]))


@pytest.fixture
def forked(monkeypatch):
    """Local workers are forks of this process, which spares them their imports."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(executors.multiprocessing, "get_context", lambda kind: fork)


class Told(Watcher):
    """Keeps what it was told."""

    def __init__(self):
        self.ends, self.deaths, self.waits, self.seen = [], [], [], []

    def ended(self, index, run, *, earlier):
        self.ends.append((index, run.status, earlier))

    def advanced(self, index, seen):
        self.seen.append((index, seen))

    def died(self, index, how, *, again):
        self.deaths.append((index, how, again))

    def waiting(self, index, holder):
        self.waits.append((index, holder))


def in_process(configs, runs, watcher=None, **options):
    with Serial() as pool:
        return run_all(configs, runs, pool, watcher=watcher, **options)


def numbers(runs):
    """The table without what a clock says."""
    columns = sweep_table(runs).columns()
    return {name: values for name, values in columns.items() if name != "seconds"}


def attempts(runs, config):
    """How often somebody began or went on with a run."""
    log = log_path(runs / config_hash(config))
    return log.read_text().count(" process ") if log.exists() else 0


def step_of(runs, config):
    seen = look(claim_path(runs / config_hash(config)))
    return seen.facts.get("step", 0) if seen else 0


def wait_until(true, what):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.01)


@contextmanager
def in_thread(function):
    """The function runs beside the test; its result is in the list at the end."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    yield found
    thread.join(PATIENCE)
    assert not thread.is_alive()


def slowed(monkeypatch, seconds):
    """Every step takes so long."""
    inner = trainer.Trainer._train_step

    def slow(self):
        time.sleep(seconds)
        return inner(self)

    monkeypatch.setattr(trainer.Trainer, "_train_step", slow)


def test_every_run_ends_in_the_order_asked_for(configs, tmp_path):
    told = Told()
    runs = in_process(configs, tmp_path / "runs", told)
    assert [run.config for run in runs] == configs
    assert [run.folder for run in runs] == [tmp_path / "runs" / config_hash(config) for config in configs]
    assert [run.record.seed for run in runs] == [0, 0, 1, 1]
    assert told.ends == [(index, "finished", False) for index in range(4)]
    left = {path.name for path in (tmp_path / "runs").iterdir()}
    assert left == {name for c in configs for name in (config_hash(c), f"{config_hash(c)}.log")}, "no claim stays"


def test_a_run_is_the_run_that_training_alone_makes(configs, tmp_path):
    """The layout of studies: whoever comes second finds the run finished."""
    runs = in_process(configs[:1], tmp_path / "runs")
    log = log_path(runs[0].folder).read_text()
    assert train(configs[0], tmp_path / "runs" / config_hash(configs[0])) == runs[0].record
    alone = train(configs[0], tmp_path / "alone")
    assert dataclasses.replace(alone, run_id=runs[0].record.run_id, seconds=0.0) == dataclasses.replace(
        runs[0].record, seconds=0.0
    )
    assert log.count("step 4/4") == 1 and "held-out loss" in log


def test_finished_runs_are_read_and_broken_off_ones_go_on(configs, tmp_path):
    runs = tmp_path / "runs"
    train(configs[0], runs / config_hash(configs[0]))
    broken_off(configs[1], runs / config_hash(configs[1]), steps=2)
    told = Told()
    found = in_process(configs, runs, told)
    assert told.ends[0] == (0, "finished", True) and [e[2] for e in told.ends[1:]] == [False] * 3
    assert attempts(runs, configs[0]) == 0
    assert "Resuming" in log_path(runs / config_hash(configs[1])).read_text()
    assert numbers(found) == numbers(in_process(configs, tmp_path / "undisturbed"))
    before = [attempts(runs, config) for config in configs]
    assert in_process(configs, runs) == found
    assert [attempts(runs, config) for config in configs] == before, "nothing ran again"


def test_diverged_and_broken_runs_are_marked_and_the_others_go_on(configs, tmp_path):
    wild = dataclasses.replace(
        configs[0],
        optimizer=dataclasses.replace(configs[0].optimizer, lr=1e30),
        schedule=dataclasses.replace(configs[0].schedule, warmup_steps=0),
        clip_norm=None,
        steps=6,
    )
    lost = dataclasses.replace(configs[1], data=dataclasses.replace(configs[1].data, sources=("gone.txt",)))
    runs = in_process([wild, lost, configs[2]], tmp_path / "runs")
    assert [run.status for run in runs] == ["diverged", "failed", "finished"]
    assert runs[0].message.startswith("step ") and "(3 of 3)" in runs[0].message
    assert runs[1].message.startswith("DataError: ") and "gone.txt: no such file" in runs[1].message
    assert "Traceback" in log_path(runs[1].folder).read_text()
    table = sweep_table(runs).columns()
    assert table["status"] == ["diverged", "failed", "finished"] and table["loss"][:2] == [None, None]


def test_paths_of_data_begin_where_the_sweep_began(configs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = dataclasses.replace(configs[0].data, sources=("text.jsonl",))
    config = dataclasses.replace(configs[0], data=near)
    job = sweeps._Job(tmp_path / "runs", tmp_path, "ours", "cpu", 120.0)
    monkeypatch.chdir("/")
    assert sweeps._work(job, sweeps._Task(config, None)).status == "finished"
    assert os.getcwd() == "/"


def test_progress_is_told_while_a_run_is_under_way(configs, tmp_path, monkeypatch):
    slowed(monkeypatch, 0.15)
    told = Told()
    in_process(configs[:1], tmp_path / "runs", told, heartbeat=0.4)
    steps = [seen.facts["step"] for _, seen in told.seen if "step" in seen.facts]
    assert steps and steps == sorted(steps) and all(seen.facts["pid"] == os.getpid() for _, seen in told.seen)


def test_two_sweeps_share_the_work_and_nothing_runs_twice(configs, tmp_path):
    runs, children = tmp_path / "runs", []
    for first in (configs, configs[::-1]):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                found = in_process(first, runs)
                status = 0 if all(run.status == "finished" for run in found) else 2
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert [attempts(runs, config) for config in configs] == [1, 1, 1, 1]
    workers = {
        line.split()[2] for c in configs for line in log_path(runs / config_hash(c)).read_text().splitlines()[:1]
    }
    assert workers == {str(child) for child in children}
    assert numbers(in_process(configs, runs)) == numbers(in_process(configs, tmp_path / "alone"))


def test_a_run_of_another_sweep_is_waited_for(configs, tmp_path):
    runs = tmp_path / "runs"
    theirs = take(claim_path(runs / config_hash(configs[0])), "theirs")
    told = Told()
    with in_thread(lambda: in_process(configs[:2], runs, told)) as found:
        wait_until(lambda: (1, "finished", False) in told.ends, "the free run")
        train(configs[0], runs / config_hash(configs[0]))
        theirs.release()
    assert [run.status for run in found[0]] == ["finished"] * 2
    assert attempts(runs, configs[0]) == 0 and (0, "finished", True) in told.ends
    assert told.waits[0][0] == 0 and told.waits[0][1].startswith(f"process {os.getpid()} on ")


def test_a_run_that_a_study_has_locked_is_waited_for(configs, tmp_path):
    run = tmp_path / "runs" / config_hash(configs[0])
    told = Told()
    with locked(run), in_thread(lambda: in_process(configs[:1], tmp_path / "runs", told)) as found:
        wait_until(lambda: told.waits, "the sweep to leave the run alone")
        with claimed(run, configs[0]):
            trainer.Trainer(configs[0], run).run()
    assert found[0][0].status == "finished" and attempts(tmp_path / "runs", configs[0]) == 0


def test_a_silent_claim_of_another_machine_is_taken_over_and_a_beating_one_is_not(configs, tmp_path, monkeypatch):
    path = claim_path(tmp_path / "runs" / config_hash(configs[0]))
    with pytest.MonkeyPatch.context() as far:
        far.setattr(claims.socket, "gethostname", lambda: "far")
        theirs = take(path, "theirs")
    with in_thread(lambda: in_process(configs[:1], tmp_path / "runs", heartbeat=3.0)) as found:
        for beat in range(10):
            theirs.beat(step=beat)
            time.sleep(0.1)
        assert theirs.held and not found
    assert found[0][0].status == "finished" and not theirs.held


# Workers die.


def kill_once(monkeypatch, folder, number, at):
    """The first `number` workers that reach a step `at` get what they deserve; forks inherit the trap."""
    inner = trainer.Trainer._train_step

    def trapped(self):
        record = inner(self)
        if record["step"] == at[0]:
            for place in range(number):
                try:
                    os.close(os.open(folder / f"death-{place}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), at[1])
                break
        return record

    monkeypatch.setattr(trainer.Trainer, "_train_step", trapped)


def test_killed_and_frozen_workers_change_no_number(configs, tmp_path, monkeypatch, forked):
    """Two are killed in the middle of a run, one is frozen: its heart stops, and it is ended and tried again."""
    undisturbed = numbers(in_process(configs, tmp_path / "undisturbed"))
    for name, number, how, heartbeat in (("killed", 2, signal.SIGKILL, 120.0), ("frozen", 1, signal.SIGSTOP, 3.0)):
        (tmp_path / name).mkdir()
        told, runs = Told(), tmp_path / name / "runs"
        with monkeypatch.context() as patch:
            kill_once(patch, tmp_path / name, number, (3, how))
            with LocalPool(2, retries=9) as pool:  # a busy machine may stop a heart too
                found = run_all(configs, runs, pool, heartbeat=heartbeat, watcher=told)
        assert numbers(found) == undisturbed
        lost = Counter(index for index, *_ in told.deaths)
        assert lost.total() >= number and all(again for *_, again in told.deaths)
        if how == signal.SIGKILL:
            assert [attempts(runs, config) for config in configs] == [1 + lost[index] for index in range(4)]
        assert "Resuming" in "".join(log_path(run.folder).read_text() for run in found)
        assert not list(runs.glob("*.claim"))


def test_a_run_whose_workers_keep_dying_fails_with_the_formulas_number_and_its_last_words(
    configs, tmp_path, monkeypatch, forked
):
    doomed = config_hash(configs[1])
    inner = trainer.Trainer._train_step

    def trapped(self):
        record = inner(self)
        if self.folder.name == doomed and record["step"] == 2:
            self.display.step(record, steps=4, tokens_per_second=1.0, seconds_left=0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    monkeypatch.setattr(trainer.Trainer, "_train_step", trapped)
    told = Told()
    with LocalPool(1, retries=1) as pool:
        runs = run_all(configs[:3], tmp_path / "runs", pool, watcher=told)
    assert [run.status for run in runs] == ["finished", "failed", "finished"]
    assert [(index, again) for index, _, again in told.deaths] == [(1, True), (1, False)]
    first, head, *last = runs[1].message.splitlines()
    assert first.startswith(
        "its worker died 2 times (last: killed by SIGKILL, often because memory ran out). One step by the formula: mem"
    )
    assert "at most: T 4, 4 rows of 12 tokens" in first and first.endswith("or a machine with more memory.")
    assert head == f"Last lines of {log_path(runs[1].folder)}:"
    assert last[-1].startswith("  step 2/4  loss 5.") and len(last) <= sweeps.LAST_LINES


def test_a_worker_that_cannot_allocate_gives_its_place_to_a_new_one(configs, tmp_path, monkeypatch, forked):
    def starved(self):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(trainer.Trainer, "_train_step", starved)
    with LocalPool(1, retries=1) as pool:
        (run,) = run_all(configs[:1], tmp_path / "runs", pool)
    assert run.status == "failed" and run.message.startswith("its worker died 2 times (last: ended with code 12;")
    assert "One step by the formula: memory " in run.message
    assert "out of memory: DefaultCPUAllocator: can't allocate memory" in run.message.splitlines()[-1]
    assert not sweeps._starved(RuntimeError("shapes differ")) and sweeps._starved(MemoryError())


def test_an_interrupt_leaves_no_worker_and_no_claim(configs, tmp_path, monkeypatch, forked):
    slowed(monkeypatch, 0.2)
    workers = set()

    class Interrupted(Watcher):
        def ended(self, index, run, *, earlier):
            workers.update(worker.pid for worker in multiprocessing.active_children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LocalPool(2) as pool:
        run_all(configs, tmp_path / "runs", pool, watcher=Interrupted())
    assert workers and not any(psutil.pid_exists(pid) for pid in workers)
    assert not list((tmp_path / "runs").glob("*.claim"))
    assert len([c for c in configs if (tmp_path / "runs" / config_hash(c) / "record.json").exists()]) < 4


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_workers_killed_at_random_change_no_number(configs, tmp_path, seed):
    """Real workers, fresh processes; whoever is found at work is killed at random moments, twelve times over."""
    undisturbed = numbers(in_process(configs, tmp_path / "undisturbed"))
    chance, over, deaths = random.Random(seed), threading.Event(), []
    runs = tmp_path / "runs"

    def kill():
        while not over.wait(chance.uniform(0.05, 0.5)) and len(deaths) < 12:
            held = [seen for path in runs.glob("*.claim") if (seen := look(path)) and seen.facts]
            if held:
                victim = chance.choice(held).facts["pid"]
                if psutil.pid_exists(victim) and victim != os.getpid():
                    os.kill(victim, chance.choice([signal.SIGKILL, signal.SIGTERM]))
                    deaths.append(victim)

    with in_thread(kill), LocalPool(2, retries=12) as pool:
        found = run_all(configs, runs, pool, heartbeat=20.0)
        over.set()
    assert len(deaths) >= 3
    assert numbers(found) == undisturbed


# Arguments.


def test_workers_are_those_that_the_cores_hold():
    assert [workers_for(None, threads, 8) for threads in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert workers_for(3, 2, 8) == 3
    message = r"--workers must be from 1 to 4, so that workers x threads <= cores \(8\). Got 5 workers of 2 threads."
    with pytest.raises(ValueError, match=message):
        workers_for(5, 2, 8)
    with pytest.raises(ValueError, match=r"--workers must be from 1 to 8, .*Got 0. Use auto."):
        workers_for(0, 1, 8)


def test_every_worker_has_the_threads_of_the_widest_run(configs, monkeypatch):
    monkeypatch.setattr(sweeps, "cores", lambda: 8)
    wide = [*configs, dataclasses.replace(configs[0], threads=2)]
    local = sweep_pool("local", wide, max_retries=5)
    assert (type(local), local.workers, local.threads, local.retries) == (LocalPool, 4, 2, 5)
    assert sweep_pool("local", configs[:3]).workers == 3, "no worker without a run"
    ray = sweep_pool("ray", wide, workers=7, address="host:1")
    assert (type(ray), ray.workers, ray.threads, ray.cpus_per_worker, ray.address) == (RayPool, 7, 2, 2, "host:1")


def test_threads_that_are_chosen_when_the_run_begins_are_refused(configs, monkeypatch):
    later = dataclasses.replace(configs[0])
    object.__setattr__(later, "threads", "auto")
    with pytest.raises(ValueError, match=r"RunConfig.threads must be a number in a sweep, .* Got 'auto'. Use"):
        sweep_pool("local", [configs[1], later])


def test_equal_configurations_and_no_heartbeat_are_refused(configs, tmp_path):
    with pytest.raises(ValueError, match="configurations must differ. Got equal ones. Remove the doubles."):
        in_process([configs[0], configs[0]], tmp_path)
    with pytest.raises(ValueError, match="heartbeat must be positive seconds. Got 0. 120 is usual."):
        in_process(configs, tmp_path, heartbeat=0.0)


def test_the_last_lines_of_a_log(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"{i}\n" for i in range(9)))
    assert last_lines(tmp_path / "a.log", 2) == ["7", "8"] and last_lines(tmp_path / "b.log") == []
