import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from looplab.cli import exit_codes, main
from looplab.interop.load_check import load_check
from source import ROOT

HUGINN = ROOT / "tests" / "golden" / "huginn" / "full"


@pytest.fixture
def file(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(HUGINN / "config.json", source / "config.json")
    tensors = load_file(HUGINN / "weights.safetensors")
    content = {"model": tensors, **{f"entry{n}": n for n in range(12)}}
    torch.save(content | {"also": {"lm_head.weight": torch.ones(1)}}, source / "model.pt")
    return source / "model.pt"


def test_a_converted_checkpoint_passes_load_check(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(file), str(out)]) == exit_codes.DONE
    text = capsys.readouterr().out
    assert "tensors under model: 76 float32" in text
    assert "not kept: entry0 (int)" in text and "not kept: 5 more, see convert.json" in text
    assert "copied: config.json" in text
    assert "opens: yes, as huginn" in text and f"next: looplab load-check {out}" in text
    assert main(["load-check", str(out)]) == exit_codes.DONE


def test_json_is_the_manifest_and_the_look_at_it(file, tmp_path, capsys):
    assert main(["convert", str(file), str(tmp_path / "out"), "--json"]) == exit_codes.DONE
    said = json.loads(capsys.readouterr().out)
    assert said.pop("load_check") == json.loads(json.dumps(asdict(load_check(tmp_path / "out"))))
    assert said == json.loads((tmp_path / "out" / "convert.json").read_bytes())


def test_a_key_chooses_the_state_dict(file, tmp_path, capsys):
    assert main(["convert", str(file), str(tmp_path / "out"), "--key", "also"]) == exit_codes.DONE
    assert "read 1 tensors under also" in capsys.readouterr().out
    assert main(["convert", str(file), str(tmp_path / "other"), "--key", "none"]) == exit_codes.MODEL


def test_refusals_are_one_line_and_a_code(file, tmp_path, capsys):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert main(["convert", str(tmp_path / "module.pt"), str(tmp_path / "out")]) == exit_codes.MODEL
    said = capsys.readouterr().err
    assert said.startswith("convert: FILE must hold tensors") and said.count("\n") == 1
    assert "the type torch.nn.modules.linear.Linear" in said
    assert main(["convert", str(tmp_path / "none.pt"), str(tmp_path / "out")]) == exit_codes.MODEL
    assert main(["convert", str(file), str(file.parent)]) == exit_codes.BUSY
    assert "new or empty folder" in capsys.readouterr().err


def test_a_folder_without_settings_says_so(file, tmp_path, capsys):
    (file.parent / "config.json").unlink()
    assert main(["convert", str(file), str(tmp_path / "out")]) == exit_codes.DONE
    assert "no settings beside FILE" in capsys.readouterr().out


def test_the_look_at_the_end_reads_the_folder_as_it_is_told(file, tmp_path, capsys):
    assert main(["convert", str(file), str(tmp_path / "untied"), "--no-tie"]) == exit_codes.DONE
    assert "opens: not yet; load: 1 tensor missing (lm_head.weight)" in capsys.readouterr().out
    assert main(["convert", str(file), str(tmp_path / "other"), "--family", "ouro"]) == exit_codes.DONE
    assert "opens: not yet; load: " in capsys.readouterr().out
    assert main(["convert", str(file), str(tmp_path / "none"), "--family", "our"]) == exit_codes.MODEL
    assert "Unknown family 'our'. Did you mean 'ouro'?" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
