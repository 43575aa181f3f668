import pytest

from looplab.interop import builtin_names, load
from looplab.studies.base import STUDIES
from looplab.studies.claims import decide_claims
from report.sample import dense, single_core, two_blocks

QUOTES = {
    "dcp.1": "naive truncation substantially overestimates the value of recurrent depth",
    "dcp.2": "something like a factor of two",
    "dcp.3": "nearly half of the apparent performance gap",
    "dcp.4": "roughly one-quarter arises from readout miscalibration",
    "dcp.5": "contribute essentially zero",
    "dcp.6": "negative control",
    "dcp.7": "specific numbers will vary by architecture and task",
    "dcp.8": "strictly realizable only in depth-wise weight-sharing",
}
"""An id never changes its meaning."""


def planted(study):
    """Rows of four planted audits."""
    results = {
        "text-2x4-fixed": two_blocks(),
        "text-2x4-sampled": two_blocks(sampled=True),
        "text-core": single_core(),
        "text-dense": dense(),
    }
    arms = study.arms("cpu", 0)
    return [row for arm in arms for row in study.measure(arm, results[arm.name])]


def test_the_claims_are_those_of_the_golden_list():
    assert {claim.id: claim.quote for claim in STUDIES["dcp"].claims} == QUOTES
    for claim in STUDIES["dcp"].claims:
        assert claim.rule
        assert claim.guard
        assert claim.published


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_every_built_in_checkpoint_of_text_is_audited_alike(scale):
    arms = STUDIES["dcp"]().arms(scale, 0)
    of_text = [name for name in builtin_names() if load(name).tokenizer is not None and name != "demo"]
    assert sorted(arm.name for arm in arms) == of_text
    assert len({arm.audit for arm in arms}) == 1
    assert {arm.name: arm.control for arm in arms if arm.control is None} == {"text-dense": None}


def test_planted_audits_give_every_claim_its_rows_and_a_word():
    study = STUDIES["dcp"]()
    found = {result.claim.id: result for result in decide_claims(study.claims, planted(study), scale="cpu")}
    assert list(found) == list(QUOTES)
    assert found["dcp.8"].word == "supported"
    assert found["dcp.3"].word == "not supported"  # 35 % and less
    unknown = [part for part in found["dcp.3"].parts if part.value is None]
    assert [part.label for part in unknown] == ["text-core"]


def test_every_column_and_plot_has_its_rows():
    study = STUDIES["dcp"]()
    quantities = {row.quantity for row in planted(study)}
    assert set(study.columns) <= quantities
    assert {q for plot in study.plots for q in plot.quantities} <= quantities
