import pytest
import torch

from looplab.models.base import build
from looplab.models.dense import DenseConfig
from looplab.models.looped import Looped
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from looplab.recurrence.signal import StepEmbedding
from looplab.recurrence.spec import ClampLast
from looplab.training.evaluation import DepthError, HeldOut, choose_depths, evaluation_noise
from looplab.training.trainer import Trainer
from tolerances import CHUNKED
from training.test_step import loader
from training.tiny_run import core, shape, tiny_run, two_blocks


def dense():
    return DenseConfig(layers=3, **{k: v for k, v in shape().items() if k != "envelope"})


@pytest.mark.parametrize(
    ("config", "depths"),
    [
        (core(), (1, 2, 3, 6, 12)),
        (two_blocks(), (1, 2, 4)),
        (dense(), (3,)),
    ],
    ids=["core", "two_blocks", "dense"],
)
def test_the_default_depths_are_those_the_model_has(config, depths):
    found, plan = choose_depths(build(config).spec, None)
    assert found == depths
    assert len(plan) == depths[-1]


def test_the_full_plan_is_always_scored():
    found, plan = choose_depths(build(core()).spec, (5, 1))
    assert found == (1, 3, 5)
    assert len(plan) == 5
    found, plan = choose_depths(build(two_blocks()).spec, (1,))
    assert (found, str(plan)) == ((1, 4), "[0.0 0.1 1.0 1.1]")


def test_a_depth_beyond_the_model_is_refused():
    with pytest.raises(DepthError, match="Evaluation.depths must be at most 4 for this model. Got 5"):
        choose_depths(build(two_blocks()).spec, (5,))


def indexed_core(**changes):
    return core(signal=StepEmbedding(max=4), **changes)


def test_own_parameters_per_iteration_bound_the_depths():
    assert choose_depths(build(indexed_core()).spec, None)[0] == (1, 2, 3)
    assert choose_depths(build(indexed_core(beyond=ClampLast())).spec, None)[0] == (1, 2, 3, 6, 12)
    assert choose_depths(build(indexed_core()).spec, (4,))[0] == (3, 4)


@pytest.mark.parametrize("config", [core(), two_blocks(), dense()], ids=["core", "two_blocks", "dense"])
def test_one_rollout_gives_the_losses_of_separate_runs(config):
    model = build(config, dtype=torch.float64)
    depths, plan = choose_depths(model.spec, None)
    held_out = HeldOut(loader=loader(), num_batches=2, depths=depths, plan=plan)
    ledger = Ledger()
    losses = held_out.losses(model, ledger=ledger)
    assert ledger.row_applications == 2 * 4 * len(plan)
    assert ledger.flops_backward == 0
    for depth in depths:
        total, count = 0.0, 0
        for index in range(2):
            batch = loader().batch(index)
            noise = evaluation_noise(model.spec, batch, index)
            noise = None if noise is None else noise.double()
            logits = forward(model, batch.tokens, plan=plan[:depth], noise=noise).logits.detach()
            total += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
            )
            count += batch.labels.numel()
        assert losses[depth] == pytest.approx(total / count, rel=CHUNKED["rtol"])


def test_noise_is_the_same_in_every_run_and_differs_by_batch(tmp_path):
    batch = loader().batch(0)
    spec = build(core()).spec
    assert torch.equal(evaluation_noise(spec, batch, 0), evaluation_noise(spec, loader().batch(0), 0))
    assert not torch.equal(evaluation_noise(spec, batch, 0), evaluation_noise(spec, batch, 1))
    trainers = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        trainers.append(Trainer(tiny_run(tmp_path, seed=seed, model=core()), folder))
        trainers[-1].metrics.close()
    one, two = (t.held_out.loader.batch(0).tokens for t in trainers)
    assert torch.equal(one, two)
    assert not torch.equal(*(t.loader.batch(0).tokens for t in trainers))
    assert isinstance(trainers[0].step.model, Looped)
