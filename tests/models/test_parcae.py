import collections
import dataclasses
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from contract.zoo import run, tokens
from looplab.models.base import PRESETS, build
from looplab.models.looped import LoopedConfig
from looplab.models.parcae import config, key_map
from looplab.models.published import PUBLISHED, assemble
from looplab.nn.mlp import GatedReluSquared, GeGLU, Gelu, ReluSquared, Silu, SwiGLU
from looplab.nn.rope import NoPE
from looplab.recurrence.depth import CategoricalDepth, FixedDepth, PoissonDepth
from looplab.recurrence.injection import Add, Concat
from looplab.recurrence.state_init import Normal, Unit, Zeros

FAMILY = PUBLISHED["parcae"]
FACTS = {
    "n_embd": 48,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 61,
    "padding_multiple": 16,
    "block_size": 32,
    "norm_class_name": "RMSNorm",
    "recurrent_embedding_dimension": 48,
    "recurrent_intermediation_embedding_dimension": 56,
    "n_layers_in_recurrent_block": 2,
    "mean_recurrence": 4,
    "mean_backprop_depth": 2,
    "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000},
}
WIDE = {"recurrent_embedding_dimension": 72, "recurrent_num_attention_heads": 6}


def shapes(tables=(), gates=()):
    """Shapes of the tensors that say where value embeddings are."""
    found = {f"value_embeds.{i}.weight": (64, 48) for i in tables}
    return found | {f"transformer.{place}.attn.ve_gate.weight": (4, 32) for place in gates}


def mapped(**changes):
    return config({**FACTS, **changes}, {})


@pytest.mark.parametrize(
    ("preset", "total", "without_values"),
    [
        ("parcae-140m", 144_323_136, 68_825_088),
        ("parcae-370m", 388_003_328, 186_675_200),
        ("parcae-770m", 776_655_680, 399_165_440),
        ("parcae-1.3b", 1_338_591_744, 734_607_360),
        ("tiny-parcae", 56_416, 51_040),
    ],
)
def test_presets_have_the_published_counts(preset, total, without_values):
    model = build(PRESETS[preset](), device="meta")
    values = sum(p.numel() for name, p in model.named_parameters() if "value_" in name)
    assert (model.spec.params.total, model.spec.params.total - values) == (total, without_values)


def test_the_smallest_released_shape_keeps_61440_bytes_per_token():
    spec = build(PRESETS["parcae-140m"](), device="meta").spec
    assert spec.cost.kv_bytes_per_token("DepthIndexed", spec.plan(8).iterations(), itemsize=2) == 61_440
    assert spec.trained_depth == PoissonDepth(rate=8.0, max_steps=49)


def test_settings_become_our_sizes():
    c = mapped(num_key_value_heads=2, tie_embeddings=True, logit_softcap=7.0, qk_bias=False, norm_eps=1e-4)
    assert (c.dim, c.vocab, c.padded_vocab, c.max_positions) == (48, 61, 64, 32)
    assert (c.attention.heads, c.attention.kv_heads, c.attention.head_dim) == (4, 2, 12)
    assert c.core_attention == dataclasses.replace(c.attention, kv_heads=4)
    assert (c.ffn, c.core_ffn) == (Gelu(hidden=40), Gelu(hidden=56))
    assert (c.head.tied, c.head.softcap, c.norm.eps, c.prelude_norm) == (True, 7.0, 1e-4, None)
    assert mapped(padded_vocab_size=61).padded_vocab is None


def test_what_is_left_out_has_the_defaults_of_the_original():
    few = {name: FACTS[name] for name in ("n_embd", "num_attention_heads", "vocab_size", "norm_class_name")}
    c = config({**few, "n_embd": 1024, "recurrent_num_attention_heads": None}, {})
    assert c.ffn == Gelu(hidden=4096) and c.core_ffn == Gelu(hidden=3520)
    assert (c.width, c.blocks, c.order.num_steps, c.max_positions, c.padded_vocab) == (1024, (4,), 32, 4096, 512)


