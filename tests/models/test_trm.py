import dataclasses
import re

import pytest
import torch

from contract.zoo import encode, run, tiny, tokens
from looplab.audit.units import full_plan
from looplab.models.base import PRESETS, build
from looplab.models.published import PUBLISHED, assemble
from looplab.models.puzzle import PuzzlePrefix
from looplab.models.trm import SelfAttention, TokenMLP
from looplab.nn.rope import Learned, NoPE, Rope
from tolerances import BLOCKS, EXACT

FAMILY = PUBLISHED["trm"]
SETTINGS = {
    "hidden_size": 32,
    "num_heads": 4,
    "H_cycles": 3,
    "L_cycles": 2,
    "L_layers": 1,
    "H_layers": 7,
    "halt_max_steps": 4,
    "expansion": 4,
    "pos_encodings": "rope",
    "puzzle_emb_len": 3,
    "puzzle_emb_ndim": 32,
    "num_puzzle_identifiers": 5,
    "seq_len": 16,
    "vocab_size": 6,
}
MIXED = {"L_level.layers.0.mlp_t.down_proj.weight": (19, 256)}


def config(shapes=None, **changes):
    facts = {name: value for name, value in (SETTINGS | changes).items() if value is not None}
    return FAMILY.config(facts, shapes or {})


@pytest.mark.parametrize(("preset", "total"), [("trm-sudoku-mlp", 5_028_866), ("trm-attn", 6_828_034)])
def test_presets_have_the_published_number_of_parameters(preset, total):
    model = build(PRESETS[preset](), device="meta")
    assert model.spec.params.total == total
    plan = full_plan(model.spec)
    assert plan.M == plan.kmid == 16
    assert {len(unit) for unit in plan.units} == {21}


def test_both_blocks_run_the_same_layers():
    model = tiny("tiny-trm-attn")
    assert model.spec.blocks[0].layers == model.spec.blocks[1].layers == (0,)
    assert model.spec.params.core == (sum(p.numel() for p in model.core.parameters()), 0)
    context = encode(model, tokens(model, 1, 4))
    state, index = model.init_state(context, None), torch.zeros(1, dtype=torch.long)
    low = model.step(state, context._replace(slots=torch.zeros_like(context.slots)), 0, index).low
    torch.testing.assert_close(low, model.step(state, context, 1, index).high, **EXACT)


def test_the_token_mlp_norms_over_positions_before_channels():
    model = tiny("tiny-trm-mlp")
    (layer,) = model.core
    h = torch.randn(2, 12, 32, dtype=torch.float64)

    def normed(x):
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()

    def swiglu(x, m):
        return (torch.nn.functional.silu(x @ m.gate.weight.T) * (x @ m.up.weight.T)) @ m.down.weight.T

    u = normed(h.mT + swiglu(h.mT, layer.mixer)).mT
    torch.testing.assert_close(layer(h, None), normed(u + swiglu(u, layer.ffn)), **BLOCKS)


def test_the_token_mlp_takes_its_own_length_only():
    model = build(PRESETS["trm-sudoku-mlp"](), device="meta")
    assert model.spec.fixed_length == 81
    for length in (80, 100):
        with pytest.raises(ValueError, match=rf"trm \(mlp mixer\) is built for 81 cells; got {length}"):
            model.encode(torch.zeros(1, length, dtype=torch.long, device="meta"), extras=None)


def test_attention_takes_shorter_grids():
    assert tiny("tiny-trm-attn").spec.fixed_length is None
    assert run(tiny("tiny-trm-attn"), tokens(tiny("tiny-trm-attn"), 2, 5)).logits.shape == (2, 5, 11)


def test_settings_become_a_configuration():
    found = config()
    assert found.mixing == SelfAttention(heads=4)
    assert (found.dim, found.vocab, found.layers, found.cells) == (32, 6, 1, 16)
    assert (found.h_cycles, found.l_cycles, found.steps) == (3, 2, 4)
    assert (found.position, found.prefix) == (Rope(base=10000.0), PuzzlePrefix(entries=5, width=32, slots=3))
    assert (found.expansion, found.eps, found.halt_rule) == (4.0, 1e-5, "q_halt > 0")
    assert config(rope_theta=500.0, rms_norm_eps=1e-6).position == Rope(base=500.0)
    assert config(rms_norm_eps=1e-6).eps == 1e-6


def test_a_run_file_nests_the_settings_and_leaves_the_data_set_to_the_weights():
    data = ("seq_len", "vocab_size", "num_puzzle_identifiers")
    facts = {"arch": {k: v for k, v in SETTINGS.items() if k not in data}, "global_batch_size": 768}
    shapes = {"embed_tokens.embedding_weight": (6, 32), "puzzle_emb.weights": (5, 32)}
    assert FAMILY.config(facts, shapes) == dataclasses.replace(config(), cells=None)
    assert FAMILY.config(facts, shapes | MIXED).cells == 16


