import dataclasses
import json

import pytest

from looplab.studies.base import STUDIES
from looplab.studies.par import SMOKED
from looplab.studies.predictions import digest, predictions_text, register
from looplab.training.folder import FolderError


def text(name="par", scale="smoke", seeds=1):
    study = STUDIES[name]()
    return predictions_text(study, scale, range(seeds), study.arms(scale, seeds))


def test_the_text_holds_every_claim_with_its_rule_and_every_arm_with_its_seed():
    found = json.loads(text(seeds=2))
    assert [claim["id"] for claim in found["claims"]] == [claim.id for claim in STUDIES["par"].claims]
    assert found["claims"][0]["rule"] == "above(0.95)"
    assert [(arm["name"], arm["seed"]) for arm in found["arms"]] == [(a, s) for s in (0, 1) for a in SMOKED]
    assert found["arms"][0]["source"]["model"]["trained_depth"]["high"] == 8


def test_the_hash_follows_scale_seeds_study_and_rules_alone(monkeypatch):
    assert text() == text()
    assert len({digest(text()), digest(text(seeds=2)), digest(text(scale="cpu")), digest(text("dcp", seeds=0))}) == 4
    before = digest(text())
    monkeypatch.setattr(STUDIES["par"], "claims", STUDIES["par"].claims[:4])
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
    path.write_text(path.read_text().replace("0.95", "0.94"))
    with pytest.raises(FolderError, match=r"claims 1 parts 1 rule numbers 1 0\.94 -> 0\.95"):
        register(tmp_path, text())
    path.write_text("{")
    with pytest.raises(FolderError, match="the file is no JSON"):
        register(tmp_path, text())


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FolderError, match=r"must be empty or hold this study\. Found: notes\.txt"):
        register(tmp_path, text())


def test_fields_that_came_later_leave_the_hash_of_older_predictions_alone():
    """Of the file that was written before `par` first ran; a changed claim, arm, size or default changes it."""
    study = STUDIES["par"]()
    found = digest(predictions_text(study, "cpu", range(3), study.arms("cpu", 3)))
    assert found == "a8c5aa50ca31485da7cdec56ecd304f2d11406fc69efaadd4b73b838f87a4788"


def test_what_a_claim_asks_beyond_its_defaults_is_in_the_file(monkeypatch):
    before = digest(text())
    study = STUDIES["par"]
    monkeypatch.setattr(study, "claims", (dataclasses.replace(study.claims[0], some=True), *study.claims[1:]))
    found = json.loads(text())["claims"]
    assert found[0]["some"] is True
    assert "some" not in found[1]
    assert digest(text()) != before