@pytest.mark.parametrize(
    ("mlp", "nonlin", "expected"),
    [
        ("BaseMLP", "ReLU2", ReluSquared(hidden=40, scale=0.5)),
        ("BaseMLP", "SiLU", Silu(hidden=40)),
        ("BaseMLP", "GELU", Gelu(hidden=40)),
        ("GatedMLP", "ReLU2", GatedReluSquared(hidden=40, scale=0.5)),
        ("GatedMLP", "SiLU", SwiGLU(hidden=40)),
        ("GatedMLP", "GELU", GeGLU(hidden=40)),
    ],
)
def test_every_form_of_the_feed_forward_has_its_branch(mlp, nonlin, expected):
    assert mapped(mlp_class_name=mlp, nonlin_name=nonlin).ffn == expected


@pytest.mark.parametrize(
    ("strategy", "start", "embed_scale", "logit_scale", "std"),
    [
        ("scaled", "like-init", 1.0, 1.0, (2 / 240) ** 0.5),
        ("takase-scaled", "like-init", 48**0.5, 0.4**0.5 / 48**0.5, (2 / 240) ** 0.5),
        ("takase", "normal", 48**0.5, 1.0, 48**-0.5),
        ("scaled", "embed", 1.0, 1.0, 48**-0.5),
    ],
)
def test_the_start_strategy_scales_embeddings_logits_and_state(strategy, start, embed_scale, logit_scale, std):
    c = mapped(init_strategy=strategy, state_init=start)
    assert (c.embed_scale, c.head.logit_scale) == pytest.approx((embed_scale, logit_scale), rel=1e-15)
    assert c.state_init.std == pytest.approx(std, rel=1e-15)
    assert c.state_init.cut == (3.0 if start == "like-init" else None)


def test_other_choices_are_mapped():
    assert mapped(state_init="zero").state_init == Zeros()
    assert mapped(state_init="unit").state_init == Unit()
    assert mapped(injection_type="linear").injection == Concat(order="state_first", init="normal")
    assert mapped(injection_type="add").injection == Add()
    assert mapped(rope_settings={"use_rope": False}).attention.position == NoPE()
    assert mapped().attention.position.pairing == "interleaved"
    assert mapped(qk_norm=True).attention.qk_norm.eps == torch.finfo(torch.float32).eps


PER_BATCH = {"recurrent_iteration_method": "per-batch", "mean_recurrence": 6}
PER_SEQUENCE = {"recurrent_iteration_method": "per-sequence", "mean_recurrence": 6}


@pytest.mark.parametrize(
    ("facts", "scheme", "mean", "lowest"),
    [
        (PER_SEQUENCE, "poisson-truncated-full", 6.0 + 0.0024788, 1),
        (PER_SEQUENCE, "poisson-full", 6.0 + 0.0024788, 1),
        (PER_SEQUENCE, "poisson-fill", 6.0, 2),
        (PER_SEQUENCE, "poisson-unbounded-curriculum-100", 6.0, 2),
        (PER_SEQUENCE, "fixed", 6.0, 6),
        (PER_BATCH, "poisson-truncated-full", 7.9851275, 2),
        (PER_BATCH, "poisson-full", 6.0 + 0.0024788, 1),
        (PER_BATCH, "poisson-fill", 6.0, 2),
        (PER_BATCH, "poisson-unbounded", 6.5, 1),
        (PER_BATCH, "poisson-bounded", 6.4152394, 1),
        ({**PER_BATCH, "mean_recurrence": 1, "mean_backprop_depth": 1}, "poisson-bounded", 1.5, 1),
    ],
)
def test_the_trained_law_is_that_of_the_iterations_that_ran(facts, scheme, mean, lowest):
    law = mapped(**facts, sampling_scheme=scheme).trained_depth
    assert law.mean() == pytest.approx(mean, abs=1e-6)
    assert law.support()[0] == lowest


def test_laws_that_have_a_name_are_given_it():
    assert mapped(**PER_SEQUENCE).trained_depth == PoissonDepth(rate=6.0, max_steps=44)
    assert mapped(**PER_SEQUENCE, sampling_scheme="fixed").trained_depth == FixedDepth(num_steps=6)
    assert isinstance(mapped(**PER_BATCH).trained_depth, CategoricalDepth)


