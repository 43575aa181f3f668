"""`looplab export`: folders that open again, and refusals that name the part without a place."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from interop.dense_sources import saved
from looplab import load
from looplab.cli import exit_codes, main
from looplab.cli.export import stored_dtype
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder
from models.test_inverse import FAMILY
from source import ROOT
from tolerances import EXACT

OURO = ROOT / "tests" / "golden" / "ouro"


@pytest.mark.parametrize("preset", FAMILY)
def test_the_written_folder_opens_and_is_written_again_byte_for_byte(preset, tmp_path, capsys):
    model = build(PRESETS[preset]())
    save_folder(tmp_path / "own", model)
    out, again = tmp_path / "out", tmp_path / "again"
    assert main(["export", str(tmp_path / "own"), str(out), "--format", FAMILY[preset]]) == exit_codes.DONE
    text = capsys.readouterr().out
    assert f"wrote {out}: config.json, model.safetensors\nnext: looplab load-check {out}" in text
    assert "MODEL reads bytes, which has no file" in text and "not kept" not in text
    found = load(str(out))
    assert found.source.family == FAMILY[preset]
    torch.testing.assert_close(found.model.state_dict(), model.state_dict(), **EXACT)
    assert main(["export", str(out), str(again)]) == exit_codes.DONE
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (out / file).read_bytes()


@pytest.mark.parametrize("family", ["llama3", "olmo2"])
def test_a_retrofit_is_written_with_its_tokenizer_in_the_format_of_retrofitted_models(family, tmp_path):
    saved(tmp_path / "source", family, hidden_act="silu")
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    own, out = tmp_path / "own", tmp_path / "out"
    command = ["retrofit", str(tmp_path / "source"), "--core", "2:4", "--tokens", "0", "--out", str(own)]
    assert main([*command, "--dtype", "bfloat16"]) == exit_codes.DONE
    assert main(["export", str(own), str(out), "--format", "retrofit"]) == exit_codes.DONE
    one, other = load(str(own)), load(str(out))
    torch.testing.assert_close(other.model.state_dict(), one.model.state_dict(), **EXACT)
    assert (other.tokenizer.hash, other.tokenizer.eos) == (one.tokenizer.hash, 2)
    tensors = load_file(out / "model.safetensors")
    assert tensors["transformer.adapter.weight"].dtype == torch.bfloat16 and stored_dtype(own) == "bfloat16"
    assert "freqs_cis" in tensors  # which the original reads from its file


def test_a_published_checkpoint_comes_back_in_its_own_format(tmp_path):
    source = next(path.parent for path in OURO.rglob("weights.safetensors"))
    shutil.copytree(source, tmp_path / "source")
    assert main(["export", str(tmp_path / "source"), str(tmp_path / "out")]) == exit_codes.DONE
    file = "weights.safetensors"
    one, other = load_file(source / file), load_file(tmp_path / "out" / file)
    torch.testing.assert_close(other, one, **EXACT)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_lost_law_of_training_is_told(tmp_path, capsys):
    command = ["retrofit", "text-dense", "--core", "2:4", "--tokens", "0", "--out", str(tmp_path / "own")]
    assert main([*command, "--num-steps", "4", "--trained-depth", "uniform:1:4"]) == exit_codes.DONE
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "out"), "--format", "retrofit"]) == exit_codes.DONE
    assert "not kept: trained_depth=UniformDepth(1, 4), for which the format has no word" in capsys.readouterr().out


def test_refusals_are_one_line_and_write_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    for model, options, said in (
        ("text-core", ["--format", "ouro"], "export: envelope=Envelope(...) has no place in format 'ouro'"),
        (
            "text-core",
            [],
            "export: MODEL must come from a checkpoint of a published family. Got 'text-core'. Name a format",
        ),
        ("text-core", ["--format", "oro"], "Did you mean 'ouro'"),
        ("text-dense", ["--format", "ouro"], "Retrofit it first if it is dense"),
        ("text-cor", ["--format", "ouro"], "Did you mean 'text-core'"),
    ):
        assert main(["export", model, str(out), *options]) == exit_codes.MODEL
        text = capsys.readouterr().err
        assert said in text and text.count("\n") == 1 and not out.exists()
    saved(tmp_path / "library", "qwen3")
    assert main(["export", str(tmp_path / "library"), str(out), "--format", "ouro"]) == exit_codes.MODEL
    assert "one of the transformers library" in capsys.readouterr().err
    (out / "sub").mkdir(parents=True)
    assert main(["export", "text-core", str(out), "--format", "ouro"]) == exit_codes.BUSY
