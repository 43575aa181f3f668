"""Geometry against its definitions, where tokens are few, features constant and rows zero; the choice of tokens."""

import collections
import dataclasses
import math

import numpy as np
import pytest
import torch

import reference.geometry as slow
import tolerances
from looplab.audit.documents import ScoredDocument, Split
from looplab.audit.geometry import Reference, bias_findings, chosen_tokens, geometry, read_state
from looplab.records import Level
from looplab.recurrence.spec import StateField


def vectors(tokens, dim, *, seed=0, mixing=0.5):
    """A full plan's vectors of falling spread, and another schedule's that partly follow them."""
    random = np.random.default_rng([tokens, dim, seed])
    full = random.normal(size=(tokens, dim)) * 0.95 ** np.arange(dim) @ random.normal(size=(dim, dim)) + 0.3
    other = mixing * full + random.normal(size=(tokens, dim)) * 0.4 - 0.1
    return other, full


def found(x, r, dtype=torch.float64):
    x, r = (torch.from_numpy(z).to(dtype) for z in (x, r))
    return geometry(x, Reference(r), site="hidden")


def close(number, expected, tolerance=tolerances.GEOMETRY):
    torch.testing.assert_close(float(number), float(expected), **tolerance)


# More tokens than 2 dim, between dim and 2 dim, dim, fewer than dim, more directions than 64, two tokens.
SIZES = [(60, 5), (30, 20), (16, 16), (12, 40), (90, 70), (2, 3)]