def test_value_embeddings_are_added_where_the_file_has_both_table_and_gate():
    c = config(FACTS, shapes(tables=(0, 2, 3), gates=("prelude.0", "core_block.0", "coda.0")))
    assert (c.value_tables, c.value_gates, c.valued_layers) == ((0, 2, 3), (0, 1, 3), (0, 3))
    assert not mapped().attention.value_embedding
    model = build(c, dtype=torch.float64)
    ids, plan = tokens(model, 2, 5), model.spec.plan(3)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = run(model, ids, plan=plan).logits
        flops = counter.get_total_flops()
    applications = collections.Counter(block for block, _ in plan)
    assert flops == model.spec.cost.forward(applications, tokens=5, rows=2, pairs="square")
    logits.square().sum().backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    assert unused == {"value_tables.2.weight", "core.0.attn.value_gate.weight"}


VARIANTS = {
    "plain": ({}, {}),
    "padded-untied-gated": ({"mlp_class_name": "GatedMLP", "nonlin_name": "SiLU"}, {}),
    "tied-biased-queries": ({"tie_embeddings": True, "qk_bias": True, "prelude_norm": True}, {}),
    "linear-wider-core": (
        {"injection_type": "linear", **WIDE},
        shapes(tables=(0, 3), gates=("core_block.1", "coda.0")),
    ),
    "add": ({"injection_type": "add"}, shapes(tables=(1,), gates=())),
    "diagonal-wider-core": (WIDE, {}),
    "no-envelope-layers": ({"n_layers_in_prelude": 0, "n_layers_in_coda": 0}, shapes(gates=("core_block.0",))),
}


def foreign(c: LoopedConfig, seed=0):
    """A file of this configuration, with random tensors under the original's names."""
    made = build(c, seed=seed)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return key_map(c).export(made.state_dict())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_key_map_is_a_bijection_and_export_restores_bytes(name):
    changes, where = VARIANTS[name]
    c = config({**FACTS, **changes}, where)
    rules = key_map(c).rules
    names = [n for rule in rules for n in rule.theirs]
    assert len(set(names)) == len(names)
    file = {f"_orig_mod.model.{n}": t.clone() for n, t in foreign(c).items()}
    model = assemble(FAMILY, {**FACTS, **changes}, file)
    assert model.config == c
    assert sorted(n for rule in rules for n in rule.ours) == sorted(model.state_dict())
    exported = key_map(c).export(model.state_dict())
    assert {f"_orig_mod.model.{n}" for n in exported} == set(file)
    for key, tensor in exported.items():
        assert torch.equal(tensor.view(torch.int32), file[f"_orig_mod.model.{key}"].view(torch.int32)), key
    assert torch.isfinite(run(model, tokens(model, 1, 4)).logits).all()


def test_halves_of_the_gated_map_are_gate_then_up():
    facts = {**FACTS, "mlp_class_name": "GatedMLP", "nonlin_name": "SiLU"}
    file = foreign(config(facts, {}))
    model = assemble(FAMILY, facts, file)
    fused = file["transformer.prelude.0.mlp.fc.weight"]
    assert torch.equal(model.prelude[0].ffn.gate.weight, fused[:40])
    assert torch.equal(model.prelude[0].ffn.up.weight, fused[40:])


def test_a_wider_core_has_its_own_shapes():
    model = build(mapped(**WIDE))
    assert model.core[0].attn.q.weight.shape == (72, 72)
    assert model.core[0].ffn.up.weight.shape == (56, 72)
    assert model.project.weight.shape == (48, 72)
    assert model.spec.noise_width == 72


