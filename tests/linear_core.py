"""A looped model of two parameters, h'[j] = a h[j] + b (e[j] + h[j - 1] + e[j - 1]); the rest of it is fixed.

Small enough for finite differences and for twins in plain Python (`reference/objectives.py`). The gate, where it has
one, is a linear map of the state.
"""

import torch
from torch import nn

from looplab.models.base import Context, LoopedLM, prepare
from looplab.nn.linear import Init
from looplab.objectives.base import Pass
from looplab.recurrence.halting import HazardGateModule
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import HaltSpec
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import StateTracking
from tiny import tiny_spec

WIDTH = 3
TASK = StateTracking(group="z3", train_length=3)
"""Words of three residues: positions 0 .. 3, answered by one of three symbols."""


class Line(LoopedLM):
    """The linear core.

    Attributes:
        without_graph: (a, b) of applications that run without a graph, for difference quotients of losses that stop
            gradients there; None: the parameters.
    """

    without_graph = None

    def __init__(self, *, a=0.6, b=0.5, halt=None, steps=4, seed=0, dtype=torch.float64):
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        tokens, symbols = len(TASK.tokens), len(TASK.symbols)
        self.a, self.b = (nn.Parameter(torch.tensor(x, dtype=dtype)) for x in (a, b))
        self.register_buffer("table", torch.randn(tokens, WIDTH, generator=make, dtype=torch.float64).to(dtype))
        self.register_buffer("readout", torch.randn(symbols, WIDTH, generator=make, dtype=torch.float64).to(dtype))
        self.gate = None
        if halt is not None:
            self.gate = HazardGateModule(WIDTH, -0.3, Init()).to(dtype)
            with torch.no_grad():
                self.gate.weight.copy_(torch.tensor([[0.4, -0.5, 0.3]]))
        self.spec = tiny_spec(
            ModelLoop(num_steps=steps),
            1,
            WIDTH,
            vocab=(symbols, tokens),
            token_ids=tokens,
            halt=None if halt is None else HaltSpec(layout=halt, per="token", rule="of a test"),
        )

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        return Context(self.table[tokens], positions, valid)

    def init_state(self, context, noise):
        return torch.zeros_like(context.embeds)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        a, b = (self.a, self.b) if torch.is_grad_enabled() or self.without_graph is None else self.without_graph
        before = nn.functional.pad(state + context.embeds, (0, 0, 1, 0))[:, :-1]
        return a * state + b * (context.embeds + before)

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return hidden @ self.readout.T

    def halt(self, state):
        return super().halt(state) if self.gate is None else self.gate(state)


def words(rows=4, step=0):
    """A batch of words, all of whose positions have labels."""
    return TaskRows(task=TASK, rows=rows).load(seed=0, vocab_size=len(TASK.tokens)).batch(step)


def given(model, batch, depth=4, **fields):
    """A pass over the batch."""
    return Pass(model=model, batch=batch, plan=model.spec.plan(depth), **fields)


def share(objective, model, batch, depth=4, counts=None, **fields):
    """The differentiable loss of a batch, and the objective's outcome."""
    outcome = objective.run(given(model, batch, depth, **fields))
    return outcome.parts.share(counts or objective.counts(batch.labels, depth)), outcome
