import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.audit.result import ControlComparison, Decomposition, Estimate, Part, ProbeGain
from looplab.audit.verdict import agreements, part_word, probe_word, verdict

FORBIDDEN = ("useless", "reasoning", "calibration share")


def estimate(low, high, value=None):
    middle = (low + high) / 2 if value is None else value
    return Estimate(value=middle, low=low, high=high, low90=low, high90=high, plain_low=low, plain_high=high)


NEGLIGIBLE = "negligible (equivalent to zero within 0.020 nats)"


@pytest.mark.parametrize(
    ("share", "nats", "equivalent", "word"),
    [
        ((0.5, 0.6), (0.5, 0.6), False, "dominant"),
        ((0.4999, 0.6), (0.5, 0.6), False, "substantial"),
        ((0.1, 0.6), (0.1, 0.6), False, "substantial"),
        ((0.0999, 0.6), (0.1, 0.6), False, "present"),
        ((1e-9, 0.2), (1e-9, 0.2), False, "present"),
        ((0.0, 0.2), (0.0, 0.2), False, "inconclusive"),
        ((-0.1, 0.2), (-0.1, 0.2), False, "inconclusive"),
        ((-0.1, 0.0), (-0.1, 0.0), False, "inconclusive"),
        ((-0.1, -1e-9), (-0.1, -1e-9), False, "harmful"),
        ((-0.01, 0.01), (-0.01, 0.01), True, NEGLIGIBLE),
        ((0.005, 0.01), (0.005, 0.01), True, NEGLIGIBLE + ", but not zero"),
        ((-0.01, -0.005), (-0.01, -0.005), True, NEGLIGIBLE + ", but not zero"),
    ],
)
def test_words_change_exactly_at_their_bounds(share, nats, equivalent, word):
    found = part_word(nats=estimate(*nats), share=estimate(*share), equivalent=equivalent, margin=0.02, reason=None)
    assert found == word


def test_without_a_share_nothing_is_concluded():
    assert part_word(nats=estimate(0.1, 0.2), share=None, equivalent=None, margin=0.02, reason=None) == "inconclusive"


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("not identifiable: only one kind of unit", "not identifiable (only one kind of unit)"),
        ("not measured: diverged at application 3", "not measured (diverged at application 3)"),
    ],
)
def test_a_reason_is_the_word(reason, word):
    assert part_word(nats=None, share=None, equivalent=None, margin=0.02, reason=reason) == word


@pytest.mark.parametrize(
    ("share", "word"),
    [
        (estimate(0.0501, 0.2), "present"),
        (estimate(0.05, 0.2), "inconclusive"),
        (estimate(-0.1, 0.05), "inconclusive"),
        (estimate(-0.1, 0.0499), "absent"),
        (None, "inconclusive (gap too small)"),
    ],
)
def test_probe_words_change_exactly_at_five_percent(share, word):
    assert probe_word(share) == word


def part(name, share=None, word="present", nats=None, reason=None):
    return Part(
        name=name,
        plus="",
        minus="",
        nats=nats,
        share=share,
        seed_deviation=None,
        equivalent=None,
        bitwise_equal=False,
        word=word,
        reason=reason,
    )


def decomposition(*parts, probe="raw"):
    return Decomposition(probe=probe, gap=estimate(0.9, 1.1), gap_measurable=True, margin=0.02, parts=parts)


def gain(probe, share, k=1, flattening=False):
    return ProbeGain(
        probe=probe,
        schedule=f"prefix({k})",
        k=k,
        gap=estimate(0.9, 1.1),
        gross=estimate(0.2, 0.3),
        gross_full=estimate(0.0, 0.1),
        net=estimate(0.15, 0.25),
        share=share,
        word=probe_word(share),
        flattening=flattening,
    )


PARTS = (
    part("application", estimate(0.33, 0.374, 0.352), "substantial", estimate(0.3, 0.4)),
    part("distinct", estimate(0.006, 0.009, 0.008), NEGLIGIBLE + ", but not zero", estimate(0.006, 0.009)),
    part("composition", estimate(0.6, 0.7, 0.64), "dominant", estimate(0.6, 0.7)),
)


def test_the_sentence_says_everything_once():
    found = verdict(
        "math",
        applications=8,
        decomposition=decomposition(*PARTS),
        gains=[gain("temperature", estimate(0.151, 0.18, 0.165)), gain("affine", estimate(0.3, 0.35, 0.325))],
    )
    assert found.sentence == (
        "On math, 8 applications instead of 1 lower the loss by 1.000 nats [0.900, 1.100]. "
        "Running more applications of the first unit: 35.2 % [33.0, 37.4], substantial; "
        "distinct iterations inside the first block: 0.8 % [0.6, 0.9], "
        "negligible (equivalent to zero within 0.020 nats), but not zero; "
        "later blocks: 64.0 % [60.0, 70.0], dominant. "
        "Refitting the readout (affine) removes 32.5 % [30.0, 35.0] of the gap, net of full depth."
    )
    assert found.best_probe == "affine"
    assert found.probe_words == {"temperature": "present", "affine": "present"}
    assert found.words["composition"] == "dominant"
    assert found.recurrence == "not measured"


