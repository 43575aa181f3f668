"""Folders that save_pretrained wrote, opened by our own door without the transformers library."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import looplab
from looplab.cli import audit as command
from looplab.cli import exit_codes, main
from looplab.interop import LooplabForCausalLM
from looplab.interop.load_check import load_check
from looplab.interop.pretrained import check_names, configuration, is_pretrained
from looplab.models.base import PRESETS, build
from looplab.models.published import MisfitError
from tolerances import EXACT


@pytest.fixture
def folder(tmp_path):
    LooplabForCausalLM.wrap(build(PRESETS["tiny-core"](), seed=4)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def change(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries))


def test_the_model_comes_back_and_the_library_is_not_loaded(folder):
    loaded = looplab.load(folder)
    expected = build(PRESETS["tiny-core"](), seed=4)
    torch.testing.assert_close(loaded.model.state_dict(), expected.state_dict(), **EXACT)
    assert loaded.model.config == expected.config and is_pretrained(loaded.facts) and loaded.source is None
    code = f"import sys, looplab; looplab.load({str(folder)!r}); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_look_at_the_folder_says_what_it_is(folder):
    found = load_check(folder)
    assert (found.kind, found.family, found.loads, found.problems) == ("looplab", "looped", True, [])
    assert found.parameters == sum(p.numel() for p in build(PRESETS["tiny-core"]()).parameters())
    assert found.tokenizer == "" and found.tensors == len(load_file(folder / "model.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.final_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert load_check(folder).missing == ["model.final_norm.weight"]
    change(folder, schema=2)
    assert "has schema 2, this version reads 1" in load_check(folder).problems[0]


@pytest.mark.slow
def test_an_audit_of_the_folder_ends_in_a_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "write_report", lambda result, folder, beside: folder)  # drawing is tested in report/
    model = build(dataclasses.replace(PRESETS["tiny-core"](), vocab=259), seed=4)
    LooplabForCausalLM.wrap(model, tokenizer="bytes").save_pretrained(tmp_path / "saved")
    text = tmp_path / "m.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"item {i} has {i * 7919 % 1000}"}) for i in range(60)))
    argv = [str(tmp_path / "saved"), "--data", f"math={text}", "--replicates", "1000", "--max-tokens", "16", "--quiet"]
    argv += ["--grid", "1,2", "--probes", "temperature", "--controls", "none", "--init-seeds", "1", "--control", "none"]
    assert main(["audit", *argv, "--out", str(tmp_path / "out")]) == exit_codes.DONE
    assert "not identifiable (the block has no iteration index)" in capsys.readouterr().out


def test_other_types_are_cast(folder):
    assert looplab.load(folder, dtype="bfloat16").model.embedding.weight.dtype == torch.bfloat16


def test_settings_that_cannot_be_read_are_refused(folder):
    change(folder, schema=3)
    with pytest.raises(ValueError, match="has schema 3, this version reads 1. Read it with the version that wrote it"):
        looplab.load(folder)
    change(folder, schema=1, architecture="dens")
    with pytest.raises(KeyError, match="Unknown model 'dens'. Did you mean 'dense'"):
        looplab.load(folder)
    with pytest.raises(ValueError, match="load: config.json has no 'architecture', 'model'"):
        configuration({"schema": 1})
    with pytest.raises(ValueError, match="tie must be None for a folder that looplab wrote"):
        looplab.load(folder, tie=True)


def test_broken_weights_are_refused(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.core.0.attn.q.weight": torch.full((32, 32), torch.inf)}, path)
    with pytest.raises(ValueError, match=r"load: 1024 non-finite values in model\.core\.0\.attn\.q\.weight"):
        looplab.load(folder)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is truncated"):
        looplab.load(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no .*safetensors"):
        looplab.load(folder)


def test_names_are_compared_to_the_last():
    own = {"model.a": (2,), "model.b": (3, 4)}
    check_names(own, dict(own))
    with pytest.raises(MisfitError) as caught:
        check_names(own, {"model.a": (5,), "model.c": (1,)})
    assert caught.value.missing == ("model.b",) and caught.value.unexpected == ("model.c",)
    assert caught.value.misshapen == ("model.a: file [5], model [2]",)
