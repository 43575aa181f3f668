"""What TRM and HRM share: prefix, ends, starts, and what they refuse."""

import dataclasses
import math
import re

import pytest
import torch

from contract.zoo import encode, run, tiny, tokens
from looplab.models.base import PRESETS, build
from looplab.models.puzzle import HALT_BIAS, PuzzlePrefix
from looplab.nn.rope import Learned
from looplab.recurrence.loop import forward, new_cache
from tolerances import BLOCKS, EXACT

NAMES = ["tiny-hrm", "tiny-trm-attn", "tiny-trm-mlp"]
every_model = pytest.mark.parametrize("name", NAMES)


def with_puzzles(name, **options):
    """A tiny model whose table is not zero."""
    model = tiny(name, **options)
    torch.nn.init.normal_(model.puzzles.table, generator=torch.Generator().manual_seed(5))
    return model


def test_the_vector_of_a_puzzle_is_padded_and_laid_over_the_first_slots():
    model = with_puzzles("tiny-hrm")  # 40 numbers over two slots of 32, learned positions
    ids, puzzles = tokens(model, 2, 9), torch.tensor([3, 1])
    slots = model.encode(ids, extras={"puzzle_ids": puzzles}).slots
    for row in range(2):
        padded = torch.cat([model.puzzles.table[puzzles[row]], torch.zeros(24, dtype=torch.float64)])
        plain = torch.cat([padded[:32][None], padded[32:][None], model.embedding.weight[ids[row]]])
        expected = math.sqrt(32) * (plain + model.position_weight[:11]) / math.sqrt(2)
        torch.testing.assert_close(slots[row], expected, **BLOCKS)


def test_without_learned_positions_the_sum_is_not_halved():
    model = with_puzzles("tiny-trm-attn")
    ids = tokens(model, 1, 4)
    context = model.encode(ids, extras={"puzzle_ids": torch.tensor([2])})
    torch.testing.assert_close(context.embeds[0], math.sqrt(32) * model.embedding.weight[ids[0]], **BLOCKS)
    torch.testing.assert_close(context.slots[:, 3:], context.embeds, **EXACT)


@every_model
def test_the_state_is_longer_than_the_tokens_by_the_prefix_and_the_readout_cuts_it(name):
    model = with_puzzles(name)
    ids = tokens(model, 2, 9)
    context = encode(model, ids)
    out = run(model, ids)
    prefix = model.config.prefix.slots
    assert {field.prefix for field in model.spec.state.values()} == {prefix}
    assert out.state.high.shape == out.state.low.shape == (2, prefix + 9, 32)
    torch.testing.assert_close(model.coda(out.state, context), out.state.high[:, prefix:], **EXACT)
    assert context.embeds.shape == (2, 9, 32)


@every_model
def test_every_cell_sees_every_other_and_the_puzzle(name):
    model = with_puzzles(name)
    ids, puzzles = tokens(model, 1, 9), {"puzzle_ids": torch.tensor([0])}
    first = forward(model, ids, extras=puzzles).logits
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % model.spec.vocab[0]
    other = {"puzzle_ids": torch.tensor([1])}
    for logits in (forward(model, changed, extras=puzzles).logits, forward(model, ids, extras=other).logits):
        assert ((logits - first).abs().amax(dim=2) > 1e-6).all()


@every_model
def test_low_reads_the_puzzle_and_high_only_the_levels(name):
    model = with_puzzles(name)
    ids = tokens(model, 1, 9)
    context, index = encode(model, ids), torch.zeros(1, dtype=torch.long)
    blind = context._replace(slots=torch.zeros_like(context.slots))
    state = model.init_state(context, None)
    assert model.spec.writes_readout == {1}
    for block, (written, kept) in enumerate((("low", "high"), ("high", "low"))):
        after, unseen = (model.step(state, c, block, index) for c in (context, blind))
        assert getattr(after, kept) is getattr(state, kept)
        assert torch.equal(getattr(after, written), getattr(unseen, written)) == (block == 1)


@every_model
def test_the_halting_score_reads_the_first_slot_in_float32(name):
    model = with_puzzles(name)
    torch.nn.init.normal_(model.q_head.weight)
    state = run(model, tokens(model, 2, 9)).state
    expected = state.high[:, 0] @ model.q_head.weight.T + HALT_BIAS
    torch.testing.assert_close(model.halt(state), expected, **BLOCKS)
    assert (model.spec.halt.layout, model.spec.halt.per) == ("q_halt_continue", "row")
    rounded = model.to(torch.bfloat16)
    assert rounded.halt(type(state)(*(part.bfloat16() for part in state))).dtype == torch.float32