@pytest.mark.parametrize(("tokens", "dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_number_is_that_of_its_definition(tokens, dim, dtype):
    x, r = (torch.from_numpy(z).to(dtype).double().numpy() for z in vectors(tokens, dim))
    ours = found(x, r, dtype)
    cosine, zero_rows = slow.mean_cosine(x, r)
    norms = [np.mean([slow.norm(row) for row in z]) for z in (x, r)]
    assert (ours.site, ours.tokens, ours.zero_rows) == ("hidden", tokens, zero_rows)
    close(ours.norm, norms[0])
    close(ours.norm_ratio, norms[0] / norms[1])
    close(ours.cosine, cosine)
    close(ours.cka, slow.cka(x, r))
    close(ours.effective_rank, slow.effective_rank(x))
    close(ours.rank_ratio, slow.effective_rank(x) / slow.effective_rank(r))
    close(ours.anisotropy, slow.anisotropy(x))
    close(ours.frechet, slow.frechet(x, r), tolerances.FRECHET)


@pytest.mark.parametrize(("tokens", "dim"), SIZES)
def test_the_full_plan_is_at_no_distance_from_itself(tokens, dim):
    for seed in range(5):
        _, r = vectors(tokens, dim, seed=seed)
        ours = found(r, r)
        for number in (ours.norm_ratio, ours.cosine, ours.cka, ours.rank_ratio):
            close(number, 1)
        close(ours.frechet, 0)
        assert ours.frechet >= 0  # rounding below it is cut off


def test_a_shift_and_a_stretch_are_seen_by_the_frechet_distance_alone():
    # Means apart by 2 in a space of total variance 3 * 4: distance 4 / 12; a stretch by 3: (3 - 1)^2 whatever R is.
    corners = np.array([[i, j, k] for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)]) * math.sqrt(7 / 2)
    shifted = found(corners + np.array([2, 0, 0]), corners)
    close(shifted.frechet, 4 / 12)
    close(shifted.cka, 1)
    close(found(3 * corners, corners).frechet, 4)
    close(found(3 * corners, corners).effective_rank, 3)


def test_constant_features_have_no_spread_and_no_similarity():
    x, r = vectors(40, 6)
    constant = np.tile(0.1 * np.arange(1, 7), (40, 1))
    ours = found(constant, r)
    assert ours.cka is ours.effective_rank is ours.rank_ratio is None
    close(ours.anisotropy, 1)
    close(ours.frechet, slow.frechet(constant, r), tolerances.FRECHET)
    ours = found(x, constant)
    assert ours.cka is ours.rank_ratio is ours.frechet is None
    close(ours.effective_rank, slow.effective_rank(x))
    partly = r.copy()
    partly[:, 2:4] = 7.3
    close(found(x, partly).cka, slow.cka(x, partly))
    close(found(partly, r).effective_rank, slow.effective_rank(partly))
    close(found(x, partly).frechet, slow.frechet(x, partly), tolerances.FRECHET)


def test_directions_in_which_the_full_plan_does_not_move_are_left_out_where_a_choice_among_them_would_be_arbitrary():
    # 100 dimensions, 80 tokens, R in a plane: q would be 64, of which 62 could be any directions.
    random = np.random.default_rng(3)
    plane = np.linalg.qr(random.normal(size=(100, 2)))[0]
    r = random.normal(size=(80, 2)) @ plane.T
    x = random.normal(size=(80, 100))
    close(found(x, r).frechet, slow.frechet(x @ plane, r @ plane), tolerances.FRECHET)


def test_one_token_has_a_norm_and_a_cosine_and_nothing_else():
    x, r = vectors(1, 4)
    ours = found(x, r)
    close(ours.cosine, slow.cosine(x[0], r[0]))
    close(ours.norm_ratio, slow.norm(x[0]) / slow.norm(r[0]))
    assert ours.cka is ours.effective_rank is ours.rank_ratio is ours.anisotropy is ours.frechet is None


def test_zero_rows_are_left_out_of_cosines_and_counted():
    x, r = vectors(30, 5)
    x[3] = 0
    x[4] *= 1e-14
    r[7] = 0
    ours = found(x, r)
    cosine, zero_rows = slow.mean_cosine(x, r)
    assert ours.zero_rows == zero_rows == 3
    close(ours.cosine, cosine)
    close(ours.anisotropy, slow.anisotropy(x))
    close(ours.cka, slow.cka(x, r))


def test_a_full_plan_of_zeros_is_compared_with_nothing():
    x, _ = vectors(10, 3)
    ours = found(x, np.zeros((10, 3)))
    assert ours.zero_rows == 10
    assert ours.norm_ratio is ours.cosine is ours.cka is ours.rank_ratio is ours.frechet is None
    assert found(np.zeros((10, 3)), x).anisotropy is None


def test_large_offsets_and_scales_do_not_cost_digits():
    x, r = vectors(40, 6)
    ours, moved = found(x, r), found(1e6 * (x + 1e3), 1e6 * (r + 1e3))
    for name in ("cka", "effective_rank", "frechet"):
        assert getattr(moved, name) == pytest.approx(getattr(ours, name), rel=1e-8)


def test_other_tokens_than_those_of_the_reference_are_refused():
    x, r = (torch.from_numpy(z) for z in vectors(8, 3))
    with pytest.raises(ValueError, match=r"geometry: vectors must be of the tokens of the reference, \(8, 3\). Got"):
        geometry(x[:7], Reference(r), site="hidden")
    with pytest.raises(ValueError, match=r"Reference: vectors must hold at least one token. Got 0"):
        Reference(r[:0])


def document(i, length=30, first=2):
    tokens = np.arange(length, dtype=np.int32)
    return ScoredDocument(
        key="one group", content_key=f"{i:x}", tokens=tokens, first=first, text_bytes=0, text="", line=i, cut=False
    )


def names(split, chosen):
    """(document, position) of the chosen tokens."""
    places = torch.nonzero(chosen)[:, 0]
    owners, positions = split.owners[places].tolist(), split.positions[places].tolist()
    return {(split.documents[o].content_key, p) for o, p in zip(owners, positions, strict=True)}


def test_tokens_are_chosen_whatever_the_order_of_documents_and_smaller_choices_lie_in_larger_ones():
    documents = tuple(document(i, 10 + i, 1 + i % 3) for i in range(12))
    split, turned = Split(documents), Split(documents[::-1])
    chosen = chosen_tokens(split, 40)
    assert int(chosen.sum()) == 40
    assert names(split, chosen) == names(turned, chosen_tokens(turned, 40))
    assert names(split, chosen_tokens(split, 15)) < names(split, chosen)
    assert len({key for key, _ in names(split, chosen)}) > 6  # not the leading documents
    assert chosen_tokens(split, split.tokens).all()
    assert chosen_tokens(split).all()


def test_the_state_is_what_the_readout_reads_of_it():
    @dataclasses.dataclass
    class State:
        answer: torch.Tensor
        thought: torch.Tensor
        score: torch.Tensor
        memory: torch.Tensor

    fields = {
        "answer": StateField(width=3),
        "thought": StateField(width=2, read_by_coda=False),
        "score": StateField(width=1, per="row"),
        "memory": StateField(width=4),
    }
    state = State(torch.ones(2, 5, 3), torch.zeros(2, 5, 2), torch.zeros(2, 1), 2 * torch.ones(2, 5, 4))
    read = read_state(state, fields)
    assert read.shape == (2, 5, 7)
    assert read[0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2]
    alone = torch.randn(2, 5, 3)
    assert torch.equal(read_state(alone, {"state": StateField(width=3)}), alone)


def test_few_tokens_per_dimension_are_said_to_bias_cka():
    assert bias_findings(32, 8, domain="math", site="hidden") == ()
    (finding,) = bias_findings(31, 8, domain="math", site="state")
    assert (finding.kind, finding.level, finding.value, finding.threshold) == ("audit.cka_biased", Level.INFO, 31, 32)
    assert finding.where == {"domain": "math", "site": "state"}
    assert "Score at least 32 tokens" in finding.remedy
    assert "Compare schedules" in bias_findings(4096, 5280, domain="math", site="hidden")[0].remedy


def test_a_state_of_several_vectors_per_token_is_read_side_by_side():
    fields = {"blocks": StateField(width=6), "flag": StateField(width=1, read_by_coda=False)}
    State = collections.namedtuple("State", "blocks flag")
    state = State(torch.arange(24.0).reshape(2, 2, 2, 3), torch.zeros(2, 2, 1))
    assert read_state(state, fields).shape == (2, 2, 6)
    assert read_state(state, fields)[1, 0].tolist() == list(range(12, 18))
