import pytest

from looplab.engine.bound import (
    LaunchCost,
    Work,
    adjusted_bound,
    check_rule,
    exact_bound,
    fit_launch,
    realised,
    rule_bound,
    speedup_bound,
    work_of,
)
from looplab.nn.cost import CostSpec, Group

OURO, HUGINN = Work(outside=0.082, blocks=(1.0,)), Work(outside=1.177, blocks=(1.0,))


def layer(dim, hidden):
    return 4 * dim * dim + 3 * dim * hidden


def ouro():
    """Ouro-1.4B: 24 layers of width 2048, looped; a head of 49,152 rows."""
    block = Group(matmul=24 * layer(2048, 5632), layers=24, attention_width=24 * 2048)
    return CostSpec(prelude=Group(), blocks=(block,), coda=Group(), head=Group(matmul=49_152 * 2048))


def huginn():
    """Huginn: 2 + 4 + 2 layers of width 5280, a concat injection, a head of 65,536 rows."""
    two = 2 * layer(5280, 17_920)
    core = Group(matmul=2 * two + 2 * 5280 * 5280, layers=4)
    return CostSpec(prelude=Group(matmul=two), blocks=(core,), coda=Group(matmul=two), head=Group(matmul=65_536 * 5280))


def test_published_models_have_the_ratios_of_the_check_values():
    assert work_of(ouro()).ratio == pytest.approx(0.082, abs=5e-4)
    assert work_of(huginn()).ratio == pytest.approx(1.177, abs=5e-4)


@pytest.mark.parametrize(
    ("work", "steps", "depth", "bound"),
    [
        (OURO, 4, 2, 1.96),
        (OURO, 4, 2.5, 1.58),
        (OURO, 4, 3, 1.32),
        (HUGINN, 16, 6, 2.39),
        (HUGINN, 16, 8, 1.87),
        (HUGINN, 16, 10, 1.54),
    ],
)
def test_the_bound_has_its_check_values(work, steps, depth, bound):
    assert speedup_bound(work, [steps], [depth]) == pytest.approx(bound, abs=0.005)


def test_several_blocks_count_by_themselves():
    work = Work(outside=2.0, blocks=(1.0, 3.0))
    assert speedup_bound(work, [4, 2], [2, 2]) == (2 + 4 + 6) / (2 + 2 + 6)
    assert work.ratio == 0.5


def test_the_exact_bound_counts_attention_at_true_lengths():
    cost = CostSpec(
        prelude=Group(matmul=5),
        blocks=(Group(matmul=10, attention_width=3),),
        coda=Group(),
        head=Group(matmul=7),
    )
    # One token after 9 others sees 10 keys: 4 * 3 * 10 per step.
    outside, step = 2 * 12, [2 * 10 + 4 * 3 * seen for seen in (10, 11)]
    expected = (2 * outside + 4 * sum(step)) / (2 * outside + 1 * step[0] + 4 * step[1])
    assert exact_bound(cost, [4], [(9, [1]), (10, [4])]) == pytest.approx(expected, rel=1e-12)
    assert exact_bound(cost, [4], [(9, [4])]) == 1.0
    flat = CostSpec(prelude=Group(), blocks=(Group(matmul=10),), coda=Group(), head=Group(matmul=1))
    assert exact_bound(flat, [4], [(9, [1]), (99, [3])]) == pytest.approx(speedup_bound(work_of(flat), [4], [2]))


def test_the_adjusted_bound_leaves_the_prompts_as_they_are():
    assert adjusted_bound(2.0, prefill_seconds=0.0, decode_seconds=3.0) == 2.0
    assert adjusted_bound(2.0, prefill_seconds=1.0, decode_seconds=2.0) == 3 / 2
    assert adjusted_bound(1.0, prefill_seconds=5.0, decode_seconds=2.0) == 1.0


def test_rules_that_read_logits_pay_a_readout_per_step():
    ouro = rule_bound(Work(outside=0.08, blocks=(1.0,)), [4], [2], reads_logits=True)
    huginn = rule_bound(Work(outside=1.18, blocks=(1.0,)), [16], [8], reads_logits=True)
    assert (ouro, huginn) == (pytest.approx(1.89, abs=0.005), pytest.approx(0.985, abs=0.005))
    assert rule_bound(OURO, [4], [2], reads_logits=False) == speedup_bound(OURO, [4], [2])


def test_a_costly_rule_is_refused_and_can_be_allowed():
    said = r"kl needs coda and head every step: bound 0.99x; start with --allow-costly-exit"
    with pytest.raises(ValueError, match=said):
        check_rule("kl", HUGINN, [16], reads_logits=True, allow_costly=False)
    assert check_rule("kl", HUGINN, [16], reads_logits=True, allow_costly=True) < 1
    assert check_rule("kl", OURO, [4], reads_logits=True, allow_costly=False) > 1.8
    assert check_rule("hazard", HUGINN, [16], reads_logits=False, allow_costly=False) == pytest.approx(1.87, abs=0.005)


def test_a_launch_cost_is_found_from_two_probes():
    cost = LaunchCost(per_row=0.5, rows=21.0)
    found = fit_launch((8, cost.seconds(8)), (32, cost.seconds(32)))
    assert (found.per_row, found.rows) == (pytest.approx(0.5), pytest.approx(21.0))
    assert cost.seconds(0) == 0.0
    flat = fit_launch((8, 3.0), (32, 2.5))
    assert flat.seconds(32) == pytest.approx(2.5) and flat.rows > 10_000
    proportional = fit_launch((8, 0.5), (16, 2.0))
    assert proportional.rows == 0.0


@pytest.mark.parametrize(
    ("ratio", "width", "share"),
    [(0.08, 8, 0.968), (0.08, 16, 0.974), (0.08, 32, 0.981), (0.11, 8, 0.957), (0.16, 16, 0.951), (0.16, 32, 0.965)],
)
def test_the_closed_form_gives_the_predicted_share(ratio, width, share):
    """With m = 1 a readout takes all that leave a full launch: W / d rows."""
    assert realised(ratio, 2.5, width=width, coda_rows=width / 2.5, rows=21) == pytest.approx(share, abs=0.005)


def test_full_readouts_lose_nothing():
    assert realised(1.2, 7.5, width=16, coda_rows=16, rows=21) == 1.0
    assert realised(1.2, 7.5, width=16, coda_rows=2, rows=0) == 1.0


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="depth must have one number per block, above 0 and at most 4. Got 5"):
        speedup_bound(OURO, [4], [5])
    with pytest.raises(ValueError, match="one number per block"):
        rule_bound(OURO, [4], [2, 2], reads_logits=True)
    with pytest.raises(ValueError, match="tokens must hold at least one"):
        exact_bound(ouro(), [4], [])
    with pytest.raises(ValueError, match="decode_seconds must be above 0"):
        adjusted_bound(2.0, prefill_seconds=1.0, decode_seconds=0.0)
    with pytest.raises(ValueError, match="probes must have rows 0 < few < many"):
        fit_launch((8, 1.0), (8, 2.0))
    with pytest.raises(ValueError, match="ratio, depth, width and coda_rows must be above 0"):
        realised(0.1, 2.5, width=8, coda_rows=0, rows=21)
    with pytest.raises(ValueError, match="per_row and rows must be at least 0"):
        LaunchCost(per_row=-1.0, rows=2.0)
