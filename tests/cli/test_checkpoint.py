"""What a command may say of how a checkpoint is read, and how refusals of `load` sound on a command line."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from looplab.cli import exit_codes, main
from looplab.cli.checkpoint import ReadAs, in_flags, open_checkpoint
from looplab.cli.exit_codes import UserError
from source import ROOT

HUGINN = ROOT / "tests" / "golden" / "huginn" / "full"


@pytest.fixture
def untied(tmp_path):
    """A checkpoint whose settings say that head and embedding are one, and whose file holds two."""
    shutil.copyfile(HUGINN / "config.json", tmp_path / "config.json")
    tensors = load_file(HUGINN / "weights.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_by_default_files_decide():
    assert ReadAs().tied is None
    assert (ReadAs(tie=True).tied, ReadAs(no_tie=True).tied) == (True, False)


@pytest.mark.parametrize("argv", [["audit"], ["describe"], ["load-check"], ["convert", "model.pt"]], ids=lambda a: a[0])
def test_both_ties_are_a_usage_error(argv, untied, capsys):
    assert main([*argv, str(untied), "--tie", "--no-tie"]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert said == f"{argv[0]}: --tie and --no-tie exclude each other. Got both. Leave one out.\n"


def test_a_tie_that_does_not_hold_names_the_flag(untied, capsys):
    assert main(["describe", str(untied)]) == exit_codes.MODEL
    told = "differ (max 0.5). Pass --no-tie or fix the file"
    assert told in capsys.readouterr().err
    assert main(["load-check", str(untied)]) == exit_codes.MODEL
    assert "Pass --no-tie" in " ".join(capsys.readouterr().out.split())
    assert main(["load-check", str(untied), "--no-tie"]) == exit_codes.DONE
    assert main(["describe", str(untied), "--no-tie"]) == exit_codes.DONE
    model = open_checkpoint(str(untied), ReadAs(no_tie=True)).model
    assert not torch.equal(model.lm_head.weight, model.embedding.weight)


def test_a_family_is_handed_on():
    with pytest.raises(UserError, match="Unknown family 'hugin'. Did you mean 'huginn'?") as refused:
        open_checkpoint(str(HUGINN), ReadAs(family="hugin"))
    assert refused.value.code == exit_codes.MODEL
    with pytest.raises(UserError, match="config.json must have rope_theta. Got none."):
        open_checkpoint(str(HUGINN), ReadAs(family="retrofit"))


def test_arguments_become_flags():
    assert in_flags("load: tie must be None. Got True.") == "--tie must be None. Got True."
    assert in_flags("They fit none. Pass family=NAME") == "They fit none. Pass --family NAME"
    assert in_flags("load: nothing of that kind") == "load: nothing of that kind"


def test_a_preset_is_read_from_no_files(capsys):
    assert main(["describe", "tiny-core", "--no-tie"]) == exit_codes.USAGE
    assert "Got the preset 'tiny-core'" in capsys.readouterr().err


def test_notes_of_a_family_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = open_checkpoint(str(HUGINN)).model
    assert model.notes
    assert main(["describe", str(HUGINN)]) == exit_codes.DONE
    text = capsys.readouterr().out
    assert all(note in text for note in model.notes)
