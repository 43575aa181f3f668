"""Every preset and recipe survives its own file format and builds without storage."""

import json

import pytest

from looplab._config import config_hash, from_dict, to_dict
from looplab.models.base import MODELS, PRESETS, build, model_name
from looplab.recipes import RECIPES
from looplab.training.config import RunConfig


def through_json(config):
    return json.loads(json.dumps(to_dict(config)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_the_round_trip(name):
    config = PRESETS[name]()
    again = from_dict(MODELS[model_name(config)].config_class, through_json(config))
    assert again == config
    assert config_hash(again) == config_hash(config)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_the_round_trip(name):
    config = RECIPES[name]()
    again = RunConfig.read(through_json(config))
    assert again == config
    assert config_hash(again) == config_hash(config)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_knows_its_name(name):
    assert RECIPES[name]().recipe == name


@pytest.mark.parametrize(
    "config", [*(PRESETS[n]() for n in PRESETS), *(RECIPES[n]().model for n in RECIPES)], ids=[*PRESETS, *RECIPES]
)
def test_the_model_builds_on_the_meta_device(config):
    model = build(config, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.spec.params.total == sum(p.numel() for p in model.parameters())
