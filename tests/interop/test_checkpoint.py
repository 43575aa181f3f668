"""What `load` opens, and what it says of what it does not open."""

import json

import pytest
import torch

from looplab.data.tokenizers import ByteTokenizer
from looplab.interop import builtin_names, load
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder


def test_a_folder_that_looplab_wrote_opens_with_its_tokenizer(tmp_path):
    model = build(PRESETS["tiny-core"](), seed=4)
    save_folder(tmp_path / "m", model, trained={"recipe": "none"})
    loaded = load(tmp_path / "m")
    assert loaded.facts["trained"] == {"recipe": "none"}
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.control is None
    assert not loaded.model.training
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_opens_by_name_and_knows_its_training(name):
    loaded = load(name)
    assert loaded.facts["trained"]
    if loaded.control is not None:
        assert loaded.control in builtin_names()


def test_an_unknown_name_gets_a_suggestion():
    name = builtin_names()[0]
    with pytest.raises(KeyError, match=f"Did you mean '{name}'"):
        load(name + "x")


def test_a_foreign_family_is_named_and_no_code_runs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "foo", "auto_map": {"AutoModel": "evil.Evil"}}))
    with pytest.raises(ValueError, match="model_type 'foo' has no native implementation and remote code is never run"):
        load(tmp_path)


def test_types_that_do_not_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype float16 is not supported on CPU here"):
        load(tmp_path, dtype="float16")
    with pytest.raises(ValueError, match=r"dtype must be one of .* Got 'fp8'"):
        load(tmp_path, dtype="fp8")
