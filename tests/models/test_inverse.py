"""Our configurations in the words of published families: there and back, and what has no place."""

from dataclasses import replace

import pytest
import torch

from looplab.models.base import PRESETS, build
from looplab.models.inverse import canonical, formats, settings_of
from looplab.models.looped import Envelope, LoopedConfig
from looplab.models.published import PUBLISHED, assemble
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import GatedReluSquared, GeGLU, Gelu, ReluSquared, Silu, SwiGLU
from looplab.nn.norm import LayerNorm
from looplab.nn.rope import NoPE
from looplab.recurrence.depth import FixedDepth, PoissonDepth, UniformDepth, Unknown
from looplab.recurrence.halting import HazardGate, NoHalt
from looplab.recurrence.injection import Add, Concat, Diagonal
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import ClampLast
from looplab.recurrence.state_init import FromEmbeds, Normal, Unit, Zeros
from tolerances import EXACT

FAMILY = {
    "tiny-huginn": "huginn", "tiny-retrofit-llama": "retrofit", "tiny-retrofit-olmo": "retrofit", "tiny-ouro": "ouro",
    "tiny-parcae": "parcae", "tiny-loopformer": "loopformer",
}  # fmt: skip
LARGE = {
    "huginn-0125": "huginn", "retrofit-tinyllama": "retrofit", "retrofit-llama-1b": "retrofit",
    "retrofit-olmo-1b": "retrofit", "ouro-1.4b": "ouro", "ouro-2.6b": "ouro", "parcae-140m": "parcae",
    "parcae-1.3b": "parcae", "loopformer-3blk": "loopformer",
}  # fmt: skip


def again(config, family):
    """The configuration that the settings give."""
    family = PUBLISHED[family]
    facts, lost = settings_of(config, family)
    return family.config(facts, dict.fromkeys(family.key_map(config).theirs, ())), lost


def bare(config):
    """Without what only says how weights start."""
    config = replace(canonical(config), init=Init())
    if isinstance(config.injection, Concat):
        config = replace(config, injection=replace(config.injection, init="normal"))
    return replace(config, halt=HazardGate()) if isinstance(config.halt, HazardGate) else config


def same(config, other):
    return bare(config) == bare(other)


@pytest.mark.parametrize("preset", FAMILY)
def test_a_model_of_every_tiny_preset_comes_back_with_equal_weights(preset):
    model, family = build(PRESETS[preset]()), PUBLISHED[FAMILY[preset]]
    facts, lost = settings_of(model.config, family)
    assert not lost
    found = assemble(family, facts, family.key_map(model.config).export(model.state_dict()))
    assert same(found.config, model.config)
    torch.testing.assert_close(found.state_dict(), model.state_dict(), **EXACT)


@pytest.mark.parametrize("preset", LARGE)
def test_the_released_shapes_come_back(preset):
    config = PRESETS[preset]()
    found, lost = again(config, LARGE[preset])
    assert not lost and same(found, config)


def test_every_format_is_tried():
    assert set(FAMILY.values()) == set(formats())


def test_settings_that_a_preset_does_not_have_come_back_too():
    huginn, olmo, ouro, parcae = (PRESETS[f"tiny-{n}"]() for n in ("huginn", "retrofit-olmo", "ouro", "parcae"))
    tried = [
        (replace(huginn, state_init=start), "huginn") for start in (Zeros(), Normal(std=0.1), Normal(std="like_init"))
    ]
    tried += [(replace(huginn, trained_depth=law), "huginn") for law in (FixedDepth(num_steps=4), Unknown())]
    tried += [
        (replace(olmo, state_init=FromEmbeds(), injection=Concat(order="state_first", init="identity")), "retrofit")
    ]
    tried += [(replace(huginn, attention=replace(huginn.attention, qk_bias=True)), "huginn")]
    tried += [(replace(ouro, attention=replace(ouro.attention, window=7)), "ouro")]
    tried += [(replace(ouro, head=Head(tied=True), max_positions=50), "ouro")]
    plain = replace(
        parcae,
        attention=replace(parcae.attention, position=NoPE(), value_embedding=False),
        value_tables=None,
        value_gates=None,
    )
    tried += [(plain, "parcae")]
    tried += [(replace(parcae, injection=way), "parcae") for way in (Add(), Concat(order="state_first", init="normal"))]
    tried += [(replace(parcae, state_init=start), "parcae") for start in (Zeros(), Unit(), Normal(std=1.0, cut=None))]
    branches = (ReluSquared(hidden=64, scale=0.5), Silu(hidden=64), Gelu(hidden=64), SwiGLU(hidden=64))
    branches += (GeGLU(hidden=64), GatedReluSquared(hidden=64, scale=0.5))
    tried += [(replace(parcae, ffn=ffn, core_ffn=None), "parcae") for ffn in branches]
    tried += [(replace(parcae, embed_scale=40**0.5, head=Head(tied=False, softcap=15.0)), "parcae")]
    tried += [(replace(parcae, trained_depth=FixedDepth(num_steps=4), prelude_norm=None), "parcae")]
    for config, family in tried:
        found, lost = again(config, family)
        assert same(found, config) and not lost, (family, config)


