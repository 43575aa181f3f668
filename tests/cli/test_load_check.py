import json
import shutil
from dataclasses import asdict

import torch
from safetensors.torch import load_file, save_file

from looplab.cli import exit_codes, main
from looplab.interop.load_check import load_check
from source import ROOT

HUGINN = ROOT / "tests" / "golden" / "huginn" / "full"


def broken(tmp_path):
    tensors = load_file(HUGINN / "weights.safetensors")
    gone = sorted(tensors)[-12:]
    save_file({n: t for n, t in tensors.items() if n not in gone}, tmp_path / "model.safetensors")
    shutil.copyfile(HUGINN / "config.json", tmp_path / "config.json")
    return gone


def test_a_folder_that_opens_ends_with_zero(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["load-check", str(HUGINN)]) == exit_codes.DONE
    text = capsys.readouterr().out
    found = load_check(HUGINN)
    for shown in ("huginn (published)", found.trained_depth, found.kv_rule, f"{found.parameters:,}", *found.notes):
        assert shown in text
    assert "would open       yes" in text


def test_a_folder_that_does_not_open_ends_with_three_and_all_reasons(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    gone = broken(tmp_path)
    assert main(["load-check", str(tmp_path)]) == exit_codes.MODEL == 3
    text = capsys.readouterr().out
    assert all(name in text for name in gone)
    assert "would open       no" in text and "12 tensors missing" in text


def test_json_is_everything(tmp_path, capsys):
    gone = broken(tmp_path)
    assert main(["load-check", str(tmp_path), "--json"]) == exit_codes.MODEL
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(asdict(load_check(tmp_path))))
    assert facts["missing"] == gone


def test_a_family_can_be_given_and_names_are_checked(tmp_path, capsys):
    shutil.copyfile(HUGINN / "weights.safetensors", tmp_path / "model.safetensors")
    settings = json.loads((HUGINN / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "other"}))
    assert main(["load-check", str(tmp_path)]) == exit_codes.MODEL
    assert "unknown (nearest: huginn)" in capsys.readouterr().out
    assert main(["load-check", str(tmp_path), "--family", "huginn"]) == exit_codes.DONE
    assert main(["load-check", str(tmp_path), "--family", "hugin"]) == exit_codes.MODEL
    assert main(["load-check", str(tmp_path / "none")]) == exit_codes.MODEL
    assert "MODEL must be a checkpoint folder" in capsys.readouterr().err


def test_a_spoilt_number_is_counted(tmp_path, capsys):
    tensors = load_file(HUGINN / "weights.safetensors")
    tensors["transformer.ln_f.weight"][:3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copyfile(HUGINN / "config.json", tmp_path / "config.json")
    assert main(["load-check", str(tmp_path)]) == exit_codes.MODEL
    assert "transformer.ln_f.weight: 3" in capsys.readouterr().out


def test_what_was_not_compared_is_not_called_right(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    shutil.copyfile(HUGINN / "weights.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "huginn_next"}')
    assert main(["load-check", str(tmp_path)]) == exit_codes.MODEL
    text = capsys.readouterr().out
    assert text.count("not compared") == 3
    assert f"To read it as the nearest: looplab load-check {tmp_path} --family huginn or retrofit" in text


def test_facts_of_two_levels_are_told_in_words(capsys):
    assert main(["load-check", str(ROOT / "tests" / "golden" / "hrm")]) == exit_codes.DONE
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    told = {name: rows[name].strip() for name in ("layers", "state", "causal")}
    assert told == {"layers": "0 1 | 2", "state": "high 32, low 32", "causal": "no"}