def test_the_variant_follows_from_the_weights():
    found = config(MIXED, num_heads=None)
    assert (found.mixing, found.position) == (TokenMLP(), NoPE())
    assert config(MIXED, pos_encodings="learned").position == Learned(max=19)
    assert config(pos_encodings="none").position == NoPE()


def test_learned_positions_are_counted_in_the_weights():
    assert config({"embed_pos.embedding_weight": (19, 32)}, pos_encodings="learned", seq_len=None).cells == 16


def test_the_prefix_has_16_slots_unless_the_settings_say_otherwise():
    assert config(puzzle_emb_len=None).prefix.slots == 16
    assert config(puzzle_emb_len=0, puzzle_emb_ndim=40).prefix.slots == 2
    assert config(puzzle_emb_len=0, puzzle_emb_ndim=0).prefix is None


def test_a_trained_continue_head_changes_the_rule():
    model = build(config(no_ACT_continue=False), device="meta")
    assert model.spec.halt.rule == "q_halt > q_continue"


@pytest.mark.parametrize(
    ("shapes", "changes", "message"),
    [
        ({}, {"H_cycles": None, "num_heads": None}, "load: trm needs the settings H_cycles, num_heads."),
        ({}, {"pos_encodings": "alibi"}, "load: pos_encodings of trm must be 'rope', 'learned' (with seq_len) or"),
        ({}, {"puzzle_emb_ndim": 0}, "load: puzzle_emb_len must be 0 without puzzle embeddings (puzzle_emb_ndim=0)."),
        ({}, {"L_layers": 0}, "TRMConfig.layers must be at least 1. Got 0."),
        ({}, {"num_heads": 3}, "TRMConfig.heads must divide dim (32). Got 3."),
    ],
    ids=["missing", "positions", "prefix", "layers", "heads"],
)
def test_settings_that_cannot_be_are_refused(shapes, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(shapes, **changes)


@pytest.mark.parametrize("changes", [{"cells": None}, {"position": Rope(base=10.0)}])
def test_the_token_mlp_needs_a_length_and_does_not_rotate(changes):
    with pytest.raises(ValueError, match=r"TRMConfig.mixing=TokenMLP\(\) needs cells, and NoPE\(\) or Learned"):
        dataclasses.replace(PRESETS["tiny-trm-mlp"](), **changes)


@pytest.mark.parametrize(
    "made",
    [
        config(),
        config(puzzle_emb_len=0, puzzle_emb_ndim=0),
        config(MIXED, pos_encodings="learned", L_layers=2),
        config(pos_encodings="learned", puzzle_emb_ndim=40),
    ],
    ids=["attention", "no prefix", "mlp", "learned"],
)
def test_every_tensor_goes_to_the_original_names_and_back(made):
    model, key_map = build(made, seed=3), FAMILY.key_map(made)
    state = model.state_dict()
    assert sorted(name for rule in key_map.rules for name in rule.ours) == sorted(state)
    foreign = {f"_orig_mod.model.inner.{name}": tensor for name, tensor in key_map.export(state).items()}
    foreign["_orig_mod.model.inner.puzzle_emb.local_weights"] = torch.zeros(4, 32)
    facts = {
        "arch": SETTINGS
        | {
            "L_layers": made.layers,
            "pos_encodings": {Rope: "rope", Learned: "learned", NoPE: "none"}[type(made.position)],
            "puzzle_emb_ndim": made.prefix.width if made.prefix else 0,
            "puzzle_emb_len": made.prefix.slots if made.prefix else 0,
        }
    }
    again = assemble(FAMILY, facts, foreign)
    assert again.config == made
    torch.testing.assert_close(again.state_dict(), state, **EXACT)
    assert FAMILY.recognises(key_map.theirs) and not PUBLISHED["hrm"].recognises(key_map.theirs)


def test_tensors_that_do_not_fit_are_named():
    made = config()
    foreign = FAMILY.key_map(made).export(build(made).state_dict())
    fused = foreign.pop("L_level.layers.0.self_attn.qkv_proj.weight")
    with pytest.raises(ValueError, match=r"L_level\.layers\.0\.self_attn\.qkv_proj\.weight"):
        assemble(FAMILY, SETTINGS, foreign | {"L_level.layers.0.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=re.escape("qkv_proj.weight: file [95, 32], model [96, 32]")):
        assemble(FAMILY, SETTINGS, foreign | {"L_level.layers.0.self_attn.qkv_proj.weight": fused[1:]})
