"""Settings, names and counts of the IFM checkpoints, and our models against a twin over the original's names."""

import itertools
import math
import re

import pytest
import torch

from contract.zoo import noise, tokens
from looplab.models.base import PRESETS, build
from looplab.models.dense import DenseConfig
from looplab.models.ifm import OPEN, ORIGINAL, RECIPES, TINY, family
from looplab.models.published import PUBLISHED, assemble
from looplab.nn.norm import RMSNorm
from looplab.recurrence.boundary import PlainRMS
from looplab.recurrence.depth import FixedDepth, PoissonLognormal, Unknown
from looplab.recurrence.injection import Concat, Diagonal, NoInjection, Orthogonal
from looplab.recurrence.loop import forward
from looplab.recurrence.plan import ModelLoop, TwoLevel
from looplab.recurrence.state_init import FromEmbeds, Normal, Zeros
from reference import ifm as twin
from tolerances import BF16_LOGITS, EXACT, TWIN

FAMILY = family(ORIGINAL)
SMALL = {**RECIPES["ifm-dense-ouro"][1], **TINY, "num_layers": 4, "loop_times": 2, "init_std": 0.15}
MIDDLE = {
    **SMALL, "arch": "huginn", "huginn_prelude_layers": 1, "huginn_coda_layers": 1, "huginn_state_init": "normal"
}  # fmt: skip
ARMS = {
    "d28": {**SMALL, "loop_times": 1},
    "ouro": SMALL,
    "raw-injection": {**SMALL, "loop_input_injection": "diagonal"},
    "inner-range": {**SMALL, "loop_input_injection": "diagonal", "loop_start_layer": 1, "loop_end_layers": 3},
    "middle": {**MIDDLE, "huginn_state_init": "input", "huginn_input_injection": "none"},
    "prelude-injection": {**MIDDLE, "huginn_state_init": "input"},
    "huginn": MIDDLE,
    "shared-hl": {**MIDDLE, "huginn_hierarchical_state": "shared_hl"},
    "split-hl": {**MIDDLE, "huginn_hierarchical_state": "split_hl"},
    "split-hl-x2": {**MIDDLE, "huginn_hierarchical_state": "split_hl", "huginn_split_module_repeats": 2},
    "linear": {
        **MIDDLE, "huginn_input_injection": "linear", "huginn_recurrent_exit_norm": "parameterless_rms"
    },
    "parcae": {**MIDDLE, "huginn_prelude_norm": "rms"},
    "orthogonal": {**MIDDLE, "huginn_prelude_orthogonal": True},
}  # fmt: skip
"""A small model of every arm."""
READINGS = [dict(zip(OPEN, answers, strict=True)) for answers in itertools.product(*OPEN.values())]


def config(changes, **answers):
    return family({**ORIGINAL, **answers}).config({"model": {**SMALL, **changes}}, {})


