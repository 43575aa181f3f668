import dataclasses
import itertools

import pytest
import torch

from looplab.recipes.layer_vs_model_loop import LAWS, ORDERS, SMOKE, STATES, Cell, layer_vs_model_loop

CELLS = [Cell(*choice) for choice in itertools.product(("text", "chase", "sums"), ORDERS, STATES, LAWS)]


@pytest.mark.parametrize("task", ["text", "chase", "sums"])
def test_all_cells_of_a_task_begin_at_the_same_weights(task):
    first, *others = [layer_vs_model_loop(cell, seed=2).build_model() for cell in CELLS if cell.task == task]
    for other in others:
        for (name, a), (again, b) in zip(first.named_parameters(), other.named_parameters(), strict=True):
            assert name == again and torch.equal(a, b), name


def test_the_orders_run_each_stored_layer_equally_often():
    layer, model = (build_spec(order) for order in ORDERS)
    assert str(layer.plan(2)) == "[0.0 0.1 1.0 1.1 2.0 2.1]"
    assert str(model.plan(2)) == "[0.0 0.1]"
    assert layer.params.total == model.params.total
    assert layer.plan() == layer.plan(4) and model.plan() == model.plan(4)


def build_spec(order):
    return layer_vs_model_loop(Cell("chase", order, "plain", "fixed"), SMOKE).build_model().spec


def test_cells_differ_in_their_choices_alone():
    base = layer_vs_model_loop(Cell("text", "layer", "plain", "fixed"))
    for cell in (cell for cell in CELLS if cell.task == "text"):
        run = layer_vs_model_loop(cell)
        model = dataclasses.replace(
            run.model,
            order=base.model.order,
            trained_depth=base.model.trained_depth,
            injection=base.model.injection,
            boundary=base.model.boundary,
        )
        assert dataclasses.replace(run, recipe=base.recipe, model=model) == base
    names = {layer_vs_model_loop(cell).recipe for cell in CELLS}
    assert len(names) == len(CELLS)


def test_every_row_of_the_pointer_chase_has_a_label_per_start_and_hop():
    run = layer_vs_model_loop(Cell("chase", "model", "plain", "fixed"))
    loader = run.data.load(seed=0, vocab_size=len(run.data.task.tokens))
    task = run.data.task
    assert {loader.difficulty(step) for step in range(50)} == {max(task.train)}
    batch = loader.batch(0)
    assert (batch.labels >= 0).sum(1).unique().tolist() == [task.nodes * max(task.train)]
