"""The count of live bytes against the allocator, and on tensors that have no bytes."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from looplab.training.live_bytes import LiveBytes
from training.allocator import allocated


def block():
    """A step with views, changes in place, tensors that die early, and a backward pass."""
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    inputs = torch.ones(16, 8)

    def step():
        hidden = layers(inputs)
        for _ in range(3):
            hidden = hidden + layers(hidden).mul_(2).view(8, 16).view(16, 8)
        hidden.square().mean().backward()
        for parameter in layers.parameters():
            parameter.grad = None

    return step, [*layers.parameters(), inputs]


def test_the_most_is_that_of_the_allocator_but_for_scratch_and_nothing_is_left():
    step, known = block()
    step()
    with LiveBytes(known) as live:
        step()
    assert 20_000 < live.most <= allocated(step) <= live.most + 64  # scalars inside operations
    assert live.now == 0


def test_fake_tensors_count_like_real_ones():
    counts = []
    for mode in (torch.enable_grad(), FakeTensorMode()):
        with mode:
            step, known = block()
            with LiveBytes(known) as live:
                step()
        counts.append((live.most, live.now))
    assert counts[0] == counts[1]


def test_what_stays_is_alive_once_and_what_was_there_before_is_not_counted():
    before = torch.ones(100)
    with LiveBytes([before]) as live:
        kept = [torch.zeros(10), torch.zeros(4, dtype=torch.float64)]
        kept += [kept[0][2:], before.view(10, 10), before.add_(1)]
        assert live.now == 10 * 4 + 4 * 8
        del kept[0], kept[1:]  # a view keeps its whole storage
        assert live.now == 4 * 8
    assert live.most == 72
