import hashlib
import math

import pytest
import torch

from looplab.audit.probes.affine import Diagonal
from looplab.audit.probes.penalty import (
    STRENGTHS,
    check_documents,
    choose,
    edge_findings,
    heldout_documents,
    root_mean_square,
    untouched,
)

KEYS = [hashlib.sha256(str(d).encode()).hexdigest() for d in range(40)]
DOCUMENTS = torch.arange(40).repeat_interleave(3)


class Mean:
    """One parameter, the mean of the values of some tokens: loss (x - v)^2 / 2 per token."""

    def __init__(self, values):
        self.values, self.passes = values, 0

    def part(self, chosen):
        return Mean(self.values[chosen])

    def identity(self):
        return torch.zeros(1, dtype=torch.float64)

    def loss(self, x):
        return self.loss_and_gradient(x)[0]

    def loss_and_gradient(self, x):
        self.passes += 1
        return float((x - self.values).square().mean() / 2), (x - self.values).mean().reshape(1)

    def curvature(self, x):
        return Diagonal(torch.ones(1, dtype=torch.float64))


def held():
    return torch.isin(DOCUMENTS, torch.tensor(heldout_documents(KEYS)))


def test_a_fifth_of_the_documents_chooses():
    order = sorted(range(40), key=lambda d: hashlib.sha256((KEYS[d] + "lambda").encode()).digest())
    assert heldout_documents(KEYS) == sorted(order[:8])
    assert len(heldout_documents(KEYS[:2])) == 1


def test_every_penalty_is_fitted_on_the_rest_and_scored_on_the_fifth():
    values = torch.where(held(), 1.0, 2.0).double()
    choice = choose(Mean(values), DOCUMENTS, KEYS)
    for strength, loss in choice.heldout:
        x = 0.0 if strength == math.inf else 2 / (1 + 2 * strength)
        assert loss == pytest.approx((x - 1) ** 2 / 2, abs=1e-4)
    assert tuple(strength for strength, _ in choice.heldout) == STRENGTHS
    assert choice.strength == 1.0  # 2 / 3 is nearest to 1
    everything = values.mean().item()
    assert choice.minimum.point.x.item() == pytest.approx(everything / 3, abs=1e-4)


def test_ties_go_to_the_larger_penalty():
    choice = choose(Mean(torch.zeros(120, dtype=torch.float64)), DOCUMENTS, KEYS)
    assert choice.strength == math.inf
    assert choice.minimum.point.x.item() == 0.0


def test_the_identity_stays_where_every_fit_is_worse():
    choice = choose(Mean(torch.where(held(), -1.0, 1.0).double()), DOCUMENTS, KEYS)
    assert choice.strength == math.inf
    assert choice.minimum.point.x.item() == 0.0


def test_nothing_is_fitted_where_nothing_may_be():
    choice = untouched(torch.ones(3, dtype=torch.float64))
    assert (choice.strength, choice.heldout, choice.passes) == (math.inf, (), 0)
    assert choice.minimum.point.x.tolist() == [1.0, 1.0, 1.0]


def test_only_the_smallest_penalty_is_an_edge():
    assert not edge_findings("affine", 1e-4)
    (found,) = edge_findings("affine", 1e-5)
    assert (found.kind, found.value) == ("audit.lambda_at_edge", 1e-5)
    assert found.message.startswith("The affine probe")


def test_documents_and_keys_must_match():
    with pytest.raises(ValueError, match="fit: keys must name at least 2 documents, one key each. Got 39 keys for 40"):
        check_documents("fit", DOCUMENTS, KEYS[:39])
    with pytest.raises(ValueError, match="Got 1 keys for 1"):
        check_documents("fit", DOCUMENTS[:3], KEYS[:1])


def test_the_unit_of_shifts_is_the_root_mean_square():
    assert root_mean_square(torch.tensor([[3.0, 4.0], [0.0, 5.0]])) == pytest.approx(math.sqrt(12.5))