def weights(arm, read_as=FAMILY):
    """A model in float64 with every parameter off its start, and its tensors under the original's names."""
    model = build(read_as.config({"model": ARMS[arm]}, {}), seed=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, read_as.key_map(model.config).export(model.state_dict())


@pytest.mark.parametrize(
    ("name", "total"),
    [
        *((f"ifm-dense-{arm}", 1_496_667_648) for arm in ("d28", "ouro", "middle")),
        *(
            (f"ifm-dense-{arm}", 1_499_030_016)
            for arm in ("raw-injection", "prelude-injection", "huginn", "shared-hl", "split-hl", "split-hl-x2")
        ),
        ("ifm-dense-d112", 3_676_915_200),
        ("ifm-p2-s", 303_579_648),
        ("ifm-p2-m", 819_495_936),
        ("ifm-p2-l", 2_488_338_432),
        ("ifm-p2-s-linear", 305_937_408),
        ("ifm-p2-s-parcae", 303_579_648 + 1536),
        ("ifm-p2-s-orthogonal", 303_579_648),
        ("ifm-p2-m-linear", 819_495_936 + 3072**2 - 3072),
        ("ifm-p2-m-parcae", 819_495_936 + 3072),
        ("ifm-p2-m-orthogonal", 819_495_936),
    ],
)
def test_presets_have_the_published_counts(name, total):
    model = build(PRESETS[name](), device="meta")
    assert model.spec.params.total == total
    assert sum(parameter.numel() for parameter in model.parameters()) == total


def test_every_preset_is_counted_here():
    counted = test_presets_have_the_published_counts.pytestmark[0].args[1]
    assert sorted({*RECIPES} - {name for name, _ in counted}) == ["tiny-ifm-ouro", "tiny-ifm-split-hl"]


@pytest.mark.parametrize(
    ("name", "steps"), [("ifm-dense-d28", 7137), ("ifm-dense-d112", 17533), ("ifm-dense-huginn", 7148)]
)
def test_the_published_stops_are_twenty_tokens_per_active_parameter(name, steps):
    active = build(PRESETS[name](), device="meta").spec.params.total  # a dense model's parameters are all active
    assert math.ceil(20 * active / 4_194_304) == steps


@pytest.mark.parametrize(
    ("arm", "layers"),
    [
        *((arm, 112) for arm in ("ouro", "raw-injection", "middle", "huginn", "shared-hl", "split-hl-x2", "d112")),
        ("split-hl", 64),
        ("d28", 28),
    ],
)
def test_arms_execute_the_published_number_of_layers(arm, layers):
    spec = build(PRESETS[f"ifm-dense-{arm}"](), device="meta").spec
    repeats = getattr(spec.order, "repeats", 1)
    looped = sum(len(spec.blocks[a.block].layers) for a in spec.plan()) * repeats
    assert looped + spec.cost.prelude.layers + spec.cost.coda.layers == layers


def test_sampled_depths_follow_the_published_law():
    law = PRESETS["ifm-p2-s-linear"]().trained_depth
    assert law == PoissonLognormal(rate=4.0, sigma=0.5, max_steps=64)
    # Depths 1, 2, 5 and 10 of the law that the paper's runs drew from.
    published = {1: 0.05768747546, 2: 0.12713673872, 5: 0.13796282735, 10: 0.02509943395}
    for depth, probability in published.items():
        assert law.pmf()[depth] == pytest.approx(probability, rel=1e-4)
    assert PRESETS["ifm-p2-l"]().trained_depth == FixedDepth(num_steps=5)
    learned = {"huginn_depth_prior": "learned", "huginn_sampling_scheme": "poisson-lognormal-capped"}
    assert config({**MIDDLE, **learned}).trained_depth == Unknown()


def test_settings_end_up_where_they_belong():
    c = config({"rmsnorm_eps": 1e-4, "rope_base": 7e3}, rope="half")
    assert (c.dim, c.vocab, c.blocks, c.ffn.hidden, c.head.tied) == (32, 64, (4,), 40, False)
    assert (c.attention.heads, c.attention.kv_heads, c.attention.head_dim) == (4, 2, 8)
    assert (c.attention.position.base, c.attention.position.pairing) == (7e3, "half")
    assert c.norm == RMSNorm(eps=1e-4, zero_centred=True)
    assert (c.order, c.trained_depth, c.injection) == (ModelLoop(num_steps=2), FixedDepth(num_steps=2), NoInjection())
    assert (c.init.std, c.init.embed_std) == (0.15, 32**-0.5)
    assert config({"head_dim": None, "num_kv_heads": None}).attention.kv_heads == 4
    assert isinstance(config({"loop_times": 1}), DenseConfig)
    assert config({"loop_times": 1, "loop_input_injection": "diagonal"}).order == ModelLoop(num_steps=1)


def test_arms_are_the_points_of_the_family_that_the_paper_describes():
    arms = {name: FAMILY.config({"model": fields}, {}) for name, fields in ARMS.items()}
    assert (arms["middle"].injection, arms["middle"].state_init) == (NoInjection(), FromEmbeds())
    assert arms["huginn"].state_init == Normal(std=32**-0.5, cut=None)
    assert config({**MIDDLE, "huginn_state_init": "zero"}).state_init == Zeros()
    decays = Diagonal(initial_decay=math.exp(-1), decay_params=True)
    assert arms["prelude-injection"].injection == decays
    assert arms["raw-injection"].injection == Diagonal(initial_decay=math.exp(-1), decay_params=True, source="embeds")
    assert arms["split-hl-x2"].order == TwoLevel(h=2, l=3, share=False, repeats=2)
    assert arms["shared-hl"].trained_depth == FixedDepth(num_steps=2)
    assert (arms["inner-range"].envelope.prelude, arms["inner-range"].envelope.coda) == (1, 1)
    assert arms["linear"].injection == Concat(order="state_first", init="normal", bias=True)
    assert arms["linear"].boundary == PlainRMS(eps=1e-6)
    assert arms["parcae"].prelude_norm == arms["parcae"].norm
    parcae, orthogonal = PRESETS["ifm-p2-s-parcae"](), PRESETS["ifm-p2-s-orthogonal"]()
    assert parcae.injection.initial_decay == pytest.approx(5**-0.5)
    assert isinstance(orthogonal.injection, Orthogonal)
    assert (orthogonal.injection.eps, orthogonal.prelude_norm) == (1e-6, None)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_computes_what_the_original_does(arm):
    model, exported = weights(arm)
    ids = tokens(model, 2, 6)
    z = noise(model, torch.arange(6).expand(2, 6))
    start = None if z is None else z * 32**-0.5
    with torch.no_grad():
        logits = forward(model, ids, noise=z).logits
        expected = twin.logits(ARMS[arm], exported, ids, start)
    torch.testing.assert_close(logits, expected, **TWIN)


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: "-".join(r.values()))
def test_each_reading_is_another_function_of_the_same_file(reading):
    model, exported = weights("huginn", family(reading))
    ids, z = tokens(model, 2, 6), noise(model, torch.arange(6).expand(2, 6))
    with torch.no_grad():
        logits = forward(model, ids, noise=z).logits
        for other in READINGS:
            expected = twin.logits(ARMS["huginn"], exported, ids, z * 32**-0.5, **other)
            if other == reading:
                torch.testing.assert_close(logits, expected, **TWIN)
            else:
                assert float((logits - expected).norm() / logits.norm()) > BF16_LOGITS


