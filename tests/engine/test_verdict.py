import dataclasses
import json

import pytest

from looplab.engine.verdict import (
    FreeRun,
    ReuseResult,
    ReuseVerdict,
    Stratum,
    choose,
    judge,
    read_results,
    sentence,
    store_result,
    verdict_for,
)
from looplab.intervals import Interval


def interval(estimate, half=0.001):
    low, high = estimate - half, estimate + half
    return Interval(estimate=estimate, low=low, high=high, plain_low=low, plain_high=high, level=0.95)


def verdict(kv_rule="single", delay=0, word="reusable", *, kv_bytes=64, mean_depth=2.0, reuse=0.0, needed=None):
    none = interval(0.0)
    return ReuseVerdict(
        kv_rule=kv_rule,
        delay=delay,
        word=word,
        rule=none,
        read=none,
        reuse=interval(reuse),
        total=none,
        past=none,
        kl=none,
        flips=none,
        mean_depth=mean_depth,
        kv_bytes=kv_bytes,
        windows_needed=needed,
        by_depth=(Stratum(name="1", tokens=3, reuse=0.1),),
        slope=None,
        free=FreeRun(windows=2, tokens=5, diverged=1, first=(3,)),
    )


def result(*verdicts, weights="w", exit_rule="hazard(0.5)"):
    return ReuseResult(
        model="m",
        weights=weights,
        exit_rule=exit_rule,
        steps=4,
        prompt=6,
        output=10,
        windows=64,
        text="t",
        text_hash="h",
        seed=0,
        replicates=200,
        verdicts=verdicts,
    )


def test_words_follow_from_the_bounds():
    assert judge(interval(0.004, 0.005), interval(0.01, 0.005), 64) == ("reusable", None)
    assert judge(interval(0.004, 0.005), interval(0.03, 0.005), 64) == ("not reusable", None)
    assert judge(interval(0.02, 0.005), interval(0.0, 0.0), 64) == ("not reusable", None)
    # Half of the width has to shrink by 2: four times the windows, and one.
    assert judge(interval(0.005, 0.01), interval(0.0, 0.0), 64) == ("undecided", 257)
    assert judge(interval(0.01, 0.001), interval(0.0, 0.0), 64) == ("undecided", None)


def test_a_stored_result_comes_back_and_replaces_its_elder(tmp_path):
    first = result(verdict(reuse=0.1), verdict("first"))
    path = store_result(tmp_path, first)
    assert path == tmp_path / "reuse.json" and read_results(tmp_path) == read_results(path) == (first,)
    other = result(verdict(), exit_rule="latent(0.1)")
    store_result(tmp_path, other)
    assert read_results(tmp_path) == (first, other)
    newer = result(verdict(word="undecided", needed=100))
    store_result(tmp_path, newer)
    assert read_results(tmp_path) == (newer, other)
    retrained = result(verdict(), weights="x")
    store_result(tmp_path, retrained)
    assert read_results(tmp_path) == (retrained,)
    before = path.read_bytes()
    store_result(tmp_path, retrained)
    assert path.read_bytes() == before
    assert read_results(tmp_path / "nowhere") == ()


def test_a_verdict_is_found_for_exactly_what_was_measured():
    stored = [result(verdict(), verdict(delay=1, word="undecided"))]
    asked = {"weights": "w", "exit_rule": "hazard(0.5)", "kv_rule": "single"}
    assert verdict_for(stored, **asked).word == "reusable"
    assert verdict_for(stored, **asked, delay=1).word == "undecided"
    for name in asked:
        assert verdict_for(stored, **(asked | {name: "other"})) is None
    assert verdict_for([], **asked) is None


