"""Depths per step, per micro-batch and per row, and laws that move along a run."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from looplab.models.base import build
from looplab.objectives import NextToken
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.progressive import Progressive
from looplab.recurrence.depth import Curriculum, FixedDepth, LearnedCategorical, PoissonDepth, UniformDepth
from looplab.recurrence.gradient import FullBPTT, GrowingWindow, Implicit, TruncatedBPTT
from looplab.recurrence.loop import forward
from looplab.recurrence.philox import stream_key
from looplab.training.step import draw_depths, draw_noise, split
from looplab.training.trainer import Trainer, train
from tolerances import EXACT, SPLIT
from training.tiny_run import broken_off, core, metrics, tiny_run, two_blocks

LAW = UniformDepth(low=1, high=4)


def drawn(step, rows=4):
    return LAW.draw(stream_key(0, "depth"), step, np.arange(rows))


def test_every_row_has_its_own_draw_and_that_many_applications(tmp_path):
    config = tiny_run(tmp_path, model=core(), depth_per="sequence", gradient=TruncatedBPTT(window=2))
    record = train(config, tmp_path / "run")
    lines = metrics(tmp_path / "run", "train")
    for index, line in enumerate(lines):
        depths = drawn(index)
        assert line["T"] == depths.mean()
        assert line["g"] == np.minimum(depths, 2).mean()
        assert line["n0"] + line["g"] == line["T"]
        assert line["ledger"]["row_applications"] == depths.sum()
    assert record.num_steps == pytest.approx(np.mean([drawn(index).mean() for index in range(6)]))
    assert record.window == pytest.approx(np.mean([line["g"] for line in lines]))


def test_the_loss_of_rows_with_depths_of_their_own_is_that_of_each_alone(tmp_path):
    config = tiny_run(tmp_path, model=core(), depth_per="sequence", steps=1)
    train(config, tmp_path / "run")
    model = build(config.model, seed=config.seed)
    batch = config.data.load(seed=0, vocab_size=259).batch(0)
    noise, losses = draw_noise(model.spec, 0, 0, batch), []
    for row, depth in enumerate(drawn(0).tolist()):
        one = slice(row, row + 1)
        logits = forward(model, batch.tokens[one], num_steps=depth, noise=noise[one]).logits
        losses.append(torch.nn.functional.cross_entropy(logits[0], batch.labels[row]).item())
    assert metrics(tmp_path / "run", "train")[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("changes", [{"micro_batches": 2}, {"row_bucket": 3}, {"row_bucket": 4}], ids=str)
def test_cutting_the_batch_and_buckets_change_no_number_beyond_rounding(tmp_path, changes):
    for name, fields in (("a", {}), ("b", changes)):
        train(tiny_run(tmp_path, model=core(), steps=3, depth_per="sequence", **fields), tmp_path / name)
    pairs = zip(*(metrics(tmp_path / name, "train") for name in "ab"), strict=True)
    for index, (one, other) in enumerate(pairs):
        for key in ("loss", "grad_norm", "T", "g"):
            assert other[key] == pytest.approx(one[key], rel=SPLIT["rtol"], abs=SPLIT["atol"])
        if changes == {"row_bucket": 4}:
            assert other["ledger"]["row_applications"] == 4 * drawn(index).max()


def test_micro_batches_have_their_own_depths(tmp_path):
    config = tiny_run(tmp_path, model=core(), depth_per="micro_batch", micro_batches=4)
    trainer = broken_off(config, tmp_path / "run", steps=6)
    key, one = stream_key(0, "depth"), np.zeros(1, np.int64)
    for index, line in enumerate(metrics(tmp_path / "run", "train")):
        depths = [int(LAW.draw(key, index, one, piece)[0]) for piece in range(4)]
        assert line["T"] == np.mean(depths)
        assert line["ledger"]["row_applications"] == sum(depths)
    rows = [piece.rows for piece in split(trainer.loader.batch(0), 4)]
    assert len({d.depth for d in draw_depths(trainer.spec, 0, 0, rows, "micro_batch")}) > 1
    assert len({d.depth for d in draw_depths(trainer.spec, 0, 0, rows, "batch")}) == 1


def test_terms_are_counted_over_micro_batches_of_different_depth(tmp_path):
    config = tiny_run(
        tmp_path, model=core(), depth_per="micro_batch", micro_batches=2, objective=EveryIteration(), steps=2
    )
    train(config, tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in metrics(tmp_path / "run", "train"))


def test_a_learned_law_goes_on_where_it_was(tmp_path):
    law = LearnedCategorical(max_steps=4, warmup=1, lr=0.1)
    config = tiny_run(tmp_path, model=core(trained_depth=law), save_every=6)
    train(config, tmp_path / "whole")
    part = broken_off(config, tmp_path / "part", steps=3)
    assert part.learner.pmf()[1:].std() > 0
    train(config, tmp_path / "part")
    one, two = (load_file(tmp_path / name / "step_6" / "model.safetensors") for name in ("whole", "part"))
    torch.testing.assert_close(one, two, **EXACT)
    assert metrics(tmp_path / "whole", "train") == metrics(tmp_path / "part", "train")
    ends = [Trainer(config, tmp_path / name) for name in ("whole", "part")]
    for end in ends:
        end.metrics.close()
    assert (ends[0].learner.phi == ends[1].learner.phi).all() and ends[0].learner.steps == 6


def test_depth_and_window_grow_along_a_run(tmp_path):
    law = Curriculum(law=FixedDepth(num_steps=4), ramp_steps=4)
    gradient = GrowingWindow(window=3, ramp_steps=6)
    train(tiny_run(tmp_path, model=core(trained_depth=law), gradient=gradient), tmp_path / "run")
    lines = metrics(tmp_path / "run", "train")
    assert [line["T"] for line in lines] == [1, 1, 2, 3, 4, 4]
    assert [line["beyond"] for line in lines] == [0.0] * 6
    assert [line["g"] for line in lines] == [1, 1, 1, 2, 2, 3]


def test_a_line_tells_the_mass_that_was_moved_at_its_step(tmp_path):
    law = Curriculum(law=PoissonDepth(rate=4.0, max_steps=3), ramp_steps=4)
    train(tiny_run(tmp_path, model=core(trained_depth=law)), tmp_path / "run")
    found = [line["beyond"] for line in metrics(tmp_path / "run", "train")]
    assert found == pytest.approx([stats.poisson.sf(3, rate) for rate in (1, 1, 2, 3, 4, 4)], rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row_bucket": 2},
            "RunConfig.row_bucket must be 1 with depth_per='batch', where all rows run. Got 2. "
            "Set depth_per='sequence'.",
        ),
        ({"row_bucket": 0}, "RunConfig.row_bucket must be at least 1. Got 0."),
        (
            {"depth_per": "sequence", "objective": EveryIteration()},
            "RunConfig.depth_per='sequence' needs an objective of the last state alone, since rows reach theirs at "
            "different iterations. Got EveryIteration. Use NextToken or depth_per='batch'.",
        ),
        ({"depth_per": "sequence", "objective": Progressive(alpha=0.5)}, "Got Progressive. Use NextToken"),
        (
            {"depth_per": "sequence", "model": two_blocks()},
            "depth_per='sequence' needs a model that repeats one block.",
        ),
        (
            {"depth_per": "sequence", "gradient": Implicit()},
            "depth_per='sequence' needs a gradient strategy that cuts the graph only. Got Implicit. Use TruncatedBPTT.",
        ),
        (
            {"depth_per": "micro_batch", "model": core(trained_depth=LearnedCategorical(max_steps=3))},
            "RunConfig.depth_per must be 'batch' for a learned law, which learns from one draw per step. "
            "Got 'micro_batch'.",
        ),
        (
            {"gradient": Implicit(), "objective": EveryIteration()},
            "Implicit is the gradient of the last state; EveryIteration scores others too. Use NextToken or FullBPTT.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_run(tmp_path, **{"model": core(), "objective": NextToken(), "gradient": FullBPTT(), **changes})
