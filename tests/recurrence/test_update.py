import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.linear import Init
from looplab.recurrence.update import Damped, EnergyGate, Replace, Selective, Update
from reference import recurrence as twin
from tolerances import BLOCK_GRADIENTS, BLOCKS, EXACT


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


DIM, INIT = 5, Init(std=0.5)
ALL = [Replace(), EnergyGate(hidden=3, tau=0.7), Selective(), Damped(alpha=0.3)]


def built(config):
    torch.manual_seed(0)
    module = config.build(DIM, INIT).double()
    for parameter in module.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return module


def proposals(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def start(config):
    return {name: torch.zeros(2, 3, width, dtype=torch.float64) for name, width in config.fields.items()}


@pytest.mark.parametrize("config", ALL[1:], ids=lambda c: type(c).__name__)
def test_three_steps_equal_the_twin_in_values_and_gradients(config):
    """Three, so that the energy of one step is what the next compares with, and the first has none."""
    module = built(config)
    weights = dict(module.named_parameters())
    first, *new = proposals(4)
    options = {"alpha": 0.3} if isinstance(config, Damped) else {"tau": 0.7} if isinstance(config, EnergyGate) else {}
    fast, extra = first, start(config)
    for h in new:
        fast, extra = module(fast, h, extra)
    rows = []
    for b in range(2):
        tokens = []
        for t in range(3):
            s, energy = first[b, t], None
            for h in new:
                previous = {"previous": energy} if isinstance(config, EnergyGate) else {}
                s, energy = twin.update(type(config).__name__, s, h[b, t], weights, **options, **previous)
            tokens.append(s)
        rows.append(torch.stack(tokens))
    slow = torch.stack(rows)
    torch.testing.assert_close(fast, slow, **BLOCKS)
    inputs = [first, *new, *weights.values()]
    for a, b in zip(*(torch.autograd.grad(y.pow(3).sum(), inputs) for y in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, **BLOCK_GRADIENTS)


def test_a_fully_open_gate_equals_replace():
    old, new = proposals(2)
    gate = built(EnergyGate(hidden=3))
    gate.down.bias.data.fill_(-1e4)
    torch.testing.assert_close(gate(old, new, start(EnergyGate(hidden=3)))[0], new, **EXACT)
    selective = built(Selective())
    selective.a_log.data.fill_(-torch.inf)
    torch.testing.assert_close(selective(old, new, {})[0], new, **EXACT)
    torch.testing.assert_close(built(Damped(alpha=1.0))(old, new, {})[0], new, **EXACT)


def test_replace_builds_nothing():
    assert Replace().build(DIM, INIT) is None
    assert Replace().fields == {}
    assert Replace().matmul_params(DIM) == 0


def test_gates_start_near_four_fifths():
    old, new = (p.float() for p in proposals(2))
    module = EnergyGate(hidden=3, tau=2.0).build(DIM, Init(std=1e-6))
    state, _ = module(old, new, {"energy": torch.zeros(2, 3, 2)})
    gate = torch.sigmoid(torch.tensor(1.5))
    torch.testing.assert_close(state, gate * new + (1 - gate) * old, rtol=0, atol=1e-5)


def test_the_energy_gates_of_the_published_grid_have_their_parameter_count():
    gates = [EnergyGate(hidden=160).build(640, INIT) for _ in range(2)]
    assert sum(p.numel() for g in gates for p in g.parameters()) == 409_922


@pytest.mark.parametrize("config", ALL[1:], ids=lambda c: type(c).__name__)
def test_matmul_params_are_the_entries_of_the_matrices(config):
    assert config.matmul_params(DIM) == sum(p.numel() for p in built(config).parameters() if p.dim() == 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Damped(alpha=0.0), r"Damped\.alpha must be above 0 and at most 1\. Got 0"),
        (lambda: Damped(alpha=1.5), r"Damped\.alpha must be above 0 and at most 1\. Got 1\.5"),
        (lambda: EnergyGate(hidden=0), r"EnergyGate\.hidden must be at least 1\. Got 0"),
        (lambda: EnergyGate(hidden=4, tau=0.0), r"EnergyGate\.tau must be positive\. Got 0"),
    ],
)
def test_a_bad_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("config", ALL, ids=repr)
def test_a_choice_survives_json(config):
    assert from_dict(Update, to_dict(config)) == config
