"""Huginn's settings, names and presets. The numbers are compared in tests/golden/test_huginn.py."""

import dataclasses
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file

from looplab.models.base import PRESETS, build
from looplab.models.huginn import config, key_map
from looplab.models.published import PUBLISHED, assemble
from looplab.nn.norm import SandwichSum
from looplab.recurrence.depth import FixedDepth, PoissonLognormal, Unknown
from source import ROOT
from tolerances import EXACT

FOLDER = ROOT / "tests" / "golden" / "huginn"
FACTS = json.loads((FOLDER / "full" / "config.json").read_text())
WEIGHTS = load_file(FOLDER / "full" / "weights.safetensors")
RELEASED = {
    "model_type": "huginn_raven",
    "n_embd": 5280,
    "n_heads": 55,
    "num_attention_heads": 55,
    "num_key_value_heads": 55,
    "head_dim": 96,
    "intermediate_size": 17920,
    "n_layers": 8,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "effective_expected_depth": 132,
    "vocab_size": 65536,
    "padded_vocab_size": 65536,
    "block_size": 4096,
    "norm_eps": 1e-06,
    "rope_base": 50000,
    "qk_bias": True,
    "tie_embeddings": True,
    "mean_recurrence": 32,
    "mean_backprop_depth": 8,
    "sampling_scheme": "poisson-lognormal-filling",
    "state_init": "like-init",
    "injection_type": "linear",
    "init_values": {
        "std": 0.008703882797784892,
        "embedding": 0.008703882797784892,
        "embed_scale": 72.6636084983398,
        "out_proj": 0.0005356869554443541,
    },
}
"""Settings of the published checkpoint."""


def test_the_published_checkpoint_is_the_preset():
    made = PRESETS["huginn-0125"]()
    read = config(RELEASED, {})
    assert dataclasses.replace(read, init=made.init, embed_scale=made.embed_scale, state_init=made.state_init) == made
    assert read.embed_scale == pytest.approx(made.embed_scale, rel=1e-12) == pytest.approx(math.sqrt(5280))
    assert read.state_init.std == pytest.approx(made.state_init.std, rel=1e-12)
    assert read.init.std == pytest.approx(made.init.std, rel=1e-12)
    assert read.init.out_std == pytest.approx(made.init.out_std, rel=1e-12)


def test_its_parameters_and_costs_are_exact():
    spec = build(PRESETS["huginn-0125"](), device="meta").spec
    assert spec.params.total == 3_564_976_800
    assert spec.params.injection == 55_756_800
    matrices = spec.cost.prelude.matmul + spec.cost.coda.matmul + spec.cost.blocks[0].matmul - spec.params.injection
    assert matrices == 3_162_931_200
    iterations = spec.plan().iterations()
    assert iterations == {0: 32}
    assert spec.cost.kv_bytes_per_token("DepthIndexed", iterations, itemsize=2) == 2_787_840
    assert spec.cost.kv_bytes_per_token("Single", iterations, itemsize=2) == 168_960
    attention = 4 * 5280 * (4 + 32 * 4)
    assert spec.cost.forward(iterations, tokens=1) - attention == 108_637_224_960


def test_settings_mean_what_the_published_code_makes_of_them():
    made = config(FACTS, {})
    assert (made.dim, made.vocab, made.padded_vocab, made.max_positions) == (32, 97, None, 32)
    assert (made.envelope.prelude, made.blocks, made.envelope.coda) == (2, (4,), 2)
    assert made.attention.qk_bias and made.attention.head_dim == 8
    assert (made.attention.position.pairing, made.attention.position.base) == ("interleaved", 50000.0)
    assert isinstance(made.placement, SandwichSum) and made.exit_norm == "final" and made.norm.eps == 1e-6
    assert made.injection.order == "state_first"
    assert made.state_init.std * made.embed_scale == pytest.approx(math.sqrt(2 / 5), rel=1e-12)
    assert made.head.tied and made.order.default_steps == 7


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"sampling_scheme": "fixed"}, "trained_depth", FixedDepth(num_steps=7)),
        ({"sampling_scheme": "poisson-unbounded"}, "trained_depth", Unknown()),
        ({"mean_recurrence": 64}, "trained_depth", PoissonLognormal(rate=64.0, max_steps=1024)),
        ({"vocab_size": 90}, "padded_vocab", 97),
        ({"block_size": 4096}, "max_positions", 4096),
    ],
)
def test_other_settings(changes, field, value):
    assert getattr(config(FACTS | changes, {}), field) == value