def test_units_of_several_applications_are_counted_in_applications():
    """One cycle of a two-level model is what prefix(1) runs."""
    found = verdict("math", applications=32, first=8, decomposition=decomposition(*PARTS), gains=[])
    assert found.sentence.startswith("On math, 32 applications instead of 8 lower the loss by ")


def test_an_effect_without_any_difference_is_said_so():
    nothing = dataclasses.replace(part("application", nats=estimate(0.0, 0.0), word="inconclusive"), bitwise_equal=True)
    found = verdict("math", applications=4, decomposition=decomposition(nothing, *PARTS[1:]), gains=[])
    assert "Running more applications of the first unit: 0 (bitwise equal), inconclusive; " in found.sentence


def test_what_is_not_identifiable_has_no_number_in_the_sentence():
    words = [part(n, None, "not identifiable (only one kind of unit)", reason="x") for n in ("application", "distinct")]
    found = verdict("math", applications=4, decomposition=decomposition(*words, PARTS[2]), gains=[])
    clause = found.sentence.split(". ")[1]
    assert "Running more applications of the first unit: not identifiable (only one kind of unit);" in clause
    assert not re.search(r"\d", clause.split("later blocks")[0])
    assert found.sentence.endswith("Refitting the readout: not measured (no probe).")


def test_a_flattened_answer_is_named():
    best = gain("temperature", estimate(0.3, 0.5), flattening=True)
    found = verdict("math", applications=4, decomposition=decomposition(*PARTS), gains=[best])
    assert found.sentence.endswith("net of full depth, by flattening a wrong answer.")


def test_without_shares_the_probe_is_told_in_nats():
    found = verdict("math", applications=4, decomposition=decomposition(*PARTS), gains=[gain("affine", None)])
    assert found.sentence.endswith(
        "Refitting the readout (affine) removes 0.200 nats [0.150, 0.250], net of full depth."
    )
    assert found.probe_words == {"affine": "inconclusive (gap too small)"}


def test_a_gap_that_was_not_measured_is_told_so():
    found = verdict("math", applications=4, decomposition=None, gains=[], reason="diverged at application 1")
    assert found.sentence == "On math, the gap is not measured (diverged at application 1)."
    assert set(found.words.values()) == {"not measured (diverged at application 1)"}


def test_the_claim_about_recurrence_is_that_of_the_best_probe_at_the_nearest_gap():
    def comparison(probe, at, word):
        return ControlComparison(
            probe=probe,
            looped_k=1,
            dense_k=2,
            at=at,
            looped_gap_per_byte=0.1,
            dense_gap_per_byte=0.1,
            difference=None,
            word=word,
        )

    rows = [
        comparison("temperature", "nearest gap", "supported"),
        comparison("affine", "smallest k", "supported"),
        comparison("affine", "nearest gap", "not supported"),
    ]
    gains = [gain("temperature", estimate(0.1, 0.2)), gain("affine", estimate(0.3, 0.4))]
    found = verdict("math", applications=4, decomposition=decomposition(*PARTS), gains=gains, comparisons=rows)
    assert found.recurrence == "not supported"


def test_agreement_needs_the_same_word_in_every_domain():
    web = decomposition(PARTS[0], part("distinct", word="present"), part("composition", word="dominant"))
    found = {a.part: a.word for a in agreements({"math": (decomposition(*PARTS),), "web": (web,)})}
    assert found == {
        "application": "in every domain",
        "distinct": "differs by domain",
        "composition": "in every domain",
    }
    assert agreements({"math": (decomposition(*PARTS),)}) == ()


def test_agreement_ignores_the_margin_in_brackets():
    one = decomposition(part("distinct", word=NEGLIGIBLE))
    two = decomposition(part("distinct", word="negligible (equivalent to zero within 0.012 nats), but not zero"))
    (found,) = agreements({"math": (one,), "web": (two,)})
    assert found.word == "in every domain"
    (found,) = agreements({"math": (one,), "web": ()})
    assert found.word == "differs by domain"


shares = st.one_of(st.none(), st.tuples(st.floats(-2, 2), st.floats(0, 1)).map(lambda t: estimate(t[0], t[0] + t[1])))


@given(st.lists(shares, min_size=3, max_size=3), shares, st.booleans())
def test_forbidden_words_never_appear(values, probe, equivalent):
    parts = []
    for name, share in zip(("application", "distinct", "composition"), values, strict=True):
        nats = estimate(-0.1, 0.1)
        word = part_word(nats=nats, share=share, equivalent=equivalent, margin=0.02, reason=None)
        parts.append(part(name, share, word, nats))
    found = verdict("web", applications=8, decomposition=decomposition(*parts), gains=[gain("affine", probe)])
    assert not any(word in found.sentence for word in FORBIDDEN)
