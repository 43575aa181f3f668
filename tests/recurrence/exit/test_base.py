import re
from collections import namedtuple

import pytest
import torch

from contract.zoo import NAMES, tiny
from looplab.recurrence import state as states
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.exit import (
    EXIT_RULES,
    AccelerationExit,
    ArgmaxExit,
    EntropyExit,
    ExitRule,
    FixedExit,
    FullExit,
    HazardExit,
    KLExit,
    LatentExit,
    ReplayExit,
    Seen,
    TrainedExit,
    exit_points,
    exit_rule,
)
from looplab.recurrence.exit.base import readable
from looplab.recurrence.plan import Blocks, DeepSupervision, LayerLoop, ModelLoop, Sequential, TwoLevel
from looplab.recurrence.spec import HaltSpec, StateField
from reference import exits
from tiny import tiny_spec

ROWS, TOKENS, STEPS, WIDTH, SYMBOLS, CELLS = 4, 3, 9, 5, 6, 2
DEPTHS = torch.tensor([[1, 2, 3], [9, 8, 7], [4, 4, 4], [1, 9, 5]])
HAZARD = HaltSpec(layout="hazard", per="token", rule="in words")
RIVAL = HaltSpec(layout="q_halt_continue", per="row", rule="q_halt > q_continue")
ZERO = HaltSpec(layout="q_halt_continue", per="row", rule="q_halt > 0")
CASES = [
    (FullExit(), None, HAZARD),
    (FullExit(min_steps=3), None, HAZARD),
    (FixedExit(num_steps=1), 1, HAZARD),
    (FixedExit(num_steps=7), 7, HAZARD),
    *[(HazardExit(threshold=q), q, HAZARD) for q in (0.2, 0.5, 0.9, 1.0)],
    (HazardExit(threshold=0.2, min_steps=3), 0.2, HAZARD),
    *[(LatentExit(threshold=tau), tau, HAZARD) for tau in (0.3, 0.05, 1e-9, 5.0)],
    *[(AccelerationExit(threshold=tau), tau, HAZARD) for tau in (0.5, 0.05, 100.0)],
    (AccelerationExit(threshold=100.0, min_steps=6), 100.0, HAZARD),
    *[(KLExit(threshold=tau), tau, HAZARD) for tau in (0.1, 0.005, 10.0)],
    *[(EntropyExit(threshold=tau), tau, HAZARD) for tau in (0.1, 0.005, 10.0)],
    *[(ArgmaxExit(times=n), n, HAZARD) for n in (2, 3, 5)],
    (ReplayExit(depths=DEPTHS), DEPTHS.tolist(), HAZARD),
    (ReplayExit(depths=DEPTHS, min_steps=3), DEPTHS.tolist(), HAZARD),
    (TrainedExit(), 1, RIVAL),
    (TrainedExit(), 0, ZERO),
]


def spec_of(halt, **more):
    shape = {"cells": CELLS, "vocab": (CELLS * SYMBOLS, CELLS * SYMBOLS), "halt": halt}
    return tiny_spec(ModelLoop(num_steps=STEPS), 1, WIDTH, **{**shape, **more})


