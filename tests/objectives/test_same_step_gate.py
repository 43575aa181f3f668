from linear_core import Line, given, words
from looplab.objectives.lookahead_gate import LookaheadGateLoss
from looplab.objectives.same_step_gate import SameStepGateLoss


def test_it_starts_at_its_best():
    """A copy of the teacher about the same step has its law; the cross-entropy is then the teacher's own entropy."""
    model = Line(halt="hazard")
    gate = SameStepGateLoss().beside(model)
    parts = SameStepGateLoss().run(given(model, words(), beside=gate)).parts
    assert parts.means()["cdf"] == 0.0
    parts["hazard"].sum.backward()
    assert float(gate.weight.grad.abs().max()) < 1e-12 and float(gate.bias.grad.abs()) < 1e-12


def test_it_asks_for_one_hazard_more_than_the_lookahead_gate():
    model = Line(halt="hazard")
    reads = {}
    for objective in (SameStepGateLoss(), LookaheadGateLoss()):
        gate = objective.beside(model)
        calls = []
        gate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        objective.run(given(model, words(), 5, beside=gate))
        reads[type(objective).__name__] = len(calls)
    assert reads == {"SameStepGateLoss": 4, "LookaheadGateLoss": 3}
