import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.nn.cost import KV_SLOTS, CostSpec, Group, attention_pairs

BF16 = 2


def stack(layers, dim, *, hidden, kv=None, extra=0):
    """`layers` layers of full attention and a gated feed-forward."""
    keys = dim if kv is None else kv
    each = 2 * dim * dim + 2 * dim * keys + 3 * dim * hidden
    return Group(matmul=layers * each + extra, attention_width=layers * dim, layers=layers, kv_width=layers * 2 * keys)


def huginn():
    """3.5 B: 2 + 4 + 2 layers of width 5280; the core reads [state ; context]. arXiv:2502.05171."""
    ends, adapter = stack(2, 5280, hidden=17920), 2 * 5280 * 5280
    core = stack(4, 5280, hidden=17920, extra=adapter)
    return CostSpec(prelude=ends, blocks=(core,), coda=ends, head=Group(matmul=65536 * 5280))


def ouro(layers):
    """Everything loops; width 2048. arXiv:2510.25741."""
    core = stack(layers, 2048, hidden=5632)
    return CostSpec(prelude=Group(), blocks=(core,), coda=Group(), head=Group(matmul=49152 * 2048))


def parcae():
    """140 M: 2 + 2 + 2 layers of width 768. arXiv:2604.12946."""
    part = stack(2, 768, hidden=3072)
    return CostSpec(prelude=part, blocks=(part,), coda=part, head=Group())


@pytest.mark.parametrize(
    ("spec", "rule", "steps", "published"),
    [
        (huginn(), "DepthIndexed", 32, 2_787_840),
        (huginn(), "Single", 32, 168_960),
        (ouro(24), "DepthIndexed", 4, 786_432),
        (ouro(48), "DepthIndexed", 4, 1_572_864),
        (parcae(), "DepthIndexed", 8, 61_440),
    ],
    ids=["huginn", "huginn-single", "ouro-1.4b", "ouro-2.6b", "parcae-140m"],
)
def test_key_value_bytes_per_token_of_published_models(spec, rule, steps, published):
    assert spec.kv_bytes_per_token(rule, {0: steps}, itemsize=BF16) == published


@pytest.mark.parametrize(
    ("spec", "steps", "published", "outside"),
    [(huginn(), 32, 108_637_224_960, 1.177), (ouro(24), 4, 10_066_329_600, 0.0816)],
    ids=["huginn", "ouro-1.4b"],
)
def test_forward_matrix_flops_per_token_of_published_models(spec, steps, published, outside):
    attention = 4 * (spec.prelude.attention_width + spec.coda.attention_width + steps * spec.blocks[0].attention_width)
    assert spec.forward({0: steps}, tokens=1) - attention == published
    ratio = (spec.matmul_once + spec.head.matmul) / spec.matmul_rec
    assert ratio == pytest.approx(outside, rel=5e-4)


@given(st.integers(1, 40), st.data())
def test_training_flops_per_token_are_6_once_plus_2_forward_plus_4_backward_times_the_core(r_f, data):
    r_b = data.draw(st.integers(0, r_f))
    spec = CostSpec(
        prelude=Group(matmul=11), blocks=(Group(matmul=100), Group(matmul=1000)), coda=Group(matmul=13), head=Group()
    )
    total = spec.forward({0: r_f, 1: r_f}, tokens=1) + spec.backward({0: r_b, 1: r_b}, tokens=1)
    assert (spec.matmul_once, spec.matmul_rec) == (24, 1100)
    assert total == 6 * spec.matmul_once + (2 * r_f + 4 * r_b) * spec.matmul_rec


shapes = st.tuples(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 15))


@given(shapes)
def test_causal_pairs_are_those_one_can_point_at(shape):
    tokens, past, window = shape
    pointed = [
        (query, key)
        for query in range(past, past + tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    ]
    assert attention_pairs(tokens, past=past, window=window) == len(pointed)


@given(shapes)
def test_square_pairs_are_every_query_with_every_key(shape):
    tokens, past, window = shape
    assert attention_pairs(tokens, past=past, pairs="square", window=window) == tokens * (tokens + past)


@given(st.integers(1, 20), st.integers(1, 20))
def test_chunks_of_a_sequence_cost_what_it_costs_at_once(first, second):
    group = Group(matmul=7, attention_width=5)
    whole = group.forward(tokens=first + second)
    assert group.forward(tokens=first) + group.forward(tokens=second, past=first) == whole


def test_a_group_counts_tokens_rows_and_pairs():
    group = Group(matmul=7, matmul_per_row=11, attention_width=5)
    assert group.forward(tokens=3, rows=2) == 2 * (2 * 7 * 3 + 2 * 11 + 4 * 5 * 6)
    assert group.forward(tokens=3, rows=2, pairs="square") == 2 * (2 * 7 * 3 + 2 * 11 + 4 * 5 * 9)
    windowed = Group(attention_width=5, window=2)
    assert windowed.forward(tokens=3) == 4 * 5 * 5
    assert windowed.forward(tokens=3, pairs="square") == 4 * 5 * 9


def test_positions_of_the_models_own_run_along_but_are_not_scored():
    group = Group(matmul=7, matmul_per_row=3, attention_width=5, prefix=2)
    assert group.forward(tokens=3, rows=4, pairs="square") == 4 * (2 * 7 * 5 + 2 * 3 + 4 * 5 * 25)
    spec = CostSpec(prelude=Group(), blocks=(group,), coda=Group(), head=Group(matmul=11))
    assert spec.forward({0: 2}, tokens=3) == 2 * group.forward(tokens=3) + 2 * 11 * 3


def test_a_pass_counts_every_group_and_scores_only_what_is_asked_for():
    spec = CostSpec(
        prelude=Group(matmul=1), blocks=(Group(matmul=10), Group(matmul=100)), coda=Group(matmul=1000),
        head=Group(matmul=10000),
    )  # fmt: skip
    assert spec.forward({0: 2, 1: 3}, tokens=4) == 2 * 4 * (1 + 20 + 300 + 1000 + 10000)
    assert spec.forward({0: 2}, tokens=4, scored=1, rows=3) == 3 * 2 * (4 * (1 + 20 + 1000) + 10000)
    assert spec.backward({1: 1}, tokens=4, scored=0) == 2 * 2 * 4 * (1 + 100 + 1000)


@pytest.mark.parametrize(
    ("rule", "size", "slots"),
    [
        ("DepthIndexed", 0, 8),
        ("Single", 0, 1),
        ("First", 0, 1),
        ("Average", 0, 1),
        ("Modulo", 4, 4),
        ("Modulo", 16, 8),
        ("Anchor", 3, 4),
        ("Anchor", 8, 8),
    ],
)
def test_slots_of_8_iterations(rule, size, slots):
    assert KV_SLOTS[rule](8, size) == slots
    spec = CostSpec(prelude=Group(kv_width=3), blocks=(Group(kv_width=5),) * 2, coda=Group(kv_width=7), head=Group())
    assert spec.kv_bytes_per_token(rule, {0: 8, 1: 8}, itemsize=4, size=size) == 4 * (3 + 2 * 5 * slots + 7)


def test_every_rule_has_its_slots():
    assert set(KV_SLOTS) == {"DepthIndexed", "Single", "First", "Average", "Modulo", "Anchor"}


def test_costs_need_no_torch():
    script = "import sys, looplab.nn.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
