"""Several processes train the same run as one: losses, weights, counts, and after a kill."""

import dataclasses
import json
import os
import signal
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from looplab.data.packing import Packing
from looplab.models.base import build
from looplab.models.folder import load_folder
from looplab.models.looped import Envelope
from looplab.nn.embedding import Head
from looplab.objectives import NextToken
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.jacobian_penalty import JacobianPenalty
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.gradient import CheckpointApplication, Implicit, TruncatedBPTT
from looplab.recurrence.plan import LayerLoop
from looplab.training import checkpoint as checkpoints
from looplab.training.checkpoint import newest_checkpoint
from looplab.training.display import Display
from looplab.training.distributed import Alone, Replicated, Sharded
from looplab.training.muon import Muon
from looplab.training.ranks import Ranks
from looplab.training.schedule import Constant
from looplab.training.spread import read_pieces
from looplab.training.step import Drawn, TrainingStep, depth_plan, draw_noise, scored_counts
from looplab.training.trainer import Trainer, train
from training.forked import forked
from training.tiny_run import core, metrics, tiny_run, two_blocks

SAME = {"rtol": 1e-4, "atol": 1e-5}
"""Weights: gradients are sums over rows in another order, and AdamW makes as much of a small one as of a large one."""
WINDOW = TruncatedBPTT(window=2)

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def layers():
    """Three stored layers that run twice each."""
    return core(order=LayerLoop(num_steps=2), blocks=(3,), trained_depth=FixedDepth(num_steps=2))