@pytest.mark.parametrize("word", ["reusable", "not reusable", "undecided"])
def test_modes(word):
    stored = [result(verdict(word=word))]
    asked = {"weights": "w", "exit_rule": "hazard(0.5)", "kv_rule": "single"}
    assert choose("off", stored, **asked).word == "unknown" and not choose("off", stored, **asked).warns
    checked = choose("check", stored, **asked)
    assert (checked.kv_rule, checked.exits, checked.word) == ("single", True, word)
    assert checked.warns == (word != "reusable")
    if word == "reusable":
        assert choose("require", stored, **asked).exits
        assert choose("pick", stored, **asked).kv_rule == "single"
    else:
        with pytest.raises(ValueError, match=f"needs a pass of single under hazard.*Got {word}. Run `looplab reuse`"):
            choose("require", stored, **asked)
        full = choose("pick", stored, **asked)
        assert not full.exits and full.warns and full.why.startswith("full depth: no KV rule passes")


def test_unknown_is_said_and_required_is_refused():
    asked = {"weights": "w", "exit_rule": "hazard(0.5)", "kv_rule": "single"}
    unknown = choose("check", [], **asked)
    assert unknown.warns and unknown.exits and unknown.word == "unknown" and "looplab reuse" in unknown.why
    with pytest.raises(ValueError, match="Got unknown"):
        choose("require", [], **asked)
    said = choose("pick", [], **asked).why
    assert said.startswith("full depth: nothing was measured under hazard(0.5)") and "--draft-steps" in said


def test_pick_leaves_a_rule_that_passes_but_costs_by_itself():
    dear = dataclasses.replace(verdict("first", kv_bytes=1), rule=interval(0.1))
    stored = [result(dear, verdict("last_exited", kv_bytes=64))]
    asked = {"weights": "w", "exit_rule": "hazard(0.5)", "kv_rule": "last_exited"}
    assert choose("pick", stored, **asked).kv_rule == "last_exited"
    assert not choose("pick", [result(dear)], **asked).exits


def test_pick_takes_the_cheapest_pass_and_a_delay_only_without_one():
    asked = {"weights": "w", "exit_rule": "hazard(0.5)", "kv_rule": "single"}
    late = verdict("single", 1, mean_depth=2.5)
    stored = [result(verdict(word="not reusable"), late, verdict("last_exited", kv_bytes=256), verdict("first"))]
    assert choose("pick", stored, **asked).kv_rule == "first"
    stored = [result(verdict(word="not reusable"), late, verdict("last_exited", kv_bytes=256))]
    assert (choose("pick", stored, **asked).kv_rule, choose("pick", stored, **asked).delay) == ("last_exited", 0)
    stored = [result(verdict(word="not reusable"), late, verdict("first", 2, mean_depth=3.0))]
    picked = choose("pick", stored, **asked)
    assert (picked.kv_rule, picked.delay, picked.word) == ("single", 1, "reusable")
    assert "exit_delay=1" in picked.why


def test_sentences():
    undecided = result(verdict(word="undecided", needed=300))
    assert "About 300 windows would decide it." in sentence(undecided, "single")
    assert "too near the limit" in sentence(result(verdict(word="undecided")), "single")
    lost = result(verdict(word="not reusable"), verdict(delay=1, word="not reusable"))
    assert sentence(lost, "single").endswith("No delay passes.")
    assert str(lost).splitlines()[0] == "m under hazard(0.5), 64 windows of 6 + 10 tokens"


def test_a_file_that_is_something_else_is_refused(tmp_path):
    file = tmp_path / "reuse.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="must be JSON.*Run `looplab reuse` again"):
        read_results(tmp_path)
    file.write_text('{"format": "x", "schema": 1}')
    with pytest.raises(ValueError, match="must have format 'looplab-reuse' and schema 1"):
        read_results(file)
    store_result(tmp_path / "good.json", result(verdict()))
    data = json.loads((tmp_path / "good.json").read_bytes())
    del data["results"][0]["weights"]
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="Key 'weights' of .*reuse.json: results is missing"):
        read_results(file)
    assert dataclasses.is_dataclass(read_results(tmp_path / "good.json")[0])
