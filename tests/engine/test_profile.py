"""What an engine says of itself, and what its requests are checked against."""

from dataclasses import replace

import pytest
import torch

from contract.zoo import tiny
from letters import Characters
from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine, gate_hashes
from looplab.engine.gates import Gate, GateFacts
from looplab.engine.profile import served_kv_rule
from looplab.engine.request import DepthParams, RefusedError
from looplab.engine.verdict import ReuseResult, ReuseVerdict, Stratum
from looplab.intervals import Interval


@pytest.fixture(scope="module")
def ouro():
    return tiny("tiny-ouro", dtype=torch.float32)


EARLY = DepthParams(exit_rule="hazard", exit_threshold=0.5, max_steps=4)


def found(word, weights):
    """A stored audit of `EARLY` under last_exited."""
    by_depth = (Stratum(name="2", tokens=30, reuse=0.0), Stratum(name="3", tokens=10, reuse=0.0))
    point = Interval(estimate=0.0, low=0.0, high=0.0, plain_low=0.0, plain_high=0.0, level=0.95)
    verdict = ReuseVerdict(
        kv_rule="last_exited", delay=0, word=word, rule=point, read=point, reuse=point, total=point, kl=point,
        past=point, flips=point, mean_depth=2.25, kv_bytes=64,
        by_depth=by_depth,
    )  # fmt: skip
    return ReuseResult(
        model="m", weights=weights, exit_rule="hazard(0.5)", steps=4, prompt=8, output=8, windows=8, text="t",
        text_hash="h", seed=0, replicates=10, verdicts=(verdict,),
    )  # fmt: skip


def profile(model, **options):
    config = EngineConfig(**({"launch_rows": 2, "num_pages": 16, "min_coda_rows": 1} | options))
    return Engine(model, Characters(), config).profile


def test_the_kv_rule_that_is_served_and_why(ouro):
    assert served_kv_rule(ouro.spec, "single") == ("single", "as asked")
    kept, why = served_kv_rule(ouro.spec, None)
    assert kept == "last_exited" and "depth_indexed" in why


def test_depth_indexed_forbids_exits(ouro):
    facts = profile(ouro, kv_rule="depth_indexed").check_facts()
    assert facts.exits_refused == "depth_indexed forbids exits; use last_exited"
    assert profile(ouro).check_facts().exits_refused == ""


def test_a_required_pass_refuses_exits_without_one(ouro):
    needs = profile(ouro, reuse="require")
    needs.check_reuse(DepthParams(num_steps=2))
    with pytest.raises(RefusedError, match="unknown, and this server requires a pass; run looplab reuse"):
        needs.check_reuse(EARLY)
    replace(needs, verdicts=(found("reusable", needs.weights),)).check_reuse(EARLY)
    with pytest.raises(RefusedError, match="is not reusable, and"):
        replace(needs, verdicts=(found("not reusable", needs.weights),)).check_reuse(EARLY)


def test_clients_are_warned_of_depths_beyond_training_and_of_unknown_reuse(ouro):
    mine = profile(ouro)
    assert mine.warnings(DepthParams(num_steps=4)) == ()
    assert "unknown" in mine.warnings(EARLY)[0]
    passed = replace(mine, verdicts=(found("reusable", mine.weights),))
    assert passed.warnings(EARLY) == () and passed.verdict(EARLY) == "reusable"
    assert passed.verdict(replace(EARLY, exit_threshold=0.4)) == "unknown"
    assert passed.verdict(replace(EARLY, exit_delay=1)) == "unknown"
    assert passed.verdict(DepthParams()) == "full depth"
    assert mine.warnings(DepthParams(num_steps=9)) == ("9 steps are more than the 4 of training",)


def test_depths_are_those_that_were_measured_or_spread_evenly(ouro):
    mine = profile(ouro, exit_rule="hazard", exit_threshold=0.5)
    law, words = mine.depth_law()
    assert law.chances == (0.25,) * 4 and words == "if depths were spread evenly over 1..4"
    law, words = replace(mine, verdicts=(found("reusable", mine.weights),)).depth_law()
    assert law.chances == (0.0, 0.75, 0.25, 0.0) and words.endswith("measured, mean 2.25")
    full = replace(mine, config=replace(mine.config, exit_rule=None), verdicts=(found("reusable", mine.weights),))
    assert full.depth_law()[0].chances == (0.25,) * 4


def test_a_fingerprint_names_the_weights_of_gates(ouro):
    made = [
        Gate(GateFacts(gate="lookahead", model="m", weights="w", steps=4, width=2, teacher="hazard"), module)
        for module in (torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    ]
    (one,), (other,) = (gate_hashes({"lookahead": gate.rule(0.5), "hazard": None}) for gate in made)
    assert one[0] == other[0] == "lookahead" and one[1] != other[1]


def test_roots_and_fingerprints_follow_what_entries_depend_on(ouro):
    mine = profile(ouro)
    for other in (replace(mine, weights="x"), replace(mine, kv_rule="single"), replace(mine, numerics="exact")):
        assert other.root() != mine.root()
    for other in (
        replace(mine, weights="x"),
        replace(mine, gates=(("lookahead", "x"),)),
        replace(mine, config=replace(mine.config, exit_delay=1)),
    ):
        assert other.fingerprint() != mine.fingerprint()
    sizes = replace(mine.config, num_pages=99, min_coda_rows=2, launch_rows=3, max_resident=7)
    assert replace(mine, config=sizes).fingerprint() == mine.fingerprint(), "a restart finds other sizes"
    assert mine.request_root(3) == b""
    drawn = replace(mine, noise="request")
    assert drawn.request_root(3) != drawn.request_root(4) != b""


@pytest.mark.parametrize(("name", "most"), [("tiny-ouro", 4), ("tiny-blocks", 8), ("tiny-layer-loop", 6)])
def test_steps_of_a_token_cost_what_its_blocks_cost(name, most):
    mine = profile(tiny(name, dtype=torch.float32))
    assert mine.most_steps(DepthParams()) == most
    assert mine.step_work * most == sum(
        work * count for work, count in zip(mine.work.blocks, mine.spec.plan().iterations().values(), strict=True)
    )
