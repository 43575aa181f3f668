"""The settings that the transformers library sees of a model."""

import json

import pytest
from transformers import AutoConfig

from looplab._config import from_dict
from looplab.interop import LooplabConfig
from looplab.interop.citizen.config import CODE, CODE_TEXT, cache_slots
from looplab.models.base import PRESETS, build
from looplab.models.looped import LoopedConfig
from looplab.recurrence.kv import Anchor, Single
from looplab.recurrence.loop import new_cache


def of(preset, **options):
    return LooplabConfig.of(build(PRESETS[preset](), device="meta"), **options)


def test_the_plain_facts_are_those_of_the_model():
    config = of("huginn-0125")
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (5280, 55, 96)
    assert (config.vocab_size, config.tie_word_embeddings, config.num_key_value_heads) == (65536, True, 55)
    assert config.num_hidden_layers == 8
    assert config.total_num_hidden_layers == 2 + 32 * 4 + 2
    ouro = of("ouro-1.4b")
    assert (ouro.num_hidden_layers, ouro.total_num_hidden_layers, ouro.tie_word_embeddings) == (24, 96, False)
    assert ouro.max_position_embeddings == 65536


@pytest.mark.parametrize(
    ("preset", "stored", "slots"),
    [
        ("tiny-dense", 3, 3),
        ("tiny-layer-loop", 5, 1 + 3 * 2 + 1),
        ("tiny-two-level", 4, 1 + 2 * (2 * 3) + 2 * 2 + 1),
        ("tiny-blocks", 4, 1 + 4 + 4 + 1),
    ],
)
def test_layers_are_counted_as_stored_and_as_slots(preset, stored, slots):
    config = of(preset)
    assert (config.num_hidden_layers, config.total_num_hidden_layers) == (stored, slots)


def test_slots_are_those_of_a_cache_of_the_rule():
    spec = build(PRESETS["tiny-core"]()).spec
    assert cache_slots(spec, 5) == 1 + 5 * 2 + 1
    assert cache_slots(spec, 5, Single()) == 1 + 2 + 1
    assert cache_slots(spec, 5, Anchor(n=2)) == 1 + 3 * 2 + 1


def test_a_copy_counts_slots_as_layers_and_survives_a_file(tmp_path):
    config = of("tiny-core")
    deep = config.inflated(7)
    assert deep.num_hidden_layers == 1 + 7 * 2 + 1
    assert config.num_hidden_layers == 4  # not changed
    assert deep.inflated(3).num_hidden_layers == 1 + 3 * 2 + 1
    assert config.inflated().num_hidden_layers == config.total_num_hidden_layers
    deep.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == deep.num_hidden_layers
    with pytest.raises(ValueError, match="num_steps must be an int >= 0"):
        config.inflated(-1)


def test_a_file_brings_the_configuration_back(tmp_path):
    config = of("tiny-two-level", tokenizer="bytes")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, LooplabConfig) and again.tokenizer == "bytes"
    assert again.looped == PRESETS["tiny-two-level"]() == from_dict(LoopedConfig, config.model)
    assert (tmp_path / CODE).read_text() == CODE_TEXT
    facts = json.loads((tmp_path / "config.json").read_bytes())
    assert facts["model_type"] == "looplab" and facts["schema"] == 1 and facts["architecture"] == "looped"
    assert set(facts["auto_map"].values()) == {
        "modeling_looplab.LooplabConfig", "modeling_looplab.LooplabForCausalLM"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("num_hidden_layers", 5, "num_hidden_layers must be 4, as its entry 'model' says. Got 5"),
        ("tie_word_embeddings", False, "tie_word_embeddings must be True, as its entry 'model' says. Got False"),
        ("schema", 2, "has schema 2, this version reads 1"),
        ("architecture", None, "has no 'architecture'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(entry, value, said, tmp_path):
    of("tiny-core").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {entry: value}))
    with pytest.raises(ValueError, match=said):
        LooplabConfig.from_pretrained(tmp_path)


def test_unknown_architectures_and_models_are_refused():
    config = of("tiny-core")
    with pytest.raises(KeyError, match="Unknown model 'loped'. Did you mean 'looped'"):
        LooplabConfig(architecture="loped", model=config.model)
    with pytest.raises(KeyError, match="Unknown config key 'dimm'"):
        LooplabConfig(architecture="looped", model=config.model | {"dimm": 3})
    with pytest.raises(ValueError, match="model must be causal. Got trm"):
        of("tiny-trm-attn")


def test_slots_fit_what_a_cache_makes():
    for preset in ("tiny-core", "tiny-two-level", "tiny-layer-loop", "tiny-blocks", "tiny-dense", "tiny-ouro"):
        spec = build(PRESETS[preset](), device="meta").spec
        cache = new_cache(spec, rows=1, capacity=1)
        inside = sum(spec.cost.blocks[b].layers * cache.rule.slots(n) for b, n in cache.iterations.items())
        assert cache_slots(spec) == inside + spec.cost.prelude.layers + spec.cost.coda.layers
