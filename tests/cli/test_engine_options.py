"""Options that every command with an engine shares."""

from dataclasses import fields

from looplab.cli.engine_options import EngineOptions
from looplab.engine.config import EngineConfig


def test_every_option_of_the_same_name_reaches_the_engine():
    odd = {
        "exit_rule": "latent", "exit_threshold": 0.25, "min_steps": 2, "max_steps": 3, "exit_delay": 1,
        "allow_costly_exit": True, "kv_rule": "single", "numerics": "exact", "reuse": "off", "launch_rows": 5,
        "max_resident": 7, "min_coda_rows": 3, "num_pages": 9, "kv_fraction": 0.25, "max_model_len": 64,
        "draft_steps": 1, "draft_tokens": 3,
    }  # fmt: skip
    config = EngineOptions(**odd).engine_config()
    assert {name: getattr(config, name) for name in odd} == odd
    shared = {field.name for field in fields(EngineOptions)} & {field.name for field in fields(EngineConfig)}
    assert shared == set(odd)


def test_without_options_the_engine_has_its_own_defaults():
    assert EngineOptions().engine_config() == EngineConfig()
