"""Five-fold temperature over documents against the recorded one."""

import numpy as np
import pytest
import torch

from golden.dcp_llama import FITS, document_sums, head, scored
from looplab.audit.probes.scores import token_nll
from looplab.audit.probes.temperature import fit_temperature

EXPECTED = FITS["crossfit"]


def pooled(schedule):
    """Evaluation documents, then calibration documents."""
    first, second = scored("math", "eval", schedule), scored("math", "cal", schedule)
    documents = torch.cat([first.documents, second.documents + int(first.documents.max()) + 1])
    return torch.cat([first.hidden, second.hidden]), torch.cat([first.targets, second.targets]), documents


def test_folds_are_the_recorded_permutation():
    assert (np.random.default_rng(1).permutation(36) % 5).tolist() == EXPECTED["fold_of_document"]


def test_temperatures_and_shares_over_the_folds_are_the_recorded_ones():
    folds = torch.tensor(EXPECTED["fold_of_document"])
    raw, calibrated = {}, {}
    for schedule in ("prefix1", "full"):
        hidden, targets, documents = pooled(schedule)
        raw[schedule] = token_nll(hidden, head, targets)
        losses = np.zeros(len(targets))
        for fold, recorded in enumerate(EXPECTED["T_per_fold"][schedule]):
            held = folds[documents] == fold
            fit = fit_temperature([head(hidden[~held])], targets[~held])
            # Stricter: the recorded float32 search stops up to 3e-3 from the minimum.
            assert fit.temperature == pytest.approx(recorded, rel=3e-3)
            losses[held.numpy()] = token_nll(hidden[held], lambda h, b=fit.beta: b * head(h), targets[held])
        calibrated[schedule] = losses
    documents = pooled("full")[2]
    tokens = np.bincount(documents.numpy()).sum()

    def gap(losses):
        return (document_sums(losses["prefix1"], documents) - document_sums(losses["full"], documents)).sum() / tokens

    assert gap(raw) == pytest.approx(EXPECTED["raw_gap"], abs=1e-5)
    gain = gap(raw) - gap(calibrated)
    assert gain == pytest.approx(EXPECTED["calib_nats"], abs=2e-5)
    assert gain / gap(raw) == pytest.approx(EXPECTED["calib_share"], abs=1e-5)
