"""A run is a function of its configuration: not of interruptions, evaluations, micro-batches or chunks."""

import dataclasses
import json
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from looplab._config import to_dict
from looplab.models.base import build
from looplab.models.folder import load_folder, save_folder
from looplab.objectives import NextToken
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.exit_gate import ExitGate
from looplab.recurrence.depth import Curriculum, FixedDepth, UniformDepth
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, TruncatedBPTT
from looplab.recurrence.halting import HazardGate
from looplab.training import checkpoint as checkpoints
from looplab.training import trainer as trainers
from looplab.training.compiled import CompiledParts
from looplab.training.config import Evaluation, RunConfig
from looplab.training.display import Display
from looplab.training.divergence import DivergedError
from looplab.training.muon import Muon
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Constant
from looplab.training.trainer import Trainer, train
from tolerances import EXACT, SPLIT
from training.tiny_run import broken_off, core, metrics, tiny_run, two_blocks

FILES = ("model.safetensors", "optimizer.safetensors")


def same_run(one, two, step=6):
    """Weights, optimizer and metrics (times aside) are equal to the bit."""
    for name in FILES:
        first, second = (load_file(folder / f"step_{step}" / name) for folder in (one, two))
        assert first.keys() == second.keys()
        for key in first:
            assert torch.equal(first[key], second[key]), key
    assert metrics(one) == metrics(two)


