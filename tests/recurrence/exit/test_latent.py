import cmath
import math

import pytest
import torch

from looplab.models.base import Context, LoopedLM, prepare
from looplab.recurrence.exit import AccelerationExit, LatentExit, Seen, forward_until
from looplab.recurrence.exit.latent import relative_change
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import StateField
from tiny import LETTERS, tiny_spec

DEEPEST = 40


class Spiral(LoopedLM):
    """s <- A s + e with A = radius times a rotation, the same for every token: a complex number times a number.

    Fixed point e / (1 - a); s_t = fixed + a^t (s_0 - fixed).
    """

    def __init__(self, radius, angle, *, offset):
        super().__init__()
        self.a, self.offset = cmath.rect(radius, angle), offset
        turn = [[self.a.real, self.a.imag], [-self.a.imag, self.a.real]]
        self.turn = torch.nn.Parameter(torch.tensor(turn, dtype=torch.float64))
        self.spec = tiny_spec(ModelLoop(num_steps=DEEPEST), 1, 2, state={"state": StateField(width=2)})

    def context(self, letter):
        return complex(self.offset + letter, 1.0)

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        embeds = torch.stack([tokens + self.offset, torch.ones_like(tokens)], dim=-1).double()
        return Context(embeds, positions, valid)

    def init_state(self, context, noise):
        return torch.zeros_like(context.embeds)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        return state @ self.turn + context.embeds

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return hidden.repeat_interleave(LETTERS // 2, dim=-1)

    def at(self, letter, t):
        fixed = self.context(letter) / (1 - self.a)
        return fixed - self.a**t * fixed


def first(signal, threshold, *, earliest, in_a_row):
    run = 0
    for t in range(earliest, DEEPEST):
        run = run + 1 if signal(t) < threshold else 0
        if run == in_a_row:
            return t
    return DEEPEST


@pytest.mark.parametrize("radius", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("threshold", [0.2, 1e-2])
def test_on_a_core_with_known_decay_the_step_is_that_of_the_formula(radius, threshold):
    model = Spiral(radius, 1.0, offset=3.0)
    letters = list(range(LETTERS))
    ids = torch.tensor([letters])

    def moved(letter):
        return lambda t: abs(model.at(letter, t) - model.at(letter, t - 1)) / abs(model.at(letter, t))

    def bent(letter):
        return lambda t: (
            abs(model.at(letter, t) - 2 * model.at(letter, t - 1) + model.at(letter, t - 2)) / abs(model.at(letter, t))
        )

    found = forward_until(model, ids, LatentExit(threshold=threshold)).steps[0].tolist()
    assert found == [first(moved(letter), threshold, earliest=1, in_a_row=1) for letter in letters]
    found = forward_until(model, ids, AccelerationExit(threshold=threshold)).steps[0].tolist()
    assert found == [first(bent(letter), threshold, earliest=3, in_a_row=2) for letter in letters]
    # In closed form: successive moves shrink by the radius, so the step grows with log(threshold) / log(radius).
    change = [moved(0)(t) * abs(model.at(0, t)) for t in (5, 6)]
    assert math.isclose(change[1] / change[0], radius, rel_tol=1e-9)


def test_the_first_step_is_compared_with_the_initial_state():
    rule, start = LatentExit(threshold=0.1), torch.ones(1, 2, 3)
    memory = rule.start(tiny_spec(ModelLoop(num_steps=4), 1, 3), start)
    state = torch.stack([torch.full((3,), 1.05), torch.full((3,), 2.0)])[None]
    stop, _ = rule.stops(memory, Seen(torch.tensor([1]), state), 4)
    assert stop.tolist() == [[True, False]]


def test_a_state_of_norm_zero_never_stops():
    rule = LatentExit(threshold=10.0)
    memory = rule.start(tiny_spec(ModelLoop(num_steps=4), 1, 3), torch.zeros(1, 1, 3))
    stop, _ = rule.stops(memory, Seen(torch.tensor([1]), torch.zeros(1, 1, 3)), 4)
    assert not bool(stop)


def test_norms_are_taken_in_float32():
    """Squares of these entries are beyond float16, and their sum is too coarse in bfloat16."""
    now, before = torch.full((4096,), 300.0), torch.full((4096,), 297.0)
    for dtype in (torch.float16, torch.bfloat16):
        found = relative_change(now.to(dtype), before.to(dtype))
        assert found.dtype == torch.float32
        want = (now.to(dtype).double() - before.to(dtype).double()).norm() / now.to(dtype).double().norm()
        assert math.isclose(float(found), float(want), rel_tol=1e-5)
