import json

import pytest

from looplab.studies.base import STUDIES
from looplab.studies.predictions import digest, predictions_text, register
from looplab.training.folder import FolderError


def text(name="depth_schedule", scale="smoke", seeds=1):
    study = STUDIES[name]()
    return predictions_text(study, scale, seeds, study.arms(scale, seeds))


def test_the_text_holds_every_claim_with_its_rule_and_every_arm_with_its_seed():
    found = json.loads(text(seeds=2))
    assert [claim["id"] for claim in found["claims"]] == [f"depth_schedule.{n}" for n in range(1, 6)]
    assert found["claims"][0]["rule"] == "above(0.05)"
    assert [(arm["name"], arm["seed"]) for arm in found["arms"]] == [(a, s) for s in (0, 1) for a in "ABC"]
    assert found["arms"][1]["source"]["model"]["trained_depth"]["law"]["high"] == 8


def test_the_hash_follows_scale_seeds_study_and_rules_alone(monkeypatch):
    assert text() == text()
    assert len({digest(text()), digest(text(seeds=2)), digest(text(scale="cpu")), digest(text("dcp", seeds=0))}) == 4
    before = digest(text())
    monkeypatch.setattr(STUDIES["depth_schedule"], "claims", STUDIES["depth_schedule"].claims[:4])
    assert digest(text()) != before


def test_the_hash_is_sha_256():
    assert digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_file_is_written_once_and_found_again(tmp_path):
    assert register(tmp_path, text())
    assert (tmp_path / "predictions.json").read_text() == text()
    assert not register(tmp_path, text())


def test_other_predictions_are_refused_with_the_first_difference(tmp_path):
    register(tmp_path, text())
    with pytest.raises(FolderError, match=r"holds other predictions \(seeds \[0\] -> \[0, 1\]; SHA-256 \w{12} there"):
        register(tmp_path, text(seeds=2))
    path = tmp_path / "predictions.json"
    path.write_text(path.read_text().replace("0.05", "0.04"))
    with pytest.raises(FolderError, match=r"claims 1 parts 1 rule numbers 1 0\.04 -> 0\.05"):
        register(tmp_path, text())
    path.write_text("{")
    with pytest.raises(FolderError, match="the file is no JSON"):
        register(tmp_path, text())


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FolderError, match=r"must be empty or hold this study\. Found: notes\.txt"):
        register(tmp_path, text())
