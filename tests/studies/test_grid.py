"""Grids of a model that is exact by construction."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional

from looplab.models.dense import Dense
from looplab.models.looped import Looped
from looplab.recipes.par import par_arm
from looplab.studies.grid import GridResult, Line, TaskGrid, measure_grid, traced_depths
from looplab.tasks.base import window_targets
from looplab.tasks.state_tracking import StateTracking
from looplab.tasks.written_states import WrittenStates

TASK = StateTracking(group="swap_s5", train_length=4)
LINE = Line(length=8, items=6)


class Exact(Looped):
    """After k iterations every position holds the product of its last k operations, and whether that is all of them."""

    fails_after = 1000
    late = 0

    def init_state(self, context, noise):
        self.tokens = context.injected.argmax(-1)
        return torch.zeros(*self.tokens.shape, 26)

    def encode(self, tokens, *args, **more):
        shown = functional.one_hot(tokens, self.config.dim).float()
        return super().encode(tokens, *args, **more)._replace(injected=shown)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        k = int(iteration[0]) + 1
        values = window_targets(TASK, self.tokens, k)[-1]
        if k > self.fails_after:
            values = values.roll(1, -1)
        laws = 3.0 * functional.one_hot(values, 5).float().flatten(2)
        done = torch.arange(self.tokens.shape[1]) <= k - self.late
        return torch.cat([laws, (2.0 * done - 1).expand(self.tokens.shape)[..., None]], dim=-1)

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return hidden[..., :25]

    def halt(self, state):
        return state[..., 25]


def exact(**changes):
    torch.manual_seed(0)
    model = Exact(par_arm("halting").model)
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def grid(**changes):
    fields = {"task": TASK, "lines": (LINE,), "halting": (dataclasses.replace(LINE, depths=(1.25,)),), "traced": LINE}
    return TaskGrid(**{**fields, **changes})


def test_an_exact_model_is_right_at_every_depth():
    found = measure_grid(exact(), grid())
    assert [(c.length, c.depth, c.num_steps, c.exact) for c in found.cells] == [
        (8, 1.0, 8, 6),
        (8, 1.25, 10, 6),
        (8, 2.0, 16, 6),
    ]
    cell = found.cell(8, 2.0)
    assert cell.exact_match.low < cell.exact_match.low90 < cell.exact_match.value == 1
    assert cell.change.low < cell.change.value == 0 < cell.change.high
    assert (found.first_wrong, found.chance) == (9, 1 / 60)


def test_a_model_that_forgets_loses_what_it_had_and_the_change_says_so():
    found = measure_grid(exact(fails_after=8), grid())
    assert [cell.exact for cell in found.cells] == [6, 0, 0]
    change = found.cell(8, 1.25).change
    assert change.value == -1 and change.high < 0
    early = measure_grid(exact(fails_after=4), grid())
    assert early.first_wrong == 0, "<bos> holds the identity, rolled"


def test_states_are_followed_to_the_largest_depth():
    found = measure_grid(exact(), grid())
    assert [point.k for point in found.trace] == [1, 2, 4, 8, 10, 16] == list(traced_depths(LINE, TASK))
    assert all(point.margin == 3.0 for point in found.trace)
    assert found.trace[0].rms == pytest.approx(((5 * 9 + 1) / 26) ** 0.5)


@pytest.mark.parametrize(("late", "error", "on_time"), [(0, 0.0, 1.0), (1, 1.0, 0.0), (2, 2.0, 0.0), (5, 2.0, 0.0)])
def test_a_stop_is_counted_from_the_iterations_that_the_word_takes(late, error, on_time):
    (found,) = measure_grid(exact(late=late), grid()).halting
    assert (found.error, found.on_time.value) == (error, on_time)
    assert found.exact_match.value == 1


def test_an_answer_is_the_one_at_the_stop():
    (found,) = measure_grid(exact(late=1, fails_after=8), grid()).halting
    assert found.exact_match.value == 0


def test_a_result_reads_back_and_repeats_byte_for_byte(tmp_path):
    found = measure_grid(exact(), grid())
    found.save(tmp_path)
    assert GridResult.load(tmp_path) == found
    text = (tmp_path / "results.json").read_text()
    measure_grid(exact(), grid()).save(tmp_path)
    assert (tmp_path / "results.json").read_text() == text
    assert "seconds" not in json.dumps(found.counts)


class Writer(Dense):
    """Writes the right state after what it reads, except that it begins with a wrong one."""

    wrong = 0

    def encode(self, tokens, *args, **more):
        self.text = tokens
        return super().encode(tokens, *args, **more)

    def head(self, hidden):
        task = WRITTEN
        logits = torch.zeros(*hidden.shape[:2], len(task.symbols))
        for row, text in enumerate(self.text.tolist()):
            operations = [t for t in text[1:] if t < len(task.words.tokens)]
            states = [t - len(task.words.tokens) for t in text if t >= len(task.words.tokens)]
            at = states[-1] if states else self.wrong
            logits[row, -1, int(task.words._table[at, operations[len(states)] - 1])] = 1.0
        return logits


WRITTEN = WrittenStates(group="swap_s5", train_length=4)


@pytest.mark.parametrize(("wrong", "right"), [(0, 5), (7, 0)])
def test_a_written_answer_follows_from_what_the_model_wrote(wrong, right):
    model = Writer(par_arm("written").model)
    model.wrong = wrong
    found = measure_grid(model, TaskGrid(task=WRITTEN, lines=(Line(length=4, items=5, depths=(1.0,)),)))
    assert [cell.exact for cell in found.cells] == [right]