@every_model
def test_starts_are_those_of_the_paper(name):
    model = build(dataclasses.replace(PRESETS[name](), dim=256))
    assert not model.puzzles.table.any()
    assert not model.q_head.weight.any()
    assert model.q_head.bias.tolist() == [HALT_BIAS, HALT_BIAS]
    assert not torch.equal(model.high_start.start, model.low_start.start)
    for label, weight in model.named_parameters():
        if weight.dim() == 2 and not label.startswith("q_head"):
            fan_in = 256 if label.startswith(("embedding", "position")) else weight.shape[1]
            assert float(weight.detach().std() * fan_in**0.5) == pytest.approx(1, rel=0.05), label


@every_model
def test_a_supervision_step_is_one_unit_of_the_plan(name):
    spec = tiny(name).spec
    assert str(spec.plan(1)) == "[0.0 0.1 1.0]"
    assert spec.marks() == (3, 6)
    assert spec.default_steps == 2
    with pytest.warns(UserWarning, match=re.escape("num_steps=3 is beyond the trained depth FixedDepth(2)")):
        run(tiny(name), tokens(tiny(name), 1, 9), num_steps=3)


def test_a_model_without_prefix_takes_no_puzzle():
    model = build(dataclasses.replace(PRESETS["tiny-trm-attn"](), prefix=None))
    assert model.spec.extras == {}
    ids = tokens(model, 1, 4)
    assert forward(model, ids).state.high.shape == (1, 4, 32)
    with pytest.raises(ValueError, match="extras of trm must be: none"):
        forward(model, ids, extras={"puzzle_ids": torch.tensor([0])})


PUZZLE = {"puzzle_ids": torch.tensor([0])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"encode: extras of trm must be: puzzle_ids\. Got \[\]"),
        ({"extras": {"puzzle_ids": torch.tensor([5])}}, "puzzle_ids: 5 >= 5 entries"),
        ({"extras": {"puzzle_ids": torch.tensor([-1])}}, "puzzle_ids: -1 < 0"),
        ({"extras": PUZZLE, "positions": torch.arange(9)[None]}, "positions of trm must be None"),
        ({"extras": PUZZLE, "valid": torch.arange(9)[None] < 8}, "right padding but trm supports none"),
        ({"extras": PUZZLE, "valid": torch.zeros(1, 9, dtype=torch.bool)}, "row 0 has no valid token"),
    ],
    ids=["no puzzle", "large", "negative", "positions", "padding", "empty"],
)
def test_what_is_no_grid_is_refused(options, message):
    model = tiny("tiny-trm-attn")
    with pytest.raises(ValueError, match=message):
        model.encode(tokens(model, 1, 9), **options)


def test_grids_longer_than_the_trained_ones_are_refused():
    model = tiny("tiny-trm-attn")
    assert encode(model, tokens(model, 1, 36)).slots.shape == (1, 39, 32)
    with pytest.raises(ValueError, match=r"37 tokens, but trm has 36 positions \(max_positions\)"):
        encode(model, tokens(model, 1, 37))
    learned = tiny("tiny-hrm")
    with pytest.raises(ValueError, match="37 tokens, but hrm has 36 learned positions"):
        encode(learned, tokens(learned, 1, 37))


@every_model
def test_there_is_no_cache_and_no_noise(name):
    model = tiny(name)
    with pytest.raises(ValueError, match=rf"{model.spec.name} is not causal: no KV cache\. Pass cache=None"):
        new_cache(model.spec, rows=1, capacity=9)
    with pytest.raises(ValueError, match="init_state: this model draws no noise; got width 32"):
        model.init_state(encode(model, tokens(model, 1, 9)), torch.zeros(1, 9, 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "HRMConfig.steps must be at least 1. Got 0."),
        ({"heads": 5}, "HRMConfig.heads must divide dim (32). Got 5."),
        ({"high_layers": 0}, "HRMConfig.high_layers must be at least 1. Got 0."),
        (
            {"prefix": PuzzlePrefix(entries=5, width=65, slots=2)},
            "HRMConfig.prefix.width must fit 2 slots of 32. Got 65. Use 3 slots.",
        ),
        (
            {"position": Learned(max=36)},
            "HRMConfig.position.max must be the slots of prefix and cells together. Got 36 for 2 and 36.",
        ),
        (
            {"cells": None},
            "HRMConfig.position.max must be the slots of prefix and cells together. Got 38 for 2 and None.",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PRESETS["tiny-hrm"](), **changes)


def test_a_prefix_has_sizes():
    with pytest.raises(ValueError, match=r"PuzzlePrefix\.slots must be at least 1\. Got 0\."):
        PuzzlePrefix(entries=1, width=1, slots=0)