def histories(halt, seed=0):
    """States s_0 .. s_T that settle at their own speed, and the readout and score after each of T steps."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    goal, away = random(ROWS, TOKENS, WIDTH), random(ROWS, TOKENS, WIDTH)
    decay = 0.2 + 0.75 * torch.rand(ROWS, TOKENS, 1, generator=draw, dtype=torch.float64)
    seen = [goal + decay**t * away + 0.02 * decay**t * random(ROWS, TOKENS, WIDTH) for t in range(STEPS + 1)]
    head = random(WIDTH, CELLS * SYMBOLS)
    logits = [(state @ head).unflatten(-1, (CELLS, SYMBOLS)) for state in seen[1:]]
    shape = (ROWS, TOKENS) if halt is HAZARD else (ROWS, 2)
    return seen, logits, [random(*shape) - 0.5 for _ in range(STEPS)]


def by_the_twin(rule, number, halt, row, token):
    found, logits, scores = histories(halt)
    per_row = halt is not HAZARD
    return exits.step(
        rule.name,
        number[row][token] if isinstance(number, list) else number,
        [s[row, token].tolist() for s in found],
        [at[row, token].tolist() for at in logits],
        [at[row].tolist() if per_row else float(at[row, token]) for at in scores],
        max_steps=STEPS,
        min_steps=rule.min_steps,
    )


def decided(rule, halt, late):
    """Steps of all tokens; row r starts `late[r]` calls later than row 0, and its memory joins the others' then."""
    found, logits, scores = histories(halt)
    started = rule.start(spec_of(halt), found[0])
    memory, steps = started, torch.zeros(ROWS, TOKENS, dtype=torch.long)
    rows = torch.arange(ROWS)
    for call in range(STEPS + max(late)):
        age = (call + 1 - torch.tensor(late)).clamp(max=STEPS)
        memory = states.where(age == 1, started, memory)
        at = age.clamp(min=1)

        def pick(values, shift, at=at):
            return torch.stack(list(values))[at - shift, rows]

        seen = Seen(at, pick(found, 0), pick(scores, 1), pick(logits, 1))
        stop, memory = rule.stops(memory, seen, STEPS)
        steps = torch.where((steps == 0) & stop & (age >= 1)[:, None], age[:, None], steps)
    return steps


@pytest.mark.parametrize(("rule", "number", "halt"), CASES, ids=lambda x: str(x) if isinstance(x, ExitRule) else "")
def test_every_rule_stops_where_its_formula_says(rule, number, halt):
    twin = [[by_the_twin(rule, number, halt, row, token) for token in range(TOKENS)] for row in range(ROWS)]
    assert decided(rule, halt, late=(0, 0, 0, 0)).tolist() == twin


@pytest.mark.parametrize(("rule", "number", "halt"), CASES, ids=lambda x: str(x) if isinstance(x, ExitRule) else "")
def test_rows_of_different_ages_share_a_call(rule, number, halt):
    together = decided(rule, halt, late=(0, 0, 0, 0))
    assert torch.equal(decided(rule, halt, late=(0, 3, 1, 5)), together)


def test_the_cases_cover_every_rule_and_both_ends():
    assert {rule.name for rule, _, _ in CASES} == set(EXIT_RULES) == set(exits.RULES)
    for name in ("hazard", "latent", "acceleration", "kl", "entropy", "argmax", "trained"):
        found = torch.cat([decided(rule, halt, (0, 0, 0, 0)).flatten() for rule, _, halt in CASES if rule.name == name])
        assert len(found.unique()) >= 3, f"the cases of {name} stop at {found.unique().tolist()} only"


@pytest.mark.parametrize(("rule", "number", "halt"), CASES, ids=lambda x: str(x) if isinstance(x, ExitRule) else "")
def test_a_memory_is_tensors_with_the_row_first(rule, number, halt):
    found, _, _ = histories(halt)
    memory = rule.start(spec_of(halt), found[0])
    assert all(leaf.shape[0] == ROWS for leaf in states.leaves(memory))
    assert type(memory)._fields is not None


@pytest.mark.parametrize(
    ("name", "threshold", "rule", "text"),
    [
        ("full", None, FullExit(), "full"),
        ("fixed", 3.0, FixedExit(num_steps=3), "fixed(3)"),
        ("hazard", 0.5, HazardExit(threshold=0.5), "hazard(0.5)"),
        ("hazard", 1, HazardExit(threshold=1.0), "hazard(1)"),
        ("latent", 0.03, LatentExit(threshold=0.03), "latent(0.03)"),
        ("acceleration", 1e-4, AccelerationExit(threshold=1e-4), "acceleration(0.0001)"),
        ("kl", 5e-4, KLExit(threshold=5e-4), "kl(0.0005)"),
        ("entropy", 0.1, EntropyExit(threshold=0.1), "entropy(0.1)"),
        ("argmax", 5, ArgmaxExit(times=5), "argmax(5)"),
        ("trained", None, TrainedExit(), "trained"),
    ],
)
def test_a_rule_has_a_name_for_the_command_line(name, threshold, rule, text):
    assert exit_rule(name, threshold) == rule
    assert str(rule) == text and rule.name == name


