"""Iso-depth presets: counts, executed depth, and what the model computes at its start."""

import pytest
import torch

from contract.zoo import run, tokens
from looplab.models.base import PRESETS, build
from looplab.models.isodepth import isodepth
from looplab.recurrence.boundary import OwnNorm
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.injection import Concat
from looplab.recurrence.loop import forward
from looplab.recurrence.state_init import FromEmbeds
from tolerances import EXACT

COUNTS = {1: 190_841_088, 2: 135_385_344, 4: 107_067_648, 8: 92_908_800}
RATIOS = {1: 1.0, 2: 0.6083, 4: 0.4083, 8: 0.3083}


def meta(size, r):
    return build(isodepth(size, r), device="meta")


def matrices(model):
    """Entries of the matrices between the two ends."""
    inner = [m for part in (model.prelude, model.core, model.coda_layers, model.injections or []) for m in part]
    return sum(p.numel() for module in inner for p in module.parameters() if p.dim() == 2)


@pytest.mark.parametrize("r", COUNTS)
def test_size_12_has_the_published_counts(r):
    model = meta(12, r)
    assert PRESETS[f"isodepth-12-r{r}"]() == isodepth(12, r)
    assert model.spec.params.total == sum(p.numel() for p in model.parameters()) == COUNTS[r]
    assert matrices(model) / matrices(meta(12, 1)) == pytest.approx(RATIOS[r], abs=5e-5)


@pytest.mark.parametrize(("size", "dim"), [(6, 384), (7, 512), (12, 768), (34, 2176)])
@pytest.mark.parametrize("r", [1, 4])
def test_counts_follow_the_formula_at_every_size(size, dim, r):
    layers = 20 if r == 1 else 2 + 16 // r + 2
    joined = 2 * dim**2 if r > 1 else 0
    model = meta(size, r)
    assert model.config.dim == dim
    assert model.spec.params.total == layers * (12 * dim**2 + 2 * dim) + joined + 2 * 32_064 * dim + 3 * dim


@pytest.mark.parametrize("r", [1, 2, 4, 8, 16])
def test_all_execute_twenty_layers(r):
    spec = meta(12, r).spec
    core = sum(len(spec.blocks[a.block].layers) for a in spec.plan())
    assert spec.cost.prelude.layers + core + spec.cost.coda.layers == 20
    assert spec.trained_depth == FixedDepth(num_steps=r)


def test_choices_are_those_of_the_paper():
    c = isodepth(12, 4)
    assert (c.injection, c.state_init, c.boundary) == (
        Concat(order="embeds_first", init="identity"), FromEmbeds(), OwnNorm()
    )  # fmt: skip
    assert (c.attention.heads, c.attention.head_dim, c.attention.position.order) == (6, 128, "before_norm")
    assert (c.attention.qk_norm.affine, c.attention.qk_norm.over) == (False, "head")
    assert (c.ffn.hidden, c.ffn.scale, c.head.softcap, c.head.tied) == (4 * 768, 1.0, 15.0, False)
    assert (c.vocab, c.padded_vocab, c.embed_norm) == (32_001, 32_064, c.norm)


def test_every_iteration_starts_as_the_first_one_until_the_injection_is_trained():
    model = build(PRESETS["tiny-isodepth"]())
    ids = tokens(model, 2, 7)
    once, often = (run(model, ids, num_steps=n).logits for n in (1, 4))
    torch.testing.assert_close(once, often, **EXACT)
    model.injections[0].rule.w.weight.data += 0.1
    assert not torch.equal(run(model, ids, num_steps=1).logits, run(model, ids, num_steps=4).logits)


def test_states_are_normed_and_logits_bounded():
    model = build(PRESETS["tiny-isodepth"](), seed=1)
    with torch.no_grad():
        model.lm_head.own_weight *= 1e4
        out = forward(model, tokens(model, 2, 7))
    assert out.state.square().mean(-1) == pytest.approx(torch.ones(2, 7), rel=1e-4)
    assert 14.9 < out.logits.abs().max() <= 15.0
    assert out.logits.shape == (2, 7, 61)


@pytest.mark.parametrize(
    ("size", "r", "message"), [(0, 1, "size must be at least 1. Got 0"), (12, 3, "r must divide 16")]
)
def test_shapes_that_no_model_has_are_refused(size, r, message):
    with pytest.raises(ValueError, match=message):
        isodepth(size, r)
