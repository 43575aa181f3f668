"""Random schedules over the hash model: every text is the one that is written alone, and every count adds up.

The shape of a failure is a seed or a list of operations that hypothesis has made short.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.hash_world import World, draw_request, draw_world, random_schedule
from reference.hash_model import DEPTH_CAUSAL, RULES, Reader, sweep

SEEDS = st.integers(0, 2**32)


class Schedules(RuleBasedStateMachine):
    """Requests come and go, time passes, results are late, pages run out."""

    @initialize(seed=SEEDS)
    def open_world(self, seed):
        self.world = draw_world(random.Random(seed))

    @rule(seed=SEEDS)
    def submit(self, seed):
        self.world.try_submit(**draw_request(random.Random(seed), self.world))

    @precondition(lambda self: self.world.requests)
    @rule(number=st.integers(0, 50))
    def cancel(self, number):
        name = f"r{number % self.world.named}"
        is_open = name in self.world.requests and name not in self.world.over
        assert self.world.scheduler.cancel(name) == is_open

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.world.clock += seconds

    @rule(ticks=st.integers(1, 8))
    def run(self, ticks):
        for _ in range(ticks):
            self.world.tick()

    @rule()
    def empty(self):
        self.world.drain()

    @invariant()
    def nothing_contradicts(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


# Annotations of the engine are checked by its unit tests; here the checks would take most of the time.
pytestmark = pytest.mark.usefixtures("unchecked")

SHORT = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def test_texts_are_those_written_alone_whatever_the_schedule():
    machine = settings(max_examples=50, stateful_step_count=40, phases=[Phase.generate, Phase.shrink], **SHORT)
    Schedules.TestCase.settings = machine
    Schedules.TestCase().runTest()


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
def test_texts_are_those_written_alone_in_five_thousand_examples():
    Schedules.TestCase.settings = settings(max_examples=5000, stateful_step_count=60, **SHORT)
    Schedules.TestCase().runTest()


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_random_schedules_have_no_wrong_token(part):
    for seed in range(part * 200, (part + 1) * 200):
        try:
            random_schedule(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("name", RULES)
def test_a_text_is_the_same_alone_in_a_crowd_and_after_a_preemption(name):
    fixed = {"steps": 4} if name == "depth_indexed" else {"rate": 40}
    world = World(name, pages=9, max_resident=4, free_page_margin=0.0, min_steps=2, prefix_cache=False)
    for number in range(5):
        world.submit([number, 1, 2], limit=24, **fixed)
    world.drain()
    assert world.scheduler.stats().preemptions > 0
    assert set(world.over.values()) == {"finished"}


@pytest.mark.parametrize("name", RULES)
def test_one_sweep_is_token_by_token_under_depth_causal_rules_only(name):
    tokens, depths, differing = [3, 1, 4, 1, 5, 9, 2, 6], [2, 4, 2, 3, 4, 2, 3, 2], 0
    swept = sweep(name, (4,), tokens, depths)
    reader = Reader(name, (4,))
    for position, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
        hidden, _ = reader.piece([token], position, [depth])
        differing += hidden != swept[position]
    assert (differing == 0) == (name in DEPTH_CAUSAL)
