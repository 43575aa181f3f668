"""The card repeats the LoopSpec in words and counts."""

import dataclasses

import pytest

from looplab.audit.card import is_dense, model_card, trained_depth, trained_units
from looplab.audit.runner import Runner, weight_hash
from looplab.audit.schedules import full_plan
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth, Unknown
from looplab.recurrence.plan import Blocks, ModelLoop
from tiny import Mixing, TinyDense, tiny_spec


def card(model):
    return model_card(Runner(model), full_plan(model.spec), name="tiny", source="tiny", tokenizer="letters")


def test_the_card_counts_applications_and_units():
    made = card(Mixing())
    assert (made.applications, made.units, made.kmid, made.unit_applications) == (8, 8, 4, 1)
    assert made.dense is False
    assert made.parameters["total"] == made.parameters["core 0"] + made.parameters["core 1"]
    assert made.blocks == ("layer 0: reads state; writes state", "layer 1: reads state; writes state")
    assert (made.dtype, made.default_steps) == ("float32", "4, 4")


def test_the_card_carries_what_a_reader_must_know():
    model = Mixing()
    assert card(model).notes == ()
    model.notes = ("padding is masked",)
    assert card(model).notes == ("padding is masked",)


def test_a_model_without_a_repeated_block_is_dense():
    assert is_dense(full_plan(TinyDense(4).spec))
    assert not is_dense(full_plan(Mixing().spec))


@pytest.mark.parametrize(
    ("depth", "words", "units"),
    [
        (FixedDepth(num_steps=4), "fixed 4", (8, 8)),
        (PrefixDepth(law=UniformDepth(low=1, high=8)), "the first applications, uniform 1 to 8", (1, 8)),
        (UniformDepth(low=2, high=9), "uniform 2 to 9", (4, 8)),
        (Unknown(), "unknown", None),
    ],
)
def test_trained_depth_is_said_in_words_and_units(depth, words, units):
    spec = tiny_spec(Blocks(num_steps=(4, 4)), 2, 4, trained_depth=depth)
    assert trained_depth(depth).replace("..", ", ") == words
    assert trained_units(spec, full_plan(spec)) == units


def test_units_of_one_core_are_its_steps():
    spec = tiny_spec(ModelLoop(num_steps=6), 1, 4, trained_depth=UniformDepth(low=2, high=4))
    assert trained_units(spec, full_plan(spec)) == (2, 4)


def test_the_weight_hash_changes_with_one_weight_and_with_nothing_else():
    model = Mixing()
    before = weight_hash(model)
    assert weight_hash(Mixing()) == before
    model.index.data[0, 0, 0] += 1e-3
    assert weight_hash(model) != before
    assert dataclasses.replace(card(Mixing()), name="x").weight_hash == before
