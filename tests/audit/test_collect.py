"""Parts put together are the measurement, and nothing is made up for a part that is missing."""

import numpy as np
import pytest

from looplab.audit.case import EVALUATION, MODEL
from looplab.audit.collect import collect
from looplab.audit.config import AuditConfig
from looplab.audit.protocol import plan_audit
from looplab.journal import Journal
from tiny import LetterTokenizer, Mixing, letters

NAME = (MODEL, "text")


def measured(folder, batch_tokens):
    config = AuditConfig(replicates=1000, grid=(1,), controls=(), probes=("temperature",))
    plan = plan_audit(Mixing().eval(), letters(60), config, tokenizer=LetterTokenizer(), batch_tokens=batch_tokens)
    return plan.measure(Journal(folder))


def test_losses_do_not_depend_on_how_documents_were_cut_into_shards(tmp_path):
    fine, coarse = measured(tmp_path / "fine", 100), measured(tmp_path / "coarse", 100_000)
    shards = [len(found.plan.cases[NAME].shards(EVALUATION)) for found in (fine, coarse)]
    assert shards[0] > shards[1] == 1
    for schedule, scores in fine.collected[NAME].scores.items():
        other = coarse.collected[NAME].scores[schedule]
        np.testing.assert_allclose(scores.losses["raw"], other.losses["raw"], rtol=1e-5)
        np.testing.assert_array_equal(scores.correct, other.correct)
        np.testing.assert_allclose(scores.samples["state"], other.samples["state"], rtol=1e-4, atol=1e-5)


def test_a_missing_part_is_an_error_and_no_zero(tmp_path):
    found = measured(tmp_path, 400)
    case = found.plan.cases[NAME]
    shard = list(case.shards(EVALUATION))[-1]
    found.journal.drop((*NAME, EVALUATION, shard, "prefix(1)"))
    with pytest.raises(KeyError):
        collect(found.journal, NAME, case)