def runs(home):
    """Runs whose steps differ in what they leave out, gather and deal."""
    return {
        "fifty": tiny_run(home, model=core(), gradient=WINDOW, steps=50, save_every=50),
        "blocks": tiny_run(home, model=two_blocks(), steps=4),  # a short prefix leaves the second block out
        "cut": tiny_run(
            home,
            model=core(),
            gradient=CheckpointApplication(inner=WINDOW),
            micro_batches=2,
            depth_per="micro_batch",
            ema=0.9,
            steps=2,
        ),
        "rows": tiny_run(home, model=core(), gradient=WINDOW, depth_per="sequence", steps=2),
        "layers": tiny_run(
            home, model=layers(), objective=EveryIteration(chunk=7), optimizer=Muon(lr=0.02), gradient=WINDOW, steps=2
        ),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs on one process."""
    home = tmp_path_factory.mktemp("alone")
    for name, config in runs(home).items():
        train(config, home / name)
    return home


def without(line, *keys):
    return {key: value for key, value in line.items() if key not in keys}


def same_numbers(one, two):
    """Equal but for rounding; what is counted is equal."""
    assert one.keys() == two.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            same_numbers(value, two[key])
        elif isinstance(value, float):
            assert two[key] == pytest.approx(value, rel=1e-5), key
        else:
            assert two[key] == value, key


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(Replicated, marks=pytest.mark.nightly), Sharded])
def test_two_processes_have_the_numbers_of_one(alone, tmp_path, kind):
    def body(ranks):
        for name, config in runs(alone).items():
            train(config, tmp_path / name, parallel=kind(ranks=ranks))

    assert all(forked(body))
    for name, config in runs(alone).items():
        one, two = metrics(alone / name), metrics(tmp_path / name)
        assert len(one) == len(two) > config.steps
        for a, b in zip(one, two, strict=True):
            a, b = (without(line, "peak_bytes", "ledger") | without(line["ledger"], "launches") for line in (a, b))
            same_numbers(a, b)
        first, second = (load_folder(home / name / "model")[0].state_dict() for home in (alone, tmp_path))
        torch.testing.assert_close(first, second, **SAME)
        second = load_file(tmp_path / name / f"step_{config.steps}" / "model.safetensors")
        assert second.keys() == load_file(alone / name / f"step_{config.steps}" / "model.safetensors").keys()
    record = json.loads((tmp_path / "fifty" / "record.json").read_text())
    assert record["hardware"].endswith(f", {kind(ranks=Ranks(size=2)).name}")


class Collectives(TorchDispatchMode):
    """Counts what is sent."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


UNTIED = {"envelope": Envelope(prelude=1, coda=1), "head": Head(tied=False)}
COUNTED = [
    # Model, objective, window, depths; units, those of them that are gathered again going back.
    (core(), NextToken(), 2, (1, 2, 4, 7), ("root", "prelude", "loop"), ("prelude", "loop")),
    (
        core(**UNTIED),
        EveryIteration(),
        2,
        (3, 4),
        ("prelude", "loop", "coda", "head"),
        ("prelude", "loop"),
    ),
    (
        layers(),
        NextToken(),
        100,
        (1, 3),
        ("root", "prelude", "block 0", "block 1", "block 2"),
        ("prelude", "block 0", "block 1", "block 2"),
    ),
]


@pytest.mark.slow
def test_a_unit_is_gathered_once_forward_and_once_backward_at_any_depth(tmp_path):
    config = tiny_run(tmp_path)
    loader = config.data.load(seed=0, vocab_size=259)

    def counted(ranks, model, objective, window, depths):
        step = TrainingStep(build(model), objective, TruncatedBPTT(window=window))
        batch = loader.batch(0, rows=torch.arange(ranks.rank, 4, 2))
        spec, noise = step.model.spec, draw_noise(step.model.spec, 0, 0, batch)
        called = Sharded(ranks=ranks).place(step, lambda: (batch, noise))
        found = []
        for depth in depths:
            plan = depth_plan(spec, depth)
            counts = scored_counts(objective, [batch], [Drawn(depth, plan)])
            with Sharded(ranks=ranks).accumulating(called, last=True):
                with Collectives() as forward:
                    output = called(batch, plan, noise, counts)
                with Collectives() as backward:
                    output.share.backward()
            found.append((dict(forward.counts), dict(backward.counts)))
        return sorted(step.units), found

    def body(ranks):
        found = [counted(ranks, *case[:4]) for case in COUNTED]
        (tmp_path / str(ranks.rank)).write_text(json.dumps(found))

    assert all(forked(body))
    for rank in "01":
        for case, (units, found) in zip(COUNTED, json.loads((tmp_path / rank).read_text()), strict=True):
            expected, again = case[4:]
            assert units == sorted(set(expected) - {"root"})
            for forward, backward in found:
                assert forward == {"allgather_base": len(expected)}
                assert backward == {"allgather_base": len(again), "reduce_scatter_base": len(expected)}


def killed_at(name, call):
    """A body whose second process dies at the given call of a method or function."""
    owner = Trainer if hasattr(Trainer, name) else checkpoints

    def body(ranks, config, folder):
        inner, calls = getattr(owner, name), []

        def patched(*args, **kwargs):
            calls.append(1)
            if ranks.rank == 1 and len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        setattr(owner, name, patched)
        train(config, folder, parallel=Sharded(ranks=ranks))

    return body


def kept(folder):
    """Every tensor of a checkpoint, whole."""
    files = {name: load_file(folder / f"{name}.safetensors") for name in ("model", "ema")}
    files["optimizer"] = read_pieces(folder / "optimizer", lambda name: torch.empty(0))
    return {(file, name): tensor for file, tensors in files.items() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "call", "left"),
    [
        pytest.param("_train_step", 4, 2, marks=pytest.mark.slow),
        pytest.param("save_pieces", 3, 4, marks=pytest.mark.nightly),  # inside of a save
    ],
)
def test_a_sharded_run_goes_on_after_a_kill_to_the_same_bits(tmp_path, name, call, left):
    config = tiny_run(tmp_path, model=core(), gradient=WINDOW, ema=0.9)
    straight, folder, die = tmp_path / "straight", tmp_path / "killed", killed_at(name, call)
    assert all(forked(lambda ranks: train(config, straight, parallel=Sharded(ranks=ranks))))
    assert forked(lambda ranks: die(ranks, config, folder)) == [False, False]
    assert newest_checkpoint(folder).progress.step == left
    assert all(forked(lambda ranks: train(config, folder, parallel=Sharded(ranks=ranks))))
    one, two = (kept(home / "step_6") for home in (straight, folder))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    lines = [[without(line, "peak_bytes") for line in metrics(home)] for home in (straight, folder)]
    assert lines[0] == lines[1]
    assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_any_number_of_processes_goes_on_from_what_any_number_wrote(tmp_path):
    begun = tiny_run(tmp_path, model=core(), gradient=WINDOW, schedule=Constant(), steps=2, ema=0.9)
    config = dataclasses.replace(begun, steps=4)
    train(config, tmp_path / "one")
    train(begun, tmp_path / "from one")

    def body(ranks):
        train(begun, tmp_path / "from two", parallel=Sharded(ranks=ranks))
        train(config, tmp_path / "from one", parallel=Sharded(ranks=ranks))

    assert all(forked(body))
    assert (tmp_path / "from two" / "step_2" / "optimizer").is_dir()
    train(config, tmp_path / "from two")
    assert (tmp_path / "from two" / "step_4" / "optimizer.safetensors").is_file()
    for name in ("model.safetensors", "ema.safetensors"):
        one = load_file(tmp_path / "one" / "step_4" / name)
        for folder in ("from one", "from two"):
            torch.testing.assert_close(load_file(tmp_path / folder / "step_4" / name), one, **SAME)


