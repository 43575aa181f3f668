"""The loop taken apart into stretches is the loop."""

import itertools

import pytest
import torch

from looplab.models.base import PRESETS, build
from looplab.recurrence.aligned import run_aligned
from looplab.recurrence.gathering import Gathering
from looplab.recurrence.gradient import CheckpointUnit, FullBPTT, Implicit, SegmentedDetach, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.state import standard_noise
from looplab.recurrence.trace import Recorder


class ByBlock(Gathering):
    """Stretches of one block each; notes which."""

    def __init__(self, model):
        self.model, self.spec, self.stretches = model, model.spec, []

    def along(self, stretch, state, context, moves):
        for block, some in itertools.groupby(moves, lambda move: move.unit[0].block):
            some = list(some)
            self.stretches.append((block, len(some)))
            state = stretch(self.model, state, context, some)
        return state


def started(name):
    model = build(PRESETS[name](), dtype=torch.float64)
    tokens = torch.arange(10).view(2, 5)
    context = model.encode(tokens)
    width = model.spec.noise_width
    noise = standard_noise(0, [1, 2], context.positions, width).double() if width else None
    return model, context, model.init_state(context, noise)


@pytest.mark.parametrize(
    "gradient",
    [
        FullBPTT(),
        TruncatedBPTT(window=2),
        TruncatedBPTT(window=3),
        SegmentedDetach(every=2),
        CheckpointUnit(inner=TruncatedBPTT(window=5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["tiny-core", "tiny-layer-loop", "tiny-blocks"])
def test_stretches_give_the_same_states_gradients_and_counts(name, gradient):
    found = []
    for wrap in (lambda model: model, ByBlock):
        model, context, state = started(name)
        seen, ledger, recorder = wrap(model), Ledger(), Recorder()
        last = run_plan(seen, model.spec.plan(), context, state, gradient=gradient, ledger=ledger, recorder=recorder)
        last.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((last, recorder.states, gradients, ledger.to_dict(times=False)))
    (one, states, slopes, counts), (other, *rest) = found
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(states, rest[0], strict=True))
    assert slopes.keys() == rest[1].keys()
    assert all(torch.equal(slope, rest[1][n]) for n, slope in slopes.items())
    assert counts == rest[2]


def test_a_block_is_one_stretch_across_a_cut():
    model, context, state = started("tiny-layer-loop")
    pieces = ByBlock(model)
    run_plan(pieces, model.spec.plan(), context, state, gradient=TruncatedBPTT(window=3))
    assert pieces.stretches == [(0, 2), (1, 2), (2, 2)]


def test_rows_with_depths_of_their_own_are_one_stretch_too():
    depths, found = torch.tensor([2, 4]), []
    for wrap in (lambda model: model, ByBlock):
        model, context, state = started("tiny-core")
        seen = wrap(model)
        found.append(run_aligned(seen, depths, context, state, gradient=TruncatedBPTT(window=2)))
    assert torch.equal(*found)
    assert seen.stretches == [(0, 4)]


def test_a_walk_that_cannot_be_taken_apart_is_refused():
    model, context, state = started("tiny-core")
    with pytest.raises(ValueError, match="needs a gradient strategy that cuts the graph only. Got Implicit"):
        run_plan(ByBlock(model), model.spec.plan(), context, state, gradient=Implicit())
