import math

import numpy as np
import pytest
import torch
from scipy import stats

from looplab.tasks import capo
from looplab.tasks.base import IGNORED, to_torch
from looplab.tasks.capo import Biography, Capo, bits_per_parameter, ceiling

TASK = Capo(train=(200,))


def test_the_numbers_of_the_paper():
    assert capo.POSSIBLE_NAMES == 1.6e8
    assert math.log2(capo.POSSIBLE_VALUES) == pytest.approx(47.59, abs=0.01)


def test_knowing_everybody_by_heart_reaches_the_ceiling_and_knowing_nothing_gives_no_bit():
    n, p = 500, 10_000
    perfect = bits_per_parameter(people=n, name_nats=math.log(n), value_nats=0.0, parameters=p)
    assert perfect == ceiling(people=n, parameters=p)
    assert perfect == pytest.approx(n * (math.log2(1.6e8 / n) + math.log2(capo.POSSIBLE_VALUES)) / p)
    blind = {"name_nats": math.log(1.6e8), "value_nats": math.log(capo.POSSIBLE_VALUES)}
    assert bits_per_parameter(people=n, parameters=p, **blind) == pytest.approx(0)
    # R = [N log2(N0 / e^p1) + N log2(S0 / e^p2)] / P, as written
    wanted = (n * math.log2(1.6e8 / math.e**7) + n * math.log2(capo.POSSIBLE_VALUES / math.e**3)) / p
    assert bits_per_parameter(people=n, name_nats=7.0, value_nats=3.0, parameters=p) == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"people and parameters must be at least 1. Got 5 and 0"):
        bits_per_parameter(people=5, name_nats=1.0, value_nats=1.0, parameters=0)


def test_nats_are_summed_over_the_tokens_of_names_and_of_values():
    torch.manual_seed(0)
    rows = np.stack([TASK.example(TASK.sample(200, 0, index)).tokens for index in range(3)])
    logits = torch.randn(3, rows.shape[1], len(TASK.tokens), dtype=torch.float64)
    names, values = TASK.name_and_value_nats(logits, to_torch(rows))
    laws = logits.log_softmax(-1)
    for row in range(3):
        told = {"name": 0.0, "value": 0.0}
        for place in range(1, rows.shape[1]):
            kind = TASK.tokens[rows[row, place]]
            digits = kind.rstrip("0123456789")
            part = "name" if digits in capo.NAMES else "value" if digits in capo.VALUES or kind in ("he", "she") else ""
            if part:
                told[part] -= float(laws[row, place - 1, rows[row, place]])
        assert names[row] == pytest.approx(told["name"]) and values[row] == pytest.approx(told["value"])


def test_names_differ_and_people_do_not_depend_on_how_many_there_are():
    assert len({person.name for person in TASK.people}) == 200
    assert Capo(train=(50, 100)).people == TASK.people[:100]
    assert Capo(train=(100,), world=1).people != TASK.people[:100]


def test_a_taken_name_is_drawn_again(monkeypatch):
    monkeypatch.setattr(capo, "NAMES", {"first": 3, "middle": 3, "last": 3})
    assert len({person.name for person in Capo(train=(27,)).people}) == 27


def test_people_templates_and_values_are_uniform():
    drawn = [TASK.sample(20, 0, index) for index in range(600)]
    assert stats.chisquare(np.bincount([b.person for b in drawn], minlength=20)).pvalue > 1e-4
    for sentence in range(5):
        assert stats.chisquare(np.bincount([b.templates[sentence] for b in drawn], minlength=3)).pvalue > 1e-4
    people = Capo(train=(2000,)).people
    for number, size in enumerate(capo.VALUES.values()):
        counts = np.bincount([person.values[number] for person in people], minlength=size)
        assert len(counts) == size and stats.chisquare(counts).pvalue > 1e-4


def test_the_record_is_told_whatever_the_words():
    told = [TASK.show(Biography(3, (t, t, t, t, t))).splitlines() for t in range(3)]
    assert len({words for words, _ in told}) == 3 and len({answer for _, answer in told}) == 1
    example = TASK.example(Biography(3, (0, 1, 2, 0, 1)))
    labels, tokens = example.labels, example.tokens
    for place in range(len(tokens) - 1):
        assert labels[place] in (IGNORED, tokens[place + 1])
    scored = [TASK.tokens[token] for token in labels if token != IGNORED]
    assert [name.rstrip("0123456789") for name in scored] == [
        *("first", "middle", "last", scored[3], "month", "day", "year", "city", "university", "major", "employer")
    ]
    assert scored[3] in ("he", "she")
    assert TASK.canonical(Biography(3, (0, 0, 0, 0, 0))) == TASK.canonical(Biography(3, (1, 2, 0, 1, 2)))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"Capo.train must name numbers of people of at least 1"):
        Capo(train=(0,))
    with pytest.raises(ValueError, match=r"difficulty must be at most 200 for capo with train=\(200,\).* Got 201"):
        TASK.sample(201, 0, 0)
    tokens = TASK.example(Biography(0, (0, 0, 0, 0, 0))).tokens
    for place in range(len(tokens)):
        broken = tokens.copy()
        broken[place] = tokens[place] + 1 if 0 < place < 26 else 5
        with pytest.raises(ValueError, match=r"capo: tokens must be the biography of one of 200 people"):
            TASK.decode(broken)