class Said(Display):
    """Keeps what was said."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def test_the_loss_falls(tmp_path):
    train(tiny_run(tmp_path, steps=20, save_every=20, optimizer=AdamW(lr=3e-2)), tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(5.56, abs=0.1)  # log 259
    assert sum(losses[-4:]) / 4 < losses[0] - 1.0


def test_a_line_says_everything_of_its_step(tmp_path):
    config = tiny_run(tmp_path, model=core(), gradient=TruncatedBPTT(window=2))
    train(config, tmp_path / "run")
    lines = metrics(tmp_path / "run", "train")
    for index, line in enumerate(lines):
        assert line["step"] == index + 1
        assert line["n0"] + line["g"] == line["T"]
        assert line["g"] == min(2, line["T"])
        assert line["ledger"]["row_applications"] == 4 * line["T"]
        assert line["tokens"] == 48 * (index + 1)
        assert line["lr"] == config.optimizer.lr * config.schedule.factor(index, 6)
        assert line["loss"] == line["parts"]["ce"]
        assert min(line["grad_norm"], line["rms_first"], line["rms_last"]) > 0
        assert line["skipped"] is False
    assert len({line["T"] for line in lines}) > 1
    assert [line["step"] for line in metrics(tmp_path / "run", "eval")] == [3, 6]


def test_the_same_configuration_gives_the_same_bits(tmp_path):
    config = tiny_run(tmp_path, model=core())
    for name in "ab":
        train(config, tmp_path / name)
    same_run(tmp_path / "a", tmp_path / "b")


def test_another_seed_gives_another_run(tmp_path):
    for seed in (0, 1):
        train(tiny_run(tmp_path, seed=seed), tmp_path / str(seed))
    assert metrics(tmp_path / "0")[0]["loss"] != metrics(tmp_path / "1")[0]["loss"]


def test_evaluation_never_touches_training(tmp_path):
    often = tiny_run(tmp_path, model=core())
    rarely = dataclasses.replace(often, evaluation=dataclasses.replace(often.evaluation, every=100, depths=(1,)))
    train(often, tmp_path / "a")
    train(rarely, tmp_path / "b")
    first, second = (load_file(tmp_path / name / "step_6" / FILES[0]) for name in "ab")
    torch.testing.assert_close(first, second, **EXACT)
    assert metrics(tmp_path / "a", "train") == metrics(tmp_path / "b", "train")
    assert len(metrics(tmp_path / "a", "eval")) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batches": 2},
        {"micro_batches": 4},
        {"objective": NextToken(chunk=7)},
        {"gradient": TruncatedBPTT(window=4)},
        {"gradient": CheckpointApplication(inner=FullBPTT())},
    ],
    ids=str,
)
def test_ways_to_save_memory_change_no_number_beyond_rounding(tmp_path, change):
    for name, changes in (("a", {}), ("b", change)):
        train(tiny_run(tmp_path, model=core(), steps=3, **changes), tmp_path / name)
    one, two = (metrics(tmp_path / name, "train") for name in "ab")
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "grad_norm", "rms_first", "rms_last"):
            assert b[key] == pytest.approx(a[key], rel=SPLIT["rtol"], abs=SPLIT["atol"])
        assert (b["T"], b["tokens"], b["ledger"]["row_applications"]) == (
            a["T"],
            a["tokens"],
            a["ledger"]["row_applications"],
        )


def test_a_long_gradient_is_cut_to_length_and_recorded_uncut(tmp_path):
    config = tiny_run(tmp_path, clip_norm=1e-3, schedule=Constant(), steps=1)
    trainer = Trainer(config, tmp_path)
    seen = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            {n: p.grad.clone() for n, p in trainer.step.model.named_parameters() if p.grad is not None}
        )
    )
    trainer.run()
    norm = torch.sqrt(sum(g.square().sum() for g in seen.values()))
    assert float(norm) == pytest.approx(1e-3, rel=1e-4)
    assert metrics(tmp_path, "train")[0]["grad_norm"] > 0.1


def test_a_short_gradient_is_left_as_it_is(tmp_path):
    for name, clip in (("a", None), ("b", 1e6)):
        train(tiny_run(tmp_path, clip_norm=clip), tmp_path / name)
    first, second = (load_file(tmp_path / name / "step_6" / FILES[0]) for name in "ab")
    torch.testing.assert_close(first, second, **EXACT)


def test_bfloat16_trains_with_wide_weights(tmp_path):
    train(tiny_run(tmp_path, precision="bf16"), tmp_path / "run")
    for name in FILES:
        assert {t.dtype for t in load_file(tmp_path / "run" / "step_6" / name).values()} == {torch.float32}
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(5.56, abs=0.1)


def test_threads_are_set(tmp_path):
    before = torch.get_num_threads()
    try:
        Trainer(tiny_run(tmp_path, threads=2), tmp_path).metrics.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_finished_run_is_not_run_again(tmp_path):
    config = tiny_run(tmp_path)
    record = train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train(config, tmp_path / "run") == record
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_more_steps_go_on_from_the_end(tmp_path):
    config = tiny_run(tmp_path, schedule=Constant(), steps=2)
    train(config, tmp_path / "a")
    said = Said()
    train(dataclasses.replace(config, steps=4), tmp_path / "a", display=said)
    train(dataclasses.replace(config, steps=4), tmp_path / "b")
    assert said.lines[0] == f"Resuming {tmp_path / 'a'} at step 2."
    first, second = (load_file(tmp_path / name / "step_4" / FILES[0]) for name in "ab")
    torch.testing.assert_close(first, second, **EXACT)
    assert metrics(tmp_path / "a", "train") == metrics(tmp_path / "b", "train")


def poisoned(tmp_path, steps):
    """A trainer whose second block gives NaN in the chosen steps."""
    said, current = Said(), []
    trainer = Trainer(
        tiny_run(tmp_path, model=two_blocks(trained_depth=FixedDepth(num_steps=2))), tmp_path, display=said
    )
    batch = trainer.loader.batch
    trainer.loader.batch = lambda index: current.append(index + 1) or batch(index)
    trainer.step.model.core[1].register_forward_hook(
        lambda module, inputs, output: output * float("nan") if current[-1] in steps else output
    )
    return trainer, said


def test_a_step_without_a_finite_loss_is_skipped_and_explained(tmp_path):
    trainer, said = poisoned(tmp_path, {3})
    updates = []
    trainer.optimizer.register_step_post_hook(lambda *_: updates.append(trainer.progress.step + 1))
    trainer.run()
    lines = metrics(tmp_path, "train")
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert lines[2]["loss"] == "nan"
    assert updates == [1, 2, 4, 5, 6]
    message = said.lines[0]
    assert message.startswith("step 3: loss is nan. First non-finite tensor: core.1 at iteration 3 of 4. Step skipped")
    assert message.endswith("(1 of 3).")


def test_three_in_a_row_end_the_run(tmp_path):
    trainer, said = poisoned(tmp_path, {3, 4, 5})
    with pytest.raises(DivergedError) as caught:
        trainer.run()
    assert str(caught.value).startswith("step 5: loss is nan. First non-finite tensor: core.1 at iteration 3 of 4.")
    assert "(3 of 3). Stopped. The batch starts at Position(epoch=0, " in str(caught.value)
    assert (tmp_path / "step_5_diverged" / "state.json").exists()
    assert [p.name for p in checkpoints.checkpoints(tmp_path)] == ["step_4", "step_2"]
    assert not (tmp_path / "record.json").exists()
    assert len(said.lines) == 4  # three skips, one evaluation


def test_a_sound_step_between_starts_the_count_again(tmp_path):
    trainer, _ = poisoned(tmp_path, {1, 2, 4, 5})
    trainer.run()
    assert trainer.progress.skips == 4


def test_an_infinite_gradient_is_skipped_too(tmp_path):
    said = Said()
    trainer = Trainer(tiny_run(tmp_path), tmp_path, display=said)
    trainer.step.model.final_norm.weight.register_hook(lambda g: g * float("inf") if trainer.progress.step == 1 else g)
    trainer.run()
    assert said.lines[0].startswith("step 2: gradient norm is ")
    assert "First non-finite tensor: gradient of final_norm.weight. Step skipped (1 of 3)." in said.lines[0]
    assert [line["skipped"] for line in metrics(tmp_path, "train")] == [False, True, False, False, False, False]


def in_child(config, folder, before=lambda: None):
    """Runs the training in a forked process and returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        before()
        train(config, folder)
        status = 0
    finally:
        os._exit(status)