def looped(**changes):
    """Ouro's shape, and changes."""
    return replace(PRESETS["tiny-ouro"](), **changes)


@pytest.mark.parametrize(
    ("config", "family", "said"),
    [
        (
            looped(injection=Diagonal(initial_decay=0.5, source="embeds")),
            "ouro",
            r"^export: injection=Diagonal\(\.\.\.\) has no place in format 'ouro'$",
        ),
        (looped(halt=NoHalt()), "ouro", r"halt=NoHalt\(\.\.\.\)"),
        (looped(norm=LayerNorm()), "ouro", r"norm=LayerNorm\(\.\.\.\)"),
        (looped(embed_scale=2.0), "ouro", "embed_scale=2.0 has no place in format 'ouro'"),
        (looped(head=Head(tied=False, softcap=3.0)), "ouro", "head.softcap=3.0"),
        (looped(beyond=ClampLast()), "ouro", r"beyond=ClampLast\(\.\.\.\)"),
        (replace(PRESETS["tiny-retrofit-llama"](), halt=HazardGate()), "retrofit", r"halt=HazardGate\(\.\.\.\)"),
        (replace(PRESETS["tiny-retrofit-llama"](), unrotated_layers=(1,)), "retrofit", r"unrotated_layers=\(1,\)"),
        (PRESETS["tiny-retrofit-llama"](), "huginn", "position.pairing='half' has no place in format 'huginn'"),
        (PRESETS["tiny-huginn"](), "loopformer", r"has no place in format 'loopformer'"),
        (PRESETS["tiny-blocks"](), "retrofit", r"order=Blocks\(\.\.\.\)"),
        (PRESETS["tiny-two-level"](), "ouro", r"order=TwoLevel\(\.\.\.\)"),
        (
            replace(PRESETS["tiny-huginn"](), attention=replace(PRESETS["tiny-huginn"]().attention, head_dim=6)),
            "huginn",
            "attention.head_dim=6",
        ),
    ],
)  # fmt: skip
def test_what_has_no_place_is_named(config, family, said):
    with pytest.raises(ValueError, match=said):
        settings_of(config, PUBLISHED[family])


def test_a_law_of_training_without_words_is_lost_and_told():
    laws = {
        "huginn": UniformDepth(low=1, high=4),
        "ouro": UniformDepth(low=1, high=4),
        "parcae": PoissonDepth(rate=2.0, max_steps=9),
    }
    for family, law in laws.items():
        config = replace(PRESETS[f"tiny-{family}"](), trained_depth=law)
        found, lost = again(config, family)
        assert lost == [f"trained_depth={law}"]
        assert same(replace(found, trained_depth=law), config)


def test_other_families_and_other_models_are_refused():
    with pytest.raises(
        ValueError, match=r"format must be one that .* Got 'trm'\. Choose one of huginn, loopformer, ouro"
    ):
        settings_of(looped(), PUBLISHED["trm"])
    dense = PRESETS["tiny-dense"]()
    with pytest.raises(ValueError, match=r"Got DenseConfig, which has no place in format 'ouro'\. Retrofit it"):
        settings_of(dense, PUBLISHED["ouro"])


def test_a_shape_that_the_family_refuses_itself_is_refused_in_one_sentence():
    config = LoopedConfig(
        **{
            f: getattr(PRESETS["tiny-parcae"](), f)
            for f in ("vocab", "ffn", "injection", "state_init", "trained_depth")
        },
        dim=42,
        attention=replace(PRESETS["tiny-parcae"]().attention, value_embedding=False),
        order=ModelLoop(num_steps=4),
        envelope=Envelope(prelude=1, coda=1),
    )
    with pytest.raises(
        ValueError, match=r"export: this configuration has no place in format 'parcae' \(.*42 and 4 heads"
    ):
        settings_of(config, PUBLISHED["parcae"])
