import numpy as np
import pytest

from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.control import compare_dense, dense_depths, gaps_per_byte
from looplab.intervals import document_draws

CONFIG = AuditConfig(replicates=1000)
DOCUMENTS = 30


def losses(gaps, shares, *, documents=DOCUMENTS, num_bytes=12_000, tokens=100.0, seed=0):
    """prefix(k) with a gap to full in nats per token, of which the affine probe removes a share, net."""
    count = np.full(documents, tokens)
    noise = np.random.default_rng(seed).normal(size=documents) * 0.05
    tables = {"full": ScheduleSums(raw=2 * count, fixed={"affine": 2 * count})}
    for (k, gap), share in zip(gaps.items(), shares, strict=True):
        raw = (2 + gap * (1 + noise)) * count
        tables[f"prefix({k})"] = ScheduleSums(raw=raw, fixed={"affine": raw - (share + noise) * gap * count})
    draws = document_draws(documents, CONFIG.replicates, seed=0, domain="text", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=count, num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("layers", "depths"),
    [(6, (2, 3, 5)), (10, (3, 5, 8, 9)), (24, (6, 12, 18, 21, 22)), (28, (7, 14, 21, 24, 26)), (2, (1,)), (1, ())],
)
def test_dense_depths_round_half_up_and_drop_the_full_model(layers, depths):
    assert dense_depths(layers) == depths


def test_gaps_are_divided_by_the_bytes_of_the_text():
    found = gaps_per_byte(losses({1: 0.6}, [0.1]), grid=(1, 4), units=4, reasons={}, config=CONFIG)
    assert list(found) == ["prefix(1)"]
    nats = losses({1: 0.6}, [0.1]).points["raw", "prefix(1)"] - 2
    assert found["prefix(1)"].value == pytest.approx(nats * 3000 / 12_000)
    assert found["prefix(1)"].low < found["prefix(1)"].value < found["prefix(1)"].high


def test_the_size_of_the_text_is_needed():
    with pytest.raises(ValueError, match="num_bytes above 0"):
        gaps_per_byte(losses({1: 0.6}, [0.1], num_bytes=0), grid=(1,), units=4, reasons={}, config=CONFIG)


@pytest.mark.parametrize(("looped_share", "word"), [(0.5, "supported"), (0.2, "not supported"), (0.1, "not supported")])
def test_the_claim_is_decided_at_the_nearest_gap(looped_share, word):
    looped = losses({1: 1.0}, [looped_share], tokens=50.0, num_bytes=10_000, seed=1)
    dense = losses({2: 2.0, 5: 0.6}, [0.9, 0.2])
    smallest, nearest = compare_dense(looped, dense, looped_grid=(1, 2), dense_grid=(2, 5), config=CONFIG)
    assert (smallest.at, smallest.dense_k) == ("smallest k", 2)
    assert (nearest.at, nearest.dense_k) == ("nearest gap", 5)
    assert smallest.difference.high < 0
    assert smallest.word == nearest.word == word


def test_the_nearest_gap_counts_bytes_not_tokens():
    looped = losses({1: 0.6}, [0.5], tokens=50.0, num_bytes=3000)
    dense = losses({2: 1.2, 5: 0.6}, [0.3, 0.2])
    _, nearest = compare_dense(looped, dense, looped_grid=(1,), dense_grid=(2, 5), config=CONFIG)
    assert nearest.dense_k == 2
    assert nearest.looped_gap_per_byte == pytest.approx(0.3, rel=0.05)
    assert nearest.dense_gap_per_byte == pytest.approx(0.3, rel=0.05)
    assert nearest.difference.value == pytest.approx(0.2, abs=0.01)
    assert nearest.word == "supported"


def test_the_difference_is_paired_over_documents():
    same = losses({1: 1.0}, [0.3])
    other = losses({1: 1.0}, [0.3])
    _, nearest = compare_dense(same, other, looped_grid=(1,), dense_grid=(1,), config=CONFIG)
    assert (nearest.difference.low, nearest.difference.high) == (0.0, 0.0)
    assert nearest.word == "not supported"


def test_a_small_gap_leaves_the_claim_unmeasured():
    _, nearest = compare_dense(
        losses({1: 0.005}, [0.3]), losses({1: 0.005}, [0.3]), looped_grid=(1,), dense_grid=(1,), config=CONFIG
    )
    assert nearest.difference is None
    assert nearest.word == "not measured"


def test_other_documents_are_refused():
    with pytest.raises(ValueError, match="same documents. Got 30 and 20"):
        compare_dense(
            losses({1: 1.0}, [0.3]),
            losses({1: 1.0}, [0.3], documents=20),
            looped_grid=(1,),
            dense_grid=(1,),
            config=CONFIG,
        )
