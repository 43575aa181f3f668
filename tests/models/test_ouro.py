import copy
import re

import pytest
import torch

from contract.zoo import run, tokens
from looplab.models.base import PRESETS, build
from looplab.models.ouro import config_of, key_map_of
from looplab.models.published import PUBLISHED, assemble
from looplab.nn.rope import Llama3
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.plan import ModelLoop
from tolerances import EXACT

FAMILY = PUBLISHED["ouro"]
FACTS = {
    "model_type": "ouro",
    "hidden_size": 30,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "intermediate_size": 22,
    "vocab_size": 41,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e4,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 77,
    "total_ut_steps": 3,
    "early_exit_threshold": 1.0,
    "tie_word_embeddings": False,
}


def facts(**changes):
    return {**copy.deepcopy(FACTS), **changes}


def config(**changes):
    return config_of(facts(**changes), {})


def weights(**changes):
    """A model of these settings, and its tensors under the original's names."""
    model = build(config(**changes), seed=2)
    return model, key_map_of(model.config).export(model.state_dict())


@pytest.mark.parametrize(
    ("name", "total", "kv_bytes"), [("ouro-1.4b", 1_434_652_673, 786_432), ("ouro-2.6b", 2_667_974_657, 1_572_864)]
)
def test_presets_have_the_published_counts(name, total, kv_bytes):
    spec = build(PRESETS[name](), device="meta").spec
    layers = len(spec.blocks[0].layers)
    assert (spec.params.total, spec.params.halt) == (total, 2_049)
    assert spec.blocks[0].params == layers * 51_388_416
    assert spec.cost.kv_bytes_per_token("DepthIndexed", spec.plan().iterations(), itemsize=2) == kv_bytes
    assert spec.plan().iterations() == {0: 4}


def test_a_token_of_the_smaller_one_costs_ten_gigaflops():
    cost = build(PRESETS["ouro-1.4b"](), device="meta").spec.cost
    attention = 4 * cost.blocks[0].attention_width * 4
    assert cost.forward({0: 4}, tokens=1) - attention == 10_066_329_600


def test_presets_are_the_published_configurations():
    released = facts(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=24, vocab_size=49152,
        intermediate_size=5632, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=65536, total_ut_steps=4,
    )  # fmt: skip
    assert config_of(released, {}) == PRESETS["ouro-1.4b"]()
    assert config_of({**released, "num_hidden_layers": 48}, {}) == PRESETS["ouro-2.6b"]()


def test_settings_end_up_where_they_belong():
    c = config()
    assert (c.dim, c.vocab, c.blocks, c.ffn.hidden, c.max_positions) == (30, 41, (2,), 22, 77)
    assert (c.attention.heads, c.attention.kv_heads, c.attention.head_dim) == (3, 1, 10)
    assert (c.attention.position.base, c.attention.position.pairing, c.attention.window) == (5e4, "half", None)
    assert (c.norm.eps, c.head.tied, c.halt) == (1e-5, False, HazardGate())
    assert (c.order, c.trained_depth) == (ModelLoop(num_steps=3), FixedDepth(num_steps=3))
    assert config(head_dim=14, num_key_value_heads=None).attention.kv_heads == 3
    assert config(head_dim=14).attention.head_dim == 14
    newer = facts(rope_parameters={"rope_type": "default", "rope_theta": 7e3})
    del newer["rope_theta"]
    assert config_of(newer, {}).attention.position.base == 7e3


def test_a_window_is_that_of_all_layers_or_refused():
    window = {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}
    assert config(**window, max_window_layers=0).attention.window == 9
    assert config(**window, max_window_layers=2).attention.window is None
    assert config(**{**window, "layer_types": ["sliding_attention"] * 2}).attention.window == 9
    assert config(**{**window, "use_sliding_window": False}, max_window_layers=0).attention.window is None
    with pytest.raises(ValueError, match=r"layer_types must be the same for all layers\. Got \['full_attention', 'sli"):
        config(**window, max_window_layers=1)


def test_rotary_scaling_is_that_of_llama_3_or_refused():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    expected = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    for key in ("rope_type", "type"):
        assert config(rope_scaling={key: "llama3", **scaling}).attention.position.scaling == expected
    with pytest.raises(ValueError, match=r"rope_scaling must be 'default' or 'llama3'\. Got 'yarn'"):
        config(rope_scaling={"type": "yarn", "factor": 2.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'. Got 'gelu'"),
        ({"hidden_size": 31}, "hidden_size .31. must be a multiple of num_attention_heads .3.. Got remainder 1"),
        ({"num_key_value_heads": 2}, "heads .3. must be a multiple of kv_heads .2."),
        ({"head_dim": 15}, "attention.head_dim must be even for Rope. Got 15"),
    ],
)
def test_settings_that_no_ouro_has_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_key_map_covers_every_tensor_once_and_is_undone_by_its_inverse(tied):
    model, exported = weights(tie_word_embeddings=tied)
    ours = [name for rule in key_map_of(model.config).rules for name in rule.ours]
    assert sorted(ours) == sorted(model.state_dict())
    assert ("lm_head.weight" in exported) is not tied
    again = assemble(FAMILY, facts(tie_word_embeddings=tied), exported)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, **EXACT)
    ids = tokens(model, 1, 5)
    torch.testing.assert_close(run(again, ids).logits, run(model, ids).logits, **EXACT)


def test_wrappers_rotary_tables_and_a_stored_tie_are_read_over():
    model, exported = weights(tie_word_embeddings=True)
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in exported.items()}
    wrapped["model.rotary_emb.inv_freq"] = torch.zeros(5)
    wrapped["_orig_mod.module.lm_head.weight"] = exported["model.embed_tokens.weight"].clone()
    again = assemble(FAMILY, facts(tie_word_embeddings=True), wrapped)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), **EXACT)
    wrapped["_orig_mod.module.lm_head.weight"] += 0.5
    with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ \(max 0\.5\)"):
        assemble(FAMILY, facts(tie_word_embeddings=True), wrapped)


def test_tensors_that_do_not_fit_are_named():
    _, exported = weights()
    gate = exported.pop("model.early_exit_gate.bias")
    told = (
        "load: 1 tensor missing (model.early_exit_gate.bias), 1 unexpected (model.layers.2.mlp.up_proj.weight), "
        "1 of wrong shape (model.norm.weight: file [31], model [30])"
    )
    wrong = {"model.layers.2.mlp.up_proj.weight": gate, "model.norm.weight": torch.ones(31)}
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        assemble(FAMILY, facts(), {**exported, **wrong})
    with pytest.raises(ValueError, match=r"load: 1 non-finite values in gate\.bias"):
        assemble(FAMILY, facts(), {**exported, "model.early_exit_gate.bias": gate * float("nan")})


def test_names_alone_tell_the_family():
    names = frozenset(name.removeprefix("model.") for name in weights()[1])
    assert FAMILY.recognises(names)
    assert not FAMILY.recognises(names - {"early_exit_gate.weight"})


def test_more_loops_than_were_trained_are_warned_of():
    model = build(PRESETS["tiny-ouro"]())
    with pytest.warns(UserWarning, match=r"num_steps=6 is beyond the trained depth FixedDepth\(4\)"):
        run(model, tokens(model, 1, 3), num_steps=6)


def test_a_prompt_longer_than_the_trained_context_is_refused():
    model, _ = weights()
    with pytest.raises(ValueError, match=r"encode: 78 tokens, but looped has 77 positions \(max_positions\)"):
        model.encode(torch.zeros(1, 78, dtype=torch.long))
