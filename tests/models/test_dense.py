import re

import pytest
import torch

from contract.zoo import run, tiny, tokens
from looplab.models.base import build
from looplab.models.dense import DenseConfig
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import Gelu, SwiGLU
from looplab.nn.norm import LayerNorm, PostSum
from looplab.nn.rope import Learned, Rope
from looplab.recurrence.plan import Plan
from tolerances import EXACT

ATTENTION = Attention(heads=2, kv_heads=1, head_dim=8, position=Rope(base=100.0))


def config(**changes):
    return DenseConfig(
        **{"dim": 16, "vocab": 11, "layers": 2, "attention": ATTENTION, "ffn": SwiGLU(hidden=24)} | changes
    )


def test_a_dense_model_is_its_layers_in_order():
    model = tiny("tiny-dense")
    ids = tokens(model, 2, 6)
    out = run(model, ids)
    context = model.encode(ids)
    h = model.embedding.weight[ids]
    for layer in model.layers:
        h = layer(h, context.scope)
    torch.testing.assert_close(out.logits, model.final_norm(h) @ model.embedding.weight.T, **EXACT)


def test_every_layer_is_a_block_that_runs_once():
    spec = tiny("tiny-dense").spec
    assert str(spec.plan()) == "[0.0 1.0 2.0]"
    assert [block.layers for block in spec.blocks] == [(0,), (1,), (2,)]
    for steps in (0, 2):
        with pytest.raises(ValueError, match="num_steps of a dense model must be 1"):
            spec.plan(steps)


def test_layers_can_be_left_out_and_repeated_by_a_plan():
    model = tiny("tiny-dense")
    ids = tokens(model, 1, 4)
    state = run(model, ids, plan=Plan.parse("[2.0 0.0 0.0]")).state
    context = model.encode(ids)
    h = context.embeds
    for layer in (2, 0, 0):
        h = model.layers[layer](h, context.scope)
    torch.testing.assert_close(state, h, **EXACT)


def test_parameters_and_matrices_are_counted():
    model = build(config(layers=3, head=Head(tied=False), padded_vocab=16))
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
    assert model.spec.params.core == (layer + 2 * 16,) * 3  # two norms per layer
    assert (model.spec.params.embedding, model.spec.params.head, model.spec.params.readout) == (256, 256, 16)
    assert model.spec.params.total == sum(p.numel() for p in model.parameters())
    assert model.spec.cost.matmul_rec == 3 * layer
    assert model.spec.cost.head.matmul == 16 * 11  # padding rows are not multiplied
    assert model.spec.cost.kv_bytes_per_token("DepthIndexed", {0: 1, 1: 1, 2: 1}, itemsize=2) == 3 * 2 * 8 * 2


def test_padded_columns_are_cut():
    model = build(config(padded_vocab=16))
    assert model.spec.vocab == (11, 16)
    assert run(model, tokens(model, 1, 3)).logits.shape == (1, 3, 11)


def test_learned_positions_bound_the_context():
    attention = Attention(heads=2, kv_heads=2, head_dim=8, position=Learned(max=5))
    model = build(config(attention=attention, norm=LayerNorm(), placement=PostSum(), ffn=Gelu(hidden=8)))
    assert model.spec.max_positions == 5
    run(model, tokens(model, 1, 5))
    with pytest.raises(ValueError, match="6 tokens, but dense has 5 learned positions"):
        run(model, tokens(model, 1, 6))


def test_embeddings_are_scaled():
    one, half = build(config()), build(config(embed_scale=0.5))
    ids = tokens(one, 1, 3)
    torch.testing.assert_close(half.encode(ids).embeds, 0.5 * one.encode(ids).embeds, **EXACT)


def test_output_matrices_can_start_smaller():
    layer = build(config(init=Init(std=0.5, out_std=0.0))).layers[0]
    assert not layer.attn.o.weight.any()
    assert not layer.ffn.down.weight.any()
    assert layer.attn.q.weight.any()


def test_noise_is_refused():
    model = build(config())
    with pytest.raises(
        ValueError, match=re.escape("init_state: this model draws no noise; got width 16. Pass noise=None")
    ):
        model.init_state(model.encode(tokens(model, 1, 2)), torch.zeros(1, 2, 16))


@pytest.mark.parametrize("name", ["dim", "vocab", "layers"])
def test_sizes_are_positive(name):
    with pytest.raises(ValueError, match=rf"DenseConfig\.{name} must be at least 1\. Got 0\."):
        config(**{name: 0})
