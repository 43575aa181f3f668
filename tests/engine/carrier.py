"""A looped model by hand whose keys and values are known: after an odd letter comes the one before it.

state    [answer (8), the token itself (8)]
entry    written at iteration t: the token, times `carrier(t)`
answer   of odd letters: 6 times what the token before has left to be read; of even ones nothing (any may follow)
gate     even letters stop after step 1, odd ones run to the end
"""

import torch
from torch import nn
from torch.nn import functional

from looplab.models.base import Context, LoopedLM, prepare
from looplab.recurrence.kv import CopyLast, DepthIndexed, First, Single
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import HaltSpec
from tiny import LETTERS, tiny_spec

STEPS = 4
PROMPT, OUTPUT = 4, 8


class Carrier(LoopedLM):
    """`carrier`: iterations -> how much of the token an entry carries."""

    def __init__(self, carrier):
        super().__init__()
        self.carrier = carrier
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        rules = (DepthIndexed(), DepthIndexed(missing=CopyLast()), Single(), First())
        self.spec = tiny_spec(
            ModelLoop(num_steps=STEPS),
            1,
            2 * LETTERS,
            kv_rules=rules,
            halt=HaltSpec(layout="hazard", per="token", rule="of a test"),
        )

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        return Context(functional.one_hot(tokens, LETTERS).double() * self.one, positions, valid)

    def init_state(self, context, noise):
        return torch.cat([torch.zeros_like(context.embeds), context.embeds], dim=-1)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        own = state[..., LETTERS:]
        entries = (own * self.carrier(iteration.double())[:, None, None])[:, None]
        positions, allowed = context.positions, None
        if cache is not None:
            view = cache.view(block, 0, iteration)
            _, entries, allowed = view.append(entries, entries)
            positions = view.positions
        before = positions[:, None] == context.positions[:, :, None] - 1
        if allowed is not None:
            before = before & allowed[:, 0]
        read = before.double() @ entries[:, 0].double()
        odd = own[..., 1::2].sum(-1, keepdim=True)
        return torch.cat([6 * odd * read, own], dim=-1)

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return hidden[..., :LETTERS]

    def halt(self, state):
        even = state[..., LETTERS::2].sum(-1)
        return 40 * even - 20


def written_late(t):
    """The carrier appears at step 3."""
    return (t >= 2).double()


def contracting(t):
    """An entry is close to its limit after one step."""
    return 1 - 0.01 ** (t + 1)


def texts(windows=12, seed=0):
    """Windows that the model can predict, one token longer than prompt and output."""
    make = torch.Generator().manual_seed(seed)
    found = torch.randint(LETTERS, (windows, PROMPT + OUTPUT + 1), generator=make)
    for place in range(2, found.shape[1]):
        odd = found[:, place - 1] % 2 == 1
        found[:, place] = torch.where(odd, found[:, place - 2], found[:, place])
    return found
