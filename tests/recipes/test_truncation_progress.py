import dataclasses

import pytest
import torch

from looplab.objectives.next_token import NextToken
from looplab.recipes.truncation_progress import (
    GRADIENTS,
    OBJECTIVES,
    ROWS,
    STEPS,
    Cell,
    refusal,
    steps,
    truncation_progress,
)
from looplab.recurrence.gradient.implicit import Implicit
from looplab.recurrence.ledger import Ledger
from looplab.training.step import TrainingStep

LEGAL = [
    Cell(objective, gradient)
    for objective in OBJECTIVES
    for gradient in GRADIENTS
    if refusal(Cell(objective, gradient)) is None
]


@pytest.mark.parametrize("cell", [cell for cell in LEGAL if cell.gradient != "implicit"], ids=str)
def test_cells_have_equal_applications_with_gradient(cell):
    carried = GRADIENTS[cell.gradient][1].gradient_count(8)
    assert steps(cell) * carried == STEPS * 8 == 7200


def flops(cell):
    """Training FLOPs of the run."""
    run = truncation_progress(cell)
    model = run.build_model()
    batch = run.data.load(seed=0, vocab_size=11).batch(0)
    plan, ledger = model.spec.plan(8), Ledger()
    counts = run.objective.counts(batch.labels, len(plan))
    TrainingStep(model, run.objective, run.gradient)(batch, plan, None, counts, ledger=ledger)
    return (ledger.flops_forward + ledger.flops_backward) * run.steps


@pytest.mark.parametrize("objective", ["final", "progress"])
def test_cells_of_the_second_table_have_equal_training_flops(objective):
    full = flops(Cell(objective, "full"))
    assert flops(Cell(objective, "window1", flops=True)) == pytest.approx(full, rel=0.02)


def test_an_implicit_gradient_costs_at_most_as_many_products_as_full():
    strategy = GRADIENTS["implicit"][1]
    assert isinstance(strategy, Implicit) and strategy.max_iter + 1 == 8
    assert steps(Cell("settled", "implicit")) == STEPS


def test_cells_share_initial_weights_words_and_everything_but_their_two_choices():
    one = truncation_progress(Cell("final", "full"), 3)
    for cell in (Cell("progress", "window1"), Cell("every", "segments3"), Cell("settled", "implicit")):
        other = truncation_progress(cell, 3)
        pairs = zip(one.build_model().parameters(), other.build_model().parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        changed = dataclasses.replace(
            other,
            recipe=one.recipe,
            objective=NextToken(),
            gradient=one.gradient,
            steps=one.steps,
            save_every=one.save_every,
            evaluation=one.evaluation,
        )
        assert changed == one


def test_labels_stand_at_every_position():
    batch = truncation_progress(Cell("final", "full")).data.load(seed=0, vocab_size=11).batch(0)
    assert batch.labels.shape == (ROWS, 9, 5) and (batch.labels >= 0).all()


def test_illegal_cells_are_refused_in_the_words_of_the_configuration():
    assert refusal(Cell("final", "segments3")) == (
        "SegmentedDetach(every=3) needs a loss at iterations 3, 6, ..; NextToken scores only the last. "
        "Use EveryIteration or TruncatedBPTT(window=3)."
    )
    assert refusal(Cell("progress", "implicit")).startswith("Implicit is the gradient of the last state; Progress")
    assert len(LEGAL) == 6 * 4 + 4 * 2 + 2


def test_burn_in_comes_before_the_scored_iterations():
    run = truncation_progress(Cell("progress", "full", "burnin"))
    assert set(run.model.trained_depth.support()) == {8, 9, 10, 11, 12}
    assert run.objective.iterations == 8
    assert run.recipe == "truncation-progress-progress-full-burnin"