def test_min_steps_is_part_of_the_name():
    assert str(exit_rule("hazard", 0.5, min_steps=2)) == "hazard(0.5, min_steps=2)"
    assert str(FullExit(min_steps=2)) == "full(min_steps=2)"
    assert str(ReplayExit(depths=DEPTHS)) == "replay(4x3)"


@pytest.mark.parametrize(
    ("name", "threshold", "error", "message"),
    [
        ("latant", 0.1, KeyError, "Unknown exit rule 'latant'. Did you mean 'latent'? Known: acceleration, argmax,"),
        ("full", 0.5, ValueError, "exit rule full takes no threshold. Got 0.5. Leave it out"),
        ("trained", 1, ValueError, "exit rule trained takes no threshold. Got 1. Leave it out"),
        ("hazard", None, ValueError, "exit rule hazard needs a threshold, which sets HazardExit.threshold. Got none."),
        ("argmax", None, ValueError, "exit rule argmax needs a threshold, which sets ArgmaxExit.times. Got none."),
        ("replay", 3, ValueError, "exit rule replay needs depths, which is no single number. Build ReplayExit"),
        ("hazard", 1.5, ValueError, "HazardExit.threshold must be in (0, 1]. Got 1.5."),
        ("hazard", 0.0, ValueError, "HazardExit.threshold must be in (0, 1]. Got 0.0."),
        ("hazard", float("nan"), ValueError, "HazardExit.threshold must be in (0, 1]. Got nan."),
        ("latent", 0.0, ValueError, "LatentExit.threshold must be a finite number above 0. Got 0.0."),
        ("latent", float("inf"), ValueError, "LatentExit.threshold must be a finite number above 0. Got inf."),
        ("acceleration", -1.0, ValueError, "AccelerationExit.threshold must be a finite number above 0. Got -1.0."),
        ("kl", float("nan"), ValueError, "KLExit.threshold must be a finite number above 0. Got nan."),
        ("entropy", 0.0, ValueError, "EntropyExit.threshold must be a finite number above 0. Got 0.0."),
        ("argmax", 1, ValueError, "ArgmaxExit.times must be an int of at least 2. Got 1."),
        ("argmax", 2.5, ValueError, "ArgmaxExit.times must be an int of at least 2. Got 2.5."),
        ("fixed", 0, ValueError, "FixedExit.num_steps must be an int of at least 1. Got 0."),
        ("fixed", float("inf"), ValueError, "FixedExit.num_steps must be an int of at least 1. Got inf."),
    ],
)
def test_bad_rules_are_refused(unchecked, name, threshold, error, message):
    with pytest.raises(error, match=re.escape(message)):
        exit_rule(name, threshold)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5], ids=repr)
def test_min_steps_is_a_count(unchecked, steps):
    with pytest.raises(ValueError, match=re.escape(f"FullExit.min_steps must be an int of at least 1. Got {steps!r}")):
        FullExit(min_steps=steps)


@pytest.mark.parametrize("rule", [HazardExit(threshold=0.5), TrainedExit()], ids=str)
def test_a_rule_on_a_score_refuses_a_model_without_one_and_lists_the_others(rule):
    free = ", ".join(name for name in EXIT_RULES if name not in ("hazard", "trained"))
    with pytest.raises(ValueError, match=f"^tiny has no trained gate; exit rules available: {free}$"):
        rule.check(spec_of(None))


def test_a_rule_refuses_the_score_of_another_layout():
    with pytest.raises(ValueError, match="gives the exit probability of this very step. The score of tiny is q_halt"):
        HazardExit(threshold=0.5).check(spec_of(RIVAL))
    ahead = HaltSpec(layout="hazard", per="token", rule="in words", horizon=1)
    with pytest.raises(ValueError, match="score of tiny is hazard with horizon 1"):
        HazardExit(threshold=0.5).check(spec_of(ahead))
    with pytest.raises(ValueError, match=r"The score of tiny is hazard, and its rule is: in words. Other exit rules: "):
        TrainedExit().check(spec_of(HAZARD))


