import dataclasses

import pytest

from looplab.data.documents import Document, DocumentSet
from looplab.engine.config import EngineConfig
from looplab.engine.gates import Gate, GateFacts
from looplab.engine.verdict import read_results, store_result
from looplab.interop import load, reuse
from looplab.interop.reuse import audit_at_start, default_rule, settle_reuse
from looplab.models.base import build
from looplab.models.folder import save_folder, weight_hash
from looplab.models.ouro import tiny_ouro
from looplab.recurrence.exit import HazardExit

CONFIG = EngineConfig(exit_rule="hazard", exit_threshold=0.5)


def zero(interval):
    """The interval of a cost of nothing."""
    return dataclasses.replace(interval, estimate=0.0, low=0.0, high=0.0)


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    text = tuple(Document(f"{n} and {n * n}, then {n * 7}") for n in range(8))
    small = {
        "WINDOWS": 8,
        "PROMPT": 2,
        "AUDITED": ("last_exited", "single"),
        "builtin_corpus": lambda side: DocumentSet(f"builtin:{side}", text, "h"),
    }
    for name, value in small.items():
        monkeypatch.setattr(reuse, name, value)
    config = dataclasses.replace(tiny_ouro(), vocab=259, max_positions=16)
    save_folder(tmp_path / "model", build(config, seed=1))
    return load(tmp_path / "model")


def test_the_default_rule_is_built_as_requests_build_it(loaded):
    assert default_rule(EngineConfig(), {}) is None
    assert default_rule(EngineConfig(exit_rule="fixed", exit_threshold=2.0), {}) is None
    assert default_rule(CONFIG, {}) == HazardExit(threshold=0.5)
    facts = GateFacts(gate="same_step", model="m", weights="w", steps=4, width=32, teacher="hazard")
    gates = {"same_step": Gate(facts, loaded.model.gate).rule(0.5)}
    asked = EngineConfig(exit_rule="same_step", exit_threshold=0.25, min_steps=2)
    rule = default_rule(asked, gates)
    assert (rule.threshold, rule.min_steps, str(rule)) == (0.25, 2, "same_step(0.25, min_steps=2)")
    assert default_rule(dataclasses.replace(asked, exit_threshold=None), gates).threshold == 0.5


def test_a_stored_verdict_decides_and_without_one_pick_measures(loaded):
    config, choice, _ = settle_reuse(loaded, CONFIG, {})
    assert (config, choice.kv_rule, choice.word, choice.warns) == (CONFIG, "last_exited", "unknown", True)
    with pytest.raises(ValueError, match="--reuse require needs a pass of last_exited.*Got unknown"):
        settle_reuse(loaded, dataclasses.replace(CONFIG, reuse="require"), {})
    assert settle_reuse(loaded, EngineConfig(), {})[:2] == (EngineConfig(), None)
    measured = audit_at_start(loaded, HazardExit(threshold=0.5))
    assert measured.windows == 8 and measured.rules == ("last_exited", "single")
    assert measured.weights == weight_hash(loaded.model)
    picked = dataclasses.replace(CONFIG, reuse="pick")
    config, choice, _ = settle_reuse(loaded, picked, {})
    words = {v.kv_rule: v.word for v in measured.verdicts if v.delay == 0}
    passing = [v for v in measured.verdicts if v.word == "reusable"]
    assert choice.exits == bool(passing) and read_results(loaded.folder) == ()
    # What is stored is believed: with every verdict turned into a failure, pick runs full depth.
    failed = tuple(dataclasses.replace(v, word="not reusable") for v in measured.verdicts)
    store_result(loaded.folder, dataclasses.replace(measured, verdicts=failed))
    config, choice, _ = settle_reuse(loaded, picked, {})
    assert (choice.exits, config.exit_rule, config.exit_threshold) == (False, None, None)
    assert settle_reuse(loaded, dataclasses.replace(picked, draft_steps=1), {}).config.draft_steps == 1
    passed = tuple(dataclasses.replace(v, word="reusable", rule=zero(v.rule)) for v in measured.verdicts)
    store_result(loaded.folder, dataclasses.replace(measured, verdicts=passed))
    config, choice, _ = settle_reuse(loaded, dataclasses.replace(picked, draft_steps=1), {})
    assert choice.exits and config.draft_steps is None, "exits leave nothing to guess"
    store_result(loaded.folder, measured)
    assert settle_reuse(loaded, CONFIG, {})[1].word == words["last_exited"]


def test_a_model_without_a_tokenizer_cannot_be_measured(loaded):
    with pytest.raises(ValueError, match="--reuse pick needs a tokenizer.*Run `looplab reuse` first"):
        audit_at_start(dataclasses.replace(loaded, tokenizer=None), HazardExit(threshold=0.5))
