import math

import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.linear import Init
from looplab.recurrence.state import standard_noise
from looplab.recurrence.state_init import STATE_INITS, FixedBuffer, FromEmbeds, Learned, Normal, StateInit, Unit, Zeros
from reference import recurrence as twin


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


INIT = Init(std=0.5)
ALL = [
    FromEmbeds(),
    Zeros(),
    Normal(std=0.3),
    Normal(std="like_init", cut=2.0),
    Learned(),
    FixedBuffer(std=0.5),
    Normal(std=0.3, cut=None),
    Unit(),
]
CUT_AT_3 = 0.98658
"""Standard deviation of a standard normal number truncated at 3."""


def built(config, state_dim=4, embed_dim=4, embed_scale=1.0):
    torch.manual_seed(0)
    return config.build(state_dim, embed_dim, embed_scale=embed_scale, init=INIT)


def embeds(rows=2, seq=3, dim=4, dtype=torch.float32):
    return torch.ones(rows, seq, dim, dtype=dtype)


def noise(items, positions, width):
    return standard_noise(7, items, positions, width)


def test_the_start_from_the_context_is_the_context():
    e = torch.randn(2, 3, 4)
    assert torch.equal(built(FromEmbeds())(e, None), e)


def test_zeros_have_the_width_of_the_state_and_the_type_of_the_context():
    s = built(Zeros(), state_dim=6)(embeds(dtype=torch.bfloat16), None)
    assert s.shape == (2, 3, 6)
    assert s.dtype == torch.bfloat16
    assert not s.any()


def test_truncated_noise_equals_the_inverse_distribution_function():
    z = torch.linspace(-5, 5, 24, dtype=torch.float64).view(2, 3, 4)
    s = built(Normal(std=0.3, cut=2.0), embed_scale=5.0)(embeds(dtype=torch.float64), z)
    expected = [1.5 * twin.truncated(x, 2.0) for x in z.flatten().tolist()]
    assert s.flatten().tolist() == pytest.approx(expected, abs=1e-6)  # the standard library's inverse is no better
    assert s.abs().max() <= 3.0


def test_the_spread_is_that_of_the_truncated_law_within_one_percent():
    positions = torch.arange(200).expand(4, -1)
    z = noise(range(4), positions, 100)
    s = built(Normal(std=0.3), state_dim=100)(embeds(4, 200, 100), z)
    assert s.std().item() == pytest.approx(0.3 * CUT_AT_3, rel=0.01)
    assert s.abs().max() <= 0.9
    huginn = built(Normal(std="like_init"), state_dim=100, embed_scale=10.0)(embeds(4, 200, 100), z)
    assert twin.like_init_std(100) * 10 == pytest.approx(0.6325, abs=1e-4)
    assert huginn.std().item() == pytest.approx(0.6325 * CUT_AT_3, rel=0.01)


def test_without_a_cut_the_start_is_the_scaled_noise_itself():
    z = torch.tensor([[[-40.0, 40.0, -9.0, 0.5]]])
    s = built(Normal(std=0.5, cut=None), embed_scale=3.0)(embeds(1, 1), z)
    assert s.tolist() == [[[-60.0, 60.0, -13.5, 0.75]]]


def test_a_unit_start_is_each_token_standardised():
    z = torch.randn(2, 3, 6, dtype=torch.float64) * 4 + 2
    s = built(Unit(), state_dim=6)(embeds(dtype=torch.float64), z)
    for token, noise in zip(s.flatten(0, 1).tolist(), z.flatten(0, 1).tolist(), strict=True):
        mean = sum(noise) / 6
        std = math.sqrt(sum((x - mean) ** 2 for x in noise) / 5)
        assert token == pytest.approx([(x - mean) / (std + 1e-8) for x in noise], rel=1e-12)


def test_extreme_noise_stays_finite_and_inside_the_cut():
    z = torch.tensor([[[-40.0, 40.0, -9.0, 9.0]]])
    s = built(Normal(std=1.0))(embeds(1, 1), z)
    assert s.tolist() == [[pytest.approx([-3, 3, -3, 3], abs=1e-3)]]


def test_the_same_item_in_another_row_batch_or_chunk_starts_alike():
    start = built(Normal(std=0.3))
    positions = torch.arange(6)
    together = start(embeds(3, 6), noise([11, 12, 13], positions.expand(3, -1), 4))
    other_row = start(embeds(2, 6), noise([13, 11], positions.expand(2, -1), 4))
    assert torch.equal(together[[2, 0]], other_row)
    chunk = start(embeds(1, 2), noise([12], positions[None, 3:5], 4))
    assert torch.equal(together[1:2, 3:5], chunk)
    assert not torch.equal(together[0], together[1])


def test_no_spread_equals_zeros_bit_for_bit_and_needs_no_noise():
    config = Normal(std=0.0)
    assert config.noise_width(4) == 0
    s = built(config)(embeds(), None)
    assert torch.equal(s.view(torch.int32), built(Zeros())(embeds(), None).view(torch.int32))


def test_only_a_random_start_asks_for_noise():
    assert [c.noise_width(8) for c in ALL] == [0, 0, 8, 8, 0, 0, 8, 8]


def test_a_trained_vector_is_a_parameter_and_a_fixed_one_a_buffer():
    learned, fixed = built(Learned()), built(FixedBuffer())
    assert [n for n, _ in learned.named_parameters()] == ["start"]
    assert not list(fixed.parameters())
    assert list(fixed.state_dict()) == ["start"]
    for module in (learned, fixed):
        s = module(embeds(), None)
        assert torch.equal(s[1, 2], module.start)
        assert s.shape == (2, 3, 4)
    learned(embeds(), None).sum().backward()
    assert learned.start.grad.tolist() == [6] * 4


def test_a_fixed_vector_has_the_asked_spread():
    drawn = built(FixedBuffer(std=0.5), state_dim=4000).start
    assert drawn.std().item() == pytest.approx(0.5 * 0.8796, rel=0.03)  # truncated at two standard deviations
    assert not built(FixedBuffer(std=0.0)).start.any()


def test_the_type_of_the_state_is_that_of_the_context():
    for config in ALL:
        module = built(config).bfloat16()
        z = torch.randn(2, 3, 4) if config.noise_width(4) else None
        assert module(embeds(dtype=torch.bfloat16), z).dtype == torch.bfloat16, config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normal(std=-1.0), r"Normal\.std must be at least 0 or 'like_init'\. Got -1"),
        (lambda: Normal(std=math.nan), r"Normal\.std must be at least 0 or 'like_init'\. Got nan"),
        (lambda: Normal(std=1.0, cut=0.0), r"Normal\.cut must be positive\. Got 0"),
        (lambda: FixedBuffer(std=-1.0), r"FixedBuffer\.std must be at least 0\. Got -1"),
        (lambda: built(FromEmbeds(), 4, 6), r"FromEmbeds needs equal widths\. Got state 4, embeds 6"),
    ],
)
def test_a_bad_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_choice_is_registered_and_survives_json():
    assert list(STATE_INITS) == ["fixed_buffer", "from_embeds", "learned", "normal", "unit", "zeros"]
    for config in ALL:
        assert from_dict(StateInit, to_dict(config)) == config