class Heard(Display):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.mark.slow
def test_a_fault_in_the_rows_of_one_process_is_named_by_all(tmp_path):
    config = tiny_run(tmp_path, model=core(trained_depth=FixedDepth(num_steps=3)), steps=3)

    def body(ranks):
        heard = Heard()
        trainer = Trainer(config, tmp_path, parallel=Sharded(ranks=ranks), display=heard)
        inner = trainer.step.model.core[0]
        inner.register_forward_hook(
            lambda module, inputs, output: (
                output * float("nan") if ranks.rank and trainer.progress.step == 1 else output
            )
        )
        rerun = trainer._report_skip
        trainer._report_skip = lambda *args: (setattr(trainer.progress, "step", 1), rerun(*args))[1]
        trainer._train_step()
        trainer._train_step()
        (tmp_path / f"said {ranks.rank}").write_text(json.dumps(heard.lines))

    assert all(forked(body))
    said = json.loads((tmp_path / "said 0").read_text())
    assert "loss is nan. First non-finite tensor: core.0 at iteration 1 of 3. Step skipped" in said[0]
    assert json.loads((tmp_path / "said 1").read_text()) == []


def test_what_is_no_longer_the_same_run_is_refused(tmp_path):
    both = [
        (
            {"data": dataclasses.replace(tiny_run(tmp_path).data, packing=Packing(seq_len=12, rows=3))},
            "multiple of processes",
        ),
        ({"state_norms": True}, "state_norms must be False on 2 processes"),
    ]
    sharded = [
        (
            {"model": core(), "objective": JacobianPenalty()},
            "no gradient inside of its forward pass .* JacobianPenalty",
        ),
        ({"model": core(), "objective": EveryIteration(detach_readout=True)}, "Got EveryIteration"),
        ({"model": core(), "gradient": Implicit()}, "cuts the graph only to be sharded. Got Implicit"),
        ({"compile": True}, "compile must be False or 'auto'"),
    ]
    for kinds, cases in (((Replicated, Sharded), both), ((Sharded,), sharded)):
        for changes, message in cases:
            config = tiny_run(tmp_path, **changes)
            Alone().check(config)
            for kind in kinds:
                with pytest.raises(ValueError, match=message):
                    kind(ranks=Ranks(size=2)).check(config)
    Replicated(ranks=Ranks(size=2)).check(tiny_run(tmp_path, **sharded[0][0]))
