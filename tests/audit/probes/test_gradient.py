import pytest
import torch

import tolerances
from looplab.audit.probes.gradient import FullDepth, TokenIds, drawn_slopes, mean_loss, slopes

DRAWS = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(4, 9, dtype=torch.float64, generator=DRAWS)
HIDDEN = torch.randn(50, 4, dtype=torch.float64, generator=DRAWS)
FULL = torch.randn(50, 4, dtype=torch.float64, generator=DRAWS)
IDS = torch.randint(9, (50,), generator=DRAWS)
BYTES = 9 * 8 * 35


def head(hidden):
    return 3 * torch.tanh(hidden @ WEIGHT)


def change(hidden):
    return 1.2 * hidden + 0.1


def nll(logits):
    return torch.nn.functional.cross_entropy(logits, IDS, reduction="none")


def kl(logits):
    q = torch.softmax(head(FULL), dim=1)
    return (q * (q.log() - torch.log_softmax(logits, dim=1))).sum(dim=1)


@pytest.mark.parametrize(("objective", "direct"), [(TokenIds(IDS), nll), (FullDepth(FULL), kl)])
def test_losses_and_slopes_are_those_of_the_whole(objective, direct):
    changed = change(HIDDEN).requires_grad_()
    expected = direct(head(changed))
    (slope,) = torch.autograd.grad(expected.sum(), changed)
    pieces, losses, found = (
        torch.cat(part) for part in zip(*slopes(HIDDEN, change, head, objective, logit_bytes=BYTES), strict=True)
    )
    assert torch.equal(pieces, HIDDEN)
    torch.testing.assert_close(losses, expected.detach(), **tolerances.GRADIENTS)
    torch.testing.assert_close(found, slope, **tolerances.GRADIENTS)
    mean = mean_loss(HIDDEN, change, head, objective, logit_bytes=BYTES)
    assert mean == pytest.approx(expected.mean().item(), rel=1e-12)


@pytest.mark.parametrize("objective", [TokenIds(IDS), FullDepth(FULL)])
def test_a_part_is_the_objective_of_these_tokens(objective):
    chosen = torch.arange(50) % 3 == 0
    found = torch.cat([losses for _, losses, _ in slopes(HIDDEN[chosen], change, head, objective.part(chosen))])
    whole = torch.cat([losses for _, losses, _ in slopes(HIDDEN, change, head, objective)])
    torch.testing.assert_close(found, whole[chosen], **tolerances.GRADIENTS)


def test_drawn_labels_follow_the_prediction():
    hidden = HIDDEN[:1].expand(40_000, 4)
    linear = torch.eye(4, dtype=torch.float64)
    found = torch.cat([slope for _, slope in drawn_slopes(hidden, change, lambda h: h @ linear)])
    p = torch.softmax(change(HIDDEN[0]), dim=0)
    # slope = p - [label], so its mean vanishes and its second moments are those of the multinomial
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(4).double(), rtol=0.0, atol=0.01)
    torch.testing.assert_close(found.T @ found / 40_000, p.diag() - p.outer(p), rtol=0.0, atol=0.01)


def test_weights_of_the_head_get_no_gradient():
    weight = WEIGHT.clone().requires_grad_()
    list(slopes(HIDDEN, change, lambda h: h @ weight, TokenIds(IDS)))
    assert weight.grad is None
