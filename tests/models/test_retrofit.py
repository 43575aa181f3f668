"""Settings, names and presets of retrofitted models. The numbers are compared in tests/golden/test_retrofit.py."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from looplab.models.base import PRESETS, build
from looplab.models.huginn import key_map
from looplab.models.published import PUBLISHED, assemble, bare
from looplab.models.retrofit import QK_NORM, config
from looplab.nn.norm import BranchOnly, PreNorm
from looplab.nn.rope import Llama3
from looplab.recurrence.injection import Every, SkipFirst
from looplab.recurrence.state_init import FromEmbeds, Normal
from source import ROOT
from tolerances import EXACT

FOLDER = ROOT / "tests" / "golden" / "retrofit"
FACTS = {case: json.loads((FOLDER / case / "config.json").read_text()) for case in ("llama", "olmo")}
WEIGHTS = {case: load_file(FOLDER / case / "weights.safetensors") for case in FACTS}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shapes(case):
    return {name: tuple(tensor.shape) for name, tensor in WEIGHTS[case].items()}


def stack(layers, *, heads, kv_heads, head_dim, hidden, vocab, qk_norm=False):
    """Parameters of a retrofitted model, added up from its matrices."""
    dim = heads * head_dim
    each = 2 * dim * dim + 2 * dim * kv_heads * head_dim + 3 * dim * hidden + 2 * dim
    each += (heads + kv_heads) * head_dim if qk_norm else 0
    return layers * each + 2 * dim * dim + 2 * vocab * dim + dim


@pytest.mark.parametrize(
    ("preset", "count", "sum_"),
    [
        (
            "retrofit-tinyllama",
            844_171_264,
            stack(16, heads=32, kv_heads=4, head_dim=64, hidden=5632, vocab=32000),
        ),
        (
            "retrofit-llama-1b",
            1_385_228_288,
            stack(14, heads=32, kv_heads=8, head_dim=64, hidden=8192, vocab=128256),
        ),
        (
            "retrofit-olmo-1b",
            1_359_071_232,
            stack(14, heads=16, kv_heads=16, head_dim=128, hidden=8192, vocab=100352, qk_norm=True),
        ),
    ],
)
def test_presets_have_their_exact_counts(preset, count, sum_):
    assert build(PRESETS[preset](), device="meta").spec.params.total == count == sum_


def test_layers_follow_from_the_tensors():
    llama, olmo = (config(FACTS[case], shapes(case)) for case in ("llama", "olmo"))
    assert isinstance(llama.placement, PreNorm) and llama.attention.qk_norm is None
    assert isinstance(olmo.placement, BranchOnly) and olmo.attention.qk_norm.over == "full"
    assert olmo.attention.position.order == "after_norm"
    for made in (llama, olmo):
        assert made.exit_norm == "none" and not made.head.tied and made.embed_scale == 1
        assert made.norm.eps == 1e-5 and made.attention.position.pairing == "half"
        assert (made.attention.heads, made.attention.kv_heads, made.attention.head_dim) == (4, 2, 8)
        assert str(made.trained_depth) == "PoissonLognormal(4, max_steps=512)"


def test_both_are_of_the_family_and_huginn_is_not():
    for family, case in (("retrofit", "llama"), ("retrofit", "olmo"), ("huginn", None)):
        weights = WEIGHTS[case] if case else load_file(FOLDER.parent / "huginn" / "full" / "weights.safetensors")
        names = frozenset(map(bare, weights))
        assert [name for name in ("huginn", "retrofit") if PUBLISHED[name].recognises(names)] == [family]


@pytest.mark.parametrize(
    ("mode", "start", "when"),
    [
        ("random", Normal(std=0.11180339887498948), Every()),
        ("embed-init", FromEmbeds(), Every()),
        ("skip-adapter", FromEmbeds(), SkipFirst()),
    ],
)
def test_start_modes(mode, start, when):
    made = config(FACTS["llama"] | {"initial_state_mode": mode}, {})
    assert (made.state_init, made.injection.when, made.injection.order) == (start, when, "state_first")


def test_rotary_positions_are_those_of_the_source():
    read = config(FACTS["llama"] | {"rope_base": 3.0, "rope_theta": 500000.0, "rope_scaling": LLAMA3}, {})
    scaling = Llama3(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert (read.attention.position.base, read.attention.position.scaling) == (500000.0, scaling)
    assert PRESETS["retrofit-llama-1b"]().attention.position == read.attention.position
    newer = {name: value for name, value in FACTS["llama"].items() if not name.startswith("rope")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert config(newer, {}).attention.position == config(FACTS["llama"], {}).attention.position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"initial_state_mode": "warm"},
            "must have initial_state_mode random, embed-init or skip-adapter. Got 'warm'.",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "must have rope_scaling of type 'llama3' or none. Got 'yarn'."),
        ({"rope_theta": None}, "must have rope_theta. Got none."),
        ({"mlp_class_name": "BaseMLP"}, "must have mlp_class_name 'GatedMLP'"),
    ],
)
def test_what_the_published_code_does_not_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(FACTS["llama"] | changes, {})


@pytest.mark.parametrize("case", ["llama", "olmo"])
def test_names_map_one_to_one_and_back_to_the_same_bytes(case):
    model = assemble(PUBLISHED["retrofit"], FACTS[case], WEIGHTS[case])
    names = key_map(model.config)
    ours = [name for rule in names.rules for name in rule.ours]
    assert len(ours) == len(set(ours)) and set(ours) == set(model.state_dict())
    assert names.theirs == set(WEIGHTS[case])
    torch.testing.assert_close(names.export(model.state_dict()), WEIGHTS[case], **EXACT)


@pytest.mark.parametrize(("case", "first", "second"), [("llama", "attn_in", "ffn_in"), ("olmo", "attn_out", "ffn_out")])
def test_norms_stand_where_the_source_has_them(case, first, second):
    layer = assemble(PUBLISHED["retrofit"], FACTS[case], WEIGHTS[case]).core[0]
    for number, name in ((1, first), (2, second)):
        stored = WEIGHTS[case][f"transformer.core_block.0.norm_{number}.weight"]
        assert torch.equal(getattr(layer, name).weight, stored)


def test_an_olmo_file_without_its_query_norms_is_refused():
    weights = {name: tensor for name, tensor in WEIGHTS["olmo"].items() if name != QK_NORM}
    with pytest.raises(ValueError, match=r"5 tensors? unexpected \(transformer\.coda\.0\.attn\.k_norm\.weight, "):
        assemble(PUBLISHED["retrofit"], FACTS["olmo"], weights)