def test_a_tied_head_may_lie_in_the_file_if_it_is_the_embedding():
    facts = {**FACTS, "tie_embeddings": True}
    file = foreign(config(facts, {}))
    file["lm_head.weight"] = file["transformer.wte.weight"].clone()
    assemble(FAMILY, facts, file)
    file["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match="load: config says tie_embeddings but lm_head"):
        assemble(FAMILY, facts, file)


def test_the_rotary_table_of_a_file_is_checked_not_read():
    c, file = mapped(), foreign(mapped())
    table = key_map(c).computed["freqs_cis"]()
    assert table.shape == (1, 32, 1, 6, 2)
    assemble(FAMILY, FACTS, {**file, "freqs_cis": table})
    with pytest.warns(UserWarning, match="freqs_cis of the file"):
        assemble(FAMILY, FACTS, {**file, "freqs_cis": table + 1})


def test_files_are_recognised_by_their_names():
    for changes, where in VARIANTS.values():
        assert FAMILY.recognises(frozenset(foreign(config({**FACTS, **changes}, where))))
    others = [family for name, family in ((n, PUBLISHED[n]) for n in PUBLISHED) if name != "parcae"]
    for family in others:
        assert not family.recognises(frozenset(foreign(mapped(qk_bias=True)))), family.name
    assert not FAMILY.recognises(frozenset({"transformer.wte.weight", "transformer.adapter.weight"}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f.pop("transformer.C.weight"), "load: 1 tensor missing (transformer.C.weight)"),
        (lambda f: f.update(extra=torch.zeros(1)), "load: 1 tensor unexpected (extra)"),
        (
            lambda f: f.update({"transformer.ln_f.weight": torch.zeros(3)}),
            "load: 1 tensor of wrong shape (transformer.ln_f.weight: file [3], model [48])",
        ),
        (
            lambda f: f["transformer.core_block.0.attn.c_proj.weight"].fill_(torch.nan),
            "load: 2304 non-finite values in core.0.attn.o.weight",
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "not-finite"],
)
def test_tensors_that_do_not_fit_are_named(spoil, message):
    file = foreign(mapped())
    spoil(file)
    with pytest.raises(ValueError, match=re.escape(message)):
        assemble(FAMILY, FACTS, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": "48"}, "load: config.json must have a whole number as n_embd. Got '48'."),
        ({"num_attention_heads": 5}, "must have widths that its heads divide. Got width 48 and 5 heads."),
        ({"num_attention_heads": 0}, "must have widths that its heads divide. Got width 48 and 0 heads."),
        ({"bias": True}, "load: config.json of parcae must have bias False. Got True. This variant has no native"),
        ({"clip_qkv": 8.0}, "must have clip_qkv None. Got 8.0."),
        ({"norm_class_name": "LayerNorm"}, "must have norm_class_name 'RMSNorm'. Got 'LayerNorm'."),
        ({"block_class_name": "SandwichBlock"}, "must have block_class_name 'TransformerPreNormBlock'."),
        ({"rope_settings": {"rope_condense_ratio": 2}}, "must have rope_condense_ratio 1. Got 2."),
        ({"nonlin_name": "Tanh"}, "must have (mlp_class_name, nonlin_name) out of ('BaseMLP', 'ReLU2'), "),
        ({"injection_type": "gate"}, "must have injection_type out of diagonal, linear, add. Got 'gate'."),
        ({"init_strategy": "wang"}, "must have init_strategy out of normal, "),
        ({"state_init": "ones"}, "must have state_init out of like-init, normal, embed, zero, unit. Got 'ones'."),
        (
            {"recurrent_embedding_dimension": 96, "recurrent_num_attention_heads": 4},
            "LoopedConfig.core_attention.head_dim must be that of attention (12)",
        ),
        ({"qk_bias": True, "num_key_value_heads": 2}, "attention.qk_bias has one key bias per query head"),
    ],
)
def test_settings_without_a_place_here_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mapped(**changes)


def test_a_missing_size_is_named():
    facts = {name: value for name, value in FACTS.items() if name != "vocab_size"}
    with pytest.raises(ValueError, match=r"load: config\.json must have vocab_size\. Got none\."):
        config(facts, {})


def test_a_core_layer_of_another_width_cannot_add_value_embeddings():
    with pytest.raises(ValueError, match=r"kv_heads \* head_dim = 48 where layer 1 adds value embeddings"):
        config({**FACTS, **WIDE}, shapes(tables=(1,), gates=("core_block.0",)))


def test_the_trained_start_needs_noise_of_the_width_of_the_state():
    model = build(mapped(**WIDE))
    context = model.encode(tokens(model, 1, 3))
    with pytest.raises(ValueError, match="this model starts from noise of width 72; got None"):
        model.init_state(context, None)
    assert isinstance(model.config.state_init, Normal)


def test_a_prompt_longer_than_the_trained_context_is_refused():
    model = build(mapped())
    with pytest.raises(ValueError, match="encode: 33 tokens, but looped has 32 positions"):
        model.encode(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match=re.escape("outside the vocabulary (61)")):
        model.encode(torch.full((1, 2), 61))