def test_defaults_are_those_of_the_original_class():
    kept = {"n_embd", "n_heads", "intermediate_size", "vocab_size", "block_size"}
    small = {name: value for name, value in FACTS.items() if name in kept or name.startswith("n_layers_in")}
    full = config(FACTS, {})
    assert config(small | {"mean_recurrence": 7, "init_values": FACTS["init_values"]}, {}) == full
    assert config(small, {}).order.num_steps == 32


@pytest.mark.parametrize("case", ["full", "mqa"])
def test_names_map_one_to_one_and_back_to_the_same_bytes(case):
    facts = json.loads((FOLDER / case / "config.json").read_text())
    weights = load_file(FOLDER / case / "weights.safetensors")
    model = assemble(PUBLISHED["huginn"], facts, weights)
    names = key_map(model.config)
    ours = [name for rule in names.rules for name in rule.ours]
    assert len(ours) == len(set(ours)) and set(ours) == set(model.state_dict())
    theirs = [name for rule in names.rules for name in rule.theirs]
    assert len(theirs) == len(set(theirs)) and set(theirs) == set(weights) - {"freqs_cis"}
    back = names.export(model.state_dict())
    torch.testing.assert_close(back, {name: weights[name] for name in theirs}, **EXACT)
    assert all(back[name].shape == weights[name].shape for name in theirs)


def test_the_computed_rotary_table_is_the_files():
    table = key_map(config(FACTS, {})).computed["freqs_cis"]()
    torch.testing.assert_close(table, WEIGHTS["freqs_cis"], rtol=0, atol=2e-6)


def test_query_key_and_value_rows_are_not_mixed_up():
    fused = WEIGHTS["transformer.prelude.1.attn.Wqkv.weight"]
    attention = assemble(PUBLISHED["huginn"], FACTS, WEIGHTS).prelude[1].attn
    for index, name in enumerate("qkv"):
        assert torch.equal(getattr(attention, name).weight, fused[32 * index : 32 * (index + 1)])
    gates = WEIGHTS["transformer.prelude.1.mlp.fc.weight"]
    ffn = assemble(PUBLISHED["huginn"], FACTS, WEIGHTS).prelude[1].ffn
    assert torch.equal(ffn.gate.weight, gates[:24]) and torch.equal(ffn.up.weight, gates[24:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injection_type": "add"}, "must have injection_type 'linear' for model_type 'huginn_raven'. Got 'add'."),
        ({"nonlin_name": "GELU"}, "must have nonlin_name 'SiLU' for model_type 'huginn_raven'. Got 'GELU'."),
        ({"bias": True}, "must have bias False for model_type 'huginn_raven'. Got True."),
        ({"state_init": "zero"}, "must have state_init 'like-init' for model_type 'huginn_raven'. Got 'zero'."),
        ({"n_layers_in_coda": -1}, "must have a whole number as n_layers_in_coda. Got -1."),
        ({"vocab_size": 97.0}, "must have a whole number as vocab_size. Got 97.0."),
        (
            {"num_key_value_heads": 2},
            "attention.qk_bias has one key bias per query head",
        ),
    ],
)
def test_what_the_published_code_does_not_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(FACTS | changes, {})


def test_missing_and_unexpected_tensors_are_listed_by_name():
    gone = ("transformer.ln_f.weight", "transformer.coda.1.norm_4.weight")
    weights = {name: tensor for name, tensor in WEIGHTS.items() if name not in gone}
    message = f"load: 2 tensors missing ({gone[1]}, {gone[0]}), 1 unexpected (extra.weight)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        assemble(PUBLISHED["huginn"], FACTS, weights | {"extra.weight": torch.zeros(1)})
