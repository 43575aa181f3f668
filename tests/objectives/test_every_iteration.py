import pytest
import torch
from torch.testing import assert_close

from linear_core import Line, given, share, words
from looplab.objectives import NextToken
from looplab.objectives.every_iteration import EveryIteration
from looplab.recurrence.gradient import SegmentedDetach, TruncatedBPTT
from tiny import Mixing
from tolerances import CHUNKED


def grads(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def mixed(objective, depth=4, **fields):
    """Loss on a model whose readout is trained too."""
    model = Mixing(blocks=1, dtype=torch.float64)
    return model, share(objective, model, words(), depth, **fields)[0]


def test_with_uniform_weights_it_is_the_mean_of_a_loss_per_depth():
    model, loss = mixed(EveryIteration())
    loss.backward()
    whole = grads(model)
    apart = [share(NextToken(), model, words(), depth)[0] for depth in (1, 2, 3, 4)]
    mean = torch.stack(apart).mean()
    mean.backward()
    assert_close(loss, mean, **CHUNKED)
    assert_close(whole, grads(model), **CHUNKED)


@pytest.mark.parametrize(
    ("weights", "wanted"), [("linear", [0.1, 0.2, 0.3, 0.4]), ((0.0, 1.0, 0.0, 3.0), [0, 0.25, 0, 0.75])]
)
def test_weights_are_shares(weights, wanted):
    model, loss = mixed(EveryIteration(weights=weights))
    apart = [float(share(NextToken(), model, words(), depth)[0].detach()) for depth in (1, 2, 3, 4)]
    assert float(loss.detach()) == pytest.approx(sum(w * x for w, x in zip(wanted, apart, strict=True)), rel=1e-12)


def test_a_detached_readout_learns_from_the_last_iteration_and_the_core_from_all():
    model, loss = mixed(EveryIteration())
    loss.backward()
    joint = grads(model)
    model, same = mixed(EveryIteration(detach_readout=True, chunk=3))
    same.backward()
    apart = grads(model)
    share(NextToken(), model, words())[0].backward()
    last = grads(model)
    assert_close(same, loss, **CHUNKED)
    for name in ("inner", "across", "embedding"):
        assert_close(apart[name], joint[name], **CHUNKED)
    assert_close(apart["unembedding"], last["unembedding"] / 4, **CHUNKED)


def test_every_segment_has_its_loss():
    found = []
    for gradient in (SegmentedDetach(every=2), SegmentedDetach(every=1), TruncatedBPTT(window=2)):
        model = Line()
        share(EveryIteration(), model, words(), gradient=gradient)[0].backward()
        found.append(float(model.a.grad))
    # Written out: h_2 and h_4 start from detached states.
    model = Line()
    context = given(model, words()).encode()
    state, losses = model.init_state(context, None), []
    for k in range(4):
        state = model.step(state.detach() if k == 2 else state, context, 0, torch.full((4,), k))
        losses.append(torch.nn.functional.cross_entropy(model.head(state).flatten(0, 1), words().labels.flatten()))
    torch.stack(losses).mean().backward()
    assert found[0] == pytest.approx(float(model.a.grad), rel=1e-12)
    assert len(set(found)) == 3


def test_a_state_that_the_readout_does_not_see_change_is_not_scored():
    from looplab.models.base import build
    from looplab.models.looped import tiny_core
    from looplab.recurrence.injection import NoInjection
    from looplab.recurrence.plan import TwoLevel
    from looplab.recurrence.state_init import Zeros

    config = tiny_core()
    two = type(config)(
        **{
            **vars(config),
            "order": TwoLevel(h=2, l=2),
            "blocks": (2,),
            "injection": NoInjection(),
            "state_init": Zeros(),
        }
    )
    model = build(two, dtype=torch.float64)
    heads = []
    head = model.head
    model.head = lambda hidden: heads.append(1) or head(hidden)
    EveryIteration().run(given(model, words(), 2))
    assert len(heads) == 2  # after the high applications, not after the four low ones


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": 0}, "EveryIteration.chunk must be at least 1 token, or None. Got 0."),
        ({"weights": (1.0, -1.0)}, r"EveryIteration.weights must be at least 0 and not all 0. Got \(1.0, -1.0\)"),
        ({"weights": ()}, "not all 0"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EveryIteration(**fields)


def test_a_list_of_weights_must_fit_the_depth():
    with pytest.raises(ValueError, match=r"one entry per iteration \(4 were run\). Got 2. Use 'uniform' or 'linear'"):
        mixed(EveryIteration(weights=(1.0, 2.0)))