@pytest.mark.parametrize(
    ("order", "blocks", "steps", "points"),
    [
        (ModelLoop(num_steps=3), 1, None, {1: 1, 2: 2, 3: 3}),
        (ModelLoop(num_steps=3), 1, 5, {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
        (ModelLoop(num_steps=3), 1, (2,), {1: 1, 2: 2}),
        (TwoLevel(h=2, l=3), 2, None, {1: 4, 2: 8}),
        (TwoLevel(h=2, l=3), 2, 3, {1: 4, 2: 8, 3: 12}),
        (TwoLevel(h=2, l=3), 2, (3, 1), {1: 2, 2: 4, 3: 6}),
        (DeepSupervision(steps=3, h=2, l=2), 2, None, {1: 6, 2: 12, 3: 18}),
        (Blocks(num_steps=(3, 3)), 2, None, {3: 6}),
        (LayerLoop(num_steps=2), 3, 4, {4: 12}),
        (LayerLoop(num_steps=2), 1, 3, {1: 1, 2: 2, 3: 3}),
        (Sequential(), 4, None, {1: 4}),
    ],
    ids=str,
)
def test_tokens_stop_where_a_shorter_run_ends(order, blocks, steps, points):
    assert exit_points(tiny_spec(order, blocks, WIDTH), steps) == points


def test_a_model_of_step_sizes_has_only_the_end():
    assert exit_points(tiny("tiny-loopformer").spec) == {8: 8}


@pytest.mark.parametrize("name", NAMES)
def test_the_readout_stands_at_every_exit_point(name):
    """The block before an exit point writes what the readout reads, and trained marks are exit points."""
    spec = tiny(name).spec
    points = exit_points(spec)
    assert all(spec.plan()[end - 1].block in spec.writes_readout for end in points.values())
    assert set(spec.marks()) <= set(points.values())


@pytest.mark.parametrize("order", [Blocks(num_steps=(3, 3)), LayerLoop(num_steps=2)], ids=str)
def test_blocks_in_turn_refuse_to_stop_early(order):
    spec = tiny_spec(order, 2, WIDTH, halt=HAZARD)
    for rule in (LatentExit(threshold=0.1), HazardExit(threshold=0.5), KLExit(threshold=0.1)):
        with pytest.raises(
            ValueError, match=re.escape(f"exit: {rule} may stop early, but no shorter run of tiny lies")
        ):
            rule.check(spec)
    for rule in (FullExit(), FixedExit(num_steps=3), HazardExit(threshold=1.0)):
        rule.check(spec)


def test_every_gateless_rule_passes_a_plain_loop():
    spec = spec_of(None, trained_depth=FixedDepth(num_steps=STEPS))
    for rule, _, _ in CASES:
        if not rule.reads_score:
            rule.check(spec)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            LatentExit(threshold=0.1, min_steps=4),
            "exit: min_steps of latent(0.1, min_steps=4) must be at most num_steps, 3",
        ),
        (FixedExit(num_steps=4), "exit: fixed(4) must name a step after which tokens can stop: 1, 2, 3. Got 4."),
        (ReplayExit(depths=torch.tensor([[1, 2], [3, 4]])), "at most num_steps, 3. Got 4 at row 1, token 1."),
    ],
    ids=lambda x: "",
)
def test_bounds_that_the_run_cannot_keep_are_refused(rule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rule.fits({1: 1, 2: 2, 3: 3})


def test_steps_of_none_cannot_stop():
    with pytest.raises(ValueError, match="num_steps must be at least 1 where a rule says when to stop. Got 0"):
        exit_points(spec_of(None), 0)


def test_what_the_readout_reads_is_its_fields_without_the_slots_before_the_tokens():
    field = {"width": 2, "prefix": 1}
    parts = {
        "high": StateField(**field),
        "row": StateField(width=2, per="row"),
        "low": StateField(**field, read_by_coda=False),
        "more": StateField(width=2),
    }
    made = namedtuple("Made", parts)(*(torch.arange(6.0).view(1, 3, 2) + 10 * i for i in range(4)))
    found = readable(tiny_spec(ModelLoop(num_steps=2), 1, 2, state=parts), made, 2)
    assert found.tolist() == [[[2, 3, 32, 33], [4, 5, 34, 35]]]
