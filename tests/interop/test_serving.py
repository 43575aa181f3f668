"""From a checkpoint to an engine."""

import json

import pytest

import looplab
from looplab.engine.config import EngineConfig
from looplab.engine.request import SamplingParams
from looplab.interop.serving import chat_template, open_engine


def test_a_built_in_text_model_answers():
    engine = open_engine(looplab.load("text-2x4-sampled"), EngineConfig(num_pages=32, min_coda_rows=1))
    (one,) = engine.generate(["First Citizen:"], SamplingParams(max_tokens=4, temperature=0.0))
    assert len(one.tokens) == 4 and one.text and engine.describe()["name"] == "text-2x4-sampled"


@pytest.mark.parametrize("name", ["demo", "text-2x4-fixed", "text-2x4-sampled", "text-core", "text-dense"])
def test_every_built_in_text_model_can_be_served_exactly(name):
    sizes = EngineConfig(numerics="exact", num_pages=64, launch_rows=4, min_coda_rows=1, max_model_len=48)
    engine = open_engine(looplab.load(name), sizes)
    assert engine.describe()["numerics"] == "exact", "the probe asks for more than was promised, or bits depend on rows"


def test_a_model_of_a_task_has_no_text_to_serve():
    with pytest.raises(ValueError, match="must have a tokenizer to be served"):
        open_engine(looplab.load("par-swaps"))


def test_chat_templates_are_found_where_checkpoints_keep_them(tmp_path):
    assert chat_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert chat_template(tmp_path) == "d"
    settings.write_text(json.dumps({"chat_template": "c"}))
    assert chat_template(tmp_path) == "c"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert chat_template(tmp_path) == "j"
