import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.engine.request import SamplingParams
from looplab.engine.sampling import Draw, adjusted, draw, kept, log_probs, read, told, uniform
from reference import sampling as twin
from tolerances import EXACT, TWIN

VOCAB = 10
LOGITS = [0.3, -1.2, 2.0, 2.0, 0.0, -3.0, 1.1, 0.7, -0.4, 1.9]
FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 3},
    "top_k of equals": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 0.01},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.2},
}


def chi_square_bound(freedom):
    """What a chi-square variable of so many degrees of freedom exceeds with probability 1e-4 (Wilson and Hilferty)."""
    z = 3.719
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_exact_probabilities(name):
    options = {"temperature": 1.0, **FILTERS[name]}
    exact = twin.law(LOGITS, **options)
    count = 4000
    params = SamplingParams(**options)
    logits = torch.tensor(LOGITS).expand(count, -1)
    found = Counter(draw(logits, [Draw(params, 11, 0, index) for index in range(count)]).tolist())
    assert all(exact[token] > 0 for token in found)
    cells = [token for token, p in enumerate(exact) if count * p >= 5]  # where the statistic has its law
    assert set(cells) <= set(found)
    statistic = sum((found[token] - count * exact[token]) ** 2 / (count * exact[token]) for token in cells)
    assert len(cells) == 1 or statistic < chi_square_bound(len(cells) - 1)


number = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0])
row = st.fixed_dictionaries(
    {
        "logits": st.lists(number, min_size=VOCAB, max_size=VOCAB),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 10, 50]),
        "top_p": st.sampled_from([0.03, 0.51, 0.93, 1.0]),
        "min_p": st.sampled_from([0.0, 0.07, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.3]),
        "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), number), max_size=3).map(tuple),
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        "output": st.lists(st.integers(0, VOCAB - 1), max_size=4),
        "min_tokens": st.integers(0, 5),
        "ends": st.sampled_from([(), (2,), (0, 9)]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 3),
    }
)


@settings(max_examples=60)
@given(st.lists(row, min_size=1, max_size=5))
def test_rows_of_any_mixture_draw_as_their_slow_twins_do_alone(rows):
    fields = set(SamplingParams.__dataclass_fields__)
    wants = [
        Draw(
            SamplingParams(**{name: value for name, value in r.items() if name in fields and name != "seed"}),
            r["seed"],
            r["choice"],
            len(r["output"]),
            r["prompt"] + r["output"],
            len(r["prompt"]),
            r["ends"],
        )
        for r in rows
    ]
    logits = torch.tensor([r["logits"] for r in rows], dtype=torch.float64)
    before = logits.clone()
    tokens = draw(logits, wants).tolist()
    assert torch.equal(logits, before)
    for r, token, x in zip(rows, tokens, adjusted(logits, wants).tolist(), strict=True):
        expected = twin.adjusted(
            r["logits"],
            bias=r["logit_bias"],
            repetition=r["repetition_penalty"],
            presence=r["presence_penalty"],
            frequency=r["frequency_penalty"],
            prompt=r["prompt"],
            output=r["output"],
            forbidden=r["ends"] if len(r["output"]) < r["min_tokens"] else (),
        )
        torch.testing.assert_close(torch.tensor(x), torch.tensor(expected), **TWIN)
        options = {name: r[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        p = twin.law(x, **options)
        assert token == twin.draw(p, twin.uniform(r["seed"], r["choice"], len(r["output"])))
        if r["temperature"]:
            mass = kept(torch.tensor([x], dtype=torch.float64), [SamplingParams(**options)])[0]
            torch.testing.assert_close(mass / mass.sum(), torch.tensor(p, dtype=torch.float64), **TWIN)


def test_the_number_behind_a_draw_depends_on_seed_choice_and_index_alone():
    numbers = {uniform(seed, choice, index) for seed in (-1, 0, 5) for choice in (0, 1) for index in range(50)}
    assert len(numbers) == 300
    assert all(0 <= u < 1 for u in numbers)
    assert 0.4 < sum(numbers) / 300 < 0.6
    assert uniform(2**64 - 1, 0, 0) == uniform(-1, 0, 0)


def test_the_likeliest_of_equals_has_the_lowest_id():
    assert draw(torch.tensor([LOGITS]), [Draw(SamplingParams(temperature=0.0), 0, 0, 0)]).tolist() == [2]


def test_a_top_k_of_equals_keeps_exactly_k():
    mass = kept(torch.zeros(1, VOCAB), [SamplingParams(top_k=4)])
    assert mass[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_a_whole_share_keeps_the_smallest_masses_whatever_the_neighbours_keep():
    rows = torch.tensor([[0.0, -50.0, -60.0], [0.0, -1.0, -2.0]])
    alone = kept(rows[:1], [SamplingParams()])
    assert torch.equal(kept(rows, [SamplingParams(), SamplingParams(top_p=0.5)])[:1], alone)
    assert bool((alone > 0).all())


def test_half_precision_logits_are_changed_in_float32():
    logits = torch.full((1, 2), 8.0, dtype=torch.bfloat16)  # whose neighbours are 1 / 16 away
    want = Draw(SamplingParams(temperature=0.0, logit_bias=((1, 0.01),)), 0, 0, 0)
    assert draw(logits, [want]).tolist() == [1]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_alternatives_of_equals_are_the_lowest_ids_however_many_the_neighbours_ask_for(most):
    logits = torch.zeros(2, 300)
    logits[0, 200] = logits[0, 250] = 1.0
    found = told(read(log_probs(logits), torch.tensor([7, 7]), most), [7, 7], [1, most])
    assert [token for token, _ in found[0].top] == [200]
    assert [token for token, _ in found[1].top] == list(range(most))


def test_logprobs_are_those_of_unmodified_logits():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    law = log_probs(logits)
    tokens = [2, 0]
    found = told(read(law, torch.tensor(tokens), 3), tokens, [3, 1])
    expected = torch.tensor(LOGITS).log_softmax(-1)
    assert found[0].logprob == float(expected[2]) == found[0].top[0][1]
    assert found[0].top == ((2, float(expected[2])), (3, float(expected[3])), (9, float(expected[9])))
    assert found[1].logprob == found[1].top[0][1] if found[1].top[0][0] == 0 else True
    assert len(found[1].top) == 1
    assert told(read(law, torch.tensor(tokens), 0), tokens, [None, 0])[0] is None
    torch.testing.assert_close(law.exp().sum(-1), torch.ones(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(law[0], expected, **EXACT)