@pytest.mark.parametrize("arm", ARMS)
def test_the_key_map_covers_every_tensor_once_and_is_undone_by_its_inverse(arm):
    model, exported = weights(arm)
    rules = FAMILY.key_map(model.config).rules
    assert sorted(name for rule in rules for name in rule.ours) == sorted(model.state_dict())
    assert len({name for rule in rules for name in rule.theirs}) == len(rules)
    again = assemble(FAMILY, {"model": ARMS[arm]}, exported)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), **EXACT)
    assert again.notes == FAMILY.notes
    back = FAMILY.key_map(again.config).export(again.state_dict())
    torch.testing.assert_close(back, exported, **EXACT)


def test_tensors_have_the_names_of_the_original():
    names = set(weights("raw-injection")[1])
    layer = {f"layers.3.{n}.weight" for n in ("attention.norm", "attention.wq", "attention.wk", "attention.wv")}
    layer |= {f"layers.3.{n}.weight" for n in ("attention.wo", "nffn.norm", "nffn.fc1", "nffn.fc2", "nffn.fc3")}
    carry = {f"loop_input_injection_module.{n}" for n in ("input_adapter.weight", "A_log", "dt_bias")}
    assert {n for n in names if n.startswith("layers.3.")} == layer
    rest = {n for n in names if not n.startswith("layers.")}
    assert rest == {"embed.weight", "output.final_norm.weight", "output.output.weight"} | carry
    huginn = {n for n in weights("huginn")[1] if "injection" in n}
    assert huginn == {f"input_injection.{n}" for n in ("input_adapter.weight", "A_log", "dt_bias")}
    linear = {n for n in weights("linear")[1] if "injection" in n}
    assert linear == {"input_injection.adapter.weight", "input_injection.adapter.bias"}
    assert "huginn_prelude_norm_module.weight" in weights("parcae")[1]


def test_names_alone_tell_the_family_and_no_other():
    names = frozenset(weights("huginn")[1])
    assert [f for f in PUBLISHED if PUBLISHED[f].recognises(names)] == ["ifm"]
    assert not FAMILY.recognises(names - {"output.output.weight"})


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({}, ["layers.0.moe.experts.weight1"], "ifm file must be dense. Got layers.0.moe.experts.weight1."),
        ({"num_experts": 25}, [], "ifm file must be dense. Got num_experts 25. Mixture checkpoints are not"),
        ({"qknorm": True}, [], "config.json of ifm must have qknorm False. Got True."),
        ({"swiglu": False}, [], "must have swiglu True. Got False."),
        ({"rope_head_dim": 4}, [], "must have rope_head_dim 8, the whole head. Got 4."),
        ({"loop_input_injection": "linear"}, [], "loop_input_injection out of none, diagonal. Got 'linear'."),
        ({"loop_end_layers": 5}, [], "loop_end_layers, within num_layers (4). Got 0 and 5."),
        ({"dense_prelude_input_injection": "diagonal"}, [], "dense_prelude_input_injection 'none'. Got 'diagonal'"),
        ({"num_layers": None}, [], "must have a whole number as num_layers. Got None."),
        ({**MIDDLE, "huginn_recurrent_layers": 3}, [], "prelude + recurrent + coda. Got 4 and 1 + 3 + 1."),
        ({**MIDDLE, "huginn_hierarchical_state": "triple"}, [], "out of none, shared_hl, split_hl. Got 'triple'."),
    ],
)  # fmt: skip
def test_what_no_dense_checkpoint_has_is_refused(changes, names, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FAMILY.config({"model": {**SMALL, **changes}}, dict.fromkeys(names, (1,)))


def test_settings_without_their_section_are_refused():
    with pytest.raises(ValueError, match=r"config\.json of ifm must have a section 'model'\. Got none"):
        FAMILY.config({"tokenizer": {}}, {})


def test_a_stack_shorter_than_its_settings_say_is_named():
    _, exported = weights("ouro")
    with pytest.raises(ValueError, match=r"load: 9 tensors missing \(layers\.4\.attention\.norm\.weight, "):
        assemble(FAMILY, {"model": {**SMALL, "num_layers": 5}}, exported)


def test_a_family_with_open_questions_opens_nothing():
    _, exported = weights("ouro")
    with pytest.raises(
        ValueError, match=r"ifm must be read with answers to gate \(fc1 or fc3\), rope \(interleaved or"
    ):
        assemble(PUBLISHED["ifm"], {"model": SMALL}, exported)
