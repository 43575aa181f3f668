from dataclasses import dataclass

import numpy as np
import pytest

from looplab.tasks.agreement import Agreement, agreement, changed
from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Grade, Task, Trace
from looplab.tasks.prefix_sum import PrefixSum


@dataclass(frozen=True, kw_only=True)
class Squares(Task):
    """n mod 10 squared mod 10, with a fault on demand."""

    fault: str = ""

    tokens = tuple("0123456789")
    symbols = tuple("0123456789")
    train_difficulties = (1, 2)
    test_difficulties = (1, 2)

    def draw(self, difficulty, draws):
        return draws.integer(10) if self.fault != "restless" else Draws(next(NUMBERS), 0).integer(1000) % 10

    def canonical(self, problem):
        return bytes([problem])

    def example(self, problem):
        labels = np.array([self.reference(problem).answer])
        return Example(tokens=np.array([problem]), labels=labels, answer=slice(0, 1))

    def decode(self, tokens):
        return int(tokens[0])

    def reference(self, problem):
        return Trace((), problem**2 % 10 if self.fault != "wrong" else problem)

    def verify(self, problem, predicted):
        if self.fault == "unchecked":
            return None
        return self.fault == "gullible" or int(predicted[0]) == sum([problem] * problem) % 10

    def grade(self, problem, predicted):
        if self.fault == "mild":
            return Grade(exact=True, cells_right=1, cells_total=1)
        return super().grade(problem, predicted)

    def chance(self, difficulty):
        return 0.2


TASKS.register("test_squares")(Squares)
NUMBERS = iter(range(10**6))
RIGHT = {"difficulty": 1, "items": 40, "exact": 40, "verified": 40, "refused": 40, "agreed": 40, "alone": 40}


def test_a_sound_task_keeps_every_promise():
    assert agreement(Squares(), 1, items=40) == Agreement(**RIGHT)
    assert agreement(Squares(), 1, items=40).complete
    assert agreement(PrefixSum(train=(5,)), 5, items=20, seed=3, split="train").complete


@pytest.mark.parametrize(
    ("fault", "count"),
    [("wrong", "verified"), ("gullible", "agreed"), ("mild", "refused"), ("restless", "alone")],
)
def test_every_fault_is_counted_where_it_belongs(fault, count):
    found = agreement(Squares(fault=fault), 1, items=40)
    assert getattr(found, count) < 40
    assert not found.complete


def test_without_an_independent_check_nothing_is_claimed():
    found = agreement(Squares(fault="unchecked"), 1, items=40)
    assert (found.verified, found.agreed, found.exact) == (None, None, 40)


def test_one_scored_cell_is_changed():
    answer = np.array([IGNORED, 9, 3])
    assert changed(Squares(), answer).tolist() == [IGNORED, 0, 3]
    assert answer.tolist() == [IGNORED, 9, 3]
