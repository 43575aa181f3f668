import math

import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.rope import (
    ALiBi,
    ALiBiModule,
    FallingBias,
    FallingBiasModule,
    Learned,
    Llama3,
    NoPE,
    Position,
    RelativeBias,
    RelativeBiasModule,
    Rope,
    check_unrotated,
)
from reference import attention as twin
from tolerances import BLOCKS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


LLAMA3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
POSITIONS = torch.tensor([[0, 1, 5, 40], [3, 700, 2, 65_000]])


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotation_equals_the_twin_pair_by_pair(pairing, scaling):
    rope = Rope(base=500.0, pairing=pairing, scaling=scaling)
    x = torch.randn(2, 3, 4, 10, dtype=torch.float64)
    y = rope.rotate(x, rope.tables(POSITIONS, 10, torch.float64))
    llama3 = None if scaling is None else (8.0, 1.0, 4.0, 64)
    for b in range(2):
        for h in range(3):
            for t in range(4):
                slow = twin.rotate(x[b, h, t], int(POSITIONS[b, t]), 500.0, pairing, llama3)
                torch.testing.assert_close(y[b, h, t], slow, **BLOCKS)


def test_llama3_scaling_has_pairs_of_all_three_kinds_here():
    """Otherwise the twin would have compared one branch only."""
    ratios = [
        twin.rope_frequency(500.0, i, 10, (8.0, 1.0, 4.0, 64)) / twin.rope_frequency(500.0, i, 10) for i in range(5)
    ]
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(1 / 8)
    assert any(1 / 8 < r < 1 for r in ratios)


def test_the_two_pairings_agree_after_a_permutation_of_channels_and_differ_without_it():
    half, inter = Rope(base=100.0), Rope(base=100.0, pairing="interleaved")
    x = torch.randn(2, 1, 4, 8, dtype=torch.float64)
    halves, inters = (rope.tables(POSITIONS, 8, torch.float64) for rope in (half, inter))
    order = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7
    torch.testing.assert_close(half.rotate(x, halves)[..., order], inter.rotate(x[..., order], inters), **BLOCKS)
    assert (half.rotate(x, halves) - inter.rotate(x, inters)).abs().max() > 0.1


def test_angles_are_float32_in_a_bfloat16_model():
    """bfloat16 has 8 bits: 1000 and 1001 would be the same position."""
    rope = Rope(base=1e4)
    x = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    y = rope.rotate(x, rope.tables(torch.tensor([[1000, 1001]]), 4, torch.float32))
    assert y.dtype == torch.bfloat16
    expected = [math.cos(p) - math.sin(p) for p in (1000, 1001)]
    assert y[0, 0, :, 0].float().tolist() == pytest.approx(expected, abs=0.01)


def test_equal_shifts_of_queries_and_keys_change_no_score():
    rope = Rope(base=100.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = []
    for shift in (0, 17):
        at = [rope.tables(torch.tensor([[p + shift]]), 8, torch.float64) for p in (9, 4)]
        scores.append((rope.rotate(q, at[0]) * rope.rotate(k, at[1])).sum())
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)  # angles are float32


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_alibi_slopes_equal_the_twin(heads):
    bias = ALiBiModule(ALiBi(), heads)(torch.tensor([[[0, 3]]]))
    assert bias[0, :, 0, 0].tolist() == [0] * heads
    assert bias[0, :, 0, 1].tolist() == pytest.approx([-3 * s for s in twin.alibi_slopes(heads)], rel=1e-6)


def test_relative_bias_reads_its_last_entry_past_the_table_and_ignores_the_sign():
    module = RelativeBiasModule(2, 3)
    module.table.data.copy_(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]))
    bias = module(torch.tensor([[[0, 1, -1, 2, 7]]]))
    assert bias[0, :, 0].tolist() == [[1, 2, 2, 3, 3], [10, 20, 20, 30, 30]]


def test_falling_bias_falls_past_the_table_so_that_all_far_positions_together_weigh_little():
    module = FallingBiasModule(2, FallingBias(max=3, slope=0.5))
    module.table.data.copy_(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]))
    bias = module(torch.tensor([[[0, 1, -1, 2, 3, 7]]]))
    assert bias[0, :, 0].tolist() == [[1, 2, 2, 3, 2.5, 0.5], [10, 20, 20, 30, 29.5, 27.5]]
    far = module(torch.arange(3, 4000)[None, None])[0, 0, 0].detach().double().exp().sum()
    assert float(far) == pytest.approx(math.e**3 / (math.e**0.5 - 1), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(base=0.0), r"Rope\.base must be positive\. Got 0"),
        (lambda: RelativeBias(max=0), r"RelativeBias\.max must be at least 1\. Got 0"),
        (lambda: FallingBias(max=0), r"FallingBias\.max must be at least 1\. Got 0"),
        (lambda: FallingBias(max=2, slope=0.0), r"FallingBias\.slope must be positive\. Got 0\.0\. Use RelativeBias"),
        (lambda: Learned(max=0), r"Learned\.max must be at least 1\. Got 0"),
        (
            lambda: Llama3(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_positions=64),
            r"Llama3\.low_freq_factor must be positive and below high_freq_factor\. Got 4\.0 and 1\.0",
        ),
    ],
)
def test_a_bad_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("pairing", r"Rope\.pairing must be 'half' or 'interleaved'\. Got 'both'"),
        ("order", r"Rope\.order must be 'before_norm' or 'after_norm'\. Got 'both'"),
    ],
)
def test_a_misspelt_choice_is_refused_where_types_are_not_checked(field, message):
    rope = Rope(base=1.0)
    object.__setattr__(rope, field, "both")
    with pytest.raises(ValueError, match=message):
        rope.__post_init__()


@pytest.mark.parametrize(
    "config",
    [
        Rope(base=1e4, pairing="interleaved", scaling=LLAMA3),
        NoPE(),
        ALiBi(),
        Learned(max=5),
        RelativeBias(max=5),
        FallingBias(max=5, slope=2.0),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_choice_survives_json(config):
    assert from_dict(Position, to_dict(config)) == config


def test_layers_without_rotation_must_be_stored_and_in_order():
    check_unrotated("C", (), NoPE(), 3)
    check_unrotated("C", (0, 2), Rope(base=1e4), 3)
    for layers in ((2, 0), (0, 0), (3,), (-1,)):
        with pytest.raises(ValueError, match=r"C.unrotated_layers must name stored layers 0\.\.2 in order"):
            check_unrotated("C", layers, Rope(base=1e4), 3)
    with pytest.raises(ValueError, match=r"C.unrotated_layers must be \(\) without Rope. Got \(1,\)"):
        check_unrotated("C", (1,), NoPE(), 3)
