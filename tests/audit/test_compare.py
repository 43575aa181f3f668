"""Several checkpoints on the same documents: differences are paired, spreads are those of the shares."""

import statistics

import numpy as np
import pytest

import tolerances
from looplab.audit.compare import PER_BYTE, SHARE, compare, summary
from looplab.audit.config import AuditConfig
from looplab.audit.protocol import plan_audit
from looplab.data.documents import DataError
from looplab.journal import Journal
from tiny import LetterTokenizer, Planted, TinyDense, letters

CONFIG = AuditConfig(replicates=1000, grid=(1, 2), controls=(), probes=("temperature",))


def towards(share, index=0.1):
    return lambda state, truth, block, iteration: state + share * (1 + index * iteration) * (truth - state)


def audited(model, folder, documents=90, config=CONFIG):
    plan = plan_audit(model.eval(), letters(documents), config, tokenizer=LetterTokenizer())
    found = plan.measure(Journal(folder))
    return found, summary(found, found.result())


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    models = {
        "a": Planted(towards(0.3), steps=(2, 2)),
        "b": Planted(towards(0.4), steps=(2, 2)),
        "free": Planted(towards(0.4, index=0), steps=4, indexed=False),
        "dense": TinyDense(3),
    }
    return {name: audited(model, tmp_path_factory.mktemp(name)) for name, model in models.items()}


@pytest.fixture(scope="module")
def compared(audits):
    return compare({name: found for name, (_, found) in audits.items()}, "command")


def test_values_are_those_of_each_audit(audits, compared):
    domain = compared.domain("text")
    assert compared.models == ("a", "b", "free", "dense")
    assert domain.documents == audits["a"][1].result.domains[0].documents.evaluation
    assert domain.same_tokens
    for model in ("a", "b"):
        own = audits[model][1].result.domains[0]
        raw = own.decomposition()
        assert domain.quantity("application", SHARE).values[model] == raw.part("application").share
        per_byte = own.documents.evaluation_tokens / own.documents.evaluation_bytes
        gap = domain.quantity("gap", PER_BYTE).values[model]
        assert gap.value == pytest.approx(raw.gap.value * per_byte, rel=tolerances.BATCHED32["rtol"])
        net = next(gain for gain in own.gains if gain.k == 1)
        assert domain.quantity("net gain, temperature", SHARE).values[model] == net.share


def test_a_difference_is_formed_inside_each_replicate(audits, compared):
    """Against the replicates themselves; unpaired, its interval would be that of two independent models."""
    parts = {model: audits[model][0].measured["model", "text"].losses for model in ("a", "b")}
    scale = {m: losses.tokens / losses.num_bytes for m, losses in parts.items()}
    rows = {m: scale[m] * losses.replicates["raw", "full"] for m, losses in parts.items()}
    found = compared.domain("text").quantity("loss at full depth", PER_BYTE)
    difference = found.differences["b"]
    np.testing.assert_allclose(difference.plain_low, np.quantile(rows["b"] - rows["a"], 0.025), rtol=1e-12)
    independent = np.quantile(rows["b"] - np.roll(rows["a"], 1), [0.025, 0.975])
    assert difference.plain_high - difference.plain_low < 0.9 * (independent[1] - independent[0])
    assert found.baseline == "a"
    assert "a" not in found.differences


def test_a_model_against_itself_differs_by_exactly_nothing(audits):
    twice = compare({"a": audits["a"][1], "again": audits["a"][1]}, "")
    for quantity in twice.domain("text").quantities:
        if "again" in quantity.differences:
            difference = quantity.differences["again"]
            assert (difference.value, difference.low, difference.high) == (0, 0, 0)
            assert quantity.deviation == 0


def test_spread_is_over_models(compared):
    quantity = compared.domain("text").quantity("loss at full depth", PER_BYTE)
    points = [quantity.values[model].value for model in compared.models]
    assert (quantity.smallest, quantity.largest) == (min(points), max(points))
    assert quantity.deviation == pytest.approx(statistics.stdev(points))


def test_what_a_model_cannot_tell_apart_has_its_reason_and_no_number(compared):
    distinct = compared.domain("text").quantity("distinct", SHARE)
    assert "free" not in distinct.values
    assert distinct.missing["free"] == "not identifiable: the block has no iteration index"
    assert distinct.missing["dense"] == "not measured"
    assert "free" not in distinct.differences
    assert "not identifiable: the block has no iteration index" in str(compared)


def test_other_documents_are_refused(audits, tmp_path):
    _, other = audited(Planted(towards(0.3), steps=(2, 2)), tmp_path, documents=80)
    with pytest.raises(DataError, match="all models must score the same documents of text"):
        compare({"a": audits["a"][1], "other": other})


def test_other_lengths_are_refused_with_the_option_to_set(audits, tmp_path):
    _, other = audited(
        Planted(towards(0.3), steps=(2, 2)), tmp_path, config=AuditConfig(**{**vars(CONFIG), "max_tokens": 30})
    )
    with pytest.raises(DataError, match=r"Got 256 tokens of a document for a and 30 for other\. Pass --max-tokens 30"):
        compare({"a": audits["a"][1], "other": other})
