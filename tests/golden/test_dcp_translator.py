"""The full-rank probe's gradient drives the recorded training of a pre-norm translator; its minimum is below it."""

import pytest
import torch

import tolerances
from golden.dcp_llama import FITS, LLAMA, SHAPE, TENSORS, head, scored
from looplab.audit.probes.descent import Descent
from looplab.audit.probes.full_rank import FullRankProblem, _objective

SETTINGS = FITS["translator"]["settings"]
both = pytest.mark.parametrize("objective", ["nll", "kl"])


def readout(before_norm):
    """Final norm and head of states before the norm."""
    size = (before_norm.square().mean(dim=1, keepdim=True) + SHAPE["model"]["rms_norm_eps"]).sqrt()
    return head(before_norm / size * LLAMA["model.norm.weight"])


def problem(objective, split, chosen=None):
    states, full = scored("math", split, "prefix2"), scored("math", split, "full")
    part = torch.ones(len(states.targets), dtype=torch.bool) if chosen is None else states.documents == chosen
    wanted = _objective(objective, states.targets[part], full.before_norm[part])
    return FullRankProblem(states.before_norm[part], readout, wanted, 1.0, 2**22)


def trained(objective, updates):
    """[A b] after some updates: Adam on the mean over four documents of their own means, clipped to norm 1."""
    per_update = SETTINGS["documents_per_update"]
    order = FITS["translator"][objective]["document_order"]
    x = torch.zeros(16 * 17, requires_grad=True)
    adam = torch.optim.Adam([x], lr=SETTINGS["lr"])
    for update in range(updates):
        chosen = order[per_update * update : per_update * (update + 1)]
        slopes = [problem(objective, "train", d).loss_and_gradient(x.detach().double())[1] for d in chosen]
        x.grad = torch.stack(slopes).mean(dim=0).float()
        torch.nn.utils.clip_grad_norm_([x], SETTINGS["clip_grad_norm"])
        adam.step()
    return x.detach().view(16, 17)


@both
def test_the_first_update_is_the_recorded_one(objective):
    expected = TENSORS[f"lens_{objective}_A_step1"]
    torch.testing.assert_close(trained(objective, 1)[:, :-1], expected, rtol=1e-3, atol=1e-6)


@both
def test_all_updates_end_at_the_recorded_translator(objective):
    x = trained(objective, SETTINGS["updates"])
    torch.testing.assert_close(x[:, :-1], TENSORS[f"lens_{objective}_A"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(x[:, -1], TENSORS[f"lens_{objective}_b"], rtol=1e-3, atol=1e-5)


@both
def test_scores_after_the_recorded_updates_are_the_recorded_ones(objective):
    for updates, expected in FITS["translator"][objective]["calibration_score_after_updates"].items():
        x = trained(objective, int(updates)).flatten().double()
        torch.testing.assert_close(problem(objective, "cal").loss(x), expected, **tolerances.RECORDED)
    x = trained(objective, SETTINGS["updates"]).flatten().double()
    expected = FITS["translator"][objective]["eval_nll"]
    torch.testing.assert_close(problem("nll", "eval").loss(x), expected, **tolerances.RECORDED)


@both
def test_our_minimum_fits_at_least_as_well_as_the_recorded_translator(objective):
    ours = problem(objective, "train")
    search = Descent(ours.loss_and_gradient, ours.identity())
    start = search.at(ours.identity())
    found = search.solve(1e-3, start, ours.curvature(start.x))
    theirs = torch.cat([TENSORS[f"lens_{objective}_A"], TENSORS[f"lens_{objective}_b"][:, None]], dim=1)
    assert found.converged
    assert ours.loss(found.point.x) <= ours.loss(theirs.flatten().double())