def kill_at_call(module, name, call):
    """SIGKILL at the start of the given call of a function."""
    inner, calls = getattr(module, name), []

    def patched(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    setattr(module, name, patched)


def killed(child):
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nobody killed."""
    home = tmp_path_factory.mktemp("undisturbed")
    config = tiny_run(home, model=core(), keep=9)
    began = time.perf_counter()
    train(config, home / "run")
    return config, home / "run", time.perf_counter() - began


# Inside a save: before the tensors, between files, before the rename, before `latest`, while the old ones are deleted.
INSIDE = [
    ("save_model", 2),
    ("save_tensors", 2),
    ("_measure", 5),
    ("_flush", 8),
    ("write_atomic", 2),
    ("checkpoints", 4),
]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(("function", "call"), INSIDE, ids=[f for f, _ in INSIDE])
def test_a_run_killed_inside_a_save_ends_with_the_same_bits(undisturbed, tmp_path, function, call):
    config, straight, _ = undisturbed
    assert killed(in_child(config, tmp_path / "run", lambda: kill_at_call(checkpoints, function, call)))
    train(config, tmp_path / "run")
    same_run(straight, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.partial"))


def kill_at_random(undisturbed, folder, count, seed):
    """Kills a run `count` times at random moments, then lets it end."""
    config, straight, seconds = undisturbed
    chance = random.Random(seed)
    for _ in range(count):
        child = in_child(config, folder)
        time.sleep(chance.uniform(0.05, 0.9) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    train(config, folder)
    same_run(straight, folder)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_ends_with_the_same_bits(undisturbed, tmp_path, seed):
    kill_at_random(undisturbed, tmp_path / "run", 1, seed)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_twenty_times_over_ends_with_the_same_bits(undisturbed, tmp_path, seed):
    kill_at_random(undisturbed, tmp_path / "run", 3, 100 + seed)


def test_a_torn_last_line_is_cut_off(undisturbed, tmp_path):
    config, straight, _ = undisturbed
    child = in_child(config, tmp_path / "run", lambda: kill_at_call(checkpoints, "save_model", 3))
    assert killed(child)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"T": 3, "kind": "tr')
    train(config, tmp_path / "run")
    same_run(straight, tmp_path / "run")


def test_the_configuration_of_a_run_is_enough_to_repeat_it(undisturbed, tmp_path):
    config, straight, _ = undisturbed
    again = RunConfig.read(json.loads((straight / "run.json").read_text())["config"])
    assert to_dict(again) == to_dict(config)
    train(again, tmp_path / "run")
    same_run(straight, tmp_path / "run")


def test_the_deepest_evaluation_may_be_beyond_training(tmp_path):
    evaluation = Evaluation(sources=tiny_run(tmp_path).evaluation.sources, batches=1, depths=(1, 9))
    train(tiny_run(tmp_path, model=core(), evaluation=evaluation), tmp_path / "run")
    assert metrics(tmp_path / "run", "eval")[-1]["losses"].keys() == {"1", "3", "9"}


def test_a_frozen_model_keeps_its_weights_and_its_gate_learns(tmp_path):
    deep = UniformDepth(low=2, high=4)
    parent = build(core(trained_depth=deep), seed=3)
    save_folder(tmp_path / "parent", parent)
    config = tiny_run(
        tmp_path,
        model=core(halt=HazardGate(), trained_depth=deep),
        objective=ExitGate(),
        start=str(tmp_path / "parent"),
        train_only=("gate",),
        steps=3,
    )
    train(config, tmp_path / "run")
    model, _ = load_folder(tmp_path / "run" / "model")
    begun, ended = config.build_model().state_dict(), model.state_dict()
    moved = {name for name, tensor in ended.items() if not torch.equal(tensor, begun[name])}
    assert moved == {"gate.weight", "gate.bias"}
    assert all(torch.equal(ended[name], tensor) for name, tensor in parent.state_dict().items())


def test_muon_learns_and_resumes_with_the_same_bits(tmp_path):
    config = tiny_run(tmp_path, model=core(), optimizer=Muon(lr=0.05, others=AdamW(lr=3e-2)), schedule=Constant())
    train(config, tmp_path / "straight")
    broken_off(config, tmp_path / "resumed", steps=4)
    train(config, tmp_path / "resumed")
    for name in FILES:
        first, second = (load_file(tmp_path / run / "step_6" / name) for run in ("straight", "resumed"))
        torch.testing.assert_close(first, second, **EXACT)
    assert any(name.endswith("/momentum") for name in first)
    one, two = (metrics(tmp_path / run, "train") for run in ("straight", "resumed"))
    assert one == two
    assert one[-1]["loss"] < one[0]["loss"] - 0.3


def test_all_groups_of_an_optimizer_follow_the_schedule_at_their_own_rates(tmp_path):
    config = tiny_run(tmp_path, optimizer=Muon(lr=0.05, others=AdamW(lr=0.01)), steps=1)
    trainer = Trainer(config, tmp_path)
    trainer.run()
    factor = config.schedule.factor(0, 1)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([0.05 * factor, 0.01 * factor, 0.01 * factor], rel=1e-12)


def test_a_ramp_over_a_part_of_the_run_is_resolved_by_its_steps(tmp_path):
    for name, ramp in (("part", {"ramp_fraction": 0.5}), ("steps", {"ramp_steps": 3})):
        law = Curriculum(law=FixedDepth(num_steps=4), **ramp)
        train(tiny_run(tmp_path, model=core(trained_depth=law)), tmp_path / name)
    assert [line["T"] for line in metrics(tmp_path / "part", "train")] == [1, 2, 3, 4, 4, 4]
    assert metrics(tmp_path / "part", "train") == metrics(tmp_path / "steps", "train")


def test_a_state_that_grows_is_found_once_per_run(tmp_path, monkeypatch):
    monkeypatch.setattr("looplab.training.divergence.LARGEST_GROWTH", 0.0)
    config, said = tiny_run(tmp_path), Said()
    broken_off(config, tmp_path / "run", steps=2)
    train(config, tmp_path / "run", display=said)
    (found,) = metrics(tmp_path / "run", "finding")
    assert (found["finding"], found["where"]) == ("training.state_grows", {"step": 1})
    assert "EndNorm" in found["remedy"]
    assert not any("state grows" in line for line in said.lines)  # said before the run was broken off


def test_a_skip_under_a_loss_of_every_state_is_explained_too(tmp_path):
    said = Said()
    trainer = Trainer(tiny_run(tmp_path, steps=1, objective=EveryIteration()), tmp_path, display=said)
    trainer.step.model.core[0].register_forward_hook(lambda module, inputs, output: output * float("nan"))
    trainer.run()
    assert "step 1: loss is nan. First non-finite tensor: core.0 at iteration 1 of" in said.lines[0]


def test_a_compiled_run_looks_for_a_fault_in_the_models_own_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "CompiledParts", lambda model: CompiledParts(model, backend="eager"))
    monkeypatch.setattr(torch, "compile", lambda part, backend: part)
    said = Said()
    trainer = Trainer(tiny_run(tmp_path, steps=1, compile=True), tmp_path, display=said)
    own = type(trainer.step.model).step
    compiled = trainer.step.model.step
    assert compiled.__wrapped__.__func__ is own
    trainer.step.model.core[0].register_forward_hook(
        lambda module, inputs, output: output * (float("nan") if trainer.step.model.step is compiled else 1.0)
    )
    trainer.run()
    # The search saw the model's own step, which has no fault.
    assert "First non-finite tensor: gradient of embedding.weight" in said.lines[0]


@pytest.mark.parametrize("choice", [True, False])
def test_operations_whose_bits_vary_are_refused_on_request(tmp_path, choice, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a user's own choice stays
    try:
        Trainer(tiny_run(tmp_path, deterministic=choice), tmp_path).metrics.close()
        assert torch.are_deterministic_algorithms_enabled() is choice
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)
