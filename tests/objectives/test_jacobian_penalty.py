import pytest
import torch

from linear_core import WIDTH, Line, given, share, words
from looplab.models.base import build
from looplab.models.looped import tiny_blocks
from looplab.objectives.base import roll
from looplab.objectives.jacobian_penalty import JacobianPenalty
from looplab.recurrence.ledger import Ledger
from tiny import Mixing


class Matrix(Line):
    """h' = M h + e."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        return state @ self.matrix.T + context.embeds


def sizes(model, objective, step=0, rows=64):
    one = given(model, words(rows), step=step)
    rollout, _, last = roll(one, (4,))
    return objective.sizes(one, rollout, last).detach()


def test_its_expectation_is_the_squared_frobenius_norm_over_the_entries():
    a, b = 0.7, 0.4
    model = Line(a=a, b=b)
    drawn = torch.cat([sizes(model, JacobianPenalty(), step) for step in range(40)])
    seq = words().tokens.shape[1]
    frobenius = WIDTH * (seq * a**2 + (seq - 1) * b**2)
    error = 4 * float(drawn.std()) / len(drawn) ** 0.5
    assert float(drawn.mean()) == pytest.approx(frobenius / (WIDTH * seq), abs=error)
    assert error < 0.02


def test_power_iterations_find_the_spectral_radius_and_not_the_largest_singular_value():
    normal = torch.tensor([[0.5, 0.2, 0.0], [0.2, -0.3, 0.1], [0.0, 0.1, 0.2]], dtype=torch.float64)
    skewed = torch.tensor([[0.9, 3.0, 0.0], [0.0, 0.4, 2.0], [0.0, 0.0, 0.1]], dtype=torch.float64)
    for matrix in (normal, skewed):
        found = sizes(Matrix(matrix), JacobianPenalty(power_iterations=60), rows=3)
        radius = float(torch.linalg.eigvals(matrix).abs().max())
        assert found.tolist() == pytest.approx([radius**2] * 3, rel=1e-3)
    assert float(torch.linalg.matrix_norm(skewed, 2)) ** 2 > 3 * 0.9**2


def test_rows_do_not_depend_on_their_neighbours_and_steps_differ():
    model = Line()
    assert torch.equal(sizes(model, JacobianPenalty(), rows=8)[:3], sizes(model, JacobianPenalty(), rows=3))
    assert not torch.equal(sizes(model, JacobianPenalty(), 0), sizes(model, JacobianPenalty(), 1))


def test_warm_up_is_cross_entropy_alone():
    model, objective = Line(), JacobianPenalty(weight=0.1, warmup_steps=5)
    early = share(objective, model, words(), step=4)[1].parts
    late = share(objective, model, words(), step=5)[1].parts
    assert list(early) == ["ce"] and early["ce"].weight == 1.0
    assert {name: part.weight for name, part in late.items()} == {"ce": 0.9, "jacobian": 0.1}
    assert early.means()["ce"] == late.means()["ce"]


def test_the_ledger_has_one_application_and_its_backwards_more():
    found = {}
    for name, objective in (("one", JacobianPenalty()), ("two", JacobianPenalty(power_iterations=2))):
        model, ledger = Mixing(blocks=1), Ledger()
        objective.run(given(model, words(), ledger=ledger))
        found[name] = ledger
    plain = Ledger()
    JacobianPenalty(weight=0.0).run(given(Mixing(blocks=1), words(), ledger=plain))
    step = found["one"].flops_forward - plain.flops_forward
    assert found["one"].applications == {0: plain.applications[0] + 4}
    assert found["one"].flops_backward - plain.flops_backward == 4 * step
    assert found["two"].flops_backward - plain.flops_backward == 6 * step


def test_it_trains_a_core_to_contract():
    model = Line(a=1.1, b=0.4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(40):
        optimizer.zero_grad()
        share(JacobianPenalty(weight=0.9), model, words(), step=step)[0].backward()
        optimizer.step()
    assert abs(model.a.item()) < 0.6


def test_several_blocks_are_refused():
    with pytest.raises(ValueError, match="JacobianPenalty needs a loop of one block.*'looped' has 2 blocks"):
        JacobianPenalty().check(build(tiny_blocks(), device="meta"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 1.1}, "weight must be from 0 to 1. Got 1.1."),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0. Got -1."),
        ({"power_iterations": 0}, "power_iterations must be at least 1. Got 0."),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"JacobianPenalty.{message}"):
        JacobianPenalty(**fields)
