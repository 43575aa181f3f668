"""P2: planted affine map, on the real audit and on broken ones."""

from looplab.audit import decompose
from looplab.audit.positive_controls.planted_affine import PlantedAffine
from looplab.audit.probes.affine import Affine


def test_p2_the_affine_probe_finds_what_was_planted_and_nothing_where_nothing_was():
    outcome = PlantedAffine().run(0)
    assert outcome.passed, outcome


def test_p2_catches_an_affine_probe_that_changes_nothing(monkeypatch):
    monkeypatch.setattr(Affine, "apply", lambda self, hidden: hidden)
    found = PlantedAffine().run(0).found.splitlines()
    assert [line.endswith("<- fails") for line in found] == [True, True, False]


def test_p2_catches_a_word_that_is_always_present(monkeypatch):
    monkeypatch.setattr(decompose, "probe_word", lambda share: "present")
    found = PlantedAffine().run(0).found.splitlines()
    assert [line.endswith("<- fails") for line in found] == [False, False, True]
