import pytest
import torch

from looplab.objectives.readout import summed_readout, token_losses
from tiny import LETTERS, Mixing


def score(logits, labels):
    return logits.square().sum(), (logits.sum(dim=1) * labels).sum()


@pytest.mark.parametrize("chunk", [None, 1, 4, 6])
def test_sums_do_not_depend_on_the_chunks(chunk):
    model = Mixing(dtype=torch.float64)
    hidden = torch.randn(2, 3, model.unembedding.shape[0], dtype=torch.float64, requires_grad=True)
    labels = torch.arange(6).reshape(2, 3)
    logits = (hidden @ model.unembedding).flatten(0, 1)
    found = summed_readout(model, hidden, labels, score, chunk=chunk)
    torch.testing.assert_close(found, score(logits, labels.flatten()))
    (direct,) = torch.autograd.grad(sum(score(logits, labels.flatten())), hidden)
    (chunked,) = torch.autograd.grad(sum(found), hidden)
    torch.testing.assert_close(chunked, direct)


@pytest.mark.parametrize("chunk", [None, 1, 4, 6])
@pytest.mark.parametrize("cells", [1, 2])
def test_the_loss_of_a_position_is_the_sum_over_its_cells(chunk, cells):
    model = Mixing(dtype=torch.float64)
    hidden = torch.randn(2, 3, model.unembedding.shape[0], dtype=torch.float64, requires_grad=True)
    labels = torch.arange(6 * cells).reshape(2, 3, cells) % (LETTERS // cells)
    labels[0, 1], labels[1, 0, -1] = -100, -100
    laws = (hidden @ model.unembedding).unflatten(-1, (cells, -1)).log_softmax(-1)
    wanted = -torch.where(labels < 0, 0.0, laws.gather(-1, labels.clamp(min=0)[..., None])[..., 0]).sum(-1)
    found = token_losses(model, hidden, labels if cells > 1 else labels[..., 0], chunk=chunk)
    torch.testing.assert_close(found, wanted)
    assert float(found[0, 1].detach()) == 0.0
    weights = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(2, 3)
    grads = [torch.autograd.grad((weights * losses).sum(), hidden, retain_graph=True)[0] for losses in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_without_gradient_nothing_is_computed_twice():
    model = Mixing()
    calls = []
    inner = model.head
    model.head = lambda hidden: calls.append(hidden.shape[1]) or inner(hidden)
    with torch.no_grad():
        summed_readout(model, torch.zeros(1, 5, model.unembedding.shape[0]), torch.zeros(1, 5).long(), score, chunk=2)
    assert calls == [2, 2, 1]
    assert model.unembedding.shape[1] == LETTERS
